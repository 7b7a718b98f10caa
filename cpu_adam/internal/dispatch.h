// The kernels that are in use now.
#pragma once

#include "cpu_adam/internal/kernel_table.h"

namespace forebay::cpu_adam::internal {

struct Kernels {
  const char* name;
  const UpdateKernels* updates;
  const StreamKernels* stream;

  UpdateFn* update(Rule rule, StateFormat format) const {
    return updates->by_rule[static_cast<size_t>(rule) - 1][static_cast<size_t>(format) - 1];
  }
};

const Kernels& ChosenKernels();  // thread-safe; the best target at the first call

}  // namespace forebay::cpu_adam::internal
