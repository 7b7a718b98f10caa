// SPDX-License-Identifier: Apache-2.0
// Queue of fetches that wait until a lease may be granted.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/sessions/session.h"
#include "daemon/core/step/step.h"
#include "daemon/core/update/state_access.h"
#include "daemon/core/update/weights_cache.h"
#include "protocol/wire.h"

namespace forebay::daemon {

class FetchQueue {
 public:
  FetchQueue(const JobSpec& spec, JobTasks& io, Step& step, const StateAccess& access,
             WeightsCache& weights, LeaseTable& leases)
      : spec_(spec), io_(io), step_(step), access_(access), weights_(weights), leases_(leases) {}

  void Handle(const Session& session, const protocol::Command& command);
  void Serve();  // answers the fetches that the step allows now
  // Drops the leases of ranks that have not returned since the daemon was killed, if a fetch still needs their room after the
  // time that it may wait.
  void OnLeaseTimeExpired();
  void Answer(SessionId session, const absl::Status& status);
  uint64_t unanswered(SessionId session) const;

 private:
  struct Waiting {
    CommandId command;
    std::optional<uint32_t> rank;  // none: a reader's
    uint32_t partition = 0;
    bool leases = true;
  };

  const JobSpec& spec_;
  JobTasks& io_;
  Step& step_;
  const StateAccess& access_;
  WeightsCache& weights_;
  LeaseTable& leases_;
  absl::StatusOr<uint64_t> Lease(const Waiting& fetch, uint64_t offset_bytes);
  // The answer to a fetch, if its weights may be read and are in DRAM; nothing: the fetch waits.
  std::optional<absl::StatusOr<uint64_t>> OffsetOf(const Waiting& fetch);

  std::vector<Waiting> waiting_;
  bool waits_for_nobody_ = false;  // the timer runs
};

}  // namespace forebay::daemon
