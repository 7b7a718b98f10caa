// Goal    Gradients that do not fit in DRAM are on swap page by page: every update uses all that was
//         delivered, and nothing else, in whatever order it came, whatever was written to swap and read again,
//         and whatever failed meanwhile; and a job trains with the fewest frames that it is admitted with.
// Method  The harness with sharded layouts and the smallest limits. Its model keeps what each frame holds: it
//         faults where a gradient is added to the sum of other elements, where an update or a norm reads sums
//         that are not there or are not of consecutive elements, where a frame is used by two tasks at once, and
//         where sums are loaded from a slot that does not hold them.

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

namespace forebay::daemon {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::ShardCut;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::ShardedParam;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using protocol::kGradUnitElems;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // what the harness calls it
constexpr uint32_t kRanks = 2;
constexpr uint64_t kArenaBytes = 4 << 20;  // more than all gradients of a rank, in several passes

// Large groups, columns, tiny ones of which many share a page, and one that ends within a unit.
std::shared_ptr<const protocol::Layout> AwkwardLayout() {
  std::vector<std::vector<ShardedParam>> groups;
  for (int i = 0; i < 6; ++i) groups.push_back({{.rows = 16000, .columns = 4}});
  groups.push_back({{.rows = 301}, {.rows = 20, .columns = 15, .cut = ShardCut::kColumns}});
  for (int i = 0; i < 9; ++i) groups.push_back({{.rows = 30, .columns = 3}});
  groups.push_back({{.rows = 36001, .columns = 2}});
  return MakeShardedLayout(
      groups,
      {.ranks = kRanks, .dtype = protocol::DType::kBFloat16, .format = protocol::Format::kExact});
}

NodeState::Options OptionsOf(uint64_t dram_bytes) {
  return {.dram_limit_bytes = dram_bytes,
          .node_bytes = 4096,
          .staging_slots = 3,
          .staging_slot_bytes = 65536,
          .swap = SwapPaths({16 << 20, 16 << 20}),
          .block_elems = 3072,
          .workers = 2};
}

testing::AttachRequest RequestOf(uint32_t rank, bool accumulate) {
  return {.rank = rank,
          .accumulate = accumulate,
          .early_updates = true,
          .grad_arena_bytes = kArenaBytes};
}

// The smallest limit, in pages, that the job is admitted with.
uint64_t FindLeastDram(bool accumulate) {
  uint64_t refused = 0;
  uint64_t admitted = uint64_t{64} << 20;
  while (admitted - refused > protocol::kPageBytes) {
    const uint64_t dram = (refused + admitted) / 2 / protocol::kPageBytes * protocol::kPageBytes;
    NodeHarness node(OptionsOf(dram), kRanks);
    const uint64_t session = node.AttachOnly(AwkwardLayout(), RequestOf(0, accumulate));
    (node.attached(session)->status.ok() ? admitted : refused) = dram;
  }
  return admitted;
}

uint64_t LeastDram(bool accumulate) {
  static const uint64_t once = FindLeastDram(false);
  static const uint64_t in_passes = FindLeastDram(true);
  return accumulate ? in_passes : once;
}

class SumsJob : public ShardedJob {
 public:
  explicit SumsJob(bool accumulate = false, uint64_t more_bytes = 0)
      : ShardedJob(AwkwardLayout(), kRanks, OptionsOf(LeastDram(accumulate) + more_bytes)),
        accumulate_(accumulate) {
    node_.set_answered_when(protocol::StepAnswer::kCommitted);
    Attach();
  }
  void Attach() {
    sessions_.assign(kRanks, 0);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      sessions_[rank] = node_.Attach(layout_, RequestOf(rank, accumulate_));
      ASSERT_OK(StatusOf(sessions_[rank]));
    }
    ASSERT_TRUE(View().ready);
    ASSERT_GT(View().sums_on_swap_bytes, 0U);
  }
  uint64_t Deliver(uint32_t partition, uint64_t step) {
    return node_.Gradient(sessions_[layout_->partitions()[partition].owner], partition, step);
  }
  std::vector<uint64_t> DeliverAll(uint64_t step) {
    std::vector<uint64_t> tags;
    for (auto i = static_cast<uint32_t>(layout_->partitions().size()); i-- > 0;) {
      tags.push_back(Deliver(i, step));
    }
    return tags;
  }
  // Of ranges that hold no parameter whole the harness does not know.
  void SetAllPresent() {
    for (const uint64_t session : sessions_) {
      for (uint32_t param = 0; param < layout_->params().size(); ++param) {
        node_.SetPresent(session, param, true);
      }
    }
  }
  void Announce(uint64_t step, double lr = 0.1) {
    for (const uint64_t session : sessions_) node_.Announce(session, step, lr);
  }
  std::vector<uint64_t> CallAll(uint64_t step, double lr = 0.1, double max_grad_norm = 0) {
    std::vector<uint64_t> calls;
    for (const uint64_t session : sessions_) {
      calls.push_back(node_.Step(session, step, lr, max_grad_norm));
    }
    return calls;
  }
  void ExpectTrained(uint64_t step, size_t passes = 1) {
    EXPECT_EQ(View().published_step, step);
    for (const auto& [block, written] : node_.model().WrittenSteps(1)) {
      EXPECT_EQ(written, step) << block;
    }
    for (const auto& [param, tokens] : node_.model().committed_gradients(1)) {
      EXPECT_EQ(tokens.size() % passes, 0U) << param;
      EXPECT_GE(tokens.size(), passes) << param;
    }
    EXPECT_EQ(node_.fault(), "");
  }
  void Train(uint64_t step) {
    DeliverAll(step);
    const std::vector<uint64_t> calls = CallAll(step);
    node_.RunTasks();
    for (const uint64_t call : calls) EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
    ExpectTrained(step);
  }
  uint64_t page_bytes() { return node_.Logged<SpillSums>().at(0).bytes; }

  bool accumulate_;
};

// ----------------------------------------------------------------------------------------- the pages

TEST(NodeStateSums, AJobTrainsWithTheFewestFramesThatItIsAdmittedWith) {
  SumsJob job;
  for (uint64_t step = 1; step <= 3; ++step) job.Train(step);
  const JobView view = job.View();
  EXPECT_GT(view.sums_on_swap_bytes, view.sum_frames_bytes / 2);
  EXPECT_GT(view.sums.written_bytes, 0U);
  EXPECT_EQ(view.sums.read_bytes, view.sums.written_bytes) << "nothing was updated early";
  // Each step what does not fit and what is kept free, once.
  const uint64_t kept = 4 * job.page_bytes();
  EXPECT_GE(view.sums.written_bytes, 3 * view.sums_on_swap_bytes);
  EXPECT_LE(view.sums.written_bytes, 3 * (view.sums_on_swap_bytes + kept));
  EXPECT_EQ(view.step_traffic.gradient_bytes, view.sums_on_swap_bytes);
}

TEST(NodeStateSums, MoreDramLeavesLessOnSwapUntilNoneIs) {
  uint64_t before = UINT64_MAX;
  for (uint64_t more = 0; before > 0; more += 16 << 10) {
    ASSERT_LT(more, 16 << 20);
    NodeHarness node(OptionsOf(LeastDram(false) + more), kRanks);
    ASSERT_OK(node.attached(node.AttachOnly(AwkwardLayout(), RequestOf(0, false)))->status);
    const JobView view = *node.FindJob("job");
    EXPECT_LE(view.sums_on_swap_bytes, before);
    EXPECT_LE(node.state().Node().dram_used_bytes, LeastDram(false) + more);
    before = view.sums_on_swap_bytes;
  }
}

TEST(NodeStateSums, TooLittleSwapForThemIsRefusedWithTheNumbers) {
  NodeState::Options options = OptionsOf(LeastDram(false));
  uint64_t refused = 0;
  uint64_t admitted = 32 << 20;
  std::string message;
  while (admitted - refused > protocol::kPageBytes) {
    const uint64_t bytes = (refused + admitted) / 2 / protocol::kPageBytes * protocol::kPageBytes;
    options.swap = SwapPaths({bytes});
    NodeHarness node(options, kRanks);
    const uint64_t session = node.AttachOnly(AwkwardLayout(), RequestOf(0, false));
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
  node.AttachOnly(AwkwardLayout(), RequestOf(0, false));
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
      job.node_.RunTasks();  // a disk that is faster than backward
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
  // Other scalars: all are needed again, from swap too.
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
  while (job.node_.Running<SpillSums>().empty()) {
    job.node_.Finish(job.node_.model().running().begin()->first);
  }
  const SpillSums failed = job.node_.Running<SpillSums>()[0];
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
  // Each that was on its way when the first one failed.
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
  while (job.node_.Running<LoadSums>().empty()) {
    job.node_.Finish(job.node_.model().running().begin()->first);
  }
  job.node_.Finish(job.node_.Running<LoadSums>()[0].task,
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
  while (job.node_.Running<LoadSums>().empty()) {
    job.node_.Finish(job.node_.model().running().begin()->first);
  }
  job.node_.Finish(job.node_.Running<LoadSums>()[0].task,
                   protocol::MakeError(ErrorId::kCorrupt, "simulated"));
  job.node_.RunTasks();
  EXPECT_THAT(job.View().failed, HasError(ErrorId::kCorrupt));
  for (const uint64_t session : job.sessions_) job.node_.End(session, EndCause::kDetached);
  job.node_.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  job.node_.RunTasks();
  EXPECT_FALSE(job.node_.FindJob("job").has_value());
  EXPECT_EQ(job.node_.state().Node().swap_used_bytes, 0U);
}

// ---------------------------------------------------------------------------------------------- chaos

// Deliveries in any order and cut anywhere, announced or not, kept or not, in several passes; tasks that end in
// any order; writes that fail; ranks that are lost.
TEST(NodeStateSumsChaos, EveryStepUsesWhatWasDelivered) {
  uint64_t early = 0;
  uint64_t dropped = 0;
  uint64_t read = 0;
  for (uint32_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&random](size_t bound) { return random() % bound; };
    SumsJob job(/*accumulate=*/seed % 2 == 1, seed % 4 * (48 << 10));
    const auto finish_one = [&] {
      auto task = job.node_.model().running().begin();
      std::advance(task, static_cast<int64_t>(below(job.node_.model().running().size())));
      const bool fails = std::holds_alternative<SpillSums>(task->second) && below(10) == 0;
      job.node_.Finish(task->first, fails ? protocol::MakeError(ErrorId::kSwapIo, "simulated")
                                          : absl::OkStatus());
    };
    for (uint64_t step = 1; step <= 6; ++step) {
      const size_t passes = job.accumulate_ ? 1 + below(3) : 1;
      const bool announces = below(4) != 0;
      const bool is_kept = below(3) != 0;
      for (size_t pass = 0; pass < passes; ++pass) {
        for (const uint64_t session : job.sessions_) {
          if (pass > 0) job.node_.BeginPass(session);
        }
        if (announces && pass + 1 == passes) job.Announce(step, is_kept ? 0.1 : 0.3);
        std::vector<uint32_t> order(job.layout_->partitions().size());
        std::iota(order.begin(), order.end(), 0);
        if (below(2) == 0) std::ranges::shuffle(order, random);
        for (const uint32_t partition : order) {
          const uint64_t session = job.sessions_[job.layout_->partitions()[partition].owner];
          const uint64_t elems = job.layout_->partitions()[partition].elems;
          const uint64_t units = (elems - 1) / kGradUnitElems;
          const uint64_t cut = units == 0 ? 0 : below(units + 1) * kGradUnitElems;
          if (cut > 0) job.node_.GradientRange(session, partition, cut, elems, step);
          job.node_.GradientRange(session, partition, 0, cut > 0 ? cut : elems, step);
          while (!job.node_.model().running().empty() && below(4) != 0) finish_one();
        }
      }
      job.SetAllPresent();
      if (below(6) == 0) {
        // Who is lost takes the step along; all begin it anew.
        for (const uint64_t session : job.sessions_) job.node_.End(session, EndCause::kLost);
        while (!job.node_.model().running().empty()) finish_one();
        job.Attach();
        job.DeliverAll(step);
      }
      const std::vector<uint64_t> calls = job.CallAll(step);
      const auto is_answered = [&](uint64_t call) {
        return job.node_.ErrorOf(call) != kUnanswered;
      };
      while (!std::ranges::all_of(calls, is_answered)) {
        ASSERT_FALSE(job.node_.model().running().empty()) << "step waits for nothing";
        finish_one();
      }
      for (const uint64_t call : calls) {
        EXPECT_EQ(job.node_.ErrorOf(call), ErrorId::kNone) << job.MessageOf(call);
      }
      for (const uint64_t session : job.sessions_) job.node_.EndPasses(session);
      if (below(2) == 0) {
        while (!job.node_.model().running().empty()) finish_one();
        EXPECT_EQ(job.View().published_step, step);
      }
    }
    while (!job.node_.model().running().empty()) finish_one();
    job.ExpectTrained(6);
    early += job.View().early_updates;
    dropped += job.View().dropped_updates;
    read += job.View().sums.read_bytes;
    if (HasFailure()) return;
  }
  EXPECT_GT(early, 50U);
  EXPECT_GT(dropped, 10U);
  EXPECT_GT(read, 0U);
}

}  // namespace
}  // namespace forebay::daemon
