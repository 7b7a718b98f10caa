// SPDX-License-Identifier: Apache-2.0
// Goal    A job takes no more DRAM than its share of the limit and its owner's quota, even if more is free: not at its
//         creation, not for further ranks or a reader, and not for a block that returns to DRAM. Swap has a quota too. A
//         refusal names the configuration key, the quota and the owner's current bytes. Root has no quota.
// Method  The harness with jobs of known size.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_grants_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kBlockBytes = 8192;  // two planes of 64 float32, each on a page
constexpr uint32_t kBlocks = 20;

std::shared_ptr<const protocol::Layout> Layout() { return MakeLayout({320, 320, 320, 320}); }

uint64_t FixedBytes(uint32_t world_size) {
  NodeHarness node(RoomyOptions(), world_size);
  node.Attach(Layout(), {});
  const JobView job = *node.FindJob("job");
  return job.dram_bytes - job.resident_bytes;
}

class NodeStateGrants : public ::testing::Test {
 protected:
  // Node options with DRAM for several whole jobs.
  static NodeState::Options Options() {
    NodeState::Options options = RoomyOptions();
    options.node_bytes = 4 * kBlockBytes;
    options.dram_limit_bytes = options.node_bytes + 8 * (FixedBytes(1) + kBlocks * kBlockBytes);
    options.staging_slots = 4;
    options.staging_slot_bytes = kBlockBytes;
    options.swap = SwapPaths({400 * kBlockBytes});
    return options;
  }
  void Start(const NodeState::Options& options) {
    node_ = std::make_unique<NodeHarness>(options, 1);
  }
  void TearDown() override { EXPECT_EQ(node_->fault(), ""); }
  uint64_t Attach(const std::string& job, uint32_t uid = 1000) {
    return node_->Attach(Layout(), {.job = job, .uid = uid});
  }
  JobView View(const std::string& job) { return *node_->FindJob(job); }
  absl::Status StatusOf(uint64_t session) { return node_->attached(session)->status; }
  void TrainStep(uint64_t session, uint64_t step) {
    for (uint32_t group = 0; group < 4; ++group) {
      node_->Gradient(session, group, step);
      node_->RunTasks();
    }
    const uint64_t tag = node_->Step(session, step);
    node_->RunTasks();
    EXPECT_EQ(node_->ErrorOf(tag), ErrorId::kNone);
  }

  std::unique_ptr<NodeHarness> node_;
};

TEST_F(NodeStateGrants, AJobTakesItsShareOfTheLimitAndHasTheRestOnSwap) {
  NodeState::Options options = Options();
  options.dram_limit_bytes = options.node_bytes + 2 * FixedBytes(1) + 20 * kBlockBytes;
  options.job_percent = 45;
  const uint64_t share = options.dram_limit_bytes / 100 * 45;
  Start(options);
  const uint64_t first = Attach("first");
  const uint64_t resident = (share - FixedBytes(1)) / kBlockBytes;
  ASSERT_GT(resident, 0U);
  ASSERT_LT(resident, 15U);
  EXPECT_EQ(View("first").resident_blocks, resident);
  TrainStep(first, 1);
  // The second job gets the rest of the DRAM, and no block of the first job moves to swap for it.
  Attach("second");
  EXPECT_TRUE(View("second").ready);
  EXPECT_EQ(View("first").moves.evicted, 0U);
  EXPECT_EQ(View("first").resident_blocks, resident);
}

TEST_F(NodeStateGrants, AJobThatCannotDoWithItsShareIsRefusedWithIt) {
  NodeState::Options options = Options();
  options.job_percent = 1;
  ASSERT_LT(options.dram_limit_bytes / 100, FixedBytes(1));
  Start(options);
  const absl::Status status = StatusOf(Attach("job"));
  EXPECT_THAT(status, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr(absl::StrCat("a job may take ", options.dram_limit_bytes / 100, " bytes")),
            HasSubstr("1 % of the limit"), HasSubstr("weights")));
  EXPECT_THAT(std::string(protocol::HintOf(status)), HasSubstr("dram.job_percent"));
  EXPECT_TRUE(node_->state().Jobs().empty());
}

TEST_F(NodeStateGrants, JobsOfOneUserShareAQuotaAndOthersHaveTheirOwn) {
  NodeState::Options options = Options();
  options.uid_dram_bytes = 2 * FixedBytes(1) + 25 * kBlockBytes;
  Start(options);
  Attach("first");
  EXPECT_EQ(View("first").resident_blocks, kBlocks);
  Attach("second");
  EXPECT_EQ(View("second").resident_blocks, 5U);
  const absl::Status third = StatusOf(Attach("third"));
  EXPECT_THAT(third, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(
      std::string(third.message()),
      AllOf(HasSubstr(absl::StrCat("user 1000 may take ", options.uid_dram_bytes, " bytes")),
            HasSubstr(absl::StrCat("its other jobs hold ", options.uid_dram_bytes)),
            HasSubstr("0 are left")));
  EXPECT_THAT(std::string(protocol::HintOf(third)), HasSubstr("dram.uid_quota"));
  EXPECT_EQ(View("first").moves.evicted, 0U) << "a user's own jobs make no room beyond it";
  ASSERT_OK(StatusOf(Attach("other", /*uid=*/1001)));
  EXPECT_EQ(View("other").resident_blocks, kBlocks);
  for (const char* job : {"a", "b", "c"}) {
    ASSERT_OK(StatusOf(Attach(job, /*uid=*/0)));
    EXPECT_EQ(View(job).resident_blocks, kBlocks) << "root has no quota";
  }
}

TEST_F(NodeStateGrants, SwapHasAQuotaToo) {
  NodeState::Options options = Options();
  options.uid_dram_bytes = 2 * FixedBytes(1) + kBlocks * kBlockBytes;
  options.uid_swap_bytes = 2 * 19 * kBlockBytes;
  Start(options);
  Attach("first");
  EXPECT_EQ(View("first").swap_bytes, 0U);
  const absl::Status second = StatusOf(Attach("second"));
  EXPECT_THAT(second, HasError(ErrorId::kSwapNospc));
  EXPECT_THAT(std::string(second.message()),
              AllOf(HasSubstr(absl::StrCat("user 1000 may take ", options.uid_swap_bytes)),
                    HasSubstr("its other jobs hold 0"),
                    HasSubstr(absl::StrCat("needs ", 2 * kBlocks * kBlockBytes))));
  EXPECT_THAT(std::string(protocol::HintOf(second)), HasSubstr("swap.uid_quota"));
}

TEST_F(NodeStateGrants, ABlockDoesNotComeBackBeyondTheShare) {
  NodeState::Options options = Options();
  options.uid_dram_bytes = FixedBytes(1) + 5 * kBlockBytes;
  Start(options);
  Attach("job");
  ASSERT_EQ(View("job").resident_blocks, 5U);
  node_->Send(BlockMoveRequested{.job = 1, .block = 7});
  node_->RunTasks();
  EXPECT_EQ(View("job").resident_blocks, 5U);
  node_->Send(BlockMoveRequested{.job = 1, .block = 4});  // to swap
  node_->RunTasks();
  EXPECT_EQ(View("job").resident_blocks, 4U);
  node_->Send(BlockMoveRequested{.job = 1, .block = 7});
  node_->RunTasks();
  EXPECT_EQ(View("job").resident_blocks, 5U);
}

TEST_F(NodeStateGrants, WithMoreRanksAJobsOwnStatesMakeRoom) {
  NodeState::Options options = Options();
  options.uid_dram_bytes = FixedBytes(2) + 5 * kBlockBytes;
  Start(options);
  const uint64_t session = Attach("job");
  TrainStep(session, 1);
  const uint64_t resident = (options.uid_dram_bytes - FixedBytes(1)) / kBlockBytes;
  ASSERT_EQ(View("job").resident_blocks, resident);
  ASSERT_GT(resident, 5U);
  node_->End(session, EndCause::kDetached);
  for (const uint32_t rank : {0U, 1U}) {
    ASSERT_OK(StatusOf(node_->AttachOnly(Layout(), {.job = "job", .rank = rank, .world_size = 2})));
  }
  EXPECT_EQ(View("job").resident_blocks, 5U);
  EXPECT_EQ(View("job").dram_bytes, options.uid_dram_bytes);
}

TEST_F(NodeStateGrants, AReaderCountsForTheJobThatItReads) {
  NodeState::Options options = Options();
  options.uid_dram_bytes = FixedBytes(1) + kBlocks * kBlockBytes + protocol::kPageBytes;
  Start(options);
  Attach("job");
  const uint64_t reader =
      node_->Attach(Layout(), {.job = "job", .reader = true, .grad_arena_bytes = 16 << 10});
  EXPECT_THAT(StatusOf(reader), HasError(ErrorId::kDramLimit));
  EXPECT_THAT(std::string(StatusOf(reader).message()),
              AllOf(HasSubstr("user 1000 may take"), HasSubstr("with this reader job job needs")));
}

}  // namespace
}  // namespace forebay::daemon::node_state_grants_test
