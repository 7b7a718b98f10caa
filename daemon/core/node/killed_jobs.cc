// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/node/killed_jobs.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

std::shared_ptr<const DurableJob> FindNamed(const DurableNode& node, const DurableJob& job) {
  for (const auto& other : node.jobs) {
    if (other->uid == job.uid && other->name == job.name) return other;
  }
  return nullptr;
}

absl::Status ReserveKilled(DurableJob& job, NodeOptions& node) {
  const std::shared_ptr<const DurableJob> on_disk = FindNamed(node.recovered, job);
  if (job.durability.level != protocol::DurabilityLevel::kMemory) job.kept->durable = on_disk;
  std::vector<nvme::Slot> slots = job.Slots();
  if (job.kept->update != nullptr) {
    slots.insert(slots.end(), job.kept->sum_slots.begin(), job.kept->sum_slots.end());
  }
  if (on_disk != nullptr) on_disk->RemoveOwn(slots);  // the volume has reserved these
  nvme::SlotMap left = node.swap;
  for (const nvme::Slot& slot : slots) {
    if (left.Reserve(slot)) continue;
    return protocol::MakeError(protocol::ErrorId::kCorrupt, "its swap slots are in use");
  }
  node.swap = std::move(left);
  return absl::OkStatus();
}

void ReserveBefore(NodeOptions& node) {
  for (const auto& job : node.recovered.jobs) {
    const std::vector<nvme::Slot> named = job->NamedSlots();
    const std::set<nvme::Slot> kept(named.begin(), named.end());
    for (const nvme::Slot& slot : job->Slots()) {
      if (!kept.contains(slot)) FOREBAY_CHECK(node.swap.Reserve(slot));
    }
  }
}

namespace {

void ReserveSpare(DurableJob& job, nvme::SlotMap& swap) {
  const auto is_taken = [&swap](const nvme::Slot& slot) { return !swap.Reserve(slot); };
  std::erase_if(job.kept->spare_slots, is_taken);
  if (job.kept->update != nullptr) return;  // a running update has its slots of sums already
  std::vector<nvme::Slot>& sums = job.kept->sum_slots;
  const size_t count = sums.size();
  std::erase_if(sums, is_taken);
  if (sums.size() == count) return;
  swap.Free(sums);  // the job gets new slots for sums later
  sums.clear();
}

}  // namespace

void AddKilled(std::vector<DurableJob> jobs, NodeOptions& node) {
  for (DurableJob& job : jobs) {
    ReserveSpare(job, node.swap);
    if (const auto named = FindNamed(node.recovered, job)) std::erase(node.recovered.jobs, named);
    node.recovered.last_job = std::max(node.recovered.last_job, job.id);
    node.recovered.jobs.push_back(std::make_shared<const DurableJob>(std::move(job)));
  }
}

}  // namespace forebay::daemon
