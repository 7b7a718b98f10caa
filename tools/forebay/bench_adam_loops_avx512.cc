// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#define FOREBAY_WORD_BYTES 64
#define FOREBAY_STORE_NON_TEMPORAL(to, word) \
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(word))

#include "tools/forebay/bench_adam_loops.inc"

namespace forebay::tools::loops {

const Loops kAvx512 = {"avx512f", Loop<Store::kPlain>, Loop<Store::kNonTemporal>};

}  // namespace forebay::tools::loops
