// Goal    Every parameter element of every group lies in exactly one run of one block, at the place
//         Locate gives; padding lies in none; sizes add up.
// Method  Pure function: layouts with odd sizes, several ranks and parameter groups are walked
//         element by element.

#include "daemon/core/block_map.h"

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

namespace forebay::daemon {
namespace {

using protocol::Layout;
using protocol::LayoutSpec;

// (elements, group, parameter group) of each parameter.
using Params = std::vector<std::tuple<uint64_t, uint32_t, uint32_t>>;

std::shared_ptr<const Layout> Make(uint32_t world_size, const Params& params) {
  LayoutSpec spec;
  spec.world_size = world_size;
  for (const auto& [elems, group, param_group] : params) {
    spec.params.push_back({.name = "p" + std::to_string(spec.params.size()),
                           .shape = {elems},
                           .group = group,
                           .param_group = param_group});
    if (spec.group_names.size() <= group) spec.group_names.push_back("g");
  }
  absl::StatusOr<Layout> layout = Layout::Create(spec);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return std::make_shared<const Layout>(*std::move(layout));
}

class BlockMapLayouts : public ::testing::TestWithParam<std::pair<uint32_t, Params>> {};

TEST_P(BlockMapLayouts, CoverEveryElementOnceWhereLocateFindsIt) {
  const auto layout = Make(GetParam().first, GetParam().second);
  for (const uint64_t block_elems : {64U, 128U, 1024U}) {
    const BlockMap map(layout, block_elems);
    std::map<std::pair<uint32_t, uint64_t>, std::pair<uint32_t, uint64_t>> place_of_element;
    for (uint32_t block = 0; block < map.blocks(); ++block) {
      uint64_t last_end = 0;
      for (const BlockRun& run : map.Runs(block)) {
        ASSERT_GE(run.block_elem, last_end) << "runs ascend";
        last_end = run.block_elem + run.elems;
        ASSERT_LE(last_end, map.elems(block));
        for (uint64_t i = 0; i < run.elems; ++i) {
          const bool first = place_of_element
                                 .emplace(std::pair(run.group, run.group_elem + i),
                                          std::pair(block, run.block_elem + i))
                                 .second;
          ASSERT_TRUE(first) << "group " << run.group << " element " << run.group_elem + i;
        }
      }
    }
    uint64_t elements = 0;
    for (uint32_t group = 0; group < layout->groups().size(); ++group) {
      const protocol::GroupPlace& place = layout->groups()[group];
      elements += place.elems;
      uint64_t elem = 0;
      for (const ElementRun& run : map.Locate(group, 0, place.padded_elems)) {
        for (uint64_t i = 0; i < run.elems; ++i, ++elem) {
          const auto it = place_of_element.find({group, elem});
          ASSERT_EQ(it != place_of_element.end(), elem < place.elems) << "padding is in no run";
          if (it == place_of_element.end()) continue;
          ASSERT_EQ(it->second, std::pair(run.block, run.block_elem + i));
        }
      }
      ASSERT_EQ(elem, place.padded_elems);
    }
    EXPECT_EQ(place_of_element.size(), elements);
  }
}

TEST_P(BlockMapLayouts, KnowTheirParameterGroups) {
  const auto layout = Make(GetParam().first, GetParam().second);
  const BlockMap map(layout, 128);
  for (uint32_t block = 0; block < map.blocks(); ++block) {
    for (const BlockRun& run : map.Runs(block)) {
      for (uint64_t elem = run.group_elem; elem < run.group_elem + run.elems; ++elem) {
        for (const protocol::ParamPlace& param : layout->params()) {
          if (param.group != run.group || elem < param.offset_elems ||
              elem >= param.offset_elems + param.elems) {
            continue;
          }
          ASSERT_EQ(param.param_group, run.param_group);
        }
      }
    }
  }
}

TEST_P(BlockMapLayouts, AreAsLargeAsAdmissionReckons) {
  const auto layout = Make(GetParam().first, GetParam().second);
  for (const uint64_t block_elems : {64U, 128U, 1024U}) {
    const BlockMap map(layout, block_elems);
    uint64_t bytes = 0;
    uint64_t elems = 0;
    for (uint32_t block = 0; block < map.blocks(); ++block) {
      EXPECT_EQ(map.bytes(block) % protocol::kPageBytes, 0U);
      EXPECT_EQ(map.plane_offset_bytes(block, 0), 0U);
      EXPECT_EQ(map.plane_offset_bytes(block, 1), map.bytes(block) / 2) << "two equal planes";
      EXPECT_LE(map.bytes(block), map.full_block_bytes());
      bytes += map.bytes(block);
      elems += map.elems(block);
    }
    EXPECT_EQ(elems, layout->padded_elems());
    EXPECT_EQ(bytes, BlockMap::TotalBytes(*layout, block_elems));
    EXPECT_EQ(map.blocks(), BlockMap::Blocks(*layout, block_elems));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, BlockMapLayouts,
    ::testing::Values(std::pair(1U, Params{{1, 0, 0}}), std::pair(1U, Params{{64, 0, 0}}),
                      std::pair(2U, Params{{63, 0, 0}, {65, 1, 0}, {1, 1, 1}, {300, 2, 2}}),
                      std::pair(3U, Params{{7, 0, 1}, {11, 0, 1}, {500, 0, 0}, {192, 1, 0}}),
                      std::pair(4U, Params{{1, 0, 0}, {2, 1, 0}, {3, 2, 0}, {4, 3, 0}})));

TEST(BlockMap, HasTheMostElementsThatFitIntoSoManyBytes) {
  LayoutSpec spec = Make(1, {{100'000, 0, 0}})->spec();
  for (const protocol::Optimizer optimizer :
       {protocol::Optimizer::kLion, protocol::Optimizer::kAdamW,
        protocol::Optimizer::kAdamWAmsgrad}) {
    spec.optimizer = optimizer;
    const auto layout = std::make_shared<const Layout>(*Layout::Create(spec));
    for (const uint64_t bytes : {uint64_t{3 * 4096}, uint64_t{40'000}, uint64_t{163'840}}) {
      const uint64_t elems = BlockMap::ElemsWithin(*layout, bytes);
      ASSERT_GT(elems, 0U);
      EXPECT_LE(BlockMap(layout, elems).full_block_bytes(), bytes);
      EXPECT_GT(BlockMap(layout, elems + protocol::kPartitionAlignElems).full_block_bytes(), bytes);
    }
  }
  EXPECT_EQ(BlockMap::ElemsWithin(*Make(1, {{64, 0, 0}}), 8191), 0U);
}

TEST(BlockMap, NumbersTheFirstBlockOfEachRankFirst) {
  const auto layout = Make(2, {{512, 0, 0}});
  const BlockMap map(layout, 64);
  ASSERT_EQ(map.blocks(), 8U);
  EXPECT_EQ(map.Runs(0)[0].group_elem, 0U);
  EXPECT_EQ(map.Runs(1)[0].group_elem, 256U) << "rank 1's partition";
  EXPECT_EQ(map.Runs(2)[0].group_elem, 64U);
}

TEST(BlockMap, GivesEachParameterARunOfItsOwn) {
  const auto layout = Make(1, {{10, 0, 0}, {20, 0, 0}});
  EXPECT_THAT(BlockMap(layout, 64).Runs(0),
              ::testing::ElementsAre(
                  BlockRun{.param = 0, .group_elem = 0, .block_elem = 0, .elems = 10},
                  BlockRun{.param = 1, .group_elem = 10, .block_elem = 10, .elems = 20}));
}

}  // namespace
}  // namespace forebay::daemon
