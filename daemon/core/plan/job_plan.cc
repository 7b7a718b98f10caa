// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/plan/job_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "daemon/core/base/limits.h"
#include "protocol/optimizer.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::kPageBytes;
using protocol::Layout;
using protocol::RoundUp;

void AddPartition(const Layout& layout, const MemoryPlan& plan, uint32_t partition,
                  RankPlan& rank) {
  const uint64_t bytes = layout.partition_bytes(partition);
  rank.largest_partition = std::max(rank.largest_partition, bytes);
  rank.sums += SumBytes(layout.partitions()[partition], plan.sum_dtype);
  if (!plan.has_weights_on_swap() || !plan.weights_on_swap[partition]) {
    rank.weights += RoundUp(bytes, kPageBytes);
    return;
  }
  rank.weights_on_swap += bytes;
  rank.weights_cache =
      std::max(rank.weights_cache, kCachedPartitionsPerOwner * RoundUp(bytes, kPageBytes));
}

std::vector<RankPlan> RankPlansOf(const Layout& layout, const MemoryPlan& plan,
                                  const Placement& placement) {
  std::map<uint32_t, RankPlan> ranks;
  for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
    AddPartition(layout, plan, i, ranks[layout.partitions()[i].owner]);
  }
  const std::shared_ptr<const Layout> borrowed(std::shared_ptr<void>(), &layout);
  const BlockMap map(borrowed, plan.block_elems, plan.weights_on_swap);
  for (uint32_t block = 0; block < map.state_blocks(); ++block) {
    RankPlan& rank = ranks[layout.owners()[map.owner(block)].owner];
    const bool is_in_dram = placement.WhereBlock(block).tier == Tier::kDram;
    const uint64_t bytes = map.weights_plane_offset(block);  // end of the planes of states
    (is_in_dram ? rank.states : rank.states_on_swap) += bytes;
  }
  std::vector<RankPlan> plans;
  for (auto& [number, rank] : ranks) {
    rank.rank = number;
    plans.push_back(rank);
  }
  return plans;
}

}  // namespace

StepTraffic StepTrafficOf(const Layout& layout, const MemoryPlan& plan,
                          const Placement& placement) {
  StepTraffic traffic{.read_bytes = 2 * plan.weights_on_swap_bytes,
                      .gradient_bytes = plan.sums_on_swap_bytes()};
  uint64_t in_dram = RoundUp(plan.weights_bytes - plan.weights_cache_bytes, kPageBytes);
  const auto passes = static_cast<uint64_t>(protocol::Info(layout.spec().optimizer).passes);
  for (uint32_t block = 0; block < placement.blocks(); ++block) {
    const BlockLocation& location = placement.WhereBlock(block);
    if (location.tier == Tier::kDram) {
      in_dram += location.state.bytes;
      continue;
    }
    traffic.read_bytes += passes * location.state.bytes;
    traffic.written_bytes += location.state.bytes;
  }
  if (plan.has_durable_steps()) traffic.durable_bytes = in_dram;
  return traffic;
}

JobPlan JobPlanOf(const Layout& layout, const MemoryPlan& plan, const Placement& placement) {
  const StepTraffic traffic = StepTrafficOf(layout, plan, placement);
  JobPlan view{.weights = plan.weights_bytes - plan.weights_cache_bytes,
               .weights_cache = plan.weights_cache_bytes,
               .states = placement.state_bytes(),
               .extra_state = plan.step_bytes - plan.extra_state_offset - plan.early_weights_bytes,
               .sessions = plan.session.world_size * (plan.session_arena_bytes + plan.ring_bytes +
                                                      plan.extra_state_copy_bytes),
               .tables = plan.table_bytes,
               .weights_on_swap = plan.weights_on_swap_bytes,
               .blocks = placement.blocks(),
               .resident_blocks = placement.resident_blocks(),
               .swap = plan.swap_bytes(),
               .step_read = traffic.read_bytes,
               .step_written = traffic.written_bytes,
               .durable_written = traffic.durable_bytes,
               .durable_every = plan.has_durable_steps() ? plan.session.durability.steps : 0,
               .new_weights = plan.early_weights_bytes,
               .sums_on_swap = plan.sums_on_swap_bytes(),
               .grad_arena = plan.step_region_offset,
               .step_region = plan.step_region_bytes,
               .activations = RoundUp(plan.session.activation_bytes, kPageBytes),
               .trace = plan.trace_bytes,
               .ring = plan.ring_bytes,
               .extra_state_copy = plan.extra_state_copy_bytes,
               .ranks = {}};
  // The other bytes of the plan are gradient sums. They include float32 sums for further backward passes, if the job has
  // allocated these.
  view.sums = plan.fixed_bytes - plan.weights_bytes - view.extra_state - view.sessions -
              view.tables - view.new_weights;
  if (!layout.is_shared()) view.ranks = RankPlansOf(layout, plan, placement);
  return view;
}

}  // namespace forebay::daemon
