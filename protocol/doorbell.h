// SPDX-License-Identifier: Apache-2.0
// Doorbells, which wake a sleeping side of a channel or queue.
#pragma once

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::protocol {

// Creates a non-blocking eventfd that no exec inherits, for threads of one process, or for another process that alone writes
// it. A process that shares an eventfd can fill it and make it blocking. So a process never writes an eventfd that it has
// passed on.
//
// Errors  E_LIMIT  no descriptor is left; names the errno.
absl::StatusOr<UniqueFd> MakeDoorbell();

// Wakes the threads that wait on the eventfd `fd`. Never blocks if no other process holds `fd`. A full counter wakes them too.
// Async-signal-safe.
void RingDoorbell(int fd);

// Clears the eventfd's counter.
void DrainDoorbell(int fd);

// A doorbell between two processes that do not trust each other: a socket pair whose ends have no
// open file description in common.
struct SocketDoorbell {
  UniqueFd ringer;  // stays with the side that rings; receives nothing
  UniqueFd waiter;  // goes to the side that waits: readable after a ring
};

// Creates a doorbell of two connected sockets.
//
// Errors  E_LIMIT  no descriptor is left; names the errno.
absl::StatusOr<SocketDoorbell> MakeSocketDoorbell();

// Wakes the waiter on the other end of `ringer`. Never blocks, not even if the other process misbehaves.
void RingSocketDoorbell(int ringer);

// Discards every ring so far. Never blocks.
void DrainSocketDoorbell(int waiter);

}  // namespace forebay::protocol
