// SPDX-License-Identifier: Apache-2.0
// When a call gives up, and who may stop it.
#pragma once

#include <chrono>
#include <functional>

#include "protocol/os/clock.h"

namespace forebay::client::internal {

using protocol::Deadline;

// How long a call waits, and who may stop it.
struct WaitLimits {
  Deadline deadline;
  const std::function<bool()>* interrupt_check = nullptr;  // may be null or empty

  bool Interrupted() const {
    return interrupt_check != nullptr && *interrupt_check && (*interrupt_check)();
  }
};

// Between two looks at the interrupt check.
inline constexpr std::chrono::milliseconds kInterruptPeriod{100};

}  // namespace forebay::client::internal
