// SPDX-License-Identifier: Apache-2.0
// Goal    Jobs share a path by bytes, regardless of the sizes and the number of their queued transfers. No job starves. A
//         window limits the transfers in flight. A job's urgent transfers precede its other transfers.
// Method  Orders computed by hand. Random orders, from printed seeds, are compared with each job's share.

#include "daemon/exec/transfer_queue.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace forebay::daemon::transfer_queue_test {
namespace {

constexpr uint64_t kQuantum = 100;
constexpr TransferWindow kWide{.bytes = 1000000, .transfers = 1000};

// Starts and ends all transfers, one after the other. Returns their order.
std::vector<TaskId> Drain(TransferQueue& queue, std::map<TaskId, uint64_t> bytes) {
  std::vector<TaskId> order;
  while (const std::optional<TaskId> task = queue.Next()) {
    order.push_back(*task);
    queue.End(bytes.at(*task));
  }
  return order;
}

TEST(TransferQueue, OneJobIsServedInItsOrder) {
  TransferQueue queue(kWide, kQuantum);
  for (TaskId task = 1; task <= 4; ++task) queue.Push({.task = task, .job = 1, .bytes = 100});
  EXPECT_EQ(Drain(queue, {{1, 100}, {2, 100}, {3, 100}, {4, 100}}),
            (std::vector<TaskId>{1, 2, 3, 4}));
  EXPECT_EQ(queue.in_flight_bytes(), 0U);
  EXPECT_EQ(queue.Next(), std::nullopt);
}

TEST(TransferQueue, JobsOfOneSizeTakeTurns) {
  TransferQueue queue(kWide, kQuantum);
  for (TaskId task = 1; task <= 4; ++task) queue.Push({.task = task, .job = 1, .bytes = 100});
  for (TaskId task = 11; task <= 12; ++task) queue.Push({.task = task, .job = 2, .bytes = 100});
  EXPECT_EQ(Drain(queue, {{1, 100}, {2, 100}, {3, 100}, {4, 100}, {11, 100}, {12, 100}}),
            (std::vector<TaskId>{1, 11, 2, 12, 3, 4}));
}

TEST(TransferQueue, SmallTransfersMakeUpForLargeOnes) {
  TransferQueue queue(kWide, kQuantum);
  for (TaskId task = 1; task <= 2; ++task) queue.Push({.task = task, .job = 1, .bytes = 100});
  for (TaskId task = 11; task <= 14; ++task) queue.Push({.task = task, .job = 2, .bytes = 50});
  EXPECT_EQ(Drain(queue, {{1, 100}, {2, 100}, {11, 50}, {12, 50}, {13, 50}, {14, 50}}),
            (std::vector<TaskId>{1, 11, 12, 2, 13, 14}));
}

TEST(TransferQueue, UrgentTransfersGoBeforeTheJobsOthersAlone) {
  TransferQueue queue(kWide, kQuantum);
  queue.Push({.task = 1, .job = 1, .bytes = 100});
  queue.Push({.task = 2, .job = 1, .bytes = 100});
  queue.Push({.task = 11, .job = 2, .bytes = 100});
  queue.Push({.task = 3, .job = 1, .bytes = 100, .order = TransferQueue::Order::kUrgent});
  EXPECT_EQ(Drain(queue, {{1, 100}, {2, 100}, {3, 100}, {11, 100}}),
            (std::vector<TaskId>{3, 11, 1, 2}));
}

TEST(TransferQueue, TransfersInTheBackgroundGiveWayToTheJobsOthersAlone) {
  TransferQueue queue(kWide, kQuantum);
  queue.Push({.task = 1, .job = 1, .bytes = 100, .order = TransferQueue::Order::kBackground});
  queue.Push({.task = 2, .job = 1, .bytes = 100, .order = TransferQueue::Order::kBackground});
  queue.Push({.task = 11, .job = 2, .bytes = 100, .order = TransferQueue::Order::kBackground});
  queue.Push({.task = 3, .job = 1, .bytes = 100});
  queue.Push({.task = 4, .job = 1, .bytes = 100, .order = TransferQueue::Order::kUrgent});
  EXPECT_EQ(Drain(queue, {{1, 100}, {2, 100}, {3, 100}, {4, 100}, {11, 100}}),
            (std::vector<TaskId>{4, 11, 3, 1, 2}));
}

TEST(TransferQueue, TheWindowLimitsBytesAndTransfers) {
  TransferQueue bytes({.bytes = 250, .transfers = 10}, kQuantum);
  TransferQueue transfers({.bytes = 10000, .transfers = 2}, kQuantum);
  for (TransferQueue* queue : {&bytes, &transfers}) {
    for (TaskId task = 1; task <= 3; ++task) queue->Push({.task = task, .job = 1, .bytes = 100});
    EXPECT_EQ(queue->Next(), 1U);
    EXPECT_EQ(queue->Next(), 2U);
    EXPECT_EQ(queue->Next(), std::nullopt);
    EXPECT_EQ(queue->in_flight_bytes(), 200U);
    queue->End(100);
    EXPECT_EQ(queue->Next(), 3U);
  }
  TransferQueue narrow({.bytes = 10, .transfers = 1}, kQuantum);
  narrow.Push({.task = 1, .job = 1, .bytes = 100});
  EXPECT_EQ(narrow.Next(), 1U) << "one is always in flight";
}

TEST(TransferQueue, WhatCouldNotBeStartedIsTheNextOneAgain) {
  for (const int others : {0, 1}) {
    TransferQueue queue(kWide, kQuantum);
    const TransferQueue::Entry entry{.task = 1, .job = 1, .bytes = 100};
    queue.Push(entry);
    if (others == 1) queue.Push({.task = 2, .job = 1, .bytes = 100});
    queue.Push({.task = 11, .job = 2, .bytes = 100});
    ASSERT_EQ(queue.Next(), 1U);
    queue.PutBack(entry);
    EXPECT_EQ(queue.in_flight_bytes(), 0U);
    EXPECT_EQ(queue.Next(), 1U);
    EXPECT_EQ(queue.Next(), 11U);
  }
}

// Jobs that always have transfers waiting differ by no more than two turns' bytes.
TEST(TransferQueue, JobsThatAlwaysWaitShareThePathWhateverTheySend) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    TransferQueue queue({.bytes = 400, .transfers = 8}, kQuantum);
    std::map<TaskId, TransferQueue::Entry> entries;
    std::map<JobId, uint64_t> largest = {{1, 100}, {2, 7}, {3, 40}};
    std::map<JobId, uint64_t> waiting;  // bytes
    std::map<JobId, uint64_t> started;
    std::deque<uint64_t> in_flight;
    TaskId last = 0;
    for (int round = 0; round < 5000; ++round) {
      for (const auto& [job, bytes_max] : largest) {
        // Job 1 queues many more transfers than the other jobs.
        while (waiting[job] < (job == 1 ? 30U : 2U) * kQuantum) {
          const TransferQueue::Entry entry{
              .task = ++last, .job = job, .bytes = 1 + random() % bytes_max};
          entries[last] = entry;
          queue.Push(entry);
          waiting[job] += entry.bytes;
        }
      }
      if (const std::optional<TaskId> task = queue.Next()) {
        const TransferQueue::Entry& entry = entries.at(*task);
        started[entry.job] += entry.bytes;
        waiting[entry.job] -= entry.bytes;
        in_flight.push_back(entry.bytes);
        EXPECT_LE(queue.in_flight_bytes(), 400U);
      } else {
        ASSERT_FALSE(in_flight.empty());
        queue.End(in_flight.front());
        in_flight.pop_front();
      }
    }
    const auto [least, most] =
        std::ranges::minmax_element(started, {}, [](const auto& entry) { return entry.second; });
    EXPECT_GT(least->second, 1000U);
    EXPECT_LE(most->second - least->second, 2 * kQuantum);
  }
}

}  // namespace
}  // namespace forebay::daemon::transfer_queue_test
