// All jobs of the node come to rest, for the next daemon to go on with them.

#include <memory>
#include <utility>
#include <vector>

#include "daemon/core/node_impl.h"

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

// After the last job has come to rest one more ledger is made, so that the volume is found again as it is left, also
// where it holds no durable job. Without a job to hand over nothing more is written.
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

std::shared_ptr<const DurableNode> NodeState::Impl::NodeHandedOver() const {
  auto node = std::make_shared<DurableNode>();
  node->last_job = last_job;
  node->last_lease = actions.last_lease();
  for (const auto& [name, job] : ledger.parked()) {
    if (job->kept) node->jobs.push_back(job);
  }
  for (const auto& [id, job] : jobs) {
    if (job->handed_over() != nullptr) node->jobs.push_back(job->handed_over());
  }
  return node;
}

}  // namespace forebay::daemon
