// SPDX-License-Identifier: Apache-2.0
// One session of a client with a job, as the state machine knows it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/wire.h"

namespace forebay::daemon {

struct Session {
  enum class State : uint8_t {
    kWaiting,   // waits for the answer to its attach
    kAttached,  // answered
    kEnded,     // waits for its tasks to end
  };

  SessionId id = 0;
  uint32_t uid = 0;
  bool reader = false;  // has no rank
  uint32_t rank = 0;
  SessionRequest request;
  std::vector<uint64_t> held_leases;  // AttachRequested::held_leases
  State state = State::kWaiting;
  bool memory_asked = false;
  bool memory_made = false;
  bool mapped = false;   // commands of the session are accepted
  absl::Status fence;    // answer to every command, unless OK
  bool is_lost = false;  // the end of this session has begun a generation

  uint64_t newest_before = 0;  // AttachRequested::newest_tag
  bool is_away = false;        // disconnected (EndCause::kDisconnected)

  // The kStep or kDecide command whose body is being copied.
  std::optional<protocol::Command> step_being_copied;

  absl::Status close_reason;

  bool WasSentAgain(const protocol::Command& command) const { return command.tag <= newest_before; }
  // True if the session is attached and belongs to the job's newest generation.
  bool is_current() const { return state == State::kAttached && fence.ok(); }
  bool IsOf(uint32_t one_rank) const { return !reader && rank == one_rank; }
  CommandId IdOf(const protocol::Command& command) const {
    return {.session = id, .tag = command.tag, .op = command.op};
  }
};

}  // namespace forebay::daemon
