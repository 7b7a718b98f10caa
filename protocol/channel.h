// SPDX-License-Identifier: Apache-2.0
// Commands one way, completions the other: the seam between a session's client and the daemon. In
// production a pair of rings in shared memory with a doorbell each way; in tests also a fake
// (tests/support/fake_channel.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/wire.h"

namespace forebay::protocol {

// The client's end of a channel.
//
// Sleeping   `PrepareSleep()`; if true: poll wait_fd() for input (and any other descriptors), then
//            `EndSleep()`; then Receive() until it returns nothing. A wake-up may find nothing.
// Threads    One at a time.
// Limits     Nothing blocks. A command counts as in flight until its completion was received;
//            kRingEntries at most.
class ClientChannel {
 public:
  virtual ~ClientChannel() = default;

  // Sends a command and wakes a sleeping daemon. Returns false, and sends nothing, if kRingEntries commands are in flight.
  //
  // Errors  E_RING  the other end wrote impossible indices; the channel is useless from now on.
  virtual absl::StatusOr<bool> Send(const Command& command) = 0;

  // Returns the next completion, or nothing.
  //
  // Errors  those of Send.
  //         E_FENCED  the daemon has closed the channel, and all completions were received; state() tells how it closed.
  virtual absl::StatusOr<std::optional<Completion>> Receive() = 0;

  // Returns true if no completion has arrived: the next completion, or the close, will make wait_fd() readable. Errors as
  // Receive.
  virtual absl::StatusOr<bool> PrepareSleep() = 0;
  // Drains wait_fd(). To be called after a PrepareSleep() that returned true.
  virtual void EndSleep() = 0;

  virtual int wait_fd() const = 0;

  // State of the session that the daemon wrote last.
  virtual ChannelState state() const = 0;
};

// The daemon's end of a channel. Every word of the client is checked; an error ends the session.
//
// Threads    One at a time.
// Limits     Nothing blocks.
class ServerChannel {
 public:
  virtual ~ServerChannel() = default;

  // Returns the next command, or nothing.
  //
  // Errors  E_RING  impossible indices, or more than kRingEntries commands whose completions were
  //         not received.
  virtual absl::StatusOr<std::optional<Command>> Receive() = 0;

  // Answers one received command, and wakes a sleeping client. The ring always has room for the answer. Errors as Receive.
  virtual absl::Status Send(const Completion& completion) = 0;

  // Ends the channel as kEnded or kRestarting. The client sees the end after the last completion. No call of Send may follow.
  virtual void Close(ChannelState state) = 0;

  // Same as PrepareSleep, EndSleep and wait_fd of ClientChannel, except that the waiter on wait_fd() drains it (the loop's
  // IoEngine).
  virtual absl::StatusOr<bool> PrepareSleep() = 0;
  virtual void EndSleep() = 0;
  virtual int wait_fd() const = 0;
};

// Descriptors and memory of one end of a channel, borrowed. They must outlive the channel.
struct RingChannelOptions {
  RingMemory* ring = nullptr;
  // An eventfd that the client writes and the daemon waits on; the daemon never writes it.
  int command_doorbell_fd = -1;
  // An end of a SocketDoorbell: the ringer for the daemon, the waiter for the client.
  int completion_doorbell_fd = -1;
};

// Opens the client's end.
//
// Errors  E_RING  the header is not that of this version.
absl::StatusOr<std::unique_ptr<ClientChannel>> MakeRingClientChannel(
    const RingChannelOptions& options);

// Opens the daemon's end. The daemon formats the ring itself (FormatRing), so the header is not checked.
std::unique_ptr<ServerChannel> MakeRingServerChannel(const RingChannelOptions& options);

}  // namespace forebay::protocol
