// SPDX-License-Identifier: Apache-2.0
// Read leases of a job's sessions.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"

namespace forebay::daemon {

// While a session has a lease on a partition, the partition's weights do not change: their update waits.
// Job::OnLeaseTimeExpired ends a reader that holds a lease for too long.
//
// If the daemon before was killed, its recorded leases belong to no session until their rank attaches. Such a lease holds a
// copy in its place in the weights cache. It does not delay an update: its rank had no lease when a step was decided, so the
// step has done all its work on the leased partition.
class LeaseTable {
 public:
  LeaseTable(ActionSink& actions, JobId job)
      : actions_(actions),
        job_(job),
        leases_(actions.memory()),
        partition_counts_(actions.memory()) {}

  // Errors  E_LIMIT  the session has kLeasesPerSessionMax leases.
  absl::StatusOr<uint64_t> Acquire(SessionId session, uint32_t partition);

  // Errors  E_LEASE  not a lease of this session, or released before.
  absl::Status Release(SessionId session, uint64_t lease);

  void DropAll(SessionId session);

  // Adds a lease to the job's record. `rank`: the rank of its session.
  void Record(uint64_t lease, uint32_t rank, uint64_t offset_bytes);
  std::vector<KeptLease> recorded() const;
  uint64_t count_recorded() const { return recorded_; }
  // Adds a lease from the record of the daemon before. It belongs to no session.
  void Adopt(const KeptLease& lease);
  // The rank has attached. The session gets the rank's leases that are in `held`; the rank's other leases end. Returns the
  // number of leases that the session got.
  uint32_t GiveTo(SessionId session, uint32_t rank, std::span<const uint64_t> held);
  // The session has reconnected. Its leases that are not in `held` end. Returns the number that it still has.
  uint32_t KeepOnly(SessionId session, std::span<const uint64_t> held);
  // The session has ended before its client knew of the leases that it was given: recorded leases belong to no session again.
  void ReturnToNobody(SessionId session);
  // Ends the leases that belong to no session. A client that had one sees that at its next attach (AttachReply.leases).
  void DropOfNobody() { DropAll(kNobody); }
  uint64_t count_of_nobody() const { return count_of(kNobody); }
  uint64_t count_of_sessions() const { return count() - count_of_nobody(); }

  bool IsLeased(uint32_t partition) const { return partition_counts_.contains(partition); }
  bool IsLeasedBySession(uint32_t partition) const;
  // Partitions that the session has leases on, ascending, each once.
  std::pmr::vector<uint32_t> PartitionsOf(SessionId session) const;

  uint64_t count() const { return leases_.size(); }
  uint64_t count_of(SessionId session) const;

 private:
  static constexpr SessionId kNobody = 0;

  struct Lease {
    SessionId session = 0;
    uint32_t partition = 0;
    std::optional<KeptLease> recorded = {};
  };
  using Leases = std::pmr::map<uint64_t, Lease>;

  Leases::iterator Erase(Leases::iterator lease);
  void Move(Lease& lease, SessionId to);

  ActionSink& actions_;
  const JobId job_;
  Leases leases_;
  std::map<SessionId, uint64_t> session_counts_;
  std::pmr::map<uint32_t, uint64_t> partition_counts_;  // leased partitions only
  uint64_t recorded_ = 0;
};

}  // namespace forebay::daemon
