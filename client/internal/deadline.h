// SPDX-License-Identifier: Apache-2.0
// When a call gives up, and who may stop it.
#pragma once

#include <chrono>
#include <functional>

#include "protocol/os/clock.h"

namespace forebay::client::internal {

using protocol::Deadline;

// Time limit of a call, and the check that can interrupt it.
struct WaitLimits {
  Deadline deadline;
  const std::function<bool()>* interrupt_check = nullptr;  // may be null or empty

  bool Interrupted() const {
    return interrupt_check != nullptr && *interrupt_check && (*interrupt_check)();
  }
};

// Time between two calls of the interrupt check.
inline constexpr std::chrono::milliseconds kInterruptPeriod{100};

}  // namespace forebay::client::internal
