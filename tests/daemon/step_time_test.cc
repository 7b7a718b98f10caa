// SPDX-License-Identifier: Apache-2.0
// Goal    The disk works during forward, backward and the next forward pass. A step takes little more time than the longer of
//         its compute and its transfers. A durable step takes little more time than its bytes need.
// Method  The state machine in virtual time. The disk serves one transfer after the other at one rate, reads and writes alike.
//         Workers are fast compared with a disk. A trainer computes with each group in turn, fetches the next group meanwhile,
//         and delivers gradients evenly. The result does not depend on the machine.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/durability.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::step_time_test {
namespace {

using ::forebay::testing::AttachRequest;
using ::forebay::testing::LeastDramOf;
using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::SwapPaths;
using protocol::Durability;
using protocol::DurabilityLevel;
using protocol::ErrorId;
using protocol::StepAnswer;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.
constexpr uint32_t kGroups = 32;
constexpr uint64_t kBlockElems = 8192;
constexpr uint64_t kBlocksPerGroup = 8;
constexpr uint64_t kArenaBytes = uint64_t{1} << 20;
constexpr uint32_t kStepsBefore = 2;
constexpr uint32_t kSteps = 2;
constexpr double kDiskSeconds = 1;  // Time of a step's transfers, one after the other.

std::shared_ptr<const protocol::Layout> Layers() {
  return MakeShardedLayout(
      std::vector<std::vector<testing::ShardedParam>>(kGroups,
                                                      {{.rows = kBlocksPerGroup * kBlockElems}}),
      {.ranks = 1, .dtype = protocol::DType::kBFloat16, .format = protocol::Format::kExact});
}

NodeState::Options OptionsOf(uint64_t dram_bytes) {
  return {.dram_limit_bytes = dram_bytes,
          .node_bytes = 4096,
          .staging_slots = 8,
          .staging_slot_bytes = 256 << 10,
          .swap = SwapPaths({256 << 20}),
          .block_elems = kBlockElems,
          .workers = 2};
}

// kGradients: only some blocks have their gradients in DRAM.
enum class OnSwap : uint8_t { kStates, kWeights, kGradients };

struct Case {
  bool early = true;
  bool drain = true;
  OnSwap on_swap = OnSwap::kStates;
  double resident_share = 0;  // Share of the states in DRAM.
  protocol::Durability durability = {};

  AttachRequest Request() const {
    return {.early_updates = early, .durability = durability, .grad_arena_bytes = kArenaBytes};
  }
};

NodeState::Options OptionsFor(const Case& what) {
  if (what.on_swap != OnSwap::kStates) {
    return OptionsOf(LeastDramOf(Layers(), OptionsOf(0), 1, what.Request(),
                                 /*gradients_in_dram=*/what.on_swap != OnSwap::kGradients));
  }
  ShardedJob roomy(Layers(), 1, OptionsOf(uint64_t{64} << 20));
  (void)roomy.node_.Attach(Layers(),
                           {.durability = what.durability, .grad_arena_bytes = kArenaBytes});
  const uint64_t blocks = roomy.View().blocks;
  const auto resident = static_cast<uint64_t>(what.resident_share * static_cast<double>(blocks));
  const uint64_t new_weights = what.early ? (blocks - resident) * kBlockElems * 2 : 0;
  return OptionsOf(roomy.node_.state().Node().dram_used_bytes - roomy.View().resident_bytes +
                   new_weights + resident * (roomy.View().resident_bytes / blocks));
}

// Runs a trainer in virtual time. Time passes while the trainer computes or waits.
class Timed : public ShardedJob {
 public:
  Timed(const Case& what, double compute_s)
      : ShardedJob(Layers(), 1, OptionsFor(what)), case_(what), compute_s_(compute_s) {
    sessions_.push_back(node_.Attach(layout_, what.Request()));
    EXPECT_OK(StatusOf(sessions_[0]));
    const auto blocks = static_cast<double>(View().blocks);
    EXPECT_NEAR(View().resident_blocks, what.resident_share * blocks, 1);
    EXPECT_EQ(View().weights_on_swap_bytes > 0, what.on_swap != OnSwap::kStates);
    EXPECT_EQ(View().sums_on_swap_bytes > 0, what.on_swap == OnSwap::kGradients);
    if (what.drain) node_.set_answered_when(StepAnswer::kCommitted);
    const uint64_t states = 2 * View().blocks * (kBlockElems * 10);  // Bytes read and written.
    const uint64_t weights = layout_->weights_bytes();
    // The disk reads and writes weights on swap in addition to the states, and reads them twice more for fetches.
    bytes_ = states + (what.on_swap != OnSwap::kStates ? 4 * weights : 0);
    rate_ = static_cast<double>(bytes_) / kDiskSeconds;
    bytes_ -= 2 * View().resident_blocks * (kBlockElems * 10);
  }

  // Trains and returns the mean seconds of the last kSteps steps.
  double Run() {
    double began = 0;
    for (uint64_t step = 1; step <= kStepsBefore + kSteps; ++step) {
      if (step == kStepsBefore + 1) {
        began = now_;
        moved_ = saved_ = 0;
      }
      Train(step);
    }
    const double seconds = (now_ - began) / kSteps;
    moved_s_ = static_cast<double>(moved_) / kSteps / rate_;
    // Bytes moved beyond the necessary bytes, as a share of the necessary bytes.
    waste_ =
        bytes_ == 0 ? 0 : static_cast<double>(moved_) / kSteps / static_cast<double>(bytes_) - 1;
    node_.RunTasks();
    EXPECT_EQ(node_.fault(), "");
    return seconds;
  }
  double waste() const { return waste_; }
  // Disk seconds per step: moved_s() for all transfers, saved_s() for writes of durable steps.
  double moved_s() const { return moved_s_; }
  double saved_s() const { return static_cast<double>(saved_) / kSteps / rate_; }

 private:
  void Train(uint64_t step) {
    const double forward = compute_s_ / 3 / kGroups;
    uint64_t fetch = node_.Fetch(sessions_[0], 0);
    for (uint32_t i = 0; i < 2 * kGroups; ++i) {
      if (i == kGroups && case_.early) node_.Announce(sessions_[0], step);
      WaitUntil([&] { return node_.ErrorOf(fetch) != kUnanswered; });
      EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
      const uint64_t own = fetch;
      if (i + 1 < 2 * kGroups) fetch = node_.Fetch(sessions_[0], GroupOf(i + 1));
      Compute(i < kGroups ? forward : 2 * forward);
      node_.ReleaseFetched(sessions_[0], own);
      if (i < kGroups) continue;
      WaitUntil([&] { return HasRoomForAGradient(); });
      gradients_.push_back(node_.Gradient(sessions_[0], GroupOf(i), step));
    }
    const uint64_t call = node_.Step(sessions_[0], step);
    WaitUntil([&] { return node_.ErrorOf(call) != kUnanswered; });
    EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
    for (const uint64_t gradient : std::exchange(gradients_, {})) {
      EXPECT_EQ(node_.ErrorOf(gradient), ErrorId::kNone);
    }
  }
  bool HasRoomForAGradient() const {
    const auto waiting = std::ranges::count_if(
        gradients_, [this](uint64_t tag) { return node_.ErrorOf(tag) == kUnanswered; });
    return (static_cast<uint64_t>(waiting) + 1) * kBlocksPerGroup * kBlockElems * 2 <= kArenaBytes;
  }
  static uint32_t GroupOf(uint32_t i) { return i < kGroups ? i : 2 * kGroups - 1 - i; }

  // Sets the end time of every task that has begun.
  void Schedule() {
    for (const auto& [task, action] : node_.model().running()) {
      if (ends_.contains(task)) continue;
      uint64_t bytes = 0;
      if (const auto* read = std::get_if<ReadBlock>(&action)) bytes = read->bytes;
      if (const auto* write = std::get_if<WriteBlock>(&action)) bytes = write->bytes;
      if (const auto* load = std::get_if<LoadWeights>(&action)) bytes = load->bytes;
      if (const auto* spill = std::get_if<SpillSums>(&action)) bytes = spill->bytes;
      if (const auto* sums = std::get_if<LoadSums>(&action)) bytes = sums->bytes;
      if (const auto* save = std::get_if<SavePart>(&action)) {
        bytes = save->bytes;
        saved_ += bytes;
      }
      if (const auto* commit = std::get_if<CommitLedger>(&action)) {
        for (const auto& job : commit->node->jobs) bytes += 2 * job->slots() * kLedgerBytesPerSlot;
        saved_ += bytes;
      }
      double& server = bytes > 0 ? disk_ : *std::ranges::min_element(workers_);
      const bool updates = std::holds_alternative<UpdateBlock>(action);
      const double took =
          bytes > 0 ? static_cast<double>(bytes) / rate_ : kUpdateSeconds / (updates ? 1 : 4);
      server = std::max(server, now_) + took;
      moved_ += bytes;
      ends_[task] = server;
    }
  }
  // Ends the first task that ends before `time`. Returns false if no task does.
  bool EndOne(double time) {
    Schedule();
    const auto first = std::ranges::min_element(
        ends_, {}, [](const auto& entry) { return std::pair(entry.second, entry.first); });
    if (first == ends_.end() || first->second > time) return false;
    const TaskId task = first->first;
    now_ = std::max(now_, first->second);
    ends_.erase(first);
    node_.Finish(task);
    return true;
  }
  void Compute(double seconds) {
    const double end = now_ + seconds;
    while (EndOne(end)) continue;
    now_ = end;
  }
  void WaitUntil(const std::function<bool()>& is_true) {
    while (!is_true()) ASSERT_TRUE(EndOne(1e9)) << "nothing goes on";
  }

  // Bytes of a slot's entries in one copy of the ledger and of the volume's list.
  static constexpr uint64_t kLedgerBytesPerSlot = 96;
  // Seconds of a block's update: a tenth of its transfer time, as with a disk of 3 GB/s. Additions and copies touch a quarter
  // of the bytes of an update.
  static constexpr double kUpdateSeconds = 0.1 * kDiskSeconds / (kGroups * kBlocksPerGroup);

  Case case_;
  double compute_s_;
  uint64_t bytes_ = 0;
  double rate_ = 0;
  double now_ = 0;
  double disk_ = 0;  // Time at which the disk is free.
  std::vector<double> workers_ = {0, 0};
  std::map<TaskId, double> ends_;
  uint64_t moved_ = 0;
  uint64_t saved_ = 0;
  double waste_ = 0;
  double moved_s_ = 0;
  std::vector<uint64_t> gradients_;
};

const char* NameOf(OnSwap what) {
  if (what == OnSwap::kGradients) return "gradients";
  return what == OnSwap::kWeights ? "weights" : "states";
}

class StepTime : public ::testing::TestWithParam<OnSwap> {};

// FOREBAY_ALL_CASES=1 prints the gain of early updates and of drained steps: docs/reports/benchmarks.md.
TEST_P(StepTime, IsLittleMoreThanTheLongerOfComputeAndTransfers) {
  const bool spills = GetParam() == OnSwap::kGradients;
  const bool prints_all = std::getenv("FOREBAY_ALL_CASES") != nullptr;
  std::printf("%9s %6s %6s %10s %8s %8s %8s\n", "on swap", "early", "drain", "compute_s", "step_s",
              "ratio", "waste");
  for (const bool early : {true, false}) {
    for (const bool drain : {true, false}) {
      const bool is_whole = early && drain;
      if (!is_whole && !prints_all) continue;
      for (const double compute_s : {0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0}) {
        const bool is_of_few = compute_s == 0.5 || compute_s == 1.0 || compute_s == 2.0;
        // Runs with gradients on swap take long.
        if (spills && !is_of_few && !prints_all) continue;
        Timed timed({.early = early, .drain = drain, .on_swap = GetParam()}, compute_s);
        const double step_s = timed.Run();
        const double disk_s = spills ? timed.moved_s() : kDiskSeconds;
        const double ratio = step_s / std::max(compute_s, disk_s);
        std::printf("%9s %6s %6s %10.3f %8.3f %8.3f %8.3f\n", NameOf(GetParam()),
                    early ? "yes" : "no", drain ? "yes" : "no", compute_s, step_s, ratio,
                    timed.waste());
        if (!is_whole) continue;
        const bool is_near = compute_s >= 0.5 && compute_s <= 2;
        EXPECT_LE(ratio, is_near ? 1.08 : 1.04) << compute_s;
        // If backward, two thirds of the compute, takes longer than the transfers, at most the transfers of one block and 5 %
        // of a step's transfers remain after the last gradient.
        if (compute_s > 1.5) {
          EXPECT_LE(step_s - compute_s, (1.0 / (kGroups * kBlocksPerGroup) + 0.05) * kDiskSeconds)
              << compute_s;
        }
        // Spilled gradients add 2 bytes written and at most 2 bytes read to 28 bytes an element. Few states are read ahead for
        // spilled gradients.
        EXPECT_LE(timed.waste(), spills ? 4.0 / 28 + 0.02 : 0.01) << compute_s;
      }
    }
  }
}

// The more states are in DRAM, the fewer bytes the disk transfers.
TEST(StepTimeOfResidentStates, FollowsWhatIsLeftOnSwap) {
  const bool prints_all = std::getenv("FOREBAY_ALL_CASES") != nullptr;
  std::printf("%8s %6s %6s %10s %8s %8s %8s\n", "resident", "early", "drain", "compute_s", "step_s",
              "ratio", "waste");
  constexpr double kComputeSeconds = 0.5;
  for (const bool is_whole : {true, false}) {
    if (!is_whole && !prints_all) continue;
    for (const double resident : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      Timed timed({.early = is_whole,
                   .drain = is_whole,
                   .on_swap = OnSwap::kStates,
                   .resident_share = resident},
                  kComputeSeconds);
      const double step_s = timed.Run();
      const double ratio = step_s / std::max(kComputeSeconds, (1 - resident) * kDiskSeconds);
      std::printf("%8.2f %6s %6s %10.3f %8.3f %8.3f %8.3f\n", resident, is_whole ? "yes" : "no",
                  is_whole ? "yes" : "no", kComputeSeconds, step_s, ratio, timed.waste());
      if (!is_whole) continue;
      EXPECT_LE(ratio, 1.08) << resident;
    }
  }
}

// Writes of a durable step take their own time at the disk, and no more, compared with the same job at level memory. A call at
// level step waits for the writes, so it is compared with steps that do not drain under the next forward pass.
TEST(StepTimeOfDurableSteps, IsThatOfTheirBytes) {
  constexpr Durability kLevels[] = {{.level = DurabilityLevel::kStep, .steps = 1},
                                    {.level = DurabilityLevel::kEpoch, .steps = 1},
                                    {.level = DurabilityLevel::kEpoch, .steps = 2}};
  const bool prints_all = std::getenv("FOREBAY_ALL_CASES") != nullptr;
  std::printf("%10s %8s %10s %8s %8s %8s %8s\n", "level", "resident", "compute_s", "memory_s",
              "step_s", "bytes_s", "beyond");
  for (const double resident : {0.0, 0.5, 1.0}) {
    if (resident == 0.5 && !prints_all) continue;
    for (const double compute_s : {0.5, 2.0}) {
      // Seconds by whether a step drains under the next forward pass.
      std::map<bool, double> memory_seconds;
      for (const bool drain : {false, true}) {
        memory_seconds[drain] =
            Timed({.drain = drain, .resident_share = resident}, compute_s).Run();
      }
      for (const Durability& level : kLevels) {
        const double memory_s = memory_seconds[level.level != DurabilityLevel::kStep];
        Timed timed({.resident_share = resident, .durability = level}, compute_s);
        const double step_s = timed.Run();
        const double beyond = (step_s - timed.saved_s()) / memory_s - 1;
        std::printf("%10s %8.2f %10.3f %8.3f %8.3f %8.3f %8.3f\n",
                    protocol::FormatDurability(level).c_str(), resident, compute_s, memory_s,
                    step_s, timed.saved_s(), beyond);
        EXPECT_LE(beyond, 0.02) << protocol::FormatDurability(level) << " " << resident << " "
                                << compute_s;
        EXPECT_GT(timed.saved_s(), 0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(OnSwap, StepTime,
                         ::testing::Values(OnSwap::kStates, OnSwap::kWeights, OnSwap::kGradients),
                         [](const auto& param_info) { return NameOf(param_info.param); });

}  // namespace
}  // namespace forebay::daemon::step_time_test
