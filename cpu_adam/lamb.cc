#include "cpu_adam/lamb.h"

#include <algorithm>
#include <cmath>

#include "cpu_adam/internal/dispatch.h"

namespace forebay::cpu_adam {
namespace {

constexpr size_t kApplyElems = 1024;  // w and u of so many stay in the nearest cache

// Runs `use(begin, count, w, u)` for every kPieceElems of n elements.
template <size_t kPieceElems, class Use>
void ForEachPiece(StateFormat format, const StepScalars& scalars, size_t n,
                  const StatePlanes& state, const Use& use) {
  const auto direction = internal::ChosenKernels().of(format).lamb_direction;
  alignas(64) float w[kPieceElems];
  alignas(64) float u[kPieceElems];
  for (size_t begin = 0; begin < n; begin += kPieceElems) {
    const size_t count = std::min(kPieceElems, n - begin);
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
  ForEachPiece<kSumChunkElems>(format, scalars, n, state,
                               [&sums](size_t, size_t count, const float* w, const float* u) {
                                 double chunk_sum = 0;
                                 ChunkSquareSums(count, {w, DType::kFloat32}, &chunk_sum);
                                 sums.weight.AddChunk(chunk_sum);
                                 ChunkSquareSums(count, {u, DType::kFloat32}, &chunk_sum);
                                 sums.update.AddChunk(chunk_sum);
                               });
  return sums;
}

float TrustRatio(double weight_squares, double update_squares) {
  const double weight = std::sqrt(weight_squares);
  const double update = std::sqrt(update_squares);
  if (!(weight > 0) || !(update > 0)) return 1.0f;
  return static_cast<float>(weight / update);
}

float TrustRatio(const LambSums& sums) {
  return TrustRatio(sums.weight.ToDouble(), sums.update.ToDouble());
}

uint64_t ApplyLamb(StateFormat format, const StepScalars& scalars, float trust, size_t n,
                   const StatePlanes& state) {
  const auto apply = internal::ChosenKernels().of(format).lamb_apply;
  const float step_size = scalars.step_size * trust;
  uint64_t non_finite = 0;
  ForEachPiece<kApplyElems>(
      format, scalars, n, state, [&](size_t begin, size_t count, const float* w, const float* u) {
        non_finite += apply(step_size, count, w, u, Advance(state, format, begin));
      });
  return non_finite;
}

}  // namespace forebay::cpu_adam
