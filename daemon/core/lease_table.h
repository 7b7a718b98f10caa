// Read leases of a job's sessions.
#pragma once

#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/events.h"
#include "daemon/core/job_io.h"

namespace forebay::daemon {

class LeaseTable {
 public:
  explicit LeaseTable(ActionSink& actions) : actions_(actions) {}

  // Errors  E_LIMIT  the session has kLeasesPerSessionMax leases.
  absl::StatusOr<uint64_t> Acquire(SessionId session, uint32_t group);

  // Errors  E_LEASE  not a lease of this session, or released before.
  absl::Status Release(SessionId session, uint64_t lease);

  void DropAll(SessionId session);
  uint64_t count() const { return leases_.size(); }
  uint64_t count_of(SessionId session) const;

 private:
  struct Lease {
    SessionId session = 0;
    uint32_t group = 0;
  };

  ActionSink& actions_;
  std::map<uint64_t, Lease> leases_;
  std::map<SessionId, uint64_t> counts_;
};

}  // namespace forebay::daemon
