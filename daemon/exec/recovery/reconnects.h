// SPDX-License-Identifier: Apache-2.0
// Continues the session of a rank whose connection was lost and that attaches again.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/arena_registry.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/rank_exchange.h"
#include "daemon/exec/session_poller.h"
#include "daemon/exec/session_table.h"
#include "daemon/exec/task_runner.h"

namespace forebay::daemon {

// States of a session that may be disconnected:
//
//   connected     ClientSession::ends_ns is 0, and the client reads the ring
//   disconnected  `ends_ns` is set: nobody reads the ring, and the session ends at `ends_ns`
//   reconnecting  the client is known by its newer number, and a worker creates its new ring. SessionReconnected follows, and
//                 the session is connected. If the ring cannot be created, the session is disconnected.
//
// Invariants  1. Only ranks of another node are disconnected: their gateway has said how long to wait for them.
//             2. The gradient arena stays that of the first attach. A reconnected session has a new ring.
//             3. A session that ends, or is reconnected once more, while its ring is created does not get that ring.
class Reconnects {
 public:
  // `raise` gets SessionEnded and SessionReconnected.
  struct Parts {
    SessionTable& sessions;
    const JobMemoryTable& jobs;
    SessionPoller& poller;
    RankExchange& exchange;
    ArenaRegistry& registry;
    TaskRunner& runner;
    const ArenaPolicy& arenas;
  };
  // `parts` outlive this object.
  Reconnects(Parts parts, std::function<void(Event)> raise)
      : parts_(parts), raise_(std::move(raise)) {}

  static bool MayDisconnect(const ClientSession& session);
  // Returns the session that the request continues: a session of the same rank, run and gradient arena. Returns 0 if no session
  // matches.
  SessionId SessionOf(const AttachRequested& request, const JobName& job) const;
  void Disconnect(SessionId id);
  // Continues the session with the callbacks of `again`, which has the same rank.
  void Begin(SessionId id, ClientSession again);
  // Returns the disconnected sessions whose time has ended at `until_ns`. They are not disconnected any more: the caller ends
  // them. `next_ns`: the time at which the next one ends.
  struct Due {
    std::vector<SessionId> sessions = {};
    uint64_t next_ns = UINT64_MAX;
  };
  Due DrainDue(uint64_t until_ns);

 private:
  void End(SessionReconnected event, SessionId number, absl::StatusOr<SessionMemory> made);

  Parts parts_;
  std::function<void(Event)> raise_;
};

}  // namespace forebay::daemon
