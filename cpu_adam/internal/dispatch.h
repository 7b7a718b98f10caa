// The kernels that are in use now.
#pragma once

#include "cpu_adam/internal/kernel_table.h"

namespace forebay::cpu_adam::internal {

struct Kernels {
  const char* name;
  const StepKernels* step;
  const StreamKernels* stream;
};

const Kernels& ChosenKernels();  // thread-safe; the best target at the first call

}  // namespace forebay::cpu_adam::internal
