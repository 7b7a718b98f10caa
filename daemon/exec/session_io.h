// SPDX-License-Identifier: Apache-2.0
// The executor's half of one session: its arenas, doorbells and channel. The rules of a session are in
// the state machine.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <memory_resource>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/arena_registry.h"
#include "protocol/channel.h"
#include "protocol/doorbell.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// Arenas of a session, created on a worker. Their destructors free the pages even if a process still has the arenas mapped: a
// client cannot hold memory of the node after its session.
struct SessionMemory {
  // Gradient arena, which includes the step region.
  ArenaRegistry::Arena grad;
  // Arena of the ring: one RingMemory.
  ArenaRegistry::Arena ring;
};

// Options of the gradient arena of a session. `rank`: -1 for a reader.
pinned_mem::ArenaOptions GradientOptions(const ArenaPolicy& policy, const std::string& job,
                                         int32_t rank, uint64_t bytes);

struct SessionMemoryOptions {
  std::string job;
  int32_t rank = 0;  // -1: a reader
  uint64_t grad_bytes = 0;
  // Gradient arena that the session continues to use. Null: a new arena is created.
  ArenaRegistry::Arena grad = {};
  ArenaPolicy arenas = {};
};

// Creates the arenas of a session. Blocks. Errors are those of PinnedArena::Create; after an error no arena remains.
absl::StatusOr<SessionMemory> MakeSessionMemory(const SessionMemoryOptions& options);

// Descriptors for a client, which is not trusted with them. The daemon shares an open file description with the client only for
// `command_doorbell`, which the daemon only drains (with RWF_NOWAIT).
struct SessionFds {
  // Read-only descriptor of the weights.
  protocol::UniqueFd weights;
  protocol::UniqueFd grad;
  protocol::UniqueFd ring;
  protocol::UniqueFd command_doorbell;
  // SocketDoorbell::waiter of the completion doorbell.
  protocol::UniqueFd completion_doorbell;
  // Read-only descriptor of the extra_state. Invalid if no step has committed any extra_state.
  protocol::UniqueFd extra_state;
};

// Threads  The loop thread.
class SessionIo {
 public:
  static constexpr size_t kErrorsKeptMax = 64;

  // Formats the ring for a client that speaks this protocol, and makes the doorbells.
  //
  // Errors  E_LIMIT  the process cannot open more descriptors.
  static absl::StatusOr<std::unique_ptr<SessionIo>> Create(SessionMemory memory,
                                                           uint32_t protocol_version);

  protocol::ServerChannel& channel() { return *channel_; }
  const ArenaRegistry::Arena& grad() const { return memory_.grad; }
  const ArenaRegistry::Arena& ring() const { return memory_.ring; }

  // Returns the descriptors of a session without `weights` and `extra_state`, which the caller adds.
  //
  // Errors  E_LIMIT  the process cannot open more descriptors.
  absl::StatusOr<SessionFds> MakeClientFds() const;

  // Copies a StepRequest and its HyperParams, reading each byte once. Copies only as many HyperParams as `length_bytes` has
  // room for. `memory` allocates the lists.
  StepRequestCopied CopyRequest(const CopyStepRequest& action,
                                std::pmr::memory_resource* memory) const;

  void KeepError(uint64_t tag, absl::Status status);
  absl::Status Explain(uint64_t tag) const;  // OK if no error with this tag is stored

 private:
  SessionIo() = default;

  SessionMemory memory_;
  protocol::UniqueFd command_doorbell_;
  protocol::SocketDoorbell completion_doorbell_;
  std::unique_ptr<protocol::ServerChannel> channel_;
  std::deque<std::pair<uint64_t, absl::Status>> errors_;
};

// Returns E_LIMIT with `what`, the text of errno and the limit to raise.
absl::Status NoDescriptor(const char* what);

}  // namespace forebay::daemon
