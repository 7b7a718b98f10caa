// SPDX-License-Identifier: Apache-2.0
#include "cpu_adam/stream_kernel.h"

#include "cpu_adam/internal/dispatch.h"

namespace forebay::cpu_adam {

using internal::ChosenKernels;

void ChunkSquareSums(size_t n, Gradient g, double* chunk_sums) {
  ChosenKernels().stream->chunk_square_sums(n, g, chunk_sums);
}

void CopyWithSquareSums(size_t n, Gradient src, void* dst, double* chunk_sums) {
  ChosenKernels().stream->copy_with_square_sums(n, src, dst, chunk_sums);
}

bool AllFinite(size_t n, Gradient g) { return ChosenKernels().stream->all_finite(n, g); }

void AddGradient(size_t n, Gradient src, AddMode mode, float* dst) {
  ChosenKernels().stream->add_gradient(n, src, mode, dst);
}

void AddGradients(size_t n, const Gradient* src, size_t count, AddMode mode, float* dst,
                  double* chunk_sums) {
  ChosenKernels().stream->add_gradients(n, src, count, mode, dst, chunk_sums);
}

}  // namespace forebay::cpu_adam
