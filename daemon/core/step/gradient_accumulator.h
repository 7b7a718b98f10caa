// SPDX-License-Identifier: Apache-2.0
// Adds the gradients of the step that is being gathered, and tracks the ranges that each rank has delivered.
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

// An element's gradient is the sum of its ranks' contributions in all their backward passes, in float32. Contributions are
// added in the order of turns, independent of the order of arrival: the first passes of all ranks in rank order, then the
// second passes, and so on. So the bits do not depend on timing.
//
// A contribution is a range of a partition in one pass (wire.h). With shared attachment every rank contributes to every
// partition. With sharded attachment only the owner contributes, so that no contribution waits for another rank. A range is
// summed at once when every rank has delivered it in a pass, or has no more deliveries in that pass. Before that, contributions
// that have arrived in order are added if one of their ranks has fewer than two free pieces in its arena. A contribution that
// must wait for another rank's turn while its arena has no free piece moves to one of its rank's overflow slots. If these slots
// are full, the contribution waits in the arena. A contribution waits for earlier turns only. So the rank whose turn is the
// earliest never waits, and ranks cannot deadlock. The ranks may deliver in any order and have different numbers of passes.
//
// If accumulators have 16 bits, the first contribution of a further pass stops all additions until float32 accumulators have
// memory (needs_float_sums). The sums in the old accumulators are added to the new ones.
//
// Contributions to a partition wait while blocks of the step before are updated from its accumulator. Contributions to a range
// also wait while an early update reads the range. If accumulators are paged (SumPages), each cell lies on one page, and its
// contributions wait until that page is resident.
//
// Ranks may cut a partition differently: ranges are split where contributions begin and end (cells).
//
// A contribution or a sum that is not finite ends the attempt. fault() returns the error, additions stop, and the caller drops
// all contributions.
class GradientAccumulator {
 public:
  struct Delivery {
    uint32_t rank = 0;
    uint32_t partition = 0;
    uint64_t begin = 0;  // range in elements of the partition
    uint64_t end = 0;
    uint64_t arena_offset_bytes = 0;
    uint64_t grad_arena_bytes = 0;  // bytes of the session's arena for gradients
    uint32_t pass = 0;              // backward pass of its rank in this attempt
    CommandId command;
  };

  GradientAccumulator(JobTasks& io, std::shared_ptr<const protocol::Layout> layout,
                      const MemoryPlan& plan, const Membership& members, StepPipeline& pipeline);

  // Pass and rank of a contribution. Turns compare in the order of addition.
  struct Turn {
    uint32_t pass = 0;
    uint32_t rank = 0;

    auto operator<=>(const Turn&) const = default;  // NOLINT(modernize-use-nullptr): of clang 14
  };

  // Records that later deliveries of the rank belong to its last backward pass.
  void BeginLastPass(uint32_t rank) { in_last_pass_[rank] = true; }
  // A range whose sum has become final (`is_last`), or is no longer final. A sum is final only if the newest contribution is of
  // its rank's last pass.
  struct SumChange {
    uint32_t partition = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    bool is_last = false;
  };
  std::pmr::vector<SumChange> DrainSumChanges() { return std::exchange(sum_changes_, {}); }

  // Handles a checked kGradReady of `step`. The command is answered when its bytes in the arena are free again, or at once with
  // an error.
  //
  // Errors  E_GRAD_REPEAT  the rank has delivered an element of the range in this pass, or has begun a later pass.
  //         E_STEP         the rank has called step, and the range was summed without the rank.
  void Deliver(uint64_t step, const Delivery& delivery);

  // Asks for the norm of a parameter's gradient (kAllParams: of all gradients). With sharded attachment the norm covers the
  // gradients that the rank has delivered. With shared attachment it covers the job's gradient, and ends this rank's delivery.
  // The command is answered when the gradient is summed, with shared attachment over all ranks, or with the error that ends the
  // attempt.
  void AskNorm(const CommandId& command, uint32_t rank, uint32_t param);
  void DropNorms(SessionId session, const absl::Status& status);
  void RefuseWaitingNorms(const absl::Status& status);  // refuses norms whose tasks have not begun

  // True if a further pass waits for sums in float32.
  bool needs_float_sums() const { return needs_float_sums_; }
  // True if no task reads or writes an accumulator.
  bool is_idle() const;
  // Switches to the plan's accumulators, which are now float32. The old 16-bit accumulators were at `narrow_offsets`. Called
  // while is_idle().
  void OnFloatSums(std::vector<uint64_t> narrow_offsets);
  // Ends the attempt with `status` if it needs sums in float32, because no memory is available for these sums.
  void RefuseFloatSums(const absl::Status& status);
  // Ends the attempt with `status`, because sums are lost.
  void Fail(const absl::Status& status) { fault_.Update(status); }

  // Handle tasks that have ended, other than stale ones (JobTasks::NewEpoch).
  void OnAdded(const TaskDone& done);
  void OnMoved(const TaskDone& done);
  void OnSummed(const TaskDone& done);

  // Starts additions that waited for the end of stale tasks, for the update of the step before, or for pages of sums.
  void Pump();

  // Records that `rank` has called step. Elements that the rank has not delivered count as zero.
  void CloseRank(uint32_t rank);
  void ReopenRanks();  // every step call was refused

  // Handles a rank that has detached. Contributions that would wait for this rank without end, because arena and overflow are
  // full, are refused with E_RANK_LOST.
  void OnRankDetached() { SpillToOverflow(); }

  // Answers the waiting commands of one session. Its contributions are retained.
  void AnswerSession(SessionId session, const absl::Status& status);

  // Answers all waiting commands with `status`, and deletes all contributions. Tasks may still run: the caller makes these
  // tasks stale.
  void Drop(const absl::Status& status);

  // Deletes all contributions, because the plan and the world size have changed. Called while no task runs.
  void OnWorldChanged() { Forget(); }

  bool has_norms() const { return !norms_.empty(); }
  bool empty() const { return delivered_total_ == 0; }
  bool has_delivered(uint32_t rank) const { return !delivered_[rank].empty(); }
  bool has_asked(uint32_t rank) const { return asked_[rank]; }
  // Number of elements of [begin, end) of a partition that the rank has delivered.
  uint64_t DeliveredElems(uint32_t rank, uint32_t partition, uint64_t begin, uint64_t end) const;
  // True if the rank has delivered some of the range in its pass `turn.pass`.
  bool HasTaken(Turn turn, uint32_t partition, uint64_t begin, uint64_t end) const;
  // True if all ranks have called step (or have ended their delivery with AskNorm()), all contributions are summed, no task
  // runs, and no norm is pending.
  bool reduced() const;
  bool UsesArenaOf(SessionId session) const;
  const absl::Status& fault() const { return fault_; }
  // Exact sum of the squares of all gradients. Replicas count once.
  cpu_adam::SquareSum Squares() const;

  // Returns the number of commands that are not answered yet, for CheckInvariants().
  uint64_t unanswered(SessionId session) const;
  void CheckInvariants() const;

 private:
  enum class State : uint8_t { kArena, kMoving, kOverflow };
  using Id = uint64_t;  // id of a contribution, ascending in the order of arrival

  struct Contribution {
    Delivery delivery;
    State state = State::kArena;
    bool answered = false;
    std::optional<uint32_t> slot = {};  // overflow slot of the contribution
    uint64_t elems_left = 0;            // number of elements not added yet
    uint32_t passes = 0;                // running tasks that read the contribution
  };

  using Ids = std::pmr::vector<Id>;

  struct CellState {
    uint64_t end = 0;
    Turn next = {};            // earlier turns are added, being added, or zero
    uint32_t newest_pass = 0;  // newest pass of all contributions
    bool adding = false;
    bool has_sum = false;       // the accumulator holds a sum
    bool narrow = false;        // the sum is in the old 16-bit accumulator
    bool summed = false;        // the sum and its squares include all ranks
    bool is_last_pass = false;  // the newest contribution belongs to a last pass
    bool counted = false;       // reported with SumChange::is_last
    cpu_adam::SquareSum squares = {};
  };
  // A range that each contribution either covers completely or does not touch.
  struct Cell : CellState {
    std::pmr::map<Turn, Id> waiting;
  };
  using Cells = std::pmr::map<uint64_t, Cell>;  // cells by their first element

  struct Partition {
    Cells cells;
  };

  // A task that adds contributions to, or squares the sums of, a range of a partition.
  struct Pass {
    uint32_t partition = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    bool widens = false;  // the first source is the cell's narrow accumulator
    Ids sources = {};     // contributions in the order of turns
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
    std::pmr::vector<Range> ranges;      // parts of the boxes with a sum
    std::pmr::deque<Range> waiting;      // part of `ranges` whose tasks have not begun
    std::pmr::map<TaskId, Range> tasks;  // running tasks
    cpu_adam::SquareSum squares = {};
    bool started = false;
    bool answered = false;  // answered already, because the session has ended
  };
  struct Place {
    uint32_t partition = 0;
    uint64_t begin = 0;

    auto operator<=>(const Place&) const = default;  // NOLINT(modernize-use-nullptr): of clang 14
  };

  using Ranges = std::pmr::map<Place, uint64_t>;  // ends of ranges; adjacent ranges are merged

  static constexpr uint32_t kNobody = UINT32_MAX;
  static constexpr Turn kNoTurn = {.pass = UINT32_MAX, .rank = UINT32_MAX};

  // True if the contribution of the turn is added, is being added, counts as zero, or waits.
  static bool HasTurn(const Cell& cell, Turn turn);
  absl::Status RepeatError(const Delivery& delivery) const;
  void Cut(uint32_t partition, uint64_t begin, uint64_t end);
  void SplitAt(uint32_t partition, uint64_t elem);
  void AddDelivered(uint32_t rank, Place place, uint64_t end);
  bool IsClosed(uint32_t rank) const { return closed_[rank] || asked_[rank]; }
  bool AllClosed() const;
  // Returns the first turn that may still arrive for a cell, or kNoTurn if no turn is missing.
  Turn FirstMissing(uint32_t partition, const Cell& cell) const;
  template <typename Visit>
  void ForEachCell(const protocol::BoxPlace& place, Visit visit) const;
  bool IsSummed(const protocol::BoxPlace& place) const;
  void AddSummed(const protocol::BoxPlace& place, std::pmr::vector<Range>& ranges) const;
  // True if a norm reads some of the range, so that no contribution is added to the range.
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
  // True if less than half of the rank's pieces are free, so that its deliveries soon lack room.
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
  // Ranks from FirstRank() to EndRank() - 1 contribute to the partition.
  uint32_t FirstRank(uint32_t partition) const;
  uint32_t EndRank(uint32_t partition) const;

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  const MemoryPlan& plan_;
  const Membership& members_;
  StepPipeline& pipeline_;
  uint64_t step_ = 0;
  std::vector<Partition> partitions_;
  std::vector<bool> closed_;       // by rank: true if it has called step
  std::vector<bool> asked_;        // by rank: true if it has asked for a norm of the job's gradient
  std::vector<uint32_t> passes_;   // current backward pass, by rank
  std::vector<Ranges> delivered_;  // delivered ranges of all passes, by rank
  uint64_t delivered_total_ = 0;
  uint64_t unsummed_cells_ = 0;
  std::vector<std::array<bool, kOverflowSlotsPerRank>> overflow_used_;  // by rank
  std::pmr::map<Id, Contribution> contributions_;  // contributions not completely added
  Id last_id_ = 0;
  std::pmr::map<TaskId, Pass> adding_;
  std::pmr::map<TaskId, Pass> summing_;
  std::vector<Norm> norms_;
  std::pmr::map<TaskId, Id> moving_;
  std::vector<uint64_t> narrow_offsets_;  // offsets of the old 16-bit accumulators, by partition
  bool needs_float_sums_ = false;
  std::vector<bool> in_last_pass_;  // by rank
  std::pmr::vector<SumChange> sum_changes_;
  // Partitions whose accumulators hold sums of the step before, or are being read.
  std::pmr::set<uint32_t> not_updated_;
  bool blocked_ = false;  // an addition waits for stale tasks or for float32 sums
  absl::Status fault_;
};

}  // namespace forebay::daemon
