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
  static constexpr int kCommandsPerTurn = 64;                  // commands of one session

  struct Callbacks {
    absl::AnyInvocable<void(CommandArrived)> arrived;
    // The client wrote impossible indices.
    absl::AnyInvocable<void(SessionId, const absl::Status&)> broken;
  };

  // `engine` outlives the poller.
  SessionPoller(nvme::IoEngine& engine, Callbacks callbacks);

  // Polls `channel`, which outlives the session here. Errors of IoEngine::WatchEventFd.
  absl::Status Add(SessionId id, protocol::ServerChannel& channel);
  bool Contains(SessionId id) const { return sessions_.contains(id); }
  // Reads nothing more of it; unknown ones are ignored.
  void Remove(SessionId id);

  // A doorbell may have rung.
  void OnCompletion(const nvme::Completion& completion);

  // Reads commands of every session that is awake; those without any go to sleep. True: more are
  // waiting.
  bool Poll();

 private:
  struct Session {
    protocol::ServerChannel* channel = nullptr;
    bool asleep = false;  // its doorbell will ring
  };

  bool PollOne(SessionId id);

  nvme::IoEngine& engine_;
  Callbacks callbacks_;
  std::map<SessionId, Session> sessions_;
  std::vector<SessionId> polled_;
};

}  // namespace forebay::daemon
