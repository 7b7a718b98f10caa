// SPDX-License-Identifier: Apache-2.0
// Goal    The content of a durable step names a parameter for every block and every part of the weights that has elements of
//         the parameter, and for no other.
// Method  Jobs of every kind; where elements lie is asked of Locate, element ranges of partitions of the layout.

#include "daemon/core/blocks/durable_content.h"

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "protocol/dtype.h"
#include "protocol/units.h"
#include "tests/support/durable_jobs.h"

namespace forebay::daemon {
namespace {

using Named = std::set<std::pair<uint32_t, std::string>>;  // entry, parameter

std::shared_ptr<const DurableJob> Job(size_t number) {
  return testing::MakeDurableNode(/*begin_bytes=*/0).jobs.at(number);
}

// Returns the parameter names in each block and, for resident weights, in each part of the arena. The names follow from the
// element ranges of partitions.
Named Wanted(const DurableJob& job) {
  const protocol::Layout& layout = *job.layout;
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  const uint64_t width = protocol::SizeBytes(layout.spec().dtype);
  Named wanted;
  // Arena bytes of the resident partitions so far. Each partition begins on a page.
  uint64_t arena_bytes = 0;
  for (uint32_t owner = 0; owner < layout.owners().size(); ++owner) {
    for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
      const protocol::PartitionPlace& partition = layout.partitions()[i];
      const bool by_owner = job.weights_on_swap.empty();
      if (by_owner ? partition.owner != layout.owners()[owner].owner : owner > 0) continue;
      for (const protocol::BoxPlace& place : layout.boxes_of(i)) {
        const std::string& name = layout.spec().params[place.box.param].name;
        const uint64_t end = place.partition_elem + place.box.elems();
        for (const ElementRun& run : map.LocateInPartition(i, place.partition_elem, end)) {
          if (run.block != ElementRun::kNoBlock) wanted.emplace(run.block, name);
        }
        if (map.is_on_swap(i)) continue;
        const uint64_t first = (arena_bytes + place.partition_elem * width) / job.slot_bytes;
        const uint64_t last = (arena_bytes + end * width - 1) / job.slot_bytes;
        for (uint64_t part = first; part <= last; ++part) {
          wanted.emplace(map.blocks() + static_cast<uint32_t>(part), name);
        }
      }
      if (!map.is_on_swap(i)) {
        arena_bytes += protocol::RoundUp(layout.partition_bytes(i), protocol::kPageBytes);
      }
    }
  }
  return wanted;
}

TEST(DurableContentTest, EachParameterIsNamedWhereItsElementsAre) {
  for (size_t number = 0; number < 4; ++number) {
    SCOPED_TRACE(number);
    const std::shared_ptr<const DurableJob> job = Job(number);
    const DurableContent content(job);
    Named named;
    for (uint32_t entry = 0; entry < content.entries(); ++entry) {
      const std::vector<std::string> params = content.Params(entry);
      EXPECT_FALSE(params.empty()) << content.Name(entry);
      for (const std::string& param : params) {
        EXPECT_TRUE(named.emplace(entry, param).second) << param << " twice";
      }
    }
    EXPECT_EQ(named, Wanted(*job));
  }
}

TEST(DurableContentTest, EntriesAreBlocksAndThenPartsOfTheWeights) {
  const std::shared_ptr<const DurableJob> job = Job(1);
  const DurableContent content(job);
  const auto blocks = static_cast<uint32_t>(job->blocks.size());
  ASSERT_EQ(content.entries(), blocks + job->weights.size());
  EXPECT_EQ(content.Name(0), "block 0");
  EXPECT_EQ(content.Name(blocks), "part 0 of the weights");
  uint64_t weights_bytes = 0;
  for (uint32_t entry = 0; entry < content.entries(); ++entry) {
    const auto expected = content.At(entry);
    const bool is_part = entry >= blocks;
    ASSERT_EQ(expected.has_value(), is_part || job->blocks[entry].has_value());
    if (!expected) continue;
    EXPECT_EQ(expected->identity.job, job->id);
    EXPECT_EQ(expected->identity.part, is_part ? BlockPart::kWeightsArena : BlockPart::kStates);
    EXPECT_EQ(expected->identity.block, is_part ? entry - blocks : entry);
    EXPECT_LE(expected->bytes, job->slot_bytes);
    if (is_part) weights_bytes += expected->bytes;
  }
  EXPECT_EQ(weights_bytes, protocol::RoundUp(WeightsInDram(*job->layout, job->weights_on_swap),
                                             protocol::kPageBytes));
}

}  // namespace
}  // namespace forebay::daemon
