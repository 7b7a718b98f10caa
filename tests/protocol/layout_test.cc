// SPDX-License-Identifier: Apache-2.0
// Goal    A layout's offsets are as documented, and every broken rule is refused by name. Untrusted bytes decode to a layout or
//         an error, and an encoded layout decodes to an equal one.
// Method  Small layouts by hand; every truncation and 20,000 seeded mutations of an encoded one.

#include "protocol/layout.h"

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/layout_codec.h"
#include "tests/support/status_test.h"

namespace forebay::protocol::layout_test {
namespace {

using ::testing::AllOf;
using testing::HasError;
using ::testing::HasSubstr;

LayoutSpec Small() {
  return {.dtype = DType::kFloat32,
          .optimizer = Optimizer::kAdamW,
          .format = Format::kFp32,
          .params = {{"a.weight", {3, 5}, 0, 0}, {"a.bias", {}, 0, 1}, {"b.weight", {200}, 1, 0}},
          .group_names = {"a", "b"},
          .partitions = {}};
}

TEST(Layout, PadsStatesAlone) {
  ASSERT_OK_AND_ASSIGN(const Layout layout, Layout::Create(Small()));
  EXPECT_EQ(layout.params()[1].offset_elems, 15U);
  EXPECT_EQ(layout.groups()[0].elems, 16U);
  EXPECT_EQ(layout.partition_bytes(0), 64U);
  EXPECT_EQ(layout.groups()[1].weights_offset_bytes, 4096U);
  EXPECT_EQ(layout.largest_gradient_bytes(), 832U) << "800 bytes in whole cache lines";
  EXPECT_EQ(layout.weights_bytes(), 8192U);
  EXPECT_EQ(layout.total_elems(), 216U);
  ASSERT_EQ(layout.boxes().size(), 3U);
  EXPECT_EQ(layout.boxes()[1].partition_elem, 15U);
  EXPECT_EQ(layout.boxes()[1].states_elem, 64U);
  EXPECT_EQ(layout.boxes()[2].states_elem, 128U);
  EXPECT_EQ(layout.states_elems(), 128U + 256U);
}

TEST(Layout, GivesFrozenParametersNoStates) {
  LayoutSpec spec = Small();
  spec.params[1].trainable = false;
  ASSERT_OK_AND_ASSIGN(const Layout layout, Layout::Create(spec));
  EXPECT_EQ(layout.total_elems(), 216U);
  EXPECT_EQ(layout.trainable_elems(), 215U);
  EXPECT_EQ(layout.boxes()[2].states_elem, 64U);
  EXPECT_EQ(layout.weights_bytes(), 8192U);
  EXPECT_THAT(Layout::Difference(Small(), spec), HasSubstr("frozen"));
}

TEST(Layout, EndsGradientsBehindTheLastTrainableBox) {
  const auto gradients = [](const std::vector<uint32_t>& frozen) {
    LayoutSpec spec = Small();
    for (const uint32_t param : frozen) spec.params[param].trainable = false;
    const absl::StatusOr<Layout> layout = Layout::Create(spec);
    EXPECT_OK(layout);
    EXPECT_EQ(layout->largest_gradient_bytes(), 832U) << "weights have room too";
    return std::pair(layout->gradient_bytes(0), layout->gradient_bytes(1));
  };
  EXPECT_EQ(gradients({}), std::pair(64UL, 800UL));
  EXPECT_EQ(gradients({0}), std::pair(64UL, 800UL)) << "what comes before it has room";
  EXPECT_EQ(gradients({1}), std::pair(60UL, 800UL));
  EXPECT_EQ(gradients({0, 1}), std::pair(0UL, 800UL));
  EXPECT_EQ(gradients({2}), std::pair(64UL, 0UL));
}

TEST(Layout, KnowsAParameterByTheHashOfItsName) {
  EXPECT_EQ(NameHash(""), 0xcbf29ce484222325U);
  EXPECT_EQ(NameHash("a"), 0xaf63dc4c8601ec8cU) << "FNV-1a's published value";
  EXPECT_EQ(NameHash("foobar"), 0x85944171f73967e8U);
  ASSERT_OK_AND_ASSIGN(const Layout layout, Layout::Create(Small()));
  EXPECT_EQ(layout.params()[2].name_hash, NameHash("b.weight"));
}

TEST(Layout, RefusesEveryBrokenRuleByName) {
  const auto broken = [](auto change) {
    LayoutSpec spec = Small();
    change(spec);
    return Layout::Create(std::move(spec)).status();
  };
  EXPECT_THAT(broken([](auto& s) { s.params.clear(); }), HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.params[1].name = "a.weight"; }), HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.params[1].name.clear(); }), HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.params[0].shape = {0}; }), HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) {
                s.params[0].shape = {uint64_t{1} << 31, 1 << 10};
              }),
              HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.params[0].shape.assign(9, 1); }), HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.params[2].group = 2; }), HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.params[0].group = 1; }), HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.params[0].group = UINT32_MAX; }), HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.params[0].param_group = kParamGroupsMax; }),
              HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.group_names.pop_back(); }), HasError(ErrorId::kLayout));
  EXPECT_THAT(broken([](auto& s) { s.dtype = DType::kInt16; }), HasError(ErrorId::kOption));
  EXPECT_THAT(broken([](auto& s) { s.format = Format::kInt8; }), HasError(ErrorId::kOption));
  EXPECT_THAT(broken([](auto& s) { s.format = Format::kExact; }), HasError(ErrorId::kOption));
}

TEST(Layout, TakesUpTo4096ParameterGroupsAndSaysHowManyThereAre) {
  const auto with = [](uint32_t param_group) {
    LayoutSpec spec = Small();
    spec.params[1].param_group = param_group;
    return Layout::Create(std::move(spec));
  };
  for (const uint32_t groups : {1U, 64U, 65U, 80U, 4096U}) {
    ASSERT_OK_AND_ASSIGN(const Layout layout, with(groups - 1));
    EXPECT_EQ(layout.param_groups(), groups);
    EXPECT_EQ(layout.param_group_rows(), std::max(groups, 64U));
  }
  const absl::Status refused = with(4096).status();
  EXPECT_THAT(refused, HasError(ErrorId::kLayout));
  EXPECT_THAT(refused.message().data(), HasSubstr("4097 parameter groups (at most 4096)"));
  EXPECT_THAT(refused.message().data(), HasSubstr(Small().params[1].name));
  EXPECT_THAT(with(UINT32_MAX).status(), HasError(ErrorId::kLayout));
}

TEST(Layout, TakesNamesOfUpTo64KiB) {
  const auto with = [](size_t name_bytes) {
    LayoutSpec spec = Small();
    spec.params[1].name = std::string(name_bytes, 'n');
    return spec;
  };
  for (const size_t bytes : {1024U, 1025U, 65536U}) {
    EXPECT_OK(Layout::Create(with(bytes)));
    ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> encoded, EncodeLayout(with(bytes)));
    ASSERT_OK_AND_ASSIGN(const LayoutSpec decoded, DecodeLayout(encoded));
    EXPECT_EQ(decoded.params[1].name.size(), bytes);
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> encoded, EncodeLayout(with(65537)));
  for (const absl::Status& refused :
       {Layout::Create(with(65537)).status(), DecodeLayout(encoded).status()}) {
    EXPECT_THAT(refused, HasError(ErrorId::kLayout));
    EXPECT_THAT(refused.message().data(), HasSubstr("65537 bytes"));
    EXPECT_THAT(refused.message().data(), HasSubstr("65536"));
    EXPECT_THAT(HintOf(refused), HasSubstr("shorten the names of the modules"));
  }
}

TEST(Layout, ShowsTheBeginOfALongGroupNameInWholeCharacters) {
  LayoutSpec spec = Small();
  spec.group_names[0] = std::string(1023, 'n') + "\u00e9" + std::string(5000, 'n');
  spec.group_names[1] = std::string(1024, 'n');
  ASSERT_OK_AND_ASSIGN(const Layout layout, Layout::Create(spec));
  EXPECT_EQ(layout.PartitionName(0), std::string(1023, 'n') + "...");
  EXPECT_EQ(layout.PartitionName(1), spec.group_names[1]);
}

// Python lists frozen parameters last in their group, so freezing one moves others.
TEST(Layout, NamesAParameterThatIsFrozenOnOneSideAlone) {
  LayoutSpec other = Small();
  other.params[0].trainable = false;
  std::swap(other.params[0], other.params[1]);
  EXPECT_EQ(Layout::Difference(Small(), other),
            "parameter a.weight: the job has trained, this client wants frozen");
  EXPECT_EQ(Layout::Difference(other, Small()),
            "parameter a.weight: the job has frozen, this client wants trained");
}

TEST(Layout, NamesTheFirstDifference) {
  LayoutSpec other = Small();
  EXPECT_EQ(Layout::Difference(Small(), other), "");
  other.params[2].shape = {201};
  EXPECT_THAT(Layout::Difference(Small(), other), HasSubstr("b.weight"));
  other = Small();
  other.group_names[1] = "c";
  EXPECT_NE(Layout::Difference(Small(), other), "");
}

// Layout of two owners: three and two rows of a.weight, a.bias at owner 1, half of b.weight each.
LayoutSpec Sharded() {
  LayoutSpec spec = Small();
  spec.params[0].shape = {5, 3};
  spec.partitions = {
      {.group = 0, .owner = 0, .replica = 0, .boxes = {{0, 0, 9, 9, 1}}},
      {.group = 0, .owner = 1, .replica = 0, .boxes = {{0, 9, 6, 6, 1}, {1, 0, 1, 1, 1}}},
      {.group = 1, .owner = 0, .replica = 0, .boxes = {{2, 0, 100, 100, 1}}},
      {.group = 1, .owner = 1, .replica = 0, .boxes = {{2, 100, 100, 100, 1}}}};
  return spec;
}

TEST(Layout, GradientsHaveTheDTypeOfTheWeightsOrFloat32) {
  const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (const DType weights : dtypes) {
    LayoutSpec spec = Small();
    spec.dtype = weights;
    ASSERT_OK_AND_ASSIGN(const Layout same, Layout::Create(spec));
    EXPECT_EQ(same.grad_dtype(), weights) << "where it is left out";
    for (const DType gradients : {dtypes[0], dtypes[1], dtypes[2], DType::kInt16}) {
      SCOPED_TRACE(std::string(Name(weights)) + " " + std::string(Name(gradients)));
      spec.grad_dtype = gradients;
      const absl::StatusOr<Layout> layout = Layout::Create(spec);
      if (gradients == weights || gradients == DType::kFloat32) {
        ASSERT_OK(layout);
        EXPECT_EQ(layout->grad_dtype(), gradients);
      } else {
        EXPECT_THAT(layout, HasError(ErrorId::kOption));
      }
    }
  }
}

TEST(Layout, CountsTheBytesOfGradientsApartFromThoseOfWeights) {
  LayoutSpec spec = Sharded();
  spec.dtype = DType::kBFloat16;
  for (const bool wide : {false, true}) {
    if (wide) spec.grad_dtype = DType::kFloat32;
    ASSERT_OK_AND_ASSIGN(const Layout layout, Layout::Create(spec));
    const uint64_t elems[] = {9, 7, 100, 100};
    for (uint32_t partition = 0; partition < 4; ++partition) {
      EXPECT_EQ(layout.partition_bytes(partition), 2 * elems[partition]);
      EXPECT_EQ(layout.gradient_bytes(partition), (wide ? 4 : 2) * elems[partition]);
    }
    // 100 float32 elements, rounded up to cache lines: the largest partition, not the largest group. A partition's masters may
    // be sent too.
    EXPECT_EQ(layout.largest_gradient_bytes(), 448U);
    EXPECT_EQ(layout.weights_bytes(), 4 * 4096U) << "of weights alone";
  }
}

TEST(Layout, NamesAPartitionByItsGroupAndOwner) {
  ASSERT_OK_AND_ASSIGN(const Layout shared, Layout::Create(Small()));
  EXPECT_EQ(shared.PartitionName(1), "b");
  EXPECT_EQ(shared.DescribePartition(1), "group 1 (b)");
  ASSERT_OK_AND_ASSIGN(const Layout sharded, Layout::Create(Sharded()));
  EXPECT_EQ(sharded.PartitionName(1), "a of rank 1");
  EXPECT_EQ(sharded.PartitionName(2), "b of rank 0");
  EXPECT_EQ(sharded.DescribePartition(2), "group 1 (b of rank 0)");
}

TEST(Layout, GivesTheBoxesOfAPartition) {
  ASSERT_OK_AND_ASSIGN(const Layout layout, Layout::Create(Sharded()));
  ASSERT_EQ(layout.boxes_of(1).size(), 2U);
  EXPECT_EQ(layout.boxes_of(1)[0].box, Sharded().partitions[1].boxes[0]);
  EXPECT_EQ(layout.boxes_of(1)[1].partition_elem, 6U);
  ASSERT_EQ(layout.boxes_of(3).size(), 1U);
  EXPECT_EQ(layout.boxes_of(3)[0].box.first_elem, 100U);
}

TEST(Layout, RefusesPartitionsForAnOptimizerThatNeedsWholeParameters) {
  for (int number = 1; number <= static_cast<int>(Optimizer::kLamb); ++number) {
    LayoutSpec spec = Sharded();
    spec.optimizer = static_cast<Optimizer>(number);
    const absl::Status status = Layout::Create(spec).status();
    if (spec.optimizer == Optimizer::kLamb) {
      EXPECT_THAT(status, HasError(ErrorId::kUnsupported));
    } else {
      EXPECT_OK(status);
    }
    spec.partitions.clear();
    EXPECT_OK(Layout::Create(spec));
  }
}

TEST(Layout, NamesADifferenceInGradientsAndPartitions) {
  LayoutSpec other = Small();
  other.grad_dtype = DType::kFloat32;
  EXPECT_EQ(Layout::Difference(Small(), other), "") << "left out, it is that of the weights";
  LayoutSpec narrow = Small();
  narrow.dtype = other.dtype = DType::kBFloat16;
  EXPECT_THAT(Layout::Difference(narrow, other),
              AllOf(HasSubstr("gradients"), HasSubstr("bfloat16"), HasSubstr("float32")));
  LayoutSpec shared = Sharded();
  shared.partitions.clear();
  EXPECT_EQ(Layout::Difference(shared, Sharded()),
            "attachment: the job has shared, this client wants sharded");
  EXPECT_EQ(Layout::Difference(Sharded(), shared),
            "attachment: the job has sharded, this client wants shared");
  LayoutSpec swapped = Sharded();
  swapped.partitions.pop_back();
  EXPECT_THAT(Layout::Difference(Sharded(), swapped), HasSubstr("partitions"));
}

TEST(LayoutCodec, GivesBackWhatWasEncoded) {
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, EncodeLayout(Small()));
  ASSERT_OK_AND_ASSIGN(const LayoutSpec decoded, DecodeLayout(bytes));
  EXPECT_TRUE(decoded == Small());
}

TEST(LayoutCodec, RefusesEveryTruncation) {
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, EncodeLayout(Small()));
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto decoded = DecodeLayout(std::span(bytes).first(size));
    EXPECT_FALSE(decoded.ok()) << size;
  }
  EXPECT_THAT(DecodeLayout({}), HasError(ErrorId::kProtocol));
}

TEST(Optimizers, HaveANameAndTheStatesThatTorchNames) {
  for (int number = 1; number <= static_cast<int>(Optimizer::kLamb); ++number) {
    const auto optimizer = static_cast<Optimizer>(number);
    ASSERT_OK_AND_ASSIGN(const Optimizer found, OptimizerFromName(Name(optimizer)));
    EXPECT_EQ(found, optimizer);
    const auto fp32 = StatePlanes(optimizer, Format::kFp32, DType::kFloat32);
    const auto exact = StatePlanes(optimizer, Format::kExact, DType::kBFloat16);
    ASSERT_EQ(exact.size(), fp32.size() + 1);
    EXPECT_EQ(exact[0].name, "remainder");
    EXPECT_EQ(StateBytes(optimizer, Format::kExact, DType::kBFloat16, 1), 2 + 4 * fp32.size());
    EXPECT_TRUE(StatePlanes(optimizer, Format::kExact, DType::kFloat32).empty());
  }
  EXPECT_EQ(StatePlanes(Optimizer::kAdamWAmsgrad, Format::kFp32, DType::kFloat32)[2].name,
            "max_exp_avg_sq");
  EXPECT_EQ(StatePlanes(Optimizer::kAdagrad, Format::kFp32, DType::kFloat32)[0].name, "sum");
  EXPECT_THAT(OptimizerFromName("adamax"), HasError(ErrorId::kOption));
  EXPECT_EQ(Name(static_cast<Optimizer>(99)), "unknown");
}

TEST(Formats, HaveANameAndServeTheTypesThatTheySay) {
  for (const char* name : {"fp32", "exact", "bf16", "int8"}) {
    ASSERT_OK_AND_ASSIGN(const Format format, FormatFromName(name));
    EXPECT_EQ(Name(format), name);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt16}) {
      const bool wide = format == Format::kFp32 && dtype != DType::kInt16;
      const bool narrow = format != Format::kFp32 && dtype == DType::kBFloat16;
      EXPECT_EQ(!StatePlanes(Optimizer::kAdamW, format, dtype).empty(), wide || narrow);
    }
  }
  EXPECT_THAT(FormatFromName("int4"), HasError(ErrorId::kOption));
}

// Bytes of the optimizer states of 1280 elements, without weights.
TEST(Formats, TakeTheBytesOfTheTable) {
  const auto bytes = [](Format format, DType dtype) {
    return StateBytes(Optimizer::kAdamW, format, dtype, 1280);
  };
  EXPECT_EQ(bytes(Format::kFp32, DType::kFloat32), 1280 * 8);
  EXPECT_EQ(bytes(Format::kFp32, DType::kBFloat16), 1280 * 12);
  EXPECT_EQ(bytes(Format::kFp32, DType::kFloat16), 1280 * 12);
  EXPECT_EQ(bytes(Format::kExact, DType::kBFloat16), 1280 * 10);
  EXPECT_EQ(bytes(Format::kBf16, DType::kBFloat16), 1280 * 6);
  EXPECT_EQ(bytes(Format::kInt8, DType::kBFloat16), 1280 * 4 + 2 * 4 * 10);
  EXPECT_EQ(StateBytes(Optimizer::kLion, Format::kInt8, DType::kBFloat16, 129), 129 * 3 + 2 * 4);
}

TEST(Formats, Int8StartsEachBoxAtAScale) {
  LayoutSpec spec = Small();
  spec.dtype = DType::kBFloat16;
  spec.format = Format::kInt8;
  ASSERT_OK_AND_ASSIGN(const Layout layout, Layout::Create(spec));
  for (const BoxPlace& box : layout.boxes()) EXPECT_EQ(box.states_elem % kScaleElems, 0);
  EXPECT_EQ(layout.states_elems() % kScaleElems, 0);
  EXPECT_EQ(layout.groups()[0].elems, 16U) << "weights have no padding";
}

TEST(LayoutCodec, CarriesPartitionsAndFrozenParameters) {
  LayoutSpec spec = Small();
  spec.params[0].trainable = false;
  spec.partitions = {{.group = 0, .owner = 1, .replica = 0, .boxes = {{0, 2, 3, 5, 2}}},
                     {.group = 1, .owner = 0, .replica = 3, .boxes = {{2, 0, 200, 200, 1}}}};
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, EncodeLayout(spec));
  ASSERT_OK_AND_ASSIGN(const LayoutSpec decoded, DecodeLayout(bytes));
  EXPECT_EQ(decoded, spec);
}

TEST(LayoutCodec, CarriesTheDTypeOfGradients) {
  LayoutSpec spec = Small();
  spec.dtype = DType::kBFloat16;
  for (const std::optional<DType> dtype :
       {std::optional<DType>(), std::optional(DType::kBFloat16), std::optional(DType::kFloat32)}) {
    spec.grad_dtype = dtype;
    ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, EncodeLayout(spec));
    ASSERT_OK_AND_ASSIGN(const LayoutSpec decoded, DecodeLayout(bytes));
    EXPECT_EQ(decoded.grad_dtype, dtype);
    EXPECT_EQ(decoded, spec);
  }
}

TEST(LayoutCodec, CarriesTheSeed) {
  LayoutSpec spec = Small();
  spec.seed = 0xFEDCBA9876543210;
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, EncodeLayout(spec));
  ASSERT_OK_AND_ASSIGN(const LayoutSpec decoded, DecodeLayout(bytes));
  EXPECT_EQ(decoded, spec);
  EXPECT_THAT(Layout::Difference(Small(), spec), ::testing::HasSubstr("seed"));
}

TEST(LayoutCodec, SurvivesEveryMutation) {
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, EncodeLayout(Small()));
  std::mt19937_64 random(20261121);
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::byte> mutant = bytes;
    const uint64_t changes = 1 + random() % 4;
    for (uint64_t c = 0; c < changes; ++c) {
      mutant[random() % mutant.size()] = static_cast<std::byte>(random());
    }
    auto decoded = DecodeLayout(mutant);
    if (!decoded.ok()) {
      ++refused;
      continue;
    }
    EXPECT_LE(decoded->params.size(), kParamsMax);
    (void)Layout::Create(*std::move(decoded));
  }
  EXPECT_GT(refused, 1000);
}

TEST(LayoutCodec, RefusesUnknownWordsAndControlCharacters) {
  LayoutSpec spec = Small();
  spec.params[0].name = "a\nb";
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, EncodeLayout(spec));
  EXPECT_THAT(DecodeLayout(bytes), HasError(ErrorId::kLayout));
}

}  // namespace
}  // namespace forebay::protocol::layout_test
