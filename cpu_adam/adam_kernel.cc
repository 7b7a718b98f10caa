#include "cpu_adam/adam_kernel.h"

#include <cmath>

#include "cpu_adam/internal/dispatch.h"

namespace forebay::cpu_adam {
namespace {

using internal::ChosenKernels;
using internal::StepConstants;

StepConstants Derive(const AdamScalars& s) {
  return {
      .beta1 = s.beta1,
      .one_minus_beta1 = s.one_minus_beta1,
      .beta2 = s.beta2,
      .one_minus_beta2 = s.one_minus_beta2,
      .eps = s.eps,
      .inv_sqrt_bias2 = s.inv_sqrt_bias2,
      .decay = std::fma(-s.lr, s.weight_decay, 1.0f),
      .step = s.lr * s.inv_bias1,
      .grad_scale = s.grad_scale,
  };
}

}  // namespace

uint64_t AdamStepFp32(const AdamScalars& scalars, size_t n, Gradient g, const Fp32Planes& state) {
  return ChosenKernels().step->fp32(Derive(scalars), n, g, state, state);
}

uint64_t AdamStepFp32To(const AdamScalars& scalars, size_t n, Gradient g, const Fp32Planes& from,
                        const Fp32Planes& to) {
  return ChosenKernels().step->fp32(Derive(scalars), n, g, from, to);
}

uint64_t AdamStepExact(const AdamScalars& scalars, size_t n, Gradient g, const ExactPlanes& state) {
  return ChosenKernels().step->exact(Derive(scalars), n, g, state, state);
}

uint64_t AdamStepExactTo(const AdamScalars& scalars, size_t n, Gradient g, const ExactPlanes& from,
                         const ExactPlanes& to) {
  return ChosenKernels().step->exact(Derive(scalars), n, g, from, to);
}

void ChunkSquareSums(size_t n, Gradient g, double* chunk_sums) {
  ChosenKernels().stream->chunk_square_sums(n, g, chunk_sums);
}

bool AllFinite(size_t n, Gradient g) { return ChosenKernels().stream->all_finite(n, g); }

void AddGradient(size_t n, Gradient src, AddMode mode, float* dst) {
  ChosenKernels().stream->add_gradient(n, src, mode, dst);
}

void RoundToBf16(size_t n, const float* src, uint16_t* dst) {
  ChosenKernels().stream->round_to_bf16(n, src, dst);
}

void WidenBf16(size_t n, const uint16_t* src, float* dst) {
  ChosenKernels().stream->widen_bf16(n, src, dst);
}

void SplitMaster(size_t n, const float* w, uint16_t* param, int16_t* remainder) {
  ChosenKernels().stream->split_master(n, w, param, remainder);
}

void JoinMaster(size_t n, const uint16_t* param, const int16_t* remainder, float* w) {
  ChosenKernels().stream->join_master(n, param, remainder, w);
}

}  // namespace forebay::cpu_adam
