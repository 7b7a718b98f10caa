// SPDX-License-Identifier: Apache-2.0
// A sum of squares that does not depend on the order or the split of its parts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu_adam/stream_kernel.h"

namespace forebay::cpu_adam {

// Holds the sum of chunk sums (stream_kernel.h) exactly, in fixed point, so that adding is
// associative and commutative. A value: copy, send and compare it freely.
//
// Limits  Up to 2^30 chunks: 2^42 elements.
class SquareSum {
 public:
  // A result of ChunkSquareSums; infinity or NaN make the total non-finite permanently.
  void AddChunk(double chunk_sum);
  void Merge(const SquareSum& other);  // any order, any grouping: the same bits
  bool finite() const { return finite_; }
  double ToDouble() const;  // truncated to 53 bits; NaN where not finite

  // The sum as numbers below 2^32 that Merge() adds one by one, to send it and to take it up again; of one that is finite.
  static constexpr int kDigits = 20;
  std::array<uint64_t, kDigits> Digits() const { return Carried(); }
  static SquareSum FromDigits(const std::array<uint64_t, kDigits>& digits);

  // Equal in value, not merely in how the value was reached.
  bool operator==(const SquareSum& other) const;

 private:
  static constexpr int kDigitBits = 32;
  static constexpr int kLowestExponent = -320;  // digit d counts units of 2^(32·d - 320)

  std::array<uint64_t, kDigits> Carried() const;

  std::array<uint64_t, kDigits> digits_ = {};  // carries are deferred
  bool finite_ = true;
};

// The sum over n elements and whether each is finite. Ranges that are split at multiples of
// kSumChunkElems and merged give the same bits, on any target and any number of threads.
SquareSum SumSquaresAndFinite(size_t n, Gradient g);

}  // namespace forebay::cpu_adam
