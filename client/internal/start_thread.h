// SPDX-License-Identifier: Apache-2.0
// Threads of the library in a process that is not its own.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace forebay::client::internal {

// A thread on which no signal of the program is handled. E_LIMIT, which names it `what`, where no
// thread is left.
absl::StatusOr<std::thread> StartThread(const std::string& what, std::function<void()> run);

}  // namespace forebay::client::internal
