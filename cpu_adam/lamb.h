// SPDX-License-Identifier: Apache-2.0
// LAMB, whose step length depends on the norms of a whole parameter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/square_sum.h"
#include "cpu_adam/update_kernel.h"

namespace forebay::cpu_adam {

// One step of a parameter: SumLamb over all its elements, with the sums merged; then UpdateLamb over all its elements with the
// ratio of the sums. Names are those of StepScalars; a' and b' are the moments of kLamb as stored in the format:
//
//   u  = fma(decay, w, a'·inv_bias1 / fma(sqrt(b'), inv_sqrt_bias2, eps))
//   w' = fma(-(step_size·trust), u, w)
//
// Source  You et al., arXiv:1904.00962, algorithm 2, with φ the identity; the ratio is 1 where a norm
//         is 0.
struct LambSums {
  SquareSum weight;  // squares of w
  SquareSum update;  // squares of u

  void Merge(const LambSums& other);  // any order: the same bits
};

// Sums the squares of w and u that an update of n elements would have. Changes no element.
//
// Exact    The sums of disjoint ranges, merged in any order, are the same bits on every target and
//          any number of threads; another split at places that are no multiples of kSumChunkElems
//          may round differently.
// Threads  Pure. 110 KB of stack.
LambSums SumLamb(StateFormat format, const StepScalars& scalars, size_t n, Gradient g,
                 const StatePlanes& state);

// ‖w‖ / ‖u‖ of a whole parameter, from the sums of their squares; 1 where either is 0 or NaN.
float TrustRatio(double weight_squares, double update_squares);
float TrustRatio(const LambSums& sums);

// Updates n elements; for all else see Update.
uint64_t UpdateLamb(StateFormat format, const StepScalars& scalars, float trust, size_t n,
                    Gradient g, const StatePlanes& state, const SavedElems* saved = nullptr);

}  // namespace forebay::cpu_adam
