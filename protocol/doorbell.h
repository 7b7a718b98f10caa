// The eventfd that wakes a sleeping side of a channel.
#pragma once

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::protocol {

// A non-blocking eventfd that no exec inherits.
//
// Errors  E_LIMIT  no descriptor is left; names the errno.
absl::StatusOr<UniqueFd> MakeDoorbell();

// Wakes whoever waits on `fd`. Never blocks; a counter that is full wakes as well.
// Async-signal-safe.
void RingDoorbell(int fd);

// Takes every ring so far. Never blocks.
void DrainDoorbell(int fd);

}  // namespace forebay::protocol
