// SPDX-License-Identifier: Apache-2.0
// The sessions of all jobs, from the attach of a client to CloseSession.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_name.h"
#include "daemon/exec/arena_registry.h"
#include "daemon/exec/session_io.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// Answer to attach. `fds` and `rpc_calls` are set only if answer.status is OK.
struct AttachResult {
  AnswerAttach answer;
  SessionFds fds;
  std::shared_ptr<std::atomic<uint64_t>> rpc_calls = {};  // calls of the job's sessions
};

// Callbacks of an attach, called on the loop thread. Each callback is called at most once.
struct AttachCallbacks {
  // Not called if the session ends before the answer.
  absl::AnyInvocable<void(AttachResult)> answered;
  // Gets the reason once the session has ended, or once its connection is broken or lost.
  absl::AnyInvocable<void(const absl::Status&)> closed;
};

// States:
//
//   attaching     `job_id` is 0, and `io` is null until CreateSessionMemory has ended
//   attached      the client may map its arenas; the poller reads its commands once it has (`was_mapped`)
//   disconnected  `ends_ns` is set: the connection is lost, and the rank may attach again until then (Reconnects)
//   broken        the client wrote invalid indices: the ring is not used any more, and the session ends
//   stopped       the next daemon continues the session: the ring is not used any more
struct ClientSession {
  AttachRequested request;
  JobName job;
  JobId job_id = 0;
  AttachCallbacks callbacks;
  protocol::UniqueFd process;
  std::unique_ptr<SessionIo> io;
  // Copy of the extra_state of the rank and of rank 0, taken at attach.
  ArenaRegistry::Arena extra_state;
  uint64_t trace_bytes = 0;   // bytes for trace events at the end of the gradient arena
  bool has_detached = false;  // the client has asked to end the session
  bool broken = false;
  bool is_stopped = false;
  std::chrono::nanoseconds wait{};  // `wait` of Executor::Attach()
  uint64_t ends_ns = 0;  // MonotonicNs at which a disconnected session ends; 0: it is connected
  bool was_mapped = false;
  JobId kept_of = 0;     // job whose retained gradient arena the session has; 0: the arena is new
  SessionId number = 0;  // the number by which the client knows the session

  int32_t rank() const { return request.reader ? -1 : static_cast<int32_t>(request.rank); }
  bool IsOf(const JobName& of, uint32_t of_rank) const {
    return job == of && !request.reader && request.rank == of_rank;
  }
  // "rank 3 of job x"
  std::string Who() const;
};

// The error of a session that is over.
absl::Status SessionOver();

// Invariants  1. The key of a session is the number of its first attach. A rank that reconnects gets a newer number.
//             2. At most one session knows its client by a number.
//             3. Of the sessions of a rank, those before the newest one are ending.
//
// Threads  The loop thread.
class SessionTable {
 public:
  static constexpr size_t kEvictedKeptMax = 64;  // reasons of sessions that end

  ClientSession& Add(SessionId id, ClientSession session);
  // Removes the session. `reason`: Explain() returns the reason if it is an error.
  ClientSession Remove(SessionId id, const absl::Status& reason);

  bool empty() const { return sessions_.empty(); }
  const std::map<SessionId, ClientSession>& all() const { return sessions_; }
  ClientSession* Find(SessionId id);  // null if no session has this id
  ClientSession& at(SessionId id) { return sessions_.at(id); }
  // Returns the memory and the channel of a session that has them.
  SessionIo& io(SessionId id);

  // Returns the session whose client knows it by `number`. Returns 0 if no session has that number, or if the number is of an
  // earlier connection.
  SessionId Resolve(SessionId number) const;
  // Executor::Explain().
  absl::Status Explain(SessionId number, uint64_t tag) const;

  // Returns the newest session of a rank, or null if the rank has none.
  const ClientSession* OfRank(const JobName& job, uint32_t rank) const;
  bool HasRanks(JobId job) const;  // true if the job has attached ranks
  // Returns the longest time that a rank of another node may be disconnected; 0: no rank is attached.
  uint64_t RankWaitNs(JobId job) const;
  // Returns the sessions of the job's ranks that have memory, also those that attach again.
  std::vector<SessionId> WithMemory(const JobName& job) const;

 private:
  std::map<SessionId, ClientSession> sessions_;
  std::deque<std::pair<SessionId, absl::Status>> evicted_;  // newest last, at most kEvictedKeptMax
};

}  // namespace forebay::daemon
