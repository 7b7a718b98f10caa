// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/peers/limit.h"

#include <bit>

// The loops are compiled for several vector widths, and the loader chooses the widest that the CPU has. The limit of an
// AVX-512 machine is then measured with AVX-512.
#if defined(__x86_64__) && defined(__GNUC__)
#define FOREBAY_EACH_WIDTH [[gnu::target_clones("avx512f", "avx2", "default")]]
#else
#define FOREBAY_EACH_WIDTH
#endif

namespace forebay::peers {

// Factors 1 and 0 that the compiler cannot assume to be constant. Each value is read, used and written, and no value changes.
volatile float kept = 1;
volatile float added = 0;
volatile uint16_t masked = 0;

FOREBAY_EACH_WIDTH void TouchAsFp32(size_t n, const float* __restrict g, float* __restrict w,
                                    float* __restrict m, float* __restrict v) {
  const float keep = kept;
  const float add = added;
  for (size_t i = 0; i < n; ++i) {
    const float rest = g[i] * add;
    w[i] = w[i] * keep + rest;
    m[i] = m[i] * keep + rest;
    v[i] = v[i] * keep + rest;
  }
}

FOREBAY_EACH_WIDTH void TouchAsMaster(size_t n, const uint16_t* __restrict g, float* __restrict w,
                                      float* __restrict m, float* __restrict v,
                                      uint16_t* __restrict weights) {
  const float keep = kept;
  const uint16_t mask = masked;
  for (size_t i = 0; i < n; ++i) {
    w[i] = w[i] * keep;
    m[i] = m[i] * keep;
    v[i] = v[i] * keep;
    weights[i] = static_cast<uint16_t>((std::bit_cast<uint32_t>(w[i]) >> 16) ^ (g[i] & mask));
  }
}

FOREBAY_EACH_WIDTH void TouchAsExact(size_t n, const uint16_t* __restrict g,
                                     uint16_t* __restrict weights, int16_t* __restrict remainder,
                                     float* __restrict m, float* __restrict v) {
  const float keep = kept;
  const uint16_t mask = masked;
  for (size_t i = 0; i < n; ++i) {
    const auto rest = static_cast<uint16_t>(g[i] & mask);
    weights[i] = static_cast<uint16_t>(weights[i] ^ rest);
    remainder[i] = static_cast<int16_t>(remainder[i] ^ static_cast<int16_t>(rest));
    m[i] = m[i] * keep;
    v[i] = v[i] * keep;
  }
}

}  // namespace forebay::peers
