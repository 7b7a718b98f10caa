// SPDX-License-Identifier: Apache-2.0
// Planned stop of a node, and updates of the previous daemon that this daemon resumes.

#include <memory>
#include <utility>
#include <vector>

#include "daemon/core/base/job_name.h"
#include "daemon/core/node/node_impl.h"

namespace forebay::daemon {

Job* NodeState::Impl::On(const StopRequested&) {
  if (stop != Stop::kNone) return nullptr;
  stop = Stop::kWaiting;
  for (const auto& [id, job] : jobs) {
    job->stop().Request();
    going_on.push_back(id);
  }
  return nullptr;
}

Job* NodeState::Impl::On(const StopDue&) {
  waits_for_jobs = false;
  return nullptr;
}

void NodeState::Impl::TryStop() {
  if (stop != Stop::kWaiting || ledger.WantsFirst(jobs)) return;
  JobsStopped stopped;
  for (const auto& [id, job] : jobs) {
    if (waits_for_jobs && job->stop().MayStop() && !job->stop().has_stopped()) return;
    if (!job->stop().has_stopped()) continue;
    const std::vector<SessionId> sessions = job->stop().StoppedSessions();
    stopped.sessions.insert(stopped.sessions.end(), sessions.begin(), sessions.end());
    if (options.keeps_jobs) stopped.jobs.push_back(id);
  }
  for (const auto& [name, job] : ledger.parked()) {
    if (job->kept && job->kept->update == nullptr) stopped.jobs.push_back(job->id);
  }
  stop = Stop::kDone;
  actions.Emit(std::move(stopped));
}

// Continues the updates of recovered jobs before a rank has attached. Ranks that attach meanwhile wait until the step is
// published. Jobs with durable steps and jobs without a record are created too, because this daemon may end before a rank
// returns.
Job* NodeState::Impl::On(const UpdatesResumed&) {
  const NodeLedger::Parked parked = ledger.parked();
  for (const auto& [name, job] : parked) {
    if (!job->kept) continue;
    const bool is_in_update = job->kept->update != nullptr;
    const bool is_in_memory = job->durability.level == protocol::DurabilityLevel::kMemory;
    if (!is_in_update && is_in_memory && job->kept->has_record) continue;
    const AttachRequested request{.uid = job->uid,
                                  .job = JobNameFor(/*uid=*/0, name),
                                  .session_request = {.world_size = job->world_size},
                                  .durability = job->durability,
                                  .run = job->run,
                                  .reattach = true,
                                  .layout = job->layout};
    const absl::Status status = MakeJob(request, name).status();
    // A job without an update stays parked: the attach of its ranks gets the same error.
    if (status.ok() || !is_in_update) continue;
    ledger.Unpark(name);
    freed_weights_bytes.emplace(job->id, job->kept->weights_bytes);
    actions.Emit(FreeJob{.job = job->id});
    GiveUpUpdate(*job, job->AllSlots(), status);
  }
  return nullptr;
}

// Gives up the update of a job, so that the job continues from its durable step or is lost. `slots`: all slots of the job.
void NodeState::Impl::GiveUpUpdate(const DurableJob& job, std::vector<nvme::Slot> slots,
                                   const absl::Status& reason) {
  const JobName name{.uid = job.uid, .name = job.name};
  actions.Emit(
      UpdateNotResumed{.job = JobNameFor(/*uid=*/0, name), .step = job.step, .reason = reason});
  if (const auto& durable = job.kept->durable) {
    durable->RemoveOwn(slots);
    ledger.Park(durable);
  }
  swap.Free(slots);
}

Job* NodeState::Impl::On(const RankEnded& event) {
  const auto found = jobs.find(event.job);
  if (found == jobs.end()) return nullptr;
  found->second->sessions().OnRankEnded(event);
  return found->second.get();
}

}  // namespace forebay::daemon
