// SPDX-License-Identifier: Apache-2.0
// Goal    The sum of squares is right. No split, order or target changes a bit of it.
// Method  Compare with long double sums; split seeded data at random multiples of the chunk and merge the parts in random
//         order; feed the accumulator the largest and the smallest possible chunk sums.

#include <algorithm>
#include <limits>

#include "cpu_adam/square_sum.h"
#include "gtest/gtest.h"
#include "tests/cpu_adam/planes.h"

namespace forebay::cpu_adam {
namespace {

using ::forebay::testing::AdamData;
using ::forebay::testing::TargetGuard;

constexpr uint32_t kSeed = 7;

TEST(SquareSum, OfNothingIsZeroAndFinite) {
  const SquareSum sum = SumSquaresAndFinite(0, {nullptr, DType::kBFloat16});
  EXPECT_EQ(sum.ToDouble(), 0.0);
  EXPECT_TRUE(sum.finite());
}

TEST(SquareSum, OfSmallIntegersIsExact) {
  std::vector<float> values;
  for (int i = 1; i <= 10000; ++i) values.push_back(static_cast<float>(i % 100));
  const SquareSum sum = SumSquaresAndFinite(values.size(), {values.data(), DType::kFloat32});
  EXPECT_EQ(sum.ToDouble(), 100.0 * 328350.0);  // sum of i² below 100 is 328350
}

// Compares the sum of every target with a sum in long double.
void ExpectNear(const std::vector<float>& grad, double relative) {
  TargetGuard target;
  for (const std::string& name : SupportedTargets()) {
    target.Force(name);
    const SquareSum sum = SumSquaresAndFinite(grad.size(), {grad.data(), DType::kFloat32});
    long double expected = 0;
    for (const float g : grad) expected += static_cast<long double>(g) * g;
    EXPECT_NEAR(sum.ToDouble(), static_cast<double>(expected),
                static_cast<double>(expected) * relative)
        << name;
  }
}

// A double lane adds 128 squares, the tree adds 5 times more: at most 133 roundings of 2^-53 each, all terms positive. Merging
// is exact, and ToDouble() rounds once more (2^-52). The bound 2^-45 exceeds the sum of both. Every chunk has a gradient of
// 1e25.
TEST(SquareSum, OfHugeGradientsAgreesWithAMorePreciseSum) {
  std::vector<float> grad = AdamData(100003, kSeed).grad;
  for (size_t i = 0; i < grad.size(); i += kSumChunkElems) grad[i] = 1e25f;
  ExpectNear(grad, 0x1p-45);
}

TEST(SquareSum, OfTinyGradientsAgreesWithAMorePreciseSum) {
  std::vector<float> grad = AdamData(100003, kSeed).grad;
  for (float& g : grad) g = std::clamp(g, -1.0f, 1.0f) * 1e-20f;
  ExpectNear(grad, 0x1p-45);
}

// Checks the error bound that stream_kernel.h states.
TEST(SquareSum, OfPlausibleGradientsAgreesWithAMorePreciseSum) {
  std::vector<float> grad = AdamData(100003, kSeed).grad;
  for (float& g : grad) g = std::clamp(g, -10.0f, 10.0f);
  ExpectNear(grad, 1.001 * 0x1p-20);
}

// Magnitudes below, inside and above the range whose chunk sums come from float32 lanes. Above the range a lane overflows.
TEST(SquareSum, KeepsItsBoundAtEveryMagnitude) {
  const AdamData data(kSumChunkElems + 77, kSeed);
  for (int exponent = -140; exponent <= 120; exponent += 4) {
    std::vector<float> grad = data.w;
    for (float& g : grad) g = std::ldexp(g, exponent);
    ExpectNear(grad, 1.001 * 0x1p-20);
  }
}

TEST(SquareSum, NoSplitOrderOrTargetChangesABit) {
  TargetGuard target;
  const size_t elems = 40 * kSumChunkElems + 1234;
  const AdamData data(elems, kSeed);
  const SquareSum whole = SumSquaresAndFinite(elems, {data.bf16.data(), DType::kBFloat16});
  ASSERT_GT(whole.ToDouble(), 0);
  std::mt19937 random(kSeed);
  for (const std::string& name : SupportedTargets()) {
    target.Force(name);
    for (int round = 0; round < 20; ++round) {
      std::vector<SquareSum> parts;
      for (size_t begin = 0; begin < elems;) {
        const size_t n = std::min(elems - begin, kSumChunkElems * (1 + random() % 9));
        parts.push_back(SumSquaresAndFinite(n, {data.bf16.data() + begin, DType::kBFloat16}));
        begin += n;
      }
      std::shuffle(parts.begin(), parts.end(), random);
      SquareSum merged;
      for (const SquareSum& part : parts) merged.Merge(part);
      EXPECT_EQ(merged, whole) << name << ", round " << round << ", seed " << kSeed;
      EXPECT_EQ(std::bit_cast<uint64_t>(merged.ToDouble()),
                std::bit_cast<uint64_t>(whole.ToDouble()));
    }
  }
}

TEST(SquareSum, AddsExactlyAcrossTheWholeRange) {
  const double smallest = 0x1p-298;  // the square of the smallest float32
  const double largest = 4096.0 * 0x1.fffffcp127 * 0x1.fffffcp127;
  for (const double value :
       {smallest, 0x1.fffffffffffffp-246, 1.0, 0x1.23456789abcdep100, largest}) {
    SquareSum sum;
    sum.AddChunk(value);
    EXPECT_EQ(sum.ToDouble(), value);
  }
  SquareSum up, down;
  for (int i = 0; i < 1000; ++i) up.AddChunk(smallest);
  up.AddChunk(largest);
  down.AddChunk(largest);
  EXPECT_EQ(up.ToDouble(), down.ToDouble());  // double is too narrow for the difference
  EXPECT_FALSE(up == down);                   // the accumulator holds the difference
  for (int i = 0; i < 1000; ++i) down.AddChunk(smallest);
  EXPECT_TRUE(up == down);
}

TEST(SquareSum, CarriesThroughManyDigits) {
  SquareSum sum;
  constexpr int kTimes = 1 << 16;
  for (int i = 0; i < kTimes; ++i) sum.AddChunk(0x1.fffffffffffffp0);
  EXPECT_EQ(sum.ToDouble(), 0x1.fffffffffffffp16);
}

TEST(SquareSum, IsNotFiniteOnceAnElementIsNot) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    AdamData data(10000, kSeed);
    data.grad[9999] = bad;
    SquareSum sum = SumSquaresAndFinite(data.grad.size(), {data.grad.data(), DType::kFloat32});
    EXPECT_FALSE(sum.finite());
    EXPECT_TRUE(std::isnan(sum.ToDouble()));
    SquareSum total;
    total.AddChunk(1.0);
    total.Merge(sum);
    EXPECT_FALSE(total.finite());
  }
}

}  // namespace
}  // namespace forebay::cpu_adam
