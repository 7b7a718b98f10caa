// SPDX-License-Identifier: Apache-2.0
// Goal    Transfers of a file end no faster than its rate, in one queue per file, without credit for idle time and without
//         polling. Bytes, errors, events and flushes are those of the wrapped engine. (io_engine_test.cc tests the contract.)
// Method  A clock of the test, which advances when the wrapped engine is asked to sleep; simulated disks.

#include "nvme/io/rate_limited_engine.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/swap_files.h"
#include "tests/support/pattern.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/status_test.h"

namespace forebay::nvme::rate_limited_engine_test {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::HasCode;
using ::forebay::testing::Pattern;
using ::forebay::testing::SimulatedDisk;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

using TimePoint = RateLimitedEngine::Clock::time_point;

constexpr uint64_t kPage = 4096;
constexpr uint64_t kPathBytes = 64 * kPage;
constexpr nanoseconds kNow(0);

// Two simulated paths. Wait() advances the clock by its timeout if there is no completion.
class SleepingDisk final : public IoEngine {
 public:
  explicit SleepingDisk(TimePoint& now) : now_(now) {}

  SimulatedDisk& disk() { return disk_; }
  const std::vector<nanoseconds>& sleeps() const { return sleeps_; }

  std::string_view name() const override { return disk_.name(); }
  absl::StatusOr<FileIndex> RegisterFile(int fd) override { return disk_.RegisterFile(fd); }
  void UnregisterFile(FileIndex file) override { disk_.UnregisterFile(file); }
  bool RegisterBuffer(std::span<std::byte> bytes) override { return disk_.RegisterBuffer(bytes); }
  void UnregisterBuffer(std::span<std::byte> bytes) override { disk_.UnregisterBuffer(bytes); }
  absl::Status Submit(const IoRequest& request) override { return disk_.Submit(request); }
  absl::Status WatchEventFd(int fd, uint64_t token) override {
    return disk_.WatchEventFd(fd, token);
  }
  void UnwatchEventFd(int fd) override { disk_.UnwatchEventFd(fd); }
  absl::StatusOr<size_t> Wait(nanoseconds timeout, std::span<Completion> out) override {
    const absl::StatusOr<size_t> count = disk_.Wait(kNow, out);
    if (!count.ok() || *count > 0) return count;
    if (timeout > kNow) sleeps_.push_back(timeout);
    if (timeout != kForever) now_ += timeout;
    return 0;
  }

 private:
  TimePoint& now_;
  SimulatedDisk disk_{{.paths = 2, .capacity_bytes = kPathBytes}};
  std::vector<nanoseconds> sleeps_;
};

class RateLimited : public ::testing::Test {
 protected:
  // A page takes 1 ms on the first path, 4 ms on the second.
  void SetUp() override {
    auto below = std::make_unique<SleepingDisk>(now_);
    below_ = below.get();
    std::vector<PathOptions> paths;
    for (uint32_t path = 0; path < 2; ++path) {
      paths.push_back({.path = below_->disk().path_name(path), .capacity_bytes = kPathBytes});
    }
    ASSERT_OK_AND_ASSIGN(files_, below_->disk().Open(paths, OpenMode::kReclaim, FileLife::kKept,
                                                     [](auto...) { return absl::OkStatus(); }));
    engine_ = std::make_unique<RateLimitedEngine>(std::move(below),
                                                  std::vector<uint64_t>{1000 * kPage, 250 * kPage},
                                                  [this] { return now_; });
    for (uint32_t path = 0; path < 2; ++path) {
      ASSERT_OK_AND_ASSIGN(index_[path], engine_->RegisterFile(files_[path]->fd()));
    }
  }

  void Submit(IoKind kind, uint32_t path, uint64_t token, uint64_t pages = 1) {
    ASSERT_OK(engine_->Submit({.kind = kind,
                               .file = index_[path],
                               .data = kind == IoKind::kFlush ? nullptr : memory_.data(),
                               .size_bytes = kind == IoKind::kFlush ? 0 : pages * kPage,
                               .token = token}));
  }

  std::vector<uint64_t> Ended(nanoseconds timeout = kNow, size_t room = 32) {
    std::vector<Completion> some(room);
    const absl::StatusOr<size_t> count = engine_->Wait(timeout, some);
    EXPECT_OK(count);
    std::vector<uint64_t> tokens;
    for (size_t i = 0; i < count.value_or(0); ++i) tokens.push_back(some[i].token);
    return tokens;
  }

  TimePoint now_{};
  SleepingDisk* below_ = nullptr;
  std::unique_ptr<RateLimitedEngine> engine_;
  std::vector<std::unique_ptr<SwapFile>> files_;  // files on the disk of `below_`
  std::array<FileIndex, 2> index_{};
  alignas(4096) std::array<std::byte, 64 * kPage> memory_{};
};

TEST_F(RateLimited, TransfersEndNoFasterThanTheRateOfTheirPath) {
  Submit(IoKind::kRead, 0, 1);
  Submit(IoKind::kWrite, 0, 2, /*pages=*/2);
  Submit(IoKind::kRead, 1, 3);
  EXPECT_THAT(Ended(), IsEmpty()) << "all three have ended below";
  now_ += milliseconds(1);
  EXPECT_THAT(Ended(), ElementsAre(1u));
  now_ += milliseconds(1);
  EXPECT_THAT(Ended(), IsEmpty());
  now_ += milliseconds(1);
  EXPECT_THAT(Ended(), ElementsAre(2u)) << "behind the one before";
  now_ += milliseconds(1);
  EXPECT_THAT(Ended(), ElementsAre(3u)) << "the other path has a queue and a rate of its own";
}

TEST_F(RateLimited, TimeWithoutTransfersEarnsNothing) {
  Submit(IoKind::kRead, 0, 1);
  now_ += std::chrono::seconds(10);
  EXPECT_THAT(Ended(), ElementsAre(1u));
  Submit(IoKind::kRead, 0, 2);
  Submit(IoKind::kRead, 0, 3);
  now_ += milliseconds(1);
  EXPECT_THAT(Ended(), ElementsAre(2u));
}

TEST_F(RateLimited, AWaitSleepsUntilTheNextIsDueAndDoesNotPoll) {
  for (uint64_t token = 1; token <= 3; ++token) Submit(IoKind::kRead, 0, token);
  for (uint64_t token = 1; token <= 3; ++token) {
    EXPECT_THAT(Ended(IoEngine::kForever), ElementsAre(token));
    EXPECT_EQ(now_, TimePoint(milliseconds(token)));
  }
  EXPECT_THAT(below_->sleeps(), ElementsAre(milliseconds(1), milliseconds(1), milliseconds(1)));
  EXPECT_THAT(Ended(milliseconds(7)), IsEmpty());
  EXPECT_EQ(below_->sleeps().back(), milliseconds(7)) << "nothing is due: the caller's time";
  Submit(IoKind::kRead, 1, 4);
  EXPECT_THAT(Ended(milliseconds(3)), IsEmpty());
  EXPECT_THAT(Ended(milliseconds(3)), ElementsAre(4u));
}

TEST_F(RateLimited, FlushesPassAndASmallOutputLosesNothing) {
  Submit(IoKind::kWrite, 0, 1, /*pages=*/10);
  Submit(IoKind::kFlush, 0, 2);
  EXPECT_THAT(Ended(), ElementsAre(2u));
  for (uint64_t token = 3; token <= 5; ++token) Submit(IoKind::kRead, 0, token);
  now_ += milliseconds(20);
  for (const uint64_t token : {1u, 3u, 4u, 5u}) EXPECT_THAT(Ended(kNow, 1), ElementsAre(token));
  EXPECT_THAT(Ended(), IsEmpty());
}

TEST_F(RateLimited, WhatIsHeldCountsAsInFlight) {
  for (uint32_t i = 0; i < IoEngine::kBacklogMax; ++i) {
    ASSERT_OK(engine_->Submit({.kind = IoKind::kRead,
                               .file = index_[0],
                               .data = memory_.data(),
                               .size_bytes = kPage,
                               .token = i}));
    if (i % 64 != 0) continue;
    EXPECT_THAT(Ended(), IsEmpty());
  }
  EXPECT_THAT(Ended(), IsEmpty());
  const IoRequest more{.kind = IoKind::kRead,
                       .file = index_[0],
                       .data = memory_.data(),
                       .size_bytes = kPage,
                       .token = 1};
  EXPECT_THAT(engine_->Submit(more), HasCode(absl::StatusCode::kResourceExhausted));
  now_ += milliseconds(1);
  EXPECT_THAT(Ended(), ElementsAre(0u));
  EXPECT_OK(engine_->Submit(more));
}

TEST_F(RateLimited, BytesAndErrorsAreThoseOfTheEngineBelow) {
  const Bytes written = Pattern(kPage, /*seed=*/3);
  std::ranges::copy(written, memory_.begin());
  Submit(IoKind::kWrite, 0, 1);
  EXPECT_THAT(Ended(IoEngine::kForever), ElementsAre(1u));
  memory_.fill(std::byte{0});
  Submit(IoKind::kRead, 0, 2);
  EXPECT_THAT(Ended(IoEngine::kForever), ElementsAre(2u));
  EXPECT_TRUE(std::ranges::equal(written, std::span(memory_).first(kPage)));
  below_->disk().CutPowerNow();
  Submit(IoKind::kRead, 0, 3);
  std::array<Completion, 1> failed;
  ASSERT_OK_AND_ASSIGN(const size_t count, engine_->Wait(IoEngine::kForever, failed));
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(failed[0].token, 3u);
  EXPECT_EQ(failed[0].result, -ENODEV);
}

}  // namespace
}  // namespace forebay::nvme::rate_limited_engine_test
