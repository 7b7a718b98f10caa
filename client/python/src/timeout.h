// SPDX-License-Identifier: Apache-2.0
// Python's seconds as the client's timeouts.
#pragma once

#include <chrono>

#include "client/client.h"

namespace forebay::python {

inline client::Timeout TimeoutOf(double seconds) {
  if (!(seconds < 1e9)) return client::kNoTimeout;  // NaN and infinity too
  return std::chrono::duration_cast<client::Timeout>(std::chrono::duration<double>(seconds));
}

}  // namespace forebay::python
