// SPDX-License-Identifier: Apache-2.0
#include "cpu_adam/update_kernel.h"

#include "cpu_adam/internal/dispatch.h"
#include "protocol/os/check.h"

namespace forebay::cpu_adam {
namespace {

void Move(void*& plane, size_t bytes) {
  if (plane != nullptr) plane = static_cast<char*>(plane) + bytes;
}

}  // namespace

using internal::MomentWidth;
using internal::WeightsWidth;

StatePlanes Advance(const StatePlanes& planes, StateFormat format, size_t elems) {
  StatePlanes moved = planes;
  Move(moved.weights, elems * WeightsWidth(format));
  if (moved.remainder != nullptr) moved.remainder += elems;
  if (moved.master != nullptr) moved.master += elems;
  Move(moved.new_weights, elems * WeightsWidth(format));
  for (void*& moment : moved.moments) Move(moment, elems * MomentWidth(format));
  for (float*& scale : moved.scales) {
    if (scale != nullptr) scale += elems / kScaleElems;
  }
  moved.first_elem += static_cast<uint32_t>(elems);
  return moved;
}

size_t SavedSlotBytes(Optimizer optimizer, StateFormat format) {
  size_t bytes = internal::kSavedCountBytes;
  const auto add = [&bytes](size_t width) { bytes += internal::SavedPlaneBytes(width); };
  add(WeightsWidth(format));
  if (format.format != Format::kFp32) add(sizeof(int16_t));
  const size_t moments = protocol::kMomentShapes[static_cast<size_t>(optimizer) - 1].count;
  for (size_t m = 0; m < moments; ++m) {
    add(MomentWidth(format));
    if (format.format == Format::kInt8) bytes += internal::kSavedScaleBytes;
  }
  if (format.format == Format::kFp32 && format.weights != DType::kFloat32) add(sizeof(float));
  return bytes;
}

// The loop itself is in internal/update_simd.inc, once a target instruction set.
uint64_t Update(Optimizer optimizer, StateFormat format, const StepScalars& scalars, size_t n,
                Gradient g, const StatePlanes& state, const SavedElems* saved) {
  return internal::ChosenKernels().update(optimizer, format)(scalars, n, g, state, saved);
}

void UpdateWeights(Optimizer optimizer, StateFormat format, const StepScalars& scalars, size_t n,
                   Gradient g, const StatePlanes& state) {
  internal::UpdateFn* const weights = internal::ChosenKernels().weights(optimizer, format);
  FOREBAY_CHECK(weights != nullptr);
  weights(scalars, n, g, state, /*saved=*/nullptr);
}

}  // namespace forebay::cpu_adam
