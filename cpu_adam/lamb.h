// The second pass of LAMB, whose step length depends on the norms of a whole parameter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/square_sum.h"
#include "cpu_adam/update_kernel.h"

namespace forebay::cpu_adam {

// One step of a parameter: Update with kLamb over all of it, which makes the new moments a and
// b; then the sums over all of it, merged; then ApplyLamb over all of it. With the names of
// StepScalars, and moments as the format holds them after the first pass:
//
//   u  = fma(decay, w, a·inv_bias1 / fma(sqrt(b), inv_sqrt_bias2, eps))
//   w' = fma(-(step_size·trust), u, w)
//
// Source  You et al., arXiv:1904.00962, algorithm 2, with φ the identity; the ratio is 1 where a norm
//         is 0.
struct LambSums {
  SquareSum weight;  // of w
  SquareSum update;  // of u

  void Merge(const LambSums& other);  // any order: the same bits
};

// Over n elements after the first pass.
//
// Exact    The sums of disjoint ranges, merged in any order, are the same bits on every target and
//          any number of threads; another split at places that are no multiples of kSumChunkElems
//          may round differently.
// Threads  Pure.
LambSums SumLamb(StateFormat format, const StepScalars& scalars, size_t n,
                 const StatePlanes& state);

// ‖w‖ / ‖u‖ of a whole parameter, from the sums of their squares; 1 where either is 0 or NaN.
float TrustRatio(double weight_squares, double update_squares);
float TrustRatio(const LambSums& sums);

// Updates n masters in place and leaves the moments; returns how many are non-finite, as Update does. For
// Memory, Threads and Exact see Update.
uint64_t ApplyLamb(StateFormat format, const StepScalars& scalars, float trust, size_t n,
                   const StatePlanes& state);

}  // namespace forebay::cpu_adam
