// SPDX-License-Identifier: Apache-2.0
// How much of the node one job may be granted: a share of the DRAM limit, and what is left of its owner's quota.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// What the other jobs of an owner hold.
struct OwnerUse {
  uint32_t uid = 0;
  uint64_t dram_bytes = 0;
  uint64_t swap_bytes = 0;
};

// Jobs come first in their order, each up to NodeOptions::job_percent of the limit and to its owner's quota.
// Where several wait for room, nothing here says who is next. Quotas are not root's.
class GrantPolicy {
 public:
  GrantPolicy(const NodeOptions& options, const OwnerUse& owner);

  // Of arenas, tables and states of a job. UINT64_MAX: nothing but the limit says how much.
  uint64_t dram_bytes() const { return dram_bytes_; }

  // PlanJob, with which the job takes no more than it may.
  //
  // Errors  as PlanJob; E_DRAM_LIMIT, E_SWAP_NOSPC: the share or a quota, what the owner holds, and the key. Of a new
  //         job with what it may lower (WithAdvice).
  absl::StatusOr<MemoryPlan> Plan(const protocol::Layout& layout, const SessionRequest& request,
                                  const NodeUse& use) const;
  // E_DRAM_LIMIT where a job of so many bytes is beyond what it may take. `what`: "the reader needs ...".
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
