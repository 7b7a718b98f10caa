// SPDX-License-Identifier: Apache-2.0
#include "gpu/host_device.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/internal/free_events.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/clock.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"

namespace forebay::gpu {
namespace {

class HostEvent final : public Event {
 public:
  absl::StatusOr<bool> Done() const override { return true; }
};

class HostTimedEvent final : public TimedEvent {
 public:
  absl::StatusOr<std::optional<uint64_t>> EndedNs() const override { return ended_ns_; }

  void End() { ended_ns_ = protocol::MonotonicNs(); }

 private:
  std::atomic<uint64_t> ended_ns_ = 0;
};

}  // namespace

// Freed memory is allocated again. Free memory and memory in use are together never more than was in use at
// once, or than is needed.
class HostDevice::Memory final : public MemorySource {
 public:
  std::span<std::byte> Take(size_t size_bytes) {
    const protocol::MutexLock lock(mutex_);
    // The smallest that holds it without much waste.
    const auto fits = [&](const Block& block) {
      return block.size() >= size_bytes && block.size() / 2 <= size_bytes;
    };
    size_t best = free_.size();
    for (size_t i = 0; i < free_.size(); ++i) {
      if (fits(free_[i]) && (best == free_.size() || free_[i].size() < free_[best].size()))
        best = i;
    }
    if (best < free_.size()) {
      std::swap(free_[best], free_.back());
      used_.push_back(std::move(free_.back()));
      free_.pop_back();
      free_bytes_ -= used_.back().size();
    } else {
      used_.emplace_back(std::max<size_t>(size_bytes, 1));
    }
    used_bytes_ += used_.back().size();
    used_bytes_max_ = std::max(used_bytes_max_, used_bytes_);
    while (free_bytes_ > used_bytes_max_ - used_bytes_) {
      free_bytes_ -= free_.back().size();
      free_.pop_back();
    }
    return std::span(used_.back()).first(size_bytes);
  }

  void Free(std::span<std::byte> bytes) override {
    const protocol::MutexLock lock(mutex_);
    const auto block =
        std::ranges::find(used_, bytes.data(), [](Block& one) { return one.data(); });
    FOREBAY_CHECK(block != used_.end());
    used_bytes_ -= block->size();
    free_bytes_ += block->size();
    std::swap(*block, used_.back());
    free_.push_back(std::move(used_.back()));
    used_.pop_back();
  }

 private:
  using Block = std::vector<std::byte>;

  protocol::Mutex mutex_;
  std::vector<Block> used_ ABSL_GUARDED_BY(mutex_);
  std::vector<Block> free_ ABSL_GUARDED_BY(mutex_);
  uint64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t free_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t used_bytes_max_ ABSL_GUARDED_BY(mutex_) = 0;
};

class HostDevice::HostStream final : public Stream {
 public:
  explicit HostStream(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}

  absl::Status Copy(std::span<std::byte> to, std::span<const std::byte> from) override {
    RETURN_IF_ERROR(CheckCopy(to, from));
    if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const Event>> Record() override {
    static const auto ended = std::make_shared<const HostEvent>();
    return ended;
  }

  absl::StatusOr<std::shared_ptr<const TimedEvent>> RecordTimed() override {
    std::shared_ptr<HostTimedEvent> event = timed_.Find();
    if (event == nullptr) timed_.Add(event = std::make_shared<HostTimedEvent>());
    event->End();
    return event;
  }

  absl::Status WaitFor(const Event& event) override {
    // Work of this device has ended when the call that began it returns
    return event.Done().status();
  }

  absl::Status Synchronize() override { return absl::OkStatus(); }

  uintptr_t handle() const override { return 0; }

  absl::StatusOr<DeviceMemory> Allocate(size_t size_bytes) override {
    try {
      return DeviceMemory(memory_, memory_->Take(size_bytes));
    } catch (const std::exception&) {  // std::bad_alloc, std::length_error
      return protocol::MakeError(protocol::ErrorId::kDeviceMemory,
                                 absl::StrCat("the host has no ", size_bytes, " bytes"));
    }
  }

 private:
  const std::shared_ptr<Memory> memory_;
  internal::FreeEvents<HostTimedEvent> timed_;
};

HostDevice::HostDevice() : memory_(std::make_shared<Memory>()) {}

namespace {

// Every mapping of the process is within the processor's reach.
class HostMemory final : public HostRegistration {};

}  // namespace

absl::Status CheckCopy(std::span<std::byte> to, std::span<const std::byte> from) {
  if (to.size() == from.size()) return absl::OkStatus();
  return protocol::MakeError(
      protocol::ErrorId::kRange,
      absl::StrCat("a copy of ", from.size(), " bytes to a place of ", to.size()));
}

absl::StatusOr<std::unique_ptr<Stream>> HostDevice::MakeStream() {
  return std::make_unique<HostStream>(memory_);
}

absl::StatusOr<std::unique_ptr<Stream>> HostDevice::BorrowStream(uintptr_t) {
  return std::make_unique<HostStream>(memory_);
}

absl::StatusOr<std::unique_ptr<HostRegistration>> HostDevice::Register(std::span<const std::byte>,
                                                                       HostAccess) {
  return std::make_unique<HostMemory>();
}

}  // namespace forebay::gpu
