// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/recovery.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "daemon/exec/clock.h"
#include "protocol/error.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {

using pinned_mem::AtEnd;

Recovery::Recovery(LeftBefore left, const Parts& parts)
    : parts_(parts),
      store_(std::move(left.store)),
      records_(store_),
      ranks_(store_, parts.sessions, parts.jobs),
      left_staging_(std::move(left.staging)) {
  if (!left_staging_.empty()) store_.List(left_staging_);
  for (AdoptedJob& job : left.jobs) {
    const bool has_record = job.record.record != nullptr;
    const auto list = [&](const std::string& name, const ArenaRegistry::Arena& arena) {
      if (has_record && arena != nullptr) store_.List(name, arena);
    };
    list(WeightsDescriptor(job.id), job.memory.weights);
    list(StatesDescriptor(job.id), job.memory.state);
    list(StepDescriptor(job.id), job.memory.step);
    for (const auto& [rank, arena] : job.memory.gradients) {
      list(GradientsDescriptor(job.id, rank), arena);
      parts_.registry.Register({ArenaKind::kGrad, job.memory.name, static_cast<int32_t>(rank)},
                               arena);
    }
    for (auto& [rank, absent] : job.ranks) ranks_.Add(job.id, rank, std::move(absent));
    records_.Add(job.id, std::move(job.record));
    parts_.jobs.Add(job.id, std::move(job.memory));
  }
}

void Recovery::Own() {
  for (const auto& [id, job] : parts_.jobs.all()) SetAtEnd(id, AtEnd::kFreePages);
  records_.Own();
  if (SwapSpace* const swap = parts_.swap; swap != nullptr) {
    const absl::Status stored =
        store_.Put(StagingDescriptor(swap->staging_slot_bytes(), MonotonicNs()), swap->staging());
    if (!stored.ok()) spdlog::warn("{}", protocol::FormatError(stored));
  }
  store_.Drop(std::exchange(left_staging_, {}));
}

bool Recovery::HasUnfinished() const {
  const auto has_no_record = [this](const auto& of) { return records_.Find(of.first) == nullptr; };
  return records_.has_update() ||
         (store_.is_available() && std::ranges::any_of(parts_.jobs.all(), has_no_record));
}

void Recovery::Record(const RecordJob& action, uint64_t workers) {
  const JobId id = action.job->id;
  const JobMemory& memory = parts_.jobs.at(id);
  absl::Status status = store_.Put(WeightsDescriptor(id), memory.weights);
  if (status.ok()) status = store_.Put(StatesDescriptor(id), memory.state);
  if (status.ok()) status = store_.Put(StepDescriptor(id), memory.step);
  const uint64_t nonce = parts_.swap == nullptr ? 0 : parts_.swap->nonce();
  if (status.ok()) status = records_.Make(action, nonce, workers);
  if (status.ok()) return;
  spdlog::warn("job {} ends with the daemon where that is killed: {}", action.job->name,
               protocol::FormatError(status));
}

// Weights retain their bytes for readers in any case.
void Recovery::SetAtEnd(JobId id, AtEnd at_end) {
  const JobMemory& job = parts_.jobs.at(id);
  if (job.state != nullptr) job.state->SetAtEnd(at_end);
  if (job.step != nullptr) job.step->SetAtEnd(at_end);
  for (const auto& [rank, arena] : job.gradients) arena->SetAtEnd(at_end);
}

void Recovery::Leave(JobId job) {
  SetAtEnd(job, AtEnd::kKeepForReaders);
  const JobName& name = parts_.jobs.at(job).name;
  for (const SessionId id : parts_.sessions.WithMemory(name)) {
    const SessionIo& io = *parts_.sessions.all().at(id).io;
    io.grad()->SetAtEnd(AtEnd::kKeepForReaders);
    io.ring()->SetAtEnd(AtEnd::kKeepForReaders);  // the client reads the last answers from it
  }
  spdlog::info("job {}: its memory is kept at step {} for the next daemon", name.name,
               records_.Leave(job));
}

void Recovery::Drop(JobId job) {
  store_.Drop(WeightsDescriptor(job));
  store_.Drop(StatesDescriptor(job));
  store_.Drop(StepDescriptor(job));
  DropGradients(job);
  ranks_.Drop(job);
}

ArenaRegistry::Arena Recovery::GradientsFor(JobId job, const AttachRequested& request,
                                            uint64_t bytes) {
  if (request.reader || parts_.jobs.Find(job) == nullptr) return nullptr;
  auto node = parts_.jobs.at(job).gradients.extract(request.rank);
  if (node.empty()) return nullptr;
  ArenaRegistry::Arena arena = std::move(node.mapped());
  if (request.reattach && arena->capacity_bytes() == bytes) return arena;
  store_.Drop(GradientsDescriptor(job, request.rank), arena);
  parts_.runner.Retire(std::move(arena));
  return nullptr;
}

void Recovery::DropGradients(JobId job) {
  if (parts_.jobs.Find(job) == nullptr) return;
  for (auto& [rank, arena] : std::exchange(parts_.jobs.at(job).gradients, {})) {
    store_.Drop(GradientsDescriptor(job, rank), arena);
    parts_.runner.Retire(std::move(arena));
  }
}

bool Recovery::IsLeftBehind(const AttachRequested& request, const JobName& job) const {
  if (!request.reattach || request.grad_arena_inode == 0) return false;
  if (const std::optional<JobId> id = parts_.jobs.FindNamed(job)) {
    const auto& gradients = parts_.jobs.at(*id).gradients;
    const auto kept = gradients.find(request.rank);
    if (kept != gradients.end()) return kept->second->inode() != request.grad_arena_inode;
    if (ranks_.HasDetached(*id, request.rank)) return true;
  }
  for (const auto& [id, session] : parts_.sessions.all()) {
    if (!session.IsOf(job, request.rank) || session.io == nullptr) continue;
    return session.io->grad()->inode() != request.grad_arena_inode;
  }
  return false;
}

}  // namespace forebay::daemon
