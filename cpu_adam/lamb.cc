// SPDX-License-Identifier: Apache-2.0
#include "cpu_adam/lamb.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "cpu_adam/internal/dispatch.h"
#include "cpu_adam/internal/kernel_table.h"
#include "protocol/dtype.h"

namespace forebay::cpu_adam {
namespace {

constexpr size_t kApplyElems = 1024;  // elements of a pass: their w and u stay in the nearest cache
constexpr size_t kLambMoments = internal::kMomentShape<Optimizer::kLamb>.count;

Gradient Advance(Gradient g, size_t elems) {
  return {static_cast<const std::byte*>(g.data) + elems * protocol::SizeBytes(g.type), g.type};
}

// A copy of up to kSumChunkElems elements, which may be updated.
class CopiedPlanes {
 public:
  CopiedPlanes(StateFormat format, size_t n, const StatePlanes& from) {
    const auto copy = [](const void* plane, size_t bytes, auto& to) {
      std::memcpy(to.data(), plane, bytes);
      return to.data();
    };
    planes_.first_elem = from.first_elem;
    planes_.weights = copy(from.weights, n * internal::WeightsWidth(format), weights_);
    if (format.format != Format::kFp32) {
      planes_.remainder = copy(from.remainder, n * sizeof(int16_t), remainder_);
    } else if (format.weights != DType::kFloat32) {
      planes_.master = copy(from.master, n * sizeof(float), master_);
    }
    const size_t groups = (n + kScaleElems - 1) / kScaleElems;
    const bool is_coded = format.format == Format::kInt8;
    const size_t moment_bytes =
        (is_coded ? groups * kScaleElems : n) * internal::MomentWidth(format);
    for (size_t m = 0; m < kLambMoments; ++m) {
      planes_.moments[m] = copy(from.moments[m], moment_bytes, moments_[m]);
      if (is_coded) planes_.scales[m] = copy(from.scales[m], groups * sizeof(float), scales_[m]);
    }
  }

  const StatePlanes& planes() const { return planes_; }

 private:
  template <typename T>
  using Plane = std::array<T, kSumChunkElems>;

  StatePlanes planes_;
  alignas(64) Plane<float> weights_;
  alignas(64) Plane<float> master_;
  alignas(64) Plane<int16_t> remainder_;
  alignas(64) std::array<Plane<float>, kLambMoments> moments_;
  alignas(64) std::array<std::array<float, kSumChunkElems / kScaleElems>, kLambMoments> scales_;
};

// w and u of up to kElems elements.
template <size_t kElems>
struct Direction {
  Direction(StateFormat format, const StepScalars& scalars, size_t n, const StatePlanes& state) {
    internal::ChosenKernels().of(format).lamb_direction(scalars, n, state, w, u);
  }

  alignas(64) float w[kElems];
  alignas(64) float u[kElems];
};

}  // namespace

void LambSums::Merge(const LambSums& other) {
  weight.Merge(other.weight);
  update.Merge(other.update);
}

LambSums SumLamb(StateFormat format, const StepScalars& scalars, size_t n, Gradient g,
                 const StatePlanes& state) {
  LambSums sums;
  for (size_t begin = 0; begin < n; begin += kSumChunkElems) {
    const size_t count = std::min(kSumChunkElems, n - begin);
    const CopiedPlanes copied(format, count, Advance(state, format, begin));
    Update(Optimizer::kLamb, format, scalars, count, Advance(g, begin), copied.planes());
    const Direction<kSumChunkElems> of(format, scalars, count, copied.planes());
    double chunk_sum = 0;
    ChunkSquareSums(count, {of.w, DType::kFloat32}, &chunk_sum);
    sums.weight.AddChunk(chunk_sum);
    ChunkSquareSums(count, {of.u, DType::kFloat32}, &chunk_sum);
    sums.update.AddChunk(chunk_sum);
  }
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

// Saved elements are those before both halves of the update. So if elements are saved, both halves run on kSavedElems elements
// at a time.
uint64_t UpdateLamb(StateFormat format, const StepScalars& scalars, float trust, size_t n,
                    Gradient g, const StatePlanes& state, const SavedElems* saved) {
  const auto apply = internal::ChosenKernels().of(format).lamb_apply;
  const float step_size = scalars.step_size * trust;
  const size_t stride = saved != nullptr ? kSavedElems : kApplyElems;
  const size_t slot_bytes = SavedSlotBytes(Optimizer::kLamb, format);
  uint64_t non_finite = 0;
  for (size_t begin = 0; begin < n; begin += stride) {
    const size_t count = std::min(stride, n - begin);
    const StatePlanes piece = Advance(state, format, begin);
    SavedElems to;
    if (saved != nullptr) {
      to = {.slots = saved->slots + begin / kSavedElems % 2 * slot_bytes,
            .done = saved->done,
            .at_first = saved->at_first + 2 * begin,
            .non_finite = saved->non_finite + non_finite};
    }
    Update(Optimizer::kLamb, format, scalars, count, Advance(g, begin), piece,
           saved != nullptr ? &to : nullptr);
    const Direction<kApplyElems> of(format, scalars, count, piece);
    non_finite += apply(step_size, count, of.w, of.u, piece);
  }
  return non_finite;
}

}  // namespace forebay::cpu_adam
