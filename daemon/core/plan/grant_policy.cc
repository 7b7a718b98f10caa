// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/plan/grant_policy.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/core/plan/plan_advice.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

GrantPolicy::GrantPolicy(const NodeOptions& options, const OwnerUse& owner)
    : options_(options), owner_(owner) {
  if (options.job_percent < 100) {
    dram_bytes_ = options.dram_limit_bytes / 100 * options.job_percent;
  }
  const uint64_t quota = options.uid_dram_bytes;
  if (quota == 0 || owner.uid == 0) return;
  const uint64_t left = quota - std::min(owner.dram_bytes, quota);
  is_by_quota_ = left < dram_bytes_;
  dram_bytes_ = std::min(dram_bytes_, left);
}

absl::Status GrantPolicy::DramError(const std::string& what) const {
  if (is_by_quota_) {
    return MakeError(
        ErrorId::kDramLimit,
        absl::StrCat("user ", owner_.uid, " may take ", options_.uid_dram_bytes,
                     " bytes of DRAM (dram.uid_quota), of which its other jobs hold ",
                     owner_.dram_bytes, ", so that ", dram_bytes_, " are left: ", what),
        "raise dram.uid_quota, or delete other jobs of this user: forebay jobs");
  }
  return MakeError(
      ErrorId::kDramLimit,
      absl::StrCat("a job may take ", dram_bytes_, " bytes of DRAM, ", options_.job_percent,
                   " % of the limit of ", options_.dram_limit_bytes, " (dram.job_percent): ", what),
      "raise dram.job_percent or dram.limit");
}

absl::Status GrantPolicy::Check(uint64_t job_bytes, const std::string& what) const {
  return job_bytes <= dram_bytes_ ? absl::OkStatus() : DramError(what);
}

absl::StatusOr<MemoryPlan> GrantPolicy::Plan(const protocol::Layout& layout,
                                             const SessionRequest& request,
                                             const NodeUse& use) const {
  absl::StatusOr<MemoryPlan> plan = PlanGranted(layout, request, use);
  if (plan.ok() || use.recovered != nullptr) return plan;
  return WithAdvice(plan.status(), layout, request, options_, use,
                    [&](const protocol::Layout& other_layout, const SessionRequest& other_request) {
                      return PlanGranted(other_layout, other_request, use).ok();
                    });
}

absl::StatusOr<MemoryPlan> GrantPolicy::PlanGranted(const protocol::Layout& layout,
                                                    const SessionRequest& request,
                                                    const NodeUse& use) const {
  // Lowers the limit to the bytes that the job may be granted. Lowers the movable bytes too, because the job can use no more of
  // them.
  NodeOptions limited = options_;
  NodeUse limited_use = use;
  const uint64_t taken = TakenBytes(options_, use);
  if (dram_bytes_ < options_.dram_limit_bytes) {
    limited.dram_limit_bytes = std::min(options_.dram_limit_bytes, taken + dram_bytes_);
    limited_use.movable_bytes =
        std::min(use.movable_bytes, taken + dram_bytes_ - limited.dram_limit_bytes);
  }
  absl::StatusOr<MemoryPlan> plan = PlanJob(layout, request, limited, limited_use);
  if (!plan.ok()) {
    const bool is_of_grant = protocol::IdOf(plan.status()) == ErrorId::kDramLimit &&
                             PlanJob(layout, request, options_, use).ok();
    return is_of_grant ? DramError(std::string(plan.status().message())) : plan.status();
  }
  const uint64_t quota = options_.uid_swap_bytes;
  const uint64_t swap_bytes = plan->swap_bytes();
  if (quota == 0 || owner_.uid == 0 || owner_.swap_bytes + swap_bytes <= quota) return plan;
  return MakeError(
      ErrorId::kSwapNospc,
      absl::StrCat("user ", owner_.uid, " may take ", quota,
                   " bytes of swap (swap.uid_quota), of which its other jobs hold ",
                   owner_.swap_bytes, ": the job needs ", swap_bytes),
      "raise swap.uid_quota or dram.limit, or delete other jobs of this user: forebay jobs");
}

}  // namespace forebay::daemon
