// SPDX-License-Identifier: Apache-2.0
// An NVIDIA GPU, through the driver that is found at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device.h"

namespace forebay::gpu {

// Works in the device's primary context, which it shares with CUDA's runtime (and so with PyTorch), and
// leaves each calling thread's current device as it was. Its streams are not synchronised with the default
// stream.
class CudaDevice final : public Device {
 public:
  struct Options {
    int ordinal = 0;                           // among those that CUDA_VISIBLE_DEVICES leaves
    std::string soname = "libcuda.so.1";       // name for dlopen(3)
    uint64_t piece_bytes = uint64_t{1} << 30;  // most bytes that one call registers; whole pages
  };

  // Errors  E_OPTION       piece_bytes.
  //         E_UNSUPPORTED  no driver, an older one than CUDA 12.0's, or no such device.
  //         E_DEVICE       the device does not start.
  static absl::StatusOr<std::shared_ptr<CudaDevice>> Create(const Options& options);

  std::string_view name() const override;
  absl::StatusOr<std::unique_ptr<Stream>> MakeStream() override;
  absl::StatusOr<std::unique_ptr<Stream>> BorrowStream(uintptr_t handle) override;
  absl::StatusOr<std::optional<uint64_t>> FreeBytes() override;
  absl::Status CheckReach(std::span<const std::byte> bytes) const override;
  bool registers_read_only() const override;
  // Source  cuMemHostRegister of the CUDA driver API; CU_MEMHOSTREGISTER_READ_ONLY.
  absl::StatusOr<std::unique_ptr<HostRegistration>> Register(std::span<const std::byte> bytes,
                                                             HostAccess access) override;

  // Calls `call` with the device as the thread's current one.
  absl::Status WithContext(absl::FunctionRef<absl::Status()> call) const;

  std::string_view model() const;  // "NVIDIA H200"
  uint64_t memory_bytes() const;   // total memory of the device
  int driver_version() const;      // 12040: CUDA 12.4

 private:
  class Context;
  class Clock;
  class CudaEvent;
  class CudaStream;
  class CudaTimedEvent;
  class CudaRegistration;
  class StreamHandle;

  explicit CudaDevice(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  // Events, streams, memory and registrations share it, and may outlive the device.
  std::shared_ptr<Context> context_;
};

}  // namespace forebay::gpu
