// SPDX-License-Identifier: Apache-2.0
// Converts states from and to float32 values, in any format: the values that leave and enter the daemon.
#pragma once

#include <cstddef>

#include "cpu_adam/update_kernel.h"

namespace forebay::cpu_adam {

// The masters of n elements: of weights and remainder together, of the plane of masters, or the
// float32 weights themselves. The result is exact.
//
// Shapes   float32[n]; n may be 0.
// Threads  Pure.
void DecodeMasters(StateFormat format, size_t n, const StatePlanes& state, float* out);

// The inverse: stores masters as an update stores them (StateFormat in update_kernel.h), and with them
// the weights, which are the masters rounded. Moments stay. Where `state` has neither remainder nor
// master (a frozen parameter), the weights alone.
//
// Shapes   float32[n]; n may be 0.
// Threads  Pure.
void EncodeMasters(StateFormat format, size_t n, const float* masters, const StatePlanes& state);

struct ElementRange {
  size_t first = 0;
  size_t n = 0;
};

// Moment `moment` of the elements of `range`: widened from bfloat16, or code and scale as
// kInt8 says. `state` begins at a multiple of kScaleElems in kInt8, at any element otherwise. The
// result is the value that the next update would compute with.
//
// Shapes   float32[n]; n may be 0.
// Threads  Pure.
void DecodeMoment(Optimizer optimizer, StateFormat format, size_t moment, ElementRange range,
                  const StatePlanes& state, float* out);

// The inverse: stores moment `moment` of n elements. An update rounds stochastically in kBf16 and kInt8;
// this rounds to nearest (kBf16: ties away from zero; kInt8: u = 1/2). In kInt8 a decoded group gets its
// codes again if one of them is 127 or -127 (linear) or 255 (square), but for a square's code 0, which
// becomes 1. Masters and weights do not change. In kInt8 `state` begins at a multiple of kScaleElems and
// whole groups are written: codes behind element n - 1 become 0.
//
// Shapes   float32[n], finite, squares not below 0; n may be 0.
// Threads  Pure.
void EncodeMoment(Optimizer optimizer, StateFormat format, size_t moment, size_t n,
                  const float* values, const StatePlanes& state);

}  // namespace forebay::cpu_adam
