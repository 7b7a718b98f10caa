// SPDX-License-Identifier: Apache-2.0
// Collectives of CPU ranks of one node, over memory that they share.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "gpu/communicator.h"
#include "protocol/os/clock.h"

namespace forebay::gpu {

// Sums in float32 in the order of ranks and rounds once, to nearest, ties to even: the same bits on every rank and in every
// run. A call returns when its collective has ended, on any stream.
//
// Source  futex(2), memfd_create(2); the memory is opened through /proc/PID/fd, by ranks of one user that
//         see each other's processes.
class HostCommunicator final : public Communicator {
 public:
  static constexpr uint32_t kRanksMax = 64;
  static constexpr size_t kSlotBytes = size_t{1} << 20;  // size of a slot; each rank has two

  struct Options {
    uint32_t rank = 0;
    uint32_t size = 1;
    std::chrono::milliseconds time_limit = std::chrono::minutes(10);  // limit of each collective
  };

  // A call of all ranks.
  //
  // Errors  E_RANK         the rank is not below the size.
  //         E_LIMIT        more ranks than kRanksMax, no memory, no descriptor.
  //         E_UNSUPPORTED  a rank cannot open another's memory.
  //         Those of `exchange`.
  static absl::StatusOr<std::unique_ptr<HostCommunicator>> Create(const Options& options,
                                                                  const Exchange& exchange);
  ~HostCommunicator() override;

  std::string_view name() const override { return "host"; }
  std::string_view device() const override { return "host"; }
  uint32_t rank() const override { return options_.rank; }
  uint32_t size() const override { return options_.size; }
  absl::Status AllGather(Stream& stream, std::span<std::byte> to,
                         std::span<const std::byte> from) override;
  absl::Status ReduceScatter(Stream& stream, std::span<std::byte> to,
                             std::span<const std::byte> from, protocol::DType dtype,
                             Reduction reduction) override;
  absl::Status AllReduce(Stream& stream, std::span<std::byte> bytes, protocol::DType dtype,
                         Reduction reduction) override;
  absl::Status Group(const std::function<absl::Status()>& calls) override { return calls(); }
  absl::Status Check() override;
  void Abort() override;
  void WatchWith(std::function<absl::Status()> check) override { check_ = std::move(check); }

 private:
  struct Shared;
  struct Operation;

  HostCommunicator(const Options& options, Shared* shared, uint64_t mapped_bytes)
      : options_(options), shared_(shared), mapped_bytes_(mapped_bytes) {}

  // The slot that a rank fills for the next barrier.
  std::span<std::byte> Slot(uint32_t rank) const;
  // Waits until all ranks have come to this barrier. Ranks may overwrite what all ranks have read before it.
  //
  // Errors  E_RANGE  another rank has called another operation.
  absl::Status Barrier(const Operation& operation);
  absl::Status CheckOthers(const Operation& operation);
  absl::Status WaitFor(uint32_t rank, uint64_t barriers, const protocol::Deadline& deadline);
  absl::Status Fail(absl::Status status);

  const Options options_;
  Shared* shared_;
  const uint64_t mapped_bytes_;
  uint64_t barriers_ = 0;
  std::function<absl::Status()> check_;
  absl::Status failed_;
};

}  // namespace forebay::gpu
