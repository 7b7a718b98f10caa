// SPDX-License-Identifier: Apache-2.0
// Queue of the transfers of one swap path.
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

// Limits of a path's transfers in flight. One transfer may always be in flight.
struct TransferWindow {
  uint64_t bytes = 0;
  uint32_t transfers = 1;
};

// Jobs share the path by deficit round robin over bytes. Each job in turn may start as many bytes as the largest transfer has;
// it retains unused bytes for its next turn. Within a job urgent transfers go first and background transfers last, the oldest
// first.
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

  // `quantum_bytes`: bytes of the largest transfer. `memory`, for entries, outlives the queue.
  TransferQueue(TransferWindow window, uint64_t quantum_bytes,
                std::pmr::memory_resource* memory = std::pmr::get_default_resource())
      : window_(window), quantum_bytes_(quantum_bytes), memory_(memory), turns_(memory) {}

  void Push(const Entry& entry);
  // Returns the transfer to start now; nothing if the window is full or no transfer waits. The transfer is in flight until
  // End().
  std::optional<TaskId> Next();
  // Puts back a transfer of Next() that could not be started: it is the next one again.
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
    // Returns the first queue that is not empty.
    std::pmr::deque<Entry>& Next() {
      return *std::ranges::find_if_not(waiting, &std::pmr::deque<Entry>::empty);
    }
    bool empty() const { return std::ranges::all_of(waiting, &std::pmr::deque<Entry>::empty); }
  };

  // Returns the index of the job in jobs_. A job without transfers gets an empty entry.
  size_t FindOrAdd(JobId job);

  TransferWindow window_;
  uint64_t quantum_bytes_;
  std::pmr::memory_resource* memory_;
  std::deque<Job> jobs_;           // empty entries are used again
  std::pmr::deque<size_t> turns_;  // indices of jobs_ with transfers; the first job has its turn
  bool has_quantum_ = false;       // the first job has been granted the bytes of its turn
  uint64_t in_flight_bytes_ = 0;
  uint32_t in_flight_ = 0;
};

}  // namespace forebay::daemon
