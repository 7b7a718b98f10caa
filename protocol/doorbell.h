// SPDX-License-Identifier: Apache-2.0
// Doorbells, which wake a sleeping side of a channel or queue.
#pragma once

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::protocol {

// A non-blocking eventfd that no exec inherits: for threads of one process, or where the other
// process alone writes it. Whoever shares an eventfd can fill it and make it blocking, so a process
// never writes one that it has given away.
//
// Errors  E_LIMIT  no descriptor is left; names the errno.
absl::StatusOr<UniqueFd> MakeDoorbell();

// Wakes whoever waits on the eventfd `fd`. Never blocks where nobody else holds `fd`; a counter that
// is full wakes as well. Async-signal-safe.
void RingDoorbell(int fd);

// Clears the eventfd's counter.
void DrainDoorbell(int fd);

// A doorbell between two processes that do not trust each other: a socket pair whose ends have no
// open file description in common.
struct SocketDoorbell {
  UniqueFd ringer;  // stays with the side that rings; receives nothing
  UniqueFd waiter;  // goes to the side that waits: readable after a ring
};

// Errors  E_LIMIT  no descriptor is left; names the errno.
absl::StatusOr<SocketDoorbell> MakeSocketDoorbell();

// Wakes whoever waits on the other end of `ringer`. Never blocks, whatever the other side does.
void RingSocketDoorbell(int ringer);

// Discards every ring so far. Never blocks.
void DrainSocketDoorbell(int waiter);

}  // namespace forebay::protocol
