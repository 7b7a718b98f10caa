// SPDX-License-Identifier: Apache-2.0
// Runs the state machine: turns calls and outcomes into events, and actions into work.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_name.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/node/node_state.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/arena_registry.h"
#include "daemon/exec/block_mover.h"
#include "daemon/exec/block_tasks.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/node_snapshot.h"
#include "daemon/exec/rank_exchange.h"
#include "daemon/exec/recovery/reconnects.h"
#include "daemon/exec/recovery/recovery.h"
#include "daemon/exec/scrub.h"
#include "daemon/exec/session_io.h"
#include "daemon/exec/session_poller.h"
#include "daemon/exec/session_table.h"
#include "daemon/exec/state_runner.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"
#include "daemon/exec/timeline.h"
#include "nvme/io/io_engine.h"

namespace forebay::daemon {

struct ExecutorOptions {
  NodeState::Options state;
  ArenaPolicy arenas = {};
  std::chrono::nanoseconds reader_lease_max = std::chrono::seconds(10);
  std::string io_engine_reason;
};

// Threads  The loop thread. Workers see spans of arenas that live until their task has ended.
// Limits   Nothing blocks.
class Executor {
 public:
  static constexpr size_t kTraceEventsMax = 32768;

  // `swap` may be null. `left`: what the previous daemon has left for the jobs that the state machine is created with. All
  // arguments but `options` and `left` outlive the executor. If the executor ends before Start(), arenas that were left retain
  // their bytes for another daemon.
  Executor(const ExecutorOptions& options, nvme::IoEngine& engine, TaskRunner& runner,
           SwapSpace* swap, LeftBefore left);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // --------------------------------------------------------------- what the control plane asks for

  // `process`: pidfd of the client, readable once the client has ended (protocol/os/pidfd.h); invalid if the client cannot be
  // watched. `wait`: time in which a rank whose connection is lost may attach again. A rank that attaches again continues its
  // session, which the calls below then know by the newer number alone.
  void Attach(AttachRequested request, AttachCallbacks callbacks, protocol::UniqueFd process,
              std::chrono::nanoseconds wait = {});

  // Starts to read the commands of a session whose client has mapped its arenas. Returns E_FENCED if the session is over.
  absl::Status Mapped(SessionId session);
  void End(SessionId session, EndCause cause);  // ignores an unknown session
  // Ends the disconnected sessions whose time to attach again ends at `until_ns` or before (UINT64_MAX: all of them). Returns
  // the time at which the next one is due.
  uint64_t EndDisconnected(uint64_t until_ns);
  // Returns the error that the session retains for the command with this `tag`. If the session was ended without a request of
  // its client, returns the reason.
  absl::Status Explain(SessionId session, uint64_t tag) const {
    return sessions_.Explain(session, tag);
  }
  // Answers once every rank of the session's job has called Exchange(): with the bytes of all ranks, or with E_RANK_LOST if one
  // of the ranks ends first. E_RANK for a reader, E_FENCED if the session is over. `call`: a number of the session's own, for
  // CancelExchange(). `number`: RankExchange::Member::number.
  void Exchange(SessionId session, uint64_t call, uint64_t number, std::string bytes,
                RankExchange::Answer answer);
  void CancelExchange(SessionId session, uint64_t call);
  // Answers when the durable jobs that `request` selects are verified. Errors: of Scrubber::Start.
  void Scrub(const ScrubRequest& request, Scrubber::Answer answer) {
    scrub_.Start(request, std::move(answer));
  }
  void CancelScrub(uint64_t number) { scrub_.Cancel(number); }
  // Makes the jobs quiescent, so that the next daemon can continue them. `flush` returns when the keeper of the store has all
  // descriptors; null: no daemon continues the jobs from memory. If `flush` succeeds, clients are notified to attach again.
  // `done` gets the outcome; E_TIMEOUT: some jobs are not quiescent, and the next daemon continues them as after a kill. Call it
  // once.
  void StopJobs(FlushStore flush, absl::AnyInvocable<void(const absl::Status&)> done);
  // Stops waiting for jobs that are in the middle of a step.
  void StopDue();
  // Owns the arenas that the previous daemon has left, and resumes updates in which it was killed. Call it before any other
  // event.
  void Start();
  // Names of the descriptors that the store must retain: arenas and processes of ranks that this daemon continues, its records,
  // and the staging arena of the earlier daemon.
  std::set<std::string> StoredNames() const { return recovery_.StoredNames(); }
  void DeleteJob(std::string job, uint32_t uid, absl::AnyInvocable<void(absl::Status)> done);
  NodeSnapshot Snapshot() {
    return MakeSnapshot({state_.start_ns(), state_.node(), registry_, jobs_, swap_, runner_,
                         engine_, options_.io_engine_reason, scrub_.progress(),
                         state_.events_handled()});
  }
  // Returns events of the newest published step: first those of the daemon, then those of attached ranks that have seen the
  // step committed, at most kTraceEventsMax with the ranks' events. Errors: E_JOB_NAME.
  absl::StatusOr<std::vector<ShownEvent>> Trace(const JobName& name) const;
  // NodeState::Plan.
  absl::StatusOr<JobPlan> Plan(const AttachRequested& request,
                               const std::optional<NodeState::Limits>& limits) const {
    return state_.node().Plan(request, limits);
  }
  // NodeState::PlanOfJob.
  absl::StatusOr<JobPlan> PlanOfJob(const JobName& name,
                                    const std::optional<NodeState::Limits>& limits) const {
    return state_.node().PlanOfJob(name, limits);
  }

  // ----------------------------------------------------------------------- what the reactor brings

  void OnCompletion(const nvme::Completion& completion);  // disk (Volume::Owns) or doorbell

  // SessionPoller::Poll.
  bool PollSessions() { return poller_.Poll(); }

  // Does all work that is due by time: lease timers, paused writes, late requests, progress, freeing weights of deleted jobs.
  // Returns how long the loop may sleep until the next call.
  std::chrono::nanoseconds Tick();

  // True if there are no sessions, no tasks in progress and no transfers.
  bool idle() const;
  // True if transfers on swap are the only unfinished work.
  bool waits_for_swap_alone() const;

 private:
  // AttachRequested::rival_pid of a session that is about to attach.
  int32_t RivalOf(const ClientSession& session) const;

  void Raise(Event event) { state_.Raise(std::move(event)); }
  void EndTransfers(std::vector<SwapDone>& done);
  // Verifies and copies the weights that a LoadWeights has read. Returns false if the read was none of a LoadWeights, or
  // failed.
  bool CopyLoaded(const SwapDone& read, uint64_t end_ns);
  void Done(TaskId task, absl::Status status) {
    Raise(TaskDone{.task = task, .status = std::move(status)});
  }

  void Run(CreateJobMemory& action);
  void Run(CreateJobSwap& action);
  void Run(ReplaceStepArena& action);
  void Run(PopulateStepArena& action);
  void Run(CreateSessionMemory& action);
  void Run(AnswerAttach& action);
  void Run(AnswerCommand& action);
  void Run(CloseSession& action);
  void Run(FreeJob& action);
  void Run(AnswerDelete& action);
  void Run(CopyStepRequest& action);
  void Run(WriteSummary& action);
  void Run(CopySummary& action);
  void Run(CopyInitial& action);
  void Run(CopyToStepArena& action);
  void Run(AddGradients& action);
  void Run(SumGradient& action);
  void Run(ReadBlock& action);
  void Run(UpdateBlock& action);
  void Run(InstallWeights& action);
  void Run(WriteBlock& action);
  void Write(const WriteBlock& action);
  void Run(EvictBlock& action);
  void Run(PromoteBlock& action);
  void Run(SpillSums& action);
  void Run(LoadSums& action);
  void Run(SavePart& action);
  void Run(RestorePart& action);
  void Run(KeepExtraStates& action);
  void Run(RestoreExtraStates& action);
  void Run(DigestWeights& action);
  void Run(CommitLedger& action);
  void Run(DecodeState& action);
  void Run(SetState& action);
  void Run(LoadWeights& action);
  void Run(RoomAwaited& action);
  void Run(StartLeaseTimer& action);
  void Run(StepCalled& action);
  void Run(StepCommitted& action);
  void Run(EarlyUpdatesDropped& action);
  void Run(StepPublished& action);
  void Run(JobsStopped& action);
  void Run(RecordJob& action) { recovery_.Record(action, options_.state.workers); }
  template <Recordable Record>
  void Run(Record& action) {
    recovery_.records().Set(action);
  }
  void Run(DropRecord& action) { recovery_.records().End(action.job); }
  void Run(UpdateNotResumed& action);
  void Run(JobWentBack& action);
  void Run(SwapPathMarked& action);

  // Job and event under which PostTimed() records its work in the job's timeline.
  struct Timed {
    JobId job = 0;
    TimedEvent event;  // without times
    // Workers that are near the bytes.
    int group = cpu_adam::WorkerPool::kAnyGroup;
  };
  // Runs `work`, a function without arguments, on a worker, and raises the TaskDone that `work` returns. PostTimed() also
  // records the times of the work in the timeline.
  template <typename Work>
  void PostTask(TaskId task, Work work);
  template <typename Work>
  void PostTimed(TaskId task, Timed timed, Work work);
  // Runs work over `elems` elements on all workers, in parts of kPartElems. `work` takes an ElemRange and returns the result of
  // the part. `join` makes the TaskDone from the results of all parts, in the order of the parts.
  template <typename Found, typename Work>
  void PostParts(TaskId task, Timed timed, uint64_t elems, Work work,
                 TaskDone (*join)(std::span<const Found> found, std::pmr::memory_resource* memory));

  // Returns the group of workers on the NUMA node of a block's states.
  int GroupOf(const JobMemory& memory, const BlockPlace& place, uint64_t bytes) const;
  // Gives a retained gradient arena back if the session has not begun to use it: its rank may try again.
  void KeepGradientsFurther(const ClientSession& session, ArenaRegistry::Arena arena);
  void OnRankAttached(SessionId id, ClientSession& session);
  absl::StatusOr<SessionFds> FdsFor(ClientSession& session, const AnswerAttach& answer);
  void Break(SessionId id, ClientSession& session, const absl::Status& reason);
  struct CurrentRank;
  // Returns the attached sessions of all jobs that have a rank and are not fenced.
  std::map<SessionId, CurrentRank> CurrentRanks() const;
  // Ends the exchange of ranks that wait for bytes of a session that ends. Call it before the state machine gets the event.
  void LeaveExchange(SessionId id);
  void FailExchangeOfFenced(const std::map<SessionId, CurrentRank>& ranks);

  const ExecutorOptions options_;
  nvme::IoEngine& engine_;
  TaskRunner& runner_;
  SwapSpace* swap_;
  uint64_t next_write_error_ns_ = 0;
  StateRunner state_;
  ArenaRegistry registry_;
  JobMemoryTable jobs_;
  // Memory for nodes and vectors that are created and destroyed within a step.
  std::pmr::unsynchronized_pool_resource memory_{kStepMemoryOptions};
  BlockMover mover_;
  Scrubber scrub_;
  std::pmr::map<TaskId, LoadWeights> loads_;  // weights that are being read from swap
  std::vector<SwapDone> transferred_;         // transfers ended by the current completion
  SessionTable sessions_;
  SessionPoller poller_;
  RankExchange exchange_;
  Recovery recovery_;
  Reconnects reconnects_;
  std::map<uint64_t, absl::AnyInvocable<void(absl::Status)>> deletes_;  // by request
  // The arguments of StopJobs().
  struct Stop {
    FlushStore flush;
    absl::AnyInvocable<void(const absl::Status&)> done;
  };
  Stop stop_;
};

}  // namespace forebay::daemon
