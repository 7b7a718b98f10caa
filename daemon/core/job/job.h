// SPDX-License-Identifier: Apache-2.0
// One training run: wires its sessions, its step, its reads and its memory together.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/views.h"
#include "daemon/core/blocks/staging.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/sessions/membership.h"
#include "daemon/core/sessions/session.h"
#include "daemon/core/step/fetch_queue.h"
#include "daemon/core/step/initial_parameters.h"
#include "daemon/core/step/step.h"
#include "daemon/core/update/durable_steps.h"
#include "daemon/core/update/residency.h"
#include "daemon/core/update/state_access.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/weights_cache.h"

namespace forebay::daemon {

// Of a job that the ledger has and nobody has attached to.
JobView ViewOf(const DurableJob& job);

// Events change the job; Advance() then does all that has become possible. It is called after every
// event of the job, and after every other event while the job waits for a staging slot.
class Job {
 public:
  // Pool, swap, its paths and actions outlive the job.
  Job(JobSpec spec, ActionSink& actions, StagingPool& pool, nvme::SlotMap& swap,
      PathTable& path_table);

  // Emits what makes its memory: there is DRAM for it now. Before this, attaches wait.
  void Begin();
  bool has_begun() const { return has_begun_; }
  // Instead of Begin(): attaches get `reason`.
  void Refuse(const absl::Status& reason);

  // Whether this client may attach: layout, sizes, the job's health.
  absl::Status CheckAttach(const AttachRequested& request) const;
  // Whether a rank that was checked needs another plan (PlanWorld) before it attaches: the world size
  // is not the job's, the sums are to be float32 from the start, or the job's step arena could not be made.
  bool NeedsWorld(const AttachRequested& request) const;
  // The plan of the next sessions. It holds when nothing of the world before is left and there is DRAM
  // for it (GiveRoom); they wait.
  void ChangeWorld(MemoryPlan plan);
  // What the next sessions' plan takes beyond the one that holds; empty: none waits for room.
  std::optional<uint64_t> awaited_bytes() const;
  void GiveRoom() { has_room_ = true; }
  // The next sessions get `reason`.
  void RefuseWorld(const absl::Status& reason);
  // A further backward pass waits for sums in float32, which have no memory: plan().float_sums_bytes.
  bool WantsFloatSums() const;
  void MakeFloatSums();
  // The attempt that waits ends with `reason`.
  void RefuseFloatSums(const absl::Status& reason) { step_.RefuseFloatSums(reason); }
  // Adds a session that was checked; fences a live one of the same rank.
  void Attach(const AttachRequested& request);
  void OnMapped(SessionId session) { members_.OnMapped(session); }
  void OnEnded(SessionId session, EndCause cause);
  void OnReconnected(const SessionReconnected& event);
  void OnCommand(SessionId session, const protocol::Command& command);
  void OnStepRequest(const StepRequestCopied& copied);
  void OnSummary(const SummaryCopied& copied);
  void OnTaskDone(const TaskDone& done);
  // The update of `step` has waited long enough: readers that hold it up are ended.
  void OnLeaseTimeExpired(uint64_t step);

  // Errors  E_BUSY  sessions are attached.
  absl::Status Delete();

  void Advance();
  void Prefetch();  // after Advance of all jobs: uses staging slots that nobody needs now
  bool waits_for_slot() const { return pipeline_.waits_for_slot(); }

  // Between steps; see Residency.
  void Move(uint32_t block, uint64_t free_bytes);
  bool ReturnNext(uint64_t free_bytes) { return MayMove() && residency_.ReturnNext(free_bytes); }
  uint64_t movable_bytes() const;
  std::vector<Eviction> PlanEvictions(uint64_t bytes, nvme::SlotMap& swap) const;
  Residency& residency() { return residency_; }
  const Residency& residency() const { return residency_; }
  const Placement& placement() const { return pipeline_.placement(); }

  // Sessions whose CloseSession was emitted since the last call.
  std::vector<SessionId> DrainClosed() { return members_.DrainClosed(); }
  // FreeJob was emitted: nothing of it is left. OK after a deletion, else why it could not be made.
  bool is_freed() const { return freed_; }

  // The next ledger of the node is to be made; what it says of the job: null, nothing.
  bool WantsLedger() const { return durable_.is_gathered() && !is_deleted(); }
  std::shared_ptr<const DurableJob> ForLedger() const {
    if (unrestored() != nullptr) return InLedger(unrestored());
    return is_deleted() ? nullptr : durable_.ForLedger();
  }
  // What the newest durable ledger says of it; null: nothing.
  std::shared_ptr<const DurableJob> durable() const {
    if (unrestored() != nullptr) return InLedger(unrestored());
    return is_deleted() ? nullptr : durable_.durable();
  }
  // A record names slots of the job: the volume is to be found again.
  bool WantsVolume() const { return is_recorded_ && swap_bytes() > 0 && !spec_.options.loses_swap; }
  void OnLedger(const absl::Status& status);
  void OnDoubted(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths) {
    durable_.OnDoubted(slots, paths);
  }

  // It comes to rest as soon as it can, for the next daemon to go on with it.
  void RequestHandOver();
  // False: it never can, or has no need to: what the ledger says of it is all there is.
  bool MayHandOver() const;
  // As it is at rest; null: it is not yet.
  const std::shared_ptr<const DurableJob>& handed_over() const { return handed_over_; }
  bool is_coming_to_rest() const { return hand_over_ == HandOver::kWanted; }
  void OnRankEnded(const RankEnded& event);
  std::vector<HandedOver::Session> SessionsHandedOver() const;

  // Of a job that has not come back yet, or could not: what it comes from.
  bool is_in_ledger() const {
    return spec_.recovered != nullptr || durable_.ForLedger() != nullptr;
  }
  // Or what it goes back to.
  std::shared_ptr<const DurableJob> unrestored() const {
    if (goes_back_to_ != nullptr) return goes_back_to_;
    return is_unrestored_ ? spec_.recovered : nullptr;
  }
  bool goes_back() const { return goes_back_to_ != nullptr; }

  const absl::Status& failure() const { return failed_; }
  // It comes back in the middle of an update. Where it cannot, what is durable of it is all that is left.
  bool is_resumed() const {
    const KeptMemory* const kept = KeptOf(spec_.recovered.get());
    return kept != nullptr && kept->update != nullptr && !goes_back();
  }

  JobId id() const { return spec_.id; }
  const std::string& name() const { return spec_.name; }
  uint32_t uid() const { return spec_.uid; }
  const MemoryPlan& plan() const { return spec_.plan; }
  const protocol::Layout& layout() const { return *spec_.layout; }
  const std::pmr::set<nvme::Slot>& swap_slots() const { return pipeline_.ledger().slots(); }
  const std::set<nvme::Slot>& sum_slots() const { return pipeline_.sums().slots(); }
  // Of arenas and tables, without states and readers.
  uint64_t fixed_bytes() const;
  // What it takes from the limit now, and when all its marked blocks have moved.
  uint64_t dram_bytes() const;
  uint64_t granted_bytes() const;
  // Of its slots on swap now.
  uint64_t swap_bytes() const;
  uint32_t staging_slots() const { return pipeline_.staged_count() + weights_.staging_slots(); }
  JobView View() const;
  void CheckInvariants() const;

 private:
  bool failed() const { return step_.phase() == Step::Phase::kFailed; }
  // Steps may be trained and states read.
  bool is_ready() const { return initial_.ready() && step_.phase() != Step::Phase::kMasters; }
  absl::Status FailedStatus() const;
  void EndAll(const absl::Status& reason);
  void Fail(const absl::Status& first_error);
  bool MayMove() const { return is_ready() && !failed() && !deleting_; }
  void UseTimeBetweenSteps(bool is_due);
  void MoveDoubted();
  void OnMemoryMade(const TaskDone& done);
  void Restore();
  void OnRestored(const TaskDone& done);
  void RestorePreparedStates();
  void TryEndRestore();
  bool is_at_rest() const { return hand_over_ >= HandOver::kSaving; }
  bool IsQuiet() const;
  bool MayServeFetches() const;
  void TryHandOver();
  void OnExtraStatesKept(const TaskDone& done);
  absl::Status CheckReattach(const AttachRequested& request) const;
  bool MissesRank() const;
  void EndHandOver(DurableJob job);
  // What a job that is handed over has of its memory, as it is now.
  void AddKept(DurableJob& job) const;
  void ListBlocks(DurableJob& job) const;
  void TryRecord();
  bool is_deleted() const { return deleting_ && !is_unrestored_; }
  const SessionRequest& room() const { return (next_plan_ ? *next_plan_ : spec_.plan).session; }
  void TryChangeWorld();
  void OnStepArenaMade(const TaskDone& done);
  void OnFloatSumsMade(const TaskDone& done);
  void TryUseFloatSums();
  void OnSessionMemoryMade(SessionId session, const absl::Status& status);
  absl::Status OnBlockTask(TaskKind kind, const TaskDone& done);

  void Evict(Session& session, const absl::Status& reason);
  void EvictWaiting(const absl::Status& reason);
  void End(Session& session, const absl::Status& status);
  void EndInitial(Session& writer, const absl::Status& status);
  void OnRankFailed(uint32_t rank, Session* lost);
  void OnRankDetached(const Session& session);
  void AnswerWaiting(Session& session, const absl::Status& status);
  void AnswerAttaches();
  bool MayAnswerAttach(const Session& session) const;
  std::vector<uint32_t> TraceOf(uint32_t rank) const;
  std::vector<uint32_t> TracedGroups() const;
  void AnswerAttachOk(Session& session);
  AnswerAttach TermsOf(const Session& session) const;
  bool MayComeBack(const Session& session) const;
  void CloseEnded();
  void FreeWhenUnused();

  void Dispatch(Session& session, const protocol::Command& command);
  void HandleInitial(Session& session, const protocol::Command& command);
  void HandleWrite(Session& session, const protocol::Command& command);
  void HandleGoBack(Session& session, const protocol::Command& command);

  JobSpec spec_;
  JobTasks io_;
  bool has_begun_ = false;
  uint32_t making_tasks_ = 0;  // its memory and swap
  // Of sessions that wait until it becomes the spec's.
  std::optional<MemoryPlan> next_plan_;
  bool has_room_ = false;  // for the next plan
  bool has_step_arena_ = true;
  enum class FloatSums : uint8_t { kNone, kMaking, kMade, kInUse };
  FloatSums float_sums_;  // of a plan that has room for them
  // Deleted, could not be made, or without parameters and sessions: freed as soon as it is unused.
  bool deleting_ = false;
  bool freed_ = false;
  bool is_restoring_ = false;  // its arenas are made, and get their bytes
  bool is_unrestored_;         // of a job that comes back: until it has
  // The durable step that is all that is left of it, once nothing uses it any more.
  std::shared_ptr<const DurableJob> goes_back_to_;
  // Wanted; nothing changes it any more, and what the next daemon needs is made; it is made.
  enum class HandOver : uint8_t { kNone, kWanted, kSaving, kDone };
  HandOver hand_over_ = HandOver::kNone;
  std::shared_ptr<const DurableJob> handed_over_;
  bool is_recorded_ = false;  // and the record follows what changes
  std::string recorded_run_;
  absl::Status failed_;  // of the making, or what the step failed of

  Membership members_;
  InitialParameters initial_;
  LeaseTable leases_;
  StepPipeline pipeline_;
  WeightsCache weights_;
  StateAccess access_;
  Residency residency_;
  DurableSteps durable_;
  bool reads_first_ = false;  // a block has moved since states were read
  uint32_t turns_left_ = 0;   // that go before the decision of a step that was called early
  Step step_;
  FetchQueue fetches_;
};

}  // namespace forebay::daemon
