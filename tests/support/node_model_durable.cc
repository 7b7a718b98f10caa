// SPDX-License-Identifier: Apache-2.0
// Durable steps in the model: copies of data in DRAM, ledgers, and the data that survives the node's death.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/units.h"
#include "tests/support/node_model.h"

namespace forebay::testing {

// NOLINTNEXTLINE(google-build-using-namespace): the actions
using namespace daemon;

BlockToken TokenOf(const BlockIdentity& identity, uint64_t checksum) {
  return {.job = identity.job,
          .block = identity.block,
          .written_step = identity.written_step,
          .checksum = checksum};
}

WeightsDigests DigestsOf(uint64_t checksum, const protocol::LayoutSpec& spec, uint64_t states_elems,
                         uint64_t block_bytes) {
  uint64_t states_bytes = 0;
  for (const auto& plane : protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype)) {
    states_bytes +=
        protocol::RoundUp(protocol::PlaneBytes(plane, states_elems), protocol::kPageBytes);
  }
  const uint64_t pages = (block_bytes - states_bytes) / protocol::kPageBytes;
  if (pages == 0) return nullptr;
  return std::make_shared<const std::vector<uint64_t>>(pages, checksum);
}

// The token of a part of the weights arena is that of its slot.
BlockToken NodeModel::WeightsToken(const BlockIdentity& identity, uint64_t checksum) {
  constexpr uint64_t kWeights = uint64_t{1} << 32;
  return {.job = identity.job,
          .block = kWeights + identity.block,
          .written_step = identity.written_step,
          .checksum = checksum};
}

void NodeModel::Apply(const SavePart& a, TaskDone& done) {
  JobMemory& job = jobs_[a.job];
  if (job.is_updating || job.committed_step != a.identity.written_step) {
    Fault("what is in DRAM is saved as another step than it is of");
  }
  done.checksum = ++checksums_;
  if (a.arena == SavedArena::kWeights) {
    if (a.identity.part != BlockPart::kWeightsArena) Fault("weights are saved as something else");
    Write(a.slot, WeightsToken(a.identity, done.checksum));
    return;
  }
  const auto found = job.resident.find(a.offset_bytes);
  const BlockToken resident = found == job.resident.end() ? BlockToken() : found->second;
  if (resident.written_step != 0 && resident.block != a.identity.block) {
    Fault("another block is saved than the one that is there");
  }
  Write(a.slot, {.job = a.job,
                 .block = a.identity.block,
                 .written_step = a.identity.written_step,
                 .checksum = done.checksum});
  copies_[a.slot] = resident;
}

void NodeModel::Apply(const RestorePart& a, TaskDone&) {
  JobMemory& job = jobs_[a.job];
  if (a.arena == SavedArena::kWeights) {
    if (!(disk_[a.slot] == WeightsToken(a.identity, a.checksum))) {
      Fault("weights are restored from a slot that does not hold them");
    }
    return;
  }
  const BlockToken block{.job = a.job,
                         .block = a.identity.block,
                         .written_step = a.identity.written_step,
                         .checksum = a.checksum};
  if (!(disk_[a.slot] == block)) Fault("a block is restored from a slot that does not hold it");
  job.published.erase(a.identity.block);
  job.resident[a.offset_bytes] = block;
  job.resident[a.offset_bytes].checksum = 0;
}

void NodeModel::Apply(const KeepExtraStates& a, TaskDone& done) {
  auto kept = std::make_shared<std::vector<std::vector<std::byte>>>();
  for (const StatePart& part : a.parts) kept->emplace_back(part.bytes);
  done.extra_states = std::move(kept);
}

void NodeModel::Apply(const DigestWeights& a, TaskDone& done) {
  if (jobs_[a.job].is_updating) Fault("weights are digested while they are updated");
  done.checksum = jobs_[a.job].committed_step << 32 | (a.offset_bytes + 1);
}

void NodeModel::Apply(const RestoreExtraStates& a, TaskDone&) {
  if (a.offsets_bytes.size() > a.extra_states->size()) {
    Fault("extra_state of more ranks is restored than was kept");
    return;
  }
  uint64_t end = 0;
  for (size_t rank = 0; rank < a.offsets_bytes.size(); ++rank) {
    const uint64_t bytes = (*a.extra_states)[rank].size();
    CheckBounds(StepUse(a.job, a.offsets_bytes[rank], bytes, true));
    if (a.offsets_bytes[rank] < end) Fault("extra_state of two ranks is restored to one place");
    end = a.offsets_bytes[rank] + bytes;
  }
}

// Checks that every block holds the bytes of the published step.
void NodeModel::CheckDurable(const DurableJob& durable) {
  JobMemory& job = jobs_[durable.id];
  const auto of_step = job.history.find(durable.step);
  if (of_step == job.history.end()) return;  // the job was not attached since the node started
  for (uint32_t i = 0; i < durable.weights.size(); ++i) {
    const BlockIdentity identity{.job = durable.id,
                                 .part = BlockPart::kWeightsArena,
                                 .block = i,
                                 .written_step = durable.weights[i].written_step};
    if (!(disk_[durable.weights[i].slot] == WeightsToken(identity, durable.weights[i].checksum))) {
      Fault(absl::StrCat("a ledger names other bytes than part ", i, " of the weights"));
    }
    for (const auto& [offset, written] : job.weights_steps) {
      const auto& [bytes, step] = written;
      const bool overlaps =
          offset < (i + 1) * durable.slot_bytes && i * durable.slot_bytes < offset + bytes;
      const bool is_newest = durable.step == job.committed_step && !job.is_updating;
      if (overlaps && is_newest && step > durable.weights[i].written_step) {
        Fault(absl::StrCat("a ledger names old bytes of part ", i, " of the weights"));
      }
    }
  }
  for (const auto& [block, written_step] : of_step->second) {
    if (written_step == 0 && !durable.blocks[block]) continue;
    if (!durable.blocks[block]) {
      Fault(absl::StrCat("a ledger does not name block ", block));
      continue;
    }
    const DurableBytes& bytes = *durable.blocks[block];
    const BlockToken token{.job = durable.id,
                           .block = block,
                           .written_step = bytes.written_step,
                           .checksum = bytes.checksum};
    const auto copy = copies_.find(bytes.slot);
    const uint64_t of = copy == copies_.end() ? bytes.written_step : copy->second.written_step;
    if (!(disk_[bytes.slot] == token) || of != written_step) {
      Fault(absl::StrCat("a ledger of step ", durable.step, " names block ", block, " as of step ",
                         of, "; it is of ", written_step));
    }
  }
}

void NodeModel::Apply(const CommitLedger& a, TaskDone&) {
  for (const auto& job : a.node->jobs) CheckDurable(*job);
  flushing_.clear();
  SetDurable(*a.node);
}

// Stores the ledger without the jobs' retained memory, like EncodeLedger().
void NodeModel::SetDurable(const DurableNode& node) {
  const std::vector<nvme::Slot> named = SlotsOf(node);
  durable_ = {.last_job = node.last_job, .jobs = {}};
  for (const auto& job : node.jobs) {
    DurableJob on_disk = *job;
    on_disk.kept.reset();
    durable_.jobs.push_back(std::make_shared<const DurableJob>(std::move(on_disk)));
  }
  durable_slots_before_ = std::move(durable_slots_);
  durable_slots_ = {named.begin(), named.end()};
  if (durable_slots_.size() != named.size()) Fault("a ledger names a slot twice");
}

void NodeModel::FailFlush(TaskDone& done) {
  BeginFlush();
  for (auto& [slot, before] : std::exchange(flushing_, {})) {
    std::vector<BlockToken>& all = doubted_[slot];
    all.insert(all.end(), before.begin(), before.end());
  }
  for (const auto& [slot, before] : doubted_) done.doubted.push_back(slot);
}

void NodeModel::LoseDoubted() {
  for (const auto& [slot, before] : doubted_) disk_[slot] = before.front();
}

bool NodeModel::NamesDoubted(const CommitLedger& a) const {
  return std::ranges::any_of(SlotsOf(*a.node),
                             [this](const nvme::Slot& slot) { return doubted_.contains(slot); });
}

void NodeModel::Write(const nvme::Slot& slot, const BlockToken& token) {
  doubted_.erase(slot);
  unflushed_[slot].push_back(disk_[slot]);
  disk_[slot] = token;
}

void NodeModel::BeginFlush() {
  for (auto& [slot, before] : std::exchange(unflushed_, {})) {
    std::vector<BlockToken>& all = flushing_[slot];
    all.insert(all.end(), before.begin(), before.end());
  }
}

NodeModel NodeModel::AfterPowerCut(std::mt19937_64& random) const {
  NodeModel next = Restarted();
  next.unflushed_.clear();
  next.doubted_.clear();
  const auto lose = [&](const std::map<nvme::Slot, std::vector<BlockToken>>& written) {
    for (const auto& [slot, before] : written) {
      const size_t fate = random() % (before.size() + 3);
      if (fate < before.size()) next.disk_[slot] = before[fate];
      if (fate == before.size()) next.disk_[slot] = {};
    }
  };
  lose(unflushed_);
  lose(doubted_);
  const CommitLedger* commit = nullptr;
  for (const auto& [task, action] : running_) {
    if (const auto* one = std::get_if<CommitLedger>(&action)) commit = one;
  }
  const bool has_flushed = commit != nullptr && random() % 3 > 0;
  if (!has_flushed) lose(flushing_);
  if (has_flushed && !NamesDoubted(*commit) && random() % 2 == 0) next.SetDurable(*commit->node);
  next.durable_slots_before_.clear();  // recovery commits the recovered ledger again
  return next;
}

NodeModel NodeModel::Restarted() const {
  NodeModel next;
  next.disk_ = disk_;
  next.copies_ = copies_;
  next.checksums_ = checksums_;
  next.durable_ = durable_;
  next.durable_slots_ = durable_slots_;
  for (const auto& [task, action] : running_) {
    if (const auto* write = std::get_if<WriteBlock>(&action)) next.disk_[*write->place.slot] = {};
    if (const auto* save = std::get_if<SavePart>(&action)) next.disk_[save->slot] = {};
    if (const auto* evict = std::get_if<EvictBlock>(&action)) next.disk_[*evict->place.slot] = {};
  }
  for (const auto& job : durable_.jobs) {
    const auto before = jobs_.find(job->id);
    if (before == jobs_.end()) continue;
    next.AddJob(job->id, before->second.layout);
  }
  return next;
}

void NodeModel::CheckKept(const JobMemory& job, const StatePart& part) {
  uint64_t at = part.offset_bytes;
  const uint64_t end = at + part.bytes;
  for (const auto& [offset, bytes] : job.state_parts) {
    if (offset <= at && at < offset + bytes) at = offset + bytes;
  }
  if (at < end) Fault("a job is made with states in DRAM that were not kept");
}

std::map<uint64_t, uint64_t> NodeModel::WrittenSteps(uint64_t id) {
  std::map<uint64_t, uint64_t> steps;
  for (const auto& [offset, block] : jobs_[id].resident) steps[block.block] = block.written_step;
  for (const auto& [block, slot] : jobs_[id].published) {
    if (disk_[slot].block != block) Fault("a published block is not in its slot");
    if (steps.contains(block)) Fault("a block is in DRAM and on swap");
    steps[block] = disk_[slot].written_step;
  }
  return steps;
}

void NodeModel::CheckStopped() {
  if (!running_.empty()) Fault("a node has stopped while tasks run");
  for (const auto& [id, job] : jobs_) {
    if (job.is_updating) Fault("a job has stopped in the middle of a step");
  }
}

// True if the retained update is of a decided step. An update with `prepared` set belongs to a step that is only prepared.
static bool IsDecided(const KeptUpdate* update) { return update != nullptr && !update->prepared; }

void NodeModel::CheckRecord(const DurableJob& record) {
  const JobMemory& job = jobs_.at(record.id);
  const bool is_updating = IsDecided(record.kept->update.get());
  if (job.is_updating != is_updating) Fault("a record is whole while its job is updated");
  if (job.committed_step + (is_updating ? 1 : 0) != record.step) {
    Fault("a record is of another step than was decided");
  }
  if (is_updating) CheckKeptUpdate(job, *record.kept->update);
  for (uint32_t block = 0; block < record.blocks.size(); ++block) {
    const auto slot = job.published.find(block);
    const bool is_on_swap = slot != job.published.end();
    const std::optional<DurableBytes>& recorded = record.blocks[block];
    if (is_on_swap == record.kept->resident[block] ||
        (is_on_swap && (!recorded || recorded->slot != slot->second))) {
      if (is_on_swap || recorded) {
        Fault(absl::StrCat("a record has block ", block, " in another place than it is in"));
      }
    }
    if (recorded && disk_[recorded->slot].checksum != recorded->checksum) {
      Fault(absl::StrCat("a record has block ", block, " with another checksum"));
    }
  }
}

void NodeModel::CheckKeptUpdate(const JobMemory& job, const KeptUpdate& update) {
  for (uint32_t block = 0; block < update.blocks.size(); ++block) {
    const std::optional<DurableBytes>& recorded = update.blocks[block].written;
    const auto written = job.written.find(block);
    const bool is_written = written != job.written.end();
    if (is_written != recorded.has_value() ||
        (is_written && (written->second != recorded->slot ||
                        disk_[recorded->slot].checksum != recorded->checksum))) {
      Fault(absl::StrCat("a record has other bytes of block ", block, " than were written"));
    }
    const auto made = job.updates.find(block);
    const bool is_installed = made == job.updates.end() || made->second.to_install.empty();
    if (is_written && is_installed == update.blocks[block].weights_slot.has_value()) {
      Fault(absl::StrCat("a record is wrong about new weights of block ", block));
    }
  }
}

bool NodeModel::IsDone(const UpdateBlock& a) {
  if (!a.is_recorded) return false;
  const BlockToken& block = a.place.resident ? jobs_[a.job].resident[a.place.state_offset_bytes]
                                             : staging_[a.place.staging_slot];
  return block == TokenOf(a.identity_after, block.checksum);
}

NodeModel NodeModel::Killed(const DurableNode& node) {
  NodeModel next = GoOn(node);
  for (const auto& [task, action] : running_) {
    if (const auto* update = std::get_if<UpdateBlock>(&action)) {
      const bool is_in_place =
          update->place.resident || std::ranges::any_of(update->segments, [](const auto& segment) {
            return !segment.weights.in_block && !segment.weights.new_offset_bytes;
          });
      const auto job = next.jobs_.find(update->job);
      if (is_in_place && job != next.jobs_.end() && !job->second.is_updating) {
        next.Fault("a job goes on that was killed in the middle of an update");
      }
    }
    if (const auto* promote = std::get_if<PromoteBlock>(&action)) {
      next.FreeStateMemory(promote->job, promote->place.state_offset_bytes, promote->bytes);
    }
  }
  next.fault_ += fault_;
  return next;
}

NodeModel NodeModel::GoOn(const DurableNode& node) {
  NodeModel next = Restarted();
  for (const auto& job : node.jobs) {
    if (!job->kept) continue;
    JobMemory& kept = next.jobs_[job->id] = jobs_.at(job->id);
    const KeptUpdate* const update = job->kept->update.get();
    if (kept.committed_step + (IsDecided(update) ? 1 : 0) != job->step ||
        kept.is_updating != IsDecided(update)) {
      Fault("a job goes on in the middle of a step");
    }
    for (uint32_t block = 0; block < job->blocks.size(); ++block) {
      const auto slot = kept.published.find(block);
      const bool is_on_swap = !job->kept->resident[block] && slot != kept.published.end();
      if (is_on_swap && (!job->blocks[block] || job->blocks[block]->slot != slot->second)) {
        Fault(absl::StrCat("block ", block, " goes on in another slot than it is in"));
      }
    }
    // Drops the step arena and its overflow, which are not retained, and gradient sums that no update needs.
    kept.step_bytes = 0;
    kept.overflow.clear();
    if (update == nullptr || update->float_sums.bytes == 0) {
      kept.float_sums_end = 0;
      kept.float_sums_offset = UINT64_MAX;
      kept.float_sums.clear();
    }
    if (update != nullptr) {
      CheckKeptUpdate(kept, *update);
      for (const KeptUpdate::Block& block : update->blocks) {
        if (block.staging_slot) next.staging_[*block.staging_slot] = staging_[*block.staging_slot];
      }
    } else {
      kept.accumulators.clear();
      kept.paged.clear();
      kept.spilled.clear();
    }
    kept.early.clear();
    std::erase_if(kept.loaded, [&](const auto& range) {
      return std::ranges::none_of(job->kept->leases, [&](const KeptLease& lease) {
        return range.second.partition == lease.partition;
      });
    });
    for (const KeptLease& lease : job->kept->leases) {
      if (const auto held = held_.find(lease.lease); held != held_.end()) next.held_.insert(*held);
    }
    const std::vector<nvme::Slot> slots = job->AllSlots();
    kept.slots = {slots.begin(), slots.end()};
  }
  return next;
}

void NodeModel::Recover(const DurableJob& durable) {
  JobMemory& job = jobs_[durable.id];
  if (job.weights_bytes > 0) return;  // the job's arenas were retained
  job.committed_step = durable.step;
  job.has_published = true;
  const std::vector<nvme::Slot> slots = durable.Slots();
  job.slots = {slots.begin(), slots.end()};
  for (uint32_t block = 0; block < durable.blocks.size(); ++block) {
    if (durable.blocks[block]) job.published[block] = durable.blocks[block]->slot;
  }
}

}  // namespace forebay::testing
