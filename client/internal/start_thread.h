// SPDX-License-Identifier: Apache-2.0
// Threads of the library in a process that is not its own.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace forebay::client::internal {

// Starts a thread that handles no signals of the program. E_LIMIT, which names the thread `what`: the system has no more
// threads.
absl::StatusOr<std::thread> StartThread(const std::string& what, std::function<void()> run);

}  // namespace forebay::client::internal
