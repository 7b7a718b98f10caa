// The gradients of the step that is being gathered: who has delivered what, and in which order it
// is added.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/events.h"
#include "daemon/core/job_io.h"
#include "daemon/core/membership.h"
#include "daemon/core/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// A group's gradient is the sum of its ranks' contributions, added in float32 in the order of ranks
// whatever the order of arrival; so the bits do not depend on timing. A contribution that must wait
// for a lower rank stays in its session's arena while that leaves room for one more of the largest
// group, else it moves to the overflow; with the overflow full it goes on waiting, unless the ranks
// deliver in different orders: then it is refused.
//
// The last rank's addition brings the group's sum of squares with it; where that rank delivers
// nothing, which is known when it calls step, another pass over the sum does.
//
// A contribution or a sum that is not finite invalidates the step: nothing is added any more, whatever
// else arrives is taken and dropped, and fault() says why, until Clear().
class GradientAccumulator {
 public:
  struct Delivery {
    uint32_t rank = 0;
    uint32_t group = 0;
    uint64_t arena_offset_bytes = 0;
    uint64_t grad_arena_bytes = 0;  // of the session, for gradients
    CommandId command;
  };

  GradientAccumulator(JobIo& io, std::shared_ptr<const protocol::Layout> layout,
                      const MemoryPlan& plan, const Membership& members);

  // Takes a checked kGradReady of step `step`; it is answered when its bytes are free, or at once
  // with an error.
  //
  // Errors  E_GRAD_REPEAT  the rank has delivered this group.
  //         E_STEP         the group went on without the rank after it had called step.
  //         E_GRAD_ORDER   see above; the contribution is not taken.
  void Deliver(uint64_t step, const Delivery& delivery);

  // Outcomes of this accumulator's tasks; stale ones (JobIo::NewEpoch) are not brought here.
  void OnAdded(const TaskDone& done);
  void OnMoved(const TaskDone& done);
  void OnSummed(const TaskDone& done);

  // `rank` has called step: what it has not delivered counts as zero.
  void CloseRank(uint32_t rank);
  void ReopenRanks();  // no vote stands any more

  // A rank has detached. Contributions that would wait for it without end, for want of room, are
  // refused with E_RANK_LOST.
  void OnRankDetached() { SpillToOverflow(); }

  // Answers what waits of one session; its contributions stay.
  void AnswerSession(SessionId session, const absl::Status& status);

  // Answers all that wait with `status` and forgets everything. Tasks may still run: the caller
  // makes them stale.
  void Drop(const absl::Status& status);
  // The same for an accumulator whose tasks have all ended.
  void Clear(const absl::Status& status);

  bool empty() const { return delivered_total_ == 0; }
  bool idle() const { return running_.empty(); }
  bool has_delivered(uint32_t rank) const { return delivered_[rank] > 0; }
  // All ranks are closed and every group with a contribution is summed, or the step is invalidated;
  // nothing runs.
  bool reduced() const;
  bool UsesArenaOf(SessionId session) const;

  const absl::Status& fault() const { return fault_; }  // OK: the step is well
  std::vector<bool> delivered_groups() const;           // by group: somebody contributed
  double SumSquares() const;                            // added in the order of groups

  // Commands not answered yet, for CheckInvariants.
  uint64_t unanswered(SessionId session) const;
  void CheckInvariants() const;

 private:
  enum class State : uint8_t { kHeld, kMoving, kOverflow, kAdding, kAdded };

  struct Contribution {
    State state = State::kHeld;
    bool answered = false;
    CommandId command;
    uint64_t arena_offset_bytes = 0;
    uint64_t grad_arena_bytes = 0;
    std::optional<uint32_t> overflow_slot = {};  // where its bytes are or are being moved to
    uint64_t arrival = 0;
  };

  struct Group {
    std::map<uint32_t, Contribution> by_rank;
    uint32_t next_rank = 0;  // all lower ranks are added or counted as zero
    uint32_t added = 0;
    bool summed = false;
    double sum_squares = 0;
  };

  struct Key {
    uint32_t group = 0;
    uint32_t rank = 0;
  };

  static constexpr uint32_t kNobody = UINT32_MAX;

  Contribution& At(const Key& key) { return groups_[key.group].by_rank.at(key.rank); }
  Key FinishRunning(TaskId task);
  void Advance(uint32_t group);
  void StartAdd(const Key& key);
  bool Completes(const Key& key) const { return key.rank + 1 == world_size_; }
  void RecordSum(uint32_t group, double sum_squares);
  uint64_t OverflowOffset(uint32_t slot) const {
    return plan_.overflow_offset + slot * plan_.overflow_slot_bytes;
  }
  void SpillToOverflow();
  void Refuse(const Key& key, const absl::Status& status);
  absl::Status OrderError(const Key& key, uint32_t missing_rank, uint32_t other_group) const;
  absl::Status DetachedError(const Key& key, uint32_t missing_rank) const;
  // Lowest rank it waits for that has yet to deliver
  uint32_t FirstMissingRank(const Key& key) const;
  uint32_t DeliveredBefore(uint32_t missing_rank,
                           uint32_t rank) const;  // a group only `missing_rank` did
  void AnswerOnce(Contribution& contribution, const absl::Status& status);
  void Invalidate(const absl::Status& fault);
  void Forget();
  std::string NameOf(uint32_t group) const;

  JobIo& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  const MemoryPlan& plan_;
  const Membership& members_;
  uint32_t world_size_;
  uint64_t step_ = 0;
  std::vector<Group> groups_;
  std::vector<bool> closed_;         // by rank
  std::vector<uint64_t> delivered_;  // by rank: groups
  uint64_t delivered_total_ = 0;
  uint64_t unsummed_groups_ = 0;  // with a contribution
  std::vector<bool> overflow_used_;
  std::map<uint64_t, Key> held_;  // by arrival; State::kHeld alone
  uint64_t arrivals_ = 0;
  std::map<TaskId, Key> running_;
  absl::Status fault_;
};

}  // namespace forebay::daemon
