// SPDX-License-Identifier: Apache-2.0
// Runs the state machine: turns calls and outcomes into events, and actions into work.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
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
#include "daemon/exec/recovery/left_jobs.h"
#include "daemon/exec/scrub.h"
#include "daemon/exec/session_io.h"
#include "daemon/exec/session_poller.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"
#include "daemon/exec/timeline.h"
#include "nvme/io/io_engine.h"

namespace forebay::daemon {

// Answer to attach. `fds` and `rpc_calls` are set only if answer.status is OK.
struct AttachResult {
  AnswerAttach answer;
  SessionFds fds;
  std::shared_ptr<std::atomic<uint64_t>> rpc_calls = {};  // calls of the job's sessions
};

// Callbacks of an attach, called on the loop thread. Each callback is called at most once.
struct AttachCallbacks {
  // Not called if the session ends before the answer.
  absl::AnyInvocable<void(AttachResult)> answered;
  // Gets the reason once the session has ended, or once its connection is broken or lost.
  absl::AnyInvocable<void(const absl::Status&)> closed;
};

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
  static constexpr size_t kEvictedKeptMax = 64;  // reasons of sessions that end
  static constexpr size_t kTraceEventsMax = 32768;

  // `swap` may be null. The arguments outlive the executor.
  Executor(const ExecutorOptions& options, nvme::IoEngine& engine, TaskRunner& runner,
           SwapSpace* swap);
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
  absl::Status Explain(SessionId session, uint64_t tag) const;
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
  // Sets the store of descriptors on a node that retains its jobs over a restart. Call it before all functions below.
  void SetStore(DescriptorStore store) { store_ = std::move(store); }
  // Takes over the arenas of the jobs that the state machine was created with. Call it before the loop runs. If the executor ends
  // before OwnAdopted(), the arenas retain their bytes for another daemon.
  void Adopt(std::vector<AdoptedArenas> all, const std::string& left_staging = {});
  void OwnAdopted();
  // Resumes updates in which the earlier daemon was killed. Call it after OwnAdopted(), on the loop thread, before any other
  // event.
  void ResumeUpdates();
  // Names of the descriptors that the store must retain: arenas and processes of ranks that this daemon continues, its records,
  // and the staging arena of the earlier daemon.
  std::set<std::string> StoredNames() const;
  void DeleteJob(std::string job, uint32_t uid, absl::AnyInvocable<void(absl::Status)> done);
  NodeSnapshot Snapshot() {
    return MakeSnapshot({start_ns_, state_, registry_, jobs_, swap_, runner_, engine_,
                         options_.io_engine_reason, scrub_.progress(), events_handled_});
  }
  // Returns events of the newest published step: first those of the daemon, then those of attached ranks that have seen the
  // step committed, at most kTraceEventsMax with the ranks' events. Errors: E_JOB_NAME.
  absl::StatusOr<std::vector<ShownEvent>> Trace(const JobName& name) const;
  // NodeState::Plan.
  absl::StatusOr<JobPlan> Plan(const AttachRequested& request,
                               const std::optional<NodeState::Limits>& limits) const {
    return state_.Plan(request, limits);
  }
  // NodeState::PlanOfJob.
  absl::StatusOr<JobPlan> PlanOfJob(const JobName& name,
                                    const std::optional<NodeState::Limits>& limits) const {
    return state_.PlanOfJob(name, limits);
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
  struct Session {
    AttachRequested request;
    JobName job;
    JobId job_id = 0;  // 0 until the session is attached
    AttachCallbacks callbacks;
    protocol::UniqueFd process;
    std::unique_ptr<SessionIo> io;  // null until CreateSessionMemory has ended
    // Copy of the extra_state of the rank and of rank 0, taken at attach.
    ArenaRegistry::Arena extra_state;
    uint64_t trace_bytes = 0;   // bytes for trace events at the end of the gradient arena
    bool has_detached = false;  // the client has asked to end the session
    bool broken = false;        // the client wrote invalid indices: the ring is not used any more
    // The ring is not used any more: the next daemon continues the session.
    bool is_stopped = false;
    std::chrono::nanoseconds wait{};  // `wait` of Attach()
    bool was_mapped = false;
    JobId kept_of = 0;     // job whose retained gradient arena the session has; 0: the arena is new
    SessionId number = 0;  // the number by which the client knows the session

    bool IsOf(const JobName& of, uint32_t rank) const {
      return job == of && !request.reader && request.rank == rank;
    }
  };

  // AttachRequested::rival_pid of a session that is about to attach.
  int32_t RivalOf(const Session& session) const;
  static int32_t RankOf(const AttachRequested& request) {  // -1: a reader
    return request.reader ? -1 : static_cast<int32_t>(request.rank);
  }
  // Raises the events whose time has come; returns when the next one is due.
  uint64_t FireTimers();
  static std::string WhoIs(const AttachRequested& request);  // "rank 3 of job x"

  void Raise(Event event);
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
  void Run(RecordJob& action);
  void Run(RecordBlock& action) { SetRecord(action); }
  void Run(RecordInstalled& action) { SetRecord(action); }
  void Run(RecordStaged& action) { SetRecord(action); }
  void Run(RecordSums& action) { SetRecord(action); }
  void Run(RecordAttempt& action) { SetRecord(action); }
  void Run(RecordPrepared& action) { SetRecord(action); }
  void Run(RecordDecision& action) { SetRecord(action); }
  void Run(RecordTrust& action) { SetRecord(action); }
  void Run(RecordStep& action) { SetRecord(action); }
  void Run(RecordUpdates& action) { SetRecord(action); }
  void Run(RecordLease& action) { SetRecord(action); }
  void Run(RecordLeaseEnd& action) { SetRecord(action); }
  void Run(DropRecord& action) { EndRecord(action.job); }
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

  // Destroys `resource` on the pool that may block.
  template <typename Resource>
  void Retire(Resource resource) {
    runner_.Post(PoolId::kSetup, [resource = std::move(resource)]() mutable -> TaskRunner::Then {
      { const Resource dead = std::move(resource); }
      return [] {};
    });
  }

  // Returns the group of workers on the NUMA node of a block's states.
  int GroupOf(const JobMemory& memory, const BlockPlace& place, uint64_t bytes) const;
  // Returns the retained gradient arena of the rank if the session continues to use it; otherwise null.
  ArenaRegistry::Arena KeptGradientsFor(JobId job, const AttachRequested& request, uint64_t bytes);
  // Retains a gradient arena that the session has not begun to use: its rank may try again.
  void KeepGradientsFurther(const Session& session, ArenaRegistry::Arena arena);
  void DropKeptGradients(JobId job);
  // Writes `record` into the job's record. Does nothing if the job has none.
  template <typename Record>
  void SetRecord(const Record& record) {
    const auto found = records_.find(record.job);
    if (found != records_.end()) found->second.record->Set(record);
  }
  void EndRecord(JobId job);
  // Puts the arena's descriptor into the store under `name`, unless the store already has this arena under that name.
  absl::Status Store(const std::string& name, const ArenaRegistry::Arena& arena);
  void DropStored(const std::string& name);
  // Drops the descriptor only if it is that of `arena`.
  void DropStored(const std::string& name, const ArenaRegistry::Arena& arena);
  absl::Status StoreArenas(JobId id);
  // Puts the pidfd of the session's rank into the store. The store retains the pidfd while the rank is attached, and after a
  // disconnection.
  void KeepProcess(const Session& session, bool has_detached);
  void OnRankAttached(SessionId id, Session& session);
  void OnRankLeft(Session& session, bool is_of_old_generation);
  // True if the process that returns was replaced: another process has attached as the same rank.
  bool IsLeftBehind(const Session& session) const;
  // Drops the absent ranks of the job. `rank`: the only rank to drop; nullopt: all ranks.
  void DropAbsent(JobId job, std::optional<uint32_t> rank = std::nullopt);
  // Tells the state machine of absent ranks that have ended, if their job has attached ranks. Returns the time of the next
  // call.
  uint64_t LookForAbsent();
  // Longest time that a rank of another node may be disconnected; 0: no rank is attached.
  uint64_t RankWaitNs(JobId job) const;
  bool HasRanks(JobId job) const;  // True if the job has attached ranks.
  bool HasSession(JobId job, uint32_t rank) const;
  // Returns the sessions of the job's ranks that have memory.
  std::vector<SessionId> RanksOf(JobId job) const;
  // Leaves the memory and the record of a job that has stopped to the next daemon.
  void Leave(JobId job);
  absl::StatusOr<SessionFds> FdsFor(Session& session, const AnswerAttach& answer);
  void Break(SessionId id, Session& session, const absl::Status& reason);
  // Returns the session whose client knows it by `number`. Returns 0 if no session has that number, or if the number is of an
  // earlier connection.
  SessionId Resolve(SessionId number) const;
  // Returns the session that the request continues: a session of the same rank, run and gradient arena. Returns 0 if no session
  // matches.
  SessionId SessionToGoOn(const AttachRequested& request, const JobName& job) const;
  bool MayDisconnect(const Session& session) const;
  void Disconnect(SessionId id);
  void Reconnect(SessionId id, Session again);
  void EndReconnect(SessionReconnected event, SessionId number, absl::StatusOr<SessionMemory> made);
  SessionIo& session_io(SessionId id);
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
  uint64_t start_ns_;
  uint64_t next_write_error_ns_ = 0;
  NodeState state_;
  ArenaRegistry registry_;
  JobMemoryTable jobs_;
  // Memory for nodes and vectors that are created and destroyed within a step.
  std::pmr::unsynchronized_pool_resource memory_{kStepMemoryOptions};
  BlockMover mover_;
  Scrubber scrub_;
  std::pmr::map<TaskId, LoadWeights> loads_;  // weights that are being read from swap
  std::vector<SwapDone> transferred_;         // transfers ended by the current completion
  std::map<SessionId, Session> sessions_;
  std::map<SessionId, SessionId> reconnected_;  // session by the newest number of its client
  // MonotonicNs at which the session ends if its client does not return
  std::map<SessionId, uint64_t> disconnected_;
  SessionPoller poller_;
  RankExchange exchange_;
  std::deque<std::pair<SessionId, absl::Status>> evicted_;  // newest last, at most kEvictedKeptMax
  std::map<uint64_t, absl::AnyInvocable<void(absl::Status)>> deletes_;
  uint64_t next_delete_ = 1;
  std::multimap<uint64_t, Event> timers_;  // by MonotonicNs
  std::vector<Event> events_;
  uint64_t events_handled_ = 0;
  std::vector<Action> actions_;
  // A CommitLedger that pauses, with the MonotonicNs at which it resumes.
  std::optional<std::pair<uint64_t, CommitLedger>> paused_ledger_;
  bool running_ = false;
  // Gradient arenas retained for ranks that attach again, by job and rank.
  std::map<std::pair<JobId, uint32_t>, ArenaRegistry::Arena> kept_gradients_;
  // Ranks whose session, with this daemon or an earlier one, has ended. The store has the pidfds of their processes. A rank is
  // removed when it attaches again, or when any rank of the job attaches from scratch.
  std::map<std::pair<JobId, uint32_t>, AbsentRank> absent_;
  uint64_t next_look_ns_ = 0;
  // Records from which another daemon resumes jobs if this daemon is killed, and the names of their descriptors. Updates that
  // run share the records.
  struct Record {
    std::shared_ptr<KeptRecord> record;
    std::string name;  // empty: not in the store
    // True until OwnAdopted() if the store has a record of release 0.2.0 under `name`.
    bool is_converted = false;
  };
  std::map<JobId, Record> records_;
  std::vector<ArenaRegistry::Arena> adopted_;  // arenas taken over, before OwnAdopted()
  bool resumes_updates_ = false;
  // Name of the staging arena of the earlier daemon, until the staging arena of this daemon is stored.
  std::string left_staging_;
  uint64_t last_record_ = 0;
  DescriptorStore store_;
  std::map<std::string, std::weak_ptr<pinned_mem::PinnedArena>> stored_;  // by name
  FlushStore flush_;
  absl::AnyInvocable<void(const absl::Status&)> stopped_;
};

}  // namespace forebay::daemon
