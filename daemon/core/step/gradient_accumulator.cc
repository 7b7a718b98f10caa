// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/gradient_accumulator.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

GradientAccumulator::GradientAccumulator(JobTasks& io,
                                         std::shared_ptr<const protocol::Layout> layout,
                                         const MemoryPlan& plan, const Membership& members,
                                         StepPipeline& pipeline)
    : io_(io),
      layout_(std::move(layout)),
      plan_(plan),
      members_(members),
      pipeline_(pipeline),
      turns_(io.memory(), *layout_, pipeline.sums()),
      norms_(io, *layout_, plan, turns_, pipeline.sums()),
      contributions_(io.memory()),
      moving_(io.memory()),
      adding_(io.memory()),
      not_updated_(io.memory()) {
  Reset();
}

void GradientAccumulator::Reset() {
  turns_.Reset(members_.world_size());
  overflow_used_.assign(members_.world_size(), {});
  contributions_.clear();
  moving_.clear();
  adding_.clear();
  not_updated_.clear();
  needs_float_sums_ = false;
  fault_ = absl::OkStatus();
}

// ---------------------------------------------------------------------------------------- delivery

uint64_t GradientAccumulator::BytesOf(const Range& range) const {
  return (range.end - range.begin) * protocol::SizeBytes(layout_->grad_dtype());
}

void GradientAccumulator::AnswerOnce(Contribution& contribution, const absl::Status& status) {
  if (std::exchange(contribution.answered, true)) return;
  io_.Answer(contribution.delivery.command, status);
}

// Answers and deletes a contribution, and frees its bytes.
void GradientAccumulator::Delete(ContributionId id, const absl::Status& status) {
  Contribution& contribution = contributions_.at(id);
  AnswerOnce(contribution, status);
  if (contribution.slot)
    overflow_used_[contribution.delivery.turn.rank][*contribution.slot] = false;
  contributions_.erase(id);
}

bool GradientAccumulator::HasTaken(const Turn& turn, const Range& range) const {
  return turns_.Delivered(turn.rank, range) > 0 && turns_.HasTurn(range, turn);
}

void GradientAccumulator::Deliver(uint64_t step, const Delivery& delivery) {
  FOREBAY_CHECK(empty() || step_ == step);
  step_ = step;
  const auto& [range, turn] = std::tie(delivery.range, delivery.turn);
  const bool was_delivered = turns_.Delivered(turn.rank, range) > 0;
  if (turn.pass < turns_.ranks()[turn.rank].pass || (turn.pass == 0 && was_delivered)) {
    io_.Answer(delivery.command, RepeatError(delivery));
    return;
  }
  turns_.Cut(range);
  if (turns_.HasTurn(range, turn)) {
    io_.Answer(
        delivery.command,
        was_delivered
            ? RepeatError(delivery)
            : MakeError(ErrorId::kStep,
                        absl::StrCat("rank ", layout_->WorldRank(turn.rank), " called step ", step,
                                     " before it delivered elements ", range.begin, " to ",
                                     range.end, " of ", layout_->DescribePartition(range.partition),
                                     ": they count as zero in this step")));
    return;
  }
  const uint64_t elems = range.end - range.begin;
  contributions_.emplace(++last_id_, Contribution{.delivery = delivery, .elems_left = elems});
  if (turn.pass > 0 && plan_.sum_dtype != protocol::DType::kFloat32) needs_float_sums_ = true;
  if (turns_.Add(range, turn, last_id_) && layout_->is_shared()) {
    TryAddAll();  // contributions no longer wait for the rank's earlier passes
  } else {
    TryAddRange(range);
  }
  MakeRoom(delivery);
  SpillToOverflow();
}

absl::Status GradientAccumulator::RepeatError(const Delivery& delivery) const {
  const auto& [range, turn] = std::tie(delivery.range, delivery.turn);
  return MakeError(ErrorId::kGradRepeat,
                   absl::StrCat("rank ", layout_->WorldRank(turn.rank),
                                " has delivered gradients of elements ", range.begin, " to ",
                                range.end, " of ", layout_->DescribePartition(range.partition),
                                " in step ", step_, ", or is past backward pass ", turn.pass,
                                " (it is in ", turns_.ranks()[turn.rank].pass, ")"),
                   "begin a pass before its gradients are delivered");
}

absl::Status GradientAccumulator::NonfiniteError(const std::string& what, uint32_t partition,
                                                 const char* fault) const {
  return MakeError(ErrorId::kNonfinite,
                   absl::StrCat(what, " for ", layout_->DescribePartition(partition), " in step ",
                                step_, " ", fault),
                   "the step was not applied; repeat it with other gradients");
}

// ---------------------------------------------------------------------------------------- addition

bool GradientAccumulator::MayStart() const {
  return fault_.ok() && io_.stale_tasks() == 0 && !needs_float_sums_;
}

uint64_t GradientAccumulator::FreePieces(const Delivery& delivery) const {
  uint64_t held = 0;
  for (const auto& [id, other] : contributions_) {
    const bool is_of_rank = other.delivery.turn.rank == delivery.turn.rank;
    if (is_of_rank && other.state == State::kArena) held += BytesOf(other.delivery.range);
  }
  return (delivery.grad_arena_bytes - std::min(held, delivery.grad_arena_bytes)) /
         plan_.piece_bytes;
}

bool GradientAccumulator::HoldsHalf(const Delivery& delivery) const {
  return 2 * FreePieces(delivery) < delivery.grad_arena_bytes / plan_.piece_bytes;
}

// Adds the contributions of the rank that have arrived in order, if few pieces of the rank's arena are free.
void GradientAccumulator::MakeRoom(const Delivery& delivery) {
  const bool is_urgent = pipeline_.sums().is_paged() && HoldsHalf(delivery);
  if (FreePieces(delivery) >= 2 && !is_urgent) return;
  std::pmr::vector<Range> held(io_.memory());
  for (const auto& [id, contribution] : contributions_) {
    const Delivery& other = contribution.delivery;
    if (other.turn.rank == delivery.turn.rank) held.push_back(other.range);
  }
  for (const Range& range : held) TryAddRange(range);
}

void GradientAccumulator::TryAddRange(const Range& range) {
  const auto cells = turns_.CellsIn(range);
  if (!pipeline_.sums().is_paged()) {
    for (Entry& entry : cells) TryAdd(range.partition, entry);
    return;
  }
  // Adds to the last cell first, because early updates read blocks ahead from the last block on.
  for (auto it = cells.end(); it != cells.begin();) TryAdd(range.partition, *--it);
}

void GradientAccumulator::TryAddAll() {
  for (uint32_t partition = 0; partition < turns_.partitions(); ++partition) {
    TryAddRange({.partition = partition, .end = UINT64_MAX});
  }
}

void GradientAccumulator::Advance() {
  TryAddAll();
  SpillToOverflow();
  TryNorms();
}

// Returns how urgently a task needs its page of sums. Gradients wait until early updates free frames as long as at least half
// of their rank's pieces are free.
SumPages::Need GradientAccumulator::NeedOf(const Addition& addition) const {
  const auto is_urgent = [this](ContributionId id) {
    const Delivery& delivery = contributions_.at(id).delivery;
    return turns_.ranks()[delivery.turn.rank].is_closed() || HoldsHalf(delivery);
  };
  return !pipeline_.early().is_on() || std::ranges::any_of(addition.sources, is_urgent)
             ? SumPages::Need::kNow
             : SumPages::Need::kSoon;
}

void GradientAccumulator::TryAdd(uint32_t partition, Entry& entry) {
  auto& [begin, cell] = entry;
  const Range range{.partition = partition, .begin = begin, .end = cell.end};
  if (cell.phase != Phase::kGathering || norms_.Reads(range)) return;
  if (!MayStart()) {
    blocked_ = true;
    return;
  }
  if (!pipeline_.queue().IsPartitionDone(partition) ||
      pipeline_.early().ReadsSums(partition, begin, cell.end)) {
    not_updated_.insert(partition);
    return;
  }
  Addition addition{.range = range, .sources = Ids(io_.memory())};
  bool crowded = false;
  Turn missing = turns_.FirstMissing(partition, cell);
  for (const auto& [turn, id] : cell.waiting) {
    if (turn > missing) break;
    const Contribution& contribution = contributions_.at(id);
    if (contribution.state == State::kMoving) {
      missing = turn;
      break;
    }
    addition.sources.push_back(id);
    crowded =
        crowded || contribution.state == State::kOverflow || FreePieces(contribution.delivery) < 2;
  }
  addition.completes = missing.pass > cell.newest_pass;
  const bool adds = !addition.sources.empty() || cell.sum == Sum::kNarrow;
  if (adds ? !addition.completes && !crowded : !addition.completes) return;
  const bool has_task = adds || cell.sum != Sum::kNone;
  const SumPages::Need need = adds ? NeedOf(addition) : SumPages::Need::kNow;
  if (has_task && !pipeline_.sums().Request(partition, begin, need)) return;
  cell.next =
      std::min(missing, Turn{.pass = cell.newest_pass + 1, .rank = turns_.FirstRank(partition)});
  if (!has_task) {  // every contribution to the range was refused
    turns_.SetSummed(partition, entry);
    return;
  }
  cell.phase = Phase::kAdding;
  if (adds) {
    StartAddition(cell, std::move(addition));
  } else {
    adding_.emplace(norms_.StartSum(range), std::move(addition));
  }
}

void GradientAccumulator::StartAddition(Cell& cell, Addition addition) {
  const Range& range = addition.range;
  addition.widens = cell.sum == Sum::kNarrow;
  AddGradients action{
      .partition = range.partition,
      .sources = std::pmr::vector<GradientSource>(io_.memory()),
      .accumulator_offset_bytes = pipeline_.sums().Pin(range.partition, range.begin),
      .first_elem = range.begin,
      .elems = range.end - range.begin,
      .dtype = layout_->grad_dtype(),
      .sum_dtype = plan_.sum_dtype,
      .assign = cell.sum != Sum::kWhole};
  if (addition.widens) {
    cell.sum = Sum::kWhole;
    action.sources.push_back(
        {.offset_bytes = narrow_offsets_[range.partition] + BytesOf({.end = range.begin})});
  }
  for (const ContributionId id : addition.sources) {
    Contribution& contribution = contributions_.at(id);
    const Delivery& delivery = contribution.delivery;
    ++contribution.additions;
    cell.waiting.erase(delivery.turn);
    const bool in_arena = contribution.state == State::kArena;
    action.sources.push_back(
        {.session = in_arena ? delivery.command.session : 0,
         .offset_bytes = (in_arena ? delivery.arena_offset_bytes : OverflowOffset(contribution)) +
                         BytesOf({.begin = delivery.range.begin, .end = range.begin})});
  }
  const TaskId task = io_.StartAdd(std::move(action));
  adding_.emplace(task, std::move(addition));
}

void GradientAccumulator::OnTask(TaskKind kind, const TaskDone& done) {
  if (kind == TaskKind::kAddGradients) OnAdded(done);
  if (kind == TaskKind::kMoveGradient) OnMoved(done);
  if (kind == TaskKind::kSumGradient) OnSummed(done);
}

void GradientAccumulator::OnAdded(const TaskDone& done) {
  const auto node = adding_.extract(done.task);
  FOREBAY_CHECK(!node.empty());
  const Addition& addition = node.mapped();
  pipeline_.sums().Unpin(addition.range.partition, addition.range.begin);
  if (done.count == 0) {
    EndAddition(addition, done);
    return;
  }
  // If the task widens the sum, the old sum comes before the contributions. The old sum is finite.
  const uint64_t before = addition.widens ? 2 : 1;
  FOREBAY_CHECK(done.count >= before);
  Contribution& culprit = contributions_.at(addition.sources.at(done.count - before));
  const uint32_t rank = layout_->WorldRank(culprit.delivery.turn.rank);
  fault_ = NonfiniteError(absl::StrCat("the gradient of rank ", rank), addition.range.partition,
                          "holds NaN or infinity");
  AnswerOnce(culprit, fault_);
}

void GradientAccumulator::OnSummed(const TaskDone& done) {
  const auto node = adding_.extract(done.task);
  if (!node.empty()) {
    const Range& range = node.mapped().range;
    pipeline_.sums().Unpin(range.partition, range.begin);
    EndAddition(node.mapped(), done);
    return;
  }
  const bool ends_norm = norms_.OnSummed(done);
  TryNorms();
  if (ends_norm) TryAddAll();
}

void GradientAccumulator::EndAddition(const Addition& addition, const TaskDone& done) {
  const Range& range = addition.range;
  if (!done.squares.finite()) {
    fault_ = NonfiniteError("the sum of the ranks' gradients", range.partition, "is not finite");
    return;
  }
  for (Entry& entry : turns_.CellsIn(range)) {
    auto& [begin, cell] = entry;
    cell.phase = Phase::kGathering;
    cell.sum = Sum::kWhole;
    // The squares are unknown if the cell was split, or if more contributions have arrived.
    const bool whole = begin == range.begin && cell.end == range.end;
    if (!addition.completes || !whole || !cell.waiting.empty()) continue;
    cell.squares = done.squares;
    turns_.SetSummed(range.partition, entry);
  }
  for (const ContributionId id : addition.sources) {
    Contribution& contribution = contributions_.at(id);
    --contribution.additions;
    contribution.elems_left -= range.end - range.begin;
    if (contribution.elems_left == 0) Delete(id, absl::OkStatus());
  }
  TryAddRange(range);
  SpillToOverflow();
  TryNorms();
}

// ------------------------------------------------------------------------------------------- norms

void GradientAccumulator::AskNorm(const CommandId& command, uint32_t rank, uint32_t param) {
  norms_.Ask(command, rank, param);
  if (layout_->is_shared() && !std::exchange(turns_.ranks()[rank].has_asked, true)) {
    Advance();
  } else {
    TryNorms();
  }
}

void GradientAccumulator::TryNorms() {
  if (norms_.empty()) return;
  if (MayStart()) {
    norms_.Advance();
  } else {
    blocked_ = blocked_ || fault_.ok();
  }
}

// ---------------------------------------------------------------------------------- sums in float32

bool GradientAccumulator::is_idle() const {
  return adding_.empty() && io_.stale_tasks() == 0 && !norms_.has_tasks();
}

void GradientAccumulator::OnFloatSums(std::vector<uint64_t> narrow_offsets) {
  FOREBAY_CHECK(is_idle() && plan_.sum_dtype == protocol::DType::kFloat32);
  needs_float_sums_ = false;
  narrow_offsets_ = std::move(narrow_offsets);
  for (uint32_t partition = 0; partition < turns_.partitions(); ++partition) {
    for (Entry& entry : turns_.CellsIn({.partition = partition, .end = UINT64_MAX})) {
      if (entry.second.sum != Sum::kNone) entry.second.sum = Sum::kNarrow;
      turns_.ClearSummed(partition, entry);
    }
  }
  blocked_ = true;
  Pump();
}

void GradientAccumulator::RefuseFloatSums(const absl::Status& status) {
  if (std::exchange(needs_float_sums_, false)) fault_.Update(status);
}

void GradientAccumulator::Pump() {
  for (auto it = not_updated_.begin(); it != not_updated_.end();) {
    if (!pipeline_.queue().IsPartitionDone(*it)) {
      ++it;
      continue;
    }
    const uint32_t partition = *it;
    it = not_updated_.erase(it);
    TryAddRange({.partition = partition, .end = UINT64_MAX});
  }
  const std::pmr::vector<Range> arrived = pipeline_.sums().DrainArrived();
  for (const Range& range : arrived) TryAddRange(range);
  if (!arrived.empty()) TryNorms();
  if (!blocked_ || !MayStart()) return;
  blocked_ = false;
  Advance();
}

// ------------------------------------------------------------------------------------- the overflow

uint64_t GradientAccumulator::OverflowOffset(const Contribution& contribution) const {
  const uint64_t first = uint64_t{contribution.delivery.turn.rank} * kOverflowSlotsPerRank;
  return plan_.overflow_offset + (first + *contribution.slot) * plan_.piece_bytes;
}

// Returns the rank for whose turn the contribution waits.
std::optional<uint32_t> GradientAccumulator::FirstMissingRank(const Delivery& delivery) const {
  for (const Entry& entry : turns_.CellsIn(delivery.range)) {
    const Turn missing = turns_.FirstMissing(delivery.range.partition, entry.second);
    if (missing < delivery.turn) return missing.rank;
  }
  return std::nullopt;
}

// Moves contributions that wait for other ranks out of arenas that have no free piece, newest first. Skips ranks that have
// called step, because they deliver no more.
void GradientAccumulator::SpillToOverflow() {
  if (!layout_->is_shared()) return;  // no contribution waits for other ranks
  if (!MayStart()) {
    blocked_ = blocked_ || fault_.ok();
    return;
  }
  for (auto it = contributions_.rbegin(); it != contributions_.rend();) {
    const auto& [id, contribution] = *it;
    const Delivery& delivery = contribution.delivery;
    const bool waits = contribution.state == State::kArena && contribution.additions == 0 &&
                       !turns_.ranks()[delivery.turn.rank].is_closed();
    std::optional<uint32_t> missing_rank;
    if (waits && FreePieces(delivery) == 0) missing_rank = FirstMissingRank(delivery);
    const bool is_refused = missing_rank && !Spill(id) && members_.is_detached(*missing_rank) &&
                            Refuse(id, *missing_rank);
    if (!is_refused) ++it;
  }
}

// Moves a contribution to an overflow slot. False if the rank has no free overflow slot.
bool GradientAccumulator::Spill(ContributionId id) {
  Contribution& contribution = contributions_.at(id);
  const Delivery& delivery = contribution.delivery;
  auto& used = overflow_used_[delivery.turn.rank];
  const auto free = std::ranges::find(used, false);
  if (free == used.end()) return false;
  *free = true;
  contribution.slot = static_cast<uint32_t>(free - used.begin());
  contribution.state = State::kMoving;
  const TaskId task = io_.Start(TaskKind::kMoveGradient, delivery.command.session,
                                CopyToStepArena{.session = delivery.command.session,
                                                .grad_offset_bytes = delivery.arena_offset_bytes,
                                                .step_offset_bytes = OverflowOffset(contribution),
                                                .bytes = BytesOf(delivery.range)});
  moving_.emplace(task, id);
  return true;
}

void GradientAccumulator::OnMoved(const TaskDone& done) {
  const auto node = moving_.extract(done.task);
  FOREBAY_CHECK(!node.empty());
  Contribution& contribution = contributions_.at(node.mapped());
  const Range range = contribution.delivery.range;
  contribution.state = State::kOverflow;
  AnswerOnce(contribution, absl::OkStatus());
  TryAddRange(range);
  SpillToOverflow();
}

// Refuses a contribution, so that the rank may deliver the range again. False if a part of the contribution was added already.
bool GradientAccumulator::Refuse(ContributionId id, uint32_t missing_rank) {
  const Contribution& contribution = contributions_.at(id);
  const Range range = contribution.delivery.range;
  const Turn turn = contribution.delivery.turn;
  if (contribution.elems_left < range.end - range.begin) return false;
  Delete(id, MakeError(ErrorId::kRankLost,
                       absl::StrCat("the gradient of rank ", layout_->WorldRank(turn.rank), " for ",
                                    layout_->DescribePartition(range.partition), " in step ", step_,
                                    " waits for rank ", missing_rank, ", which has detached"),
                       "attach that rank again"));
  turns_.Remove(range, turn);
  return true;
}

// ------------------------------------------------------------------------------------------- ranks

void GradientAccumulator::CloseRank(uint32_t rank) {
  turns_.ranks()[rank].has_called = true;
  Advance();
}

void GradientAccumulator::ReopenRanks() {
  for (GradientTurns::Rank& rank : turns_.ranks()) rank.has_called = false;
}

void GradientAccumulator::OnRankDetached(const absl::Status& status) {
  SpillToOverflow();
  if (layout_->is_shared()) norms_.RefuseWaiting(status);
}

void GradientAccumulator::AnswerSession(SessionId session, const absl::Status& status) {
  for (auto& [id, contribution] : contributions_) {
    if (contribution.delivery.command.session == session) AnswerOnce(contribution, status);
  }
}

void GradientAccumulator::Drop(const absl::Status& status) {
  for (auto& [id, contribution] : contributions_) AnswerOnce(contribution, status);
  if (!norms_.empty()) {
    const absl::Status dropped =
        !status.ok()   ? status
        : !fault_.ok() ? fault_
                       : MakeError(ErrorId::kGradDropped,
                                   absl::StrCat("the gradients of step ", step_, " were dropped"),
                                   "run forward and backward again");
    norms_.AnswerAll(dropped);
  }
  Reset();
}

bool GradientAccumulator::reduced() const {
  const bool is_busy = !adding_.empty() || !moving_.empty() || !norms_.empty();
  return !is_busy && turns_.unsummed() == 0 && turns_.AreAllClosed();
}

bool GradientAccumulator::UsesArenaOf(SessionId session) const {
  return std::ranges::any_of(contributions_, [session](const auto& entry) {
    return entry.second.state != State::kOverflow &&
           entry.second.delivery.command.session == session;
  });
}

uint64_t GradientAccumulator::unanswered(SessionId session) const {
  const auto count = std::ranges::count_if(contributions_, [session](const auto& entry) {
    return !entry.second.answered && entry.second.delivery.command.session == session;
  });
  return static_cast<uint64_t>(count) + norms_.unanswered(session);
}

void GradientAccumulator::CheckInvariants() const {
  turns_.CheckInvariants();
  std::map<ContributionId, uint64_t> waiting_elems;
  for (uint32_t partition = 0; partition < turns_.partitions(); ++partition) {
    for (const auto& [begin, cell] : turns_.CellsIn({.partition = partition, .end = UINT64_MAX})) {
      for (const auto& [turn, id] : cell.waiting) {
        FOREBAY_CHECK(contributions_.at(id).delivery.turn == turn);
        waiting_elems[id] += cell.end - begin;
      }
    }
  }
  int64_t slots = 0;
  for (const auto& [id, contribution] : contributions_) {
    const bool waits = contribution.additions == 0 && fault_.ok();
    if (waits) FOREBAY_CHECK(waiting_elems[id] == contribution.elems_left);
    FOREBAY_CHECK((contribution.state == State::kArena) == !contribution.slot.has_value());
    FOREBAY_CHECK(contribution.answered || contribution.state != State::kOverflow);
    slots += contribution.slot ? 1 : 0;
  }
  for (const auto& used : overflow_used_) slots -= std::ranges::count(used, true);
  FOREBAY_CHECK(slots == 0);
}

}  // namespace forebay::daemon
