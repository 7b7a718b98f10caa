// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/base/durable_job.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "daemon/core/base/job_name.h"

namespace forebay::daemon {
namespace {

// Appends slots of another step of the job that are not in the list yet.
void AddSlots(const DurableJob& of_step, std::vector<nvme::Slot>& slots) {
  const std::set<nvme::Slot> current(slots.begin(), slots.end());
  for (const nvme::Slot& slot : of_step.Slots()) {
    if (!current.contains(slot)) slots.push_back(slot);
  }
}

}  // namespace

std::vector<nvme::Slot> DurableJob::Slots() const {
  std::vector<nvme::Slot> slots = NamedSlots();
  if (before != nullptr) AddSlots(*before, slots);
  return slots;
}

std::vector<nvme::Slot> DurableJob::NamedSlots() const {
  std::vector<nvme::Slot> slots;
  for (const std::optional<DurableBytes>& block : blocks) {
    if (block) slots.push_back(block->slot);
  }
  for (const DurableBytes& part : weights) slots.push_back(part.slot);
  if (kept && kept->update != nullptr) {
    for (const KeptUpdate::Block& block : kept->update->blocks) {
      if (block.written) slots.push_back(block.written->slot);
    }
  }
  if (kept && kept->durable != nullptr) AddSlots(*kept->durable, slots);
  return slots;
}

std::shared_ptr<const DurableJob> AsBefore(const std::shared_ptr<const DurableJob>& job) {
  if (job == nullptr || job->before == nullptr) return job;
  auto alone = std::make_shared<DurableJob>(*job);
  alone->before = nullptr;
  return alone;
}

std::shared_ptr<const DurableJob> OfStep(const std::shared_ptr<const DurableJob>& job,
                                         uint64_t step) {
  if (job == nullptr || job->step == step) return job;
  return job->before != nullptr && job->before->step == step ? job->before : nullptr;
}

std::shared_ptr<const DurableJob> InLedger(const std::shared_ptr<const DurableJob>& job) {
  if (job == nullptr || job->durability.level == protocol::DurabilityLevel::kMemory) return nullptr;
  return job->kept ? job->kept->durable : job;
}

std::vector<nvme::Slot> DurableJob::BlockSlots() const {
  std::vector<nvme::Slot> slots = Slots();
  if (kept) slots.insert(slots.end(), kept->spare_slots.begin(), kept->spare_slots.end());
  return slots;
}

std::vector<nvme::Slot> DurableJob::AllSlots() const {
  std::vector<nvme::Slot> slots = BlockSlots();
  if (kept) slots.insert(slots.end(), kept->sum_slots.begin(), kept->sum_slots.end());
  return slots;
}

void DurableJob::RemoveOwn(std::vector<nvme::Slot>& slots) const {
  const std::vector<nvme::Slot> all = AllSlots();
  const std::set<nvme::Slot> own(all.begin(), all.end());
  std::erase_if(slots, [&own](const nvme::Slot& slot) { return own.contains(slot); });
}

std::vector<nvme::Slot> SlotsOf(const DurableNode& node) {
  std::vector<nvme::Slot> slots;
  for (const std::shared_ptr<const DurableJob>& job : node.jobs) {
    const std::vector<nvme::Slot> of_job = job->NamedSlots();
    slots.insert(slots.end(), of_job.begin(), of_job.end());
  }
  return slots;
}

namespace {

// Upper bounds of the bytes that one object takes in the encoded ledger (exec/recovery/ledger.capnp). An entry's bytes include
// its slot in the volume's list of slots. Names and shapes of parameters and names of groups are counted separately.
constexpr uint64_t kJobBytes = 4096;
constexpr uint64_t kEntryBytes = 32 + 24;
constexpr uint64_t kParamBytes = 96;
constexpr uint64_t kGroupBytes = 32;
constexpr uint64_t kPartitionBytes = 64;
constexpr uint64_t kBoxBytes = 64;

}  // namespace

uint64_t LedgerBytes(const protocol::Layout& layout, const LedgerCounts& counts) {
  const protocol::LayoutSpec& spec = layout.spec();
  uint64_t bytes = kJobBytes + counts.entries * kEntryBytes +
                   counts.digest_pages * sizeof(uint64_t) + counts.extra_state_bytes;
  for (const auto& param : spec.params) {
    bytes += kParamBytes + param.name.size() + param.shape.size() * sizeof(uint64_t);
  }
  for (const std::string& name : spec.group_names) bytes += kGroupBytes + name.size();
  bytes += layout.partitions().size() * kPartitionBytes;
  for (const protocol::PartitionSpec& partition : spec.partitions) {
    bytes += kPartitionBytes + partition.boxes.size() * kBoxBytes;
  }
  return bytes;
}

uint64_t LedgerBytes(const DurableJob& job) {
  LedgerCounts counts{.entries = job.blocks.size() + job.weights.size()};
  for (const std::optional<DurableBytes>& block : job.blocks) {
    if (block && block->weights_digests) counts.digest_pages += block->weights_digests->size();
  }
  if (job.extra_states != nullptr) {
    for (const std::vector<std::byte>& of_rank : *job.extra_states) {
      counts.extra_state_bytes += of_rank.size() + 2 * sizeof(uint64_t);
    }
  }
  const uint64_t of_before = job.before == nullptr ? 0 : LedgerBytes(*job.before);
  return LedgerBytes(*job.layout, counts) + of_before;
}

uint64_t DurableJob::slots() const { return Slots().size(); }

std::string DescribeJobs(const DurableNode& node) {
  constexpr size_t kJobsNamedMax = 100;
  if (node.jobs.empty()) return "";
  std::string text = absl::StrCat(node.jobs.size(), node.jobs.size() == 1 ? " job: " : " jobs: ");
  for (size_t i = 0; i < std::min(node.jobs.size(), kJobsNamedMax); ++i) {
    const DurableJob& job = *node.jobs[i];
    absl::StrAppend(&text, i == 0 ? "" : ", ", JobNameFor(0, {.uid = job.uid, .name = job.name}),
                    " at step ", job.step);
  }
  if (node.jobs.size() > kJobsNamedMax) absl::StrAppend(&text, ", ...");
  return text;
}

}  // namespace forebay::daemon
