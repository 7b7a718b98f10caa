// SPDX-License-Identifier: Apache-2.0
// Goal    The closed form of a cluster gives the same share of each node, bytes of each link and time of a step as a
//         calculation by hand. Impossible clusters are refused with the numbers.
// Method  Small numbers whose sums the test states. Rates are chosen so that each resource in turn takes the longest.

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

// 8e9 parameters on 2 nodes are 4e9 a node. Each has 2 bytes of weights and, in format exact, 10 bytes of states.
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
  // Two gathers and a reduce-scatter of 16e9 bytes. Half of each crosses the nodes' link, and seven eighths enter each GPU.
  EXPECT_DOUBLE_EQ(plan.traffic.link, 3 * 16e9 / 2);
  EXPECT_DOUBLE_EQ(plan.traffic.gpu_link, 3 * 16e9 * 7 / 8);
  EXPECT_DOUBLE_EQ(plan.traffic.to_gpus, 2 * 2 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.traffic.from_gpus, 2 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.traffic.update, 26 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.traffic.additions, 4 * kOfNode);
  EXPECT_DOUBLE_EQ(plan.seconds.step, 0);  // without rates each part takes no time
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
  // Gradients and weights take 16e9 bytes of DRAM. 18e9 of the 40e9 bytes of states fit.
  options.dram_bytes = 34'000'000'000;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan states, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(states.node.states, 18e9);
  EXPECT_DOUBLE_EQ(states.node.states_on_swap, 22e9);
  EXPECT_DOUBLE_EQ(states.node.weights_on_swap, 0);
  EXPECT_DOUBLE_EQ(states.node.swap, 44e9);
  EXPECT_DOUBLE_EQ(states.traffic.swap_read, 22e9);
  EXPECT_DOUBLE_EQ(states.traffic.swap_written, 22e9);

  // With early updates the new weights of swapped blocks are in DRAM. The resident share r satisfies
  // 18 = 4 (10 r + 2 (1 - r)), in 1e9 bytes.
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

// Forward computes for 1/3 s and backward for 2/3 s. Of 40 layers, the first one fills a pass: each of its stages takes a
// fortieth of its seconds.
constexpr double kLayer = 1.0 / 40;
constexpr double kGather = 2.0 / 3;      // 8e9 bytes in and out of each node at 12 GB/s
constexpr double kAdditions = 8.0 / 13;  // 16e9 bytes at 26 GB/s

ClusterOptions OneSecond() {
  ClusterOptions options = TwoNodes();
  options.gpu_tflops = 48;  // 6 x 8e9 x 1000 operations
  return options;
}

TEST(ClusterModel, AStepIsAsLongAsTheLongestPartOfEachPass) {
  ClusterOptions options = OneSecond();
  ASSERT_OK_AND_ASSIGN(const ClusterPlan compute, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(compute.seconds.step, 1);
  EXPECT_EQ(compute.seconds.bound, "compute");
  EXPECT_DOUBLE_EQ(compute.seconds.exposed, 0);
  EXPECT_DOUBLE_EQ(compute.seconds.tflops, 48);

  // Backward gathers a group and reduces its gradient. Layers fill forward, and the last gradient is reduced after backward.
  options.link_rate = 12;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan link, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(link.seconds.step, kGather + kLayer * 1 / 3 + 2 * kGather + kLayer * kGather);
  EXPECT_EQ(link.seconds.bound, "link");
  EXPECT_DOUBLE_EQ(link.seconds.exposed, link.seconds.step - 1);
  EXPECT_DOUBLE_EQ(link.seconds.tflops, 48 / link.seconds.step);

  // The update of states in DRAM is as long as forward at least. Backward cannot overlap it.
  options.update_rate = 26;  // 26 GB/s for 26 x 4e9 bytes
  ASSERT_OK_AND_ASSIGN(const ClusterPlan update, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(update.seconds.step, 4 + kLayer * (kGather + 1.0 / 3) + 2 * kGather +
                                            kLayer * (kGather + kAdditions));
  EXPECT_EQ(update.seconds.bound, "update");
  options.early_updates = false;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan after, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(after.seconds.step, link.seconds.step + kLayer * kAdditions + 4);

  options.dram_bytes = 34'000'000'000;
  options.read_rate = 11;  // 22e9 bytes are read and written
  options.write_rate = 5.5;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan swap, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(swap.seconds.swap, 2 + 4);
  EXPECT_DOUBLE_EQ(swap.seconds.step, after.seconds.step - 4 + 6);
  EXPECT_EQ(swap.seconds.bound, "swap");
}

TEST(ClusterModel, OnlyUpdatesOfStatesInDramLengthenForward) {
  ClusterOptions options = OneSecond();
  options.update_rate = 130;  // 0.8 s
  options.dram_bytes = 34'000'000'000;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan plan, PlanCluster(kModel, options));
  const double resident = plan.node.states / 40e9;
  ASSERT_GT(resident, 0.25);
  ASSERT_LT(resident, 1.0 / 3);
  // Compute is the longest part of forward. The update of the first group precedes it.
  const double additions = 16e9 / 130e9;
  EXPECT_DOUBLE_EQ(plan.seconds.step, 1 + kLayer * 0.8 * resident + kLayer * additions);
  EXPECT_EQ(plan.seconds.bound, "compute");

  // The pass over all states takes longer than forward and backward.
  options.update_rate = 52;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan slow, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(slow.seconds.step, 2 + 16e9 / 52e9);
  EXPECT_EQ(slow.seconds.bound, "update");
}

TEST(ClusterModel, TwoGradientsAreUnderWayFromAGpu) {
  ClusterModel model = kModel;
  model.layers = 8;  // gradients of 1e9 bytes a group
  ClusterOptions options = OneSecond();
  options.nodes = 1;
  options.gpus = 1;
  options.host_link_rate = 32;  // 0.5 s for the weights of a pass, and as much for the gradients
  ASSERT_OK_AND_ASSIGN(const ClusterPlan copied, PlanCluster(model, options));
  EXPECT_DOUBLE_EQ(copied.seconds.step, 0.5 + 1.0 / 3 / 8 + 2.0 / 3 + 0.5 / 8);
  EXPECT_EQ(copied.seconds.bound, "host_link");

  // Additions of the pieces beyond 64 MiB a rank are part of a gradient's way.
  options.update_rate = 32;  // 6.5 s for the update, 1 s for additions
  ASSERT_OK_AND_ASSIGN(const ClusterPlan added, PlanCluster(model, options));
  const double waiting = 1 - 8 * 67108864 / 16e9;
  EXPECT_DOUBLE_EQ(added.seconds.step,
                   6.5 + (1.0 / 3 + 0.5) / 8 + (2.0 / 3 + 0.5 + waiting) / 2 + (0.5 + 1) / 8);
}

TEST(ClusterModel, RecomputationIsAThirdMoreWork) {
  ClusterOptions options = OneSecond();
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

// With fixed tokens for each GPU, more nodes shorten the update of a node but not its compute.
TEST(ClusterModel, AnUpdateThatIsNotHiddenMakesScalingSuperlinear) {
  ClusterOptions options = OneSecond();
  options.update_rate = 26;
  options.early_updates = false;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan two, PlanCluster(kModel, options));
  options.nodes = 4;
  ASSERT_OK_AND_ASSIGN(const ClusterPlan four, PlanCluster(kModel, options));
  EXPECT_DOUBLE_EQ(two.seconds.step, 1 + 4 + kLayer * kAdditions);
  EXPECT_DOUBLE_EQ(four.seconds.step, 1 + 2 + kLayer * kAdditions / 2);
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
  model.dtype = protocol::DType::kFloat32;  // format exact does not take fp32 weights
  EXPECT_THAT(refused(model, TwoNodes()), HasSubstr("does not take weights of this type"));
}

TEST(ClusterModel, ANodeThatIsTooSmallIsNamedWithTheNumberThatWouldDo) {
  ClusterOptions options = TwoNodes();
  options.dram_bytes = 8'000'000'000;  // the gradients take all of it
  const absl::Status dram = PlanCluster(kModel, options).status();
  EXPECT_EQ(protocol::IdOf(dram), ErrorId::kDramLimit);
  EXPECT_THAT(protocol::FormatError(dram), HasSubstr("--nodes to 3"));
  options.nodes = 3;
  EXPECT_OK(PlanCluster(kModel, options).status());

  options = TwoNodes();
  options.early_updates = false;
  options.dram_bytes = 34'000'000'000;
  options.swap_bytes = 43'000'000'000;  // 44e9 bytes are needed
  const absl::Status swap = PlanCluster(kModel, options).status();
  EXPECT_EQ(protocol::IdOf(swap), ErrorId::kSwapNospc);
  options.swap_bytes = 44'000'000'001;
  EXPECT_OK(PlanCluster(kModel, options).status());
}

}  // namespace
}  // namespace forebay::tools
