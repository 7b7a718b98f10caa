// SPDX-License-Identifier: Apache-2.0
// Guarded, deliberately misaligned arrays and the data that the kernel tests run on.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cpu_adam/gradient.h"
#include "cpu_adam/targets.h"
#include "gtest/gtest.h"

namespace forebay::testing {

// Array of n elements that start `offset` elements after a 64-byte boundary, with guards on both sides.
template <class T>
class GuardedArray {
 public:
  GuardedArray(size_t n, size_t offset)
      : n_(n), offset_(kGuard + offset), storage_(kGuard + offset + n + kGuard + 64 / sizeof(T)) {
    while (reinterpret_cast<uintptr_t>(storage_.data() + shift_) % 64 != 0) ++shift_;
    std::fill(storage_.begin(), storage_.end(), kCanary);
  }
  GuardedArray(const GuardedArray&) = delete;
  GuardedArray& operator=(const GuardedArray&) = delete;

  T* data() { return storage_.data() + shift_ + offset_; }
  size_t size() const { return n_; }
  void Assign(const std::vector<T>& values) {
    std::copy(values.begin(), values.begin() + static_cast<ptrdiff_t>(n_), data());
  }
  std::vector<T> Copy() { return {data(), data() + n_}; }

  bool GuardsIntact() const {
    for (size_t i = 0; i < storage_.size(); ++i) {
      const bool inside = i >= shift_ + offset_ && i < shift_ + offset_ + n_;
      if (!inside && storage_[i] != kCanary) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;  // guard elements: whole 64-byte lines for every T
  static constexpr T kCanary = T{77};

  size_t n_;
  size_t offset_;
  size_t shift_ = 0;
  std::vector<T> storage_;
};

inline bool SameBits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));  // a NaN may have any sign and payload
}

// Fails at the first element that differs.
inline ::testing::AssertionResult SameBits(const std::vector<float>& a,
                                           const std::vector<float>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "sizes differ";
  for (size_t i = 0; i < a.size(); ++i) {
    if (SameBits(a[i], b[i])) continue;
    return ::testing::AssertionFailure() << "element " << i << " of " << a.size() << ": "
                                         << std::hexfloat << a[i] << " and " << b[i];
  }
  return ::testing::AssertionSuccess();
}

inline uint16_t TopHalf(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

// Rounds to nearest, ties away from zero: the weights of format `exact`, and bfloat16 weights with float32 masters.
inline uint16_t RoundToBf16(float master) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(master) + 0x8000) >> 16);
}

// The 16 bits of a master that format `exact` stores in addition to the bfloat16 weight.
inline int16_t RemainderOf(float master) {
  return static_cast<int16_t>(std::bit_cast<uint32_t>(master) -
                              (uint32_t{RoundToBf16(master)} << 16));
}

// Masters, moments and gradients of plausible sizes. Some moments are denormal, some values zero, and some gradients range from
// 1e-30 to 1e25, whose square overflows.
struct AdamData {
  std::vector<float> w, m, v, grad;
  std::vector<uint16_t> bf16;  // upper halves of `grad`
  std::vector<uint16_t> fp16;  // any finite bits, unrelated to `grad`

  AdamData(size_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    constexpr float kOdd[] = {0.0f, -0.0f, 1e-30f, -1e8f, 1e18f, 1e25f, 3e-41f, -1e-44f};
    for (size_t i = 0; i < n; ++i) {
      const bool odd = random() % 13 == 0;
      w.push_back(0.02f * normal(random));
      m.push_back(odd ? std::ldexp(normal(random), -140) : 1e-3f * normal(random));
      v.push_back(odd ? std::ldexp(std::abs(normal(random)), -140)
                      : std::abs(1e-6f * normal(random)));
      const float g = random() % 11 == 0 ? kOdd[random() % std::size(kOdd)] : 0.1f * normal(random);
      grad.push_back(g);
      bf16.push_back(TopHalf(g));
      const auto bits = static_cast<uint16_t>(random());
      const bool finite = (bits & 0x7C00) != 0x7C00;
      fp16.push_back(finite ? bits : static_cast<uint16_t>(bits & 0xBFFF));
    }
  }

  cpu_adam::Gradient Grad(protocol::DType type) const {
    if (type == cpu_adam::DType::kFloat32) return {grad.data(), type};
    return {type == cpu_adam::DType::kBFloat16 ? bf16.data() : fp16.data(), type};
  }
};

inline constexpr protocol::DType kGradTypes[] = {
    cpu_adam::DType::kFloat32, cpu_adam::DType::kBFloat16, cpu_adam::DType::kFloat16};

// Sizes around every vector width, primes, odd tails, and a length of several chunks.
inline const std::vector<size_t>& KernelSizes() {
  static const std::vector<size_t> sizes = {0,  1,  2,  3,  7,  8,  9,   15,  16,  17,  31,   32,
                                            33, 47, 63, 64, 65, 97, 127, 128, 129, 251, 1009, 4099};
  return sizes;
}

// Restores the best target at the end of the scope.
class TargetGuard {
 public:
  TargetGuard() = default;
  TargetGuard(const TargetGuard&) = delete;
  TargetGuard& operator=(const TargetGuard&) = delete;
  ~TargetGuard() { EXPECT_TRUE(cpu_adam::ForceTarget("best").ok()); }

  void Force(const std::string& name) { ASSERT_TRUE(cpu_adam::ForceTarget(name).ok()) << name; }
};

}  // namespace forebay::testing
