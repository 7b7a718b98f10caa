// What is shown of a node, and what always holds of it.

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "daemon/core/attach_check.h"
#include "daemon/core/node_impl.h"
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

}  // namespace

absl::StatusOr<JobPlan> NodeState::Plan(const AttachRequested& request,
                                        const std::optional<Limits>& limits) const {
  RETURN_IF_ERROR(CheckAttachRequest(request));
  Options options = impl_->options;
  NodeUse use = impl_->Use();
  nvme::SlotMap empty;
  if (limits) {
    const std::array<nvme::PathSpace, 1> paths{
        {{.begin_bytes = 0, .end_bytes = limits->swap_bytes}}};
    empty = nvme::SlotMap(paths);
    options.dram_limit_bytes = limits->dram_bytes;
    options.swap = empty;
    use = {.swap = &empty};
  }
  const protocol::Layout& layout = *request.layout;
  SessionRequest session = SessionRequestOf(request);
  session.durability = request.durability.value_or(options.durability);
  const OwnerUse owner = limits ? OwnerUse{} : impl_->UseOf(request.uid, nullptr);
  ASSIGN_OR_RETURN(const MemoryPlan plan, GrantPolicy(options, owner).Plan(layout, session, use));
  const StepTraffic traffic = StepTrafficOf(layout, plan, plan.placement);
  JobPlan view{.weights = plan.weights_bytes - plan.weights_cache_bytes,
               .weights_cache = plan.weights_cache_bytes,
               .states = plan.placement.state_bytes(),
               .sums = plan.extra_state_offset,
               .extra_state = plan.step_bytes - plan.extra_state_offset - plan.early_weights_bytes,
               .sessions = session.world_size * (plan.session_arena_bytes + plan.ring_bytes +
                                                 plan.extra_state_copy_bytes),
               .tables = plan.table_bytes,
               .node = options.node_bytes,
               .others = use.jobs_dram_bytes + use.deleted_weights_bytes,
               .limit = options.dram_limit_bytes,
               .missing = plan.missing_bytes,
               .weights_on_swap = plan.weights_on_swap_bytes,
               .blocks = plan.placement.blocks(),
               .resident_blocks = plan.placement.resident_blocks(),
               .swap = plan.swap_bytes(),
               .step_read = traffic.read_bytes,
               .step_written = traffic.written_bytes,
               .new_weights = plan.early_weights_bytes,
               .sums_on_swap = plan.sums_on_swap_bytes()};
  options.dram_limit_bytes = UINT64_MAX / 2;
  ASSIGN_OR_RETURN(const MemoryPlan all, PlanJob(layout, session, options, use));
  view.all_in_dram = TakenBytes(options, use) + all.fixed_bytes + all.placement.state_bytes();
  return view;
}

std::vector<JobView> NodeState::Jobs() const {
  std::vector<JobView> views;
  for (const auto& [id, job] : impl_->jobs) views.push_back(job->View());
  for (const auto& [name, job] : impl_->ledger.parked()) views.push_back(ViewOf(*job));
  std::ranges::sort(views, {}, &JobView::id);
  return views;
}

NodeView NodeState::Node() const {
  return {.dram_limit_bytes = impl_->options.dram_limit_bytes,
          .dram_used_bytes = impl_->Bytes(&Job::dram_bytes),
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
    if (auto durable = job->durable()) jobs.push_back(std::move(durable));
  }
  return jobs;
}

void NodeState::CheckInvariants() const {
  const NodeView node = Node();
  if (!impl_->jobs.empty()) {
    FOREBAY_CHECK(node.dram_used_bytes <= node.dram_limit_bytes);
    FOREBAY_CHECK(impl_->Bytes(&Job::granted_bytes) <= node.dram_limit_bytes);
  }
  FOREBAY_CHECK(node.swap_used_bytes <= node.swap_capacity_bytes);
  uint64_t swap_bytes = 0;
  for (const auto& [id, job] : impl_->jobs) swap_bytes += job->View().swap_bytes;
  for (const auto& [name, job] : impl_->ledger.parked()) swap_bytes += ViewOf(*job).swap_bytes;
  swap_bytes += impl_->ledger.retired_bytes();
  FOREBAY_CHECK(swap_bytes == node.swap_used_bytes);
  uint32_t staged = 0;
  std::set<nvme::Slot> slots;
  for (const auto& [id, job] : impl_->jobs) {
    job->CheckInvariants();
    for (const nvme::Slot& slot : job->swap_slots()) FOREBAY_CHECK(slots.insert(slot).second);
    for (const nvme::Slot& slot : job->sum_slots()) FOREBAY_CHECK(slots.insert(slot).second);
    staged += job->staging_slots();
    FOREBAY_CHECK(!job->is_freed() &&
                  impl_->names.at({.uid = job->uid(), .name = job->name()}) == id);
  }
  FOREBAY_CHECK(staged == node.staging_slots_used);
  for (const auto& [session, job] : impl_->session_jobs) {
    FOREBAY_CHECK(impl_->jobs.contains(job));
  }
}

}  // namespace forebay::daemon
