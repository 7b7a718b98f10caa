// SPDX-License-Identifier: Apache-2.0
// Ranks of a job as threads of one process, and their exchange.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/os/mutex.h"

namespace forebay::testing {

// Calls `run` for each rank, on one new thread per rank. Returns the status of each rank.
inline std::vector<absl::Status> OnRanks(uint32_t size,
                                         const std::function<absl::Status(uint32_t)>& run) {
  std::vector<absl::Status> results(size);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = run(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// Exchanges bytes between the ranks: each call returns the bytes of all ranks.
//
// Threads  Any.
class ThreadExchange {
 public:
  explicit ThreadExchange(uint32_t size) : bytes_(size) {}

  // Returns the exchange function of one rank.
  auto Of(uint32_t rank) {
    return [this, rank](const std::string& bytes) { return Call(rank, bytes); };
  }

 private:
  absl::StatusOr<std::vector<std::string>> Call(uint32_t rank, const std::string& bytes) {
    protocol::MutexLock lock(mutex_);
    const uint64_t round = rounds_;
    bytes_[rank] = bytes;
    if (++arrived_ == bytes_.size()) {
      arrived_ = 0;
      ++rounds_;
      all_ = bytes_;
      changed_.notify_all();
    }
    while (rounds_ == round) changed_.wait(mutex_);
    return all_;
  }

  protocol::Mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<std::string> bytes_;
  std::vector<std::string> all_;
  size_t arrived_ = 0;
  uint64_t rounds_ = 0;
};

}  // namespace forebay::testing
