#include "cpu_adam/lamb.h"

#include <algorithm>
#include <cmath>

#include "cpu_adam/internal/dispatch.h"

namespace forebay::cpu_adam {
namespace {

// Runs `use(begin, count, w, u)` for every chunk of n elements.
template <class Use>
void ForEachChunk(StateFormat format, const StepScalars& scalars, size_t n,
                  const StatePlanes& state, const Use& use) {
  const auto direction = internal::ChosenKernels().of(format).lamb_direction;
  float w[kSumChunkElems];
  float u[kSumChunkElems];
  for (size_t begin = 0; begin < n; begin += kSumChunkElems) {
    const size_t count = std::min(kSumChunkElems, n - begin);
    direction(scalars, count, Advance(state, format, begin), w, u);
    use(begin, count, w, u);
  }
}

}  // namespace

void LambSums::Merge(const LambSums& other) {
  weight.Merge(other.weight);
  update.Merge(other.update);
}

LambSums SumLamb(StateFormat format, const StepScalars& scalars, size_t n,
                 const StatePlanes& state) {
  LambSums sums;
  ForEachChunk(format, scalars, n, state,
               [&sums](size_t, size_t count, const float* w, const float* u) {
                 sums.weight.Merge(SumSquaresAndFinite(count, {w, GradType::kFp32}));
                 sums.update.Merge(SumSquaresAndFinite(count, {u, GradType::kFp32}));
               });
  return sums;
}

float TrustRatio(const LambSums& sums) {
  const double weight = std::sqrt(sums.weight.ToDouble());
  const double update = std::sqrt(sums.update.ToDouble());
  if (!(weight > 0) || !(update > 0)) return 1.0f;
  return static_cast<float>(weight / update);
}

uint64_t ApplyLamb(StateFormat format, const StepScalars& scalars, float trust, size_t n,
                   const StatePlanes& state) {
  const auto apply = internal::ChosenKernels().of(format).lamb_apply;
  const float step = scalars.step * trust;
  uint64_t bad = 0;
  ForEachChunk(format, scalars, n, state,
               [&](size_t begin, size_t count, const float* w, const float* u) {
                 bad += apply(step, count, w, u, Advance(state, format, begin));
               });
  return bad;
}

}  // namespace forebay::cpu_adam
