// Read leases of a job's sessions.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/events.h"
#include "daemon/core/job_tasks.h"

namespace forebay::daemon {

// While a session has a lease on a partition, its weights do not change: their update waits. A
// reader that holds one for too long is ended by Job::OnLeaseTimeExpired.
class LeaseTable {
 public:
  explicit LeaseTable(ActionSink& actions)
      : actions_(actions), leases_(actions.memory()), partition_counts_(actions.memory()) {}

  // Errors  E_LIMIT  the session has kLeasesPerSessionMax leases.
  absl::StatusOr<uint64_t> Acquire(SessionId session, uint32_t partition);

  // Errors  E_LEASE  not a lease of this session, or released before.
  absl::Status Release(SessionId session, uint64_t lease);

  void DropAll(SessionId session);

  bool IsLeased(uint32_t partition) const { return partition_counts_.contains(partition); }
  // Partitions that the session has leases on, ascending, each once.
  std::pmr::vector<uint32_t> PartitionsOf(SessionId session) const;

  uint64_t count() const { return leases_.size(); }
  uint64_t count_of(SessionId session) const;

 private:
  struct Lease {
    SessionId session = 0;
    uint32_t partition = 0;
  };
  using Leases = std::pmr::map<uint64_t, Lease>;

  Leases::iterator Erase(Leases::iterator lease);

  ActionSink& actions_;
  Leases leases_;
  std::map<SessionId, uint64_t> session_counts_;
  std::pmr::map<uint32_t, uint64_t> partition_counts_;  // only those that are leased
};

}  // namespace forebay::daemon
