// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/job/job_world.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "protocol/os/check.h"

namespace forebay::daemon {

bool JobWorld::NeedsChange(const AttachRequested& request) const {
  if (request.reader) return false;
  const SessionRequest& wanted = request.session_request;
  return wanted.world_size != room().world_size || (wanted.accumulate && !room().accumulate) ||
         (!has_step_arena() && !next_plan_);
}

void JobWorld::Change(MemoryPlan plan) {
  next_plan_ = std::move(plan);
  has_room_ = false;
}

std::optional<uint64_t> JobWorld::awaited_bytes() const {
  if (!next_plan_ || has_room_) return std::nullopt;
  return fixed_bytes() - job_.spec.plan.fixed_bytes;
}

bool JobWorld::TryChange() {
  if (!has_room_ && job_.members.live_ranks() == 0) next_plan_.reset();  // no rank waits any more
  if (!has_room_ || life_.is_ending() || !job_.is_ready() || job_.failed()) return false;
  if (!job_.members.has_only_waiting()) return false;
  if (!MayBegin(Activity::kWorldChange, UnderWay().Without(Activity::kEarlyUpdate))) return false;
  job_.step.gathering().DropForNewWorld();
  if (!MayBegin(Activity::kWorldChange, UnderWay()) || job_.io.stale_tasks() > 0) return false;
  MemoryPlan& plan = job_.spec.plan;
  const MemoryPlan before = std::exchange(plan, *std::exchange(next_plan_, std::nullopt));
  float_sums_ = FloatSums::kNone;
  ReplaceStepArena action{.step_bytes = plan.step_bytes,
                          .step_capacity_bytes = plan.step_capacity_bytes()};
  const StepExtraStates& extra = job_.step.parts().extra;
  const uint32_t kept = std::min(before.session.world_size, job_.spec.world_size());
  for (uint32_t rank = 0; rank < kept; ++rank) {
    action.extra_state.push_back({.from_bytes = before.extra_state_slot(rank, extra.slot()),
                                  .to_bytes = extra.Part(rank).offset_bytes,
                                  .size_bytes = extra.Part(rank).bytes});
  }
  job_.members.OnWorldChanged();
  job_.step.gathering().OnWorldChanged();
  has_room_ = false;
  arena_ = StepArena::kMaking;
  job_.io.Start(TaskKind::kStepArena, 0, std::move(action));
  return true;
}

void JobWorld::OnStepArenaMade(const TaskDone& done) {
  arena_ = done.status.ok() ? StepArena::kReady : StepArena::kMissing;
}

bool JobWorld::WantsFloatSums() const {
  return float_sums_ == FloatSums::kNone && job_.step.parts().gradients.needs_float_sums();
}

void JobWorld::MakeFloatSums() {
  MemoryPlan& plan = job_.spec.plan;
  float_sums_ = FloatSums::kMaking;
  plan.fixed_bytes += plan.float_sums_bytes;
  job_.io.Start(
      TaskKind::kFloatSums, 0,
      PopulateStepArena{.offset_bytes = plan.float_sums_offset, .bytes = plan.float_sums_bytes});
}

void JobWorld::OnFloatSumsMade(const TaskDone& done) {
  if (done.status.ok()) {
    float_sums_ = FloatSums::kMade;
    return;
  }
  float_sums_ = FloatSums::kNone;
  job_.spec.plan.fixed_bytes -= job_.spec.plan.float_sums_bytes;
  RefuseFloatSums(done.status);
}

void JobWorld::TryUseFloatSums() {
  if (float_sums_ != FloatSums::kMade || !job_.step.MayUseFloatSums()) return;
  float_sums_ = FloatSums::kInUse;
  std::vector<uint64_t> narrow_offsets = job_.spec.plan.accumulator_offsets;
  job_.spec.plan.UseFloatSums(*job_.spec.layout);
  job_.step.parts().gradients.OnFloatSums(std::move(narrow_offsets));
}

Activities JobWorld::UnderWay() const {
  Activities under_way = job_.step.UnderWay();
  under_way.AddIf(life_.is_unrestored(), Activity::kRestore);
  under_way.AddIf(
      life_.state() == JobLife::kCreating || is_making_arena() || float_sums_ == FloatSums::kMaking,
      Activity::kMemory);
  return under_way;
}

uint64_t JobWorld::fixed_bytes() const {
  const uint64_t bytes = job_.spec.plan.fixed_bytes;
  return next_plan_ ? std::max(bytes, next_plan_->fixed_bytes) : bytes;
}

uint64_t JobWorld::dram_bytes() const {
  if (!life_.has_begun()) return 0;
  const uint64_t fixed = has_room_ ? fixed_bytes() : job_.spec.plan.fixed_bytes;
  return fixed + job_.pipeline.store().placement().state_bytes() + job_.members.reader_bytes();
}

uint64_t JobWorld::granted_bytes() const {
  if (!life_.has_begun() && life_.is_ending()) return 0;
  return fixed_bytes() + job_.pipeline.store().placement().granted_bytes() +
         job_.members.reader_bytes();
}

uint64_t JobWorld::swap_bytes() const {
  return swap_slots().size() * job_.spec.plan.swap_slot_bytes +
         sum_slots().size() * job_.spec.plan.sum_page_bytes;
}

void JobWorld::CheckInvariants() const {
  FOREBAY_CHECK(!has_room_ || next_plan_);
  FOREBAY_CHECK(float_sums_ != FloatSums::kInUse || job_.spec.plan.uses_float_sums);
}

}  // namespace forebay::daemon
