// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/transfer_queue.h"

#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

size_t TransferQueue::FindOrAdd(JobId job) {
  size_t found = jobs_.size();
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (jobs_[i].empty()) {
      found = i;
    } else if (jobs_[i].id == job) {
      return i;
    }
  }
  if (found == jobs_.size()) {
    using Entries = std::pmr::deque<Entry>;
    jobs_.push_back({.waiting = {Entries(memory_), Entries(memory_), Entries(memory_)}});
  }
  jobs_[found].id = job;
  jobs_[found].deficit_bytes = 0;
  return found;
}

void TransferQueue::Push(const Entry& entry) {
  const size_t index = FindOrAdd(entry.job);
  Job& job = jobs_[index];
  if (job.empty()) turns_.push_back(index);
  job.Of(entry.order).push_back(entry);
}

std::optional<TaskId> TransferQueue::Next() {
  while (!turns_.empty()) {
    Job& job = jobs_[turns_.front()];
    std::pmr::deque<Entry>& queue = job.Next();
    const Entry entry = queue.front();
    const bool has_room =
        in_flight_ < window_.transfers && in_flight_bytes_ + entry.bytes <= window_.bytes;
    if (in_flight_ > 0 && !has_room) return std::nullopt;
    if (!std::exchange(has_quantum_, true)) job.deficit_bytes += quantum_bytes_;
    if (entry.bytes > job.deficit_bytes) {
      turns_.push_back(turns_.front());
      turns_.pop_front();
      has_quantum_ = false;
      continue;
    }
    job.deficit_bytes -= entry.bytes;
    queue.pop_front();
    if (job.empty()) {
      turns_.pop_front();
      has_quantum_ = false;
    }
    ++in_flight_;
    in_flight_bytes_ += entry.bytes;
    return entry.task;
  }
  return std::nullopt;
}

void TransferQueue::PutBack(const Entry& entry) {
  End(entry.bytes);
  const size_t index = FindOrAdd(entry.job);
  Job& job = jobs_[index];
  if (job.empty()) {
    turns_.push_front(index);
    has_quantum_ = true;
  }
  job.Of(entry.order).push_front(entry);
  job.deficit_bytes += entry.bytes;
}

void TransferQueue::End(uint64_t bytes) {
  FOREBAY_CHECK(in_flight_ > 0 && in_flight_bytes_ >= bytes);
  --in_flight_;
  in_flight_bytes_ -= bytes;
}

}  // namespace forebay::daemon
