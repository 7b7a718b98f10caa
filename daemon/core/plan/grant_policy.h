// SPDX-License-Identifier: Apache-2.0
// Limits the DRAM and swap that one job may be granted: a share of the DRAM limit, and the remaining quota of the job's owner.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/node_options.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// DRAM and swap that the other jobs of an owner hold.
struct OwnerUse {
  uint32_t uid = 0;
  uint64_t dram_bytes = 0;
  uint64_t swap_bytes = 0;
};

// Limits each job to NodeOptions::job_percent of the DRAM limit and to its owner's remaining quotas. Root has no quota. The
// policy does not decide which of several waiting jobs is next.
class GrantPolicy {
 public:
  GrantPolicy(const NodeOptions& options, const OwnerUse& owner);

  // Returns the maximum bytes of a job's arenas, tables and states. UINT64_MAX if only the node's limit applies.
  uint64_t dram_bytes() const { return dram_bytes_; }

  // Plans a job with PlanJob, within the bytes that the job may be granted.
  //
  // Errors  as PlanJob; E_DRAM_LIMIT, E_SWAP_NOSPC: the job exceeds its share or a quota. Names the bytes that the owner's
  //         jobs hold, the option, and for a new job the settings that it may lower (WithAdvice).
  absl::StatusOr<MemoryPlan> Plan(const protocol::Layout& layout, const SessionRequest& request,
                                  const NodeUse& use) const;
  // Returns E_DRAM_LIMIT if `job_bytes` is more than the job may be granted. `what` begins the error text, such as "the reader
  // needs ...".
  absl::Status Check(uint64_t job_bytes, const std::string& what) const;

 private:
  absl::StatusOr<MemoryPlan> PlanGranted(const protocol::Layout& layout,
                                         const SessionRequest& request, const NodeUse& use) const;
  absl::Status DramError(const std::string& what) const;

  const NodeOptions& options_;
  OwnerUse owner_;
  uint64_t dram_bytes_ = UINT64_MAX;
  bool is_by_quota_ = false;
};

}  // namespace forebay::daemon
