// SPDX-License-Identifier: Apache-2.0
// Collectives of ranks on NVIDIA GPUs, through the NCCL that is found at run time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "gpu/communicator.h"
#include "gpu/cuda_device.h"

namespace forebay::gpu {

// Collectives through NCCL. A thread watches collectives in flight. It aborts all of them if one exceeds the
// time limit, if NCCL reports an error, or if the check of WatchWith() fails. Work that waits on their streams
// then continues with undefined bytes, and Check() returns the error.
//
// Streams belong to the device that was passed to Create().
class NcclCommunicator final : public Communicator {
 public:
  struct Options {
    uint32_t rank = 0;
    uint32_t size = 1;
    // Time limit of the communicator's start, and of each collective.
    std::chrono::milliseconds time_limit = std::chrono::minutes(10);
    std::string soname = "libnccl.so.2";  // name for dlopen(3)
  };

  // Creates the communicator. All ranks call it: rank 0's id of the communicator travels through `exchange`.
  //
  // Errors  E_RANK         the rank is not below the size, or the device is null.
  //         E_UNSUPPORTED  no NCCL, or an older one than 2.14.
  //         E_RANK_LOST    a rank did not come within the time limit.
  //         E_DEVICE       an error of NCCL. Errors of `exchange`.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Create(
      const Options& options, std::shared_ptr<CudaDevice> device, const Exchange& exchange);
  ~NcclCommunicator() override;

  std::string_view name() const override { return "nccl"; }
  std::string_view device() const override;
  uint32_t rank() const override;
  uint32_t size() const override;
  absl::Status AllGather(Stream& stream, std::span<std::byte> to,
                         std::span<const std::byte> from) override;
  absl::Status ReduceScatter(Stream& stream, std::span<std::byte> to,
                             std::span<const std::byte> from, protocol::DType dtype,
                             Reduction reduction) override;
  absl::Status AllReduce(Stream& stream, std::span<std::byte> bytes, protocol::DType dtype,
                         Reduction reduction) override;
  absl::Status Group(const std::function<absl::Status()>& calls) override;
  absl::Status Check() override;
  void Abort() override;
  void WatchWith(std::function<absl::Status()> check) override;

 private:
  class State;
  explicit NcclCommunicator(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::gpu
