// SPDX-License-Identifier: Apache-2.0
// The kernels that are in use now.
#pragma once

#include "cpu_adam/internal/kernel_table.h"

namespace forebay::cpu_adam::internal {

struct Kernels {
  const char* name;
  // kernels of each format, in the order of kStateFormats
  const FormatKernels* formats[kStateFormatCount];
  const StreamKernels* stream;

  const FormatKernels& of(StateFormat format) const;
  UpdateFn* update(Optimizer optimizer, StateFormat format) const {
    return of(format).updates[static_cast<size_t>(optimizer) - 1];
  }
  UpdateFn* weights(Optimizer optimizer, StateFormat format) const {
    return of(format).weights[static_cast<size_t>(optimizer) - 1];
  }
};

const Kernels& ChosenKernels();  // thread-safe; the best target at the first call

}  // namespace forebay::cpu_adam::internal
