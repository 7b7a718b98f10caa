// SPDX-License-Identifier: Apache-2.0
// Hands the jobs of this daemon over to the next, and adopts the retained jobs of the previous daemon.

#include <poll.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/exec/clock.h"
#include "daemon/exec/executor.h"
#include "daemon/exec/recovery/left_jobs.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {
// Time between two checks whether absent ranks have ended.
constexpr uint64_t kLookPeriodNs = 200'000'000;
}  // namespace

void Executor::StopJobs(FlushStore flush, absl::AnyInvocable<void(const absl::Status&)> done) {
  if (flush == nullptr && !state_.HasStepsToMakeDurable()) return done(absl::OkStatus());
  flush_ = std::move(flush);
  stopped_ = std::move(done);
  if (flush_ == nullptr) Raise(UpdatesResumed{});  // no other daemon continues the jobs from memory
  Raise(StopRequested{});
}

void Executor::StopDue() { Raise(::forebay::daemon::StopDue{}); }

void Executor::Adopt(std::vector<AdoptedArenas> all, const std::string& left_staging) {
  if (store_.keep) left_staging_ = left_staging;
  for (AdoptedArenas& job : all) {
    const bool has_record = job.record != nullptr && store_.keep;
    const bool is_in_step = job.record != nullptr && job.record->is_in_step();
    resumes_updates_ = resumes_updates_ || is_in_step || (job.record == nullptr && store_.keep);
    adopted_.push_back(job.state);
    adopted_.push_back(job.step);
    for (auto& [rank, arena] : job.gradients) {
      adopted_.push_back(arena);
      absent_[{job.id, rank}];  // the process of a rank of another node is unknown
      registry_.Register({ArenaKind::kGrad, job.name, static_cast<int32_t>(rank)}, arena);
      if (has_record) stored_[GradientsDescriptor(job.id, rank)] = arena;
      kept_gradients_.emplace(std::pair(job.id, rank), std::move(arena));
    }
    for (auto& [rank, absent] : job.ranks) absent_[{job.id, rank}] = std::move(absent);
    if (has_record) {
      stored_[WeightsDescriptor(job.id)] = job.weights;
      if (job.state != nullptr) stored_[StatesDescriptor(job.id)] = job.state;
      if (job.step != nullptr) stored_[StepDescriptor(job.id)] = job.step;
    }
    if (has_record || is_in_step) {
      records_[job.id] = {.record = std::move(job.record),
                          .name = has_record ? RecordDescriptor(job.id, job.record_number) : "",
                          .is_converted = has_record && job.is_record_converted};
      last_record_ = std::max(last_record_, job.record_number);
    }
    jobs_.Adopt(std::move(job));
  }
}

std::set<std::string> Executor::StoredNames() const {
  std::set<std::string> names;
  for (const auto& [name, arena] : stored_) names.insert(name);
  if (!left_staging_.empty()) names.insert(left_staging_);
  for (const auto& [job, record] : records_) {
    if (!record.name.empty()) names.insert(record.name);
  }
  if (!store_.keep) return names;
  for (const auto& [of, absent] : absent_) {
    if (!absent.process.valid()) continue;
    names.insert(ProcessDescriptor(of.first, of.second, absent.has_detached));
  }
  return names;
}

void Executor::OwnAdopted() {
  for (const ArenaRegistry::Arena& arena : std::exchange(adopted_, {})) {
    if (arena != nullptr) arena->SetAtEnd(pinned_mem::AtEnd::kFreePages);
  }
  for (auto& [id, record] : records_) {
    record.record->Own();
    if (!std::exchange(record.is_converted, false)) continue;
    const std::string before = std::exchange(record.name, RecordDescriptor(id, ++last_record_));
    const absl::Status stored = store_.keep(record.name, record.record->fd());
    if (!stored.ok()) {
      spdlog::warn("{}", protocol::FormatError(stored));
      record.name.clear();
    }
    store_.drop(before);
  }
  if (swap_ != nullptr) {
    const absl::Status stored =
        Store(StagingDescriptor(swap_->staging_slot_bytes(), MonotonicNs()), swap_->staging());
    if (!stored.ok()) spdlog::warn("{}", protocol::FormatError(stored));
  }
  if (!left_staging_.empty()) store_.drop(std::exchange(left_staging_, {}));
}

void Executor::ResumeUpdates() {
  if (std::exchange(resumes_updates_, false)) Raise(UpdatesResumed{});
}

void Executor::Run(JobWentBack& action) {
  spdlog::warn(
      "job {} goes back from step {} to step {}, which is durable: another of its nodes has no "
      "newer one",
      action.job, action.from_step, action.to_step);
}

void Executor::Run(UpdateNotResumed& action) {
  spdlog::error(
      "job {}: the update of step {}, in which the daemon before was killed, cannot go on: {}",
      action.job, action.step, protocol::FormatError(action.reason));
}

// ------------------------------------------------------------- what is found where the daemon is killed

absl::Status Executor::Store(const std::string& name, const ArenaRegistry::Arena& arena) {
  if (arena == nullptr || !store_.keep) return absl::OkStatus();
  std::weak_ptr<pinned_mem::PinnedArena>& stored = stored_[name];
  if (stored.lock() == arena) return absl::OkStatus();
  ASSIGN_OR_RETURN(const protocol::UniqueFd fd, arena->DuplicateFd());
  RETURN_IF_ERROR(store_.keep(name, fd.get()));
  stored = arena;
  return absl::OkStatus();
}

void Executor::DropStored(const std::string& name) {
  if (stored_.erase(name) > 0) store_.drop(name);
}

void Executor::DropStored(const std::string& name, const ArenaRegistry::Arena& arena) {
  const auto found = stored_.find(name);
  if (found != stored_.end() && found->second.lock() == arena) DropStored(name);
}

absl::Status Executor::StoreArenas(JobId id) {
  const JobMemory& memory = jobs_.at(id);
  RETURN_IF_ERROR(Store(WeightsDescriptor(id), memory.weights));
  RETURN_IF_ERROR(Store(StatesDescriptor(id), memory.state));
  return Store(StepDescriptor(id), memory.step);
}

void Executor::EndRecord(JobId job) {
  const auto record = records_.extract(job);
  if (record.empty()) return;
  record.mapped().record->Drop();  // an update may still use the record
  if (!record.mapped().name.empty()) store_.drop(record.mapped().name);
}

void Executor::Run(RecordJob& action) {
  const DurableJob& job = *action.job;
  const uint64_t nonce = swap_ == nullptr ? 0 : swap_->nonce();
  absl::Status status = StoreArenas(job.id);
  if (status.ok()) {
    absl::StatusOr<std::unique_ptr<KeptRecord>> made =
        KeptRecord::Make(action, nonce, options_.state.workers);
    status = made.status();
    const std::string name = RecordDescriptor(job.id, ++last_record_);
    if (status.ok()) status = store_.keep(name, (*made)->fd());
    if (status.ok() || !action.has_record) EndRecord(job.id);
    if (status.ok()) records_[job.id] = {.record = *std::move(made), .name = name};
  }
  if (status.ok()) return;
  spdlog::warn("job {} ends with the daemon where that is killed: {}", job.name,
               protocol::FormatError(status));
}

ArenaRegistry::Arena Executor::KeptGradientsFor(JobId job, const AttachRequested& request,
                                                uint64_t bytes) {
  if (request.reader) return nullptr;
  auto node = kept_gradients_.extract({job, request.rank});
  if (node.empty()) return nullptr;
  ArenaRegistry::Arena arena = std::move(node.mapped());
  if (request.reattach && arena->capacity_bytes() == bytes) return arena;
  DropStored(GradientsDescriptor(job, request.rank), arena);
  Retire(std::move(arena));
  return nullptr;
}

void Executor::KeepGradientsFurther(const Session& session, ArenaRegistry::Arena arena) {
  if (session.kept_of == 0) return;
  kept_gradients_.emplace(std::pair(session.kept_of, session.request.rank), std::move(arena));
}

void Executor::DropKeptGradients(JobId job) {
  for (auto next = kept_gradients_.lower_bound({job, 0});
       next != kept_gradients_.end() && next->first.first == job;) {
    DropStored(GradientsDescriptor(job, next->first.second), next->second);
    Retire(std::move(next->second));
    next = kept_gradients_.erase(next);
  }
}

// --------------------------------------------------------------- ranks that end while no daemon runs

void Executor::KeepProcess(const Session& session, bool has_detached) {
  if (!store_.keep || !session.process.valid()) return;
  const std::string name = ProcessDescriptor(session.job_id, session.request.rank, has_detached);
  const absl::Status stored = store_.keep(name, session.process.get());
  if (!stored.ok()) spdlog::warn("{}", protocol::FormatError(stored));
}

bool Executor::IsLeftBehind(const Session& session) const {
  const AttachRequested& request = session.request;
  if (!request.reattach || request.grad_arena_inode == 0) return false;
  const auto is_its = [&](const std::pair<JobId, uint32_t>& of) {
    return of.second == request.rank && jobs_.Find(of.first)->name == session.job;
  };
  for (const auto& [of, arena] : kept_gradients_) {
    if (is_its(of)) return arena->inode() != request.grad_arena_inode;
  }
  for (const auto& [of, absent] : absent_) {
    if (is_its(of) && absent.has_detached) return true;
  }
  for (const auto& [id, other] : sessions_) {
    if (!other.IsOf(session.job, request.rank) || other.io == nullptr) continue;
    return other.io->grad()->inode() != request.grad_arena_inode;
  }
  return false;
}

void Executor::OnRankAttached(SessionId id, Session& session) {
  const JobId job = session.job_id;
  // A rank that attaches from scratch waits for all ranks, including those that were lost before.
  DropAbsent(job, session.request.reattach ? std::optional(session.request.rank) : std::nullopt);
  KeepProcess(session, /*has_detached=*/false);
  AttachRequested& request = session.request;
  const std::vector<std::string> exchanged = std::exchange(request.exchanged, {});
  if (!request.reattach) return exchange_.ForgetMade(job);
  if (request.exchanges == 0 || exchanged.empty()) return;
  exchange_.SetMade({.session = id,
                     .number = request.exchanges - 1,
                     .job = job,
                     .rank = request.rank,
                     .world_size = request.session_request.world_size},
                    exchanged);
}

void Executor::OnRankLeft(Session& session, bool is_of_old_generation) {
  if (!store_.keep || !session.process.valid()) return;
  const std::pair of(session.job_id, session.request.rank);
  const auto may_come_back = [&](const auto& other) {
    return other.first.first == of.first && !other.second.has_detached;
  };
  const bool is_last =
      session.has_detached && !HasRanks(of.first) && std::ranges::none_of(absent_, may_come_back);
  if (is_last) DropAbsent(of.first);  // no rank waits for the absent ranks any more
  if (session.has_detached || is_of_old_generation) {
    store_.drop(ProcessDescriptor(of.first, of.second, /*has_detached=*/false));
  }
  if (is_last || is_of_old_generation) return;
  if (session.has_detached) KeepProcess(session, /*has_detached=*/true);
  absent_[of] = {.process = std::move(session.process),
                 .has_detached = session.has_detached,
                 .is_of_before = false};
}

void Executor::DropAbsent(JobId job, std::optional<uint32_t> rank) {
  std::erase_if(absent_, [&](const auto& entry) {
    const auto& [of, absent] = entry;
    const bool is_meant = of.first == job && of.second == rank.value_or(of.second);
    if (is_meant && store_.keep && absent.process.valid()) {
      store_.drop(ProcessDescriptor(of.first, of.second, absent.has_detached));
    }
    return is_meant;
  });
}

uint64_t Executor::RankWaitNs(JobId job) const {
  std::chrono::nanoseconds longest{0};
  for (const auto& [id, session] : sessions_) {
    if (session.job_id == job && !session.request.reader) longest = std::max(longest, session.wait);
  }
  return static_cast<uint64_t>(longest.count());
}

bool Executor::HasRanks(JobId job) const {
  return std::ranges::any_of(sessions_, [job](const auto& entry) {
    return entry.second.job_id == job && !entry.second.request.reader;
  });
}

bool Executor::HasSession(JobId job, uint32_t rank) const {
  const JobName& name = jobs_.Find(job)->name;
  return std::ranges::any_of(sessions_,
                             [&](const auto& entry) { return entry.second.IsOf(name, rank); });
}

uint64_t Executor::LookForAbsent() {
  if (absent_.empty()) return UINT64_MAX;
  const uint64_t now = MonotonicNs();
  if (now < next_look_ns_) return next_look_ns_;
  next_look_ns_ = now + kLookPeriodNs;
  std::vector<RankEnded> ended;
  bool looks_again = false;
  for (auto& [of, absent] : absent_) {
    const auto& [job, rank] = of;
    const uint64_t wait_ns = absent.process.valid() ? 0 : RankWaitNs(job);
    if (wait_ns == 0) absent.ends_ns = 0;
    // Skips ranks whose session was with this daemon: the state machine knows of their end.
    if (!absent.is_of_before || !HasRanks(job) || HasSession(job, rank)) continue;
    looks_again = true;
    pollfd entry{.fd = absent.process.get(), .events = POLLIN, .revents = 0};
    bool is_over = absent.has_detached || ::poll(&entry, 1, /*timeout=*/0) > 0;
    if (wait_ns > 0 && absent.ends_ns == 0) absent.ends_ns = now + wait_ns;
    is_over = is_over || (wait_ns > 0 && now >= absent.ends_ns);
    if (is_over) {
      ended.push_back({.job = job, .rank = rank, .has_detached = absent.has_detached});
    }
  }
  for (const RankEnded& one : ended) Raise(one);
  return looks_again ? next_look_ns_ : UINT64_MAX;
}

// At most one session of a rank has memory. A session that is being reconnected may not be marked as mapped yet, but has mapped
// its gradients in an earlier daemon.
std::vector<SessionId> Executor::RanksOf(JobId job) const {
  std::vector<SessionId> ranks;
  const JobName& name = jobs_.Find(job)->name;
  for (const auto& [id, session] : sessions_) {
    const bool has_memory = session.io != nullptr && session.io->grad() != nullptr;
    if (has_memory && !session.request.reader && session.job == name) ranks.push_back(id);
  }
  return ranks;
}

void Executor::Leave(JobId job) {
  const auto keep = [](const ArenaRegistry::Arena& arena) {
    if (arena != nullptr) arena->SetAtEnd(pinned_mem::AtEnd::kKeepForReaders);
  };
  const JobMemory& memory = jobs_.at(job);
  keep(memory.weights);
  keep(memory.state);
  keep(memory.step);
  for (const auto& [of, arena] : kept_gradients_) {
    if (of.first == job) keep(arena);
  }
  for (const SessionId id : RanksOf(job)) {
    keep(sessions_.at(id).io->grad());
    keep(sessions_.at(id).io->ring());  // the client reads the last answers from it
  }
  KeptRecord& record = *records_.at(job).record;
  record.Leave();
  spdlog::info("job {}: its memory is kept at step {} for the next daemon", memory.name.name,
               record.step());
}

// Clients are notified once all descriptors are stored: before that they would wait in vain.
void Executor::Run(JobsStopped& action) {
  if (flush_ == nullptr) return stopped_(absl::OkStatus());
  std::set<JobId> recorded;  // jobs that the next daemon finds
  for (const auto& [id, record] : records_) {
    if (!record.name.empty()) recorded.insert(id);
  }
  std::erase_if(action.jobs, [&](JobId job) { return recorded.erase(job) == 0; });
  for (const JobId job : action.jobs) Leave(job);
  absl::Status status = flush_();
  if (status.ok()) {
    for (const SessionId session : action.sessions) {
      poller_.Remove(session);
      session_io(session).channel().Close(protocol::ChannelState::kRestarting);
    }
    for (const JobId job : action.jobs) {
      for (const SessionId id : RanksOf(job)) sessions_.at(id).is_stopped = true;
    }
  }
  if (status.ok() && !recorded.empty()) {
    status = protocol::MakeError(
        protocol::ErrorId::kTimeout,
        absl::StrCat(recorded.size(), " jobs did not come to rest between two steps in time"));
  }
  stopped_(status);
}

}  // namespace forebay::daemon
