// SPDX-License-Identifier: Apache-2.0
// Hand-over of a node: all jobs become quiescent, so that the next daemon can continue them.

#include <memory>
#include <utility>
#include <vector>

#include "daemon/core/base/job_name.h"
#include "daemon/core/node/node_impl.h"

namespace forebay::daemon {

Job* NodeState::Impl::On(const HandOverRequested&) {
  if (hand_over != HandOver::kNone) return nullptr;
  hand_over = HandOver::kWaiting;
  for (const auto& [id, job] : jobs) {
    job->RequestHandOver();
    going_on.push_back(id);
  }
  return nullptr;
}

Job* NodeState::Impl::On(const HandOverDue&) {
  waits_for_jobs = false;
  return nullptr;
}

// Makes one more ledger once the last job is quiescent, so that the next daemon finds the volume in its final state, even if no
// job is durable. No ledger is made if the node has no job to hand over.
void NodeState::Impl::TryHandOver() {
  if (hand_over == HandOver::kWaiting) {
    for (const auto& [id, job] : jobs) {
      if (waits_for_jobs && job->MayHandOver() && job->handed_over() == nullptr) return;
    }
    hand_over = HandOver::kCommitting;
    const bool has_swap = options.swap.capacity_bytes() > 0 && !options.loses_swap;
    if (has_swap && !NodeHandedOver()->jobs.empty()) ledger.WantLast();
  }
  if (hand_over != HandOver::kCommitting || ledger.is_last_awaited()) return;
  hand_over = HandOver::kDone;
  HandedOver result{.node = NodeHandedOver()};
  for (const auto& [id, job] : jobs) {
    if (job->handed_over() == nullptr) continue;
    const std::vector<HandedOver::Session> sessions = job->SessionsHandedOver();
    result.sessions.insert(result.sessions.end(), sessions.begin(), sessions.end());
  }
  actions.Emit(std::move(result));
}

// Continues the updates of recovered jobs before a rank has attached. Ranks that attach meanwhile wait until the step is
// published. Jobs with durable steps are created too, because this daemon may end before a rank returns.
Job* NodeState::Impl::On(const UpdatesResumed&) {
  const NodeLedger::Parked parked = ledger.parked();
  for (const auto& [name, job] : parked) {
    if (!job->kept) continue;
    const bool is_in_update = job->kept->update != nullptr;
    if (!is_in_update && job->durability.level == protocol::DurabilityLevel::kMemory) continue;
    const AttachRequested request{.uid = job->uid,
                                  .job = JobNameFor(/*uid=*/0, name),
                                  .world_size = job->world_size,
                                  .run = job->run,
                                  .reattach = true,
                                  .durability = job->durability,
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
  found->second->OnRankEnded(event);
  return found->second.get();
}

std::shared_ptr<const DurableNode> NodeState::Impl::NodeHandedOver() const {
  auto node = std::make_shared<DurableNode>();
  node->last_job = last_job;
  node->last_lease = actions.last_lease();
  for (const auto& [name, job] : ledger.parked()) {
    if (job->kept && job->kept->update == nullptr) node->jobs.push_back(job);
  }
  for (const auto& [id, job] : jobs) {
    if (job->handed_over() != nullptr) node->jobs.push_back(job->handed_over());
  }
  return node;
}

}  // namespace forebay::daemon
