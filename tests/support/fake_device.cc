#include "tests/support/fake_device.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "protocol/error.h"
#include "protocol/os/mutex.h"

namespace forebay::testing {
namespace {

struct StreamState;

struct EventState {
  std::weak_ptr<StreamState> stream;
  bool done = false;
  bool is_left_out = false;
  int looks = 0;
};

struct Work {
  std::span<std::byte> to;
  std::span<const std::byte> from;
  std::shared_ptr<EventState> record;
  std::shared_ptr<EventState> wait;
};

// By its begin; memory that is freed stays mapped.
struct Allocation {
  std::vector<std::byte> bytes;
  bool is_freed = false;
};
using Allocations = std::map<const std::byte*, Allocation, std::less<>>;

struct StreamState {
  Allocations& allocations;
  std::deque<Work> work;
};

void RunUntil(const std::shared_ptr<EventState>& event);

bool IsFreed(const Allocations& allocations, const std::byte* at) {
  const auto after = allocations.upper_bound(at);
  if (after == allocations.begin()) return false;
  const Allocation& allocation = std::prev(after)->second;
  return allocation.is_freed && at < allocation.bytes.data() + allocation.bytes.size();
}

void RunFirst(StreamState& stream) {
  const Work work = std::move(stream.work.front());
  stream.work.pop_front();
  if (work.wait != nullptr) RunUntil(work.wait);
  if (work.record != nullptr) work.record->done = true;
  if (work.from.empty() || IsFreed(stream.allocations, work.to.data())) return;
  if (IsFreed(stream.allocations, work.from.data())) {
    std::ranges::fill(work.to, FakeDevice::kPoison);
  } else {
    std::memcpy(work.to.data(), work.from.data(), work.from.size());
  }
}

void RunUntil(const std::shared_ptr<EventState>& event) {
  const std::shared_ptr<StreamState> stream = event->stream.lock();
  while (!event->done && stream != nullptr && !stream->work.empty()) RunFirst(*stream);
}

}  // namespace

struct FakeDevice::Shared {
  // Whether the wait that is counted now is left out. Under `mutex`.
  bool Knows(const std::byte* at) const {
    const auto holds = [at](std::span<const std::byte> bytes) {
      return std::less_equal<>()(bytes.data(), at) &&
             std::less<>()(at, bytes.data() + bytes.size());
    };
    return std::ranges::any_of(registered, holds) ||
           std::ranges::any_of(allocations,
                               [&](const auto& one) { return holds(one.second.bytes); });
  }
  bool IsLeftOut() { return counts_waits && waits++ == left_out; }
  void Run(const std::function<void()>& run) {
    if (before_work) before_work();
    const protocol::MutexLock lock(mutex);
    run();
  }

  protocol::Mutex mutex;
  int looks_until_done = 10;
  bool counts_waits = true;
  size_t waits = 0;
  std::optional<size_t> left_out;
  std::function<void()> before_work;
  Allocations allocations;
  std::vector<std::span<const std::byte>> registered;
};

// Marks its bytes as freed when it dies.
class FakeDevice::Allocated {
 public:
  Allocated(std::shared_ptr<Shared> shared, std::span<std::byte> bytes)
      : shared_(std::move(shared)), bytes_(bytes) {}
  Allocated(const Allocated&) = delete;
  Allocated& operator=(const Allocated&) = delete;
  ~Allocated() {
    const protocol::MutexLock lock(shared_->mutex);
    shared_->allocations.at(bytes_.data()).is_freed = true;
  }

  const std::span<std::byte>& bytes() const { return bytes_; }

 private:
  std::shared_ptr<Shared> shared_;
  std::span<std::byte> bytes_;
};

class FakeDevice::FakeRegistration final : public gpu::HostRegistration {
 public:
  explicit FakeRegistration(std::shared_ptr<int> live) : live_(std::move(live)) { ++*live_; }
  ~FakeRegistration() override { --*live_; }

 private:
  std::shared_ptr<int> live_;
};

class FakeDevice::FakeEvent final : public gpu::Event {
 public:
  FakeEvent(std::shared_ptr<Shared> shared, std::shared_ptr<EventState> state)
      : shared_(std::move(shared)), state_(std::move(state)) {}

  bool Done() const override {
    {
      const protocol::MutexLock lock(shared_->mutex);
      if (state_->done || state_->is_left_out) return true;
      if (++state_->looks < shared_->looks_until_done) return false;
    }
    shared_->Run([this] { RunUntil(state_); });
    return true;
  }
  const std::shared_ptr<EventState>& state() const { return state_; }

 private:
  std::shared_ptr<Shared> shared_;
  std::shared_ptr<EventState> state_;
};

class FakeDevice::FakeStream final : public gpu::Stream {
 public:
  FakeStream(std::shared_ptr<Shared> shared, bool is_late_with_pageable)
      : shared_(std::move(shared)), is_late_with_pageable_(is_late_with_pageable) {}
  ~FakeStream() override { RunAll(); }

  absl::Status Copy(std::span<std::byte> to, std::span<const std::byte> from) override {
    bool is_late = is_late_with_pageable_;
    {
      const protocol::MutexLock lock(shared_->mutex);
      state_->work.push_back({.to = to, .from = from, .record = {}, .wait = {}});
      is_late = is_late || (shared_->Knows(to.data()) && shared_->Knows(from.data()));
    }
    if (!is_late) RunAll();
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<gpu::Event>> Record() override {
    const protocol::MutexLock lock(shared_->mutex);
    auto event = std::make_shared<EventState>();
    event->stream = state_;
    event->is_left_out = shared_->IsLeftOut();
    if (!event->is_left_out)
      state_->work.push_back({.to = {}, .from = {}, .record = event, .wait = {}});
    return std::make_unique<FakeEvent>(shared_, std::move(event));
  }

  absl::Status WaitFor(const gpu::Event& event) override {
    const protocol::MutexLock lock(shared_->mutex);
    const std::shared_ptr<EventState>& other = dynamic_cast<const FakeEvent&>(event).state();
    if (shared_->IsLeftOut() || other->is_left_out) return absl::OkStatus();
    state_->work.push_back({.to = {}, .from = {}, .record = {}, .wait = other});
    return absl::OkStatus();
  }

  absl::Status Synchronize() override {
    {
      const protocol::MutexLock lock(shared_->mutex);
      if (shared_->IsLeftOut()) return absl::OkStatus();
    }
    RunAll();
    return absl::OkStatus();
  }

 private:
  void RunAll() {
    shared_->Run([this] {
      while (!state_->work.empty()) RunFirst(*state_);
    });
  }

  std::shared_ptr<Shared> shared_;
  const bool is_late_with_pageable_;
  std::shared_ptr<StreamState> state_ =
      std::make_shared<StreamState>(StreamState{.allocations = shared_->allocations, .work = {}});
};

FakeDevice::FakeDevice() : shared_(std::make_shared<Shared>()) {}
FakeDevice::~FakeDevice() = default;

absl::StatusOr<std::unique_ptr<gpu::Stream>> FakeDevice::MakeStream() {
  return std::make_unique<FakeStream>(shared_, is_late_with_pageable);
}

absl::StatusOr<std::unique_ptr<gpu::HostRegistration>> FakeDevice::Register(
    std::span<const std::byte> bytes, gpu::HostAccess access) {
  if (refuse_registrations) {
    return protocol::MakeError(protocol::ErrorId::kUnsupported, "the device refuses this memory");
  }
  registrations.push_back({bytes.data(), bytes.size(), access});
  shared_->registered.emplace_back(bytes);
  return std::make_unique<FakeRegistration>(live_registrations);
}

FakeDevice::Memory FakeDevice::Allocate(size_t size_bytes) {
  const protocol::MutexLock lock(shared_->mutex);
  std::vector<std::byte> bytes(size_bytes, kPoison);
  const std::span<std::byte> span(bytes);
  shared_->allocations[span.data()].bytes = std::move(bytes);
  auto memory = std::make_shared<const Allocated>(shared_, span);
  return {memory, &memory->bytes()};
}

void FakeDevice::LeaveOut(size_t wait) {
  const protocol::MutexLock lock(shared_->mutex);
  shared_->left_out = wait;
}

size_t FakeDevice::waits() const {
  const protocol::MutexLock lock(shared_->mutex);
  return shared_->waits;
}

void FakeDevice::set_counts_waits(bool counts) {
  const protocol::MutexLock lock(shared_->mutex);
  shared_->counts_waits = counts;
}

void FakeDevice::set_looks_until_done(int looks) {
  const protocol::MutexLock lock(shared_->mutex);
  shared_->looks_until_done = looks;
}

void FakeDevice::set_before_work(std::function<void()> before_work) {
  shared_->before_work = std::move(before_work);
}

}  // namespace forebay::testing
