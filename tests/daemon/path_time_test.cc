// SPDX-License-Identifier: Apache-2.0
// Goal    Several swap paths together give a job the sum of their rates, even if the rates differ widely. If one path becomes
//         slower or faster, the distribution of blocks follows within two steps, as far as free slots allow.
// Method  The state machine in virtual time, with all states on swap. The trainer does not compute, or computes with each group
//         in turn and delivers gradients evenly. Each path serves one transfer after the other at its own rate, reads and
//         writes alike. Workers are fast. The result does not depend on the machine.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/core/blocks/path_table.h"
#include "gtest/gtest.h"
#include "nvme/path_rates.h"
#include "protocol/error.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::path_time_test {
namespace {

using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;

constexpr uint32_t kGroups = 32;
constexpr uint64_t kBlockElems = 8192;
constexpr uint32_t kBlocks = 8 * kGroups;
constexpr uint64_t kBlockBytes = 10 * kBlockElems;  // exact
constexpr uint64_t kArenaBytes = uint64_t{1} << 20;
constexpr double kSum = 2.0 * kBlocks * kBlockBytes;  // bytes a second: a step takes one

std::shared_ptr<const protocol::Layout> Layers() {
  return MakeShardedLayout(
      std::vector<std::vector<testing::ShardedParam>>(kGroups, {{.rows = 8 * kBlockElems}}),
      {.ranks = 1, .dtype = protocol::DType::kBFloat16, .format = protocol::Format::kExact});
}

NodeState::Options OptionsOf(size_t paths, uint64_t dram_bytes) {
  return {.dram_limit_bytes = dram_bytes,
          .node_bytes = 4096,
          .staging_slots = 16,
          .staging_slot_bytes = 256 << 10,
          .swap = SwapPaths(std::vector<uint64_t>(paths, 64 << 20)),
          .block_elems = kBlockElems,
          .workers = 2};
}

// kNone: updates run after the last gradient, and each step is awaited. kBoth: updates run when gradients arrive and continue
// under the next forward pass.
enum class Overlap : uint8_t { kNone, kBoth };

// Node options with `paths` swap paths and so little DRAM that no block fits.
NodeState::Options OptionsFor(size_t paths, Overlap overlap) {
  ShardedJob roomy(Layers(), 1, OptionsOf(paths, 64 << 20));
  roomy.AttachAll(kArenaBytes);
  const uint64_t new_weights = overlap == Overlap::kBoth ? kBlocks * kBlockElems * 2 : 0;
  return OptionsOf(paths, roomy.node_.state().Node().dram_used_bytes - roomy.View().resident_bytes +
                              new_weights);
}

nvme::PathRates Measured(double rate) {
  return {.read = rate,
          .write = rate,
          .mixed = rate,
          .request_bytes = kBlockBytes,
          .depth = 1,
          .read_seconds = kBlockBytes / rate};
}

class TimedPaths : public ShardedJob {
 public:
  // `rates`: bytes a second, by path. `measured`: the rates that the node assumes; may be empty. `capacities`: slots, by path;
  // empty: more than enough.
  TimedPaths(std::vector<double> rates, const std::vector<double>& measured,
             const std::vector<uint64_t>& capacities = {}, Overlap overlap = Overlap::kNone)
      : ShardedJob(Layers(), 1, With(OptionsFor(rates.size(), overlap), measured, capacities)),
        rates_(std::move(rates)),
        free_at_(rates_.size(), 0),
        read_(rates_.size(), 0),
        written_(rates_.size(), 0) {
    const bool overlaps = overlap == Overlap::kBoth;
    sessions_.push_back(
        node_.Attach(layout_, {.early_updates = overlaps, .grad_arena_bytes = kArenaBytes}));
    EXPECT_OK(StatusOf(sessions_[0]));
    if (overlaps) node_.set_answered_when(protocol::StepAnswer::kCommitted);
    EXPECT_EQ(View().resident_blocks, 0U);
    EXPECT_EQ(View().blocks, kBlocks);
  }
  ~TimedPaths() { EXPECT_EQ(node_.fault(), ""); }
  TimedPaths(const TimedPaths&) = delete;
  TimedPaths& operator=(const TimedPaths&) = delete;

  // Runs a step and returns the seconds that it took.
  double Step() {
    const double began = now_;
    std::ranges::fill(read_, 0);
    std::ranges::fill(written_, 0);
    std::vector<uint64_t> gradients;
    for (uint32_t group = kGroups; group-- > 0;) {
      gradients.push_back(node_.Gradient(sessions_[0], group, step_));
      while (node_.ErrorOf(gradients.back()) == ErrorId::kTimeout) EndOne();
    }
    const uint64_t call = node_.Step(sessions_[0], step_);
    while (node_.ErrorOf(call) == ErrorId::kTimeout) EndOne();
    EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
    ++step_;
    return now_ - began;
  }
  // Runs a step whose forward and backward passes take `compute_s` and overlap with transfers. Returns the seconds that the
  // step took.
  double StepBeside(double compute_s) {
    const double began = now_;
    std::vector<uint64_t> gradients;
    for (uint32_t i = 0; i < 2 * kGroups; ++i) {
      if (i == kGroups) node_.Announce(sessions_[0], step_);
      const uint32_t group = i < kGroups ? i : 2 * kGroups - 1 - i;
      const uint64_t fetch = node_.Fetch(sessions_[0], group);
      while (node_.ErrorOf(fetch) == ErrorId::kTimeout) EndOne();
      EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
      const double end = now_ + compute_s * (i < kGroups ? 1 : 2) / (3 * kGroups);
      while (NextEnd() <= end) EndOne();
      now_ = end;
      node_.ReleaseFetched(sessions_[0], fetch);
      if (i >= kGroups) gradients.push_back(node_.Gradient(sessions_[0], group, step_));
    }
    const uint64_t call = node_.Step(sessions_[0], step_);
    while (node_.ErrorOf(call) == ErrorId::kTimeout) EndOne();
    EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
    ++step_;
    return now_ - began;
  }
  // Runs a step. Returns the seconds of its transfers at the full rate of all paths, divided by the seconds that the step took.
  double Efficiency() {
    const double ideal_s =
        2.0 * kBlocks * kBlockBytes / std::accumulate(rates_.begin(), rates_.end(), 0.0);
    return ideal_s / Step();
  }
  void set_rate(uint32_t path, double rate) { rates_[path] = rate; }
  // Multiplies the duration of each transfer by a random factor from 1 - noise to 1 + noise.
  void set_noise(double noise) { noise_ = noise; }
  // Blocks that the last step read and wrote, by path.
  const std::vector<uint32_t>& blocks_read() const { return read_; }
  const std::vector<uint32_t>& blocks_written() const { return written_; }

 private:
  struct Served {
    double begin = 0;
    double end = 0;
    std::optional<uint32_t> path = {};
    bool writes = false;
  };

  static NodeState::Options With(NodeState::Options options, const std::vector<double>& measured,
                                 std::vector<uint64_t> capacities) {
    for (const double rate : measured) options.swap_rates.push_back(Measured(rate));
    for (uint64_t& capacity : capacities) capacity *= kBlockBytes;
    if (!capacities.empty()) options.swap = SwapPaths(capacities);
    return options;
  }

  void Schedule() {
    for (const auto& [task, action] : node_.model().running()) {
      if (served_.contains(task)) continue;
      Served& served = served_[task];
      uint64_t bytes = 0;
      if (const auto* read = std::get_if<ReadBlock>(&action); read != nullptr && read->place.slot) {
        served.path = read->place.slot->path;
        bytes = read->bytes;
      }
      if (const auto* write = std::get_if<WriteBlock>(&action)) {
        served.path = write->place.slot->path;
        served.writes = true;
        bytes = write->bytes;
      }
      double& server = served.path ? free_at_[*served.path] : *std::ranges::min_element(workers_);
      served.begin = now_;
      const double factor = std::uniform_real_distribution(1 - noise_, 1 + noise_)(random_);
      server =
          std::max(server, now_) +
          (served.path ? factor * static_cast<double>(bytes) / rates_[*served.path] : kWorkSeconds);
      served.end = server;
    }
  }
  std::map<TaskId, Served>::iterator First() {
    Schedule();
    return std::ranges::min_element(
        served_, {}, [](const auto& entry) { return std::pair(entry.second.end, entry.first); });
  }
  double NextEnd() {
    const auto first = First();
    return first == served_.end() ? 1e9 : first->second.end;
  }
  void EndOne() {
    const auto first = First();
    ASSERT_NE(first, served_.end()) << "nothing goes on";
    const auto [task, served] = *first;
    served_.erase(first);
    now_ = std::max(now_, served.end);
    TaskDone done = node_.model().Finish(task);
    if (served.path) {
      done.begin_ns = 1 + Ns(served.begin);
      done.end_ns = 1 + Ns(served.end);
      ++(served.writes ? written_ : read_)[*served.path];
    }
    node_.Send(done);
  }
  static uint64_t Ns(double seconds) { return static_cast<uint64_t>(seconds * 1e9); }

  // Seconds of a task without transfers, such as the update of a block: a tenth of a block's transfer time, as with paths of 3
  // GB/s together.
  static constexpr double kWorkSeconds = 0.1 / kBlocks;

  std::vector<double> rates_;
  std::vector<double> free_at_;
  std::vector<double> workers_ = {0, 0};
  std::map<TaskId, Served> served_;
  double now_ = 0;
  double noise_ = 0;
  std::mt19937 random_{11};
  uint64_t step_ = 1;
  std::vector<uint32_t> read_;
  std::vector<uint32_t> written_;
};

void Print(const char* what, int step, TimedPaths& paths, double efficiency) {
  std::printf("%-24s step %2d: %.3f of the sum; blocks read", what, step, efficiency);
  for (const uint32_t blocks : paths.blocks_read()) std::printf(" %u", blocks);
  std::printf(", written");
  for (const uint32_t blocks : paths.blocks_written()) std::printf(" %u", blocks);
  std::printf("\n");
}

std::vector<double> Rates(const std::vector<double>& shares) {
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<double> rates;
  for (const double share : shares) rates.push_back(share / sum * kSum);
  return rates;
}

TEST(PathTime, UnequalPathsTogetherGiveTheirSum) {
  for (const std::vector<double>& shares :
       {std::vector<double>{1, 1}, {2, 1}, {5, 1}, {1, 3}, {4, 2, 1}, {1, 1, 1, 1}}) {
    TimedPaths paths(Rates(shares), Rates(shares));
    paths.Step();  // The first step reads nothing.
    for (int step = 2; step <= 4; ++step) {
      const double efficiency = paths.Efficiency();
      Print("measured", step, paths, efficiency);
      EXPECT_GE(efficiency, 0.95);
    }
  }
}

TEST(PathTime, NoiseOfSingleTransfersCostsLittle) {
  TimedPaths paths(Rates({2, 1}), Rates({2, 1}));
  paths.set_noise(0.6);
  paths.Step();
  for (int step = 2; step <= 8; ++step) {
    const double efficiency = paths.Efficiency();
    Print("noisy", step, paths, efficiency);
    EXPECT_GE(efficiency, 0.9);
  }
}

TEST(PathTime, WithoutMeasuredRatesTheyAreFoundInTwoSteps) {
  TimedPaths paths(Rates({3, 1}), {});
  for (int step = 1; step <= 5; ++step) {
    const double efficiency = paths.Efficiency();
    Print("not measured", step, paths, efficiency);
    if (step <= 2) continue;
    EXPECT_GE(efficiency, 0.95);
  }
}

TEST(PathTime, BlocksFollowAPathThatBecomesSlowerWithinTwoSteps) {
  for (const uint32_t slower : {0U, 1U}) {
    TimedPaths paths(Rates({2, 1}), Rates({2, 1}));
    for (int step = 1; step <= 3; ++step) paths.Step();
    paths.set_rate(slower, Rates({2, 1})[slower] / 2);
    for (int step = 1; step <= 6; ++step) {
      const double efficiency = paths.Efficiency();
      Print(slower == 0 ? "the faster one halves" : "the slower one halves", step, paths,
            efficiency);
      if (step == 1) continue;
      EXPECT_GE(efficiency, step == 2 ? 0.9 : 0.95);
    }
    paths.set_rate(slower, Rates({2, 1})[slower]);
    for (int step = 1; step <= 6; ++step) {
      const double efficiency = paths.Efficiency();
      Print("it is as before", step, paths, efficiency);
      if (step == 1) continue;
      EXPECT_GE(efficiency, step == 2 ? 0.9 : 0.95);
    }
  }
}

// A step takes one second of the paths.
TEST(PathTime, ComputeAndUnequalPathsOverlap) {
  for (const double compute_s : {0.5, 1.0, 2.0}) {
    TimedPaths paths(Rates({2, 1}), Rates({2, 1}), {}, Overlap::kBoth);
    for (int step = 1; step <= 2; ++step) paths.StepBeside(compute_s);
    const double step_s = (paths.StepBeside(compute_s) + paths.StepBeside(compute_s)) / 2;
    const double ratio = step_s / std::max(compute_s, 1.0);
    std::printf("compute %.1f s: %.3f of the longer\n", compute_s, ratio);
    EXPECT_LE(ratio, 1.08) << compute_s;
  }
}

// The job has all slots of both paths, so that each step writes to the slots that the previous step has freed.
TEST(PathTime, WhereThereIsNoOtherRoomBlocksStayOnTheSlowerPath) {
  TimedPaths paths(Rates({2, 1}), Rates({1, 1}), {kBlocks, kBlocks});
  for (int step = 1; step <= 4; ++step) {
    const double efficiency = paths.Efficiency();
    Print("no room", step, paths, efficiency);
    EXPECT_EQ(paths.blocks_written()[0] + paths.blocks_written()[1], kBlocks);
  }
  EXPECT_EQ(paths.View().swap_bytes, 2 * kBlocks * kBlockBytes);
}

TEST(PathTime, AJobReservesSlotsByMeasuredRateAsFarAsThereIsRoom) {
  const auto slots_of = [](const std::vector<double>& rates,
                           const std::vector<uint64_t>& capacities) {
    TimedPaths paths(rates, rates, capacities);
    std::vector<uint32_t> slots(rates.size(), 0);
    const CreateJobSwap swap = paths.node_.Logged<CreateJobSwap>().at(0);
    for (const nvme::Slot& slot : swap.slots) ++slots[slot.path];
    return slots;
  };
  EXPECT_EQ(slots_of(Rates({3, 1}), {1000, 1000}), (std::vector<uint32_t>{384, 128}));
  EXPECT_EQ(slots_of(Rates({3, 1}), {300, 1000}), (std::vector<uint32_t>{300, 212}));
}

}  // namespace
}  // namespace forebay::daemon::path_time_test
