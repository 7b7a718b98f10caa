// A report of what a scrub has found, as a message.
#pragma once

#include "daemon/exec/scrub.h"
#include "protocol/forebay.capnp.h"

namespace forebay::daemon {

void FillScrubReport(const ScrubReport& report, schema::ScrubReport::Builder out);

}  // namespace forebay::daemon
