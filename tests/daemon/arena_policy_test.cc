// SPDX-License-Identifier: Apache-2.0
// Goal    Arenas are populated by as many threads as there are update workers, and are placed on the nodes of the workers'
//         CPUs.
// Method  Options for a machine of two nodes that hwloc makes from a text.

#include "daemon/exec/arena_policy.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::arena_policy_test {
namespace {

using ::testing::ElementsAre;

TEST(ArenaPolicy, LetsEveryWorkersThreadPopulate) {
  ArenaPolicy policy;
  ASSERT_OK_AND_ASSIGN(policy.topology, pinned_mem::LoadNumaTopology("numa:2 core:4 pu:1"));
  EXPECT_EQ(policy.Shared("one", 1).threads, 1) << "no workers";
  policy.workers = {{.cpus = {0, 1, 2, 3}, .threads = 3}, {.cpus = {4, 5, 6, 7}, .threads = 2}};
  const pinned_mem::ArenaOptions shared = policy.Shared("shared", 4097);
  EXPECT_EQ(shared.threads, 5);
  EXPECT_EQ(shared.capacity_bytes, 8192u);
  EXPECT_THAT(shared.placement.nodes, ElementsAre(0, 1));
  const pinned_mem::ArenaOptions striped = policy.ByStripe("striped", 1 << 20, 4096);
  EXPECT_EQ(striped.threads, 5);
  EXPECT_EQ(striped.placement.nodes.size(), 5u) << "stripes in proportion to the threads";
}

}  // namespace
}  // namespace forebay::daemon::arena_policy_test
