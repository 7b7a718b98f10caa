// SPDX-License-Identifier: Apache-2.0
#include "cpu_adam/square_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "protocol/os/check.h"

namespace forebay::cpu_adam {
namespace {

constexpr size_t kPieceChunks = 64;  // chunk sums on the stack at a time

}  // namespace

void SquareSum::AddChunk(double chunk_sum) {
  if (!std::isfinite(chunk_sum)) {
    finite_ = false;
    return;
  }
  if (chunk_sum == 0) return;
  int exponent = 0;
  const double fraction = std::frexp(chunk_sum, &exponent);  // chunk_sum = fraction · 2^exponent
  const auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, 53));
  // Squares of float32 are multiples of 2^-298, and so are their sums as doubles: only zeros lie
  // below 2^-320. 4096 squares stay below 2^268.
  FOREBAY_CHECK(chunk_sum > 0 && exponent <= 268);
  const int shift = exponent - 53 - kLowestExponent;
  const int low = std::max(shift, 0);
  // a right shift drops only zeros
  const uint64_t aligned = shift < 0 ? mantissa >> -shift : mantissa;
  const auto digit = static_cast<size_t>(low / kDigitBits);
  const int bit = low % kDigitBits;
  const uint64_t low_part = (aligned & 0xFFFFFFFF) << bit;  // below 2^63
  const uint64_t high_part = (aligned >> 32) << bit;        // below 2^52
  digits_[digit] += low_part & 0xFFFFFFFF;
  digits_[digit + 1] += (low_part >> 32) + (high_part & 0xFFFFFFFF);
  digits_[digit + 2] += high_part >> 32;
}

void SquareSum::Merge(const SquareSum& other) {
  finite_ = finite_ && other.finite_;
  for (size_t d = 0; d < digits_.size(); ++d) digits_[d] += other.digits_[d];
}

std::array<uint64_t, SquareSum::kDigits> SquareSum::Carried() const {
  std::array<uint64_t, kDigits> digits = digits_;
  for (size_t d = 0; d + 1 < digits.size(); ++d) {
    digits[d + 1] += digits[d] >> kDigitBits;
    digits[d] &= 0xFFFFFFFF;
  }
  return digits;
}

SquareSum SquareSum::FromDigits(const std::array<uint64_t, kDigits>& digits) {
  SquareSum sum;
  sum.digits_ = digits;
  return sum;
}

double SquareSum::ToDouble() const {
  if (!finite_) return std::numeric_limits<double>::quiet_NaN();
  const std::array<uint64_t, kDigits> digits = Carried();
  size_t top = digits.size() - 1;
  while (top > 0 && digits[top] == 0) --top;
  const int exponent = kLowestExponent + static_cast<int>(top) * kDigitBits;
  // Three digits hold at least the 53 leading bits; what falls out is cut, not rounded.
  unsigned __int128 leading = digits[top];
  int width = exponent;
  for (size_t below = 1; below <= 2 && below <= top; ++below) {
    leading = (leading << kDigitBits) | digits[top - below];
    width -= kDigitBits;
  }
  while (leading >> 53 != 0) {
    leading >>= 1;
    ++width;
  }
  return std::ldexp(static_cast<double>(static_cast<uint64_t>(leading)), width);
}

bool SquareSum::operator==(const SquareSum& other) const {
  return finite_ == other.finite_ && (!finite_ || Carried() == other.Carried());
}

SquareSum SumSquaresAndFinite(size_t n, Gradient g) {
  const size_t elem_bytes = g.type == DType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
  const auto* bytes = static_cast<const unsigned char*>(g.data);
  SquareSum total;
  for (size_t begin = 0; begin < n; begin += kPieceChunks * kSumChunkElems) {
    const size_t elems = std::min(n - begin, kPieceChunks * kSumChunkElems);
    double chunk_sums[kPieceChunks];
    ChunkSquareSums(elems, {bytes + begin * elem_bytes, g.type}, chunk_sums);
    const size_t chunks = (elems + kSumChunkElems - 1) / kSumChunkElems;
    for (size_t c = 0; c < chunks; ++c) total.AddChunk(chunk_sums[c]);
  }
  return total;
}

}  // namespace forebay::cpu_adam
