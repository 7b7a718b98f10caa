#include "gpu/host_device.h"

#include <cstring>
#include <vector>

#include "protocol/os/check.h"

namespace forebay::gpu {
namespace {

class HostEvent final : public Event {
 public:
  absl::StatusOr<bool> Done() const override { return true; }
};

class HostBytes final : public DeviceMemory {
 public:
  explicit HostBytes(size_t size_bytes) : memory_(size_bytes) {}
  std::span<std::byte> bytes() const override { return memory_; }

 private:
  mutable std::vector<std::byte> memory_;
};

class HostStream final : public Stream {
 public:
  absl::Status Copy(std::span<std::byte> to, std::span<const std::byte> from) override {
    FOREBAY_CHECK(to.size() == from.size());
    if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Event>> Record() override { return std::make_unique<HostEvent>(); }

  absl::Status WaitFor(const Event& event) override {
    // Work of this device has ended when the call that began it returns
    return event.Done().status();
  }

  absl::Status Synchronize() override { return absl::OkStatus(); }

  uintptr_t handle() const override { return 0; }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(size_t size_bytes) override {
    return std::make_unique<HostBytes>(size_bytes);
  }
};

// Every mapping of the process is within the processor's reach.
class HostMemory final : public HostRegistration {};

}  // namespace

absl::StatusOr<std::unique_ptr<Stream>> HostDevice::MakeStream() {
  return std::make_unique<HostStream>();
}

absl::StatusOr<std::unique_ptr<Stream>> HostDevice::BorrowStream(uintptr_t) {
  return std::make_unique<HostStream>();
}

absl::StatusOr<std::unique_ptr<HostRegistration>> HostDevice::Register(std::span<const std::byte>,
                                                                       HostAccess) {
  return std::make_unique<HostMemory>();
}

}  // namespace forebay::gpu
