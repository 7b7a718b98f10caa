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

// The client's end.
//
// Sleeping   `PrepareSleep()`; if true: poll wait_fd() for input (with whatever else), then
//            `EndSleep()`; then Receive() until nothing is there. A wake-up may be empty.
// Threads    One at a time.
// Limits     Nothing blocks. A command counts as in flight until its completion was received;
//            kRingEntries at most.
class ClientChannel {
 public:
  virtual ~ClientChannel() = default;

  // False, and nothing sent, where kRingEntries commands are in flight. Wakes a sleeping daemon.
  //
  // Errors  E_RING  the other end wrote impossible indices; the channel is useless from now on.
  virtual absl::StatusOr<bool> Send(const Command& command) = 0;

  // The next completion, or nothing.
  //
  // Errors  those of Send.
  //         E_FENCED  the daemon has closed the channel, and all that it sent was received; state() says how.
  virtual absl::StatusOr<std::optional<Completion>> Receive() = 0;

  // True: nothing is there and the next completion, or the close, will make wait_fd() readable.
  // Errors as Receive.
  virtual absl::StatusOr<bool> PrepareSleep() = 0;
  // After a PrepareSleep() that was true; drains wait_fd().
  virtual void EndSleep() = 0;

  virtual int wait_fd() const = 0;

  // By the daemon's last word.
  virtual ChannelState state() const = 0;
};

// The daemon's end. Every word of the client is checked; an error ends the session.
//
// Threads    One at a time.
// Limits     Nothing blocks.
class ServerChannel {
 public:
  virtual ~ServerChannel() = default;

  // The next command, or nothing.
  //
  // Errors  E_RING  impossible indices, or more than kRingEntries commands whose completions were
  //         not received.
  virtual absl::StatusOr<std::optional<Command>> Receive() = 0;

  // Answers one received command; there is always room for it. Wakes the client where it sleeps.
  // Errors as Receive.
  virtual absl::Status Send(const Completion& completion) = 0;

  // Ends the channel, kEnded or kRestarting: the client sees it after the last completion; nothing may be
  // sent any more.
  virtual void Close(ChannelState state) = 0;

  // Same as PrepareSleep, EndSleep and wait_fd of ClientChannel, except that whoever waits on wait_fd() drains it (the loop's
  // IoEngine).
  virtual absl::StatusOr<bool> PrepareSleep() = 0;
  virtual void EndSleep() = 0;
  virtual int wait_fd() const = 0;
};

// Ends of a RingMemory. Memory and descriptors are borrowed and must outlive the channel.
struct RingChannelOptions {
  RingMemory* ring = nullptr;
  // An eventfd that the client writes and the daemon waits on; the daemon never writes it.
  int command_doorbell_fd = -1;
  // An end of a SocketDoorbell: the ringer for the daemon, the waiter for the client.
  int completion_doorbell_fd = -1;
};

// Errors  E_RING  the header is not that of this version.
absl::StatusOr<std::unique_ptr<ClientChannel>> MakeRingClientChannel(
    const RingChannelOptions& options);

// The daemon formats the ring itself (FormatRing); the header is not checked.
std::unique_ptr<ServerChannel> MakeRingServerChannel(const RingChannelOptions& options);

}  // namespace forebay::protocol
