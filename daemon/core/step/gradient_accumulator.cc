// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/gradient_accumulator.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/wire.h"

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
      contributions_(io.memory()),
      adding_(io.memory()),
      summing_(io.memory()),
      moving_(io.memory()),
      sum_changes_(io.memory()),
      not_updated_(io.memory()) {
  for (size_t i = 0; i < layout_->partitions().size(); ++i) {
    partitions_.push_back({.cells = Cells(io_.memory())});
  }
  Forget();
}

void GradientAccumulator::Forget() {
  for (Partition& partition : partitions_) partition.cells.clear();
  closed_.assign(members_.world_size(), false);
  asked_.assign(members_.world_size(), false);
  passes_.assign(members_.world_size(), 0);
  for (Ranges& ranges : delivered_) ranges.clear();
  while (delivered_.size() > members_.world_size()) delivered_.pop_back();
  while (delivered_.size() < members_.world_size()) delivered_.emplace_back(io_.memory());
  overflow_used_.assign(members_.world_size(), {});
  delivered_total_ = 0;
  unsummed_cells_ = 0;
  contributions_.clear();
  adding_.clear();
  summing_.clear();
  moving_.clear();
  not_updated_.clear();
  in_last_pass_.assign(members_.world_size(), false);
  sum_changes_.clear();
  needs_float_sums_ = false;
  fault_ = absl::OkStatus();
}

uint32_t GradientAccumulator::FirstRank(uint32_t partition) const {
  return layout_->is_shared() ? 0 : layout_->partitions()[partition].owner;
}

uint32_t GradientAccumulator::EndRank(uint32_t partition) const {
  return layout_->is_shared() ? members_.world_size() : FirstRank(partition) + 1;
}

uint64_t GradientAccumulator::BytesOf(const Delivery& delivery) const {
  return (delivery.end - delivery.begin) * protocol::SizeBytes(layout_->grad_dtype());
}

uint64_t GradientAccumulator::OverflowOffset(uint32_t rank, uint32_t slot) const {
  const uint64_t index = uint64_t{rank} * kOverflowSlotsPerRank + slot;
  return plan_.overflow_offset + index * plan_.piece_bytes;
}

void GradientAccumulator::AnswerOnce(Contribution& contribution, const absl::Status& status) {
  if (std::exchange(contribution.answered, true)) return;
  io_.Answer(contribution.delivery.command, status);
}

// ---------------------------------------------------------------------------------------- delivery

uint64_t GradientAccumulator::DeliveredElems(uint32_t rank, uint32_t partition, uint64_t begin,
                                             uint64_t end) const {
  const Ranges& ranges = delivered_[rank];
  uint64_t elems = 0;
  auto it = ranges.upper_bound({.partition = partition, .begin = begin});
  if (it != ranges.begin()) --it;
  for (; it != ranges.end() && it->first < Place{.partition = partition, .begin = end}; ++it) {
    if (it->first.partition != partition) continue;
    const uint64_t first = std::max(begin, it->first.begin);
    const uint64_t last = std::min(end, it->second);
    if (first < last) elems += last - first;
  }
  return elems;
}

bool GradientAccumulator::HasTaken(Turn turn, uint32_t partition, uint64_t begin,
                                   uint64_t end) const {
  if (DeliveredElems(turn.rank, partition, begin, end) == 0) return false;
  const Cells& cells = partitions_[partition].cells;
  return std::any_of(cells.lower_bound(begin), cells.lower_bound(end),
                     [turn](const auto& entry) { return HasTurn(entry.second, turn); });
}

bool GradientAccumulator::HasTurn(const Cell& cell, Turn turn) {
  return turn < cell.next || cell.waiting.contains(turn);
}

void GradientAccumulator::SetSummed(uint32_t partition, uint64_t begin, Cell& cell) {
  cell.summed = true;
  --unsummed_cells_;
  cell.counted = cell.is_last_pass && cell.has_sum;
  if (!cell.counted) return;
  sum_changes_.push_back(
      {.partition = partition, .begin = begin, .end = cell.end, .is_last = true});
}

void GradientAccumulator::ClearSummed(uint32_t partition, uint64_t begin, Cell& cell) {
  if (std::exchange(cell.summed, false)) ++unsummed_cells_;
  if (!std::exchange(cell.counted, false)) return;
  sum_changes_.push_back(
      {.partition = partition, .begin = begin, .end = cell.end, .is_last = false});
}

void GradientAccumulator::SplitAt(uint32_t index, uint64_t elem) {
  Partition& partition = partitions_[index];
  const auto after = partition.cells.upper_bound(elem);
  if (after == partition.cells.begin()) return;
  auto& [begin, cell] = *std::prev(after);
  if (begin == elem || cell.end <= elem) return;
  ClearSummed(index, begin, cell);  // each part needs its own sum of squares
  cell.squares = {};
  Cell right{cell, {cell.waiting, io_.memory()}};
  cell.end = elem;
  ++unsummed_cells_;
  partition.cells.emplace(elem, std::move(right));
}

// Splits and adds cells so that whole cells cover exactly [begin, end).
void GradientAccumulator::Cut(uint32_t index, uint64_t begin, uint64_t end) {
  Partition& partition = partitions_[index];
  SplitAt(index, begin);
  SplitAt(index, end);
  for (uint64_t at = begin; at < end;) {
    const auto next = partition.cells.lower_bound(at);
    if (next != partition.cells.end() && next->first == at) {
      at = next->second.end;
      continue;
    }
    uint64_t gap_end = next == partition.cells.end() ? end : std::min(end, next->first);
    gap_end = std::min(gap_end, pipeline_.sums().EndOnPage(index, at));
    partition.cells.emplace(at, Cell{{.end = gap_end, .next = {.rank = FirstRank(index)}},
                                     std::pmr::map<Turn, Id>(io_.memory())});
    ++unsummed_cells_;
    at = gap_end;
  }
}

void GradientAccumulator::Deliver(uint64_t step, const Delivery& delivery) {
  FOREBAY_CHECK(empty() || step_ == step);
  step_ = step;
  const uint32_t rank = delivery.rank;
  const uint64_t elems = delivery.end - delivery.begin;
  const Turn turn{.pass = delivery.pass, .rank = rank};
  const bool was_delivered =
      DeliveredElems(rank, delivery.partition, delivery.begin, delivery.end) > 0;
  if (delivery.pass < passes_[rank] || (delivery.pass == 0 && was_delivered)) {
    io_.Answer(delivery.command, RepeatError(delivery));
    return;
  }
  Cut(delivery.partition, delivery.begin, delivery.end);
  Cells& cells = partitions_[delivery.partition].cells;
  const auto begin = cells.find(delivery.begin);
  const auto end = cells.lower_bound(delivery.end);
  const auto is_over = [turn](const auto& entry) { return HasTurn(entry.second, turn); };
  if (std::any_of(begin, end, is_over)) {
    io_.Answer(delivery.command,
               was_delivered
                   ? RepeatError(delivery)
                   : MakeError(ErrorId::kStep,
                               absl::StrCat("rank ", layout_->WorldRank(rank), " called step ",
                                            step, " before it delivered elements ", delivery.begin,
                                            " to ", delivery.end, " of ",
                                            layout_->DescribePartition(delivery.partition),
                                            ": they count as zero in this step")));
    return;
  }
  const Id id = ++last_id_;
  contributions_.emplace(id, Contribution{.delivery = delivery, .elems_left = elems});
  for (auto it = begin; it != end; ++it) {
    Cell& cell = it->second;
    cell.waiting.emplace(turn, id);
    cell.newest_pass = std::max(cell.newest_pass, turn.pass);
    cell.is_last_pass = in_last_pass_[rank];
    ClearSummed(delivery.partition, it->first, cell);
  }
  if (delivery.pass > 0 && plan_.sum_dtype != protocol::DType::kFloat32) needs_float_sums_ = true;
  ++delivered_total_;
  AddDelivered(rank, {delivery.partition, delivery.begin}, delivery.end);
  if (std::exchange(passes_[rank], delivery.pass) < delivery.pass && layout_->is_shared()) {
    TryAddAll();  // contributions no longer wait for the rank's earlier passes
  } else {
    TryAddRange(delivery.partition, delivery.begin, delivery.end);
  }
  MakeRoom(rank, delivery.grad_arena_bytes);
  SpillToOverflow();
}

absl::Status GradientAccumulator::RepeatError(const Delivery& delivery) const {
  const uint32_t pass = passes_[delivery.rank];
  return MakeError(
      ErrorId::kGradRepeat,
      absl::StrCat("rank ", layout_->WorldRank(delivery.rank),
                   " has delivered gradients of elements ", delivery.begin, " to ", delivery.end,
                   " of ", layout_->DescribePartition(delivery.partition), " in step ", step_,
                   ", or is past backward pass ", delivery.pass, " (it is in ", pass, ")"),
      "begin a pass before its gradients are delivered");
}

// Records a delivered range. Ranges that touch are merged.
void GradientAccumulator::AddDelivered(uint32_t rank, Place place, uint64_t end) {
  Ranges& ranges = delivered_[rank];
  auto it = ranges.upper_bound(place);
  if (it != ranges.begin()) {
    const auto before = std::prev(it);
    if (before->first.partition == place.partition && before->second >= place.begin) it = before;
  }
  while (it != ranges.end() && it->first.partition == place.partition && it->first.begin <= end) {
    place.begin = std::min(place.begin, it->first.begin);
    end = std::max(end, it->second);
    it = ranges.erase(it);
  }
  ranges.emplace(place, end);
}

// ---------------------------------------------------------------------------------------- addition

bool GradientAccumulator::MayStart() const {
  return fault_.ok() && io_.stale_tasks() == 0 && !needs_float_sums_;
}

uint64_t GradientAccumulator::FreePieces(uint32_t rank, uint64_t grad_arena_bytes) const {
  uint64_t held = 0;
  for (const auto& [id, contribution] : contributions_) {
    const bool holds = contribution.delivery.rank == rank && contribution.state == State::kArena;
    if (holds) held += BytesOf(contribution.delivery);
  }
  return (grad_arena_bytes - std::min(held, grad_arena_bytes)) / plan_.piece_bytes;
}

bool GradientAccumulator::HoldsHalf(uint32_t rank, uint64_t grad_arena_bytes) const {
  return 2 * FreePieces(rank, grad_arena_bytes) < grad_arena_bytes / plan_.piece_bytes;
}

bool GradientAccumulator::IsCrowded(Id id) const {
  const Contribution& contribution = contributions_.at(id);
  if (contribution.state == State::kOverflow) return true;
  return FreePieces(contribution.delivery.rank, contribution.delivery.grad_arena_bytes) < 2;
}

// Adds the contributions of the rank that have arrived in order, if few pieces of the rank's arena are free.
void GradientAccumulator::MakeRoom(uint32_t rank, uint64_t grad_arena_bytes) {
  const bool is_urgent = pipeline_.sums().is_paged() && HoldsHalf(rank, grad_arena_bytes);
  if (FreePieces(rank, grad_arena_bytes) >= 2 && !is_urgent) return;
  std::pmr::vector<Delivery> held(io_.memory());
  for (const auto& [id, contribution] : contributions_) {
    if (contribution.delivery.rank == rank) held.push_back(contribution.delivery);
  }
  for (const Delivery& delivery : held)
    TryAddRange(delivery.partition, delivery.begin, delivery.end);
}

void GradientAccumulator::TryAddRange(uint32_t partition, uint64_t begin, uint64_t end) {
  std::pmr::vector<uint64_t> begins(io_.memory());
  const Cells& cells = partitions_[partition].cells;
  for (auto it = cells.lower_bound(begin); it != cells.end() && it->first < end; ++it) {
    begins.push_back(it->first);
  }
  // Adds to the last cell first, because early updates read blocks ahead from the last block on.
  if (pipeline_.sums().is_paged()) std::ranges::reverse(begins);
  for (const uint64_t at : begins) TryAdd(partition, at);
}

void GradientAccumulator::TryAddAll() {
  for (uint32_t partition = 0; partition < partitions_.size(); ++partition)
    TryAddRange(partition, 0, UINT64_MAX);
}

// Returns how urgently a task needs its page of sums. Gradients wait until early updates free frames as long as at least half
// of their rank's pieces are free.
SumPages::Need GradientAccumulator::NeedOf(const Pass& pass) const {
  const auto is_urgent = [this](Id id) {
    const Delivery& delivery = contributions_.at(id).delivery;
    return IsClosed(delivery.rank) || HoldsHalf(delivery.rank, delivery.grad_arena_bytes);
  };
  return !pipeline_.early().is_on() || std::ranges::any_of(pass.sources, is_urgent)
             ? SumPages::Need::kNow
             : SumPages::Need::kSoon;
}

GradientAccumulator::Turn GradientAccumulator::FirstMissing(uint32_t partition,
                                                            const Cell& cell) const {
  Turn first = kNoTurn;
  for (uint32_t rank = FirstRank(partition); rank < EndRank(partition); ++rank) {
    if (IsClosed(rank)) continue;
    Turn turn{.pass = passes_[rank], .rank = rank};
    if (turn < cell.next) turn.pass = cell.next.pass + (rank < cell.next.rank ? 1 : 0);
    if (cell.waiting.contains(turn)) ++turn.pass;
    first = std::min(first, turn);
  }
  return first;
}

void GradientAccumulator::TryAdd(uint32_t partition, uint64_t begin) {
  const auto it = partitions_[partition].cells.find(begin);
  Cell& cell = it->second;
  if (cell.adding || cell.summed || ANormReads(partition, begin, cell.end)) return;
  if (!MayStart()) {
    blocked_ = true;
    return;
  }
  if (!pipeline_.queue().IsPartitionDone(partition) ||
      pipeline_.early().ReadsSums(partition, begin, cell.end)) {
    not_updated_.insert(partition);
    return;
  }
  Pass pass{.partition = partition, .begin = begin, .end = cell.end, .sources = Ids(io_.memory())};
  bool crowded = false;
  Turn missing = FirstMissing(partition, cell);
  for (const auto& [turn, id] : cell.waiting) {
    if (turn > missing) break;
    if (contributions_.at(id).state == State::kMoving) {
      missing = turn;
      break;
    }
    pass.sources.push_back(id);
    crowded = crowded || IsCrowded(id);
  }
  pass.completes = missing.pass > cell.newest_pass;
  const Turn next =
      std::min(missing, Turn{.pass = cell.newest_pass + 1, .rank = FirstRank(partition)});
  if (!pass.sources.empty() || cell.narrow) {
    if (!pass.completes && !crowded) return;
    if (!pipeline_.sums().Request(partition, begin, NeedOf(pass))) return;
    cell.next = next;
    StartPass(partition, it, std::move(pass));
  } else if (pass.completes && cell.has_sum) {
    if (!pipeline_.sums().Request(partition, begin, SumPages::Need::kNow)) return;
    cell.next = next;
    StartSum(partition, it);
  } else if (pass.completes) {  // every contribution to the range was refused
    cell.next = next;
    SetSummed(partition, begin, cell);
  }
}

void GradientAccumulator::StartPass(uint32_t partition, Cells::iterator at, Pass pass) {
  Cell& cell = at->second;
  cell.adding = true;
  const uint64_t width = protocol::SizeBytes(layout_->grad_dtype());
  pass.widens = std::exchange(cell.narrow, false);
  AddGradients action{.partition = partition,
                      .sources = std::pmr::vector<GradientSource>(io_.memory()),
                      .accumulator_offset_bytes = pipeline_.sums().Pin(partition, pass.begin),
                      .first_elem = pass.begin,
                      .elems = pass.end - pass.begin,
                      .dtype = layout_->grad_dtype(),
                      .sum_dtype = plan_.sum_dtype,
                      .assign = !cell.has_sum || pass.widens};
  if (pass.widens) {
    action.sources.push_back({.offset_bytes = narrow_offsets_[partition] + pass.begin * width});
  }
  for (const Id id : pass.sources) {
    Contribution& contribution = contributions_.at(id);
    const Delivery& delivery = contribution.delivery;
    ++contribution.passes;
    cell.waiting.erase({.pass = delivery.pass, .rank = delivery.rank});
    const bool in_arena = contribution.state == State::kArena;
    action.sources.push_back(
        {.session = in_arena ? delivery.command.session : 0,
         .offset_bytes = (in_arena ? delivery.arena_offset_bytes
                                   : OverflowOffset(delivery.rank, *contribution.slot)) +
                         (pass.begin - delivery.begin) * width});
  }
  const TaskId task = io_.StartAdd(std::move(action));
  adding_.emplace(task, std::move(pass));
}

void GradientAccumulator::StartSum(uint32_t partition, Cells::iterator at) {
  Cell& cell = at->second;
  cell.adding = true;
  const TaskId task =
      io_.Start(TaskKind::kSumGradient, 0,
                SumGradient{.partition = partition,
                            .accumulator_offset_bytes = pipeline_.sums().Pin(partition, at->first),
                            .elems = cell.end - at->first,
                            .sum_dtype = plan_.sum_dtype});
  summing_.emplace(
      task, Pass{.partition = partition, .begin = at->first, .end = cell.end, .completes = true});
}

void GradientAccumulator::OnAdded(const TaskDone& done) {
  const auto node = adding_.extract(done.task);
  FOREBAY_CHECK(!node.empty());
  const Pass& pass = node.mapped();
  pipeline_.sums().Unpin(pass.partition, pass.begin);
  if (done.count > 0) {
    const uint64_t before = pass.widens ? 2 : 1;  // earlier sums are finite
    FOREBAY_CHECK(done.count >= before);
    Contribution& culprit = contributions_.at(pass.sources.at(done.count - before));
    fault_ =
        MakeError(ErrorId::kNonfinite,
                  absl::StrCat("the gradient of rank ", layout_->WorldRank(culprit.delivery.rank),
                               " for ", layout_->DescribePartition(pass.partition), " in step ",
                               step_, " holds NaN or infinity"),
                  "the step was not applied; repeat it with other gradients");
    AnswerOnce(culprit, fault_);
    return;
  }
  EndPass(pass, done);
}

void GradientAccumulator::OnSummed(const TaskDone& done) {
  const auto node = summing_.extract(done.task);
  if (!node.empty()) {
    pipeline_.sums().Unpin(node.mapped().partition, node.mapped().begin);
    EndPass(node.mapped(), done);
    return;
  }
  const auto norm =
      std::ranges::find_if(norms_, [&](const Norm& one) { return one.tasks.contains(done.task); });
  FOREBAY_CHECK(norm != norms_.end());
  const Range range = norm->tasks.extract(done.task).mapped();
  pipeline_.sums().Unpin(range.partition, range.begin);
  norm->squares.Merge(done.squares);
  const bool ends = norm->tasks.empty() && norm->waiting.empty();
  TryNorms();
  if (ends) TryAddAll();
}

void GradientAccumulator::EndPass(const Pass& pass, const TaskDone& done) {
  if (!done.squares.finite()) {
    fault_ = MakeError(ErrorId::kNonfinite,
                       absl::StrCat("the sum of the ranks' gradients for ",
                                    layout_->DescribePartition(pass.partition), " in step ", step_,
                                    " is not finite"),
                       "the step was not applied; repeat it with other gradients");
    return;
  }
  Partition& partition = partitions_[pass.partition];
  for (auto it = partition.cells.lower_bound(pass.begin);
       it != partition.cells.end() && it->first < pass.end; ++it) {
    Cell& cell = it->second;
    cell.adding = false;
    cell.has_sum = true;
    // The squares are unknown if the cell was split, or if more contributions have arrived.
    const bool whole = it->first == pass.begin && cell.end == pass.end;
    if (!pass.completes || !whole || !cell.waiting.empty()) continue;
    cell.squares = done.squares;
    SetSummed(pass.partition, it->first, cell);
  }
  for (const Id id : pass.sources) {
    Contribution& contribution = contributions_.at(id);
    --contribution.passes;
    contribution.elems_left -= pass.end - pass.begin;
    if (contribution.elems_left == 0) Release(id);
  }
  TryAddRange(pass.partition, pass.begin, pass.end);
  SpillToOverflow();
  TryNorms();
}

// ---------------------------------------------------------------------------------- sums in float32

bool GradientAccumulator::is_idle() const {
  const auto runs = [](const Norm& norm) { return !norm.tasks.empty(); };
  return adding_.empty() && summing_.empty() && io_.stale_tasks() == 0 &&
         std::ranges::none_of(norms_, runs);
}

void GradientAccumulator::OnFloatSums(std::vector<uint64_t> narrow_offsets) {
  FOREBAY_CHECK(is_idle() && plan_.sum_dtype == protocol::DType::kFloat32);
  needs_float_sums_ = false;
  narrow_offsets_ = std::move(narrow_offsets);
  for (uint32_t partition = 0; partition < partitions_.size(); ++partition) {
    for (auto& [begin, cell] : partitions_[partition].cells) {
      cell.narrow = cell.has_sum;
      ClearSummed(partition, begin, cell);
    }
  }
  blocked_ = true;
  Pump();
}

void GradientAccumulator::RefuseFloatSums(const absl::Status& status) {
  if (std::exchange(needs_float_sums_, false) && fault_.ok()) fault_ = status;
}

// Frees the bytes of a contribution that is completely added.
void GradientAccumulator::Release(Id id) {
  Contribution& contribution = contributions_.at(id);
  AnswerOnce(contribution, absl::OkStatus());
  if (contribution.slot) overflow_used_[contribution.delivery.rank][*contribution.slot] = false;
  contributions_.erase(id);
}

void GradientAccumulator::Pump() {
  for (auto it = not_updated_.begin(); it != not_updated_.end();) {
    if (!pipeline_.queue().IsPartitionDone(*it)) {
      ++it;
      continue;
    }
    const uint32_t partition = *it;
    it = not_updated_.erase(it);
    TryAddRange(partition, 0, UINT64_MAX);
  }
  const std::pmr::vector<SumPages::Range> arrived = pipeline_.sums().DrainArrived();
  for (const SumPages::Range& range : arrived) {
    TryAddRange(range.partition, range.begin, range.end);
  }
  if (!arrived.empty()) TryNorms();
  if (!blocked_ || !MayStart()) return;
  blocked_ = false;
  TryAddAll();
  SpillToOverflow();
  TryNorms();
}

// ------------------------------------------------------------------------------------- the overflow

uint32_t GradientAccumulator::FirstMissingRank(const Contribution& contribution) const {
  const Delivery& delivery = contribution.delivery;
  const Cells& cells = partitions_[delivery.partition].cells;
  for (auto it = cells.lower_bound(delivery.begin); it != cells.end() && it->first < delivery.end;
       ++it) {
    const Turn missing = FirstMissing(delivery.partition, it->second);
    if (missing < Turn{.pass = delivery.pass, .rank = delivery.rank}) return missing.rank;
  }
  return kNobody;
}

// Moves contributions that wait for other ranks out of arenas that have no free piece, newest first. Skips ranks that have
// called step, because they deliver no more.
void GradientAccumulator::SpillToOverflow() {
  if (!layout_->is_shared()) return;  // no contribution waits for other ranks
  if (!MayStart()) {
    blocked_ = blocked_ || fault_.ok();
    return;
  }
  Ids newest_first(io_.memory());
  for (auto it = contributions_.rbegin(); it != contributions_.rend(); ++it) {
    const Contribution& contribution = it->second;
    if (contribution.state != State::kArena || contribution.passes > 0) continue;
    if (IsClosed(contribution.delivery.rank)) continue;
    newest_first.push_back(it->first);
  }
  for (const Id id : newest_first) {
    const Contribution& contribution = contributions_.at(id);
    const Delivery& delivery = contribution.delivery;
    if (FreePieces(delivery.rank, delivery.grad_arena_bytes) > 0) continue;
    const uint32_t missing_rank = FirstMissingRank(contribution);
    if (missing_rank == kNobody || Spill(id)) continue;
    if (members_.is_detached(missing_rank)) Refuse(id, missing_rank);
  }
}

// Moves a contribution to an overflow slot. False if the rank has no free overflow slot.
bool GradientAccumulator::Spill(Id id) {
  Contribution& contribution = contributions_.at(id);
  const Delivery& delivery = contribution.delivery;
  auto& used = overflow_used_[delivery.rank];
  const auto free = std::find(used.begin(), used.end(), false);
  if (free == used.end()) return false;
  *free = true;
  contribution.slot = static_cast<uint32_t>(free - used.begin());
  contribution.state = State::kMoving;
  const TaskId task = io_.Start(
      TaskKind::kMoveGradient, delivery.command.session,
      CopyToStepArena{.session = delivery.command.session,
                      .grad_offset_bytes = delivery.arena_offset_bytes,
                      .step_offset_bytes = OverflowOffset(delivery.rank, *contribution.slot),
                      .bytes = BytesOf(delivery)});
  moving_.emplace(task, id);
  return true;
}

void GradientAccumulator::OnMoved(const TaskDone& done) {
  const auto node = moving_.extract(done.task);
  FOREBAY_CHECK(!node.empty());
  Contribution& contribution = contributions_.at(node.mapped());
  const Delivery delivery = contribution.delivery;
  contribution.state = State::kOverflow;
  AnswerOnce(contribution, absl::OkStatus());
  TryAddRange(delivery.partition, delivery.begin, delivery.end);
  SpillToOverflow();
}

// Refuses a contribution, so that the rank may deliver the range again. Does nothing if a part of the contribution was added
// already.
void GradientAccumulator::Refuse(Id id, uint32_t missing_rank) {
  Contribution& contribution = contributions_.at(id);
  const Delivery delivery = contribution.delivery;
  if (contribution.elems_left < delivery.end - delivery.begin) return;
  AnswerOnce(
      contribution,
      MakeError(ErrorId::kRankLost,
                absl::StrCat("the gradient of rank ", layout_->WorldRank(delivery.rank), " for ",
                             layout_->DescribePartition(delivery.partition), " in step ", step_,
                             " waits for rank ", missing_rank, ", which has detached"),
                "attach that rank again"));
  Cells& cells = partitions_[delivery.partition].cells;
  for (auto it = cells.lower_bound(delivery.begin); it != cells.end() && it->first < delivery.end;
       ++it) {
    it->second.waiting.erase({.pass = delivery.pass, .rank = delivery.rank});
  }
  contributions_.erase(id);
  --delivered_total_;
  // Removes the range from the merged range that holds it.
  Ranges& ranges = delivered_[delivery.rank];
  const auto range = std::prev(ranges.upper_bound({delivery.partition, delivery.begin}));
  const uint64_t end = std::exchange(range->second, delivery.begin);
  if (range->first.begin == delivery.begin) ranges.erase(range);
  if (delivery.end < end) ranges.emplace(Place{delivery.partition, delivery.end}, end);
}

// ------------------------------------------------------------------------------------------- ranks

void GradientAccumulator::CloseRank(uint32_t rank) {
  closed_[rank] = true;
  TryAddAll();
  SpillToOverflow();
  TryNorms();
}

void GradientAccumulator::ReopenRanks() { closed_.assign(members_.world_size(), false); }

void GradientAccumulator::AnswerSession(SessionId session, const absl::Status& status) {
  for (auto& [id, contribution] : contributions_) {
    if (contribution.delivery.command.session == session) AnswerOnce(contribution, status);
  }
}

void GradientAccumulator::Drop(const absl::Status& status) {
  for (auto& [id, contribution] : contributions_) AnswerOnce(contribution, status);
  AnswerNorms(status);
  Forget();
}

bool GradientAccumulator::reduced() const {
  if (!adding_.empty() || !summing_.empty() || !moving_.empty() || !norms_.empty()) return false;
  return unsummed_cells_ == 0 && AllClosed();
}

bool GradientAccumulator::UsesArenaOf(SessionId session) const {
  return std::any_of(contributions_.begin(), contributions_.end(), [session](const auto& entry) {
    return entry.second.state != State::kOverflow &&
           entry.second.delivery.command.session == session;
  });
}

cpu_adam::SquareSum GradientAccumulator::Squares() const {
  cpu_adam::SquareSum squares;
  for (size_t i = 0; i < partitions_.size(); ++i) {
    if (layout_->partitions()[i].replica != 0) continue;
    for (const auto& [elem, cell] : partitions_[i].cells) squares.Merge(cell.squares);
  }
  return squares;
}

uint64_t GradientAccumulator::unanswered(SessionId session) const {
  const auto count =
      std::count_if(contributions_.begin(), contributions_.end(), [session](const auto& entry) {
        return !entry.second.answered && entry.second.delivery.command.session == session;
      });
  const auto norms = std::ranges::count_if(norms_, [session](const Norm& norm) {
    return !norm.answered && norm.command.session == session;
  });
  return static_cast<uint64_t>(count + norms);
}

void GradientAccumulator::CheckInvariants() const {
  std::map<Id, uint64_t> waiting_elems;
  uint64_t unsummed = 0;
  for (uint32_t partition = 0; partition < partitions_.size(); ++partition) {
    uint64_t last_end = 0;
    for (const auto& [begin, cell] : partitions_[partition].cells) {
      FOREBAY_CHECK(begin >= last_end && begin < cell.end);
      last_end = cell.end;
      if (!cell.summed) ++unsummed;
      FOREBAY_CHECK(!cell.summed ||
                    (cell.waiting.empty() && cell.next.rank == FirstRank(partition)));
      for (const auto& [turn, id] : cell.waiting) {
        const Delivery& delivery = contributions_.at(id).delivery;
        FOREBAY_CHECK(turn >= cell.next && turn == (Turn{delivery.pass, delivery.rank}));
        FOREBAY_CHECK(turn.pass <= std::min(cell.newest_pass, passes_[turn.rank]));
        waiting_elems[id] += cell.end - begin;
      }
    }
  }
  FOREBAY_CHECK(unsummed == unsummed_cells_);
  uint64_t slots = 0;
  for (const auto& [id, contribution] : contributions_) {
    const bool waits = contribution.passes == 0 && fault_.ok();
    if (waits) FOREBAY_CHECK(waiting_elems[id] == contribution.elems_left);
    FOREBAY_CHECK((contribution.state == State::kArena) == !contribution.slot.has_value());
    FOREBAY_CHECK(contribution.answered || contribution.state != State::kOverflow);
    if (contribution.slot) ++slots;
  }
  for (const auto& used : overflow_used_) {
    slots -= static_cast<uint64_t>(std::count(used.begin(), used.end(), true));
  }
  FOREBAY_CHECK(slots == 0);
}

}  // namespace forebay::daemon
