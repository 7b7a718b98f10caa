// SPDX-License-Identifier: Apache-2.0
// Transfers of one swap path that wait for their turn.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory_resource>
#include <optional>

#include "daemon/core/base/events.h"

namespace forebay::daemon {

// What of a path's transfers may be in flight at once; one may always be.
struct TransferWindow {
  uint64_t bytes = 0;
  uint32_t transfers = 1;
};

// Jobs share the path by deficit round robin over bytes: each in turn may start as many bytes as the largest
// transfer has, and what it has left of them next time. Within a job urgent transfers go first and those in the
// background last; of each the oldest.
//
// Limits  O(jobs that wait) a transfer.
// Source  Shreedhar & Varghese, Efficient Fair Queueing Using Deficit Round Robin, SIGCOMM 1995.
class TransferQueue {
 public:
  enum class Order : uint8_t { kUrgent, kNormal, kBackground };
  struct Entry {
    TaskId task = 0;
    JobId job = 0;
    uint64_t bytes = 0;
    Order order = Order::kNormal;
  };

  // `quantum_bytes`: of the largest transfer. `memory`, for entries, outlives it.
  TransferQueue(TransferWindow window, uint64_t quantum_bytes,
                std::pmr::memory_resource* memory = std::pmr::get_default_resource())
      : window_(window), quantum_bytes_(quantum_bytes), memory_(memory), turns_(memory) {}

  void Push(const Entry& entry);
  // The one to start now; nothing: the window is full, or none waits. It is in flight until End().
  std::optional<TaskId> Next();
  // One that Next() gave could not be started: it is the next one again.
  void PutBack(const Entry& entry);
  void End(uint64_t bytes);

  uint64_t in_flight_bytes() const { return in_flight_bytes_; }

 private:
  static constexpr size_t kOrders = 3;

  struct Job {
    JobId id = 0;
    std::array<std::pmr::deque<Entry>, kOrders> waiting;  // by Order
    uint64_t deficit_bytes = 0;

    std::pmr::deque<Entry>& Of(Order order) { return waiting[static_cast<size_t>(order)]; }
    // The first one that is not empty.
    std::pmr::deque<Entry>& Next() {
      return *std::ranges::find_if_not(waiting, &std::pmr::deque<Entry>::empty);
    }
    bool empty() const { return std::ranges::all_of(waiting, &std::pmr::deque<Entry>::empty); }
  };

  // Its place in jobs_; where it has no transfers yet, an empty one, which is its own now.
  size_t FindOrAdd(JobId job);

  TransferWindow window_;
  uint64_t quantum_bytes_;
  std::pmr::memory_resource* memory_;
  std::deque<Job> jobs_;           // empty ones are used again
  std::pmr::deque<size_t> turns_;  // of jobs_ that have transfers; the first one has its turn
  bool has_quantum_ = false;       // the first one was given its bytes
  uint64_t in_flight_bytes_ = 0;
  uint32_t in_flight_ = 0;
};

}  // namespace forebay::daemon
