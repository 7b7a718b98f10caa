// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include <emmintrin.h>
#define FOREBAY_STORE_NON_TEMPORAL(to, word) \
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(word))
#else
#define FOREBAY_STORE_NON_TEMPORAL(to, word) (*(to) = (word))
#endif
#define FOREBAY_WORD_BYTES 16

#include "tools/forebay/bench_adam_loops.inc"

namespace forebay::tools::loops {

const Loops kBaseline = {"128-bit", Loop<Store::kPlain>, Loop<Store::kNonTemporal>};

}  // namespace forebay::tools::loops
