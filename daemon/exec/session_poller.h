// SPDX-License-Identifier: Apache-2.0
// Reads the commands of sessions from their rings and turns them into events.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "nvme/io/io_engine.h"
#include "protocol/channel.h"

namespace forebay::daemon {

// Threads  The loop thread. A callback may add and remove sessions.
class SessionPoller {
 public:
  static constexpr uint64_t kTokenTag = uint64_t{0x5E} << 56;  // token of doorbell watches
  // Most commands of a session in a turn.
  static constexpr int kCommandsPerTurn = 64;

  struct Callbacks {
    absl::AnyInvocable<void(CommandArrived)> arrived;
    // The client wrote impossible indices.
    absl::AnyInvocable<void(SessionId, const absl::Status&)> broken;
  };

  // `engine` outlives the poller.
  SessionPoller(nvme::IoEngine& engine, Callbacks callbacks);

  // Starts to poll `channel`, which must live until Remove(). Errors of IoEngine::WatchEventFd.
  absl::Status Add(SessionId id, protocol::ServerChannel& channel);
  bool Contains(SessionId id) const { return sessions_.contains(id); }
  // Stops reading commands of the session. Ignores an unknown session.
  void Remove(SessionId id);

  // Handles a completion of a doorbell watch. Wakes the session whose doorbell rang.
  void OnCompletion(const nvme::Completion& completion);

  // Reads commands of every session that is awake. A session without commands goes to sleep. Returns true if more commands
  // wait.
  bool Poll();

 private:
  struct Session {
    protocol::ServerChannel* channel = nullptr;
    bool asleep = false;  // the client rings the doorbell for its next command
  };

  bool PollOne(SessionId id);

  nvme::IoEngine& engine_;
  Callbacks callbacks_;
  std::map<SessionId, Session> sessions_;
  std::vector<SessionId> polled_;
};

}  // namespace forebay::daemon
