// SPDX-License-Identifier: Apache-2.0
// Goal    After the daemon dies at any point, all blocks of a job are at one step, and the job trains on from that step. At
//         level `step` no answered step is lost; at level `epoch=N` at most N are. No slot of the last two ledgers is written.
//         A slot of a deleted job is not reused before both ledgers are superseded.
// Method  The harness. Its model reports a fault if a ledger names bytes of another step, if bytes change while they are saved,
//         or if a slot of a durable ledger is written. The node dies after each task of some steps in turn, and a new node
//         starts from the model's disk. Flushes fail, and the writes before a failed flush are lost for good.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/core/blocks/block_map.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/durability.h"
#include "tests/support/job_cases.h"
#include "tests/support/node_harness.h"
#include "tests/support/points.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_durable_test {
namespace {

using ::forebay::testing::AttachRequest;
using ::forebay::testing::HasError;
using ::forebay::testing::JobCase;
using ::forebay::testing::LayoutOf;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::OptionsOf;
using ::forebay::testing::Place;
using ::forebay::testing::RequestOf;
using ::forebay::testing::RoomyCaseOptions;
using ::forebay::testing::SwapPaths;
using protocol::Durability;
using protocol::DurabilityLevel;
using protocol::ErrorId;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

uint64_t NumberOr(const char* variable, uint64_t number) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? number : std::strtoull(text, nullptr, 10);
}

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.
constexpr uint32_t kRanks = testing::kCaseRanks;
constexpr Durability kStep{.level = DurabilityLevel::kStep, .steps = 1};
constexpr Durability kEpoch{.level = DurabilityLevel::kEpoch, .steps = 2};

// The ranks of one job on a node. When the node has died, they attach to the next node.
class Training {
 public:
  Training(const JobCase& with, const NodeState::Options& options)
      : with_(with), options_(options), node_(std::make_unique<NodeHarness>(options, kRanks)) {}

  void AttachAll() {
    sessions_.clear();
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      sessions_.push_back(node_->Attach(layout_, RequestOf(rank, with_)));
    }
    ASSERT_OK(StatusOf(0));
    ASSERT_OK(StatusOf(1));
    ASSERT_EQ(View().weights_on_swap_bytes > 0, with_.place == Place::kWeightsOnSwap);
    step_ = node_->attached(sessions_[0])->committed_step + 1;
    Begin();
  }
  absl::Status StatusOf(uint32_t rank) const {
    const AnswerAttach* answer = node_->attached(sessions_.at(rank));
    return answer == nullptr ? absl::UnavailableError("no answer yet") : answer->status;
  }

  // Does the next action of the current step (a delivery or a call), or ends the oldest task.
  void Turn() {
    if (!to_do_.empty() && turn_++ % 2 == 0) {
      const auto next = to_do_.front();
      to_do_.erase(to_do_.begin());
      next();
      return;
    }
    if (!node_->model().running().empty()) FinishOldest();
    const bool is_answered =
        !calls_.empty() && to_do_.empty() && std::ranges::all_of(calls_, [this](uint64_t call) {
          return node_->ErrorOf(call) != kUnanswered;
        });
    if (!is_answered) return;
    for (const uint64_t call : calls_) EXPECT_EQ(node_->ErrorOf(call), ErrorId::kNone);
    answered_ = step_++;
    Begin();
  }

  // Runs at most `turns` turns, until every rank has been answered `step`.
  void TrainTo(uint64_t step, int turns = 2000) {
    for (int turn = 0; turn < turns && answered_ < step; ++turn) Turn();
    ASSERT_EQ(answered_, step);
  }

  // Makes the flushes of half of the later commits fail.
  void FailFlushes(std::mt19937_64& random) { failing_ = &random; }
  uint64_t failed_flushes() const { return failed_flushes_; }

  void Die() {
    EXPECT_EQ(node_->fault(), "");
    node_ = NodeHarness::Restart(*node_, options_);
  }

  void CutPower(std::mt19937_64& random) {
    EXPECT_EQ(node_->fault(), "");
    node_ = NodeHarness::Restart(node_->model().AfterPowerCut(random), kRanks, options_);
  }

  JobView View() const { return *node_->FindJob("job"); }

  const JobCase with_;
  const NodeState::Options options_;
  const std::shared_ptr<const protocol::Layout> layout_ = LayoutOf(with_);
  std::unique_ptr<NodeHarness> node_;
  std::vector<uint64_t> sessions_;
  uint64_t step_ = 1;      // The current step.
  uint64_t answered_ = 0;  // Newest step that every rank was answered.

 private:
  void FinishOldest() {
    const auto& [task, action] = *node_->model().running().begin();
    const bool fails = failing_ != nullptr && std::holds_alternative<CommitLedger>(action) &&
                       (*failing_)() % 2 == 0;
    if (!fails) return node_->Finish(task);
    ++failed_flushes_;
    node_->FailFlush();
  }

  void Begin() {
    calls_.clear();
    to_do_.clear();
    for (const uint64_t session : sessions_) {
      if (with_.early_updates) to_do_.push_back([=, this] { node_->Announce(session, step_); });
    }
    for (uint32_t i = static_cast<uint32_t>(layout_->partitions().size()); i-- > 0;) {
      const uint64_t session = sessions_[layout_->partitions()[i].owner];
      to_do_.push_back([=, this] { node_->Gradient(session, i, step_); });
    }
    for (const uint64_t session : sessions_) {
      to_do_.push_back([=, this] {
        calls_.push_back(node_->Step(session, step_, 0.1, 0, /*extra_state_bytes=*/32));
      });
    }
  }

  std::mt19937_64* failing_ = nullptr;
  uint64_t failed_flushes_ = 0;
  uint64_t turn_ = 0;
  std::vector<std::function<void()>> to_do_;
  std::vector<uint64_t> calls_;
};

class NodeStateDurable : public ::testing::TestWithParam<JobCase> {
 protected:
  // Number of steps that the level allows a death to undo.
  static uint64_t lost_most() {
    const Durability& level = GetParam().durability;
    return level.level == DurabilityLevel::kStep ? 0 : level.steps;
  }
};

TEST_P(NodeStateDurable, ADeathAtAnyPointLosesNoMoreStepsThanTheLevelAllows) {
  const NodeState::Options options = OptionsOf(GetParam());
  constexpr uint64_t kSteps = 4;
  std::set<uint64_t> recovered_at;
  const std::vector<uint64_t> points = testing::PointsOf<Training>(GetParam(), options, kSteps);
  for (const uint64_t point : points) {
    Training run(GetParam(), options);
    run.AttachAll();
    for (uint64_t turns = 0; turns < point; ++turns) run.Turn();
    const uint64_t answered = run.answered_;
    run.Die();
    const uint64_t durable =
        run.node_->model().durable().jobs.empty() ? 0 : run.node_->model().durable().jobs[0]->step;
    ASSERT_GE(durable + lost_most(), answered) << "point " << point;
    run.AttachAll();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "point " << point;
    ASSERT_EQ(run.step_, durable + 1) << "point " << point;
    ASSERT_EQ(run.node_->attached(run.sessions_[1])->writes_initial, durable == 0);
    ASSERT_EQ(run.node_->attached(run.sessions_[1])->extra_state_bytes, durable > 0 ? 32U : 0U);
    recovered_at.insert(durable);
    const uint64_t goal = durable + 2;
    ASSERT_NO_FATAL_FAILURE(run.TrainTo(goal)) << "point " << point;
    ASSERT_EQ(run.node_->fault(), "") << "point " << point;
    // The second node's ledger is recovered too.
    run.Die();
    run.AttachAll();
    ASSERT_GE(run.step_ - 1 + lost_most(), goal) << "point " << point;
    for (uint64_t turn = 0; turn < 2000 && run.answered_ < goal + 1; ++turn) run.Turn();
    ASSERT_EQ(run.node_->fault(), "") << "point " << point;
  }
  EXPECT_GE(points.size(), 20U);
  EXPECT_GE(recovered_at.size(), 2U);
}

// After a power cut, any subset of the writes since the last flush is on the disk.
TEST_P(NodeStateDurable, APowerCutLosesNoMoreStepsThanTheLevelAllows) {
  const NodeState::Options options = OptionsOf(GetParam());
  const uint64_t cuts = NumberOr("FOREBAY_CUTS", 100);
  std::mt19937_64 random(NumberOr("FOREBAY_SEED", 14));
  // Number of recoveries at another step than the answered one, because an answer was not sent or the level allows lost steps.
  uint64_t others = 0;
  uint64_t cut = 0;
  while (cut < cuts) {
    Training run(GetParam(), options);
    run.AttachAll();
    // The same volume has several power cuts in turn.
    for (int life = 0; life < 4 && cut < cuts; ++life, ++cut) {
      const uint64_t before = run.step_ - 1;
      run.answered_ = before;
      const uint64_t turns = random() % 200;
      for (uint64_t turn = 0; turn < turns; ++turn) run.Turn();
      // Every second power cut happens while a ledger is committed.
      for (int turn = 0; cut % 2 == 0 && turn < 200; ++turn) {
        if (!run.node_->Running<CommitLedger>().empty()) break;
        run.Turn();
      }
      ASSERT_EQ(run.node_->fault(), "") << "cut " << cut;
      const uint64_t answered = run.answered_;
      run.CutPower(random);
      run.AttachAll();
      ASSERT_FALSE(::testing::Test::HasFailure()) << "cut " << cut;
      ASSERT_GE(run.step_ - 1 + lost_most(), answered) << "cut " << cut;
      others += run.step_ - 1 != answered ? 1 : 0;
    }
    const uint64_t goal = run.step_;
    run.answered_ = goal - 1;
    ASSERT_NO_FATAL_FAILURE(run.TrainTo(goal)) << "cut " << cut;
    ASSERT_EQ(run.node_->fault(), "") << "cut " << cut;
  }
  RecordProperty("cuts", static_cast<int>(cuts));
  EXPECT_GT(others, 0U);
}

// After a failed flush, a power cut loses all writes since the last good flush, even if a later flush succeeded.
TEST_P(NodeStateDurable, AFailedFlushDelaysStepsAndLosesNone) {
  const NodeState::Options options = OptionsOf(GetParam());
  const uint64_t runs = NumberOr("FOREBAY_CUTS", 50);
  std::mt19937_64 random(NumberOr("FOREBAY_SEED", 15));
  uint64_t failed = 0;
  uint64_t relocated = 0;
  for (uint64_t i = 0; i < runs; ++i) {
    Training run(GetParam(), options);
    run.FailFlushes(random);
    run.AttachAll();
    const uint64_t goal = random() % 5;
    ASSERT_NO_FATAL_FAILURE(run.TrainTo(goal, 5000)) << "run " << i;
    for (uint64_t turn = random() % 100; turn > 0; --turn) run.Turn();
    const uint64_t answered = run.answered_;
    failed += run.failed_flushes();
    relocated += run.View().moves.relocated;
    run.CutPower(random);
    run.AttachAll();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "run " << i;
    ASSERT_GE(run.step_ - 1 + lost_most(), answered) << "run " << i;
    const uint64_t after = run.step_;
    run.answered_ = after - 1;
    ASSERT_NO_FATAL_FAILURE(run.TrainTo(after, 5000)) << "run " << i;
    ASSERT_EQ(run.node_->fault(), "") << "run " << i;
  }
  EXPECT_GT(failed, runs / 4);
  EXPECT_EQ(relocated > 0, GetParam().place != Place::kDram);
}

TEST_P(NodeStateDurable, SlotsAreThoseOfThePlan) {
  const NodeState::Options options = OptionsOf(GetParam());
  Training run(GetParam(), options);
  run.AttachAll();
  const uint64_t swap_bytes = run.View().swap_bytes;
  ASSERT_NO_FATAL_FAILURE(run.TrainTo(6, 3000));
  EXPECT_EQ(run.View().swap_bytes, swap_bytes);
}

INSTANTIATE_TEST_SUITE_P(
    Levels, NodeStateDurable,
    ::testing::Values(JobCase{kStep, Place::kDram}, JobCase{kStep, Place::kSwap},
                      JobCase{kStep, Place::kHalf}, JobCase{kStep, Place::kWeightsOnSwap},
                      JobCase{kEpoch, Place::kDram}, JobCase{kEpoch, Place::kSwap, true},
                      JobCase{kEpoch, Place::kHalf, true},
                      JobCase{kEpoch, Place::kWeightsOnSwap, true}));

// Reads of a slot whose write the disk has lost return its old bytes, or those of another block.
TEST(NodeStateDurableLoss, WhatTheDiskHasLostIsNeverNamed) {
  for (const Place place : {Place::kSwap, Place::kWeightsOnSwap}) {
    const JobCase with{kStep, place};
    const NodeState::Options options = OptionsOf(with);
    Training run(with, options);
    run.AttachAll();
    ASSERT_NO_FATAL_FAILURE(run.TrainTo(2));
    while (run.node_->Running<CommitLedger>().empty()) run.Turn();
    run.node_->FailFlush();
    run.node_->model().LoseDoubted();
    run.node_->RunTasks();
    EXPECT_THAT(run.View().failed, HasError(ErrorId::kCorrupt));
    EXPECT_THAT(std::string(run.View().failed.message()), HasSubstr("block"));
    EXPECT_EQ(run.View().durable_step, 2U);
    EXPECT_EQ(run.node_->model().durable().jobs[0]->step, 2U);
    run.Die();
    run.AttachAll();
    ASSERT_EQ(run.step_, 3U);
    run.answered_ = 2;
    ASSERT_NO_FATAL_FAILURE(run.TrainTo(4));
    EXPECT_EQ(run.node_->fault(), "");
  }
}

// If a ledger still named the failed job's doubtful slots, the steps of the other job would wait for that ledger.
TEST(NodeStateDurableLoss, AFailedJobHoldsUpNoOther) {
  const JobCase with{kEpoch, Place::kHalf};
  NodeState::Options options = RoomyCaseOptions();
  options.swap = SwapPaths({8 << 20, 8 << 20});
  NodeHarness node(options, kRanks);
  const auto layout = LayoutOf(with);
  std::map<std::string, std::vector<uint64_t>> sessions;
  for (const std::string job : {"failing", "well"}) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      AttachRequest request = RequestOf(rank, with);
      request.job = job;
      sessions[job].push_back(node.Attach(layout, request));
      ASSERT_OK(node.attached(sessions[job].back())->status);
    }
  }
  const auto deliver = [&](const std::string& job, uint64_t step) {
    for (uint32_t i = 0; i < layout->partitions().size(); ++i) {
      node.Gradient(sessions[job][layout->partitions()[i].owner], i, step);
    }
  };
  const auto train = [&](const std::string& job, uint64_t step) {
    deliver(job, step);
    for (const uint64_t session : sessions[job]) (void)node.Step(session, step);
  };
  for (const uint64_t step : {1UL, 2UL}) {
    train("failing", step);
    if (step == 1) node.RunTasks();
  }
  (void)node.FinishUntil<CommitLedger>();
  node.Gradient(sessions["failing"][layout->partitions()[0].owner], 0, 3);
  const std::vector<AddGradients> adding = node.Running<AddGradients>();
  ASSERT_THAT(adding, SizeIs(1));
  node.Finish(adding[0].task, protocol::MakeError(ErrorId::kInternal, "simulated"));
  ASSERT_THAT(node.FindJob("failing")->failed, HasError(ErrorId::kInternal));
  node.FailFlush();
  for (const uint64_t step : {1UL, 2UL}) {
    train("well", step);
    for (int task = 0; task < 1000 && !node.model().running().empty(); ++task) {
      node.Finish(node.model().running().begin()->first);
    }
  }
  EXPECT_EQ(node.FindJob("well")->durable_step, 2U);
  EXPECT_EQ(node.fault(), "");
}

// A write between steps needs one more slot for each block, and a frozen slot until two durable steps later. If swap lacks
// slots, the write ends with E_SWAP_NOSPC and nothing is lost.
TEST(NodeStateDurableLoss, WritesBetweenStepsNeverTakeTheSlotsOfTheNext) {
  for (const Place place : {Place::kSwap, Place::kWeightsOnSwap}) {
    const JobCase with{kStep, place};
    NodeState::Options options = OptionsOf(with);
    Training sized(with, options);
    sized.AttachAll();
    for (const uint64_t more : {0UL, 1UL, 3UL, 7UL, 40UL}) {
      options.swap = SwapPaths({sized.View().swap_bytes * (100 + more) / 100});
      Training run(with, options);
      run.AttachAll();
      uint64_t refused = 0;
      uint64_t written = 0;
      for (uint64_t step = 1; step <= 5; ++step) {
        ASSERT_NO_FATAL_FAILURE(run.TrainTo(step)) << more;
        run.node_->RunTasks();
        std::vector<uint64_t> writes;
        for (uint32_t i = 0; step < 5 && i < run.layout_->partitions().size(); ++i) {
          writes.push_back(
              run.node_->WriteState(run.sessions_[run.layout_->partitions()[i].owner], i));
        }
        run.node_->RunTasks();
        for (const uint64_t write : writes) {
          ASSERT_NE(run.node_->ErrorOf(write), kUnanswered);
          (run.node_->ErrorOf(write) == ErrorId::kSwapNospc ? refused : written) += 1;
        }
        ASSERT_EQ(run.node_->fault(), "") << "step " << step;
      }
      EXPECT_EQ(refused > 0, more < 40);
      EXPECT_GT(written, 0U);
    }
  }
}

// Refused writes store nothing on swap, so that their slots remain free for other jobs.
TEST(NodeStateDurableLoss, WritesThatAreRefusedTakeNoSlots) {
  const JobCase with{kStep, Place::kSwap};
  Training run(with, OptionsOf(with));
  run.AttachAll();
  ASSERT_NO_FATAL_FAILURE(run.TrainTo(3));
  run.node_->RunTasks();
  const uint64_t before = run.View().swap_bytes;
  for (int i = 0; i < 20; ++i) {
    const uint64_t write = run.node_->WriteState(run.sessions_[0], 0);
    TaskDone done = run.node_->model().Finish(run.node_->FinishUntil<SetState>().task);
    done.count = 1;
    run.node_->Send(done);
    EXPECT_EQ(run.node_->ErrorOf(write), ErrorId::kNonfinite);
  }
  EXPECT_LE(run.View().swap_bytes, before + run.View().swap_bytes / run.View().blocks);
}

// The blocks are marked for eviction while a durable step is in progress. Surplus slots are freed after the evictions.
TEST(NodeStateDurableLoss, BlocksThatAreToBeEvictedKeepTheirSlots) {
  const JobCase with{kStep, Place::kDram};
  Training run(with, RoomyCaseOptions());
  run.AttachAll();
  while (run.node_->Running<CommitLedger>().empty()) run.Turn();
  const uint64_t before = run.View().swap_bytes;
  for (uint32_t block = 0; block < run.View().blocks; ++block) {
    run.node_->Send(BlockMoveRequested{.job = run.View().id, .block = block});
  }
  const uint64_t marked = run.View().swap_bytes;
  EXPECT_GT(marked, before);
  run.node_->Finish(run.node_->Running<CommitLedger>()[0].task);
  EXPECT_EQ(run.View().swap_bytes, marked);
  ASSERT_NO_FATAL_FAILURE(run.TrainTo(5, 4000));
  EXPECT_GT(run.View().moves.evicted, 0U);
  EXPECT_EQ(run.View().swap_bytes, before);
  EXPECT_EQ(run.node_->fault(), "");
}

class NodeStateDurableJob : public ::testing::Test {
 protected:
  NodeStateDurableJob() : run_({kStep, Place::kDram}, RoomyCaseOptions()) { run_.AttachAll(); }
  void TearDown() override { EXPECT_EQ(run_.node_->fault(), ""); }
  void TrainTo(uint64_t step) { run_.TrainTo(step); }
  void EndAll() {
    for (const uint64_t session : run_.sessions_) {
      run_.node_->End(session, EndCause::kDetached);
    }
    run_.node_->RunTasks();
  }
  NodeHarness& node() { return *run_.node_; }

  Training run_;
};

TEST_F(NodeStateDurableJob, ACallIsAnsweredWhenItsStepIsDurable) {
  while (node().Running<CommitLedger>().empty()) run_.Turn();
  EXPECT_EQ(run_.View().published_step, 1U);
  EXPECT_EQ(run_.View().durable_step, 0U);
  EXPECT_EQ(run_.answered_, 0U);
  node().Finish(node().Running<CommitLedger>()[0].task);
  EXPECT_EQ(run_.View().durable_step, 1U);
  run_.Turn();
  EXPECT_EQ(run_.answered_, 1U);
}

TEST_F(NodeStateDurableJob, WhatHasNotChangedIsNotSavedAgain) {
  TrainTo(1);
  const size_t first = node().Logged<SavePart>().size();
  // Only group 0 has a gradient in step 2. The frozen parameter and the parameters of the other groups do not change.
  for (uint32_t i = 0; i < run_.layout_->partitions().size(); ++i) {
    if (run_.layout_->partitions()[i].group != 0) continue;
    node().Gradient(run_.sessions_[run_.layout_->partitions()[i].owner], i, 2);
  }
  EXPECT_THAT(node().StepAll(run_.sessions_, 2), Each(ErrorId::kNone));
  const size_t second = node().Logged<SavePart>().size() - first;
  EXPECT_LT(second, first);
  EXPECT_GT(second, 0U);
}

TEST_F(NodeStateDurableJob, WhatWasWrittenBetweenStepsIsSavedWithTheNext) {
  TrainTo(1);
  node().RunTasks();
  const auto partitions = run_.layout_->partitions();
  const auto owner = [&](uint32_t partition) {
    return run_.sessions_[partitions[partition].owner];
  };
  EXPECT_EQ(node().ErrorOf(node().WriteState(owner(0), 0)), kUnanswered);
  node().RunTasks();
  std::set<uint32_t> changed = {0};  // partitions
  for (uint32_t i = 0; i < partitions.size(); ++i) {
    if (partitions[i].group != 1) continue;
    node().Gradient(owner(i), i, 2);
    changed.insert(i);
  }
  EXPECT_THAT(node().StepAll(run_.sessions_, 2), Each(ErrorId::kNone));
  const BlockMap map(run_.layout_, RoomyCaseOptions().block_elems);
  std::set<uint64_t> blocks;
  for (uint32_t block = 0; block < map.blocks(); ++block) {
    for (const uint32_t partition : map.Partitions(block)) {
      if (changed.contains(partition)) blocks.insert(block);
    }
  }
  ASSERT_LT(blocks.size(), map.blocks());
  std::set<uint64_t> saved;
  std::set<uint64_t> saved_parts;
  for (const SavePart& save : node().Logged<SavePart>()) {
    if (save.identity.written_step != 2) continue;
    (save.arena == SavedArena::kStates ? saved : saved_parts).insert(save.identity.block);
  }
  EXPECT_EQ(saved, blocks);
  // Part 0 also holds weights of partition 0, which no gradient has changed.
  EXPECT_TRUE(saved_parts.contains(0));
  EXPECT_LT(saved_parts.size(), node().model().durable().jobs[0]->weights.size());
}

TEST_F(NodeStateDurableJob, ASaveThatFailsGoesToAnotherSlot) {
  while (node().Running<SavePart>().empty()) run_.Turn();
  const SavePart failed = node().Running<SavePart>()[0];
  node().Finish(failed.task, protocol::MakeError(ErrorId::kSwapIo, "simulated"));
  EXPECT_THAT(run_.View().swap_wait.message(), HasSubstr("simulated"));
  TrainTo(1);
  const auto saves = node().Logged<SavePart>();
  const auto again = std::ranges::find_if(saves, [&failed](const SavePart& save) {
    return save.task != failed.task && save.identity.block == failed.identity.block &&
           save.arena == failed.arena;
  });
  ASSERT_NE(again, saves.end());
  EXPECT_NE(again->slot, failed.slot);
  EXPECT_OK(run_.View().swap_wait);
}

TEST_F(NodeStateDurableJob, ALedgerThatIsNotDurableIsMadeAgain) {
  while (node().Running<CommitLedger>().empty()) run_.Turn();
  node().Finish(node().Running<CommitLedger>()[0].task,
                protocol::MakeError(ErrorId::kSwapIo, "simulated"));
  EXPECT_EQ(run_.View().durable_step, 0U);
  EXPECT_THAT(run_.View().swap_wait.message(), HasSubstr("simulated"));
  // The parts that the ledger's flush should have covered are written again before the next ledger.
  EXPECT_THAT(node().Running<CommitLedger>(), IsEmpty());
  EXPECT_TRUE(node().FinishUntil<CommitLedger>().pause);
  const auto saves = node().Logged<SavePart>();
  ASSERT_EQ(saves.size() % 2, 0U);
  for (size_t i = 0; i < saves.size() / 2; ++i) {
    const auto again = std::ranges::find_if(
        saves.begin() + static_cast<ptrdiff_t>(saves.size() / 2), saves.end(),
        [&](const SavePart& save) { return save.identity == saves[i].identity; });
    ASSERT_NE(again, saves.end());
    EXPECT_NE(again->slot, saves[i].slot);
  }
  TrainTo(1);
}

TEST_F(NodeStateDurableJob, AJobThatWasDeletedIsGoneAndItsSlotsAreFree) {
  TrainTo(2);
  const uint64_t used = node().state().Node().swap_used_bytes;
  ASSERT_GT(used, 0U);
  EndAll();
  node().Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  while (node().Running<CommitLedger>().empty()) {
    ASSERT_FALSE(node().model().running().empty());
    node().Finish(node().model().running().begin()->first);
  }
  EXPECT_EQ(node().state().Node().swap_used_bytes, used);
  node().Finish(node().Running<CommitLedger>()[0].task);
  // The previous ledger still names the job's slots.
  EXPECT_EQ(node().state().Node().swap_used_bytes, used);
  node().RunTasks();
  EXPECT_EQ(node().state().Node().swap_used_bytes, 0U);
  EXPECT_THAT(node().model().durable().jobs, IsEmpty());
}

TEST_F(NodeStateDurableJob, OneThatNobodyHasAttachedToIsShownAndCanBeDeleted) {
  TrainTo(3);
  run_.Die();
  EXPECT_EQ(run_.View().durable_step, 3U);
  EXPECT_EQ(run_.View().committed_step, 3U);
  EXPECT_THAT(run_.View().sessions, IsEmpty());
  EXPECT_EQ(node().state().Node().swap_used_bytes, run_.View().swap_bytes);
  node().Send(DeleteJobRequested{.request = 1, .uid = 1001, .job = "job"});
  EXPECT_TRUE(node().FindJob("job").has_value());
  node().Send(DeleteJobRequested{.request = 2, .uid = 1000, .job = "job"});
  EXPECT_FALSE(node().FindJob("job").has_value());
  node().RunTasks();
  EXPECT_EQ(node().state().Node().swap_used_bytes, 0U);
}

TEST_F(NodeStateDurableJob, OnlyItsOwnRunLayoutAndLevelGetItBack) {
  TrainTo(1);
  run_.Die();
  const auto refused = [this](const AttachRequest& request,
                              const std::shared_ptr<const protocol::Layout>& layout) {
    return node().attached(node().AttachOnly(layout, request))->status;
  };
  AttachRequest request = RequestOf(0, run_.with_);
  request.run = "another";
  EXPECT_EQ(protocol::IdOf(refused(request, run_.layout_)), ErrorId::kJobExists);
  request = RequestOf(0, run_.with_);
  request.durability = kEpoch;
  const absl::Status level = refused(request, run_.layout_);
  EXPECT_EQ(protocol::IdOf(level), ErrorId::kOption);
  EXPECT_THAT(level.message(), HasSubstr("durability epoch=2: job job has step"));
  EXPECT_EQ(protocol::IdOf(refused(RequestOf(0, run_.with_), testing::ThreeGroups())),
            ErrorId::kLayout);
  EXPECT_EQ(protocol::IdOf(refused({.reader = true}, run_.layout_)), ErrorId::kNotReady);
  request = RequestOf(0, run_.with_);
  request.durability.reset();
  request.run = "another";
  request.resume = true;
  EXPECT_OK(refused(request, run_.layout_));
}

TEST_F(NodeStateDurableJob, OneThatCannotBeReadStaysInTheLedger) {
  TrainTo(2);
  run_.Die();
  const uint64_t session = node().RequestAttach(run_.layout_, RequestOf(0, run_.with_));
  const RestorePart restore = node().FinishUntil<RestorePart>();
  node().Finish(restore.task, protocol::MakeError(ErrorId::kCorrupt, "simulated"));
  node().RunTasks();
  ASSERT_NE(node().attached(session), nullptr);
  EXPECT_EQ(protocol::IdOf(node().attached(session)->status), ErrorId::kCorrupt);
  EXPECT_TRUE(node().is_closed(session));
  EXPECT_EQ(run_.View().durable_step, 2U);
  EXPECT_EQ(node().state().Node().swap_used_bytes, run_.View().swap_bytes);
  EXPECT_THAT(node().Logged<CommitLedger>(), IsEmpty());
  run_.AttachAll();
  EXPECT_EQ(run_.step_, 3U);
  TrainTo(4);
}

TEST_F(NodeStateDurableJob, TrainersThatDieWhileItComesBackLoseNothing) {
  TrainTo(2);
  bool is_back = false;
  for (int tasks = 0; !is_back; ++tasks) {
    ASSERT_LT(tasks, 100);
    SCOPED_TRACE(tasks);
    run_.Die();
    std::vector<uint64_t> sessions;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      sessions.push_back(node().RequestAttach(run_.layout_, RequestOf(rank, run_.with_)));
    }
    for (int done = 0; done < tasks && !node().model().running().empty(); ++done) {
      node().Finish(node().model().running().begin()->first);
    }
    is_back = node().attached(sessions[0]) != nullptr;
    for (const uint64_t session : sessions) node().End(session, EndCause::kLost);
    node().RunTasks();
    ASSERT_TRUE(node().FindJob("job").has_value());
    EXPECT_EQ(run_.View().durable_step, 2U);
    run_.AttachAll();
    ASSERT_EQ(run_.step_, 3U);
  }
}

// A shared job may be attached by another number of ranks, which may request less space for extra_state than the earlier ranks.
TEST(NodeStateDurableWorld, OtherRanksGetWhatWasKeptOfTheirs) {
  const auto layout = testing::MakeLayout({1000, 600});
  for (const uint32_t ranks : {1U, 3U}) {
    SCOPED_TRACE(ranks);
    const auto request = [](uint32_t rank, uint32_t world_size, uint64_t extra_state_bytes) {
      return AttachRequest{.rank = rank,
                           .world_size = world_size,
                           .durability = kStep,
                           .extra_state_bytes = extra_state_bytes};
    };
    NodeHarness node(RoomyCaseOptions(), kRanks);
    std::vector<uint64_t> sessions;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      sessions.push_back(node.Attach(layout, request(rank, kRanks, 4096)));
    }
    for (const uint64_t session : sessions) {
      for (uint32_t group = 0; group < 2; ++group) node.Gradient(session, group, 1);
    }
    for (const uint64_t session : sessions)
      node.Step(session, 1, 0.1, 0, /*extra_state_bytes=*/4000);
    node.RunTasks();
    ASSERT_EQ(node.FindJob("job")->durable_step, 1U);
    const auto next = NodeHarness::Restart(node, RoomyCaseOptions());
    uint64_t end = 0;  // End of the extra_state of the previous rank.
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const uint64_t session = next->AttachOnly(layout, request(rank, ranks, 16));
      ASSERT_OK(next->attached(session)->status);
      const AnswerAttach& answer = *next->attached(session);
      EXPECT_EQ(answer.committed_step, 1U);
      EXPECT_EQ(answer.extra_state_bytes, rank < kRanks ? 4000U : 0U);
      EXPECT_GE(answer.extra_state_offset, end);
      end = answer.extra_state_offset + answer.extra_state_bytes;
    }
    EXPECT_EQ(next->fault(), "");
  }
}

// GOALS section 1: 2 + 10 f bytes a parameter in format exact, f of whose states are in DRAM; within 0.1 %.
TEST(NodeStateDurableBytes, AStepWritesWeightsAndStatesInDramOnce) {
  constexpr uint64_t kGroupElems = uint64_t{8} << 20;
  const auto layout = MakeShardedLayout(
      std::vector<std::vector<testing::ShardedParam>>(8, {{.rows = kGroupElems}}),
      {.ranks = 1, .dtype = protocol::DType::kBFloat16, .format = protocol::Format::kExact});
  NodeState::Options options = testing::RoomyOptions();
  options.dram_limit_bytes = uint64_t{16} << 30;
  options.block_elems = 1 << 20;
  options.staging_slots = 4;
  options.staging_slot_bytes = 12 << 20;
  options.swap = SwapPaths({uint64_t{16} << 30});
  const AttachRequest request{.durability = kStep, .grad_arena_bytes = uint64_t{64} << 20};
  for (const double in_dram : {1.0, 0.5, 0.0}) {
    NodeHarness sizing(options, 1);
    sizing.Attach(layout, request);
    const JobView all = *sizing.FindJob("job");
    NodeState::Options tight = options;
    const auto on_swap = static_cast<uint64_t>((1 - in_dram) * all.blocks);
    tight.dram_limit_bytes =
        sizing.state().Node().dram_used_bytes - on_swap * (all.resident_bytes / all.blocks);
    NodeHarness node(tight, 1);
    const uint64_t session = node.Attach(layout, request);
    const JobView job = *node.FindJob("job");
    EXPECT_NEAR(static_cast<double>(job.resident_blocks) / job.blocks, in_dram, 0.05);
    for (uint64_t step = 1; step <= 2; ++step) {
      for (uint32_t i = 0; i < layout->partitions().size(); ++i) {
        node.Gradient(session, i, step);
        node.RunTasks();
      }
      EXPECT_THAT(node.StepAll({session}, step), Each(ErrorId::kNone));
    }
    uint64_t saved = 0;
    for (const SavePart& save : node.Logged<SavePart>()) {
      if (save.identity.written_step == 2) saved += save.bytes;
    }
    const double expected =
        2.0 * static_cast<double>(layout->total_elems()) + static_cast<double>(job.resident_bytes);
    EXPECT_NEAR(static_cast<double>(saved) / expected, 1.0, 0.001) << in_dram;
    const double states = 10.0 * static_cast<double>(layout->total_elems());
    EXPECT_NEAR(static_cast<double>(job.resident_bytes), states * job.resident_blocks / job.blocks,
                states * 0.001);
    // The ledger is written to both ends of the volume. The test drops the digests, because the model gives digests to blocks
    // without a plane of weights too; real blocks without that plane have none.
    DurableJob durable = *node.model().durable().jobs.at(0);
    for (std::optional<DurableBytes>& block : durable.blocks) {
      if (block) block->weights_digests = nullptr;
    }
    EXPECT_LT(2.0 * static_cast<double>(LedgerBytes(durable)), 0.001 * expected);
  }
}

TEST(NodeStateDurableRefusal, ALedgerThatIsTooSmallForTheJobIsTheError) {
  NodeState::Options options = RoomyCaseOptions();
  options.ledger_bytes_max = 5 << 10;
  const std::pair<uint64_t, const char*> cases[] = {{0, "raise update.block_elems; or set"},
                                                    {1 << 20, "lower extra_state_bytes: buffers"}};
  for (const auto& [extra_state_bytes, hint] : cases) {
    NodeHarness node(options, kRanks);
    AttachRequest request = RequestOf(0, {kStep, Place::kDram});
    request.extra_state_bytes = extra_state_bytes;
    const uint64_t session = node.AttachOnly(LayoutOf({}), request);
    const absl::Status& status = node.attached(session)->status;
    EXPECT_EQ(protocol::IdOf(status), ErrorId::kLimit);
    EXPECT_THAT(status.message(), HasSubstr("bytes of the ledger on swap, which has 5120"));
    EXPECT_THAT(protocol::HintOf(status), HasSubstr(hint));
  }
}

TEST(NodeStateDurableRefusal, ANodeThatCannotKeepStepsSaysWhy) {
  NodeState::Options options = RoomyCaseOptions();
  options.not_durable = protocol::MakeError(ErrorId::kUnsupported, "swap is on tmpfs");
  NodeHarness node(options, kRanks);
  const uint64_t session = node.AttachOnly(LayoutOf({}), RequestOf(0, {kStep, Place::kDram}));
  EXPECT_THAT(node.attached(session)->status.message(), HasSubstr("tmpfs"));
  const uint64_t other = node.AttachOnly(
      LayoutOf({}), {.job = "other", .durability = Durability{}, .grad_arena_bytes = 64 << 10});
  EXPECT_OK(node.attached(other)->status);
}

TEST(NodeStateDurableRefusal, SwapThatIsTooSmallForTheLevelIsTheError) {
  NodeState::Options options = RoomyCaseOptions();
  options.swap = SwapPaths({256 << 10});
  NodeHarness node(options, kRanks);
  const uint64_t session = node.AttachOnly(LayoutOf({}), RequestOf(0, {kStep, Place::kDram}));
  const absl::Status& status = node.attached(session)->status;
  EXPECT_EQ(protocol::IdOf(status), ErrorId::kSwapNospc);
  EXPECT_THAT(status.message(), HasSubstr("durability step needs"));
  EXPECT_THAT(status.message(), HasSubstr("3 for each of"));
}

}  // namespace
}  // namespace forebay::daemon::node_state_durable_test
