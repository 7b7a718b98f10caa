#include "cpu_adam/update_kernel.h"

#include "cpu_adam/internal/dispatch.h"

namespace forebay::cpu_adam {

StatePlanes Advance(const StatePlanes& planes, Rule rule, StateFormat format, size_t elems) {
  StatePlanes rest = planes;
  if (format == StateFormat::kFp32) {
    rest.image = static_cast<float*>(planes.image) + elems;
  } else {
    rest.image = static_cast<uint16_t*>(planes.image) + elems;
    rest.remainder += elems;
  }
  for (size_t m = 0; m < MomentCount(rule); ++m) rest.moments[m] += elems;
  return rest;
}

uint64_t Update(Rule rule, StateFormat format, const StepScalars& scalars, size_t n, Gradient g,
                const StatePlanes& state) {
  return internal::ChosenKernels().update(rule, format)(scalars, n, g, state, state);
}

uint64_t UpdateTo(Rule rule, StateFormat format, const StepScalars& scalars, size_t n, Gradient g,
                  const StatePlanes& from, const StatePlanes& to) {
  return internal::ChosenKernels().update(rule, format)(scalars, n, g, from, to);
}

}  // namespace forebay::cpu_adam
