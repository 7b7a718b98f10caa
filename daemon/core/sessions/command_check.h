// SPDX-License-Identifier: Apache-2.0
// Checks of a client's commands, field by field. The functions are pure: they take a private copy of the client's words, and
// return OK or an error.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// Limits of one session against which its commands are checked.
struct CommandLimits {
  uint64_t grad_bytes = 0;  // size of the arena's gradients part, which begins at 0
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  uint64_t extra_state_bytes = 0;
  uint32_t rank = 0;  // sharded attachment: only this rank's partitions may be written
};

// Checks op, kind, partition, owner, alignment, range and exact length. The job checks step numbers and leases.
//
// Errors  E_PROTOCOL     the op or kind is unknown, or `reserved` is not 0.
//         E_RANGE        partition, parameter, state, offset or length; a frozen parameter has no states.
//         E_RANK         a write to another rank's partition.
//         E_UNSUPPORTED  a kind of gradient that is not the attachment's, or a gradient of a partition
//                        that is frozen.
absl::Status CheckCommand(const protocol::Command& command, const protocol::Layout& layout,
                          const CommandLimits& limits);

// Checks the copied body of a kStep command: `request`, `hyper_params` and `presence`.
//
// Errors  E_STEP         the request's step is not the step of the command.
//         E_RANGE        the length is not that of its parts, or the presence of other parameters.
//         E_OPTION       too few or too many parameter groups, or a hyper-parameter out of bounds.
//         E_EXTRA_STATE  extra_state is larger than the session asked for at attach.
//         E_UNSUPPORTED  a gradient of a parameter that is frozen.
absl::Status CheckStepRequest(const protocol::Command& command, const StepRequestCopied& copied,
                              const protocol::Layout& layout, const CommandLimits& limits);

}  // namespace forebay::daemon
