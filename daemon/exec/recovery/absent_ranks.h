// SPDX-License-Identifier: Apache-2.0
// Ranks that had a session, with this daemon or an earlier one, and have none now.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/recovery/stored_descriptors.h"
#include "daemon/exec/session_table.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

struct AbsentRank {
  protocol::UniqueFd process;  // a pidfd; invalid for a rank of another node
  bool has_detached = false;
  bool is_of_before = true;  // the session of the rank was with another daemon
  // MonotonicNs until which the job waits for a rank of another node; 0: no attached rank waits for it.
  uint64_t ends_ns = 0;
};

// The store has the process of each attached rank and of each absent rank, as a pidfd, so that the next daemon notices a rank
// that ends while no daemon runs.
//
// States of a rank:
//
//   attached   not in this table; its process is stored under the name of a rank that has not detached
//   absent     in this table: its session ended without a detach, and its job may wait for it
//   detached   in this table (has_detached): it does not return
//   unknown    the job knows no process of the rank
//
// Invariants  1. A rank leaves the table when it attaches again, and when any rank of its job attaches from scratch.
//             2. A job has no absent ranks once its last rank has detached, or once it is freed.
//
// Without a store, only ranks of an earlier daemon are in the table.
class AbsentRanks {
 public:
  // The arguments outlive this object.
  AbsentRanks(StoredDescriptors& store, const SessionTable& sessions, const JobMemoryTable& jobs)
      : store_(store), sessions_(sessions), jobs_(jobs) {}

  // Adds a rank of the previous daemon.
  void Add(JobId job, uint32_t rank, AbsentRank absent);
  // Handle the attach and the end of a rank's session. OnEnded() may take the session's process.
  void OnAttached(const ClientSession& session);
  void OnEnded(ClientSession& session, bool is_of_old_generation);
  // Drops the absent ranks of the job. `rank`: the only rank to drop; nullopt: all ranks.
  void Drop(JobId job, std::optional<uint32_t> rank = std::nullopt);

  bool HasDetached(JobId job, uint32_t rank) const;
  // Looks for absent ranks of an earlier daemon that have ended, if their job has attached ranks. `next_ns`: time of the next
  // call.
  struct Ended {
    std::vector<RankEnded> ranks = {};
    uint64_t next_ns = UINT64_MAX;
  };
  Ended Look();

 private:
  void StoreProcess(const ClientSession& session);

  StoredDescriptors& store_;
  const SessionTable& sessions_;
  const JobMemoryTable& jobs_;
  std::map<std::pair<JobId, uint32_t>, AbsentRank> absent_;  // by job and rank
  uint64_t next_look_ns_ = 0;
};

}  // namespace forebay::daemon
