#include "daemon/core/gradient_accumulator.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

GradientAccumulator::GradientAccumulator(JobIo& io, std::shared_ptr<const protocol::Layout> layout,
                                         const MemoryPlan& plan, const Membership& members)
    : io_(io),
      layout_(std::move(layout)),
      plan_(plan),
      members_(members),
      world_size_(layout_->spec().world_size),
      overflow_used_(plan.overflow_slots, false) {
  Forget();
}

void GradientAccumulator::Forget() {
  groups_.assign(layout_->groups().size(), Group{});
  closed_.assign(world_size_, false);
  delivered_.assign(world_size_, 0);
  overflow_used_.assign(overflow_used_.size(), false);
  delivered_total_ = 0;
  unsummed_groups_ = 0;
  held_.clear();
  running_.clear();
  fault_ = absl::OkStatus();
}

std::string GradientAccumulator::NameOf(uint32_t group) const {
  return absl::StrCat("group ", group, " (", layout_->spec().group_names[group], ")");
}

void GradientAccumulator::AnswerOnce(Contribution& contribution, const absl::Status& status) {
  if (std::exchange(contribution.answered, true)) return;
  io_.Answer(contribution.command, status);
}

void GradientAccumulator::Deliver(uint64_t step, const Delivery& delivery) {
  FOREBAY_CHECK(empty() || step_ == step);
  step_ = step;
  Group& group = groups_[delivery.group];
  if (group.by_rank.contains(delivery.rank)) {
    io_.Answer(delivery.command,
               MakeError(ErrorId::kGradRepeat,
                         absl::StrCat("rank ", delivery.rank, " has delivered a gradient for ",
                                      NameOf(delivery.group), " in step ", step),
                         "gradient accumulation over several backward passes is not supported"));
    return;
  }
  if (delivery.rank < group.next_rank || group.summed) {
    io_.Answer(
        delivery.command,
        MakeError(ErrorId::kStep, absl::StrCat("rank ", delivery.rank, " called step ", step,
                                               " before it delivered ", NameOf(delivery.group),
                                               ": its gradient counts as zero in this step")));
    return;
  }
  if (group.by_rank.empty()) ++unsummed_groups_;
  ++delivered_[delivery.rank];
  ++delivered_total_;
  const auto [it, inserted] = group.by_rank.emplace(
      delivery.rank, Contribution{.command = delivery.command,
                                  .arena_offset_bytes = delivery.arena_offset_bytes,
                                  .grad_arena_bytes = delivery.grad_arena_bytes,
                                  .arrival = ++arrivals_});
  if (!fault_.ok()) {
    it->second.state = State::kAdded;
    AnswerOnce(it->second, absl::OkStatus());
    return;
  }
  held_.emplace(arrivals_, Key{.group = delivery.group, .rank = delivery.rank});
  Advance(delivery.group);
  SpillToOverflow();
}

void GradientAccumulator::Advance(uint32_t index) {
  Group& group = groups_[index];
  while (fault_.ok() && group.next_rank < world_size_) {
    const auto it = group.by_rank.find(group.next_rank);
    if (it != group.by_rank.end()) {
      const State state = it->second.state;
      if (state == State::kHeld || state == State::kOverflow) {
        StartAdd({.group = index, .rank = group.next_rank});
      }
      return;
    }
    if (!closed_[group.next_rank]) return;
    ++group.next_rank;
  }
  if (!fault_.ok() || group.added == 0 || group.summed) return;
  group.summed = true;
  const TaskId task =
      io_.Start(TaskKind::kSumGroup, 0,
                SumGroup{.accumulator_offset_bytes = plan_.accumulator_offsets[index],
                         .elems = layout_->groups()[index].padded_elems});
  running_.emplace(task, Key{.group = index, .rank = kNobody});
}

void GradientAccumulator::StartAdd(const Key& key) {
  Contribution& contribution = At(key);
  const bool in_arena = contribution.state == State::kHeld;
  const SessionId session = in_arena ? contribution.command.session : 0;
  held_.erase(contribution.arrival);
  contribution.state = State::kAdding;
  const TaskId task = io_.Start(
      TaskKind::kAddGradient, session,
      AddGradient{.session = session,
                  .source_offset_bytes = in_arena ? contribution.arena_offset_bytes
                                                  : OverflowOffset(*contribution.overflow_slot),
                  .accumulator_offset_bytes = plan_.accumulator_offsets[key.group],
                  .elems = layout_->groups()[key.group].padded_elems,
                  .dtype = layout_->spec().dtype,
                  .sum_dtype = plan_.sum_dtype,
                  .assign = groups_[key.group].added == 0,
                  .completes = Completes(key)});
  running_.emplace(task, key);
}

uint32_t GradientAccumulator::FirstMissingRank(const Key& key) const {
  const Group& group = groups_[key.group];
  for (uint32_t rank = group.next_rank; rank < key.rank; ++rank) {
    if (!closed_[rank] && !group.by_rank.contains(rank)) return rank;
  }
  return kNobody;
}

uint32_t GradientAccumulator::DeliveredBefore(uint32_t missing_rank, uint32_t rank) const {
  for (uint32_t group = 0; group < groups_.size(); ++group) {
    const auto& by_rank = groups_[group].by_rank;
    if (by_rank.contains(missing_rank) && !by_rank.contains(rank)) return group;
  }
  return kNobody;
}

// Makes room in the arenas that are crowded by contributions waiting for other ranks, newest first.
void GradientAccumulator::SpillToOverflow() {
  std::map<SessionId, uint64_t> waiting_bytes;
  std::vector<std::pair<Key, uint32_t>> waiting;  // with the rank that each waits for
  for (const auto& [arrival, key] : held_) {
    const uint32_t missing_rank = FirstMissingRank(key);
    // A rank that has called step writes no more, and counts on what it has delivered.
    if (missing_rank == kNobody || closed_[key.rank]) continue;
    waiting.emplace_back(key, missing_rank);
    waiting_bytes[At(key).command.session] += layout_->group_bytes(key.group);
  }
  for (auto it = waiting.rbegin(); it != waiting.rend(); ++it) {
    const auto& [key, missing_rank] = *it;
    Contribution& contribution = At(key);
    uint64_t& bytes = waiting_bytes[contribution.command.session];
    if (bytes + layout_->largest_group_bytes() <= contribution.grad_arena_bytes) continue;
    const auto free = std::find(overflow_used_.begin(), overflow_used_.end(), false);
    if (free == overflow_used_.end()) {
      const uint32_t other_group = DeliveredBefore(missing_rank, key.rank);
      if (other_group == kNobody && !members_.is_detached(missing_rank))
        continue;  // it will come: wait
      bytes -= layout_->group_bytes(key.group);
      Refuse(key, members_.is_detached(missing_rank) ? DetachedError(key, missing_rank)
                                                     : OrderError(key, missing_rank, other_group));
      continue;
    }
    *free = true;
    contribution.overflow_slot = static_cast<uint32_t>(free - overflow_used_.begin());
    bytes -= layout_->group_bytes(key.group);
    held_.erase(contribution.arrival);
    contribution.state = State::kMoving;
    const TaskId task =
        io_.Start(TaskKind::kMoveGradient, contribution.command.session,
                  CopyToStepArena{.session = contribution.command.session,
                                  .grad_offset_bytes = contribution.arena_offset_bytes,
                                  .step_offset_bytes = OverflowOffset(*contribution.overflow_slot),
                                  .bytes = layout_->group_bytes(key.group)});
    running_.emplace(task, key);
  }
}

absl::Status GradientAccumulator::OrderError(const Key& key, uint32_t missing_rank,
                                             uint32_t other_group) const {
  return MakeError(
      ErrorId::kGradOrder,
      absl::StrCat("rank ", key.rank, " delivered ", NameOf(key.group), " and rank ", missing_rank,
                   ", whose gradient is added first, ", NameOf(other_group), " in step ", step_,
                   "; the overflow for gradients out of order (", plan_.overflow_slots, " x ",
                   plan_.overflow_slot_bytes, " bytes) is full"),
      "let every rank deliver its groups in one order, or attach with a larger gradient arena");
}

absl::Status GradientAccumulator::DetachedError(const Key& key, uint32_t missing_rank) const {
  return MakeError(
      ErrorId::kRankLost,
      absl::StrCat("the gradient of rank ", key.rank, " for ", NameOf(key.group), " in step ",
                   step_, " waits for rank ", missing_rank, ", which has detached"),
      "attach that rank again");
}

// The contribution is not taken: the rank may deliver the group again.
void GradientAccumulator::Refuse(const Key& key, const absl::Status& status) {
  Contribution& contribution = At(key);
  AnswerOnce(contribution, status);
  held_.erase(contribution.arrival);
  Group& group = groups_[key.group];
  group.by_rank.erase(key.rank);
  if (group.by_rank.empty()) --unsummed_groups_;
  --delivered_[key.rank];
  --delivered_total_;
}

GradientAccumulator::Key GradientAccumulator::FinishRunning(TaskId task) {
  const auto it = running_.find(task);
  FOREBAY_CHECK(it != running_.end());
  const Key key = it->second;
  running_.erase(it);
  return key;
}

void GradientAccumulator::OnAdded(const TaskDone& done) {
  const Key key = FinishRunning(done.task);
  Contribution& contribution = At(key);
  Group& group = groups_[key.group];
  if (contribution.overflow_slot) overflow_used_[*contribution.overflow_slot] = false;
  contribution.overflow_slot.reset();
  contribution.state = State::kAdded;
  if (done.count > 0) {
    const absl::Status fault =
        MakeError(ErrorId::kNonfinite,
                  absl::StrCat("the gradient of rank ", key.rank, " for ", NameOf(key.group),
                               " in step ", step_, " holds NaN or infinity"),
                  "the step was not applied; repeat it with other gradients");
    AnswerOnce(contribution, fault);
    Invalidate(fault);
    return;
  }
  AnswerOnce(contribution, absl::OkStatus());
  ++group.added;
  ++group.next_rank;
  if (Completes(key)) {
    group.summed = true;
    RecordSum(key.group, done.sum_squares);
  }
  Advance(key.group);
  SpillToOverflow();
}

void GradientAccumulator::OnMoved(const TaskDone& done) {
  const Key key = FinishRunning(done.task);
  Contribution& contribution = At(key);
  contribution.state = fault_.ok() ? State::kOverflow : State::kAdded;
  AnswerOnce(contribution, absl::OkStatus());
  Advance(key.group);
}

void GradientAccumulator::OnSummed(const TaskDone& done) {
  RecordSum(FinishRunning(done.task).group, done.sum_squares);
}

void GradientAccumulator::RecordSum(uint32_t group, double sum_squares) {
  --unsummed_groups_;
  groups_[group].sum_squares = sum_squares;
  if (std::isfinite(sum_squares)) return;
  Invalidate(MakeError(ErrorId::kNonfinite,
                       absl::StrCat("the sum of the ranks' gradients for ", NameOf(group),
                                    " in step ", step_, " is not finite"),
                       "the step was not applied; repeat it with other gradients"));
}

void GradientAccumulator::Invalidate(const absl::Status& fault) {
  if (!fault_.ok()) return;
  fault_ = fault;
  held_.clear();
  for (Group& group : groups_) {
    for (auto& [rank, contribution] : group.by_rank) {
      if (contribution.state == State::kMoving || contribution.state == State::kAdding) continue;
      contribution.state = State::kAdded;
      AnswerOnce(contribution, absl::OkStatus());
    }
  }
}

void GradientAccumulator::CloseRank(uint32_t rank) {
  closed_[rank] = true;
  for (uint32_t group = 0; group < groups_.size(); ++group) {
    if (!groups_[group].by_rank.empty()) Advance(group);
  }
  SpillToOverflow();
}

void GradientAccumulator::AnswerSession(SessionId session, const absl::Status& status) {
  for (Group& group : groups_) {
    for (auto& [rank, contribution] : group.by_rank) {
      if (contribution.command.session == session) AnswerOnce(contribution, status);
    }
  }
}

void GradientAccumulator::ReopenRanks() { closed_.assign(world_size_, false); }

void GradientAccumulator::Drop(const absl::Status& status) {
  for (Group& group : groups_) {
    for (auto& [rank, contribution] : group.by_rank) AnswerOnce(contribution, status);
  }
  Forget();
}

void GradientAccumulator::Clear(const absl::Status& status) {
  FOREBAY_CHECK(running_.empty());
  Drop(status);
}

bool GradientAccumulator::reduced() const {
  if (!running_.empty()) return false;
  if (!fault_.ok()) return true;
  return unsummed_groups_ == 0 && std::find(closed_.begin(), closed_.end(), false) == closed_.end();
}

bool GradientAccumulator::UsesArenaOf(SessionId session) const {
  return std::any_of(held_.begin(), held_.end(), [&](const auto& entry) {
    return groups_[entry.second.group].by_rank.at(entry.second.rank).command.session == session;
  });
}

std::vector<bool> GradientAccumulator::delivered_groups() const {
  std::vector<bool> delivered;
  for (const Group& group : groups_) delivered.push_back(!group.by_rank.empty());
  return delivered;
}

double GradientAccumulator::SumSquares() const {
  double sum = 0;
  for (const Group& group : groups_) sum += group.sum_squares;
  return sum;
}

uint64_t GradientAccumulator::unanswered(SessionId session) const {
  uint64_t count = 0;
  for (const Group& group : groups_) {
    for (const auto& [rank, contribution] : group.by_rank) {
      if (!contribution.answered && contribution.command.session == session) ++count;
    }
  }
  return count;
}

void GradientAccumulator::CheckInvariants() const {
  uint64_t in_overflow = 0;
  uint64_t held = 0;
  uint64_t delivered = 0;
  for (const Group& group : groups_) {
    uint32_t adding = 0;
    delivered += group.by_rank.size();
    for (const auto& [rank, contribution] : group.by_rank) {
      const State state = contribution.state;
      if (state == State::kAdding) {
        ++adding;
        FOREBAY_CHECK(rank == group.next_rank);
      }
      if (contribution.overflow_slot) {
        ++in_overflow;
        FOREBAY_CHECK(overflow_used_[*contribution.overflow_slot]);
      }
      if (state == State::kHeld) ++held;
      if (fault_.ok()) FOREBAY_CHECK((state == State::kAdded) == (rank < group.next_rank));
    }
    FOREBAY_CHECK(adding <= 1);  // one add per group at a time
    FOREBAY_CHECK(group.next_rank <= world_size_ && group.added <= group.next_rank);
  }
  FOREBAY_CHECK(delivered == delivered_total_);
  FOREBAY_CHECK(held == held_.size());
  const auto used = std::count(overflow_used_.begin(), overflow_used_.end(), true);
  FOREBAY_CHECK(static_cast<uint64_t>(used) == in_overflow);
}

}  // namespace forebay::daemon
