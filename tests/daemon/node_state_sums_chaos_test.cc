// SPDX-License-Identifier: Apache-2.0
// Goal    Jobs with gradients on swap act in random order, with any number of staging slots and workers. Each step uses the
//         delivered gradients and is published, and no task waits for an event that never happens.
// Method  The harness and its model of sums (node_state_sums_test.cc), with random schedules from seeds. Gradients are
//         delivered in any order and split anywhere, announced or not, in several passes, or are dropped and delivered again.
//         Ranks ask for norms and are lost, tasks end in any order, and writes fail. At the end the job is deleted.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"
#include "tests/support/sums_job.h"

namespace forebay::daemon::node_state_sums_chaos_test {
namespace {

using ::forebay::testing::LeastDramOf;
using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::ShardedParam;
using ::forebay::testing::SumsJob;
using protocol::ErrorId;
using protocol::kGradUnitElems;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.
constexpr uint64_t kSteps = 5;

// Layout of small trainable parameters, each behind a large frozen parameter. The sums have space for the frozen elements too,
// so that a block spans many pages.
constexpr uint32_t kAdapterRanks = 4;
std::shared_ptr<const protocol::Layout> Adapters(uint32_t groups) {
  const std::vector<ShardedParam> group = {{.rows = 3840 * kAdapterRanks, .trainable = false},
                                           {.rows = 256 * kAdapterRanks}};
  return MakeShardedLayout(std::vector<std::vector<ShardedParam>>(groups, group),
                           {.ranks = kAdapterRanks,
                            .dtype = protocol::DType::kBFloat16,
                            .format = protocol::Format::kExact});
}

class Chaos : public ShardedJob {
 public:
  struct Options {
    std::shared_ptr<const protocol::Layout> layout;
    uint32_t ranks = 0;
    NodeState::Options node = {};
    testing::AttachRequest request = {};
  };

  Chaos(const Options& options, uint32_t seed)
      : ShardedJob(options.layout, options.ranks, options.node),
        request_(options.request),
        random_(seed) {
    node_.set_answered_when(protocol::StepAnswer::kCommitted);
    fail_percent_ = 5 * Below(3);
    Attach();
  }
  uint64_t Below(uint64_t bound) { return random_() % bound; }
  void Attach() {
    sessions_.assign(world_size_, 0);
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      request_.rank = rank;
      sessions_[rank] = node_.Attach(layout_, request_);
      ASSERT_OK(StatusOf(sessions_[rank]));
    }
    ASSERT_TRUE(View().ready);
  }
  bool is_idle() { return node_.model().running().empty(); }
  void FinishOne() {
    auto task = node_.model().running().begin();
    std::advance(task, static_cast<int64_t>(Below(node_.model().running().size())));
    const bool writes = std::holds_alternative<SpillSums>(task->second) ||
                        std::holds_alternative<WriteBlock>(task->second);
    const bool fails = writes && Below(100) < fail_percent_;
    node_.Finish(task->first,
                 fails ? protocol::MakeError(ErrorId::kSwapIo, "simulated") : absl::OkStatus());
  }
  void FinishAll() {
    while (!is_idle()) FinishOne();
  }
  void WaitFor(const std::vector<uint64_t>& tags) {
    const auto is_answered = [this](uint64_t tag) { return node_.ErrorOf(tag) != kUnanswered; };
    while (!std::ranges::all_of(tags, is_answered)) {
      ASSERT_FALSE(is_idle()) << "it waits for nothing";
      FinishOne();
    }
  }

  // Outcome of Gather(), one attempt to deliver a step's gradients. After kDropped the ranks begin a new attempt.
  enum class Attempt : uint8_t { kGathered, kDropped };
  Attempt Gather(uint64_t step, bool may_drop) {
    const uint64_t passes = request_.accumulate ? 1 + Below(3) : 1;
    const bool announces = Below(4) != 0;
    const double lr = Below(3) != 0 ? 0.1 : 0.3;  // Announced learning rate; the step uses 0.1.
    const bool drops = may_drop && Below(5) == 0;
    std::vector<uint64_t> tags;
    for (uint64_t pass = 0; pass < passes; ++pass) {
      for (const uint64_t session : sessions_) {
        if (pass > 0) node_.BeginPass(session);
        if (announces && pass + 1 == passes) node_.Announce(session, step, lr);
      }
      for (const uint32_t partition : Order()) {
        Deliver(partition, step, tags);
        if (drops && Below(layout_->partitions().size()) == 0) return Attempt::kDropped;
      }
    }
    SetPresent();
    const uint64_t asks = Below(3);
    for (const uint64_t session : sessions_) {
      if (asks > 0) continue;
      tags.push_back(node_.GradNorm(session, protocol::kAllParams));
      tags.push_back(node_.GradNorm(session, 0));
    }
    if (asks < 2) WaitFor(tags);
    return Attempt::kGathered;
  }
  void Train(uint64_t step) {
    uint64_t attempt = 0;
    while (Gather(step, attempt < 3) == Attempt::kDropped) {
      ++attempt;
      for (const uint64_t session : sessions_) {
        node_.EndPasses(session);
        node_.SetAttempt(session, attempt);
      }
    }
    if (Below(6) == 0) LoseAllRanks(step);
    std::vector<uint64_t> calls;
    for (const uint64_t session : sessions_) calls.push_back(node_.Step(session, step));
    WaitFor(calls);
    for (const uint64_t call : calls) {
      EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone) << MessageOf(call);
    }
    for (const uint64_t session : sessions_) node_.EndPasses(session);
  }
  void Delete() {
    for (const uint64_t session : sessions_) node_.End(session, EndCause::kDetached);
    node_.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
    FinishAll();
    EXPECT_FALSE(node_.FindJob("job").has_value());
    EXPECT_EQ(node_.state().Node().swap_used_bytes, 0U);
  }

 private:
  std::vector<uint32_t> Order() {
    std::vector<uint32_t> order(layout_->partitions().size());
    std::iota(order.rbegin(), order.rend(), 0);
    if (Below(2) == 0) std::ranges::shuffle(order, random_);
    return order;
  }
  void Deliver(uint32_t partition, uint64_t step, std::vector<uint64_t>& tags) {
    const uint64_t session = sessions_[layout_->partitions()[partition].owner];
    const uint64_t elems = layout_->partitions()[partition].gradient_elems;
    const uint64_t cut = Below((elems - 1) / kGradUnitElems + 1) * kGradUnitElems;
    if (cut > 0) tags.push_back(node_.GradientRange(session, partition, cut, elems, step));
    tags.push_back(node_.GradientRange(session, partition, 0, cut > 0 ? cut : elems, step));
    while (!is_idle() && Below(4) != 0) FinishOne();
  }
  // Marks all gradients as present. The harness marks only parameters that one delivered range holds whole.
  void SetPresent() {
    for (const uint64_t session : sessions_) {
      for (uint32_t param = 0; param < layout_->params().size(); ++param) {
        node_.SetPresent(session, param, layout_->params()[param].trainable);
      }
    }
  }
  void LoseAllRanks(uint64_t step) {
    for (const uint64_t session : sessions_) node_.End(session, EndCause::kLost);
    FinishAll();
    Attach();
    for (uint32_t i = 0; i < layout_->partitions().size(); ++i) {
      node_.Gradient(sessions_[layout_->partitions()[i].owner], i, step);
    }
    SetPresent();
  }

  testing::AttachRequest request_;
  std::mt19937 random_;
  uint64_t fail_percent_ = 0;
};

class NodeStateSumsChaos : public ::testing::TestWithParam<uint32_t> {};

TEST_P(NodeStateSumsChaos, EveryStepUsesWhatWasDelivered) {
  std::mt19937 random(1000 + GetParam());
  Chaos::Options options{.layout = SumsJob::Awkward(), .ranks = SumsJob::kRanks};
  if (random() % 3 == 0) {
    options.ranks = kAdapterRanks;
    options.layout = Adapters(static_cast<uint32_t>(20 + random() % 40));
  }
  options.request = SumsJob::RequestOf(0, /*accumulate=*/random() % 2 == 0);
  options.request.early_updates = random() % 4 != 0;
  options.node = SumsJob::OptionsOf(0);
  options.node.staging_slots = static_cast<uint32_t>(1 + random() % 5);
  options.node.workers = static_cast<uint32_t>(1 + random() % 3);
  options.node.dram_limit_bytes = LeastDramOf(options.layout, options.node, options.ranks,
                                              options.request, /*gradients_in_dram=*/false) +
                                  random() % 4 * (40 << 10);
  Chaos job(options, GetParam());
  for (uint64_t step = 1; step <= kSteps; ++step) {
    SCOPED_TRACE(step);
    job.Train(step);
    if (job.Below(2) == 0) {
      job.FinishAll();
      EXPECT_EQ(job.View().published_step, step);
    }
    ASSERT_EQ(job.node_.fault(), "");
    if (HasFailure()) return;
  }
  job.FinishAll();
  EXPECT_EQ(job.View().published_step, kSteps);
  const BlockMap with_states(job.layout_, job.block_elems_);
  for (const auto& [block, written] : job.node_.model().WrittenSteps(1)) {
    EXPECT_EQ(written, block < with_states.blocks() ? kSteps : 0) << block;
  }
  job.Delete();
  EXPECT_EQ(job.node_.fault(), "");
}

INSTANTIATE_TEST_SUITE_P(Seeds, NodeStateSumsChaos, ::testing::Range(0U, 12U));

// Every page frame holds sums, and one block needs more pages at once than the job has free frames.
TEST(NodeStateSumsOfAdapters, AreUpdatedWhereABlockSpansManyPages) {
  Chaos::Options options{.layout = Adapters(48), .ranks = kAdapterRanks};
  options.request = SumsJob::RequestOf(0, /*accumulate=*/false);
  options.request.early_updates = false;
  options.node = SumsJob::OptionsOf(0);
  options.node.dram_limit_bytes = LeastDramOf(options.layout, options.node, options.ranks,
                                              options.request, /*gradients_in_dram=*/false);
  for (uint32_t seed = 0; seed < 3; ++seed) {
    Chaos job(options, seed);
    ASSERT_GT(job.View().sums_on_swap_bytes, 0U);
    job.Train(1);
    job.FinishAll();
    EXPECT_EQ(job.View().published_step, 1U);
    EXPECT_EQ(job.node_.fault(), "");
  }
}

// All parameters are frozen: the job has no states and no gradients, and only its weights have slots.
TEST(NodeStateSumsOfAdapters, WhereAllIsFrozenAreRefusedOrTakeNoSlots) {
  const auto layout = MakeShardedLayout(
      std::vector<std::vector<ShardedParam>>(8, {{.rows = 64 << 10, .trainable = false}}),
      {.ranks = 2, .dtype = protocol::DType::kBFloat16, .format = protocol::Format::kExact});
  uint64_t admitted = 0;
  for (uint64_t dram = 1 << 20; dram < 16 << 20; dram += 64 << 10) {
    NodeState::Options options = SumsJob::OptionsOf(dram);
    options.swap = testing::SwapPaths({dram / 8});
    NodeHarness node(options, 2);
    const uint64_t session = node.AttachOnly(layout, SumsJob::RequestOf(0, false));
    if (!node.attached(session)->status.ok()) continue;
    ++admitted;
    EXPECT_EQ(node.FindJob("job")->sums_on_swap_bytes, 0U);
  }
  EXPECT_GT(admitted, 0U);
}

}  // namespace
}  // namespace forebay::daemon::node_state_sums_chaos_test
