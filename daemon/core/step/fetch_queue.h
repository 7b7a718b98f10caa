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
#include "daemon/core/step/step_parts.h"
#include "daemon/core/update/state_access.h"
#include "daemon/core/update/weights_cache.h"
#include "protocol/wire.h"

namespace forebay::daemon {

class FetchQueue {
 public:
  FetchQueue(StepParts& step, const StateAccess& access, WeightsCache& weights, LeaseTable& leases)
      : step_(step), access_(access), weights_(weights), leases_(leases) {}

  void Handle(const Session& session, const protocol::Command& command);
  void Serve();  // answers the fetches that can be answered now
  // Drops the leases of ranks that have not attached since the previous daemon was killed, if a fetch still needs the DRAM of
  // the leased weights.
  void OnLeaseTimeExpired();
  void Answer(SessionId session, const absl::Status& status);
  uint64_t unanswered(SessionId session) const;

 private:
  struct Waiting {
    CommandId command;
    std::optional<uint32_t> rank;  // nullopt: a reader's fetch
    uint32_t partition = 0;
    bool leases = true;
  };

  bool MayFetch(const Waiting& fetch) const;
  absl::StatusOr<uint64_t> Lease(const Waiting& fetch, uint64_t offset_bytes);
  // Returns the offset of the fetched weights if they may be read and are in DRAM, or the fetch's error. nullopt if the fetch
  // must wait.
  std::optional<absl::StatusOr<uint64_t>> OffsetOf(const Waiting& fetch);

  StepParts& step_;
  const StateAccess& access_;
  WeightsCache& weights_;
  LeaseTable& leases_;
  std::vector<Waiting> waiting_;
  bool waits_for_nobody_ = false;  // the timer of StartLeaseTimer runs
};

}  // namespace forebay::daemon
