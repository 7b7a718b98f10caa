// A device on which nothing happens before it must: work runs when its stream is synchronised or dies,
// or when an event behind it has been looked at a few times. Copies from or to memory that it does not
// know are done at once, as CUDA does those of pageable memory. It can leave one wait out, and refuse
// registrations.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device.h"

namespace forebay::testing {

// Threads  Any.
class FakeDevice final : public gpu::Device {
 public:
  static constexpr std::byte kPoison{0xA5};

  FakeDevice();
  ~FakeDevice() override;

  std::string_view name() const override { return "fake"; }
  absl::StatusOr<std::unique_ptr<gpu::Stream>> MakeStream() override;
  absl::StatusOr<std::unique_ptr<gpu::HostRegistration>> Register(std::span<const std::byte> bytes,
                                                                  gpu::HostAccess access) override;

  // Full of poison at first. Once the last reference is gone it is another's: copies from it bring
  // poison, copies to it nothing.
  using Memory = std::shared_ptr<const std::span<std::byte>>;
  Memory Allocate(size_t size_bytes);

  // Events recorded, waits for one and synchronisations are counted. The one of this number does
  // nothing: the event is done at once, the stream does not wait.
  void LeaveOut(size_t wait);
  size_t waits() const;
  void set_counts_waits(bool counts);
  void set_looks_until_done(int looks);  // at an event
  // Called before work of a stream runs because somebody has waited for it.
  void set_before_work(std::function<void()> before_work);

  struct Registration {
    const std::byte* begin;
    size_t size_bytes;
    gpu::HostAccess access;
  };
  bool refuse_registrations = false;
  bool is_late_with_pageable = false;  // too
  std::vector<Registration> registrations;
  std::shared_ptr<int> live_registrations = std::make_shared<int>(0);

 private:
  class Allocated;
  class FakeRegistration;
  class FakeEvent;
  class FakeStream;
  struct Shared;

  std::shared_ptr<Shared> shared_;
};

}  // namespace forebay::testing
