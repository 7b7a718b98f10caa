// SPDX-License-Identifier: Apache-2.0
// Adds the gradients of the step that is being gathered, in an order that does not depend on their arrival.
#pragma once

#include <array>
#include <cstdint>
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
#include "daemon/core/step/gradient_norms.h"
#include "daemon/core/step/gradient_turns.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/sum_pages.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// An element's gradient is the sum of its ranks' contributions in all their backward passes, in float32. Contributions are
// added in the order of turns, independent of the order of arrival: the first passes of all ranks in rank order, then the
// second passes, and so on. So the bits do not depend on timing. GradientTurns tracks the turns.
//
// A contribution is a range of a partition in one pass (wire.h). With shared attachment every rank contributes to every
// partition. With sharded attachment only the owner contributes, so that no contribution waits for another rank.
//
// States of a contribution (State)
//   kArena     Its bytes are in the arena of its rank's session. It waits for its turn, or is being added.
//   kMoving    It waits for another rank's turn, and its arena had no free piece. Its bytes are copied to an overflow slot.
//   kOverflow  Its bytes are in the slot. It waits for its turn, or is being added. Its command is answered.
//
// States of a cell, which is added at once (GradientTurns::Phase)
//   kGathering  Contributions are missing or wait. Contributions that have arrived in order are added before the cell is
//               complete in two cases: one of them is in an overflow slot, or the arena of one of their ranks has fewer than
//               two free pieces.
//   kAdding     A task adds contributions, or squares the sum.
//   kSummed     Every rank has delivered the cell in the newest pass, or has no more deliveries in that pass, and the sum is
//               complete. A further contribution changes the state to kGathering.
//   kFinal      Like kSummed, and the newest contribution is of its rank's last pass: early updates may read the sum.
//
// Invariants
//   1. The invariants of GradientTurns hold.
//   2. A contribution that waits in a cell has the turn at which it waits.
//   3. The cells in which a contribution waits have as many elements as its elems_left, unless a task adds the contribution or
//      the attempt has a fault.
//   4. A contribution has a slot in the states kMoving and kOverflow. Each used slot belongs to one contribution.
//   5. A contribution in the state kOverflow is answered.
//
// Example: two ranks and a shared partition of 8192 elements
//   1. Rank 1 delivers [0, 8192). The cell [0, 8192) waits for rank 0.
//   2. Rank 0 delivers [4096, 8192), which cuts the cell at 4096. No turn is missing in [4096, 8192): a task adds rank 0 and
//      then rank 1. 4096 elements of rank 1's contribution still wait.
//   3. Rank 0 delivers [0, 4096). A task adds rank 0 and then rank 1. Rank 1's command is answered.
//   If rank 0 delivers first, the tasks are the same: each adds rank 0 and then rank 1.
//
// Example: rank 1 has an arena of three pieces, and rank 0 has delivered nothing
//   1. Rank 1 delivers A, B and C. No piece is free, so C moves to overflow slot 0. At the end of the copy the command of C is
//      answered, and one piece is free.
//   2. Rank 1 delivers D, which moves to slot 1, and then E. Both slots are used, so E waits in the arena like A and B.
//   3. Rank 0 delivers A. A task adds rank 0 and then rank 1, and rank 1's A is answered. Rank 0 never waits for room, because
//      its turn is the earliest. So ranks cannot deadlock, whatever the order of deliveries and the number of passes.
//
// If accumulators have 16 bits, the first contribution of a further pass stops all additions until float32 accumulators have
// memory (needs_float_sums). The sums in the old accumulators are added to the new ones. Contributions to a partition wait
// while blocks of the step before are updated from its accumulator. Contributions to a range wait while an early update or a
// norm reads the range, and until its page of sums is resident (SumPages).
//
// A contribution or a sum that is not finite ends the attempt. fault() returns the error, additions stop, and the caller drops
// all contributions.
class GradientAccumulator {
 public:
  struct Delivery {
    SumPages::Range range;
    Turn turn;
    uint64_t arena_offset_bytes = 0;
    uint64_t grad_arena_bytes = 0;  // bytes of the session's arena for gradients
    CommandId command;
  };

  GradientAccumulator(JobTasks& io, std::shared_ptr<const protocol::Layout> layout,
                      const MemoryPlan& plan, const Membership& members, StepPipeline& pipeline);

  const GradientTurns& turns() const { return turns_; }
  GradientNorms& norms() { return norms_; }

  // Records that later deliveries of the rank belong to its last backward pass.
  void BeginLastPass(uint32_t rank) { turns_.ranks()[rank].is_in_last_pass = true; }
  std::pmr::vector<GradientTurns::SumChange> DrainSumChanges() { return turns_.DrainSumChanges(); }

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

  // Handles a task that has ended, other than a stale one (JobTasks::NewEpoch).
  void OnTask(TaskKind kind, const TaskDone& done);

  // Starts additions that waited for the end of stale tasks, for the update of the step before, or for pages of sums.
  void Pump();

  // Records that `rank` has called step. Elements that the rank has not delivered count as zero.
  void CloseRank(uint32_t rank);
  void ReopenRanks();  // every step call was refused

  // Handles a rank that has detached. With shared attachment, norms that wait are refused with `status`. Contributions that
  // would wait for this rank without end, because arena and overflow are full, are refused with E_RANK_LOST.
  void OnRankDetached(const absl::Status& status);

  // Answers the waiting deliveries of one session. Its contributions are retained.
  void AnswerSession(SessionId session, const absl::Status& status);

  // Answers all waiting commands with `status`, and deletes all contributions. Follows a change of the plan and of the world
  // size. Tasks may still run: the caller makes these tasks stale.
  void Drop(const absl::Status& status);

  bool empty() const { return turns_.empty(); }
  // True if the rank has delivered some of the range in its pass `turn.pass`.
  bool HasTaken(const Turn& turn, const SumPages::Range& range) const;
  // True if every rank has called step or has ended its delivery with AskNorm(), and all contributions are summed. False while
  // a task runs or a norm is pending.
  bool reduced() const;
  bool UsesArenaOf(SessionId session) const;
  const absl::Status& fault() const { return fault_; }

  // Returns the number of commands that are not answered yet, for CheckInvariants().
  uint64_t unanswered(SessionId session) const;
  void CheckInvariants() const;

 private:
  using Range = SumPages::Range;
  using Cell = GradientTurns::Cell;
  using Entry = GradientTurns::Entry;  // a cell, with its first element as the key
  using Phase = GradientTurns::Phase;
  using Sum = GradientTurns::Sum;
  using Ids = std::pmr::vector<ContributionId>;

  enum class State : uint8_t { kArena, kMoving, kOverflow };

  struct Contribution {
    Delivery delivery;
    State state = State::kArena;
    bool answered = false;
    std::optional<uint32_t> slot = {};  // overflow slot
    uint64_t elems_left = 0;            // number of elements not added yet
    uint32_t additions = 0;             // running tasks that add the contribution
  };

  // A task that adds contributions to a range of a partition, or squares its sums.
  struct Addition {
    Range range;
    Ids sources = {};     // contributions, in the order of turns
    bool widens = false;  // the task first adds the cell's sum in the old 16-bit accumulator
    bool completes = false;
  };

  absl::Status RepeatError(const Delivery& delivery) const;
  absl::Status NonfiniteError(const std::string& what, uint32_t partition, const char* fault) const;
  uint64_t BytesOf(const Range& range) const;
  bool MayStart() const;
  SumPages::Need NeedOf(const Addition& addition) const;
  void TryAdd(uint32_t partition, Entry& entry);
  void TryAddRange(const Range& range);
  void TryAddAll();
  void TryNorms();
  void Advance();
  void MakeRoom(const Delivery& delivery);
  // Returns how many pieces are free in the arena of the delivery's rank.
  uint64_t FreePieces(const Delivery& delivery) const;
  // True if less than half of the rank's pieces are free, so that its deliveries soon lack room.
  bool HoldsHalf(const Delivery& delivery) const;
  void StartAddition(Cell& cell, Addition addition);
  void OnAdded(const TaskDone& done);
  void OnMoved(const TaskDone& done);
  void OnSummed(const TaskDone& done);
  void EndAddition(const Addition& addition, const TaskDone& done);
  void SpillToOverflow();
  bool Spill(ContributionId id);
  uint64_t OverflowOffset(const Contribution& contribution) const;
  bool Refuse(ContributionId id, uint32_t missing_rank);
  std::optional<uint32_t> FirstMissingRank(const Delivery& delivery) const;
  void AnswerOnce(Contribution& contribution, const absl::Status& status);
  void Delete(ContributionId id, const absl::Status& status);
  void Reset();

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  const MemoryPlan& plan_;
  const Membership& members_;
  StepPipeline& pipeline_;
  uint64_t step_ = 0;
  GradientTurns turns_;
  GradientNorms norms_;
  // Contributions with elements that are not added yet.
  std::pmr::map<ContributionId, Contribution> contributions_;
  ContributionId last_id_ = 0;
  std::vector<std::array<bool, kOverflowSlotsPerRank>> overflow_used_;  // by rank
  std::pmr::map<TaskId, ContributionId> moving_;
  std::pmr::map<TaskId, Addition> adding_;
  std::vector<uint64_t> narrow_offsets_;  // offsets of the old 16-bit accumulators, by partition
  bool needs_float_sums_ = false;
  // Partitions whose accumulators hold sums of the step before, or are being read.
  std::pmr::set<uint32_t> not_updated_;
  bool blocked_ = false;  // an addition waits for stale tasks or for float32 sums
  absl::Status fault_;
};

}  // namespace forebay::daemon
