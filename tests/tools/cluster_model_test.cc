// SPDX-License-Identifier: Apache-2.0
// Goal    The closed form of a cluster: each node's share, each link's bytes and the step's time are those that
//         can be counted by hand, and what cannot be is refused with the numbers.
// Method  Small numbers whose sums stand in the test. Rates are chosen so that each resource in turn is the
//         longest.

#include "tools/forebay/cluster_model.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/status_test.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using ::testing::HasSubstr;

// 8e9 parameters on 2 nodes: 4e9 each, of 2 bytes and, in format exact, 10.
constexpr ClusterModel kModel{.params = 8'000'000'000, .layers = 40};
constexpr double kOfNode = 4e9;

ClusterOptions TwoNodes() { return {.nodes = 2, .gpus = 4, .tokens = 1000}; }

TEST(ClusterModel, EachNodeHasItsShareAndItsLinksTheirBytes) {
  ASSERT_OK_AND_ASSIGN(const ClusterPlan plan, PlanCluster(kModel, TwoNodes()));
  EXPECT_DOUBLE_EQ(plan.node.params, kOfNode);
  EXPECT_DOUBLE_EQ(plan.node.weights, 2 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.node.states, 10 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.node.gradients, 2 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.node.dram(), 14 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.node.swap, 0);
  // Two gathers and a reduce-scatter; half of each crosses, of a GPU seven eighths.
  EXPECT_DOUBLE_EQ(plan.traffic.link, 3 * 16e9 / 2);
  EXPECT_DOUBLE_EQ(plan.traffic.gpu_link, 3 * 16e9 * 7 / 8);
  EXPECT_DOUBLE_EQ(plan.traffic.to_gpus, 2 * 2 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.traffic.from_gpus, 2 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.traffic.update, 26 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.seconds.step, 0);  // no rate is given
}

TEST(ClusterModel, TensorParallelCutsWhatEachGpuGathersButNotWhatCrossesNodes) {
  ClusterOptions options = TwoNodes();
  options.tensor_parallel = 4;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan plan, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(plan.traffic.link, 3 * 16e9 / 2);
  EXPECT_DOUBLE_EQ(plan.traffic.gpu_link, 3 * 16e9 / 4 / 2);
}

TEST(ClusterModel, StatesLeaveForSwapBeforeWeights) {
  ClusterOptions options = TwoNodes();
  options.early_updates = false;
  options.dram_bytes = 34'000'000'000;  // gradients and weights take 16e9: 18e9 of 40e9 are left
  ASSERT_OK_AND_ASSIGN(const ClusterPlan states, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(states.node.states, 18e9);
  EXPECT_DOUBLE_EQ(states.node.states_on_swap, 22e9);
  EXPECT_DOUBLE_EQ(states.node.weights_on_swap, 0);
  EXPECT_DOUBLE_EQ(states.node.swap, 44e9);
  EXPECT_DOUBLE_EQ(states.traffic.swap_read, 22e9);
  EXPECT_DOUBLE_EQ(states.traffic.swap_written, 22e9);

  // Early updates: a block on swap has its new weights in DRAM: 18 = 10 r + 2 (1 - r) of 4e9.
  options.early_updates = true;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan early, PlanCluster(kModel, options));
  const double resident = (18.0 / 4 - 2) / 8;
  EXPECT_NEAR(early.node.states, 40e9 * resident, 1);
  EXPECT_NEAR(early.node.new_weights, 8e9 * (1 - resident), 1);
  EXPECT_NEAR(early.node.dram(), 34e9, 1);

  options.early_updates = false;
  options.dram_bytes = 12'000'000'000;  // 4e9 of the weights fit
  ASSERT_OK_AND_ASSIGN(const ClusterPlan weights, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(weights.node.states, 0);
  EXPECT_DOUBLE_EQ(weights.node.weights, 4e9);
  EXPECT_DOUBLE_EQ(weights.node.weights_on_swap, 4e9);
  EXPECT_DOUBLE_EQ(weights.traffic.swap_read, 40e9 + 3 * 4e9);
  EXPECT_DOUBLE_EQ(weights.traffic.swap_written, 40e9 + 4e9);
}

TEST(ClusterModel, AStepIsAsLongAsTheLongestOfItsParts) {
  ClusterOptions options = TwoNodes();
  options.gpu_tflops = 48;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan compute, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(compute.seconds.step, 1);  // 6 x 8e9 x 1000 operations
  EXPECT_EQ(compute.seconds.bound, "compute");
  EXPECT_DOUBLE_EQ(compute.seconds.tflops, 48);

  options.link_rate = 12;  // 24e9 bytes: two thirds of them under backward
  ASSERT_OK_AND_ASSIGN(const ClusterPlan link, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(link.seconds.step, 2);
  EXPECT_EQ(link.seconds.bound, "link");
  EXPECT_DOUBLE_EQ(link.seconds.tflops, 24);

  options.update_rate = 26;  // of 26 x 4e9
  ASSERT_OK_AND_ASSIGN(const ClusterPlan update, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(update.seconds.step, 4);
  EXPECT_EQ(update.seconds.bound, "update");
  options.early_updates = false;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan after, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(after.seconds.step, 2 + 4);

  options.dram_bytes = 34'000'000'000;
  options.read_rate = 11;  // 22e9 each way
  options.write_rate = 5.5;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan swap, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(swap.seconds.swap, 2 + 4);
  EXPECT_DOUBLE_EQ(swap.seconds.step, 2 + 6);
  EXPECT_EQ(swap.seconds.bound, "swap");
}

TEST(ClusterModel, RecomputationIsAThirdMoreWork) {
  ClusterOptions options = TwoNodes();
  options.gpu_tflops = 48;
  options.recompute = true;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan plan, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(plan.seconds.step, 4.0 / 3);
}

TEST(ClusterModel, OneNodeNeedsNoLink) {
  ClusterOptions options = TwoNodes();
  options.nodes = 1;
  options.link_rate = 1;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan plan, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(plan.traffic.link, 0);
  EXPECT_DOUBLE_EQ(plan.seconds.link, 0);
}

// Fixed tokens a GPU: the update of a node gets shorter with more nodes, compute does not.
TEST(ClusterModel, AnUpdateThatIsNotHiddenMakesScalingSuperlinear) {
  ClusterOptions options = TwoNodes();
  options.gpu_tflops = 48;
  options.update_rate = 26;
  options.early_updates = false;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan two, PlanCluster(kModel, options));
  options.nodes = 4;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan four, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(two.seconds.step, 1 + 4);
  EXPECT_DOUBLE_EQ(four.seconds.step, 1 + 2);
  EXPECT_GT(four.seconds.tflops, two.seconds.tflops);
}

TEST(ClusterModel, WhatIsNoClusterIsRefused) {
  const auto refused = [](const ClusterModel& model, const ClusterOptions& options) {
    const absl::Status status = PlanCluster(model, options).status();
    EXPECT_EQ(protocol::IdOf(status), ErrorId::kOption) << status;
    return std::string(status.message());
  };
  ClusterOptions options = TwoNodes();
  options.tensor_parallel = 3;
  EXPECT_THAT(refused(kModel, options),
              HasSubstr("4 GPUs of a node cannot be cut into groups of 3"));
  options = TwoNodes();
  options.nodes = 0;
  EXPECT_THAT(refused(kModel, options), HasSubstr("has nodes"));
  options = TwoNodes();
  options.link_rate = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(refused(kModel, options), HasSubstr("nan is no rate"));
  ClusterModel model = kModel;
  model.params = 7;
  model.layers = 1;
  EXPECT_THAT(refused(model, TwoNodes()), HasSubstr("fewer than the 8 GPUs"));
  model = kModel;
  model.dtype = protocol::DType::kFloat32;  // with format exact
  EXPECT_THAT(refused(model, TwoNodes()), HasSubstr("does not take weights of this type"));
}

TEST(ClusterModel, ANodeThatIsTooSmallIsNamedWithTheNumberThatWouldDo) {
  ClusterOptions options = TwoNodes();
  options.dram_bytes = 8'000'000'000;  // the gradients alone
  const absl::Status dram = PlanCluster(kModel, options).status();
  EXPECT_EQ(protocol::IdOf(dram), ErrorId::kDramLimit);
  EXPECT_THAT(protocol::FormatError(dram), HasSubstr("--nodes to 3"));
  options.nodes = 3;
  EXPECT_OK(PlanCluster(kModel, options).status());

  options = TwoNodes();
  options.early_updates = false;
  options.dram_bytes = 34'000'000'000;
  options.swap_bytes = 43'000'000'000;  // of 44e9
  const absl::Status swap = PlanCluster(kModel, options).status();
  EXPECT_EQ(protocol::IdOf(swap), ErrorId::kSwapNospc);
  options.swap_bytes = 44'000'000'001;
  EXPECT_OK(PlanCluster(kModel, options).status());
}

}  // namespace
}  // namespace forebay::tools
