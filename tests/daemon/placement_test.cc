// SPDX-License-Identifier: Apache-2.0
// Goal    The placement table gives the place of every block and every partition. Resident blocks lie side by side, within the
//         granted bytes. A grant of no bytes or of all bytes is exact. A block that moves counts in both tiers.
// Method  Every number of granted bytes from none to all blocks, in steps that are no multiple of a
//         block.

#include "daemon/core/blocks/placement.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/core/blocks/block_map.h"
#include "gtest/gtest.h"
#include "protocol/layout.h"
#include "tests/support/node_harness.h"

namespace forebay::daemon::placement_test {
namespace {

TEST(Placement, BlocksInDramLieSideBySideWithinTheGrant) {
  const auto layout = testing::MakeLayout({300, 64, 500});
  const BlockMap map(layout, 64);
  uint64_t all_bytes = 0;
  for (uint32_t block = 0; block < map.blocks(); ++block) all_bytes += map.bytes(block);
  for (uint64_t granted = 0; granted <= all_bytes; granted += 1000) {
    const Placement placement(*layout, map, granted);
    uint64_t bytes = 0;
    uint32_t resident = 0;
    for (uint32_t block = 0; block < map.blocks(); ++block) {
      const BlockLocation location = placement.WhereBlock(block);
      if (location.tier == Tier::kNvme) continue;
      EXPECT_EQ(location.state.offset_bytes, bytes) << block;
      EXPECT_EQ(location.state.bytes, map.bytes(block)) << block;
      bytes += map.bytes(block);
      ++resident;
    }
    EXPECT_EQ(placement.state_bytes(), bytes);
    EXPECT_EQ(placement.granted_bytes(), bytes);
    EXPECT_EQ(placement.arena_bytes(), all_bytes);
    EXPECT_EQ(placement.ResidentParts().size(), resident == 0 ? 0U : 1U);
    EXPECT_LE(bytes, granted);
    EXPECT_EQ(placement.resident_blocks(), resident);
    EXPECT_EQ(placement.swapped_blocks(), map.blocks() - resident);
    if (resident < map.blocks()) {
      EXPECT_GT(bytes + map.full_block_bytes(), granted) << "no room for one more";
    }
  }
  EXPECT_EQ(Placement(*layout, map, all_bytes).swapped_blocks(), 0U);
  EXPECT_EQ(Placement(*layout, map, 0).resident_blocks(), 0U);
}

TEST(Placement, WeightsOfEveryPartitionAreInDramWhereTheLayoutHasThem) {
  const auto layout = testing::MakeLayout({300, 64, 500});
  const Placement placement(*layout, BlockMap(layout, 64), 0);
  for (uint32_t partition = 0; partition < 3; ++partition) {
    const PartitionLocation location = placement.WherePartition(partition);
    EXPECT_EQ(location.tier, Tier::kDram);
    EXPECT_EQ(location.weights_offset_bytes, layout->groups()[partition].weights_offset_bytes);
    EXPECT_EQ(location.bytes, layout->partition_bytes(partition));
  }
}

TEST(Placement, AMarkedBlockCountsWhereItIsAndWhereItGoes) {
  const auto layout = testing::MakeLayout({64 * 6});
  const BlockMap map(layout, 64);
  const uint64_t bytes = map.bytes(0);
  Placement placement(*layout, map, 4 * bytes);
  placement.Mark(1);
  placement.Mark(3);
  placement.Mark(5);
  EXPECT_EQ(placement.resident_blocks(), 4U);
  EXPECT_EQ(placement.state_bytes(), 5 * bytes) << "two that leave are still there, one comes";
  EXPECT_EQ(placement.granted_bytes(), 3 * bytes);
  EXPECT_EQ(placement.NextMarked(), 3U) << "evictions first, from the highest";

  placement.BeginMove(3);
  EXPECT_EQ(placement.WhereBlock(3).tier, Tier::kDram);
  EXPECT_EQ(placement.moving(), 3U);
  placement.FinishMove();
  EXPECT_EQ(placement.WhereBlock(3).tier, Tier::kNvme);
  EXPECT_EQ(placement.state_bytes(), 4 * bytes);
  EXPECT_EQ(placement.granted_bytes(), 3 * bytes);

  placement.BeginMove(*placement.NextMarked());
  placement.CancelMove();
  EXPECT_EQ(placement.WhereBlock(1).tier, Tier::kDram);
  EXPECT_EQ(placement.granted_bytes(), 4 * bytes);

  placement.BeginMove(*placement.NextMarked());
  placement.FinishMove();
  EXPECT_EQ(placement.WhereBlock(5).tier, Tier::kDram);
  EXPECT_EQ(placement.state_bytes(), 4 * bytes);
  EXPECT_EQ(placement.NextMarked(), std::nullopt);
  const std::vector<StatePart> parts = placement.ResidentParts();
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].bytes, 3 * bytes);
  EXPECT_EQ(parts[1].offset_bytes, 5 * bytes);
  placement.Mark(4);
  placement.Unmark(4);
  EXPECT_EQ(placement.state_bytes(), 4 * bytes);
}

}  // namespace
}  // namespace forebay::daemon::placement_test
