// SPDX-License-Identifier: Apache-2.0
// Goal    With shared attachment, too, a step may take several backward passes. The first passes of all ranks are added in rank
//         order, then the second passes, and so on. The order of arrival, the cuts of a pass and the number of passes of each
//         rank do not matter. No order of delivery causes a deadlock. The 16-bit sums of a single rank become float32 with the
//         first further pass, or the pass is refused with the sizes as numbers. A later world has its usual sums again.
// Method  The harness. Its model records the contributions to each unit, and reports a fault if their order is wrong. Random
//         programs of one to four ranks with the smallest arenas, from a printed seed (FOREBAY_SEED).

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/os/check.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_passes_test {
namespace {

using ::forebay::testing::GradientToken;
using ::forebay::testing::MakeLayout;
using ::forebay::testing::MakeLayoutOfParams;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using protocol::ErrorId;
using protocol::kGradUnitElems;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;

using Turn = std::pair<uint16_t, uint32_t>;  // pass, rank

std::vector<Turn> Turns(const std::vector<GradientToken>& tokens) {
  std::vector<Turn> turns;
  for (const GradientToken& token : tokens) turns.emplace_back(token.pass, token.rank);
  return turns;
}

// Two ranks, and three groups of one parameter each.
class NodeStatePasses : public ::testing::Test {
 protected:
  void SetUp() override { Attach({}, 3 * layout_->largest_gradient_bytes()); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  void Attach(const std::string& job, uint64_t grad_arena_bytes) {
    sessions_.clear();
    for (uint32_t rank = 0; rank < 2; ++rank) {
      sessions_.push_back(node_.Attach(
          layout_,
          {.job = job.empty() ? "job" : job, .rank = rank, .grad_arena_bytes = grad_arena_bytes}));
    }
  }
  uint64_t Deliver(uint32_t rank, uint32_t group, uint64_t step = 1) {
    return node_.Gradient(sessions_[rank], group, step);
  }
  void BeginPass(uint32_t rank) { node_.BeginPass(sessions_[rank]); }
  std::vector<ErrorId> StepAll(uint64_t step) { return node_.StepAll(sessions_, step); }
  std::vector<Turn> Used(uint32_t param) {
    return Turns(node_.model().committed_gradients(1).at(param));
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({192, 192, 192});
  NodeHarness node_{RoomyOptions(), 2};
  std::vector<uint64_t> sessions_;
};

TEST_F(NodeStatePasses, AreAddedAfterTheFirstOnesOfAllRanks) {
  const uint64_t first = Deliver(1, 0);
  BeginPass(1);
  const uint64_t second = Deliver(1, 0);
  EXPECT_TRUE(node_.Running<AddGradients>().empty()) << "rank 0 comes first";
  Deliver(0, 0);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(first), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(second), kUnanswered) << "rank 0 may have a second one too";
  BeginPass(0);
  Deliver(0, 0);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
  EXPECT_THAT(Used(0), ElementsAre(Turn{0, 0}, Turn{0, 1}, Turn{1, 0}, Turn{1, 1}));
}

TEST_F(NodeStatePasses, OfARankWaitUntilTheOthersHaveGoneOn) {
  const uint64_t waits = Deliver(1, 0);
  Deliver(0, 1);
  BeginPass(0);
  EXPECT_EQ(node_.ErrorOf(waits), kUnanswered);
  Deliver(0, 1);  // Rank 0 delivers in its second pass. Its first pass had no gradient of group 0.
  EXPECT_THAT(node_.Running<AddGradients>(), Contains(Field(&AddGradients::partition, 0U)));
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(waits), ErrorId::kNone);
  Deliver(0, 0);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
  EXPECT_THAT(Used(0), ElementsAre(Turn{0, 1}, Turn{1, 0}));
  EXPECT_THAT(Used(1), ElementsAre(Turn{0, 0}, Turn{1, 0}));
}

TEST_F(NodeStatePasses, MayBeOfDifferentNumbers) {
  Deliver(0, 0);
  const uint64_t first = node_.Step(sessions_[0], 1);
  for (int pass = 0; pass < 3; ++pass) {
    if (pass > 0) BeginPass(1);
    const uint64_t tag = Deliver(1, 0);
    node_.RunTasks();
    EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone) << "rank 0 has ended: nothing waits for it";
  }
  EXPECT_EQ(node_.ErrorOf(first), kUnanswered);
  const uint64_t second = node_.Step(sessions_[1], 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(first), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(second), ErrorId::kNone);
  EXPECT_THAT(Used(0), ElementsAre(Turn{0, 0}, Turn{0, 1}, Turn{1, 1}, Turn{2, 1}));
  // The next step begins with empty sums.
  for (const uint64_t session : sessions_) node_.EndPasses(session);
  Deliver(0, 0, 2);
  Deliver(1, 0, 2);
  EXPECT_THAT(StepAll(2), Each(ErrorId::kNone));
  EXPECT_THAT(Used(0), ElementsAre(Turn{0, 0}, Turn{0, 1}));
}

TEST_F(NodeStatePasses, TakeAnElementOnceAndGoOneWay) {
  Deliver(0, 0);
  EXPECT_EQ(node_.ErrorOf(Deliver(0, 0)), ErrorId::kGradRepeat);
  BeginPass(0);
  Deliver(0, 0);
  const uint64_t again = Deliver(0, 0);
  EXPECT_EQ(node_.ErrorOf(again), ErrorId::kGradRepeat);
  node_.EndPasses(sessions_[0]);
  const uint64_t back = Deliver(0, 1);
  EXPECT_EQ(node_.ErrorOf(back), ErrorId::kGradRepeat);
  EXPECT_THAT(std::string(node_.answer(back)->status.message()),
              HasSubstr("is past backward pass 0 (it is in 1)"));
}

TEST_F(NodeStatePasses, GoOnAfterAStepThatWasRefused) {
  for (uint32_t rank = 0; rank < 2; ++rank) Deliver(rank, 0);
  node_.Step(sessions_[0], 1, 0.1);
  const uint64_t other = node_.Step(sessions_[1], 1, 0.2);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(other), ErrorId::kStep) << "another learning rate";
  for (const uint32_t rank : {1U, 0U}) {
    BeginPass(rank);
    Deliver(rank, 0);
  }
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
  EXPECT_THAT(Used(0), ElementsAre(Turn{0, 0}, Turn{0, 1}, Turn{1, 0}, Turn{1, 1}));
}

TEST_F(NodeStatePasses, AreAllDroppedWhereOneRankBeginsAnew) {
  for (uint32_t rank = 0; rank < 2; ++rank) Deliver(rank, 0);
  BeginPass(0);
  Deliver(0, 0);
  BeginPass(1);
  node_.SetAttempt(sessions_[1], 1);
  Deliver(1, 0);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 1)), ErrorId::kGradDropped);
  node_.SetAttempt(sessions_[0], 1);
  Deliver(0, 0);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
  EXPECT_THAT(Used(0), ElementsAre(Turn{0, 0}, Turn{0, 1}));
}

TEST_F(NodeStatePasses, OneThatIsNotFiniteRefusesTheStepOfAllRanks) {
  for (uint32_t rank = 0; rank < 2; ++rank) Deliver(rank, 0);
  BeginPass(1);
  node_.Gradient(sessions_[1], 0, 1, /*finite=*/false);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNonfinite));
}

TEST_F(NodeStatePasses, ComeBeforeTheirRankAsksForANorm) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    Deliver(rank, 0);
    BeginPass(rank);
    Deliver(rank, 0);
  }
  const uint64_t first = node_.GradNorm(sessions_[0], 0);
  BeginPass(0);
  EXPECT_EQ(node_.ErrorOf(Deliver(0, 0)), ErrorId::kStep);
  const uint64_t second = node_.GradNorm(sessions_[1], 0);
  node_.RunTasks();
  for (const uint64_t tag : {first, second}) {
    ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
    EXPECT_EQ(node_.answer(tag)->completion.norm, 1.0) << "four addends, of two ranks: sqrt(4) / 2";
  }
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
}

// --------------------------------------------------------------------------------- random programs

struct Range {
  uint32_t partition = 0;
  uint16_t pass = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

class RandomPrograms {
 public:
  explicit RandomPrograms(uint64_t seed)
      : random_(seed),
        world_size_(1 + static_cast<uint32_t>(Below(4))),
        layout_(MakeLayoutOfParams(
            {{5000, 20, 9000}, {14020}, {300, 4000}},
            Below(2) == 0 ? protocol::DType::kFloat32 : protocol::DType::kBFloat16)),
        node_(RoomyOptions(), world_size_) {
    const uint64_t grad_arena_bytes = (2 + Below(2)) * layout_->largest_gradient_bytes();
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      sessions_.push_back(
          node_.Attach(layout_, {.rank = rank, .grad_arena_bytes = grad_arena_bytes}));
      FOREBAY_CHECK(node_.attached(sessions_.back())->status.ok());
    }
  }

  // Runs one step of the random program. Returns the fault found, or an empty string.
  std::string RunStep(uint64_t step) {
    const uint32_t params = static_cast<uint32_t>(layout_->params().size());
    to_deliver_.assign(world_size_, {});
    covered_.clear();
    passes_.assign(world_size_, 0);
    std::vector<std::optional<uint64_t>> calls(world_size_);
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      node_.EndPasses(sessions_[rank]);
      std::set<uint32_t> present;
      const auto passes = static_cast<uint16_t>(1 + Below(4));
      for (uint16_t pass = 0; pass < passes; ++pass) PlanPass(rank, pass, present);
      for (uint32_t i = 0; i < params; ++i) present_[{rank, i}] = present.contains(i);
    }
    while (!std::ranges::all_of(calls, [](const auto& call) { return call.has_value(); }) ||
           !node_.model().running().empty()) {
      if (!Act(step, calls)) return "nobody can go on";
      if (!node_.fault().empty()) return node_.fault();
    }
    for (const auto& call : calls) {
      if (node_.ErrorOf(*call) != ErrorId::kNone)
        return std::string(node_.answer(*call)->status.message());
    }
    const auto& used = node_.model().committed_gradients(1);
    for (uint32_t i = 0; i < params; ++i) {
      const auto found = used.find(i);
      const std::vector<Turn> turns =
          found == used.end() ? std::vector<Turn>() : Turns(found->second);
      if (turns != ExpectedTurns(i)) {
        return "parameter " + std::to_string(i) + ": " + ::testing::PrintToString(turns) + " for " +
               ::testing::PrintToString(ExpectedTurns(i));
      }
    }
    return node_.fault();
  }

  uint64_t added_together() const { return added_together_; }
  uint64_t moved() { return node_.Logged<CopyToStepArena>().size(); }
  uint64_t widened() { return node_.Logged<PopulateStepArena>().size(); }

 private:
  uint64_t Below(uint64_t bound) { return random_() % bound; }

  // Chooses at random the parameters with a gradient, and ranges that cover them in random pieces and random order.
  void PlanPass(uint32_t rank, uint16_t pass, std::set<uint32_t>& present) {
    std::set<std::pair<uint32_t, uint64_t>> units;
    for (uint32_t i = 0; i < layout_->params().size(); ++i) {
      if (Below(3) == 0) continue;
      present.insert(i);
      for (const auto& unit : UnitsOf(i)) units.insert(unit);
    }
    std::vector<Range> ranges;
    for (const auto& [partition, unit] : units) {
      covered_.insert({partition, unit, pass, rank});
      const uint64_t begin = unit * kGradUnitElems;
      const uint64_t end =
          std::min(begin + kGradUnitElems, layout_->partitions()[partition].gradient_elems);
      const bool joins = !ranges.empty() && ranges.back().partition == partition &&
                         ranges.back().end == begin && Below(3) > 0;
      if (joins) {
        ranges.back().end = end;
      } else {
        ranges.push_back({.partition = partition, .pass = pass, .begin = begin, .end = end});
      }
    }
    std::ranges::shuffle(ranges, random_);
    to_deliver_[rank].insert(to_deliver_[rank].end(), ranges.begin(), ranges.end());
  }

  std::vector<std::pair<uint32_t, uint64_t>> UnitsOf(uint32_t param) const {
    std::vector<std::pair<uint32_t, uint64_t>> units;
    for (const protocol::BoxPlace& place : layout_->boxes()) {
      if (place.box.param != param) continue;
      const uint64_t last = (place.partition_elem + place.box.elems() - 1) / kGradUnitElems;
      for (uint64_t unit = place.partition_elem / kGradUnitElems; unit <= last; ++unit) {
        units.emplace_back(place.partition, unit);
      }
    }
    return units;
  }

  // Returns the turns in which the parameter's gradients are added. Empty if no rank says that it has a gradient.
  std::vector<Turn> ExpectedTurns(uint32_t param) const {
    std::vector<Turn> turns;
    bool any = false;
    for (uint32_t rank = 0; rank < world_size_; ++rank) any = any || present_.at({rank, param});
    for (uint16_t pass = 0; any && pass < 4; ++pass) {
      for (uint32_t rank = 0; rank < world_size_; ++rank) {
        const bool covers = std::ranges::all_of(UnitsOf(param), [&](const auto& unit) {
          return covered_.contains({unit.first, unit.second, pass, rank});
        });
        if (covers) turns.emplace_back(pass, rank);
      }
    }
    return turns;
  }

  // Lets one rank deliver or call step, or lets a task end. Returns false if none of these is possible.
  bool Act(uint64_t step, std::vector<std::optional<uint64_t>>& calls) {
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      if (calls[rank]) continue;
      const auto& left = to_deliver_[rank];
      const uint64_t width = protocol::SizeBytes(layout_->grad_dtype());
      if (left.empty() ||
          node_.FreeOffset(sessions_[rank], (left[0].end - left[0].begin) * width)) {
        ranks.push_back(rank);
      }
    }
    const uint64_t tasks = node_.model().running().size();
    if (ranks.empty() && tasks == 0) return false;
    const uint64_t chosen = Below(ranks.size() + std::min<uint64_t>(tasks, 2));
    if (chosen >= ranks.size()) {
      auto task = node_.model().running().begin();
      std::advance(task, static_cast<int64_t>(Below(tasks)));
      if (const auto* add = std::get_if<AddGradients>(&task->second)) {
        added_together_ += add->sources.size() > 1 ? 1 : 0;
      }
      node_.Finish(task->first);
      return true;
    }
    const uint32_t rank = ranks[chosen];
    auto& left = to_deliver_[rank];
    if (left.empty()) {
      for (uint32_t i = 0; i < layout_->params().size(); ++i) {
        node_.SetPresent(sessions_[rank], i, present_.at({rank, i}));
      }
      calls[rank] = node_.Step(sessions_[rank], step);
      return true;
    }
    const Range range = left.front();
    left.erase(left.begin());
    for (; passes_[rank] < range.pass; ++passes_[rank]) node_.BeginPass(sessions_[rank]);
    node_.GradientRange(sessions_[rank], range.partition, range.begin, range.end, step);
    return true;
  }

  std::mt19937_64 random_;
  const uint32_t world_size_;
  const std::shared_ptr<const protocol::Layout> layout_;
  NodeHarness node_;
  std::vector<uint64_t> sessions_;
  std::vector<std::vector<Range>> to_deliver_;  // by rank; the front is next
  std::vector<uint16_t> passes_;                // Number of passes that each rank has begun.
  std::map<std::pair<uint32_t, uint32_t>, bool> present_;  // by rank and parameter
  // Delivered ranges, as (partition, unit, pass, rank).
  std::set<std::tuple<uint32_t, uint64_t, uint16_t, uint32_t>> covered_;
  uint64_t added_together_ = 0;
};

constexpr uint64_t kPrograms = 120;

TEST(NodeStatePassesProperty, RandomProgramsAreAddedInOrderAndEnd) {
  const char* const given = std::getenv("FOREBAY_SEED");
  const uint64_t first = given == nullptr ? 4711 : std::strtoull(given, nullptr, 10);
  uint64_t together = 0;
  uint64_t moved = 0;
  uint64_t widened = 0;
  for (uint64_t seed = first; seed < first + kPrograms; ++seed) {
    RandomPrograms programs(seed);
    for (uint64_t step = 1; step <= 3; ++step) {
      ASSERT_EQ(programs.RunStep(step), "") << "FOREBAY_SEED=" << seed << ", step " << step;
    }
    together += programs.added_together();
    moved += programs.moved();
    widened += programs.widened();
  }
  EXPECT_GT(together, 100U) << "several contributions in one pass over memory";
  EXPECT_GT(moved, 100U) << "what waits while its arena is full";
  EXPECT_GT(widened, 10U) << "sums of 16 bits";
}

// --------------------------------------------------------------------------------- sums in 16 bits

class NodeStatePassesNarrow : public ::testing::Test {
 protected:
  explicit NodeStatePassesNarrow(const NodeState::Options& options = RoomyOptions())
      : node_(options, 1) {}
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  static std::shared_ptr<const protocol::Layout> Layout16() {
    return MakeLayoutOfParams({{9000, 100}}, protocol::DType::kBFloat16);
  }
  void AttachWorld(uint32_t world_size, bool accumulate = false) {
    for (const uint64_t session : sessions_) node_.End(session, EndCause::kDetached);
    node_.RunTasks();
    sessions_.clear();
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      sessions_.push_back(node_.Attach(
          layout_, {.rank = rank, .world_size = world_size, .accumulate = accumulate}));
      ASSERT_OK(node_.attached(sessions_.back())->status);
    }
  }
  void TrainStep(uint64_t step, uint32_t passes) {
    for (uint32_t rank = 0; rank < sessions_.size(); ++rank) {
      node_.EndPasses(sessions_[rank]);
      for (uint32_t pass = 0; pass < passes; ++pass) {
        if (pass > 0) node_.BeginPass(sessions_[rank]);
        node_.Gradient(sessions_[rank], 0, step);
      }
    }
    EXPECT_THAT(node_.StepAll(sessions_, step), Each(ErrorId::kNone));
    EXPECT_EQ(node_.model().committed_gradients(1).at(0).size(), passes * sessions_.size());
  }
  protocol::DType SumsOfNewestUpdate() { return node_.Logged<UpdateBlock>().back().sum_dtype; }

  std::shared_ptr<const protocol::Layout> layout_ = Layout16();
  NodeHarness node_;
  std::vector<uint64_t> sessions_;
};

TEST_F(NodeStatePassesNarrow, BecomeFloat32WithTheFirstFurtherPassOfAWorldOfOne) {
  AttachWorld(1);
  TrainStep(1, 1);
  EXPECT_EQ(SumsOfNewestUpdate(), protocol::DType::kBFloat16);
  TrainStep(2, 3);
  EXPECT_EQ(SumsOfNewestUpdate(), protocol::DType::kFloat32);
  EXPECT_EQ(node_.Logged<PopulateStepArena>().size(), 1U);
  const uint64_t used_bytes = node_.state().Node().dram_used_bytes;
  AttachWorld(2);  // A world of two ranks always has float32 sums.
  TrainStep(3, 2);
  EXPECT_EQ(node_.Logged<PopulateStepArena>().size(), 1U);
  AttachWorld(1);
  TrainStep(4, 1);
  EXPECT_EQ(SumsOfNewestUpdate(), protocol::DType::kBFloat16);
  TrainStep(5, 2);
  EXPECT_EQ(node_.Logged<PopulateStepArena>().size(), 2U);
  EXPECT_EQ(node_.state().Node().dram_used_bytes, used_bytes);
}

TEST_F(NodeStatePassesNarrow, AreFloat32FromTheStartWhereARankAsksForItOnceNoneIsAttached) {
  AttachWorld(1);
  TrainStep(1, 1);
  const uint64_t used_bytes = node_.state().Node().dram_used_bytes;
  AttachWorld(1, /*accumulate=*/true);
  EXPECT_EQ(node_.Logged<ReplaceStepArena>().size(), 1U);
  EXPECT_EQ(node_.state().Node().dram_used_bytes, used_bytes + 4 * 4096)
      << "sums of 9100 elements: 9 pages for 5, " << used_bytes;
  TrainStep(2, 2);
  EXPECT_EQ(SumsOfNewestUpdate(), protocol::DType::kFloat32);
  EXPECT_TRUE(node_.Logged<PopulateStepArena>().empty());
  AttachWorld(1);  // The float32 sums remain, although the rank does not ask for them again.
  EXPECT_EQ(node_.Logged<ReplaceStepArena>().size(), 1U);
  AttachWorld(2);
  AttachWorld(2, /*accumulate=*/true);
  TrainStep(3, 2);
}

TEST_F(NodeStatePassesNarrow, AreInThePlan) {
  const auto sums_of = [this](uint32_t world_size, bool accumulate) {
    AttachRequested request = ::forebay::testing::RequestOf(layout_, world_size);
    request.session_request.accumulate = accumulate;
    const absl::StatusOr<JobPlan> plan = node_.state().Plan(request, std::nullopt);
    EXPECT_OK(plan.status());
    return plan.ok() ? plan->sums : 0;
  };
  EXPECT_EQ(sums_of(1, true), sums_of(1, false) + 4 * 4096)
      << "of 9100 elements 9 pages in place of 5";
  EXPECT_EQ(sums_of(2, true), sums_of(2, false)) << "they have 4 bytes anyway";
}

TEST(NodeStatePassesKill, AnUpdateFromSumsThatBecameFloat32LateGoesOn) {
  NodeState::Options options = RoomyOptions();
  options.keeps_jobs = true;
  const auto layout = MakeLayoutOfParams({{9000, 100}}, protocol::DType::kBFloat16);
  const auto call_step = [](NodeHarness& node, uint64_t session, uint64_t step) {
    node.EndPasses(session);
    node.Gradient(session, 0, step);
    node.BeginPass(session);
    node.Gradient(session, 0, step);
    node.RunTasks();
    return node.Step(session, step);
  };
  NodeHarness node(options, 1);
  const uint64_t session = node.Attach(layout, {});
  call_step(node, session, 1);
  node.RunTasks();
  call_step(node, session, 2);
  EXPECT_EQ(node.FinishUntil<UpdateBlock>().sum_dtype, protocol::DType::kFloat32);
  const std::unique_ptr<NodeHarness> next = NodeHarness::AfterKill(node, options);
  ASSERT_NE(next, nullptr);
  next->RunTasks();
  const uint64_t again = next->Attach(layout, {.reattach = true});
  ASSERT_OK(next->attached(again)->status);
  EXPECT_EQ(next->FindJob("job")->committed_step, 2U);
  ASSERT_FALSE(next->Logged<UpdateBlock>().empty()) << "the update was to be resumed";
  EXPECT_EQ(next->Logged<UpdateBlock>()[0].sum_dtype, protocol::DType::kFloat32);
  const uint64_t tag = call_step(*next, again, 3);
  next->RunTasks();
  EXPECT_EQ(next->ErrorOf(tag), ErrorId::kNone);
  EXPECT_TRUE(next->Logged<PopulateStepArena>().empty());
  EXPECT_EQ(next->fault(), "");
}

class NodeStatePassesTight : public NodeStatePassesNarrow {
 protected:
  NodeStatePassesTight() : NodeStatePassesNarrow(Tight()) {}

  static NodeState::Options Tight() {
    NodeHarness roomy(RoomyOptions(), 1);
    roomy.Attach(Layout16(), {});
    NodeState::Options options = RoomyOptions();
    options.dram_limit_bytes = roomy.state().Node().dram_used_bytes + 8 * 4096;
    return options;
  }
};

TEST_F(NodeStatePassesTight, AreRefusedWithTheNumbersAndWhatToWrite) {
  AttachWorld(1);
  node_.Gradient(sessions_[0], 0, 1);
  node_.BeginPass(sessions_[0]);
  node_.Gradient(sessions_[0], 0, 1);
  node_.RunTasks();
  const uint64_t tag = node_.Step(sessions_[0], 1);
  node_.RunTasks();
  ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kDramLimit);
  const absl::Status& status = node_.answer(tag)->status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("needs sums in float32, 36864 bytes"));
  EXPECT_THAT(protocol::HintOf(status), HasSubstr("call step after each backward pass"));
  node_.SetAttempt(sessions_[0], 1);
  TrainStep(1, 1);
}

}  // namespace
}  // namespace forebay::daemon::node_state_passes_test
