// SPDX-License-Identifier: Apache-2.0
// The gradients of the step that is being gathered: who has delivered what, and in which order it
// is added.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cpu_adam/square_sum.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/sessions/membership.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/sum_pages.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// An element's gradient is the sum of its ranks' contributions in all their backward passes, added in float32
// in the order of turns whatever the order of arrival: the first passes of all ranks in rank order, then the second
// ones, and so on. So the bits do not depend on timing.
//
// A contribution is a range of a partition in one pass (wire.h). With shared attachment every rank contributes to
// every partition; with sharded attachment the owner alone does, so that nothing waits for another rank. Where all
// ranks have delivered a range in a pass, or deliver no more in it, it is summed at once. Before that, what has
// arrived in order is added where one of its ranks has fewer than two free pieces in its arena. A contribution that
// must wait for another rank's turn while its arena has no free piece moves to one of its rank's overflow slots;
// with these full it waits. It waits for earlier turns alone. So the rank whose turn is the earliest waits for
// nobody, waiting never closes a circle, and the ranks may deliver in any order and have different numbers of passes.
//
// Where accumulators have 16 bits, nothing is added from the first further pass on until there is memory for
// float32 ones (needs_float_sums); what the old ones hold is added to the new.
//
// While blocks of the step before are updated from a partition's accumulator, its contributions wait; so do
// those of a range that an early update reads. Where accumulators are paged (SumPages), a cell lies on one
// page, and what is to be added waits until that is there.
//
// Ranks may cut a partition differently: ranges are split where contributions begin and end (cells).
//
// A contribution or a sum that is not finite ends the attempt: fault() says why, nothing is added any
// more, and the caller drops everything.
class GradientAccumulator {
 public:
  struct Delivery {
    uint32_t rank = 0;
    uint32_t partition = 0;
    uint64_t begin = 0;  // elements of the partition
    uint64_t end = 0;
    uint64_t arena_offset_bytes = 0;
    uint64_t grad_arena_bytes = 0;  // of the session, for gradients
    uint32_t pass = 0;              // of its rank, in this attempt
    CommandId command;
  };

  GradientAccumulator(JobTasks& io, std::shared_ptr<const protocol::Layout> layout,
                      const MemoryPlan& plan, const Membership& members, StepPipeline& pipeline);

  // Whose contribution it is; in the order of addition.
  struct Turn {
    uint32_t pass = 0;
    uint32_t rank = 0;

    auto operator<=>(const Turn&) const = default;  // NOLINT(modernize-use-nullptr): of clang 14
  };

  // What the rank delivers from now on is of its last backward pass.
  void BeginLastPass(uint32_t rank) { in_last_pass_[rank] = true; }
  // Ranges that have their last sum now, or do not have it any more: of contributions of a last pass alone.
  struct SumChange {
    uint32_t partition = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    bool is_last = false;
  };
  std::pmr::vector<SumChange> DrainSumChanges() { return std::exchange(sum_changes_, {}); }

  // A checked kGradReady of step `step`; answered when its bytes are free, or at once with an error.
  //
  // Errors  E_GRAD_REPEAT  the rank has delivered an element of the range in this pass, or has begun a later one.
  //         E_STEP         the range went on without the rank after it had called step.
  void Deliver(uint64_t step, const Delivery& delivery);

  // Norm of a parameter's gradient (kAllParams: of the whole): with sharded attachment of what the rank
  // has delivered, with shared attachment of the job's, which ends this rank's delivery. Answered when
  // it is summed, with shared attachment of all ranks; or with what ends the attempt.
  void AskNorm(const CommandId& command, uint32_t rank, uint32_t param);
  void DropNorms(SessionId session, const absl::Status& status);
  void RefuseWaitingNorms(const absl::Status& status);  // those that are not being taken yet

  // A further pass waits for sums in float32.
  bool needs_float_sums() const { return needs_float_sums_; }
  // No task reads or writes an accumulator.
  bool is_idle() const;
  // It is idle, and the plan's accumulators are float32 now; before they were at `narrow_offsets`.
  void OnFloatSums(std::vector<uint64_t> narrow_offsets);
  // There is no memory for them: the attempt ends with `status` if it needs them.
  void RefuseFloatSums(const absl::Status& status);
  // Sums are lost: the attempt ends with `status`.
  void Fail(const absl::Status& status) { fault_.Update(status); }

  // Outcomes of its tasks. Not of stale ones (JobTasks::NewEpoch).
  void OnAdded(const TaskDone& done);
  void OnMoved(const TaskDone& done);
  void OnSummed(const TaskDone& done);

  // Starts what waited for the end of stale tasks, or for the update of the step before.
  void Pump();

  // `rank` has called step: what it has not delivered counts as zero.
  void CloseRank(uint32_t rank);
  void ReopenRanks();  // every step call was refused

  // A rank has detached. Contributions that would wait for it without end, for want of room, are
  // refused with E_RANK_LOST.
  void OnRankDetached() { SpillToOverflow(); }

  // Answers what waits of one session; its contributions stay.
  void AnswerSession(SessionId session, const absl::Status& status);

  // Answers all that wait with `status` and forgets everything. Tasks may still run: the caller
  // makes them stale.
  void Drop(const absl::Status& status);

  // Forgets everything: the plan and the world size are others. No task of it runs.
  void OnWorldChanged() { Forget(); }

  bool has_norms() const { return !norms_.empty(); }
  bool empty() const { return delivered_total_ == 0; }
  bool has_delivered(uint32_t rank) const { return !delivered_[rank].empty(); }
  bool has_asked(uint32_t rank) const { return asked_[rank]; }
  // Elements of [begin, end) of a partition that the rank has delivered.
  uint64_t DeliveredElems(uint32_t rank, uint32_t partition, uint64_t begin, uint64_t end) const;
  // Whether the rank has delivered some of the range in its pass `turn.pass`.
  bool HasTaken(Turn turn, uint32_t partition, uint64_t begin, uint64_t end) const;
  // All ranks are closed and everything is summed; nothing runs.
  bool reduced() const;
  bool UsesArenaOf(SessionId session) const;
  const absl::Status& fault() const { return fault_; }
  // Of each group exactly, whatever its partitions; added in the order of groups. Replicas count once.
  cpu_adam::SquareSum Squares() const;

  // Commands not answered yet, for CheckInvariants.
  uint64_t unanswered(SessionId session) const;
  void CheckInvariants() const;

 private:
  enum class State : uint8_t { kArena, kMoving, kOverflow };
  using Id = uint64_t;  // of a contribution, in the order of arrival

  struct Contribution {
    Delivery delivery;
    State state = State::kArena;
    bool answered = false;
    std::optional<uint32_t> slot = {};  // of the overflow of its rank
    uint64_t elems_left = 0;            // not added yet
    uint32_t passes = 0;                // that read it now
  };

  using Ids = std::pmr::vector<Id>;

  struct CellState {
    uint64_t end = 0;
    Turn next = {};            // earlier ones are added, being added, or count as zero
    uint32_t newest_pass = 0;  // of all contributions
    bool adding = false;
    bool has_sum = false;       // the accumulator holds a sum
    bool narrow = false;        // not the plan's, but the one of 16 bits before it
    bool summed = false;        // of all ranks, squares included
    bool is_last_pass = false;  // the newest contribution is of its rank's last pass
    bool counted = false;       // as a last sum
    cpu_adam::SquareSum squares = {};
  };
  // A range in which every contribution covers all or nothing.
  struct Cell : CellState {
    std::pmr::map<Turn, Id> waiting;
  };
  using Cells = std::pmr::map<uint64_t, Cell>;  // by first element

  struct Partition {
    Cells cells;
  };

  // One task over a range of a partition.
  struct Pass {
    uint32_t partition = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    bool widens = false;  // the first source is the cell's narrow accumulator
    Ids sources = {};     // in the order of turns
    bool completes = false;
  };
  struct Range {
    uint32_t partition = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  struct Norm {
    CommandId command;
    std::pmr::vector<protocol::BoxPlace> boxes;
    std::pmr::vector<Range> ranges;      // of the boxes, those that hold a sum: what the tasks read
    std::pmr::deque<Range> waiting;      // of these, whose tasks have not begun
    std::pmr::map<TaskId, Range> tasks;  // that run
    cpu_adam::SquareSum squares = {};
    bool started = false;
    bool answered = false;  // its session has ended
  };
  struct Place {
    uint32_t partition = 0;
    uint64_t begin = 0;

    auto operator<=>(const Place&) const = default;  // NOLINT(modernize-use-nullptr): of clang 14
  };

  using Ranges = std::pmr::map<Place, uint64_t>;  // to their ends, merged

  static constexpr uint32_t kNobody = UINT32_MAX;
  static constexpr Turn kNoTurn = {.pass = UINT32_MAX, .rank = UINT32_MAX};

  // It is added, is being added, counts as zero, or waits.
  static bool HasTurn(const Cell& cell, Turn turn);
  absl::Status RepeatError(const Delivery& delivery) const;
  void Cut(uint32_t partition, uint64_t begin, uint64_t end);
  void SplitAt(uint32_t partition, uint64_t elem);
  void AddDelivered(uint32_t rank, Place place, uint64_t end);
  bool IsClosed(uint32_t rank) const { return closed_[rank] || asked_[rank]; }
  bool AllClosed() const;
  // Of what may still arrive for a cell, the first; kNoTurn where nothing may.
  Turn FirstMissing(uint32_t partition, const Cell& cell) const;
  template <typename Visit>
  void ForEachCell(const protocol::BoxPlace& place, Visit visit) const;
  bool IsSummed(const protocol::BoxPlace& place) const;
  void AddSummed(const protocol::BoxPlace& place, std::pmr::vector<Range>& ranges) const;
  // A norm is being taken of some of the range: nothing is added to it meanwhile.
  bool ANormReads(uint32_t partition, uint64_t begin, uint64_t end) const;
  void TryNorms();
  void StartNorm(Norm& norm);
  void AnswerNorms(const absl::Status& status);
  bool MayStart() const;
  SumPages::Need NeedOf(const Pass& pass) const;
  void TryAdd(uint32_t partition, uint64_t begin);
  void TryAddRange(uint32_t partition, uint64_t begin, uint64_t end);
  void TryAddAll();
  bool IsCrowded(Id id) const;
  void MakeRoom(uint32_t rank, uint64_t grad_arena_bytes);
  uint64_t FreePieces(uint32_t rank, uint64_t grad_arena_bytes) const;
  // What is delivered next is soon short of room.
  bool HoldsHalf(uint32_t rank, uint64_t grad_arena_bytes) const;
  void StartPass(uint32_t partition, Cells::iterator cell, Pass pass);
  void StartSum(uint32_t partition, Cells::iterator cell);
  void SetSummed(uint32_t partition, uint64_t begin, Cell& cell);
  void ClearSummed(uint32_t partition, uint64_t begin, Cell& cell);
  void EndPass(const Pass& pass, const TaskDone& done);
  void Release(Id id);
  void SpillToOverflow();
  bool Spill(Id id);
  void Refuse(Id id, uint32_t missing_rank);
  uint32_t FirstMissingRank(const Contribution& contribution) const;
  void AnswerOnce(Contribution& contribution, const absl::Status& status);
  void Forget();
  uint64_t BytesOf(const Delivery& delivery) const;
  uint64_t OverflowOffset(uint32_t rank, uint32_t slot) const;
  // Ranks that contribute to a partition: [FirstRank, EndRank).
  uint32_t FirstRank(uint32_t partition) const;
  uint32_t EndRank(uint32_t partition) const;

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  const MemoryPlan& plan_;
  const Membership& members_;
  StepPipeline& pipeline_;
  uint64_t step_ = 0;
  std::vector<Partition> partitions_;
  std::vector<bool> closed_;       // by rank: it has called step
  std::vector<bool> asked_;        // by rank: for a norm of the job's gradient
  std::vector<uint32_t> passes_;   // by rank: the one that it is in
  std::vector<Ranges> delivered_;  // by rank, of all passes
  uint64_t delivered_total_ = 0;
  uint64_t unsummed_cells_ = 0;
  std::vector<std::array<bool, kOverflowSlotsPerRank>> overflow_used_;  // by rank
  std::pmr::map<Id, Contribution> contributions_;                       // that are not wholly added
  Id last_id_ = 0;
  std::pmr::map<TaskId, Pass> adding_;
  std::pmr::map<TaskId, Pass> summing_;
  std::vector<Norm> norms_;
  std::pmr::map<TaskId, Id> moving_;
  std::vector<uint64_t> narrow_offsets_;  // as the plan's accumulator_offsets
  bool needs_float_sums_ = false;
  std::vector<bool> in_last_pass_;  // by rank
  std::pmr::vector<SumChange> sum_changes_;
  // Partitions whose accumulators hold sums of the step before, or are being read.
  std::pmr::set<uint32_t> not_updated_;
  bool blocked_ = false;  // something waits for the end of stale tasks, or for sums in float32
  absl::Status fault_;
};

}  // namespace forebay::daemon
