// Goal    The table says for every block and every partition where it is; blocks in DRAM lie side by
//         side and within the bytes that were granted; a grant of nothing or of everything is exact.
// Method  Every number of granted bytes from none to all blocks, in steps that are no multiple of a
//         block.

#include "daemon/core/placement.h"

#include <cstdint>
#include <memory>

#include "daemon/core/block_map.h"
#include "gtest/gtest.h"
#include "protocol/layout.h"
#include "tests/support/node_harness.h"

namespace forebay::daemon {
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
    EXPECT_EQ(location.bytes, layout->group_bytes(partition));
  }
}

}  // namespace
}  // namespace forebay::daemon
