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
#include "daemon/core/node/node_state.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/arena_registry.h"
#include "daemon/exec/block_mover.h"
#include "daemon/exec/block_tasks.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/node_snapshot.h"
#include "daemon/exec/rank_exchange.h"
#include "daemon/exec/recovery/hand_over.h"
#include "daemon/exec/scrub.h"
#include "daemon/exec/session_io.h"
#include "daemon/exec/session_poller.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"
#include "daemon/exec/timeline.h"
#include "nvme/io/io_engine.h"

namespace forebay::daemon {

// The answer to attach; `fds` and `rpc_calls` only if answer.status is OK.
struct AttachResult {
  AnswerAttach answer;
  SessionFds fds;
  std::shared_ptr<std::atomic<uint64_t>> rpc_calls = {};  // of the job's sessions
};

// Called on the loop thread, each exactly once where it is called at all.
struct AttachCallbacks {
  absl::AnyInvocable<void(AttachResult)> answered;       // not called where the session ends before
  absl::AnyInvocable<void(const absl::Status&)> closed;  // the daemon has let go of everything
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

  // `swap` may be null. All outlive the executor.
  Executor(const ExecutorOptions& options, nvme::IoEngine& engine, TaskRunner& runner,
           SwapSpace* swap);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // --------------------------------------------------------------- what the control plane asks for

  // `process`: the client's, readable once it has ended (protocol/os/pidfd.h); none where it cannot be watched.
  // `wait`: how long a rank whose connection is lost may take to attach again. The one that does goes on with its session,
  // which the calls below then know by the newer number alone.
  void Attach(AttachRequested request, AttachCallbacks callbacks, protocol::UniqueFd process,
              std::chrono::nanoseconds wait = {});

  // The client has mapped its arenas: reads its commands from now on. Errors: E_FENCED if the
  // session is over.
  absl::Status Mapped(SessionId session);
  void End(SessionId session, EndCause cause);  // unknown ones are ignored
  // Ends the sessions whose clients are away and should have been back by then (UINT64_MAX: all that are); returns
  // when the next one should.
  uint64_t EndDisconnected(uint64_t until_ns);
  // Of a session that was ended without its client's asking: why.
  absl::Status Explain(SessionId session, uint64_t tag) const;
  // Answers once every rank of the session's job has called it: with the bytes of all, or with E_RANK_LOST
  // where one of them ends before. E_RANK for a reader, E_FENCED where the session is over. `call` is a
  // number of the session's, for CancelExchange; `number` as RankExchange has it.
  void Exchange(SessionId session, uint64_t call, uint64_t number, std::string bytes,
                RankExchange::Answer answer);
  void CancelExchange(SessionId session, uint64_t call);
  // Answers when the durable jobs that `request` means are verified. Errors: of Scrubber::Start.
  void Scrub(const ScrubRequest& request, Scrubber::Answer answer) {
    scrub_.Start(request, std::move(answer));
  }
  void CancelScrub(uint64_t number) { scrub_.Cancel(number); }
  // The jobs come to rest, for the next daemon to go on with them. `keep` gets the descriptors that it finds them by,
  // then, if it has kept them, clients hear that they are to attach again; `done` gets the outcome. Once.
  void HandOver(KeepDescriptors keep, absl::AnyInvocable<void(const absl::Status&)> done);
  // Jobs that are in the middle of a step are waited for no longer.
  void HandOverDue();
  // Of a node that keeps its jobs: before all that follows.
  void SetStore(DescriptorStore store) { store_ = std::move(store); }
  // Of jobs that the state machine was made with: before the loop runs. Until OwnAdopted() all that is in them stays
  // where the executor ends: another daemon finds it.
  void Adopt(std::vector<AdoptedArenas> all, const std::string& left_staging = {});
  void OwnAdopted();
  // Then, on the loop's thread, before anything else: updates in which the daemon before was killed go on.
  void ResumeUpdates();
  // What of it the store is to keep on: that of jobs whose records this daemon writes on.
  std::set<std::string> StoredNames() const;
  void DeleteJob(std::string job, uint32_t uid, absl::AnyInvocable<void(absl::Status)> done);
  NodeSnapshot Snapshot() {
    return MakeSnapshot({start_ns_, state_, registry_, jobs_, swap_, runner_, engine_,
                         options_.io_engine_reason, scrub_.progress(), events_handled_});
  }
  // Of the newest step: the daemon's events, then those of ranks that are attached and have seen it
  // committed, as many as a message has room for. Errors: E_JOB_NAME.
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

  // Does what is due by time: lease timers, paused writes, late requests, progress, freeing weights
  // of deleted jobs. How long the loop may sleep until the next call.
  std::chrono::nanoseconds Tick();

  // No session, no task, no transfer.
  bool idle() const;
  // Only transfers are unfinished.
  bool waits_for_swap_alone() const;

 private:
  struct Session {
    AttachRequested request;
    JobName job;
    JobId job_id = 0;  // once it is attached
    AttachCallbacks callbacks;
    protocol::UniqueFd process;
    std::unique_ptr<SessionIo> io;  // from the end of CreateSessionMemory on
    // What the rank's extra_state was at attach.
    ArenaRegistry::Arena extra_state;
    uint64_t trace_bytes = 0;   // at the end of its arena
    bool has_detached = false;  // its client has asked for its end
    bool broken = false;        // its ring lied: nothing is read from it or written to it any more
    bool is_handed_over = false;      // likewise; the next daemon goes on with it
    std::chrono::nanoseconds wait{};  // of Attach
    bool was_mapped = false;
    JobId kept_of = 0;     // whose gradient arena of before it has; 0: it has a new one
    SessionId number = 0;  // by which its client knows it

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
  // What comes after the read of a LoadWeights; false: it was none, or it failed.
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
  void Run(HandedOver& action);
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

  // Work on a worker, a function of nothing, that ends with its TaskDone; where `timed` is given the
  // job's timeline gets it too.
  struct Timed {
    JobId job = 0;
    TimedEvent event;  // without times
    // Workers that are near the bytes.
    int group = cpu_adam::WorkerPool::kAnyGroup;
  };
  template <typename Work>
  void PostTask(TaskId task, Work work);
  template <typename Work>
  void PostTimed(TaskId task, Timed timed, Work work);
  // The same for work over `elems` elements, in parts of kPartElems on all workers: `work` gives what a
  // part (an ElemRange) found, and `join` makes the TaskDone of all parts, in their order.
  template <typename Found, typename Work>
  void PostParts(TaskId task, Timed timed, uint64_t elems, Work work,
                 TaskDone (*join)(std::span<const Found> found, std::pmr::memory_resource* memory));

  // Destroys it on the pool that may block.
  template <typename Resource>
  void Retire(Resource resource) {
    runner_.Post(PoolId::kSetup, [resource = std::move(resource)]() mutable -> TaskRunner::Then {
      { const Resource dead = std::move(resource); }
      return [] {};
    });
  }

  // Workers that are near the states of a block.
  int GroupOf(const JobMemory& memory, const BlockPlace& place, uint64_t bytes) const;
  // The arena of the rank that the daemon before has left, where the session goes on with it; null: it makes one.
  ArenaRegistry::Arena KeptGradientsFor(JobId job, const AttachRequested& request, uint64_t bytes);
  // The session did not come to use it: its rank may try again.
  void KeepGradientsFurther(const Session& session, ArenaRegistry::Arena arena);
  void DropKeptGradients(JobId job);
  // A job without a record is not concerned.
  template <typename Record>
  void SetRecord(const Record& record) {
    const auto found = records_.find(record.job);
    if (found != records_.end()) found->second.record->Set(record);
  }
  void EndRecord(JobId job);
  // Where the store of descriptors has it already, nothing is done.
  absl::Status Store(const std::string& name, const ArenaRegistry::Arena& arena);
  void DropStored(const std::string& name);
  void DropStored(const std::string& name, const ArenaRegistry::Arena& arena);  // if it is that one
  absl::Status StoreArenas(JobId id);
  // The process of each rank is in the store, as long as the rank is attached and beyond.
  void KeepProcess(const Session& session, bool has_detached);
  void OnRankAttached(SessionId id, Session& session);
  void OnRankLeft(Session& session, bool is_of_old_generation);
  // Whether another process has attached in the place of the one that comes back.
  bool IsLeftBehind(const Session& session) const;
  void DropAbsent(JobId job, std::optional<uint32_t> rank = std::nullopt);  // of all ranks
  // Tells the state machine of absent ranks that have ended, of jobs that have others; returns when to look again.
  uint64_t LookForAbsent();
  // How long a rank of another node may be away; 0: none is there.
  uint64_t RankWaitNs(JobId job) const;
  bool HasRanks(JobId job) const;  // that are attached
  bool HasSession(JobId job, uint32_t rank) const;
  std::map<SessionId, JobId> RanksOf(const DurableNode& node) const;
  absl::StatusOr<DescriptorsByName> DescriptorsOf(const HandedOver& action);
  absl::StatusOr<SessionFds> FdsFor(Session& session, const AnswerAttach& answer);
  void Break(SessionId id, Session& session, const absl::Status& reason);
  // The session by the number that its client has; 0: of none, or of a connection before.
  SessionId Resolve(SessionId number) const;
  // The session that the request is to go on with: of the same rank, run and gradient arena; 0: none.
  SessionId SessionToGoOn(const AttachRequested& request, const JobName& job) const;
  bool MayDisconnect(const Session& session) const;
  void Disconnect(SessionId id);
  void Reconnect(SessionId id, Session again);
  void EndReconnect(SessionReconnected event, SessionId number, absl::StatusOr<SessionMemory> made);
  SessionIo& session_io(SessionId id);
  struct CurrentRank;
  // Of all jobs: the sessions that have a rank, and are neither fenced nor over.
  std::map<SessionId, CurrentRank> CurrentRanks() const;
  // A session ends: the ranks that wait for its bytes wait no longer. Before the state machine hears of it.
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
  // For nodes and vectors that come and go within a step.
  std::pmr::unsynchronized_pool_resource memory_{kStepMemoryOptions};
  BlockMover mover_;
  Scrubber scrub_;
  std::pmr::map<TaskId, LoadWeights> loads_;  // being read
  std::vector<SwapDone> transferred_;         // of the completion that is handled
  std::map<SessionId, Session> sessions_;
  std::map<SessionId, SessionId> reconnected_;  // by the newest number of their clients
  std::map<SessionId, uint64_t> disconnected_;  // when they end, if their clients stay away
  SessionPoller poller_;
  RankExchange exchange_;
  std::deque<std::pair<SessionId, absl::Status>> evicted_;  // newest last, at most kEvictedKeptMax
  std::map<uint64_t, absl::AnyInvocable<void(absl::Status)>> deletes_;
  uint64_t next_delete_ = 1;
  std::multimap<uint64_t, Event> timers_;  // by MonotonicNs
  std::vector<Event> events_;
  uint64_t events_handled_ = 0;
  std::vector<Action> actions_;
  // Of a CommitLedger that pauses: when it goes on.
  std::optional<std::pair<uint64_t, CommitLedger>> paused_ledger_;
  bool running_ = false;
  std::map<std::pair<JobId, uint32_t>, ArenaRegistry::Arena> kept_gradients_;  // by job and rank
  // Ranks that have no session any more, here or with the daemon before, and are in the store. Until a rank of the job
  // attaches anew.
  std::map<std::pair<JobId, uint32_t>, AbsentRank> absent_;
  uint64_t next_look_ns_ = 0;
  // From which another daemon goes on where this one is killed, and their descriptors' names. Updates that run share
  // them.
  struct Record {
    std::shared_ptr<KeptRecord> record;
    std::string name;  // empty: nobody finds it
  };
  std::map<JobId, Record> records_;
  std::vector<ArenaRegistry::Arena> adopted_;  // not owned yet
  bool resumes_updates_ = false;
  std::string left_staging_;  // in the store, until this one's is
  uint64_t last_record_ = 0;
  DescriptorStore store_;
  std::map<std::string, std::weak_ptr<pinned_mem::PinnedArena>> stored_;  // by name
  KeepDescriptors keep_;
  absl::AnyInvocable<void(const absl::Status&)> handed_over_;
};

}  // namespace forebay::daemon
