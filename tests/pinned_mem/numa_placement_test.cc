// SPDX-License-Identifier: Apache-2.0
// Goal    An arena is placed on the NUMA nodes of the CPUs that work on it: states in stripes in proportion to the workers,
//         everything else interleaved. No arena goes to node 0 only because it is the default.
// Method  Machines that hwloc creates from a text; no system calls.

#include "pinned_mem/numa_placement.h"

#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace forebay::pinned_mem {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Workers = std::vector<std::vector<int>>;

constexpr uint64_t kStripe = 12 << 20;

NumaTopology Machine(const std::string& text) {
  auto topology = LoadNumaTopology(text);
  EXPECT_TRUE(topology.ok()) << topology.status();
  return topology.ok() ? *topology : NumaTopology{};
}

// Makes `threads[n]` threads for each NUMA node n. Each thread may run on all CPUs of its node.
Workers ThreadsOf(const NumaTopology& machine, const std::vector<size_t>& threads) {
  Workers workers;
  for (size_t n = 0; n < threads.size(); ++n) {
    workers.insert(workers.end(), threads[n], machine.nodes[n].cpus);
  }
  return workers;
}

TEST(NumaTopology, EveryCpuHasOneNode) {
  const NumaTopology machine = Machine("pack:2 numa:2 core:3 pu:2");
  ASSERT_EQ(machine.nodes.size(), 4U);
  EXPECT_THAT(machine.nodes[1].cpus, ElementsAre(6, 7, 8, 9, 10, 11));
  EXPECT_EQ(machine.NodeOf(0), 0);
  EXPECT_EQ(machine.NodeOf(23), 3);
  EXPECT_EQ(machine.NodeOf(24), -1);
}

TEST(NumaTopology, ASecondNodeNearTheSameCpusIsNotTheirs) {
  const NumaTopology machine =
      Machine("pack:2 [numa(memory=64GB)] [numa(memory=16GB)] core:2 pu:1");
  ASSERT_EQ(machine.nodes.size(), 4U);
  size_t cpus = 0;
  for (const NumaNode& node : machine.nodes) cpus += node.cpus.size();
  EXPECT_EQ(cpus, 4U);
  EXPECT_NE(machine.NodeOf(0), machine.NodeOf(3));
}

TEST(NumaTopology, OfThisMachineHasANodeForEveryCpu) {
  const auto machine = LoadNumaTopology();
  ASSERT_TRUE(machine.ok()) << machine.status();
  ASSERT_FALSE(machine->nodes.empty());
  EXPECT_GE(machine->NodeOf(machine->nodes[0].cpus.at(0)), 0);
}

TEST(NumaTopology, ATextThatIsNoMachineIsAnError) {
  EXPECT_FALSE(LoadNumaTopology("no machine").ok());
}

TEST(NumaPlacement, OnOneNodeTheKernelDecides) {
  const NumaTopology machine = Machine("numa:1 core:4 pu:1");
  for (const ArenaUse use : {ArenaUse::kShared, ArenaUse::kByStripe}) {
    const Placement placement = PlaceArena(machine, use, ThreadsOf(machine, {4}), kStripe);
    EXPECT_THAT(placement.nodes, IsEmpty());
    EXPECT_EQ(placement.NodeAt(kStripe), -1);
  }
}

TEST(NumaPlacement, WithoutWorkersNothingIsOnNode0) {
  const NumaTopology machine = Machine("numa:2 core:4 pu:1");
  EXPECT_THAT(PlaceArena(machine, ArenaUse::kShared, {}, kStripe).nodes, IsEmpty());
}

TEST(NumaPlacement, WorkersOfOneNodeHaveAllOfItThere) {
  const NumaTopology machine = Machine("numa:2 core:4 pu:1");
  for (const ArenaUse use : {ArenaUse::kShared, ArenaUse::kByStripe}) {
    const Placement placement = PlaceArena(machine, use, {{4, 5}, {4, 5}}, kStripe);
    EXPECT_THAT(placement.nodes, ElementsAre(1));
    EXPECT_EQ(placement.NodeAt(0), 1);
    EXPECT_EQ(placement.NodeAt(uint64_t{1} << 40), 1);
  }
}

TEST(NumaPlacement, StatesGoByStripeInProportionToTheWorkers) {
  const NumaTopology machine = Machine("numa:2 core:4 pu:1");
  const Placement placement =
      PlaceArena(machine, ArenaUse::kByStripe, ThreadsOf(machine, {4, 2}), kStripe);
  EXPECT_THAT(placement.nodes, ElementsAre(0, 1, 0));
  EXPECT_EQ(placement.NodeAt(kStripe - 1), 0);
  EXPECT_EQ(placement.NodeAt(kStripe), 1);
  EXPECT_EQ(placement.NodeAt(3 * kStripe), 0);
}

TEST(NumaPlacement, TheRestIsInterleavedEvenlyOverTheNodesThatWorkOnIt) {
  const NumaTopology machine = Machine("numa:4 core:4 pu:1");
  Workers workers = ThreadsOf(machine, {0, 4, 0, 1});
  EXPECT_THAT(PlaceArena(machine, ArenaUse::kShared, workers, kStripe).nodes, ElementsAre(1, 3));
}

TEST(NumaPlacement, AWorkerThatMayRunOnSeveralNodesCountsForEach) {
  const NumaTopology machine = Machine("numa:2 core:4 pu:1");
  for (const ArenaUse use : {ArenaUse::kShared, ArenaUse::kByStripe}) {
    EXPECT_THAT(PlaceArena(machine, use, {{3, 4}}, kStripe).nodes, ElementsAre(0, 1));
  }
}

TEST(NumaPlacement, OddProportionsStayShortAndFair) {
  const NumaTopology machine = Machine("numa:3 core:101 pu:1");
  const std::vector<int> nodes =
      PlaceArena(machine, ArenaUse::kByStripe, ThreadsOf(machine, {101, 50, 49}), kStripe).nodes;
  EXPECT_EQ(nodes.size(), 64U);
  EXPECT_NEAR(static_cast<double>(std::ranges::count(nodes, 0)), 32, 1);
  EXPECT_NEAR(static_cast<double>(std::ranges::count(nodes, 1)), 16, 1);
}

}  // namespace
}  // namespace forebay::pinned_mem
