// One training run: its sessions, the step that is gathered or applied, and the memory it holds.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/command_check.h"
#include "daemon/core/events.h"
#include "daemon/core/gradient_accumulator.h"
#include "daemon/core/initial_parameters.h"
#include "daemon/core/job_io.h"
#include "daemon/core/lease_table.h"
#include "daemon/core/memory_plan.h"
#include "daemon/core/node_state.h"
#include "daemon/core/session.h"
#include "daemon/core/staging.h"
#include "daemon/core/state_reads.h"
#include "daemon/core/step_barrier.h"
#include "daemon/core/step_pipeline.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Events change the job; Advance() then does all that has become possible, and is called for every
// job after every event. Sessions in job_sessions.cc, gradients and steps in job_step.cc.
class Job {
 public:
  struct Spec {
    JobId id = 0;
    std::string name;
    uint32_t uid = 0;
    std::shared_ptr<const protocol::Layout> layout;
    MemoryPlan plan;
    NodeState::Options options;
  };

  // Emits what makes its memory. The pool and the actions outlive the job.
  Job(Spec spec, ActionSink& actions, StagingPool& pool);

  // Whether this client may attach; uid, layout, sizes, the job's health.
  absl::Status CheckAttach(const AttachRequested& request) const;
  // Takes a session that was checked; fences a live one of the same rank.
  void Attach(const AttachRequested& request);
  void OnMapped(SessionId session);
  void OnEnded(SessionId session, EndCause cause);
  void OnCommand(SessionId session, const protocol::Command& command);
  void OnStepRequest(const StepRequestCopied& copied);
  void OnTaskDone(const TaskDone& done);

  // Errors  E_PERMISSION  not the owner nor root.
  //         E_BUSY        sessions are attached.
  absl::Status Delete(uint32_t uid);

  void Advance();
  void Prefetch();  // after every job's Advance: takes staging slots that nobody needs now

  // Sessions whose CloseSession was emitted since the last call.
  std::vector<SessionId> DrainClosed();
  // FreeJob was emitted: nothing of it is left. OK after a deletion, else why it could not be made.
  bool is_freed() const { return freed_; }

  JobId id() const { return spec_.id; }
  const std::string& name() const { return spec_.name; }
  const MemoryPlan& plan() const { return spec_.plan; }
  uint32_t staged_blocks() const { return pipeline_.staged_count(); }
  JobView View() const;
  void CheckInvariants() const;

 private:
  enum class Phase : uint8_t {
    kCreating,  // its memory
    kOpen,      // gathers gradients (or initial parameters)
    kReducing,  // all ranks have called step: the last gradients are added
    kUpdating,
    kFailed,
  };

  struct WaitingFetch {
    CommandId command;
    uint32_t rank = 0;
    uint32_t group = 0;
  };

  // What a repeated step is answered with.
  struct LastStep {
    double norm = 0;
    bool clipped = false;
    absl::Status status;
  };

  // --- sessions
  Session* Find(SessionId session);
  void Evict(Session& session, const absl::Status& reason);
  void End(Session& session, const absl::Status& status);
  void SetDetached(uint32_t rank, bool left);
  void ClearDetached();
  void OnRankFailed(Session& lost);
  void OnRankDetached(const Session& session);
  void AnswerWaiting(Session& session, const absl::Status& status);
  void AnswerAttaches();
  bool MayAnswerAttach(const Session& session) const;
  void AnswerAttachOk(Session& session);
  void CloseEnded();
  void FreeWhenUnused();
  CommandLimits LimitsOf(const Session& session) const;

  // --- commands
  void Dispatch(Session& session, const protocol::Command& command);
  void HandleInitial(Session& session, const protocol::Command& command);
  void HandleFetch(Session& session, const protocol::Command& command);
  void HandleGradient(Session& session, const protocol::Command& command);
  void HandleStep(Session& session, const protocol::Command& command);
  void ServeFetches();

  // --- the step
  absl::Status CheckStepCall(const Session& session, const protocol::Command& command,
                             const StepRequestCopied& copied) const;
  void AddStepCall(Session& session, StepCall call);
  void RefuseStepCalls(const absl::Status& status);
  void AnswerInvalidated(Session& session, const CommandId& command);
  void RepeatWhenAllHaveSeen();
  void BeginReducing();
  void DecideWhenReduced();
  void ReportInvalidated();
  void Commit();
  void OnMemoryMade(const TaskDone& done);
  void OnBlockTask(TaskKind kind, const TaskDone& done);
  void OnGradientTask(TaskKind kind, const TaskDone& done);
  void Fail(const absl::Status& first_error);
  absl::Status FailedStatus() const;

  Spec spec_;
  JobIo io_;
  Phase phase_ = Phase::kCreating;
  uint32_t making_tasks_ = 0;
  bool deleting_ = false;  // deleted, or could not be made: freed as soon as it is unused
  bool freed_ = false;
  absl::Status failed_;  // of the making, or the first error of kFailed

  uint64_t generation_ = 0;
  uint64_t committed_step_ = 0;
  std::map<SessionId, Session> sessions_;
  std::vector<SessionId> attaching_;  // in the order of arrival
  std::vector<SessionId> closed_;
  std::vector<bool> detached_;  // by rank: detached in good order, and not attached again

  InitialParameters initial_;
  LeaseTable leases_;
  std::vector<WaitingFetch> fetches_;
  GradientAccumulator accumulator_;
  StepBarrier barrier_;
  StepPipeline pipeline_;
  StateReads reads_;

  uint32_t extra_slot_ = 0;            // of the committed step
  std::vector<uint64_t> extra_bytes_;  // by rank, of the committed step
  uint32_t extra_copies_ = 0;          // running
  LastStep last_step_;
  LastStep next_step_;                  // from the verdict to the commit
  std::vector<uint32_t> trace_;         // of the newest committed step
  std::vector<uint32_t> fetched_;       // groups in the order of first fetch since then
  std::vector<uint32_t> fetched_next_;  // the same while a step is applied
};

}  // namespace forebay::daemon
