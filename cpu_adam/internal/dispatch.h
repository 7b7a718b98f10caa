// The kernels that are in use now.
#pragma once

#include "cpu_adam/internal/kernel_table.h"

namespace forebay::cpu_adam::internal {

struct Kernels {
  const char* name;
  const FormatKernels* formats[kStateFormats];
  const StreamKernels* stream;

  const FormatKernels& of(StateFormat format) const {
    return *formats[static_cast<size_t>(format) - 1];
  }
  UpdateFn* update(Rule rule, StateFormat format) const {
    return of(format).updates[static_cast<size_t>(rule) - 1];
  }
};

const Kernels& ChosenKernels();  // thread-safe; the best target at the first call

}  // namespace forebay::cpu_adam::internal
