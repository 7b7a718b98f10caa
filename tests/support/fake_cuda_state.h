// SPDX-License-Identifier: Apache-2.0
// State of the driver of fake_cuda.h: the work of its streams, its memory, and the order in which work runs.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gpu/internal/cuda_types.h"
#include "protocol/os/mutex.h"
#include "tests/support/fake_cuda.h"

// Types to which handles of the driver point.
namespace forebay::testing {
struct Mark;
struct Queue;
}  // namespace forebay::testing

struct CUevent_st {
  bool is_timed = false;
  std::shared_ptr<forebay::testing::Mark> mark = {};  // the event's last record
};
struct CUstream_st {
  std::shared_ptr<forebay::testing::Queue> queue;
};
struct CUctx_st {
  int device = 0;
};

namespace forebay::testing {

using namespace gpu::cuda;  // NOLINT(google-build-using-namespace): the driver's own names

// A record of an event in a stream.
struct Mark {
  std::weak_ptr<Queue> queue;
  bool is_done = false;
  bool is_left_out = false;
  int looks = 0;
  std::chrono::steady_clock::time_point done = {};
};

struct Work {
  std::span<std::byte> to = {};
  std::span<const std::byte> from = {};
  std::shared_ptr<Mark> record = {};
  std::shared_ptr<Mark> wait = {};
  const std::byte* freed = nullptr;
  std::shared_ptr<FakeCuda::Collective> collective = {};
  size_t rank = 0;  // the caller's rank in the collective
};

// The work of a stream.
struct Queue {
  std::deque<Work> work;
  bool is_running = false;  // true while RunFirst() examines the first operation
  bool is_late = false;     // runs only if other work waits for it
};

struct Allocation {
  std::vector<std::byte> bytes;
  bool is_freed = false;       // the stream has reached the free: copies find the memory freed
  bool is_given_back = false;  // the caller has called the free
  bool is_of_driver = false;   // false: allocated by FakeCuda::Allocate
  int device = 0;
};

struct Registered {
  size_t size_bytes = 0;
  bool is_read_only = false;
};

// The map entry whose range contains `at`, or end().
template <typename Map, typename Size>
auto Holding(Map& ranges, const std::byte* at, const Size& size_of) {
  const auto after = ranges.upper_bound(at);
  if (after == ranges.begin()) return ranges.end();
  const auto found = std::prev(after);
  const auto offset = static_cast<size_t>(at - found->first);
  return offset < std::max<size_t>(size_of(found->second), 1) ? found : ranges.end();
}
inline size_t SizeOf(const Allocation& one) { return one.bytes.size(); }
inline size_t SizeOf(const Registered& one) { return one.size_bytes; }
inline constexpr auto kSizeOf = [](const auto& one) { return SizeOf(one); };

struct State {
  FakeCuda::Options options;
  protocol::Mutex mutex;
  std::mt19937_64 random;
  std::map<const std::byte*, Allocation, std::less<>> allocations;  // includes freed memory
  std::map<const std::byte*, Registered, std::less<>> registered;
  std::map<CUstream, std::unique_ptr<CUstream_st>> streams;
  std::map<CUevent, std::unique_ptr<CUevent_st>> events;
  CUstream_st default_stream{std::make_shared<Queue>()};
  std::vector<CUctx_st> contexts;
  int retained = 0;
  bool is_initialized = false;
  bool is_broken = false;
  bool counts_waits = true;
  size_t waits = 0;
  size_t calls = 0;
  size_t copies = 0;  // number of copies that have run
  unsigned streams_made = 0;
  std::optional<size_t> left_out;
  std::optional<size_t> failing_call;
  std::optional<size_t> failing_copy;
  std::function<void()> before_work;
  std::vector<std::string> mistakes;
  std::condition_variable_any changed;  // wakes threads that wait for other ranks

  // Counts one wait. Returns true if this wait must be skipped.
  bool IsLeftOut() { return counts_waits && waits++ == left_out; }

  bool IsFreed(const std::byte* at) {
    const auto found = Holding(allocations, at, kSizeOf);
    return found != allocations.end() && found->second.is_freed;
  }

  // Runs a collective at the front of a queue, after the work before it on the other ranks' streams. Returns true if the
  // collective has run or its rank has left it.
  bool RunCollective(const Work& work) {
    FakeCuda::Collective& collective = *work.collective;
    if (collective.is_done || collective.has_left[work.rank]) return true;
    for (size_t rank = 0; rank < collective.ranks; ++rank) {
      const auto found = collective.queues.find(rank);
      if (found == collective.queues.end()) return false;
      const auto other = std::static_pointer_cast<Queue>(found->second.lock());
      if (other == nullptr || collective.has_left[rank]) return false;
      while (other->work.front().collective != work.collective) {
        if (!RunFirst(*other)) return false;
        if (collective.is_done) return true;
      }
    }
    collective.is_done = true;
    if (!is_broken) collective.run();
    return true;
  }

  // Runs the first operation of a queue. Returns false if the operation cannot run yet.
  bool RunFirst(Queue& queue) {
    if (queue.is_running) return false;  // cyclic wait between ranks
    queue.is_running = true;
    const bool can_run = CanRunFirst(queue);
    queue.is_running = false;
    if (!can_run) return false;
    const Work work = std::move(queue.work.front());
    queue.work.pop_front();
    Finish(work);
    return true;
  }
  bool CanRunFirst(Queue& queue) {
    const Work work = queue.work.front();
    if (work.wait != nullptr) return RunUntil(work.wait);
    return work.collective == nullptr || RunCollective(work);
  }
  void Finish(const Work& work) {
    if (work.record != nullptr) {
      work.record->done = std::chrono::steady_clock::now();
      work.record->is_done = true;
    }
    if (work.freed != nullptr) allocations.at(work.freed).is_freed = true;
    if (work.from.empty()) return;
    if (failing_copy.has_value() && copies++ >= *failing_copy) is_broken = true;
    if (is_broken || IsFreed(work.to.data())) return;
    if (IsFreed(work.from.data())) {
      std::ranges::fill(work.to, FakeCuda::kPoison);
    } else {
      std::memcpy(work.to.data(), work.from.data(), work.from.size());
    }
  }
  bool RunUntil(const std::shared_ptr<Mark>& mark) {
    const std::shared_ptr<Queue> queue = mark->queue.lock();
    while (!mark->is_done && queue != nullptr && !queue->work.empty()) {
      if (!RunFirst(*queue)) return false;
    }
    return true;
  }
  bool RunAll(Queue& queue) {
    while (!queue.work.empty()) {
      if (!RunFirst(queue)) return false;
    }
    return true;
  }

  // Runs up to three operations, in a random order that streams and events allow.
  void RunSome() {
    constexpr uint64_t kOperationsMax = 4;
    for (uint64_t left = random() % kOperationsMax; left > 0; --left) {
      std::vector<Queue*> ready;
      ForEachQueue([&](Queue& queue) {
        if (queue.work.empty()) return;
        const std::shared_ptr<Mark>& wait = queue.work.front().wait;
        if (wait == nullptr || wait->is_done) ready.push_back(&queue);
      });
      if (ready.empty()) return;
      (void)RunFirst(*ready[random() % ready.size()]);
    }
  }
  // Runs all work of the streams that are not late, and the work of late streams that it waits for.
  void RunEarly() {
    for (bool has_run = true; has_run;) {
      has_run = false;
      ForEachQueue([&](Queue& queue) {
        if (!queue.is_late && !queue.work.empty()) has_run = RunFirst(queue) || has_run;
      });
    }
  }
  template <typename Visit>
  void ForEachQueue(const Visit& visit) {
    visit(*default_stream.queue);
    for (const auto& [handle, stream] : streams) visit(*stream->queue);
  }

  Queue* Find(CUstream handle) {
    if (handle == nullptr) return default_stream.queue.get();
    const auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second->queue.get();
  }
  std::shared_ptr<Queue> Share(CUstream handle) {
    return handle == nullptr ? default_stream.queue : streams.at(handle)->queue;
  }

  bool IsInUse(const std::byte* begin, size_t size_bytes) {
    const auto touches = [&](const std::byte* at) {
      return at != nullptr && at >= begin && at < begin + size_bytes;
    };
    return std::ranges::any_of(streams, [&](const auto& one) {
      return std::ranges::any_of(one.second->queue->work, [&](const Work& work) {
        return touches(work.to.data()) || touches(work.from.data());
      });
    });
  }

  size_t FreeBytes() const {
    size_t used_bytes = 0;
    for (const auto& [begin, one] : allocations) {
      if (one.is_of_driver && !one.is_freed) used_bytes += one.bytes.size();
    }
    return options.memory_bytes - used_bytes;
  }

  void Note(const std::string& mistake) { mistakes.push_back(mistake); }
};

std::shared_ptr<State> Now();  // creates the state if it does not exist

// The context stack of the calling thread.
std::vector<CUcontext>& ContextStack();

inline std::span<std::byte> AllocateIn(State& state, size_t size_bytes, bool is_of_driver,
                                       int device) {
  std::vector<std::byte> bytes(std::max<size_t>(size_bytes, 1), FakeCuda::kPoison);
  const std::span<std::byte> span(bytes.data(), size_bytes);
  state.allocations[span.data()] = {
      .bytes = std::move(bytes), .is_of_driver = is_of_driver, .device = device};
  return span;
}

}  // namespace forebay::testing
