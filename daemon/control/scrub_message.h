// SPDX-License-Identifier: Apache-2.0
// The report of a scrub as a message.
#pragma once

#include <cstddef>
#include <cstdint>

#include "daemon/exec/scrub.h"
#include "protocol/forebay.capnp.h"

namespace forebay::daemon {

// Limits of the damage that a message names; damage beyond them is only counted.
struct ScrubMessageLimits {
  size_t slots_per_job = SIZE_MAX;
  size_t params_per_slot = SIZE_MAX;
};

// Limits of an answer to a call, which is short.
inline constexpr ScrubMessageLimits kAnswerLimits = {.slots_per_job = 256, .params_per_slot = 16};

void FillScrubReport(const ScrubReport& report, const ScrubMessageLimits& limits,
                     schema::ScrubReport::Builder out);

}  // namespace forebay::daemon
