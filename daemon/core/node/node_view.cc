// SPDX-License-Identifier: Apache-2.0
// Views and invariants of a node, and plans for attaches.

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/core/node/node_impl.h"
#include "daemon/core/node/node_ledger.h"
#include "daemon/core/plan/attach_check.h"
#include "daemon/core/plan/job_plan.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {
namespace {

std::vector<SwapPathView> ViewPaths(const nvme::SlotMap& swap, const PathTable& paths) {
  std::vector<SwapPathView> views;
  for (uint32_t path = 0; path < swap.paths(); ++path) {
    views.push_back({.used_bytes = swap.used_bytes(path),
                     .share = paths.share(path),
                     .read_rate = paths.rate(path, Direction::kRead),
                     .write_rate = paths.rate(path, Direction::kWrite),
                     .current_read_rate = paths.current_rate(path, Direction::kRead),
                     .current_write_rate = paths.current_rate(path, Direction::kWrite),
                     .marked = paths.is_marked(path)});
  }
  return views;
}

absl::StatusOr<JobPlan> PlanOn(const protocol::Layout& layout, const SessionRequest& session,
                               const NodeOptions& options, const NodeUse& use,
                               const OwnerUse& owner, uint64_t ledger_taken) {
  ASSIGN_OR_RETURN(const MemoryPlan plan, GrantPolicy(options, owner).Plan(layout, session, use));
  RETURN_IF_ERROR(CheckLedgerRoom(plan, ledger_taken, options.ledger_bytes_max));
  JobPlan view = JobPlanOf(layout, plan, plan.placement);
  view.node = options.node_bytes;
  view.others = use.jobs_dram_bytes + use.deleted_weights_bytes;
  view.limit = options.dram_limit_bytes;
  view.missing = plan.missing_bytes;
  ASSIGN_OR_RETURN(view.all_in_dram, LimitWithoutSwap(layout, session, options, use));
  return view;
}

absl::StatusOr<JobPlan> PlanOnEmpty(const protocol::Layout& layout, const SessionRequest& session,
                                    NodeOptions options, const NodeState::Limits& limits) {
  // Assumes the default ledger size of a volume with one path.
  options.ledger_bytes_max =
      UsualLedgerBytes(limits.swap_bytes, options.staging_slot_bytes, /*keeps_files=*/true);
  const uint64_t own_bytes = nvme::Volume::OwnBytes(options.ledger_bytes_max);
  const std::array<nvme::PathSpace, 1> paths{
      {{.begin_bytes = std::min(own_bytes, limits.swap_bytes), .end_bytes = limits.swap_bytes}}};
  options.swap = nvme::SlotMap(paths);
  options.dram_limit_bytes = limits.dram_bytes;
  return PlanOn(layout, session, options, {.swap = &options.swap}, OwnerUse{}, /*ledger_taken=*/0);
}

}  // namespace

absl::StatusOr<JobPlan> NodeState::Plan(const AttachRequested& request,
                                        const std::optional<Limits>& limits) const {
  RETURN_IF_ERROR(CheckAttachRequest(request));
  SessionRequest session = request.session_request;
  session.durability = request.durability.value_or(impl_->options.durability);
  if (limits) return PlanOnEmpty(*request.layout, session, impl_->options, *limits);
  if (session.durability.level != protocol::DurabilityLevel::kMemory) {
    RETURN_IF_ERROR(impl_->options.not_durable);
  }
  return PlanOn(*request.layout, session, impl_->options, impl_->Use(),
                impl_->UseOf(request.uid, nullptr), impl_->LedgerTaken(nullptr));
}

absl::StatusOr<JobPlan> NodeState::PlanOfJob(const JobName& name,
                                             const std::optional<Limits>& limits) const {
  const Job* const job = impl_->JobNamed(name);
  if (job == nullptr && impl_->ledger.FindParked(name) != nullptr) {
    return protocol::MakeError(
        protocol::ErrorId::kNotReady,
        absl::StrCat("job ", name.name, " has come back, and no rank has attached since then"),
        "attach a rank first: what it takes is decided then");
  }
  if (job == nullptr) {
    return protocol::MakeError(protocol::ErrorId::kJobName,
                               absl::StrCat("there is no job ", name.name, " that was attached to"),
                               "forebay jobs lists them");
  }
  const protocol::Layout& layout = *job->parts().spec.layout;
  const MemoryPlan& plan = job->plan();
  if (limits) return PlanOnEmpty(layout, plan.session, impl_->options, *limits);
  const uint64_t own_bytes = plan.fixed_bytes + job->placement().state_bytes();
  JobPlan view = JobPlanOf(layout, plan, job->placement());
  view.node = impl_->options.node_bytes;
  view.others = impl_->Bytes(&JobWorld::dram_bytes) - view.node -
                (job->world().dram_bytes() > 0 ? own_bytes : 0);
  view.limit = impl_->options.dram_limit_bytes;
  NodeUse others;
  others.jobs_dram_bytes = view.others;
  ASSIGN_OR_RETURN(view.all_in_dram,
                   LimitWithoutSwap(layout, plan.session, impl_->options, others));
  return view;
}

bool NodeState::HasStepsToMakeDurable() const {
  const bool is_parked = std::ranges::any_of(impl_->ledger.parked(), [](const auto& entry) {
    const JobView view = ViewOf(*entry.second);
    return view.durability.level != protocol::DurabilityLevel::kMemory &&
           view.durable_step < view.committed_step;
  });
  return is_parked || std::ranges::any_of(impl_->jobs, [](const auto& entry) {
           const JobView view = ViewOf(*entry.second);
           return entry.second->plan().has_durable_steps() &&
                  view.durable_step < view.committed_step;
         });
}

std::vector<JobView> NodeState::Jobs() const {
  std::vector<JobView> views;
  for (const auto& [id, job] : impl_->jobs) views.push_back(ViewOf(*job));
  for (const auto& [name, job] : impl_->ledger.parked()) views.push_back(ViewOf(*job));
  std::ranges::sort(views, {}, &JobView::id);
  return views;
}

NodeView NodeState::Node() const {
  return {.dram_limit_bytes = impl_->options.dram_limit_bytes,
          .dram_used_bytes = impl_->Bytes(&JobWorld::dram_bytes),
          .swap_capacity_bytes = impl_->options.swap.free_bytes(),
          .swap_used_bytes = impl_->options.swap.free_bytes() - impl_->swap.free_bytes(),
          .swap_paths = ViewPaths(impl_->swap, impl_->path_table),
          .staging_slots = impl_->pool.slots(),
          .staging_slots_used = impl_->pool.used()};
}

std::vector<std::shared_ptr<const DurableJob>> NodeState::DurableJobs() const {
  std::vector<std::shared_ptr<const DurableJob>> jobs;
  for (const auto& [name, job] : impl_->ledger.parked()) jobs.push_back(job);
  for (const auto& [id, job] : impl_->jobs) {
    if (auto durable = job->life().durable()) jobs.push_back(std::move(durable));
  }
  return jobs;
}

void NodeState::CheckInvariants() const {
  const NodeView node = Node();
  if (!impl_->jobs.empty()) {
    FOREBAY_CHECK(node.dram_used_bytes <= node.dram_limit_bytes);
    FOREBAY_CHECK(impl_->Bytes(&JobWorld::granted_bytes) <= node.dram_limit_bytes);
  }
  FOREBAY_CHECK(node.swap_used_bytes <= node.swap_capacity_bytes);
  uint64_t swap_bytes = 0;
  for (const auto& [id, job] : impl_->jobs) swap_bytes += job->world().swap_bytes();
  for (const auto& [name, job] : impl_->ledger.parked()) swap_bytes += ViewOf(*job).swap_bytes;
  swap_bytes += impl_->ledger.retired_bytes();
  FOREBAY_CHECK(swap_bytes == node.swap_used_bytes);
  uint64_t staged = 0;
  std::set<nvme::Slot> slots;
  for (const auto& [id, job] : impl_->jobs) {
    job->CheckInvariants();
    const JobWorld& world = job->world();
    for (const nvme::Slot& slot : world.swap_slots()) FOREBAY_CHECK(slots.insert(slot).second);
    for (const nvme::Slot& slot : world.sum_slots()) FOREBAY_CHECK(slots.insert(slot).second);
    staged += job->parts().pipeline.store().blocks().staged().size() +
              job->parts().weights.staging_slots();
    FOREBAY_CHECK(!job->life().is_freed() &&
                  impl_->names.at({.uid = job->uid(), .name = job->name()}) == id);
  }
  FOREBAY_CHECK(staged == node.staging_slots_used);
  for (const auto& [session, job] : impl_->session_jobs) {
    FOREBAY_CHECK(impl_->jobs.contains(job));
  }
}

}  // namespace forebay::daemon
