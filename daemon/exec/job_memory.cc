// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/job_memory.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/exec/clock.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/units.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

constexpr uint64_t kMakingLogNs = 5'000'000'000;
constexpr uint64_t kWeightsRetryMinNs = 2'000'000;
constexpr uint64_t kWeightsRetryMaxNs = 500'000'000;

std::string SuffixOf(const JobName& job) { return job.name.substr(0, 100); }

// True if the job has a step arena with the capacity and the populated bytes of `wanted`. Its contents do not matter: sums are
// written before they are read.
bool HasStepArena(const JobMemory& job, const pinned_mem::ArenaOptions& wanted) {
  if (job.step == nullptr || job.step->capacity_bytes() != wanted.capacity_bytes) return false;
  uint64_t bytes = 0;
  for (const pinned_mem::ArenaPart& part : *wanted.parts) bytes += part.size_bytes;
  return job.step->populated_bytes() == bytes;
}

}  // namespace

pinned_mem::ArenaOptions WeightsOptions(const ArenaPolicy& policy, const JobName& job,
                                        uint64_t bytes) {
  pinned_mem::ArenaOptions weights = policy.Shared("forebay-weights-" + SuffixOf(job), bytes);
  weights.access = pinned_mem::Access::kServed;
  weights.at_end = pinned_mem::AtEnd::kKeepForReaders;
  return weights;
}

pinned_mem::ArenaOptions StateOptions(const ArenaPolicy& policy, const JobName& job, uint64_t bytes,
                                      uint64_t block_bytes,
                                      const std::vector<StatePart>& resident) {
  pinned_mem::ArenaOptions state =
      policy.ByStripe("forebay-state-" + SuffixOf(job), bytes, std::max<uint64_t>(block_bytes, 1));
  state.parts.emplace();
  for (const StatePart& part : resident) {
    state.parts->push_back({.offset_bytes = part.offset_bytes, .size_bytes = part.bytes});
  }
  return state;
}

pinned_mem::ArenaOptions StepOptions(const ArenaPolicy& policy, const JobName& job, uint64_t bytes,
                                     const StatePart& float_sums, uint64_t capacity_bytes) {
  pinned_mem::ArenaOptions step = policy.Shared("forebay-step-" + SuffixOf(job), capacity_bytes);
  step.parts.emplace();
  if (bytes > 0) step.parts->push_back({.size_bytes = bytes});
  if (float_sums.bytes > 0) {
    step.parts->push_back(
        {.offset_bytes = float_sums.offset_bytes, .size_bytes = float_sums.bytes});
  }
  return step;
}

JobMemoryTable::JobMemoryTable(const ArenaPolicy& policy, ArenaRegistry& registry,
                               TaskRunner& runner, Raise raise)
    : policy_(policy), registry_(registry), runner_(runner), raise_(std::move(raise)) {}

const JobMemory* JobMemoryTable::Find(JobId id) const {
  const auto found = jobs_.find(id);
  return found == jobs_.end() ? nullptr : &found->second;
}

JobMemory& JobMemoryTable::at(JobId id) {
  const auto found = jobs_.find(id);
  FOREBAY_CHECK(found != jobs_.end());
  return found->second;
}

std::optional<JobId> JobMemoryTable::FindNamed(const JobName& name) const {
  const auto found =
      std::ranges::find_if(jobs_, [&](const auto& job) { return job.second.name == name; });
  if (found == jobs_.end()) return std::nullopt;
  return found->first;
}

bool JobMemoryTable::Create(const CreateJobMemory& action, JobName name,
                            std::shared_ptr<const protocol::Layout> layout) {
  JobMemory& job = jobs_[action.job];
  job.name = std::move(name);
  job.layout = std::move(layout);
  job.is_making = true;
  job.making_bytes = action.step_bytes + (action.is_kept ? 0 : action.weights_bytes);
  job.next_log_ns = MonotonicNs() + kMakingLogNs;
  // Weights, states, step. Without options the arena exists already.
  std::array<std::optional<pinned_mem::ArenaOptions>, 3> to_make;
  if (!action.is_kept) {
    to_make[0] = WeightsOptions(policy_, job.name, action.weights_bytes);
    to_make[1] =
        StateOptions(policy_, job.name, action.state_bytes, action.block_bytes, action.resident);
    for (const StatePart& part : action.resident) job.making_bytes += part.bytes;
  }
  const pinned_mem::ArenaOptions step =
      StepOptions(policy_, job.name, action.step_bytes, action.float_sums,
                  std::max(action.step_bytes, action.step_capacity_bytes));
  ArenaRegistry::Arena old_step;
  const bool has_step = HasStepArena(job, step);
  if (!has_step && action.keeps_step) {
    job.is_making = false;
    raise_(TaskDone{
        .task = action.task,
        .status = protocol::MakeError(
            protocol::ErrorId::kConfig,
            absl::StrCat("job ", job.name.name,
                         ": its step arena, with the gradients of the step "
                         "that was updated, has another size than the daemon before has left"),
            "start the daemon with the configuration that it had before")});
    return false;
  }
  if (!has_step) {
    to_make[2] = step;
    old_step = std::exchange(job.step, nullptr);
  }
  runner_.Post(PoolId::kSetup,
               [this, action, made_bytes = job.made_bytes, all = std::move(to_make),
                old_step = std::move(old_step)]() mutable -> TaskRunner::Then {
                 old_step = nullptr;  // freed first: memory may not hold both arenas
                 std::array<ArenaRegistry::Arena, 3> arenas;
                 absl::Status status;
                 for (size_t i = 0; i < all.size() && status.ok(); ++i) {
                   if (!all[i] || all[i]->capacity_bytes == 0) continue;
                   all[i]->populated_bytes = made_bytes;
                   auto arena = pinned_mem::PinnedArena::Create(*all[i]);
                   status = arena.status();
                   if (status.ok()) arenas[i] = *std::move(arena);
                 }
                 return [this, action, status, arenas = std::move(arenas)]() mutable {
                   JobMemory& made = at(action.job);
                   made.is_making = false;
                   auto& [weights, state, of_step] = arenas;
                   if (status.ok()) {
                     SetArenas(made, std::move(weights), std::move(state), std::move(of_step));
                   }
                   raise_(TaskDone{.task = action.task, .status = status});
                 };
               });
  return has_step;
}

void JobMemoryTable::SetArenas(JobMemory& job, ArenaRegistry::Arena weights,
                               ArenaRegistry::Arena state, ArenaRegistry::Arena step) {
  const auto set = [&](ArenaKind kind, ArenaRegistry::Arena made, ArenaRegistry::Arena& to) {
    if (made == nullptr) return;
    registry_.Register({.kind = kind, .job = job.name}, made);
    to = std::move(made);
  };
  set(ArenaKind::kWeights, std::move(weights), job.weights);
  set(ArenaKind::kState, std::move(state), job.state);
  set(ArenaKind::kStep, std::move(step), job.step);
}

void JobMemoryTable::Add(JobId id, JobMemory memory) {
  JobMemory& job = jobs_[id] = std::move(memory);
  SetArenas(job, job.weights, job.state, job.step);
}

void JobMemoryTable::Replace(const ReplaceStepArena& action) {
  JobMemory& job = at(action.job);
  const pinned_mem::ArenaOptions options =
      StepOptions(policy_, job.name, action.step_bytes, /*float_sums=*/{},
                  std::max(action.step_bytes, action.step_capacity_bytes));
  runner_.Post(PoolId::kSetup,
               [this, action, options, old = std::exchange(job.step, nullptr),
                saved = std::exchange(job.extra_state, {})]() mutable -> TaskRunner::Then {
                 if (old != nullptr) {
                   for (const BytesCopy& copy : action.extra_state) {
                     const auto bytes = old->bytes().subspan(copy.from_bytes, copy.size_bytes);
                     saved.emplace_back(bytes.begin(), bytes.end());
                   }
                   old = nullptr;  // freed first: memory may not hold both arenas
                 }
                 ArenaRegistry::Arena arena;
                 auto made = pinned_mem::PinnedArena::Create(options);
                 const absl::Status status = made.status();
                 if (status.ok()) {
                   arena = *std::move(made);
                   for (size_t rank = 0; rank < action.extra_state.size(); ++rank) {
                     const BytesCopy& copy = action.extra_state[rank];
                     if (copy.size_bytes == 0) continue;
                     FOREBAY_CHECK(saved.at(rank).size() == copy.size_bytes);
                     std::ranges::copy(saved[rank], arena->bytes().subspan(copy.to_bytes).begin());
                   }
                   saved.clear();
                 }
                 return [this, action, status, arena = std::move(arena),
                         saved = std::move(saved)]() mutable {
                   JobMemory& replaced = at(action.job);
                   SetArenas(replaced, nullptr, nullptr, std::move(arena));
                   replaced.extra_state = std::move(saved);
                   raise_(TaskDone{.task = action.task, .status = status});
                 };
               });
}

void JobMemoryTable::Populate(const PopulateStepArena& action) {
  const JobMemory& job = at(action.job);
  spdlog::info("job {}: {} for gradient sums in float32, since a step has several backward passes",
               job.name.name, protocol::FormatBytes(action.bytes));
  runner_.Post(PoolId::kSetup, [this, action, arena = job.step]() -> TaskRunner::Then {
    const absl::Status status =
        arena->Populate({.offset_bytes = action.offset_bytes, .size_bytes = action.bytes});
    return [this, task = action.task, status] { raise_(TaskDone{.task = task, .status = status}); };
  });
}

void JobMemoryTable::Free(const FreeJob& action) {
  const JobId id = action.job;
  if (action.keeps_arenas) {
    JobMemory& job = at(id);
    runner_.Post(PoolId::kSetup,
                 [this, id, step = std::exchange(job.step, nullptr)]() mutable -> TaskRunner::Then {
                   step = nullptr;
                   return [this, id] { raise_(JobFreed{.job = id}); };
                 });
    return;
  }
  auto node = jobs_.extract(id);
  JobMemory rest = node.empty() ? JobMemory{} : std::move(node.mapped());
  DeletedWeights& weights = deleted_weights_[id];
  weights.arena = std::move(rest.weights);
  registry_.ChangeKind(weights.arena, ArenaKind::kDeletedWeights);
  TryFreeWeights(id, std::move(rest));
}

void JobMemoryTable::TryFreeWeights(JobId id, JobMemory rest) {
  DeletedWeights& weights = deleted_weights_.at(id);
  weights.trying = true;
  runner_.Post(PoolId::kSetup,
               [this, id, arena = std::move(weights.arena),
                rest = std::move(rest)]() mutable -> TaskRunner::Then {
                 { const JobMemory dead = std::move(rest); }
                 if (arena != nullptr && arena->FreeIfUnused()) arena = nullptr;
                 return [this, id, arena = std::move(arena)]() mutable {
                   const bool freed = arena == nullptr;
                   DeletedWeights& tried = deleted_weights_.at(id);
                   tried.trying = false;
                   tried.arena = std::move(arena);
                   tried.wait_ns =
                       std::clamp(2 * tried.wait_ns, kWeightsRetryMinNs, kWeightsRetryMaxNs);
                   tried.next_try_ns = MonotonicNs() + tried.wait_ns;
                   if (freed) deleted_weights_.erase(id);
                   raise_(JobFreed{.job = id, .weights_in_use = !freed});
                 };
               });
}

uint64_t JobMemoryTable::RunTimers() {
  const uint64_t now_ns = MonotonicNs();
  uint64_t next_ns = UINT64_MAX;
  for (auto& [id, weights] : deleted_weights_) {
    if (weights.trying) continue;
    if (weights.next_try_ns <= now_ns) {
      TryFreeWeights(id, {});
    } else {
      next_ns = std::min(next_ns, weights.next_try_ns);
    }
  }
  for (auto& [id, job] : jobs_) {
    if (!job.is_making) continue;
    if (job.next_log_ns <= now_ns) {
      spdlog::info("job {}: {} of {} of its memory are made", job.name.name,
                   protocol::FormatBytes(*job.made_bytes), protocol::FormatBytes(job.making_bytes));
      job.next_log_ns = now_ns + kMakingLogNs;
    }
    next_ns = std::min(next_ns, job.next_log_ns);
  }
  return next_ns;
}

}  // namespace forebay::daemon
