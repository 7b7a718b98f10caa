// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/node/node_state.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/node/node_impl.h"
#include "daemon/core/plan/attach_check.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

OtherUsers OthersFor(uint32_t uid) {
  return uid == 0 ? OtherUsers::kAllowed : OtherUsers::kRefused;
}

absl::Status NoJob(const JobName& name, uint32_t uid) {
  return MakeError(ErrorId::kJobName, absl::StrCat("there is no job ", JobNameFor(uid, name)),
                   "forebay jobs lists them");
}

absl::Status RestartError() {
  return MakeError(ErrorId::kDaemonGone, "the daemon is being restarted",
                   "attach again in a moment");
}

}  // namespace

NodeState::NodeState(const Options& options) : impl_(std::make_unique<Impl>(options)) {}
NodeState::~NodeState() = default;

void NodeState::Handle(const Event& event, std::vector<Action>& actions) {
  impl_->actions.Bind(&actions);
  Job* const concerned = std::visit([this](const auto& e) { return impl_->On(e); }, event);
  if (concerned != nullptr && concerned->world().WantsFloatSums()) impl_->GiveFloatSums(*concerned);
  impl_->ReturnBlocks();
  for (const JobId id : std::exchange(impl_->going_on, {})) impl_->jobs.at(id)->Advance();
  impl_->Advance(concerned, actions);
  if (concerned != nullptr) impl_->Sweep(*concerned);
  impl_->ReportMarks();
  impl_->AdmitWaiting();
  impl_->KeepBlocks();
  impl_->ResumeReturns();
  impl_->TryStop();
  impl_->ledger.Make(impl_->jobs, impl_->last_job);
  impl_->actions.Bind(nullptr);
}

Job* NodeState::Impl::On(const AttachRequested& request) {
  FOREBAY_CHECK(request.session != 0 && request.layout != nullptr);
  FOREBAY_CHECK(!session_jobs.contains(request.session));
  WeighPaths();
  absl::StatusOr<Job*> job = MayAttach(request) ? JobFor(request) : RestartError();
  if (!job.ok()) {
    actions.Emit(AnswerAttach{.session = request.session, .status = job.status(), .trace = {}});
    actions.Emit(CloseSession{.session = request.session, .reason = job.status()});
    return nullptr;
  }
  session_jobs.emplace(request.session, (*job)->id());
  (*job)->sessions().Attach(request);
  return *job;
}

// True if the attach is allowed. During a stop, only ranks that return to a job that is becoming quiescent may attach: the job's
// other ranks may wait for them in step.
bool NodeState::Impl::MayAttach(const AttachRequested& request) const {
  if (stop == Stop::kNone) return true;
  if (stop != Stop::kWaiting || !request.reattach) return false;
  const absl::StatusOr<JobName> name =
      ParseJobName(request.job, request.uid, OthersFor(request.uid));
  Job* const job = name.ok() ? JobNamed(*name) : nullptr;
  return job != nullptr && job->stop().is_stopping();
}

// Returns the job of the request, and creates it if it does not exist.
absl::StatusOr<Job*> NodeState::Impl::JobFor(const AttachRequested& request) {
  ASSIGN_OR_RETURN(JobName name, ParseJobName(request.job, request.uid, OthersFor(request.uid)));
  RETURN_IF_ERROR(CheckAttachRequest(request));
  if (Job* job = JobNamed(name)) {
    RETURN_IF_ERROR(job->sessions().CheckAttach(request));
    if (request.reader) RETURN_IF_ERROR(CheckReaderFits(request, *job));
    if (job->world().NeedsChange(request)) RETURN_IF_ERROR(ChangeWorld(request, *job));
    return job;
  }
  const std::shared_ptr<const DurableJob> parked = ledger.FindParked(name);
  // A session that reattaches needs the memory that it has mapped. Bytes that are read from the disk do not suffice.
  const bool may_return = !request.reattach || KeptOf(parked.get()) != nullptr;
  if (!request.reader && parked != nullptr && may_return) {
    RETURN_IF_ERROR(CheckParked(request, *parked));
    return MakeJob(request, std::move(name));
  }
  if (request.reader && parked != nullptr) {
    return MakeError(ErrorId::kNotReady,
                     absl::StrCat("job ", name.name, " is at step ", parked->step,
                                  ": no rank has attached since the daemon was started"),
                     "attach a rank first, which brings the job back");
  }
  if (request.reader) {
    return MakeError(ErrorId::kJobName,
                     absl::StrCat("there is no job named ", request.job, " to read"),
                     "a reader attaches to a job that a rank has created: forebay jobs");
  }
  if (name.uid != request.uid) return NoJob(name, request.uid);
  if (request.reattach) {
    return MakeError(ErrorId::kJobName,
                     absl::StrCat("the daemon before this one has left nothing that job ",
                                  name.name, " could go on from, or it was deleted since"),
                     "start the trainer again");
  }
  if (jobs.size() + ledger.parked().size() >= kJobsMax) {
    return MakeError(ErrorId::kLimit,
                     absl::StrCat("the node has ", jobs.size() + ledger.parked().size(),
                                  " jobs (at most ", kJobsMax, ")"),
                     "delete stale jobs: forebay jobs");
  }
  return MakeJob(request, std::move(name));
}

absl::Status NodeState::Impl::CheckParked(const AttachRequested& request,
                                          const DurableJob& job) const {
  RETURN_IF_ERROR(CheckTraits(request, {.name = job.name,
                                        .layout = job.layout->spec(),
                                        .world_size = job.world_size,
                                        .durability = job.durability}));
  if (request.run != job.run && (!request.resume || request.reattach)) {
    return JobExistsError(job.name, job.step, job.run);
  }
  if (request.is_left_behind) return LeftBehindError(job.name, job.step);
  // A session that reattaches needs the world size of the retained memory.
  if (request.reattach && job.kept &&
      request.session_request.world_size != job.kept->session.world_size) {
    return MakeError(
        ErrorId::kRank,
        absl::StrCat("job ", job.name, " was left with ", job.kept->session.world_size,
                     " ranks; the session is of ", request.session_request.world_size));
  }
  if (!freed_weights_bytes.contains(job.id) && !ledger.IsRetiring(job.id)) {
    return absl::OkStatus();
  }
  return MakeError(ErrorId::kBusy,
                   absl::StrCat("job ", job.name,
                                " could not come back a moment ago, or goes back to a durable "
                                "step, and its memory or its swap is not free yet"),
                   "attach again in a moment");
}

// Returns the bytes of the ledger that all jobs except `recovered` take.
uint64_t NodeState::Impl::LedgerTaken(const DurableJob* recovered) const {
  uint64_t taken = 0;
  for (const auto& [id, job] : jobs) taken += job->plan().ledger_bytes;
  for (const auto& [name, job] : ledger.parked()) {
    const std::shared_ptr<const DurableJob> in_ledger = InLedger(job);
    if (job.get() != recovered && in_ledger != nullptr) taken += LedgerBytes(*in_ledger);
  }
  return taken;
}

// Creates a job. A recovered job has the number, the durability level and the slots that the ledger names.
absl::StatusOr<Job*> NodeState::Impl::MakeJob(const AttachRequested& request, JobName name) {
  const std::shared_ptr<const DurableJob> recovered = ledger.FindParked(name);
  SessionRequest session = request.session_request;
  session.durability = request.durability.value_or(options.durability);
  const KeptMemory* const kept = KeptOf(recovered.get());
  const bool goes_on = request.reattach && kept != nullptr;
  if (goes_on) session = kept->session;
  // Float32 sums that were created late are behind the 16-bit sums, which the plan must then include.
  if (kept != nullptr && kept->update != nullptr && kept->update->float_sums.bytes > 0) {
    session.accumulate = false;
  }
  if (recovered != nullptr) {
    session.durability = recovered->durability;
    for (const std::vector<std::byte>& of_rank : *recovered->extra_states) {
      session.extra_state_bytes = std::max<uint64_t>(session.extra_state_bytes, of_rank.size());
    }
  }
  if (session.durability.level != protocol::DurabilityLevel::kMemory) {
    RETURN_IF_ERROR(options.not_durable);
  }
  const GrantPolicy policy(options, UseOf(request.uid, nullptr, recovered.get()));
  const NodeUse of_node = Use(recovered.get());
  ASSIGN_OR_RETURN(MemoryPlan plan, policy.Plan(*request.layout, session, of_node));
  RETURN_IF_ERROR(CheckLedgerRoom(plan, LedgerTaken(recovered.get()), options.ledger_bytes_max));
  nvme::SlotMap left = swap;
  // PlanJob has checked that these slots are free, in this order.
  const auto allocate = [&left](uint32_t count, uint64_t slot_bytes) -> std::vector<nvme::Slot> {
    if (count == 0) return {};
    std::optional<std::vector<nvme::Slot>> slots = left.Allocate(count, slot_bytes);
    FOREBAY_CHECK(slots.has_value());
    return *std::move(slots);
  };
  const bool has_own_sums = HasOwnSumSlots(plan, recovered.get());
  std::vector<nvme::Slot> sum_slots =
      has_own_sums ? kept->sum_slots : allocate(plan.sum_slots, plan.sum_page_bytes);
  std::vector<nvme::Slot> own;
  if (recovered != nullptr) own = recovered->BlockSlots();
  const auto missing =
      static_cast<uint32_t>(plan.swap_slots - std::min<uint64_t>(plan.swap_slots, own.size()));
  std::vector<nvme::Slot> slots = allocate(missing, plan.block_bytes);
  RETURN_IF_ERROR(MakeRoom(plan, left, of_node));
  if (!has_own_sums) {
    if (kept != nullptr) swap.Free(kept->sum_slots);
    for (const nvme::Slot& slot : sum_slots) FOREBAY_CHECK(swap.Reserve(slot));
  }
  for (const nvme::Slot& slot : slots) FOREBAY_CHECK(swap.Reserve(slot));
  slots.insert(slots.end(), own.begin(), own.end());
  ledger.Unpark(name);
  const JobId id = recovered != nullptr ? recovered->id : ++last_job;
  auto job = std::make_unique<Job>(JobSpec{.id = id,
                                           .name = name.name,
                                           .uid = name.uid,
                                           .layout = request.layout,
                                           .plan = std::move(plan),
                                           .swap_slots = std::move(slots),
                                           .sum_slots = std::move(sum_slots),
                                           .options = options,
                                           .recovered = recovered,
                                           .keeps_gradients = goes_on},
                                   actions, pool, swap, path_table);
  names.emplace(std::move(name), id);
  waiting.push_back(id);
  Job* const made = jobs.emplace(id, std::move(job)).first->second.get();
  ReportWait(*made, made->world().granted_bytes());
  return made;
}

Job* NodeState::Impl::On(const SessionMapped& event) {
  Job* const job = JobOf(event.session);
  if (job != nullptr) job->sessions().OnMapped(event.session);
  return job;
}

Job* NodeState::Impl::On(const SessionEnded& event) {
  Job* const job = JobOf(event.session);
  if (job != nullptr) job->sessions().OnEnded(event.session, event.cause);
  return job;
}

Job* NodeState::Impl::On(const SessionReconnected& event) {
  Job* const job = JobOf(event.session);
  if (job != nullptr) job->sessions().OnReconnected(event);
  return job;
}

Job* NodeState::Impl::On(const CommandArrived& event) {
  Job* const job = JobOf(event.session);
  if (job != nullptr) job->commands().OnCommand(event.session, event.command);
  return job;
}

Job* NodeState::Impl::On(const StagingSlotKept& event) {
  pool.Keep(event.slot);
  return nullptr;
}

Job* NodeState::Impl::On(const StagingSlotReturned& event) {
  pool.Return(event.slot);
  return nullptr;
}

Job* NodeState::Impl::On(const LeaseTimeExpired& event) {
  const auto job = jobs.find(event.job);
  if (job == jobs.end()) return nullptr;
  job->second->sessions().OnLeaseTimeExpired(event.step);
  return job->second.get();
}

Job* NodeState::Impl::On(const BlockMoveRequested& request) {
  const auto found = jobs.find(request.job);
  if (found == jobs.end()) return nullptr;
  Job& job = *found->second;
  WeighPaths();
  if (request.block < job.placement().blocks()) job.Move(request.block, FreeBytesFor(job));
  return &job;
}

Job* NodeState::Impl::On(const StepRequestCopied& event) {
  Job* const job = JobOf(event.session);
  if (job != nullptr) job->commands().OnStepRequest(event);
  return job;
}

Job* NodeState::Impl::On(const SummaryCopied& event) {
  Job* const job = JobOf(event.session);
  if (job != nullptr) job->commands().OnSummary(event);
  return job;
}

Job* NodeState::Impl::On(const TaskDone& event) {
  if (ledger.Owns(event.task)) {
    const std::vector<JobId> made = ledger.Finish(event.status, swap);
    std::set<uint32_t> doubted_paths;
    for (const auto& [id, job] : jobs) {
      const bool is_in_ledger = std::ranges::find(made, id) != made.end();
      if (is_in_ledger) job->OnLedger(event.status);
      if (!event.doubted.empty()) job->OnDoubted(event.doubted, doubted_paths);
      if (is_in_ledger || !event.doubted.empty()) going_on.push_back(id);
    }
    for (const uint32_t path : doubted_paths) path_table.OnFailed(path, Direction::kWrite);
    return nullptr;
  }
  const JobId id = actions.FinishTask(event.task);
  FOREBAY_CHECK(id != 0);
  ++turn;
  Job* const job = jobs.at(id).get();
  job->OnTaskDone(event);
  return job;
}

Job* NodeState::Impl::On(const DeleteJobRequested& request) {
  if (stop != Stop::kNone) {
    actions.Emit(AnswerDelete{.request = request.request, .status = RestartError()});
    return nullptr;
  }
  Job* job = nullptr;
  const absl::StatusOr<JobName> name =
      ParseJobName(request.job, request.uid, OthersFor(request.uid));
  if (name.ok()) job = JobNamed(*name);
  if (const auto parked = name.ok() ? ledger.FindParked(*name) : nullptr) {
    DeleteParked(*name, *parked);
    actions.Emit(AnswerDelete{.request = request.request, .status = absl::OkStatus()});
    return nullptr;
  }
  absl::Status status = name.status();
  if (status.ok()) {
    status = job == nullptr ? NoJob(*name, request.uid) : job->sessions().DeleteJob();
  }
  if (!status.ok()) {
    actions.Emit(AnswerDelete{.request = request.request, .status = status});
    return nullptr;
  }
  deletes[job->id()].push_back(request.request);
  return job;
}

void NodeState::Impl::DeleteParked(const JobName& name, const DurableJob& job) {
  if (const KeptMemory* const kept = KeptOf(&job)) {
    swap.Free(kept->spare_slots);
    swap.Free(kept->sum_slots);
    freed_weights_bytes.emplace(job.id, kept->weights_bytes);
    actions.Emit(FreeJob{.job = job.id});
  }
  if (job.durability.level == protocol::DurabilityLevel::kMemory) {
    swap.Free(job.Slots());
  } else {
    ledger.Retire(job.Slots());
  }
  ledger.Unpark(name);
}

Job* NodeState::Impl::On(const JobFreed& event) {
  if (!event.weights_in_use) freed_weights_bytes.erase(event.job);
  for (const auto& [id, job] : jobs) job->residency().BeginReturns();
  const auto node = deletes.extract(event.job);
  if (node.empty()) return nullptr;
  for (const uint64_t request : node.mapped()) {
    actions.Emit(AnswerDelete{.request = request, .status = absl::OkStatus()});
  }
  return nullptr;
}

// Returns the job that an event concerns, and the jobs that wait for a staging slot. Other jobs cannot continue because of the
// event. The order rotates, so that the job that last got slots is not first again.
std::pmr::vector<Job*> NodeState::Impl::Runnable(Job* concerned) {
  std::pmr::vector<Job*> order(&memory);
  for (const auto& [id, job] : jobs) {
    const bool waits = job->parts().pipeline.store().blocks().waits_for_slot();
    if (job.get() == concerned || waits) order.push_back(job.get());
  }
  if (order.empty()) return order;
  std::rotate(order.begin(), order.begin() + static_cast<int64_t>(turn % order.size()),
              order.end());
  return order;
}

// Advances jobs repeatedly, because one job may free a slot that another waits for.
void NodeState::Impl::Advance(Job* concerned, const std::vector<Action>& emitted) {
  std::pmr::vector<Job*> advanced(&memory);
  for (size_t before = emitted.size() + 1; before != emitted.size();) {
    before = emitted.size();
    for (Job* job : Runnable(concerned)) {
      if (std::find(advanced.begin(), advanced.end(), job) == advanced.end()) {
        advanced.push_back(job);
      }
      job->Advance();
    }
  }
  for (Job* job : advanced) job->Prefetch();
}

// Plans a new world size for the job's next sessions. The job's own blocks may be evicted too.
absl::Status NodeState::Impl::ChangeWorld(const AttachRequested& request, Job& job) {
  NodeUse others = Use();
  others.own_state_bytes = job.placement().granted_bytes();
  others.jobs_dram_bytes -= job.world().fixed_bytes() + others.own_state_bytes;
  ASSIGN_OR_RETURN(MemoryPlan plan, PlanWorld(*request.layout, job.plan(), request.session_request,
                                              options, others));
  const GrantPolicy policy(options, UseOf(job.uid(), &job));
  RETURN_IF_ERROR(
      policy.Check(plan.fixed_bytes,
                   absl::StrCat("with ", request.session_request.world_size, " ranks job ",
                                job.name(), " needs ", plan.fixed_bytes, " beside its states")));
  RETURN_IF_ERROR(MakeRoom(plan, swap, others));
  RETURN_IF_ERROR(MoveOwnBlocks(plan, policy, job));
  job.world().Change(std::move(plan));
  ReportWait(job, *job.world().awaited_bytes());
  return absl::OkStatus();
}

// Marks blocks of jobs for eviction, the oldest job first, until these blocks have the plan's missing bytes. Only swap slots
// that are free in `left` may be used.
absl::Status NodeState::Impl::MakeRoom(const MemoryPlan& plan, nvme::SlotMap left, NodeUse use) {
  if (plan.missing_bytes == 0) return absl::OkStatus();
  std::map<JobId, std::vector<Eviction>> evictions;
  uint64_t made_bytes = 0;
  for (const auto& [id, job] : jobs) {
    if (made_bytes >= plan.missing_bytes) break;
    evictions[id] = job->PlanEvictions(plan.missing_bytes - made_bytes, left);
    for (const Eviction& eviction : evictions[id]) made_bytes += eviction.bytes;
  }
  if (made_bytes < plan.missing_bytes) {
    use.movable_bytes = made_bytes;
    return DramLimitError(plan, options, use, use.own_state_bytes);
  }
  for (const auto& [id, job] : jobs) {
    if (job->residency().returns()) has_cut_returns = true;
    job->residency().EndReturns();
  }
  for (const auto& [id, of_job] : evictions) {
    Evict(of_job, *jobs.at(id));
  }
  return absl::OkStatus();
}

// Evicts blocks of the job until its next plan and its remaining blocks fit in the bytes that the job may take.
absl::Status NodeState::Impl::MoveOwnBlocks(const MemoryPlan& plan, const GrantPolicy& policy,
                                            Job& job) {
  const uint64_t wanted = plan.fixed_bytes + job.placement().granted_bytes();
  if (wanted <= policy.dram_bytes()) return absl::OkStatus();
  nvme::SlotMap left = swap;
  const std::vector<Eviction> evictions = job.PlanEvictions(wanted - policy.dram_bytes(), left);
  uint64_t made_bytes = 0;
  for (const Eviction& eviction : evictions) made_bytes += eviction.bytes;
  RETURN_IF_ERROR(policy.Check(
      wanted - made_bytes,
      absl::StrCat("with ", plan.session.world_size, " ranks job ", job.name(), " needs ", wanted,
                   ", of which ", made_bytes, " of states can move to swap")));
  Evict(evictions, job);
  return absl::OkStatus();
}

void NodeState::Impl::Evict(const std::vector<Eviction>& evictions, Job& job) {
  for (const Eviction& eviction : evictions) {
    for (const nvme::Slot& slot : eviction.slots) FOREBAY_CHECK(swap.Reserve(slot));
    job.residency().Evict(eviction);
  }
  going_on.push_back(job.id());
}

void NodeState::Impl::GiveFloatSums(Job& job) {
  if (job.plan().has_paged_sums()) {
    job.world().RefuseFloatSums(MakeError(
        ErrorId::kDramLimit,
        absl::StrCat("a second backward pass in one step of job ", job.name(),
                     ", whose gradients do not fit in DRAM, needs sums in float32; those of 16 "
                     "bits are on swap. The step was not applied"),
        "attach with accumulate, or reduce gradients in float32"));
    return;
  }
  const uint64_t bytes = job.plan().float_sums_bytes;
  const uint64_t free_bytes = FreeBytesFor(job);
  if (bytes <= free_bytes) {
    job.world().MakeFloatSums();
    return;
  }
  job.world().RefuseFloatSums(MakeError(
      ErrorId::kDramLimit,
      absl::StrCat("a second backward pass in one step of job ", job.name(),
                   " needs sums in float32, ", bytes, " bytes of DRAM; of the limit of ",
                   options.dram_limit_bytes, " bytes ", free_bytes,
                   " are free. The step was not applied"),
      absl::StrCat("attach with accumulate, which takes them at the start and leaves fewer states "
                   "in DRAM, raise --dram / dram.limit by ",
                   bytes - free_bytes, " bytes, or ",
                   job.parts().spec.layout->is_shared() ? "call step after each backward pass"
                                                        : "reduce gradients in float32")));
}

// Reports the missing bytes and the evicting jobs of an attach that must wait for DRAM.
void NodeState::Impl::ReportWait(const Job& job, uint64_t awaited_bytes) {
  const uint64_t needed_bytes = Bytes(&JobWorld::dram_bytes) + awaited_bytes;
  if (needed_bytes <= options.dram_limit_bytes) return;
  const auto name = [](const Job& of) {
    return JobNameFor(/*uid=*/0, {.uid = of.uid(), .name = of.name()});
  };
  RoomAwaited report{.job = name(job),
                     .missing_bytes = needed_bytes - options.dram_limit_bytes,
                     .evicting_jobs = {}};
  for (const auto& [id, other] : jobs) {
    const Placement& placement = other->placement();
    if (placement.state_bytes() > placement.granted_bytes()) {
      report.evicting_jobs.push_back(name(*other));
    }
  }
  actions.Emit(std::move(report));
}

// Begins waiting jobs and world changes for which enough DRAM is free. If granted DRAM does not become free, refuses the newest
// waiting jobs.
void NodeState::Impl::AdmitWaiting() {
  while (!waiting.empty() && Bytes(&JobWorld::granted_bytes) > options.dram_limit_bytes) {
    Job& job = *jobs.at(waiting.back());
    waiting.pop_back();
    job.life().Refuse(NoRoomError(job));
    job.Advance();
    Sweep(job);
  }
  for (auto next = jobs.begin(); next != jobs.end();) {
    Job& job = *(next++)->second;  // Sweep() may free the job
    const std::optional<uint64_t> awaited_bytes = job.world().awaited_bytes();
    if (!awaited_bytes) continue;
    if (Bytes(&JobWorld::granted_bytes) > options.dram_limit_bytes) {
      job.RefuseWorld(NoRoomError(job));
    } else if (Bytes(&JobWorld::dram_bytes) + *awaited_bytes <= options.dram_limit_bytes) {
      job.world().GiveRoom();
    } else {
      continue;
    }
    job.Advance();
    Sweep(job);
  }
  std::erase_if(waiting, [this](JobId id) {
    Job& job = *jobs.at(id);
    const uint64_t used_bytes = Bytes(&JobWorld::dram_bytes);
    if (used_bytes + job.world().granted_bytes() > options.dram_limit_bytes) return false;
    if (!job.life().is_ending()) job.life().Begin();
    return true;
  });
}

// Unmarks blocks that need not be evicted any more, because the waiting attach has ended or other memory has become free.
void NodeState::Impl::KeepBlocks() {
  for (const auto& [id, job] : jobs) {
    if (!job->residency().makes_room()) continue;
    const uint64_t granted_bytes = Bytes(&JobWorld::granted_bytes);
    job->residency().Keep(
        std::min(options.dram_limit_bytes - std::min(granted_bytes, options.dram_limit_bytes),
                 LeftFor(*job)));
  }
}

// Returns blocks to free DRAM, blocks of the oldest job first. One block is returned at a time, so that blocks that are being
// promoted take little DRAM from an attach.
void NodeState::Impl::ReturnBlocks() {
  if (stop != Stop::kNone) return;
  const auto has = [this](bool (Residency::*what)() const) {
    return std::ranges::any_of(
        jobs, [what](const auto& entry) { return (entry.second->residency().*what)(); });
  };
  if (!has(&Residency::returns) || has(&Residency::is_promoting)) return;
  const uint64_t for_readers = std::min(kReadersRoomBytes, options.dram_limit_bytes / 64);
  for (const auto& [id, job] : jobs) {
    const uint64_t free_bytes = FreeBytes();
    const uint64_t room = free_bytes - std::min(for_readers, free_bytes);
    if (!job->ReturnNext(std::min(room, LeftFor(*job)))) continue;
    going_on.push_back(id);
    return;
  }
}

// Resumes the return of blocks that an attach has stopped, once no attach waits. The attach may have been cancelled.
void NodeState::Impl::ResumeReturns() {
  const auto waits = [](const auto& entry) {
    return entry.second->world().awaited_bytes().has_value();
  };
  if (!has_cut_returns || !waiting.empty() || std::ranges::any_of(jobs, waits)) return;
  has_cut_returns = false;
  for (const auto& [id, job] : jobs) job->residency().BeginReturns();
  ReturnBlocks();
  for (const JobId id : std::exchange(going_on, {})) jobs.at(id)->Advance();
}

absl::Status NodeState::Impl::NoRoomError(const Job& waiting_job) const {
  std::string why = "another job's memory is still in use";
  for (const auto& [id, job] : jobs) {
    const absl::Status& error = job->residency().error();
    if (!error.ok())
      why = absl::StrCat("job ", job->name(),
                         " keeps its states in DRAM: ", std::string(error.message()));
  }
  return MakeError(
      ErrorId::kDramLimit,
      absl::StrCat("job ", waiting_job.name(), " needs ", waiting_job.world().granted_bytes(),
                   " bytes of DRAM that did not become free: ", why),
      "attach again later, raise dram.limit, or look at forebay swap");
}

void NodeState::Impl::Sweep(Job& job) {
  for (const SessionId session : job.sessions().DrainClosed()) session_jobs.erase(session);
  if (!job.life().is_freed()) return;
  std::vector<nvme::Slot> slots(job.world().swap_slots().begin(), job.world().swap_slots().end());
  std::shared_ptr<const DurableJob> of_ledger = job.life().unrestored();
  if (of_ledger != nullptr && job.life().is_resumed()) {
    GiveUpUpdate(*std::exchange(of_ledger, nullptr), std::move(slots), job.life().error());
  } else if (of_ledger != nullptr) {
    of_ledger->RemoveOwn(slots);
    ledger.Park(of_ledger);
    if (job.life().goes_back()) {
      ledger.Retire(std::move(slots), job.id());
    } else {
      swap.Free(slots);
    }
  } else if (job.life().is_in_ledger()) {
    ledger.Retire(std::move(slots));
  } else {
    swap.Free(slots);
  }
  std::vector<nvme::Slot> sum_slots(job.world().sum_slots().begin(), job.world().sum_slots().end());
  if (of_ledger != nullptr) of_ledger->RemoveOwn(sum_slots);
  swap.Free(sum_slots);
  const JobId id = job.id();
  const bool keeps_arenas = KeptOf(of_ledger.get()) != nullptr;
  freed_weights_bytes.emplace(
      id, job.life().has_begun() && !keeps_arenas ? job.plan().weights_bytes : 0);
  std::erase(waiting, id);
  names.erase({.uid = job.uid(), .name = job.name()});
  jobs.erase(id);
}

Job* NodeState::Impl::JobOf(SessionId session) {
  const auto it = session_jobs.find(session);
  return it == session_jobs.end() ? nullptr : jobs.at(it->second).get();
}

Job* NodeState::Impl::JobNamed(const JobName& name) const {
  const auto it = names.find(name);
  return it == names.end() ? nullptr : jobs.at(it->second).get();
}

absl::Status NodeState::Impl::CheckReaderFits(const AttachRequested& request,
                                              const Job& job) const {
  const uint64_t arena_bytes = ReaderArenaBytes(request.session_request.grad_arena_bytes);
  const uint64_t taken_bytes = options.dram_limit_bytes - FreeBytes();
  const uint64_t needed_bytes = taken_bytes + arena_bytes + job.plan().ring_bytes;
  const uint64_t job_bytes = job.world().granted_bytes() + arena_bytes + job.plan().ring_bytes;
  RETURN_IF_ERROR(GrantPolicy(options, UseOf(job.uid(), &job))
                      .Check(job_bytes, absl::StrCat("with this reader job ", job.name(), " needs ",
                                                     job_bytes)));
  if (needed_bytes <= options.dram_limit_bytes) return absl::OkStatus();
  return MakeError(
      ErrorId::kDramLimit,
      absl::StrCat("the reader needs an arena of ", arena_bytes, " bytes and a ring of ",
                   job.plan().ring_bytes, "; of the limit of ", options.dram_limit_bytes, " bytes ",
                   taken_bytes, " are taken"),
      absl::StrCat("raise --dram / dram.limit to at least ", needed_bytes,
                   " bytes, or ask for a smaller arena"));
}

NodeUse NodeState::Impl::Use(const DurableJob* returning) const {
  NodeUse use{.swap = &swap, .recovered = returning};
  for (const auto& [id, job] : jobs) {
    use.jobs_dram_bytes += job->world().granted_bytes();
    use.movable_bytes += job->movable_bytes();
  }
  use.jobs_dram_bytes += ledger.kept_bytes(returning);
  for (const auto& [id, bytes] : freed_weights_bytes) use.deleted_weights_bytes += bytes;
  return use;
}

OwnerUse NodeState::Impl::UseOf(uint32_t uid, const Job* other_than,
                                const DurableJob* returning) const {
  OwnerUse use{.uid = uid};
  for (const auto& [id, job] : jobs) {
    if (job->uid() != uid || job.get() == other_than) continue;
    use.dram_bytes += job->world().granted_bytes();
    use.swap_bytes += job->world().swap_bytes();
  }
  for (const auto& [name, job] : ledger.parked()) {
    if (job->uid != uid || job.get() == returning || !job->kept) continue;
    use.dram_bytes += job->kept->dram_bytes;
    use.swap_bytes += ViewOf(*job).swap_bytes;
  }
  return use;
}

uint64_t NodeState::Impl::LeftFor(const Job& job) const {
  const uint64_t granted_bytes = job.world().granted_bytes();
  const uint64_t may_take = GrantPolicy(options, UseOf(job.uid(), &job)).dram_bytes();
  return may_take - std::min(granted_bytes, may_take);
}

uint64_t NodeState::Impl::Bytes(uint64_t (JobWorld::*of_job)() const) const {
  uint64_t bytes = options.node_bytes + ledger.kept_bytes();
  for (const auto& [id, job] : jobs) bytes += (job->world().*of_job)();
  for (const auto& [id, weights_bytes] : freed_weights_bytes) bytes += weights_bytes;
  return bytes;
}

uint64_t NodeState::Impl::FreeBytes() const {
  const uint64_t taken_bytes =
      std::max(Bytes(&JobWorld::dram_bytes), Bytes(&JobWorld::granted_bytes));
  return options.dram_limit_bytes - std::min(taken_bytes, options.dram_limit_bytes);
}

}  // namespace forebay::daemon
