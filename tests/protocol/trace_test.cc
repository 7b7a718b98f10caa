// SPDX-License-Identifier: Apache-2.0
// Goal    The daemon reads a client's trace records of a step completely or not at all. A lying client can make it show text
//         only.
// Method  Both ends on memory of this process; a writer concurrent with a reader; fields set to values that our client never
//         writes.

#include "protocol/trace.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace forebay::protocol::trace_test {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string NameOf(const TraceRecord& record) {
  return {record.name, ::strnlen(record.name, kTraceNameBytes)};
}

class TraceTest : public ::testing::Test {
 protected:
  const std::unique_ptr<TraceMemory> memory_ = std::make_unique<TraceMemory>();
  TraceWriter writer_{*memory_};
};

TEST_F(TraceTest, GivesBackTheNewestStep) {
  EXPECT_THAT(ReadTrace(*memory_, 0), IsEmpty());
  for (uint64_t step = 1; step <= 3; ++step) {
    for (uint64_t i = 0; i <= step; ++i) {
      writer_.Add({.lane = ClientLane::kWeightsToDevice,
                   .name = "layer " + std::to_string(i),
                   .start_ns = 10 * step + i,
                   .end_ns = 10 * step + i + 5,
                   .bytes = 100 * i});
    }
    EXPECT_THAT(ReadTrace(*memory_, step), IsEmpty()) << "not committed yet";
    writer_.Committed(step);
    const std::vector<TraceRecord> records = ReadTrace(*memory_, step);
    ASSERT_THAT(records, SizeIs(step + 1));
    EXPECT_EQ(NameOf(records[1]), "layer 1");
    EXPECT_EQ(records[1].start_ns, 10 * step + 1);
    EXPECT_EQ(records[1].end_ns, 10 * step + 6);
    EXPECT_EQ(records[1].bytes, 100U);
    EXPECT_EQ(Name(static_cast<ClientLane>(records[1].lane)), "weights to device");
    EXPECT_THAT(ReadTrace(*memory_, step - 1), IsEmpty());
    EXPECT_THAT(ReadTrace(*memory_, step + 1), IsEmpty());
  }
}

TEST_F(TraceTest, LeavesOutWhatIsTooMuchAndCutsNames) {
  const std::string name(2 * kTraceNameBytes, 'n');
  for (uint64_t i = 0; i < kTraceRecords + 10; ++i) writer_.Add({.name = name, .bytes = i});
  writer_.Add({.lane = ClientLane::kStep, .name = "step 7"});
  writer_.Committed(7);
  std::vector<TraceRecord> records = ReadTrace(*memory_, 7);
  ASSERT_THAT(records, SizeIs(kTraceRecords));
  EXPECT_EQ(NameOf(records.back()), "step 7 (11 left out)");
  EXPECT_EQ(records[kTraceRecords - 2].bytes, kTraceRecords - 2);
  EXPECT_EQ(NameOf(records[0]), name.substr(0, kTraceNameBytes));
  writer_.Add({.lane = ClientLane::kStep, .name = "step 8"});
  writer_.Committed(8);
  records = ReadTrace(*memory_, 8);
  ASSERT_THAT(records, SizeIs(1));
  EXPECT_EQ(NameOf(records[0]), "step 8");
}

TEST_F(TraceTest, WhatNoClientOfOursWritesIsTextOrNothing) {
  for (int i = 0; i < 3; ++i) writer_.Add({.name = "fine", .start_ns = 5, .end_ns = 6});
  writer_.Committed(1);
  TraceHalf& half = memory_->halves[0];
  half.records[0].lane = kClientLanes;
  std::memset(half.records[1].name, 0x1B, kTraceNameBytes);
  half.records[1].end_ns = 4;
  half.records_used = UINT64_MAX;
  const std::vector<TraceRecord> records = ReadTrace(*memory_, 1);
  ASSERT_THAT(records, SizeIs(kTraceRecords - 1));
  EXPECT_EQ(NameOf(records[0]), std::string(kTraceNameBytes, '?'));
  EXPECT_EQ(records[0].end_ns, 5U);
  memory_->commits = UINT64_MAX - 1;  // selects the other half
  EXPECT_THAT(ReadTrace(*memory_, 1), IsEmpty());
}

TEST_F(TraceTest, AReaderNeverSeesTwoSteps) {
  constexpr uint64_t kSteps = 20'000;
  constexpr uint64_t kRecordsSeen = 1000;
  std::atomic<uint64_t> committed = 0;
  std::atomic<bool> stopping = false;
  // Writes until the reader has seen enough records: a delayed reader might see none in 20,000 steps.
  std::thread writer([&] {
    for (uint64_t step = 1; step <= kSteps || !stopping; ++step) {
      for (uint64_t i = 0; i < 20; ++i) writer_.Add({.name = "x", .bytes = step});
      writer_.Committed(step);
      committed = step;
    }
  });
  uint64_t seen = 0;
  uint64_t of_other_steps = 0;
  while (committed < kSteps || seen < kRecordsSeen) {
    const uint64_t step = committed;
    for (const TraceRecord& record : ReadTrace(*memory_, step)) {
      of_other_steps += record.bytes == step ? 0 : 1;
      ++seen;
    }
  }
  stopping = true;
  writer.join();
  EXPECT_EQ(of_other_steps, 0U);
  EXPECT_THAT(ReadTrace(*memory_, committed), SizeIs(20));
}

}  // namespace
}  // namespace forebay::protocol::trace_test
