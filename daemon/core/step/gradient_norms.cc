// SPDX-License-Identifier: Apache-2.0
// Computes norms of gathered sums, which ranks ask for before they call step.

#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_adam/stream_kernel.h"
#include "daemon/core/step/gradient_accumulator.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

// Maximum number of pages of sums that a norm requests at once.
constexpr size_t kNormPagesAhead = 4;

bool GradientAccumulator::AllClosed() const {
  for (uint32_t rank = 0; rank < closed_.size(); ++rank) {
    if (!IsClosed(rank)) return false;
  }
  return true;
}

void GradientAccumulator::AskNorm(const CommandId& command, uint32_t rank, uint32_t param) {
  Norm norm{.command = command,
            .boxes = std::pmr::vector<protocol::BoxPlace>(io_.memory()),
            .ranges = std::pmr::vector<Range>(io_.memory()),
            .waiting = std::pmr::deque<Range>(io_.memory()),
            .tasks = std::pmr::map<TaskId, Range>(io_.memory())};
  for (const protocol::BoxPlace& place : layout_->boxes()) {
    const bool is_asked = param == protocol::kAllParams || place.box.param == param;
    const bool is_own = layout_->is_shared() || FirstRank(place.partition) == rank;
    if (is_asked && is_own) norm.boxes.push_back(place);
  }
  norms_.push_back(std::move(norm));
  if (layout_->is_shared() && !asked_[rank]) {
    asked_[rank] = true;
    TryAddAll();
    SpillToOverflow();
  }
  TryNorms();
}

// Calls `visit(range, cell)` for the parts of a box that lie in cells, ascending.
template <typename Visit>
void GradientAccumulator::ForEachCell(const protocol::BoxPlace& place, Visit visit) const {
  const Cells& cells = partitions_[place.partition].cells;
  const uint64_t end = place.partition_elem + place.box.elems();
  auto it = cells.upper_bound(place.partition_elem);
  if (it != cells.begin()) --it;
  for (; it != cells.end() && it->first < end; ++it) {
    const Range range{.partition = place.partition,
                      .begin = std::max(it->first, place.partition_elem),
                      .end = std::min(it->second.end, end)};
    if (range.begin < range.end) visit(range, it->second);
  }
}

// Adds the parts of a box that have a gradient of any rank. Cells are always cut at units, also where pages of sums end and
// where contributions begin. A box may begin within a unit, so its first part is cut at the next unit. All other chunks of the
// sum of squares then begin at units, so that the bits of the norm do not depend on the cells.
void GradientAccumulator::AddSummed(const protocol::BoxPlace& place,
                                    std::pmr::vector<Range>& ranges) const {
  static_assert(protocol::kGradUnitElems % cpu_adam::kSumChunkElems == 0);
  ForEachCell(place, [&](const Range& range, const Cell& cell) {
    if (!cell.has_sum) return;
    const uint64_t unit =
        std::min(range.end, protocol::RoundUp(range.begin, protocol::kGradUnitElems));
    if (range.begin < unit) {
      ranges.push_back({.partition = range.partition, .begin = range.begin, .end = unit});
    }
    if (unit < range.end) {
      ranges.push_back({.partition = range.partition, .begin = unit, .end = range.end});
    }
  });
}

bool GradientAccumulator::IsSummed(const protocol::BoxPlace& place) const {
  bool summed = true;
  ForEachCell(place, [&](const Range&, const Cell& cell) {
    summed = summed && !cell.adding && cell.waiting.empty();
  });
  return summed;
}

bool GradientAccumulator::ANormReads(uint32_t partition, uint64_t begin, uint64_t end) const {
  return std::ranges::any_of(norms_, [=](const Norm& norm) {
    const bool is_over = norm.tasks.empty() && norm.waiting.empty();
    return !is_over && std::ranges::any_of(norm.ranges, [=](const Range& range) {
      return range.partition == partition && range.begin < end && begin < range.end;
    });
  });
}

// Starts the tasks of ranges whose sums are resident, and requests the pages of some other ranges.
void GradientAccumulator::StartNorm(Norm& norm) {
  SumPages& sums = pipeline_.sums();
  size_t asked = 0;
  for (auto range = norm.waiting.begin(); range != norm.waiting.end() && asked < kNormPagesAhead;) {
    if (!sums.Request(range->partition, range->begin, SumPages::Need::kNow)) {
      ++asked;
      ++range;
      continue;
    }
    const TaskId task =
        io_.Start(TaskKind::kSumGradient, 0,
                  SumGradient{.partition = range->partition,
                              .accumulator_offset_bytes = sums.Pin(range->partition, range->begin),
                              .elems = range->end - range->begin,
                              .sum_dtype = plan_.sum_dtype});
    norm.tasks.emplace(task, *range);
    range = norm.waiting.erase(range);
  }
}

void GradientAccumulator::TryNorms() {
  if (norms_.empty()) return;
  if (!MayStart()) {
    blocked_ = blocked_ || fault_.ok();
    return;
  }
  const bool all_there = !layout_->is_shared() || AllClosed();
  for (Norm& norm : norms_) {
    const auto summed = [this](const protocol::BoxPlace& place) { return IsSummed(place); };
    if (!norm.started && (!all_there || !std::ranges::all_of(norm.boxes, summed))) continue;
    if (!std::exchange(norm.started, true)) {
      for (const protocol::BoxPlace& place : norm.boxes) AddSummed(place, norm.ranges);
      norm.waiting.assign(norm.ranges.begin(), norm.ranges.end());
    }
    StartNorm(norm);
  }
  const uint32_t addends = layout_->is_shared() ? members_.world_size() : 1;
  std::erase_if(norms_, [&](const Norm& norm) {
    if (!norm.started || !norm.tasks.empty() || !norm.waiting.empty()) return false;
    protocol::Completion completion{};
    completion.norm = std::sqrt(norm.squares.ToDouble()) / addends;
    if (!norm.answered) io_.Answer(norm.command, completion);
    return true;
  });
}

void GradientAccumulator::RefuseWaitingNorms(const absl::Status& status) {
  std::erase_if(norms_, [&](const Norm& norm) {
    if (norm.started) return false;
    if (!norm.answered) io_.Answer(norm.command, status);
    return true;
  });
}

// Answers and deletes all norms. `status` is OK if the gradients were dropped without an error.
void GradientAccumulator::AnswerNorms(const absl::Status& status) {
  if (norms_.empty()) return;
  const absl::Status dropped =
      !status.ok()   ? status
      : !fault_.ok() ? fault_
                     : MakeError(ErrorId::kGradDropped,
                                 absl::StrCat("the gradients of step ", step_, " were dropped"),
                                 "run forward and backward again");
  for (const Norm& norm : norms_) {
    if (!norm.answered) io_.Answer(norm.command, dropped);
  }
  norms_.clear();
}

void GradientAccumulator::DropNorms(SessionId session, const absl::Status& status) {
  for (Norm& norm : norms_) {
    if (norm.command.session != session || std::exchange(norm.answered, true)) continue;
    io_.Answer(norm.command, status);
  }
}

}  // namespace forebay::daemon
