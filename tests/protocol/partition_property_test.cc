// SPDX-License-Identifier: Apache-2.0
// Goal    A list of partitions is accepted if and only if it obeys the rules: boxes are inside their parameters, no element
//         occurs twice in a replica, every element occurs in replica 0.
// Method  Random boxes over small parameters, judged by a table with one entry per element; cuts of matrices into rows and
//         columns, which must be accepted; each rule broken by hand, also with numbers that would overflow.

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/limits.h"
#include "protocol/partition.h"
#include "tests/support/status_test.h"

namespace forebay::protocol::partition_property_test {
namespace {

using testing::HasError;

constexpr uint64_t kSeed = 20261121;

// Counts elements. Returns true if each one is in exactly one box.
bool CoversOnce(uint64_t elems, const std::vector<PartitionSpec>& partitions) {
  std::vector<int> count(elems, 0);
  for (const PartitionSpec& partition : partitions) {
    for (const BoxSpec& box : partition.boxes) {
      for (uint64_t run = 0; run < box.runs; ++run) {
        for (uint64_t i = 0; i < box.run_elems; ++i) {
          const uint64_t elem = box.first_elem + run * box.stride_elems + i;
          if (elem >= elems) return false;
          ++count[elem];
        }
      }
    }
  }
  return std::all_of(count.begin(), count.end(), [](int n) { return n == 1; });
}

// Distributes boxes of parameter 0 to owners, in the order that the rules require.
std::vector<PartitionSpec> Deal(std::vector<BoxSpec> boxes, uint32_t owners) {
  std::vector<PartitionSpec> partitions(owners);
  for (size_t i = 0; i < boxes.size(); ++i) partitions[i % owners].boxes.push_back(boxes[i]);
  for (uint32_t owner = 0; owner < owners; ++owner) {
    partitions[owner].owner = owner;
    std::ranges::sort(partitions[owner].boxes, {}, &BoxSpec::first_elem);
  }
  std::erase_if(partitions, [](const PartitionSpec& p) { return p.boxes.empty(); });
  return partitions;
}

bool FirstElementsDiffer(const std::vector<PartitionSpec>& partitions) {
  return std::ranges::all_of(partitions, [](const PartitionSpec& p) {
    return std::ranges::adjacent_find(p.boxes, {}, &BoxSpec::first_elem) == p.boxes.end();
  });
}

TEST(Partitions, AreAcceptedExactlyWhereEachElementIsThereOnce) {
  std::mt19937_64 random(kSeed);
  const auto below = [&](uint64_t bound) { return random() % bound; };
  int accepted = 0;
  for (int round = 0; round < 300'000; ++round) {
    const uint64_t elems = 1 + below(8);
    std::vector<BoxSpec> boxes;
    uint64_t left = elems;  // box sizes add up to elems, so that many lists are accepted
    while (left > 0) {
      BoxSpec box{.param = 0,
                  .first_elem = below(elems),
                  .run_elems = 1 + below(std::min<uint64_t>(left, 3))};
      box.runs = 1 + below(left / box.run_elems);
      box.stride_elems = box.runs == 1 ? box.run_elems : box.run_elems + 1 + below(3);
      left -= box.elems();
      boxes.push_back(box);
    }
    const std::vector<PartitionSpec> partitions =
        Deal(std::move(boxes), 1 + static_cast<uint32_t>(below(3)));
    if (!FirstElementsDiffer(partitions)) continue;  // another rule
    const std::vector<BoxedParam> params = {{"w", 0, elems}};
    const bool ok = CheckPartitions(params, 1, partitions).ok();
    ASSERT_EQ(ok, CoversOnce(elems, partitions)) << "round " << round << ", seed " << kSeed;
    accepted += ok ? 1 : 0;
  }
  EXPECT_GT(accepted, 1000);
}

TEST(Partitions, OfAMatrixInRowsAndColumnsAreAccepted) {
  constexpr uint64_t kRows = 4096;
  constexpr uint64_t kColumns = 1000;
  const std::vector<BoxedParam> params = {{"w", 0, kRows * kColumns}};
  std::vector<BoxSpec> boxes;
  for (const uint64_t row : {0U, 7U, 2048U}) {
    const uint64_t rows = row == 0 ? 7 : row == 7 ? 2041 : 2048;
    for (uint64_t column = 0; column < kColumns; column += 125) {
      boxes.push_back({0, row * kColumns + column, 125, kColumns, rows});
    }
  }
  EXPECT_OK(CheckPartitions(params, 1, Deal(boxes, 3)));
  boxes[5].run_elems = 126;  // overlaps the next box
  EXPECT_THAT(CheckPartitions(params, 1, Deal(boxes, 3)), HasError(ErrorId::kLayout));
}

TEST(Partitions, AreRefusedWhereARuleIsBroken) {
  const std::vector<BoxedParam> params = {{"a", 0, 100}, {"b", 1, 60}};
  const std::vector<PartitionSpec> good = {
      {.group = 0, .owner = 0, .replica = 0, .boxes = {{0, 0, 100, 100, 1}}},
      {.group = 0, .owner = 1, .replica = 1, .boxes = {{0, 20, 10, 10, 1}}},
      {.group = 1, .owner = 0, .replica = 0, .boxes = {{1, 0, 2, 6, 10}, {1, 2, 4, 6, 10}}}};
  EXPECT_OK(CheckPartitions(params, 2, good)) << "a replica may hold a part";
  const auto broken = [&](auto change) {
    std::vector<PartitionSpec> partitions = good;
    change(partitions);
    return CheckPartitions(params, 2, partitions);
  };
  const auto refused = HasError(ErrorId::kLayout);
  EXPECT_THAT(broken([](auto& p) { std::swap(p[0], p[1]); }), refused);
  EXPECT_THAT(broken([](auto& p) { p[1] = p[0]; }), refused) << "twice";
  EXPECT_THAT(broken([](auto& p) { p[2].group = 2; }), refused);
  EXPECT_THAT(broken([](auto& p) { p[0].owner = kOwnersMax; }), refused);
  EXPECT_THAT(broken([](auto& p) { p[1].replica = kReplicasMax; }), refused);
  EXPECT_THAT(broken([](auto& p) { p[1].boxes.clear(); }), refused);
  EXPECT_THAT(broken([](auto& p) { p[0].boxes[0].param = 1; }), refused) << "of another group";
  EXPECT_THAT(broken([](auto& p) { p[0].boxes[0].param = UINT32_MAX; }), refused);
  EXPECT_THAT(broken([](auto& p) { std::swap(p[2].boxes[0], p[2].boxes[1]); }), refused);
  EXPECT_THAT(broken([](auto& p) { p[2].boxes.pop_back(); }), refused) << "elements are missing";
  EXPECT_THAT(broken([](auto& p) { p[0].boxes[0].runs = 0; }), refused);
  EXPECT_THAT(broken([](auto& p) { p[0].boxes[0].run_elems = 0; }), refused);
  EXPECT_THAT(broken([](auto& p) { p[0].boxes[0].stride_elems = 7; }), refused);
  EXPECT_THAT(broken([](auto& p) { p[2].boxes[0].stride_elems = 2; }), refused);
  for (const uint64_t huge : {UINT64_MAX, UINT64_MAX / 2 + 1, uint64_t{1} << 32, uint64_t{101}}) {
    EXPECT_THAT(broken([&](auto& p) { p[0].boxes[0].first_elem = huge; }), refused) << huge;
    EXPECT_THAT(
        broken([&](auto& p) { p[0].boxes[0].run_elems = p[0].boxes[0].stride_elems = huge; }),
        refused)
        << huge;
    EXPECT_THAT(broken([&](auto& p) { p[2].boxes[0].runs = huge; }), refused) << huge;
    EXPECT_THAT(broken([&](auto& p) { p[2].boxes[0].stride_elems = huge; }), refused) << huge;
  }
}

// Boxes of many strides give a client an error, and do not occupy the control thread for seconds.
TEST(Partitions, ThatWouldTakeTooLongToCompareAreRefused) {
  constexpr uint64_t kElems = uint64_t{1} << 32;
  const std::vector<BoxedParam> params = {{"w", 0, kElems}};
  PartitionSpec partition;
  for (uint64_t i = 0; i < 2000; ++i) {
    const uint64_t stride = 4000 + 2 * i;
    partition.boxes.push_back({0, 2 * i, 1, stride, (kElems - 2 * i - 1) / stride});
  }
  EXPECT_THAT(CheckPartitions(params, 1, {&partition, 1}), HasError(ErrorId::kLayout));
}

}  // namespace
}  // namespace forebay::protocol::partition_property_test
