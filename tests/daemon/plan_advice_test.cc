// SPDX-License-Identifier: Apache-2.0
// Goal    The hint of a refused attach says with which smaller demands the job would fit, and it is right. With each limit that
//         the hint names, the job is admitted with exactly the named bytes on swap; with a smaller limit it is not. A smaller
//         format, no activations or one backward pass save the named bytes, and fit if the hint says so.
// Method  Plans of sharded and shared layouts on empty nodes. The test reads the numbers from the hint and tries them.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/core/node/node_state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::plan_advice_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::RequestOf;
using ::forebay::testing::ShardedParam;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using protocol::Format;
using protocol::kPageBytes;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint32_t kRanks = 2;
constexpr uint64_t kRoomySwap = uint64_t{1} << 30;
constexpr uint64_t kTiny = uint64_t{256} << 10;

std::shared_ptr<const protocol::Layout> LayoutOf(Format format) {
  std::vector<std::vector<ShardedParam>> groups;
  for (int i = 0; i < 12; ++i) groups.push_back({{.rows = 16000, .columns = 4}});
  return MakeShardedLayout(
      groups, {.ranks = kRanks, .dtype = protocol::DType::kBFloat16, .format = format});
}

NodeState::Options Options() {
  return {.dram_limit_bytes = uint64_t{64} << 20,
          .node_bytes = 4096,
          .staging_slots = 3,
          .staging_slot_bytes = 262144,
          .swap = SwapPaths({16 << 20}),
          .block_elems = 12288};
}

class PlanAdvice : public ::testing::Test {
 protected:
  absl::StatusOr<JobPlan> PlanOf(const AttachRequested& request, uint64_t dram_bytes,
                                 uint64_t swap_bytes) {
    return node_.Plan(request,
                      NodeState::Limits{.dram_bytes = dram_bytes, .swap_bytes = swap_bytes});
  }
  std::string HintOf(const AttachRequested& request, uint64_t dram_bytes, uint64_t swap_bytes) {
    const auto plan = PlanOf(request, dram_bytes, swap_bytes);
    return plan.ok() ? "it fits" : protocol::HintOf(plan.status());
  }
  // Returns the number between two texts, or 0 if a text is missing.
  static uint64_t NumberIn(const std::string& hint, const std::string& before,
                           const std::string& behind) {
    const size_t end = hint.find(behind);
    // Begins after the last `before` in front of `behind`.
    const size_t begin = hint.rfind(before, end);
    if (end == hint.npos || begin == hint.npos) return 0;
    return std::stoull(hint.substr(begin + before.size()));
  }

  NodeState node_{Options()};
};

TEST_F(PlanAdvice, LimitsWithSwapHaveRoomForWhatTheySayAndNoPageMore) {
  const AttachRequested request = RequestOf(LayoutOf(Format::kExact));
  const std::string hint = HintOf(request, kTiny, /*swap_bytes=*/0);
  const uint64_t all = NumberIn(hint, "to at least ", " bytes");
  const uint64_t states = NumberIn(hint, "a limit of ", " does for a job with its states there");
  const uint64_t weights = NumberIn(hint, "of ", " with its weights too");
  const uint64_t gradients = NumberIn(hint, "of ", " with its gradients too");
  ASSERT_GT(all, states) << hint;
  ASSERT_GT(states, weights) << hint;
  ASSERT_GT(weights, gradients) << hint;
  ASSERT_GT(gradients, 0U) << hint;

  ASSERT_OK_AND_ASSIGN(JobPlan plan, PlanOf(request, all, 0));
  EXPECT_EQ(plan.swap, 0U);
  EXPECT_THAT(PlanOf(request, all - kPageBytes, 0).status(), HasError(ErrorId::kDramLimit));
  ASSERT_OK_AND_ASSIGN(plan, PlanOf(request, states, kRoomySwap));
  EXPECT_EQ(plan.weights_on_swap + plan.sums_on_swap + plan.resident_blocks, 0U);
  ASSERT_OK_AND_ASSIGN(plan, PlanOf(request, states - kPageBytes, kRoomySwap));
  EXPECT_GT(plan.weights_on_swap, 0U);
  EXPECT_EQ(plan.sums_on_swap, 0U);
  ASSERT_OK_AND_ASSIGN(plan, PlanOf(request, weights, kRoomySwap));
  EXPECT_EQ(plan.weights_on_swap, 2 * request.layout->total_elems());
  EXPECT_EQ(plan.sums_on_swap, 0U);
  ASSERT_OK_AND_ASSIGN(plan, PlanOf(request, weights - kPageBytes, kRoomySwap));
  EXPECT_GT(plan.sums_on_swap, 0U);
  ASSERT_OK(PlanOf(request, gradients, kRoomySwap));
  EXPECT_THAT(PlanOf(request, gradients - kPageBytes, kRoomySwap).status(),
              HasError(ErrorId::kDramLimit));
}

TEST_F(PlanAdvice, ASharedJobHasTheLimitOfStatesOnSwapAlone) {
  AttachRequested request = RequestOf(testing::MakeLayout({64000, 64000}));
  const std::string hint = HintOf(request, kTiny, 0);
  const uint64_t states = NumberIn(hint, "a limit of ", " does for a job with its states there");
  ASSERT_OK(PlanOf(request, states, kRoomySwap));
  EXPECT_THAT(PlanOf(request, states - kPageBytes, kRoomySwap).status(),
              HasError(ErrorId::kDramLimit));
  EXPECT_THAT(hint, Not(HasSubstr("with its weights too")));
}

TEST_F(PlanAdvice, SmallerFormatsAreNamedWithWhatTheySaveAndWhetherTheyFit) {
  const AttachRequested request = RequestOf(LayoutOf(Format::kExact));
  const AttachRequested bf16 = RequestOf(LayoutOf(Format::kBf16));
  const AttachRequested int8 = RequestOf(LayoutOf(Format::kInt8));
  const auto least = [&](const AttachRequested& of) {
    return NumberIn(HintOf(of, kTiny, 0), "to at least ", " bytes");
  };
  // The limit fits format int8, but not bf16.
  const std::string hint = HintOf(request, least(bf16) - kPageBytes, 0);
  EXPECT_THAT(hint,
              HasSubstr(absl::StrCat("format bf16: ", least(request) - least(bf16), " bytes")));
  EXPECT_THAT(hint, HasSubstr("less, which alone is not enough, format int8: "));
  EXPECT_THAT(hint,
              HasSubstr(absl::StrCat("format int8: ", least(request) - least(int8), " bytes")));
  EXPECT_THAT(hint, HasSubstr("less, which fits"));
  EXPECT_OK(PlanOf(int8, least(bf16) - kPageBytes, 0));
  EXPECT_THAT(PlanOf(bf16, least(bf16) - kPageBytes, 0).status(), HasError(ErrorId::kDramLimit));
  // int8 is the smallest format, so the hint suggests no other.
  EXPECT_THAT(HintOf(int8, kTiny, 0), Not(HasSubstr("lower what the job takes")));
  // States on swap take no DRAM: another format would be of no use.
  EXPECT_THAT(HintOf(request, kTiny, kRoomySwap), Not(HasSubstr("format")));
}

// If a staging slot bounds the size of a block, a larger format has smaller blocks, so that fewer gradient sums must be in
// DRAM. The hint must not recommend that format.
TEST_F(PlanAdvice, ALargerFormatIsNeverNamed) {
  NodeState::Options options = Options();
  options.block_elems = 1 << 20;
  for (options.staging_slot_bytes = 1 << 16; options.staging_slot_bytes <= 1 << 20;
       options.staging_slot_bytes += 1 << 16) {
    const NodeState node(options);
    const auto plan = node.Plan(RequestOf(LayoutOf(Format::kExact)),
                                NodeState::Limits{.dram_bytes = kTiny, .swap_bytes = kRoomySwap});
    EXPECT_THAT(plan.status(), HasError(ErrorId::kDramLimit));
    EXPECT_THAT(protocol::HintOf(plan.status()), Not(HasSubstr("format fp32")));
  }
}

// A layout of two ranks: rank 0 has columns 0 to 2, and rank 1 has columns 3 to 5. The stride of rank 1 is `stride` rows.
std::shared_ptr<const protocol::Layout> ColumnsWith(uint64_t stride) {
  constexpr uint64_t kRows = 4096;
  constexpr uint64_t kColumns = 6;
  const auto box = [](uint64_t first, uint64_t rows) {
    return protocol::BoxSpec{.param = 0,
                             .first_elem = first,
                             .run_elems = kColumns / 2,
                             .stride_elems = rows * kColumns,
                             .runs = kRows / rows};
  };
  protocol::LayoutSpec spec;
  spec.dtype = protocol::DType::kBFloat16;
  spec.format = Format::kExact;
  spec.params = {{.name = "matrix", .shape = {kRows, kColumns}}};
  spec.group_names = {"group"};
  spec.partitions = {{.group = 0, .owner = 0, .replica = 0, .boxes = {box(0, 1)}},
                     {.group = 0, .owner = 1, .replica = 0, .boxes = {}}};
  for (uint64_t row = 0; row < stride; ++row) {
    spec.partitions[1].boxes.push_back(box(kColumns / 2 + row * kColumns, stride));
  }
  auto layout = protocol::Layout::Create(std::move(spec));
  EXPECT_OK(layout.status());
  return layout.ok() ? std::make_shared<const protocol::Layout>(*std::move(layout)) : nullptr;
}

TEST_F(PlanAdvice, FormatsAreNotTriedOnLayoutsThatTakeLongToMake) {
  EXPECT_THAT(HintOf(RequestOf(ColumnsWith(1)), kTiny, 0), HasSubstr("format bf16: "));
  EXPECT_THAT(HintOf(RequestOf(ColumnsWith(2)), kTiny, 0),
              AllOf(HasSubstr("dram.limit to at least"), Not(HasSubstr("format"))));
}

TEST_F(PlanAdvice, ActivationsAndFurtherBackwardPassesAreNamed) {
  AttachRequested request = RequestOf(LayoutOf(Format::kExact));
  ASSERT_OK_AND_ASSIGN(const JobPlan plain, PlanOf(request, uint64_t{1} << 30, 0));
  request.session_request.activation_bytes = 1000 * kPageBytes;  // more than the sums
  request.session_request.accumulate = true;
  ASSERT_OK_AND_ASSIGN(const JobPlan more, PlanOf(request, uint64_t{1} << 30, 0));
  const uint64_t activations = kRanks * request.session_request.activation_bytes;
  const uint64_t sums = more.all_in_dram - plain.all_in_dram - activations;
  const std::string hint = HintOf(request, more.all_in_dram - activations, 0);
  EXPECT_THAT(hint, HasSubstr(absl::StrCat("activation_bytes=0: ", activations, " bytes")));
  EXPECT_THAT(hint, HasSubstr(absl::StrCat("accumulate=1: ", sums, " bytes")));
  EXPECT_THAT(hint, HasSubstr("less, which fits, accumulate=1"));
  EXPECT_THAT(hint, HasSubstr("less, which alone is not enough; with room on swap"));
}

TEST_F(PlanAdvice, WhatDoesNotFitOnSwapGetsTheLimitThatNeedsNone) {
  const AttachRequested request = RequestOf(LayoutOf(Format::kExact));
  constexpr uint64_t kDram = uint64_t{6} << 20;
  constexpr uint64_t kSwap = uint64_t{8} << 20;
  ASSERT_THAT(PlanOf(request, kDram, kSwap).status(), HasError(ErrorId::kSwapNospc));
  const std::string hint = HintOf(request, kDram, kSwap);
  const uint64_t all = NumberIn(hint, "with a limit of ", " nothing is on swap");
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanOf(request, all, 0));
  EXPECT_EQ(plan.swap, 0U);
  EXPECT_THAT(hint, HasSubstr("format int8: "));
  EXPECT_THAT(hint, HasSubstr("which fits"));
  EXPECT_OK(PlanOf(RequestOf(LayoutOf(Format::kInt8)), kDram, kSwap));
}

TEST_F(PlanAdvice, LargeBuffersAreNamedAndSmallOnesAreNot) {
  const std::string what = "register_buffer(..., persistent=False): ";
  AttachRequested request = RequestOf(LayoutOf(Format::kExact));
  EXPECT_THAT(HintOf(request, kTiny, 0), Not(HasSubstr(what)));
  request.session_request.extra_state_bytes = uint64_t{64} << 20;
  const std::string hint = HintOf(request, uint64_t{64} << 20, 0);
  EXPECT_THAT(hint, HasSubstr(what));
  EXPECT_THAT(hint, HasSubstr("which fits"));
  request.session_request.extra_state_bytes = 0;
  EXPECT_OK(PlanOf(request, uint64_t{64} << 20, 0));
}

TEST_F(PlanAdvice, ADaemonWithoutSwapNamesNoLimitsOfSwap) {
  NodeState::Options options = Options();
  options.staging_slots = 0;
  options.swap = {};
  const NodeState node(options);
  const auto plan = node.Plan(RequestOf(LayoutOf(Format::kExact)),
                              NodeState::Limits{.dram_bytes = kTiny, .swap_bytes = 0});
  EXPECT_THAT(protocol::HintOf(plan.status()), HasSubstr("start the daemon with swap"));
  EXPECT_THAT(protocol::HintOf(plan.status()), Not(HasSubstr("room on swap")));
}

// If jobs have shares, the limit alone does not give the bytes that a job may take.
TEST_F(PlanAdvice, WhereJobsHaveSharesNoLimitIsNamed) {
  NodeState::Options options = Options();
  options.job_percent = 50;
  const NodeState node(options);
  const auto plan = node.Plan(RequestOf(LayoutOf(Format::kExact)),
                              NodeState::Limits{.dram_bytes = kTiny, .swap_bytes = 0});
  EXPECT_THAT(protocol::HintOf(plan.status()), HasSubstr("format int8"));
  EXPECT_THAT(protocol::HintOf(plan.status()), Not(HasSubstr("room on swap")));
}

}  // namespace
}  // namespace forebay::daemon::plan_advice_test
