// SPDX-License-Identifier: Apache-2.0
// Goal    The streaming kernels give the bits of their scalar definition on every instruction set.
// Method  Run each on every target and on "scalar" at every size and some misalignments, on seeded
//         data, and on all 2^16 bfloat16 values; compare bit by bit.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu_adam/stream_kernel.h"
#include "gtest/gtest.h"
#include "tests/cpu_adam/planes.h"

namespace forebay::cpu_adam {
namespace {

using ::forebay::testing::AdamData;
using ::forebay::testing::GuardedArray;
using ::forebay::testing::KernelSizes;
using ::forebay::testing::kGradTypes;
using ::forebay::testing::SameBits;
using ::forebay::testing::TargetGuard;

constexpr uint32_t kSeed = 41;

class StreamKernels : public ::testing::TestWithParam<std::string> {
 protected:
  // Runs `run` on the target under test and on the definition. Returns both results.
  template <class Run>
  auto Both(Run run) {
    target_.Force("scalar");
    auto expected = run();
    target_.Force(GetParam());
    return std::pair(run(), std::move(expected));
  }

  TargetGuard target_;
};

TEST_P(StreamKernels, ChunkSumsAreThoseOfTheDefinition) {
  for (const size_t n : {0u, 1u, 31u, 32u, 33u, 1009u, 4095u, 4096u, 4097u, 12289u}) {
    const AdamData data(n, kSeed);
    for (const DType type : kGradTypes) {
      const auto [sums, expected] = Both([&] {
        std::vector<double> chunk_sums((n + kSumChunkElems - 1) / kSumChunkElems, -1.0);
        ChunkSquareSums(n, data.Grad(type), chunk_sums.data());
        return chunk_sums;
      });
      EXPECT_EQ(sums, expected) << "n " << n;  // the data have no NaN: == is bit equality
    }
  }
}

// Gradients whose squares are finite in float32, unlike those of the test above.
TEST_P(StreamKernels, ChunkSumsOfPlausibleGradientsAreThoseOfTheDefinition) {
  for (const size_t n : {1u, 33u, 511u, 512u, 513u, 1009u, 4096u, 4097u, 12289u, 16384u, 40001u}) {
    AdamData data(n, kSeed);
    for (size_t i = 0; i < n; ++i) {
      data.grad[i] = std::clamp(data.grad[i], -10.0f, 10.0f);
      data.bf16[i] = ::forebay::testing::TopHalf(data.grad[i]);
    }
    for (const DType type : kGradTypes) {
      const auto [sums, expected] = Both([&] {
        std::vector<double> chunk_sums((n + kSumChunkElems - 1) / kSumChunkElems, -1.0);
        ChunkSquareSums(n, data.Grad(type), chunk_sums.data());
        return chunk_sums;
      });
      EXPECT_EQ(sums, expected) << "n " << n;
    }
  }
}

// Copies n elements of Raw to an array that starts `offset` elements after a 64-byte boundary, and sums the squares.
template <class Raw>
std::pair<std::vector<Raw>, std::vector<double>> CopyAndSum(size_t n, Gradient from,
                                                            size_t offset) {
  GuardedArray<Raw> dst(n, offset);
  std::vector<double> sums((n + kSumChunkElems - 1) / kSumChunkElems, -1.0);
  CopyWithSquareSums(n, from, dst.data(), sums.data());
  EXPECT_TRUE(dst.GuardsIntact());
  return {dst.Copy(), sums};
}

TEST_P(StreamKernels, CopiesEveryBitAndSumsWhatItCopied) {
  for (const size_t n : {0u, 1u, 31u, 33u, 63u, 65u, 1009u, 4095u, 4096u, 4097u, 12289u}) {
    const AdamData data(n, kSeed);
    for (const size_t offset : {0u, 1u, 8u, 32u}) {
      for (const DType type : kGradTypes) {
        const Gradient from = data.Grad(type);
        if (type == DType::kFloat32) {
          const auto [copied, expected] = Both([&] { return CopyAndSum<float>(n, from, offset); });
          EXPECT_EQ(copied, expected) << "n " << n << " offset " << offset;
          EXPECT_TRUE(SameBits(copied.first, data.grad)) << "n " << n << " offset " << offset;
        } else {
          const auto [copied, expected] =
              Both([&] { return CopyAndSum<uint16_t>(n, from, offset); });
          EXPECT_EQ(copied, expected) << "n " << n << " offset " << offset;
          const auto* first = static_cast<const uint16_t*>(from.data);
          EXPECT_EQ(copied.first, std::vector<uint16_t>(first, first + n));
        }
        std::vector<double> sums((n + kSumChunkElems - 1) / kSumChunkElems, -1.0);
        ChunkSquareSums(n, from, sums.data());
        const auto copied_sums = type == DType::kFloat32
                                     ? CopyAndSum<float>(n, from, offset).second
                                     : CopyAndSum<uint16_t>(n, from, offset).second;
        EXPECT_EQ(copied_sums, sums) << "n " << n << " offset " << offset;
      }
    }
  }
}

TEST_P(StreamKernels, ACopyKeepsNanAndInfinityAndItsSumTells) {
  target_.Force(GetParam());
  for (const size_t n : {1u, 67u, 4099u}) {
    for (const size_t i : {size_t{0}, n / 2, n - 1}) {
      for (const uint16_t bad : std::initializer_list<uint16_t>{0x7F80, 0xFF80, 0x7F81, 0xFFFF}) {
        std::vector<uint16_t> narrow(n, 0x3F80);
        narrow[i] = bad;
        const auto [copied, sums] = CopyAndSum<uint16_t>(n, {narrow.data(), DType::kBFloat16}, 0);
        EXPECT_EQ(copied, narrow);
        EXPECT_FALSE(std::isfinite(sums[i / kSumChunkElems])) << i << " of " << n;
        std::vector<float> wide(n, 1.0F);
        wide[i] = std::bit_cast<float>(uint32_t{bad} << 16);
        const auto wide_sums = CopyAndSum<float>(n, {wide.data(), DType::kFloat32}, 0).second;
        EXPECT_FALSE(std::isfinite(wide_sums[i / kSumChunkElems])) << i << " of " << n;
      }
    }
  }
}

TEST_P(StreamKernels, OneBadElementAnywhereIsFound) {
  target_.Force(GetParam());
  for (const size_t n : {1u, 15u, 64u, 67u}) {
    std::vector<float> wide(n, std::numeric_limits<float>::max());
    std::vector<uint16_t> narrow(n, 0xFF7F);  // the largest negative bfloat16
    EXPECT_TRUE(AllFinite(n, {wide.data(), DType::kFloat32}));
    EXPECT_TRUE(AllFinite(n, {narrow.data(), DType::kBFloat16}));
    for (size_t i = 0; i < n; ++i) {
      for (const uint16_t bad : std::initializer_list<uint16_t>{0x7F80, 0xFF80, 0x7F81, 0xFFFF}) {
        const float was_wide = std::exchange(wide[i], std::bit_cast<float>(uint32_t{bad} << 16));
        const uint16_t was_narrow = std::exchange(narrow[i], bad);
        EXPECT_FALSE(AllFinite(n, {wide.data(), DType::kFloat32})) << i << " of " << n;
        EXPECT_FALSE(AllFinite(n, {narrow.data(), DType::kBFloat16})) << i << " of " << n;
        double sum = 0;
        ChunkSquareSums(n, {wide.data(), DType::kFloat32}, &sum);
        EXPECT_FALSE(std::isfinite(sum));
        ChunkSquareSums(n, {narrow.data(), DType::kBFloat16}, &sum);
        EXPECT_FALSE(std::isfinite(sum));
        wide[i] = was_wide;
        narrow[i] = was_narrow;
      }
    }
  }
  EXPECT_TRUE(AllFinite(0, {nullptr, DType::kFloat32}));
}

TEST_P(StreamKernels, AddsAndSetsLikeTheDefinition) {
  for (const size_t n : KernelSizes()) {
    const AdamData data(n, kSeed);
    for (const DType type : kGradTypes) {
      for (const AddMode mode : {AddMode::kSet, AddMode::kAdd}) {
        for (const size_t offset : {0u, 3u}) {
          const auto [sum, expected] = Both([&] {
            GuardedArray<float> dst(n, offset);
            dst.Assign(data.w);
            AddGradient(n, data.Grad(type), mode, dst.data());
            EXPECT_TRUE(dst.GuardsIntact());
            return dst.Copy();
          });
          EXPECT_TRUE(SameBits(sum, expected)) << "n " << n << " offset " << offset;
        }
      }
    }
  }
}

TEST_P(StreamKernels, RanksAddInOrderAsInOneExpression) {
  target_.Force(GetParam());
  const AdamData a(100, 1), b(100, 2), c(100, 3);
  std::vector<float> sum(100);
  AddGradient(100, {a.grad.data(), DType::kFloat32}, AddMode::kSet, sum.data());
  AddGradient(100, {b.grad.data(), DType::kFloat32}, AddMode::kAdd, sum.data());
  AddGradient(100, {c.grad.data(), DType::kFloat32}, AddMode::kAdd, sum.data());
  for (size_t i = 0; i < sum.size(); ++i) {
    EXPECT_TRUE(SameBits(sum[i], (a.grad[i] + b.grad[i]) + c.grad[i])) << i;
  }
}

TEST_P(StreamKernels, SeveralSourcesAreAddedAsOneAfterAnotherWithTheSquaresOfTheSum) {
  target_.Force(GetParam());
  for (const DType type : kGradTypes) {
    for (const size_t n : {size_t{0}, size_t{1}, size_t{63}, kSumChunkElems, kSumChunkElems + 1,
                           3 * kSumChunkElems - 1}) {
      for (const size_t count : {1u, 2u, 3u, 8u}) {
        for (const AddMode mode : {AddMode::kSet, AddMode::kAdd}) {
          SCOPED_TRACE(::testing::Message()
                       << "type " << static_cast<int>(type) << " n " << n << " count " << count);
          std::vector<AdamData> data;
          std::vector<Gradient> sources;
          for (size_t s = 0; s < count; ++s) data.emplace_back(n, 10 * s + 1);
          for (const AdamData& one : data) sources.push_back(one.Grad(type));
          for (const size_t offset : {size_t{0}, size_t{1}}) {
            GuardedArray<float> sum(n, offset);
            sum.Assign(data[0].w);
            GuardedArray<float> expected(n, offset);
            expected.Assign(data[0].w);
            const size_t chunks = (n + kSumChunkElems - 1) / kSumChunkElems;
            std::vector<double> sums(chunks), expected_sums(chunks);
            AddGradients(n, sources.data(), count, mode, sum.data(), sums.data());
            for (size_t s = 0; s < count; ++s) {
              AddGradient(n, sources[s], s == 0 ? mode : AddMode::kAdd, expected.data());
            }
            ChunkSquareSums(n, {expected.data(), DType::kFloat32}, expected_sums.data());
            EXPECT_TRUE(sum.GuardsIntact());
            EXPECT_TRUE(SameBits(sum.Copy(), expected.Copy()));
            for (size_t c = 0; c < chunks; ++c) {
              EXPECT_EQ(std::isfinite(sums[c]), std::isfinite(expected_sums[c]));
              if (std::isfinite(sums[c])) {
                EXPECT_EQ(sums[c], expected_sums[c]);
              }
            }
            EXPECT_EQ(std::all_of(sums.begin(), sums.end(),
                                  [](double sum_of_chunk) { return std::isfinite(sum_of_chunk); }),
                      AllFinite(n, {expected.data(), DType::kFloat32}));
          }
        }
      }
    }
  }
}

// Value of a finite IEEE 754 binary16.
double ValueOfFp16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST_P(StreamKernels, EveryBinary16IsWidenedToItsValueAndInfinityIsFound) {
  target_.Force(GetParam());
  std::vector<uint16_t> all(1 << 16);
  std::iota(all.begin(), all.end(), uint16_t{0});
  std::vector<float> wide(all.size());
  AddGradient(all.size(), {all.data(), DType::kFloat16}, AddMode::kSet, wide.data());
  for (size_t i = 0; i < all.size(); ++i) {
    float alone = 0;  // widened by the code for the last elements
    AddGradient(1, {&all[i], DType::kFloat16}, AddMode::kSet, &alone);
    const bool finite = (all[i] & 0x7C00) != 0x7C00;
    EXPECT_EQ(AllFinite(1, {&all[i], DType::kFloat16}), finite) << i;
    EXPECT_EQ(std::isfinite(wide[i]), finite) << i;
    EXPECT_TRUE(SameBits(alone, wide[i])) << i;
    if (finite) {
      EXPECT_TRUE(SameBits(wide[i], static_cast<float>(ValueOfFp16(all[i])))) << i;
    } else {
      EXPECT_EQ(std::isinf(wide[i]), (all[i] & 1023) == 0) << i;
    }
    if (HasFailure()) return;
  }
  const std::vector<uint16_t> largest(67, 0xFBFF);
  EXPECT_TRUE(AllFinite(largest.size(), {largest.data(), DType::kFloat16}));
}

TEST_P(StreamKernels, EveryBfloat16IsWidenedToItsValue) {
  target_.Force(GetParam());
  std::vector<uint16_t> all(1 << 16);
  std::iota(all.begin(), all.end(), uint16_t{0});
  std::vector<float> wide(all.size());
  AddGradient(all.size(), {all.data(), DType::kBFloat16}, AddMode::kSet, wide.data());
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(wide[i]), uint32_t{all[i]} << 16);
  }
}

INSTANTIATE_TEST_SUITE_P(Supported, StreamKernels, ::testing::ValuesIn(SupportedTargets()),
                         [](const auto& target) { return target.param; });

}  // namespace
}  // namespace forebay::cpu_adam
