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

// Arenas of a session, made on a worker. Destroying them frees their pages, whoever still has them
// mapped: a session cannot keep memory of the node after its end.
struct SessionMemory {
  // With the step region.
  ArenaRegistry::Arena grad;
  // One RingMemory.
  ArenaRegistry::Arena ring;
};

// `rank`: -1 of a reader.
pinned_mem::ArenaOptions GradientOptions(const ArenaPolicy& policy, const std::string& job,
                                         int32_t rank, uint64_t bytes);

struct SessionMemoryOptions {
  std::string job;
  int32_t rank = 0;  // -1: a reader
  uint64_t grad_bytes = 0;
  // arena that the session continues to use; null: a new one is made
  ArenaRegistry::Arena grad = {};
  ArenaPolicy arenas = {};
};

// Blocks. Errors of PinnedArena::Create; nothing is left behind.
absl::StatusOr<SessionMemory> MakeSessionMemory(const SessionMemoryOptions& options);

// Descriptors for a client, which may do with them what it likes: the daemon keeps no open file
// description of them but that of `command_doorbell`, which it only drains (with RWF_NOWAIT).
struct SessionFds {
  // Read-only.
  protocol::UniqueFd weights;
  protocol::UniqueFd grad;
  protocol::UniqueFd ring;
  protocol::UniqueFd command_doorbell;
  // The waiter.
  protocol::UniqueFd completion_doorbell;
  // Read-only; not valid if no step has committed one.
  protocol::UniqueFd extra_state;
};

// Threads  The loop thread.
class SessionIo {
 public:
  static constexpr size_t kErrorsKeptMax = 64;

  // Formats the ring for a client that speaks this protocol, and makes the doorbells.
  //
  // Errors  E_LIMIT  no descriptor is left.
  static absl::StatusOr<std::unique_ptr<SessionIo>> Create(SessionMemory memory,
                                                           uint32_t protocol_version);

  protocol::ServerChannel& channel() { return *channel_; }
  const ArenaRegistry::Arena& grad() const { return memory_.grad; }
  const ArenaRegistry::Arena& ring() const { return memory_.ring; }

  // All but `weights` and `extra_state`, which the caller adds.
  //
  // Errors  E_LIMIT  no descriptor is left.
  absl::StatusOr<SessionFds> MakeClientFds() const;

  // Copies a StepRequest and as many HyperParams as it says and `length_bytes` has room for, each
  // once; lists come from `memory`.
  StepRequestCopied CopyRequest(const CopyStepRequest& action,
                                std::pmr::memory_resource* memory) const;

  void KeepError(uint64_t tag, absl::Status status);
  absl::Status Explain(uint64_t tag) const;  // OK where no error of this tag is kept

 private:
  SessionIo() = default;

  SessionMemory memory_;
  protocol::UniqueFd command_doorbell_;
  protocol::SocketDoorbell completion_doorbell_;
  std::unique_ptr<protocol::ServerChannel> channel_;
  std::deque<std::pair<uint64_t, absl::Status>> errors_;
};

// E_LIMIT: `what` and errno; the limit to raise.
absl::Status NoDescriptor(const char* what);

}  // namespace forebay::daemon
