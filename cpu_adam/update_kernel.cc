#include "cpu_adam/update_kernel.h"

#include "cpu_adam/internal/dispatch.h"

namespace forebay::cpu_adam {

uint64_t Update(Rule rule, StateFormat format, const StepScalars& scalars, size_t n, Gradient g,
                const StatePlanes& state) {
  return internal::ChosenKernels().update(rule, format)(scalars, n, g, state, state);
}

uint64_t UpdateTo(Rule rule, StateFormat format, const StepScalars& scalars, size_t n, Gradient g,
                  const StatePlanes& from, const StatePlanes& to) {
  return internal::ChosenKernels().update(rule, format)(scalars, n, g, from, to);
}

}  // namespace forebay::cpu_adam
