// SPDX-License-Identifier: Apache-2.0
// Goal    Requests that wait for one swap path delay no other path, however many they are. Two jobs that use a path at once
//         share it. Fetches of weights go before a job's states.
// Method  Real swap files below an engine that holds the requests of one path until the test lets them go, one
//         after the other; the test is the loop.

#include "daemon/exec/swap_space.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nvme/io/engine_factory.h"
#include "nvme/io/io_engine.h"
#include "nvme/slot_map.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

constexpr uint64_t kBlockBytes = 64 << 10;
constexpr uint32_t kWindowBlocks = 4;  // Blocks in flight on a path without measured rates.

class HoldingEngine final : public nvme::IoEngine {
 public:
  explicit HoldingEngine(nvme::IoEngine& inner) : inner_(inner) {}

  // Holds all requests to the file with index `file` in the order of registration, from 0.
  void Hold(size_t file) { held_file_ = files_.at(file); }
  size_t held() const { return held_.size(); }
  void ReleaseOne() {
    EXPECT_OK(inner_.Submit(held_.front()));
    held_.pop_front();
  }

  std::string_view name() const override { return inner_.name(); }
  absl::StatusOr<nvme::FileIndex> RegisterFile(int fd) override {
    absl::StatusOr<nvme::FileIndex> file = inner_.RegisterFile(fd);
    if (file.ok()) files_.push_back(*file);
    return file;
  }
  void UnregisterFile(nvme::FileIndex file) override { inner_.UnregisterFile(file); }
  bool RegisterBuffer(std::span<std::byte> bytes) override { return inner_.RegisterBuffer(bytes); }
  void UnregisterBuffer(std::span<std::byte> bytes) override { inner_.UnregisterBuffer(bytes); }
  absl::Status Submit(const nvme::IoRequest& request) override {
    if (request.file != held_file_) return inner_.Submit(request);
    held_.push_back(request);
    return absl::OkStatus();
  }
  absl::Status WatchEventFd(int fd, uint64_t token) override {
    return inner_.WatchEventFd(fd, token);
  }
  void UnwatchEventFd(int fd) override { inner_.UnwatchEventFd(fd); }
  absl::StatusOr<size_t> Wait(std::chrono::nanoseconds timeout,
                              std::span<nvme::Completion> out) override {
    return inner_.Wait(timeout, out);
  }

 private:
  nvme::IoEngine& inner_;
  std::vector<nvme::FileIndex> files_;
  std::optional<nvme::FileIndex> held_file_;
  std::deque<nvme::IoRequest> held_;
};

class SwapSpaceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(nvme::ChosenEngine chosen, nvme::CreateIoEngine());
    inner_ = std::move(chosen.engine);
    engine_ = std::make_unique<HoldingEngine>(*inner_);
    ASSERT_OK_AND_ASSIGN(
        swap_, SwapSpace::Open({.paths = {{.path = dir_.Make("a"), .capacity_bytes = 8 << 20},
                                          {.path = dir_.Make("b"), .capacity_bytes = 8 << 20}},
                                .keep_wear_ns = 1,
                                .staging_slots = 4,
                                .staging_slot_bytes = kBlockBytes,
                                .arenas = {.lock = pinned_mem::LockPolicy::kBestEffort}},
                               *engine_));
    nvme::SlotMap free = swap_->free_slots();
    for (uint32_t path = 0; path < 2; ++path) slots_.push_back(*free.AllocateOn(path, kBlockBytes));
    engine_->Hold(0);
  }
  void TearDown() override {
    while (swap_->in_flight() > 0) EndOne();
  }

  // Starts a read of the path's only slot into the only staging slot.
  void StartRead(TaskId task, JobId job, uint32_t path,
                 TransferQueue::Order order = TransferQueue::Order::kNormal) {
    std::vector<SwapDone> done;
    swap_->StartRead({.task = task,
                      .job = job,
                      .slot = slots_[path],
                      .bytes = swap_->Slot(path, kBlockBytes),
                      .order = order},
                     done);
    EXPECT_TRUE(done.empty());
  }
  // Releases a request if any is held. Returns the next task that ends.
  TaskId EndOne() {
    if (engine_->held() > 0) engine_->ReleaseOne();
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < end) {
      if (const std::optional<TaskId> task = Wait()) return *task;
    }
    ADD_FAILURE() << "nothing ends";
    return 0;
  }
  std::optional<TaskId> Wait() {
    std::vector<nvme::Completion> completions(1);
    const auto count = engine_->Wait(std::chrono::milliseconds(100), completions);
    EXPECT_OK(count);
    std::vector<SwapDone> done;
    if (count.value_or(0) > 0) swap_->OnCompletion(completions[0], done);
    if (done.empty()) return std::nullopt;
    EXPECT_OK(done[0].status);
    EXPECT_GT(done[0].start_ns, 0U);
    return done[0].task;
  }

  const testing::TempDir dir_;
  std::unique_ptr<nvme::IoEngine> inner_;
  std::unique_ptr<HoldingEngine> engine_;
  std::unique_ptr<SwapSpace> swap_;
  std::vector<nvme::Slot> slots_;
};

TEST_F(SwapSpaceTest, WhatWaitsForOnePathDelaysNoOther) {
  constexpr uint32_t kMany = nvme::Volume::kRequestsMax + 100;
  for (TaskId task = 1; task <= kMany; ++task) StartRead(task, /*job=*/1, /*path=*/0);
  EXPECT_EQ(engine_->held(), kWindowBlocks);
  StartRead(10000, /*job=*/1, /*path=*/1);
  std::optional<TaskId> ended;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!ended && std::chrono::steady_clock::now() < end) ended = Wait();
  EXPECT_EQ(ended, 10000U) << "the first path has not answered yet";
  EXPECT_EQ(engine_->held(), kWindowBlocks);
}

TEST_F(SwapSpaceTest, JobsSharePathsAndFetchesGoBeforeStates) {
  for (TaskId task = 1; task <= 10; ++task) StartRead(task, /*job=*/1, /*path=*/0);
  for (TaskId task = 21; task <= 24; ++task) StartRead(task, /*job=*/2, /*path=*/0);
  StartRead(30, /*job=*/1, /*path=*/0, TransferQueue::Order::kUrgent);
  std::vector<TaskId> order;
  for (int i = 0; i < 15; ++i) order.push_back(EndOne());
  EXPECT_EQ(order, (std::vector<TaskId>{1, 2, 3, 4, 30, 21, 5, 22, 6, 23, 7, 24, 8, 9, 10}));
  EXPECT_EQ(swap_->in_flight(), 0U);
}

TEST_F(SwapSpaceTest, WhatWasWrittenIsToBeKeptOnceAfterTransfers) {
  EXPECT_TRUE(swap_->DueWear().empty());
  for (const TaskId task : {TaskId{1}, TaskId{2}}) {
    StartRead(task, /*job=*/1, /*path=*/1);
    EndOne();
    EXPECT_EQ(swap_->DueWear().size(), 2U);
    EXPECT_TRUE(swap_->DueWear().empty());
  }
}

}  // namespace
}  // namespace forebay::daemon
