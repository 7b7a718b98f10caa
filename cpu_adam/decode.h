// States as float32 values, whatever a format holds them in: how they leave the daemon.
#pragma once

#include <cstddef>

#include "cpu_adam/update_kernel.h"

namespace forebay::cpu_adam {

// The masters of n elements: of weights and remainder together, of the plane of masters, or the
// float32 weights themselves. The result is exact.
//
// The inverse (for an import): the master is stored as an update stores it, so writing the master of
// an element writes its weight too.
//
// Shapes   float32[n]; n may be 0.
// Threads  Pure.
void DecodeMasters(StateFormat format, size_t n, const StatePlanes& state, float* out);

struct ElementRange {
  size_t first = 0;
  size_t n = 0;
};

// Moment `moment` of the elements of `range`: widened from bfloat16, or code and scale as
// kInt8 says. `state` begins at a multiple of kScaleElems in kInt8, at any element otherwise. The
// result is the value that the next update would compute with.
//
// The inverse (for an import): whole groups of kScaleElems at once, for one scale stands for all of
// them.
//
// Shapes   float32[n]; n may be 0.
// Threads  Pure.
void DecodeMoment(Optimizer optimizer, StateFormat format, size_t moment, ElementRange range,
                  const StatePlanes& state, float* out);

}  // namespace forebay::cpu_adam
