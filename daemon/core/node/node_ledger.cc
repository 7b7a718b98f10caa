// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/node/node_ledger.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/job/job.h"
#include "daemon/core/plan/table_bytes.h"
#include "nvme/volume.h"
#include "protocol/durability.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::daemon {

NodeLedger::NodeLedger(ActionSink& actions, const DurableNode& recovered) : actions_(actions) {
  for (const std::shared_ptr<const DurableJob>& job : recovered.jobs) Park(job);
}

std::shared_ptr<const DurableJob> NodeLedger::FindParked(const JobName& name) const {
  const auto found = parked_.find(name);
  return found == parked_.end() ? nullptr : found->second;
}

void NodeLedger::Park(std::shared_ptr<const DurableJob> job) {
  const JobName name{.uid = job->uid, .name = job->name};
  FOREBAY_CHECK(parked_.emplace(name, std::move(job)).second);
}

void NodeLedger::Retire(std::vector<nvme::Slot> slots, JobId owner) {
  retired_.push_back({.slots = std::move(slots), .owner = owner});
}

bool NodeLedger::IsRetiring(JobId owner) const {
  return std::ranges::any_of(retired_,
                             [owner](const Retired& retired) { return retired.owner == owner; });
}

uint64_t NodeLedger::retired_bytes() const {
  uint64_t bytes = 0;
  for (const Retired& retired : retired_) {
    for (const nvme::Slot& slot : retired.slots) bytes += slot.size_bytes;
  }
  return bytes;
}

uint64_t NodeLedger::kept_bytes(const DurableJob* other_than) const {
  uint64_t bytes = 0;
  for (const auto& [name, job] : parked_) {
    if (job->kept && job.get() != other_than) bytes += job->kept->dram_bytes;
  }
  return bytes;
}

bool NodeLedger::WantsFirst(const std::map<JobId, std::unique_ptr<Job>>& jobs) const {
  return !has_made_ && std::ranges::any_of(jobs, [](const auto& entry) {
    return entry.second->stop().WantsVolume();
  });
}

void NodeLedger::Make(const std::map<JobId, std::unique_ptr<Job>>& jobs, JobId last_job) {
  if (task_ != 0) return;
  for (const auto& [id, job] : jobs) {
    if (job->life().WantsLedger()) in_ledger_.push_back(id);
  }
  if (in_ledger_.empty() && retired_.empty() && !WantsFirst(jobs)) return;
  auto node = std::make_shared<DurableNode>();
  node->last_job = last_job;
  for (const auto& [name, job] : parked_) {
    if (auto durable = InLedger(job)) node->jobs.push_back(std::move(durable));
  }
  for (const auto& [id, job] : jobs) {
    if (auto of_job = job->life().ForLedger()) node->jobs.push_back(std::move(of_job));
  }
  for (Retired& retired : retired_) retired.is_counted = true;
  task_ = actions_.NewTask(/*job=*/0);
  actions_.Emit(CommitLedger{.task = task_, .node = std::move(node), .pause = has_failed_});
}

std::vector<JobId> NodeLedger::Finish(const absl::Status& status, nvme::SlotMap& swap) {
  (void)actions_.FinishTask(std::exchange(task_, 0));
  has_failed_ = !status.ok();
  if (status.ok()) has_made_ = true;
  for (Retired& retired : retired_) {
    if (std::exchange(retired.is_counted, false) && status.ok()) --retired.ledgers_left;
  }
  std::erase_if(retired_, [&swap](const Retired& retired) {
    if (retired.ledgers_left > 0) return false;
    swap.Free(retired.slots);
    return true;
  });
  return std::exchange(in_ledger_, {});
}

uint64_t UsualLedgerBytes(uint64_t capacity_bytes, uint64_t slot_bytes, bool keeps_files) {
  // Bytes that one slot takes in the ledger: place, block, step and checksum.
  constexpr uint64_t kBytesPerSlot = 96;
  constexpr uint64_t kSlotsMin = 256;
  constexpr uint64_t kCapacityPerByte = 4096;
  // Bytes of capacity for each byte of the ledger of a small volume. Most of that ledger is extra_state of ranks (64 KiB a rank
  // by default).
  constexpr uint64_t kCapacityPerByteMin = 256;
  // A block has at least a quarter of a staging slot's bytes.
  const uint64_t slots = slot_bytes == 0 ? 0 : 4 * capacity_bytes / slot_bytes;
  const uint64_t of_slots = (slots + kSlotsMin) * kBytesPerSlot;
  if (!keeps_files) return std::min(nvme::Volume::kLedgerBytesMax, of_slots);
  // The ledger may also hold digests of weights, and extra_state of ranks.
  const uint64_t of_capacity =
      std::max(capacity_bytes / kCapacityPerByte,
               std::min(protocol::kMiB, capacity_bytes / kCapacityPerByteMin));
  return std::min(nvme::Volume::kLedgerBytesMax, std::max(of_slots, of_capacity));
}

absl::Status CheckLedgerRoom(const MemoryPlan& plan, uint64_t taken_bytes, uint64_t max_bytes) {
  constexpr uint64_t kPlaceBytes = 64 << 10;  // the volume's description of itself
  const uint64_t needed = taken_bytes + plan.ledger_bytes;
  if (plan.ledger_bytes == 0 || max_bytes == 0 || needed <= max_bytes) return absl::OkStatus();
  const uint64_t extra_states = DurableStepsKept(plan.session) * uint64_t{plan.session.world_size} *
                                plan.session.extra_state_bytes;
  const bool are_most = extra_states > plan.ledger_bytes / 2;
  return protocol::MakeError(
      protocol::ErrorId::kLimit,
      absl::StrCat("durability ", protocol::FormatDurability(plan.session.durability), " needs ",
                   plan.ledger_bytes, " bytes of the ledger on swap, which has ", max_bytes,
                   "; other jobs take ", taken_bytes),
      absl::StrCat(
          are_most ? "lower extra_state_bytes: buffers made by register_buffer(..., "
                     "persistent=False) are not in it"
                   : "raise update.block_elems",
          "; or set swap.ledger to ",
          protocol::FormatBytes(protocol::RoundUp(needed + kPlaceBytes, protocol::kMiB)),
          " or more for a volume that is made anew: forebayd --reclaim, which gives up the "
          "jobs that are on it"));
}

}  // namespace forebay::daemon
