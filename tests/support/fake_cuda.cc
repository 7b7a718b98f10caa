// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

#include "tests/support/fake_cuda_state.h"

namespace forebay::testing {
namespace {

protocol::Mutex current_mutex;
std::shared_ptr<State> current;  // NOLINT: the driver's own

}  // namespace

std::shared_ptr<State> Now() {
  const protocol::MutexLock lock(current_mutex);
  if (current == nullptr) {
    current = std::make_shared<State>();
    current->contexts.resize(1);
  }
  return current;
}

std::vector<CUcontext>& ContextStack() {
  thread_local std::vector<CUcontext> stack;
  return stack;
}

namespace {

// Memory of the device. The destructor marks the bytes as freed.
class Allocated {
 public:
  Allocated(std::shared_ptr<State> state, std::span<std::byte> bytes)
      : state_(std::move(state)), bytes_(bytes) {}
  Allocated(const Allocated&) = delete;
  Allocated& operator=(const Allocated&) = delete;
  ~Allocated() {
    const protocol::MutexLock lock(state_->mutex);
    state_->allocations.at(bytes_.data()).is_freed = true;
  }
  const std::span<std::byte>& bytes() const { return bytes_; }

 private:
  std::shared_ptr<State> state_;
  std::span<std::byte> bytes_;
};

// Calls `act` with the driver's state under its lock.
template <typename Act>
auto Locked(const Act& act) {
  const std::shared_ptr<State> state = Now();
  const protocol::MutexLock lock(state->mutex);
  return act(*state);
}

}  // namespace

std::string FakeCuda::Library() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<void*>(&FakeCuda::Library), &info);
  return info.dli_fname;
}

void FakeCuda::Start(const Options& options) {
  const protocol::MutexLock lock(current_mutex);
  current = std::make_shared<State>();
  current->options = options;
  current->random.seed(options.seed.value_or(0));
  for (int device = 0; device < options.devices; ++device) current->contexts.push_back({device});
}

FakeCuda::Memory FakeCuda::Allocate(size_t size_bytes, int device) {
  const std::shared_ptr<State> state = Now();
  const protocol::MutexLock lock(state->mutex);
  auto memory =
      std::make_shared<const Allocated>(state, AllocateIn(*state, size_bytes, false, device));
  return {memory, &memory->bytes()};
}

void FakeCuda::LeaveOut(size_t wait) {
  Locked([&](State& state) { state.left_out = wait; });
}
size_t FakeCuda::waits() {
  return Locked([](const State& state) { return state.waits; });
}
void FakeCuda::set_counts_waits(bool counts) {
  Locked([&](State& state) { state.counts_waits = counts; });
}
void FakeCuda::set_looks_until_done(int looks) {
  Locked([&](State& state) { state.options.looks_until_done = looks; });
}
void FakeCuda::set_before_work(std::function<void()> before_work) {
  Locked([&](State& state) { state.before_work = std::move(before_work); });
}
void FakeCuda::Enqueue(void* stream, std::shared_ptr<Collective> collective, size_t rank,
                       const std::function<void()>& update) {
  Locked([&](State& state) {
    update();
    auto* const handle = static_cast<CUstream>(stream);
    collective->queues[rank] = state.Share(handle);
    state.Find(handle)->work.push_back({.collective = std::move(collective), .rank = rank});
    state.changed.notify_all();
  });
}
void FakeCuda::Change(const std::function<void()>& act) {
  Locked([&](State& state) {
    act();
    state.changed.notify_all();
  });
}
bool FakeCuda::IsFreed(const std::byte* at) { return Now()->IsFreed(at); }
void FakeCuda::NoteMistake(const std::string& mistake) { Now()->Note(mistake); }
void FakeCuda::FailCall(size_t call) {
  Locked([&](State& state) { state.failing_call = call; });
}
size_t FakeCuda::calls() {
  return Locked([](const State& state) { return state.calls; });
}
void FakeCuda::FailCopy(size_t copy) {
  Locked([&](State& state) { state.failing_copy = copy; });
}

std::vector<FakeCuda::Registration> FakeCuda::registrations() {
  return Locked([](const State& state) {
    std::vector<Registration> all;
    for (const auto& [begin, one] : state.registered) {
      all.push_back({begin, one.size_bytes, one.is_read_only});
    }
    return all;
  });
}

FakeCuda::Leftovers FakeCuda::leftovers() {
  return Locked([](const State& state) {
    const auto is_left = [](const auto& one) {
      return one.second.is_of_driver && !one.second.is_given_back;
    };
    return Leftovers{
        .streams = state.streams.size(),
        .events = state.events.size(),
        .allocations = static_cast<size_t>(std::ranges::count_if(state.allocations, is_left)),
        .registrations = state.registered.size(),
        .contexts = state.retained};
  });
}

std::vector<std::string> FakeCuda::mistakes() {
  return Locked([](const State& state) { return state.mistakes; });
}

}  // namespace forebay::testing
