// SPDX-License-Identifier: Apache-2.0
// Goal    Gradients that do not fit in DRAM are on swap, page by page. Every update uses all delivered gradients and no others,
//         regardless of their order, of the pages written to swap and read again, and of failures. A job trains with the fewest
//         frames with which it is admitted.
// Method  The harness with sharded layouts and the smallest limits. Its model records the content of each frame. The model
//         reports a fault if a gradient is added to the sum of other elements, if an update or a norm reads sums that are
//         absent or not of consecutive elements, if two tasks use one frame at once, or if sums are loaded from a slot that
//         does not hold them.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"
#include "tests/support/sums_job.h"

namespace forebay::daemon::node_state_sums_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::SumsJob;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using protocol::kGradUnitElems;
using ::testing::HasSubstr;

constexpr uint32_t kRanks = SumsJob::kRanks;

// ----------------------------------------------------------------------------------------- the pages

TEST(NodeStateSums, AJobTrainsWithTheFewestFramesThatItIsAdmittedWith) {
  SumsJob job;
  for (uint64_t step = 1; step <= 3; ++step) job.Train(step);
  const JobView view = job.View();
  EXPECT_GT(view.sums_on_swap_bytes, view.sum_frames_bytes / 2);
  EXPECT_GT(view.sums.written_bytes, 0U);
  EXPECT_EQ(view.sums.read_bytes, view.sums.written_bytes) << "nothing was updated early";
  // In each of the three steps, the job writes to swap the sums that do not fit in DRAM, and at most four more pages to have
  // free frames.
  const uint64_t kept = 4 * job.page_bytes();
  EXPECT_GE(view.sums.written_bytes, 3 * view.sums_on_swap_bytes);
  EXPECT_LE(view.sums.written_bytes, 3 * (view.sums_on_swap_bytes + kept));
  EXPECT_EQ(view.step_traffic.gradient_bytes, view.sums_on_swap_bytes);
}

TEST(NodeStateSums, MoreDramLeavesLessOnSwapUntilNoneIs) {
  uint64_t before = UINT64_MAX;
  for (uint64_t more = 0; before > 0; more += 16 << 10) {
    ASSERT_LT(more, 16 << 20);
    NodeHarness node(SumsJob::OptionsOf(SumsJob::LeastDram(false) + more), kRanks);
    ASSERT_OK(
        node.attached(node.AttachOnly(SumsJob::Awkward(), SumsJob::RequestOf(0, false)))->status);
    const JobView view = *node.FindJob("job");
    EXPECT_LE(view.sums_on_swap_bytes, before);
    EXPECT_LE(node.state().Node().dram_used_bytes, SumsJob::LeastDram(false) + more);
    before = view.sums_on_swap_bytes;
  }
}

TEST(NodeStateSums, TooLittleSwapForThemIsRefusedWithTheNumbers) {
  NodeState::Options options = SumsJob::OptionsOf(SumsJob::LeastDram(false));
  uint64_t refused = 0;
  uint64_t admitted = 32 << 20;
  std::string message;
  while (admitted - refused > protocol::kPageBytes) {
    const uint64_t bytes = (refused + admitted) / 2 / protocol::kPageBytes * protocol::kPageBytes;
    options.swap = SwapPaths({bytes});
    NodeHarness node(options, kRanks);
    const uint64_t session = node.AttachOnly(SumsJob::Awkward(), SumsJob::RequestOf(0, false));
    const absl::Status status = node.attached(session)->status;
    if (!status.ok()) {
      EXPECT_THAT(status, HasError(ErrorId::kSwapNospc));
      message = std::string(status.message());
    }
    (status.ok() ? admitted : refused) = bytes;
  }
  EXPECT_THAT(message, HasSubstr("for gradients"));
  options.swap = SwapPaths({admitted});
  NodeHarness node(options, kRanks);
  node.AttachOnly(SumsJob::Awkward(), SumsJob::RequestOf(0, false));
  EXPECT_LE(admitted - node.FindJob("job")->swap_bytes, 64 << 10) << "all of it is used";
}

TEST(NodeStateSums, GradientsOfBlocksThatWereUpdatedEarlyLeaveFirst) {
  SumsJob job(/*accumulate=*/false, 64 << 10);
  job.Announce(1);
  for (auto i = static_cast<uint32_t>(job.layout_->partitions().size()); i-- > 0;) {
    const protocol::PartitionPlace& partition = job.layout_->partitions()[i];
    for (uint64_t elem = 0; elem < partition.elems; elem += kGradUnitElems) {
      job.node_.GradientRange(job.sessions_[partition.owner], i, elem,
                              std::min(elem + kGradUnitElems, partition.elems), 1);
      // Runs all tasks, as with a disk that is faster than the backward pass.
      job.node_.RunTasks();
    }
  }
  job.SetAllPresent();
  EXPECT_EQ(job.View().sums.read_bytes, 0U);
  EXPECT_GT(job.View().sums.written_bytes, 0U);
  job.CallAll(1);
  job.node_.RunTasks();
  job.ExpectTrained(1);
  EXPECT_EQ(job.View().sums.read_bytes, 0U) << "none was needed again";
  EXPECT_EQ(job.View().last_step_early_updates, job.View().blocks);
  // With another learning rate all sums are needed again, including those on swap.
  job.Announce(2, 0.2);
  job.DeliverAll(2);
  job.node_.RunTasks();
  job.CallAll(2);
  job.node_.RunTasks();
  job.ExpectTrained(2);
  EXPECT_GT(job.View().sums.read_bytes, 0U);
}

TEST(NodeStateSums, PassesAreAddedToSumsThatAreOnSwap) {
  SumsJob job(/*accumulate=*/true);
  for (uint64_t step = 1; step <= 2; ++step) {
    for (int pass = 0; pass < 3; ++pass) {
      for (const uint64_t session : job.sessions_) {
        if (pass > 0) job.node_.BeginPass(session);
      }
      job.DeliverAll(step);
      if (pass % 2 == 0) job.node_.RunTasks();
    }
    job.CallAll(step);
    job.node_.RunTasks();
    job.ExpectTrained(step, 3);
    for (const uint64_t session : job.sessions_) job.node_.EndPasses(session);
  }
}

TEST(NodeStateSums, APassThatWasNotAnnouncedIsRefusedAndTheJobGoesOn) {
  SumsJob job;
  job.DeliverAll(1);
  job.node_.RunTasks();
  for (const uint64_t session : job.sessions_) job.node_.BeginPass(session);
  job.Deliver(0, 1);
  const std::vector<uint64_t> calls = job.CallAll(1);
  job.node_.RunTasks();
  for (const uint64_t call : calls) {
    EXPECT_EQ(job.node_.ErrorOf(call), ErrorId::kDramLimit);
    EXPECT_THAT(job.MessageOf(call), HasSubstr("whose gradients do not fit in DRAM"));
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    job.node_.EndPasses(job.sessions_[rank]);
    job.node_.SetAttempt(job.sessions_[rank], 1);
  }
  job.Train(1);
}

TEST(NodeStateSums, NormsAreTakenOfSumsThatAreOnSwap) {
  SumsJob job;
  job.DeliverAll(1);
  std::vector<uint64_t> norms;
  for (const uint64_t session : job.sessions_) {
    norms.push_back(job.node_.GradNorm(session, protocol::kAllParams));
    norms.push_back(job.node_.GradNorm(session, 0));
  }
  job.node_.RunTasks();
  for (const uint64_t norm : norms) {
    EXPECT_EQ(job.node_.ErrorOf(norm), ErrorId::kNone);
    EXPECT_GT(job.node_.answer(norm)->completion.norm, 0);
  }
  const std::vector<uint64_t> calls = job.CallAll(1);
  job.node_.RunTasks();
  for (const uint64_t call : calls) EXPECT_EQ(job.node_.ErrorOf(call), ErrorId::kNone);
  job.ExpectTrained(1);
}

// ------------------------------------------------------------------------------------------ what fails

TEST(NodeStateSums, AWriteThatFailsGoesElsewhereAndIsReported) {
  SumsJob job;
  job.DeliverAll(1);
  const auto failed = job.node_.FinishUntil<SpillSums>();
  job.node_.Finish(failed.task, protocol::MakeError(ErrorId::kSwapIo, "simulated"));
  EXPECT_THAT(job.View().swap_wait, HasError(ErrorId::kSwapIo));
  const std::vector<SpillSums> all = job.node_.Logged<SpillSums>();
  EXPECT_EQ(all.back().identity.block, failed.identity.block);
  EXPECT_NE(all.back().slot, failed.slot);
  EXPECT_TRUE(all.back().pause);
  job.node_.RunTasks();
  EXPECT_OK(job.View().swap_wait);
  job.CallAll(1);
  job.node_.RunTasks();
  job.ExpectTrained(1);
}

TEST(NodeStateSums, APathThatFailsGetsNoMoreOfThem) {
  SumsJob job;
  job.DeliverAll(1);
  const auto finish = [&](const auto& task) {
    const auto* spill = std::get_if<SpillSums>(&task.second);
    const bool fails = spill != nullptr && spill->slot.path == 0;
    job.node_.Finish(task.first,
                     fails ? protocol::MakeError(ErrorId::kSwapIo, "simulated") : absl::OkStatus());
  };
  while (!job.node_.model().running().empty()) finish(*job.node_.model().running().begin());
  // Only spills in flight when the first spill failed went to path 0. All later spills went to the other path, to slots of the
  // node too.
  size_t to_first = 0;
  const std::vector<SpillSums> all = job.node_.Logged<SpillSums>();
  for (const SpillSums& spill : all) to_first += spill.slot.path == 0 ? 1 : 0;
  EXPECT_GT(to_first, 0U);
  EXPECT_LT(to_first, all.size() / 4);
  job.CallAll(1);
  job.node_.RunTasks();
  job.ExpectTrained(1);
}

TEST(NodeStateSums, AReadThatFailsBeforeTheDecisionEndsTheAttempt) {
  SumsJob job(/*accumulate=*/true);
  job.DeliverAll(1);
  job.node_.RunTasks();
  for (const uint64_t session : job.sessions_) job.node_.BeginPass(session);
  const std::vector<uint64_t> tags = job.DeliverAll(1);
  job.node_.Finish(job.node_.FinishUntil<LoadSums>().task,
                   protocol::MakeError(ErrorId::kSwapIo, "simulated"));
  job.node_.RunTasks();
  const std::vector<uint64_t> calls = job.CallAll(1);
  job.node_.RunTasks();
  for (const uint64_t call : calls) EXPECT_EQ(job.node_.ErrorOf(call), ErrorId::kSwapIo);
  EXPECT_EQ(job.View().committed_step, 0U);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    job.node_.EndPasses(job.sessions_[rank]);
    job.node_.SetAttempt(job.sessions_[rank], 1);
  }
  job.Train(1);
}

TEST(NodeStateSums, AReadThatFailsAfterTheDecisionFailsTheJob) {
  SumsJob job;
  job.DeliverAll(1);
  job.node_.RunTasks();
  job.CallAll(1);
  job.node_.Finish(job.node_.FinishUntil<LoadSums>().task,
                   protocol::MakeError(ErrorId::kCorrupt, "simulated"));
  job.node_.RunTasks();
  EXPECT_THAT(job.View().failed, HasError(ErrorId::kCorrupt));
  for (const uint64_t session : job.sessions_) job.node_.End(session, EndCause::kDetached);
  job.node_.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  job.node_.RunTasks();
  EXPECT_FALSE(job.node_.FindJob("job").has_value());
  EXPECT_EQ(job.node_.state().Node().swap_used_bytes, 0U);
}

// ------------------------------------------------------------------------- what waits for early updates

// An addition may wait for early updates. It must continue if early updates do not happen.
enum class Meanwhile : uint8_t { kNothing, kShuffled, kAWriteFails, kOthersAnnounced };

class NodeStateSumsNorm : public ::testing::TestWithParam<Meanwhile> {};

TEST_P(NodeStateSumsNorm, IsAnsweredBeforeTheStepIsCalled) {
  SumsJob job;
  std::mt19937 random(1);
  job.Announce(1);
  std::vector<uint32_t> order(job.layout_->partitions().size());
  std::iota(order.rbegin(), order.rend(), 0);
  if (GetParam() == Meanwhile::kShuffled) std::ranges::shuffle(order, random);
  bool has_failed = GetParam() != Meanwhile::kAWriteFails;
  std::vector<uint64_t> tags;
  for (const uint32_t partition : order) {
    tags.push_back(job.Deliver(partition, 1));
    for (int i = 0; i < 30 && !has_failed && !job.node_.model().running().empty(); ++i) {
      const std::vector<WriteBlock> writes = job.node_.Running<WriteBlock>();
      has_failed = !writes.empty();
      if (has_failed) {
        job.node_.Finish(writes[0].task, protocol::MakeError(ErrorId::kSwapIo, "simulated"));
      } else {
        job.node_.Finish(job.node_.model().running().begin()->first);
      }
    }
  }
  EXPECT_TRUE(has_failed);
  for (const uint64_t session : job.sessions_) {
    tags.push_back(job.node_.GradNorm(session, protocol::kAllParams));
  }
  if (GetParam() == Meanwhile::kOthersAnnounced) job.Announce(1, 0.7);
  job.node_.RunTasks();
  for (const uint64_t tag : tags) EXPECT_EQ(job.node_.ErrorOf(tag), ErrorId::kNone);
  const std::vector<uint64_t> calls = job.CallAll(1);
  job.node_.RunTasks();
  for (const uint64_t call : calls) EXPECT_EQ(job.node_.ErrorOf(call), ErrorId::kNone);
  job.ExpectTrained(1);
}

INSTANTIATE_TEST_SUITE_P(Meanwhile, NodeStateSumsNorm,
                         ::testing::Values(Meanwhile::kNothing, Meanwhile::kShuffled,
                                           Meanwhile::kAWriteFails, Meanwhile::kOthersAnnounced));

}  // namespace
}  // namespace forebay::daemon::node_state_sums_test
