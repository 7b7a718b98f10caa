// SPDX-License-Identifier: Apache-2.0
// Chooses the instruction set that the kernels of update_kernel.h run on.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace forebay::cpu_adam {

// Returns the names of the targets that are compiled in and that this processor has, best first: of "avx3", "avx2", "sve2",
// "sve", "neon". The last name is always "scalar", the std::fma reference.
std::vector<std::string> SupportedTargets();

// The target in use: the best one unless another was forced.
std::string ChosenTarget();

// Uses `name` from now on; "" or "best" goes back to the best one. All targets give the same bits.
//
// Threads  Any; calls of kernels that run at the same time finish on the target they began with.
// Errors   E_OPTION  not in SupportedTargets(); the message lists it.
absl::Status ForceTarget(std::string_view name);

}  // namespace forebay::cpu_adam
