// SPDX-License-Identifier: Apache-2.0
// Goal    Every trainable element lies in exactly one run of one block, at the place that the layout's boxes and Locate() give.
//         Padding and frozen parameters lie in no block, and the sizes of the blocks add up. If a partition's weights are on
//         swap, its frozen elements lie in separate blocks.
// Method  Layouts of odd sizes are walked element by element: shared ones, and matrices that several
//         owners hold as strided boxes, with replicas. The place of an element is computed here from
//         the boxes, one element at a time.

#include "daemon/core/blocks/block_map.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"

namespace forebay::daemon::block_map_test {
namespace {

using protocol::Layout;
using protocol::LayoutSpec;

struct ParamSize {
  std::vector<uint64_t> shape;
  uint32_t group = 0;
  bool trainable = true;
};

struct Case {
  std::vector<ParamSize> params;
  std::vector<protocol::PartitionSpec> partitions = {};
};

LayoutSpec SpecOf(const Case& test, protocol::Format format) {
  LayoutSpec spec;
  spec.dtype =
      format == protocol::Format::kFp32 ? protocol::DType::kFloat32 : protocol::DType::kBFloat16;
  spec.format = format;
  for (const ParamSize& param : test.params) {
    spec.params.push_back({.name = "p" + std::to_string(spec.params.size()),
                           .shape = param.shape,
                           .group = param.group,
                           .param_group = 0,
                           .trainable = param.trainable});
    if (spec.group_names.size() <= param.group) spec.group_names.emplace_back("g");
  }
  spec.partitions = test.partitions;
  return spec;
}

std::shared_ptr<const Layout> Make(const Case& test,
                                   protocol::Format format = protocol::Format::kFp32) {
  absl::StatusOr<Layout> layout = Layout::Create(SpecOf(test, format));
  EXPECT_TRUE(layout.ok()) << layout.status();
  return std::make_shared<const Layout>(*std::move(layout));
}

// Layout with a matrix of 24 x 90, a vector and a frozen vector. Owner 1 has columns [0, 31) of every row. Owners 0 and 5 have
// the other columns of the upper and the lower rows. Owner 5 also has a replica of a part. Owner 0 alone has the vector. The
// frozen vector lies in between.
Case Sharded() {
  constexpr uint64_t kColumns = 90;
  return {
      .params = {{{24, kColumns}, 0}, {{77}, 0, false}, {{200}, 1}},
      .partitions = {{.group = 0,
                      .owner = 0,
                      .replica = 0,
                      .boxes = {{0, 31, 59, kColumns, 10}, {1, 0, 77, 77, 1}}},
                     {.group = 0, .owner = 1, .replica = 0, .boxes = {{0, 0, 31, kColumns, 24}}},
                     {.group = 0,
                      .owner = 5,
                      .replica = 0,
                      .boxes = {{0, 10 * kColumns + 31, 59, kColumns, 14}}},
                     {.group = 0, .owner = 5, .replica = 1, .boxes = {{0, 0, 40, 40, 1}}},
                     {.group = 1, .owner = 0, .replica = 0, .boxes = {{2, 0, 200, 200, 1}}}}};
}

struct Place {
  uint32_t block = 0;
  uint64_t block_elem = 0;
  uint32_t partition = 0;
  uint64_t partition_elem = 0;

  bool operator==(const Place&) const = default;
};

// (parameter, element, partition). The partition is in the key because replicas hold the same elements.
using Key = std::tuple<uint32_t, uint64_t, uint32_t>;

// Returns the place of every trainable element, from a walk over all boxes.
std::map<Key, std::pair<uint64_t, uint64_t>> ElementsOf(const Layout& layout) {
  std::map<Key, std::pair<uint64_t, uint64_t>> found;  // partition element, states element
  for (const protocol::BoxPlace& place : layout.boxes()) {
    if (!layout.params()[place.box.param].trainable) continue;
    uint64_t in_box = 0;
    for (uint64_t run = 0; run < place.box.runs; ++run) {
      for (uint64_t i = 0; i < place.box.run_elems; ++i, ++in_box) {
        const uint64_t elem = place.box.first_elem + run * place.box.stride_elems + i;
        found[{place.box.param, elem, place.partition}] = {place.partition_elem + in_box,
                                                           place.states_elem + in_box};
      }
    }
  }
  return found;
}

class BlockMapLayouts : public ::testing::TestWithParam<Case> {};

TEST_P(BlockMapLayouts, HoldEveryElementOnceWhereLocateFindsIt) {
  for (const auto format : {protocol::Format::kFp32, protocol::Format::kBf16}) {
    const auto layout = Make(GetParam(), format);
    for (const uint64_t block_elems : {64U, 128U, 1024U}) {
      const BlockMap map(layout, block_elems);
      const auto elements = ElementsOf(*layout);
      std::map<std::pair<uint32_t, uint64_t>, Place> by_weight;  // (partition, its element)
      for (uint32_t block = 0; block < map.blocks(); ++block) {
        uint64_t last_end = 0;
        for (const BlockRun& run : map.Runs(block)) {
          ASSERT_GE(run.block_elem, last_end) << "runs ascend";
          last_end = run.block_elem + run.elems;
          ASSERT_LE(last_end, map.elems(block));
          for (uint64_t i = 0; i < run.elems; ++i) {
            const Place place{block, run.block_elem + i, run.partition, run.partition_elem + i};
            const bool first =
                by_weight.emplace(std::pair(run.partition, run.partition_elem + i), place).second;
            ASSERT_TRUE(first) << "an element is there twice";
            if (format != protocol::Format::kBf16) continue;
            const auto it = elements.find({run.param, run.param_elem + i, run.partition});
            ASSERT_NE(it, elements.end());
            ASSERT_EQ(it->second.first, run.partition_elem + i) << "the run names its elements";
          }
        }
      }
      ASSERT_EQ(by_weight.size(), elements.size());
      for (uint32_t param = 0; param < layout->params().size(); ++param) {
        if (!layout->params()[param].trainable) continue;
        uint64_t elem = 0;
        for (const ElementRun& run : map.Locate(param, 0, layout->params()[param].elems)) {
          for (uint64_t i = 0; i < run.elems; ++i, ++elem) {
            ASSERT_EQ(run.param_elem + i, elem) << "in order, each once";
            ASSERT_EQ(layout->partitions()[run.partition].replica, 0U);
            const auto [partition_elem, states_elem] = elements.at({param, elem, run.partition});
            ASSERT_EQ(partition_elem, run.partition_elem + i);
            ASSERT_EQ(states_elem % block_elems, run.block_elem + i);
            ASSERT_EQ(by_weight.at({run.partition, partition_elem}),
                      (Place{run.block, run.block_elem + i, run.partition, partition_elem}));
          }
        }
        ASSERT_EQ(elem, layout->params()[param].elems);
      }
    }
  }
}

TEST_P(BlockMapLayouts, LocateAnyPartOfAParameter) {
  const auto layout = Make(GetParam());
  const BlockMap map(layout, 64);
  for (uint32_t param = 0; param < layout->params().size(); ++param) {
    const uint64_t elems = layout->params()[param].elems;
    if (!layout->params()[param].trainable) continue;
    for (uint64_t first = 0; first < elems; first += 1 + elems / 37) {
      const uint64_t count = std::min<uint64_t>(elems - first, 1 + first % 101);
      uint64_t elem = first;
      for (const ElementRun& run : map.Locate(param, first, count)) {
        ASSERT_EQ(run.param_elem, elem);
        elem += run.elems;
      }
      ASSERT_EQ(elem, first + count);
    }
  }
}

// First every second partition has its weights on swap, then every partition.
TEST_P(BlockMapLayouts, HoldFrozenWeightsOnSwapInBlocksOfTheirOwn) {
  for (const auto format : {protocol::Format::kFp32, protocol::Format::kInt8}) {
    const auto layout = Make(GetParam(), format);
    const auto partitions = static_cast<uint32_t>(layout->partitions().size());
    const uint64_t width = protocol::SizeBytes(layout->spec().dtype);
    for (const uint32_t step : {2U, 1U}) {
      std::vector<bool> on_swap(partitions, false);
      for (uint32_t i = 0; i < partitions; i += step) on_swap[i] = true;
      const BlockMap map(layout, 128, on_swap);
      const BlockMap plain(layout, 128);
      ASSERT_EQ(map.state_blocks(), plain.blocks());
      for (uint32_t block = 0; block < map.state_blocks(); ++block) {
        EXPECT_EQ(map.Runs(block), plain.Runs(block)) << "they are where they were";
      }
      std::map<std::pair<uint32_t, uint64_t>, Place> frozen;  // (partition, its element)
      for (uint32_t block = map.state_blocks(); block < map.blocks(); ++block) {
        EXPECT_TRUE(map.has_weights(block) && !map.has_states(block));
        EXPECT_EQ(map.states_elems(block) + map.weights_plane_offset(block), 0U);
        EXPECT_EQ(map.bytes(block), protocol::RoundUp(map.elems(block) * width, 4096));
        EXPECT_LE(map.bytes(block), map.full_block_bytes());
        for (const BlockRun& run : map.Runs(block)) {
          EXPECT_TRUE(on_swap[run.partition] && !layout->params()[run.param].trainable);
          ASSERT_LE(run.block_elem + run.elems, map.elems(block));
          for (uint64_t i = 0; i < run.elems; ++i) {
            const Place place{block, run.block_elem + i, run.partition, run.partition_elem + i};
            ASSERT_TRUE(
                frozen.emplace(std::pair(run.partition, run.partition_elem + i), place).second);
          }
        }
      }
      uint64_t found = 0;
      for (uint32_t partition = 0; partition < partitions; ++partition) {
        uint64_t elem = 0;
        const uint64_t elems = layout->partitions()[partition].elems;
        for (const ElementRun& run : map.LocateInPartition(partition, 0, elems)) {
          ASSERT_EQ(run.partition_elem, elem) << "in order, each once";
          elem += run.elems;
          if (run.block == ElementRun::kNoBlock) {
            EXPECT_FALSE(on_swap[partition]);
            continue;
          }
          if (map.has_states(run.block)) continue;
          for (uint64_t i = 0; i < run.elems; ++i, ++found) {
            const Place place{run.block, run.block_elem + i, partition, run.partition_elem + i};
            ASSERT_EQ(frozen.at({partition, run.partition_elem + i}), place);
          }
        }
        ASSERT_EQ(elem, elems);
      }
      EXPECT_EQ(found, frozen.size());
    }
  }
}

TEST_P(BlockMapLayouts, AreAsLargeAsAdmissionReckons) {
  const auto layout = Make(GetParam());
  for (const uint64_t block_elems : {64U, 128U, 1024U}) {
    const BlockMap map(layout, block_elems);
    uint64_t bytes = 0;
    uint64_t elems = 0;
    for (uint32_t block = 0; block < map.blocks(); ++block) {
      EXPECT_EQ(map.bytes(block) % protocol::kPageBytes, 0U);
      EXPECT_LE(map.bytes(block), map.full_block_bytes());
      bytes += map.bytes(block);
      elems += map.elems(block);
    }
    EXPECT_EQ(elems, layout->states_elems());
    EXPECT_EQ(bytes, BlockMap::TotalBytes(*layout, block_elems));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, BlockMapLayouts,
    ::testing::Values(Case{{{{}, 0}}}, Case{{{{64}, 0}}},
                      Case{{{{63}, 0}, {{65}, 1}, {{1}, 1}, {{300}, 2}}},
                      Case{{{{7}, 0}, {{11}, 0, false}, {{500}, 0}, {{192}, 1, false}}},
                      Case{{{{9}, 0, false}}},
                      Case{{{{5000}, 0, false}, {{33}, 0}, {{7001}, 0, false}}}, Sharded()));

TEST(BlockMap, HasTheMostElementsThatFitIntoSoManyBytes) {
  LayoutSpec spec = Make({{{{100'000}, 0}}})->spec();
  for (const protocol::Optimizer optimizer :
       {protocol::Optimizer::kLion, protocol::Optimizer::kAdamW,
        protocol::Optimizer::kAdamWAmsgrad}) {
    spec.optimizer = optimizer;
    const auto layout = std::make_shared<const Layout>(*Layout::Create(spec));
    for (const uint64_t bytes : {uint64_t{3 * 4096}, uint64_t{40'000}, uint64_t{163'840}}) {
      const uint64_t elems = BlockMap::ElemsWithin(*layout, bytes, false);
      ASSERT_GT(elems, 0U);
      EXPECT_LE(BlockMap(layout, elems).full_block_bytes(), bytes);
      EXPECT_GT(BlockMap(layout, elems + protocol::kStatesAlignElems).full_block_bytes(), bytes);
    }
  }
  EXPECT_EQ(BlockMap::ElemsWithin(*Make({{{{64}, 0}}}), 8191, false), 0U);
}

TEST(BlockMap, NumbersTheFirstBlockOfEachOwnerFirst) {
  const auto layout = Make({{{{512}, 0}},
                            {{.group = 0, .owner = 0, .boxes = {{0, 0, 256, 256, 1}}},
                             {.group = 0, .owner = 1, .boxes = {{0, 256, 256, 256, 1}}}}});
  const BlockMap map(layout, 64);
  ASSERT_EQ(map.blocks(), 8U);
  EXPECT_EQ(map.Runs(0)[0].param_elem, 0U);
  EXPECT_EQ(map.Runs(1)[0].param_elem, 256U) << "owner 1's partition";
  EXPECT_EQ(map.Runs(2)[0].param_elem, 64U);
}

}  // namespace
}  // namespace forebay::daemon::block_map_test
