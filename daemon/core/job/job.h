// SPDX-License-Identifier: Apache-2.0
// One training job: connects its sessions, its step, its reads and its memory.
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

// Returns the view of a job that the ledger names and to which no client has attached.
JobView ViewOf(const DurableJob& job);

// Events change the job, and Advance() then starts all tasks that have become possible. Advance() is called after every event
// of the job, and after every other event while the job waits for a staging slot.
class Job {
 public:
  // `actions`, `pool`, `swap` and `path_table` outlive the job.
  Job(JobSpec spec, ActionSink& actions, StagingPool& pool, nvme::SlotMap& swap,
      PathTable& path_table);

  // Emits the tasks that create the job's memory and swap. Called once enough DRAM is free. Until then attaches wait.
  void Begin();
  bool has_begun() const { return has_begun_; }
  // Refuses the job. Called instead of Begin(). Attaches are answered with `reason`.
  void Refuse(const absl::Status& reason);

  // Checks that this client may attach: its layout and sizes, and that the job has not failed.
  absl::Status CheckAttach(const AttachRequested& request) const;
  // True if a checked rank needs another plan (PlanWorld) before it attaches: the world size is not the job's, the sums are to
  // be float32 from the start, or the job's step arena could not be created.
  bool NeedsWorld(const AttachRequested& request) const;
  // Sets the plan of the next sessions. The plan takes effect when all sessions and tasks of the old world have ended and
  // enough DRAM is free for the plan (GiveRoom). Until then the next sessions wait.
  void ChangeWorld(MemoryPlan plan);
  // Returns the bytes that the next sessions' plan takes in addition to the current plan. nullopt if no plan waits for DRAM.
  std::optional<uint64_t> awaited_bytes() const;
  void GiveRoom() { has_room_ = true; }
  // Refuses the next sessions with `reason`.
  void RefuseWorld(const absl::Status& reason);
  // True if a further backward pass waits for float32 sums, whose plan().float_sums_bytes are not granted yet.
  bool WantsFloatSums() const;
  void MakeFloatSums();
  // Ends the attempt that waits for float32 sums with `reason`.
  void RefuseFloatSums(const absl::Status& reason) { step_.RefuseFloatSums(reason); }
  // Adds the session of a checked request. Fences a live session of the same rank.
  void Attach(const AttachRequested& request);
  void OnMapped(SessionId session) { members_.OnMapped(session); }
  void OnEnded(SessionId session, EndCause cause);
  void OnReconnected(const SessionReconnected& event);
  void OnCommand(SessionId session, const protocol::Command& command);
  void OnStepRequest(const StepRequestCopied& copied);
  void OnSummary(const SummaryCopied& copied);
  void OnTaskDone(const TaskDone& done);
  // Ends readers that hold up the update of `step`, which has waited long enough. If `step` is 0, ends leases of ranks that
  // have not returned, because a fetch has waited long enough for them.
  void OnLeaseTimeExpired(uint64_t step);

  // Errors  E_BUSY  sessions are attached.
  absl::Status Delete();

  void Advance();
  void Prefetch();  // reads ahead into free staging slots, after Advance() of all jobs
  bool waits_for_slot() const { return pipeline_.waits_for_slot(); }

  // Called between steps; see Residency.
  void Move(uint32_t block, uint64_t free_bytes);
  bool ReturnNext(uint64_t free_bytes) { return MayMove() && residency_.ReturnNext(free_bytes); }
  uint64_t movable_bytes() const;
  std::vector<Eviction> PlanEvictions(uint64_t bytes, nvme::SlotMap& swap) const;
  Residency& residency() { return residency_; }
  const Residency& residency() const { return residency_; }
  const Placement& placement() const { return pipeline_.placement(); }

  // Returns the sessions whose CloseSession was emitted since the last call.
  std::vector<SessionId> DrainClosed() { return members_.DrainClosed(); }
  // True once FreeJob was emitted, so that the Job can be destroyed.
  bool is_freed() const { return freed_; }

  // WantsLedger() is true if a gathered step waits for the next ledger. ForLedger() returns the job's entry in that ledger, or
  // null if it has none.
  bool WantsLedger() const { return durable_.is_gathered() && !is_deleted(); }
  std::shared_ptr<const DurableJob> ForLedger() const {
    if (unrestored() != nullptr) return InLedger(unrestored());
    return is_deleted() ? nullptr : durable_.ForLedger();
  }
  // Returns the job's entry in the newest durable ledger, or null if it has none.
  std::shared_ptr<const DurableJob> durable() const {
    if (unrestored() != nullptr) return InLedger(unrestored());
    return is_deleted() ? nullptr : durable_.durable();
  }
  // True if a record names swap slots of the job, so that the next daemon must find the volume.
  bool WantsVolume() const { return is_recorded_ && swap_bytes() > 0 && !spec_.options.loses_swap; }
  void OnLedger(const absl::Status& status);
  void OnDoubted(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths) {
    durable_.OnDoubted(slots, paths);
  }

  // Makes the job quiescent as soon as possible, so that the next daemon can continue it.
  void RequestStop();
  // False if the next daemon cannot continue the job from memory, or need not because the ledger has it or its ranks write its
  // parameters again.
  bool MayStop() const;
  // True if the job is quiescent, durable at a durable level, and recorded if the node keeps its jobs.
  bool has_stopped() const { return stop_ == Stop::kDone; }
  bool is_stopping() const { return stop_ == Stop::kWanted; }
  void OnRankEnded(const RankEnded& event);
  // Returns the sessions of ranks that continue with the next daemon.
  std::vector<SessionId> StoppedSessions() const;

  // True if the job was recovered, or if the next ledger names it. Ledgers may then name the job's slots.
  bool is_in_ledger() const {
    return spec_.recovered != nullptr || durable_.ForLedger() != nullptr;
  }
  // Returns the durable step to which the job returns, or the recovered job if it is not restored yet or could not be restored.
  // Null otherwise.
  std::shared_ptr<const DurableJob> unrestored() const {
    if (goes_back_to_ != nullptr) return goes_back_to_;
    return is_unrestored_ ? spec_.recovered : nullptr;
  }
  bool goes_back() const { return goes_back_to_ != nullptr; }

  const absl::Status& failure() const { return failed_; }
  // True if the job is recovered in the middle of an update. If the update cannot continue, the job continues from its durable
  // step or is lost.
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
  const std::set<nvme::Slot>& sum_slots() const { return pipeline_.sums().swap().slots(); }
  // Returns the bytes of arenas and tables, without states and readers.
  uint64_t fixed_bytes() const;
  // Return the bytes of the DRAM limit that the job takes now, and after all its marked blocks have moved.
  uint64_t dram_bytes() const;
  uint64_t granted_bytes() const;
  // Returns the bytes of the swap slots that the job has now.
  uint64_t swap_bytes() const;
  uint32_t staging_slots() const { return pipeline_.staged_count() + weights_.staging_slots(); }
  JobView View() const;
  void CheckInvariants() const;

 private:
  bool failed() const { return step_.phase() == Step::Phase::kFailed; }
  // True if steps may be trained and states read.
  bool is_ready() const { return initial_.ready() && step_.phase() != Step::Phase::kMasters; }
  absl::Status FailedStatus() const;
  void EndAll(const absl::Status& reason);
  void Fail(const absl::Status& first_error);
  bool MayMove() const { return is_ready() && !failed() && !deleting_; }
  // Returns the activities that are under way.
  Activities UnderWay() const;
  bool MayUpdateEarly() const;
  void UseTimeBetweenSteps(bool is_due);
  void MoveDoubted();
  void OnMemoryMade(const TaskDone& done);
  void Restore();
  void OnRestored(const TaskDone& done);
  void RestorePreparedStates();
  void TryEndRestore();
  bool is_at_rest() const { return stop_ >= Stop::kSaving; }
  bool IsQuiet() const;
  bool MayServeFetches() const;
  void TryStop();
  absl::Status CheckReattach(const AttachRequested& request) const;
  bool MissesRank() const;
  // Returns the retained memory of the job, with the current places of its blocks and without the values of its step.
  KeptMemory Kept() const;
  // True if a record of the present run exists.
  bool has_record() const { return is_recorded_ && recorded_run_ == members_.run(); }
  void TryRecord();
  void Record();
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
  uint32_t making_tasks_ = 0;  // tasks that create memory and swap
  // Plan of sessions that wait until it becomes the spec's plan.
  std::optional<MemoryPlan> next_plan_;
  bool has_room_ = false;  // DRAM for next_plan_ is free
  bool has_step_arena_ = true;
  enum class FloatSums : uint8_t { kNone, kMaking, kMade, kInUse };
  FloatSums float_sums_;  // state of the float32 sums of the plan
  // True if the job is deleted, could not be created, or has neither parameters nor sessions. The job is freed as soon as no
  // session and no task uses it.
  bool deleting_ = false;
  bool freed_ = false;
  bool is_restoring_ = false;  // arenas are created; their bytes are being restored
  bool is_unrestored_;         // the job is recovered, and not restored yet
  // The durable step to which the job returns once no session and no task uses the job. Null if the job does not return.
  std::shared_ptr<const DurableJob> goes_back_to_;
  // kWanted: the stop was requested. kSaving: the job no longer changes, and its step is being made durable. kDone: the step is
  // durable, if the job's level is, and recorded.
  enum class Stop : uint8_t { kNone, kWanted, kSaving, kDone };
  Stop stop_ = Stop::kNone;
  bool is_recorded_ = false;  // a record exists, and follows every change
  std::string recorded_run_;
  absl::Status failed_;  // error of the creation or the step; OK: none

  Membership members_;
  InitialParameters initial_;
  LeaseTable leases_;
  StepPipeline pipeline_;
  WeightsCache weights_;
  StateAccess access_;
  Residency residency_;
  DurableSteps durable_;
  bool reads_first_ = false;  // a block has moved since states were read
  uint32_t turns_left_ = 0;   // remaining reads and moves before the next decision
  Step step_;
  FetchQueue fetches_;
};

}  // namespace forebay::daemon
