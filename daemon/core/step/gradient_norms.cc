// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/gradient_norms.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu_adam/stream_kernel.h"
#include "protocol/os/check.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// Maximum number of pages of sums that a norm requests at once.
constexpr size_t kNormPagesAhead = 4;

GradientNorms::GradientNorms(JobTasks& io, const protocol::Layout& layout, const MemoryPlan& plan,
                             const GradientTurns& turns, SumPages& sums)
    : io_(io), layout_(layout), plan_(plan), turns_(turns), sums_(sums) {}

void GradientNorms::Ask(const CommandId& command, uint32_t rank, uint32_t param) {
  Norm norm{.command = command,
            .boxes = std::pmr::vector<Range>(io_.memory()),
            .ranges = std::pmr::vector<Range>(io_.memory()),
            .waiting = std::pmr::deque<Range>(io_.memory()),
            .tasks = std::pmr::map<TaskId, Range>(io_.memory())};
  for (const protocol::BoxPlace& place : layout_.boxes()) {
    const bool is_asked = param == protocol::kAllParams || place.box.param == param;
    const bool is_own = layout_.is_shared() || turns_.FirstRank(place.partition) == rank;
    if (!is_asked || !is_own) continue;
    norm.boxes.push_back({.partition = place.partition,
                          .begin = place.partition_elem,
                          .end = place.partition_elem + place.box.elems()});
  }
  norms_.push_back(std::move(norm));
}

// Adds the parts of a box that have a gradient of any rank. Cells are always cut at units, also where pages of sums end and
// where contributions begin. A box may begin within a unit, so its first part is cut at the next unit. All other chunks of the
// sum of squares then begin at units, so that the bits of the norm do not depend on the cells.
void GradientNorms::AddSummed(const Range& box, std::pmr::vector<Range>& ranges) const {
  static_assert(protocol::kGradUnitElems % cpu_adam::kSumChunkElems == 0);
  for (const auto& [begin, cell] : turns_.CellsOver(box)) {
    if (cell.sum == GradientTurns::Sum::kNone) continue;
    const Range part{box.partition, std::max(begin, box.begin), std::min(cell.end, box.end)};
    const uint64_t unit =
        std::min(part.end, protocol::RoundUp(part.begin, protocol::kGradUnitElems));
    if (part.begin < unit) ranges.push_back({part.partition, part.begin, unit});
    if (unit < part.end) ranges.push_back({part.partition, unit, part.end});
  }
}

bool GradientNorms::IsSummed(const Range& box) const {
  return std::ranges::all_of(turns_.CellsOver(box), [](const GradientTurns::Entry& entry) {
    return entry.second.phase != GradientTurns::Phase::kAdding && entry.second.waiting.empty();
  });
}

bool GradientNorms::Reads(const Range& range) const {
  return std::ranges::any_of(norms_, [&range](const Norm& norm) {
    return !norm.is_read() && std::ranges::any_of(norm.ranges, [&range](const Range& part) {
      return part.Overlaps(range);
    });
  });
}

TaskId GradientNorms::StartSum(const Range& range) {
  return io_.Start(TaskKind::kSumGradient, 0,
                   SumGradient{.partition = range.partition,
                               .accumulator_offset_bytes = sums_.Pin(range.partition, range.begin),
                               .elems = range.end - range.begin,
                               .sum_dtype = plan_.sum_dtype});
}

// Starts the tasks of ranges whose sums are resident, and requests the pages of some other ranges.
void GradientNorms::StartTasks(Norm& norm) {
  size_t asked = 0;
  for (auto range = norm.waiting.begin(); range != norm.waiting.end() && asked < kNormPagesAhead;) {
    if (!sums_.Request(range->partition, range->begin, SumPages::Need::kNow)) {
      ++asked;
      ++range;
      continue;
    }
    norm.tasks.emplace(StartSum(*range), *range);
    range = norm.waiting.erase(range);
  }
}

void GradientNorms::Advance() {
  const bool may_start = !layout_.is_shared() || turns_.AreAllClosed();
  for (Norm& norm : norms_) {
    const auto summed = [this](const Range& box) { return IsSummed(box); };
    if (!norm.started && (!may_start || !std::ranges::all_of(norm.boxes, summed))) continue;
    if (!std::exchange(norm.started, true)) {
      for (const Range& box : norm.boxes) AddSummed(box, norm.ranges);
      norm.waiting.assign(norm.ranges.begin(), norm.ranges.end());
    }
    StartTasks(norm);
  }
  const size_t addends = layout_.is_shared() ? turns_.ranks().size() : 1;
  std::erase_if(norms_, [&](const Norm& norm) {
    if (!norm.started || !norm.is_read()) return false;
    protocol::Completion completion{};
    completion.norm = std::sqrt(norm.squares.ToDouble()) / static_cast<double>(addends);
    if (!norm.answered) io_.Answer(norm.command, completion);
    return true;
  });
}

bool GradientNorms::OnSummed(const TaskDone& done) {
  const auto norm = std::ranges::find_if(
      norms_, [&done](const Norm& one) { return one.tasks.contains(done.task); });
  FOREBAY_CHECK(norm != norms_.end());
  const Range range = norm->tasks.extract(done.task).mapped();
  sums_.Unpin(range.partition, range.begin);
  norm->squares.Merge(done.squares);
  return norm->is_read();
}

void GradientNorms::Answer(Norm& norm, const absl::Status& status) {
  if (!std::exchange(norm.answered, true)) io_.Answer(norm.command, status);
}

void GradientNorms::RefuseWaiting(const absl::Status& status) {
  std::erase_if(norms_, [&](const Norm& norm) {
    if (!norm.started && !norm.answered) io_.Answer(norm.command, status);
    return !norm.started;
  });
}

void GradientNorms::AnswerAll(const absl::Status& status) {
  for (Norm& norm : norms_) Answer(norm, status);
  norms_.clear();
}

void GradientNorms::AnswerSession(SessionId session, const absl::Status& status) {
  for (Norm& norm : norms_) {
    if (norm.command.session == session) Answer(norm, status);
  }
}

bool GradientNorms::has_tasks() const {
  return std::ranges::any_of(norms_, [](const Norm& norm) { return !norm.tasks.empty(); });
}

uint64_t GradientNorms::unanswered(SessionId session) const {
  return static_cast<uint64_t>(std::ranges::count_if(norms_, [session](const Norm& norm) {
    return !norm.answered && norm.command.session == session;
  }));
}

}  // namespace forebay::daemon
