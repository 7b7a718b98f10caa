// SPDX-License-Identifier: Apache-2.0
// Leases of a job's sessions on the weights of partitions.
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
#include "daemon/core/base/limits.h"

namespace forebay::daemon {

// While a session has a lease on a partition, the partition's weights do not change: their update waits.
// JobSessions::OnLeaseTimeExpired ends a reader that holds a lease for too long.
//
// Recorded leases of a killed daemon belong to no session until their rank attaches. Such a lease prevents the eviction of a
// copy from the weights cache. It does not delay an update: the rank had no lease when a step was decided, so the step has done
// all its work on the leased partition.
class LeaseTable {
 public:
  // `recorded`: leases from the record of the previous daemon. They belong to no session.
  LeaseTable(ActionSink& actions, JobId job, const std::vector<KeptLease>& recorded = {});

  // Errors  E_LIMIT  the session has kLeasesPerSessionMax leases.
  absl::StatusOr<uint64_t> Acquire(SessionId session, uint32_t partition);

  // `session` 0: a lease that belongs to no session.
  //
  // Errors  E_LEASE  the lease is not of this session, or was released before.
  absl::Status Release(SessionId session, uint64_t lease);

  void DropAll(SessionId session);

  // Adds a lease to the job's record. `rank`: the rank of its session.
  void Record(uint64_t lease, uint32_t rank, uint64_t offset_bytes);
  std::vector<KeptLease> recorded() const;
  uint64_t count_recorded() const { return recorded_; }
  // Gives the leases of a rank that are in `held` to the session with which the rank has attached. Ends the rank's other
  // leases. Returns the number of leases that the session got.
  uint32_t GiveTo(SessionId session, uint32_t rank, std::span<const uint64_t> held);
  // Ends the leases of a reconnected session that are not in `held`. Returns the number of leases that the session still has.
  uint32_t KeepOnly(SessionId session, std::span<const uint64_t> held);
  // Takes recorded leases from a session that has ended before its client knew of them. These leases belong to no session
  // again.
  void ReturnToNobody(SessionId session);
  // Ends the leases that belong to no session. The client learns this at its next attach (AttachReply.leases).
  void DropOfNobody() { DropAll(kNobody); }
  uint64_t count_of_nobody() const { return count_of(kNobody); }
  uint64_t count_of_sessions() const { return count() - count_of_nobody(); }

  bool IsLeased(uint32_t partition) const { return partition_counts_.contains(partition); }
  bool IsLeasedBySession(uint32_t partition) const;
  // Returns the partitions on which the session has leases, ascending and without repetition.
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
  std::pmr::map<uint32_t, uint64_t> partition_counts_;  // leases of each leased partition
  uint64_t recorded_ = 0;
};

}  // namespace forebay::daemon
