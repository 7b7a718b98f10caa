// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#define FOREBAY_WORD_BYTES 32
#define FOREBAY_STORE_NON_TEMPORAL(to, word) \
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(word))

#include "tools/forebay/bench_adam_loops.inc"

namespace forebay::tools::loops {

const Loops kAvx2 = {"avx2", Loop<Store::kPlain>, Loop<Store::kNonTemporal>};

}  // namespace forebay::tools::loops
