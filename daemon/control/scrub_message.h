// SPDX-License-Identifier: Apache-2.0
// A report of what a scrub has found, as a message.
#pragma once

#include <cstddef>
#include <cstdint>

#include "daemon/exec/scrub.h"
#include "protocol/forebay.capnp.h"

namespace forebay::daemon {

// How much of the damage a message names; what is beyond it is counted.
struct ScrubMessageLimits {
  size_t slots_per_job = SIZE_MAX;
  size_t params_per_slot = SIZE_MAX;
};

// Of an answer, which is short.
inline constexpr ScrubMessageLimits kAnswerLimits = {.slots_per_job = 256, .params_per_slot = 16};

void FillScrubReport(const ScrubReport& report, const ScrubMessageLimits& limits,
                     schema::ScrubReport::Builder out);

}  // namespace forebay::daemon
