// SPDX-License-Identifier: Apache-2.0
#include "tests/support/node_model.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/units.h"

namespace forebay::testing {

// NOLINTNEXTLINE(google-build-using-namespace): the actions
using namespace daemon;

namespace {

constexpr uint64_t kStagingSlotBytes = uint64_t{1} << 32;  // model offsets of slots do not overlap

template <typename T>
concept HasTask = requires(T action) {
  action.task;
};

}  // namespace

void NodeModel::Fault(const std::string& what) {
  if (fault_.empty()) fault_ = what;
}

void NodeModel::AddJob(uint64_t job, std::shared_ptr<const protocol::Layout> layout, SumsAre sums) {
  jobs_[job].layout = std::move(layout);
  jobs_[job].has_paged_sums = sums == SumsAre::kPaged;
  for (const auto& durable : durable_.jobs) {
    if (durable->id == job) Recover(*durable);
  }
}

void NodeModel::PutGradient(uint64_t session, uint64_t offset, const GradientToken& token) {
  sessions_[session].gradients[offset] = token;
}

void NodeModel::DropGradient(uint64_t session, uint64_t offset) {
  sessions_[session].gradients.erase(offset);
}

void NodeModel::HoldWeights(uint64_t session, const protocol::Completion& fetched) {
  held_[fetched.lease_id] = {.session = session,
                             .job = sessions_[session].job,
                             .offset_bytes = fetched.offset_bytes,
                             .bytes = fetched.length_bytes};
}

void NodeModel::ReleaseWeights(uint64_t session, uint64_t lease) {
  const auto it = held_.find(lease);
  if (it != held_.end() && it->second.session == session) held_.erase(it);
}

void NodeModel::ReleaseWeights(uint64_t session) {
  std::erase_if(held_, [&](const auto& entry) { return entry.second.session == session; });
}

void NodeModel::ReleaseWeightsOfJob(uint64_t job) {
  std::erase_if(held_, [&](const auto& entry) { return entry.second.job == job; });
}

void NodeModel::CheckHeld(const UpdateBlock& update) {
  if (update.pass != UpdatePass::kWhole || IsDone(update)) return;
  const uint64_t width = protocol::SizeBytes(jobs_[update.job].layout->spec().dtype);
  for (const UpdateSegment& segment : update.segments) {
    if (segment.weights.in_block || segment.weights.new_offset_bytes) continue;
    CheckHeld(update.job, segment.weights.offset_bytes, segment.elems * width);
  }
}

void NodeModel::CheckHeld(uint64_t job, uint64_t weights_offset_bytes, uint64_t bytes) {
  for (const auto& [lease, held] : held_) {
    if (held.job == job && weights_offset_bytes < held.offset_bytes + held.bytes &&
        held.offset_bytes < weights_offset_bytes + bytes) {
      Fault(absl::StrCat("weights under lease ", lease, " are written"));
    }
  }
}

void NodeModel::CheckFetched(uint64_t session, uint32_t partition,
                             const protocol::Completion& fetched) {
  JobMemory& job = jobs_[sessions_[session].job];
  if (!job.loaded_partitions.contains(partition)) return;
  uint64_t at = fetched.offset_bytes;
  while (at < fetched.offset_bytes + fetched.length_bytes) {
    const auto range = job.loaded.find(at);
    if (range == job.loaded.end() || range->second.partition != partition) {
      Fault(absl::StrCat("a fetch of partition ", partition, " was given other bytes"));
      return;
    }
    const BlockToken& block = range->second.block;
    const auto written = job.written.find(block.block);
    const auto& newest =
        written != job.written.end() ? written->second : job.published[block.block];
    if (!(disk_[newest] == block)) {
      Fault(absl::StrCat("a fetch of partition ", partition, " was given old bytes of block ",
                         block.block));
    }
    at += range->second.bytes;
  }
}

NodeModel::Use NodeModel::GradUse(uint64_t session, uint64_t offset, uint64_t bytes,
                                  bool writes) const {
  return {absl::StrCat("grad ", session), offset, bytes, writes};
}

NodeModel::Use NodeModel::StepUse(uint64_t job, uint64_t offset, uint64_t bytes,
                                  bool writes) const {
  return {absl::StrCat("step ", job), offset, bytes, writes};
}

NodeModel::Use NodeModel::StateUse(uint64_t job, const BlockPlace& place, uint64_t bytes,
                                   bool writes) const {
  if (place.resident) {
    return {absl::StrCat("state ", job), place.state_offset_bytes, bytes, writes};
  }
  return {"staging", place.staging_slot * kStagingSlotBytes, bytes, writes};
}

uint64_t NodeModel::SizeOf(const std::string& memory) {
  const size_t space = memory.find(' ');
  if (space == std::string::npos) return UINT64_MAX;
  const std::string kind = memory.substr(0, space);
  const uint64_t id = std::stoull(memory.substr(space + 1));
  if (kind == "grad") return sessions_[id].bytes;
  const JobMemory& job = jobs_[id];
  if (kind == "weights") return job.weights_bytes;
  if (kind == "step") return job.step_bytes;
  return UINT64_MAX;  // disk: CheckSlot() checks it
}

// A job may read its own slots, and write to its own slots and to slots without blocks of other jobs, which then become its
// own. A published block must not be overwritten.
void NodeModel::CheckSlot(uint64_t id, const BlockPlace& place, bool writes) {
  if (!place.slot) return;
  const JobMemory& job = jobs_[id];
  for (auto& [other, memory] : jobs_) {
    if (other == id || !memory.slots.contains(*place.slot)) continue;
    if (!writes || memory.HasBlockIn(*place.slot)) Fault("a slot of another job is used");
    memory.slots.erase(*place.slot);
  }
  if (writes) jobs_[id].slots.insert(*place.slot);  // may be a spare slot
  for (const auto& [block, slot] : job.published) {
    if (writes && slot == *place.slot) Fault("a published block is overwritten");
  }
  if (writes &&
      (durable_slots_.contains(*place.slot) || durable_slots_before_.contains(*place.slot))) {
    Fault("a slot of a durable ledger is overwritten");
  }
  if (writes) copies_.erase(*place.slot);
}

void NodeModel::CheckBounds(const Use& use) {
  uint64_t size = SizeOf(use.memory);
  if (use.memory.starts_with("step ")) {
    const JobMemory& job = jobs_[std::stoull(use.memory.substr(5))];
    if (use.offset_bytes >= job.float_sums_offset) size = job.float_sums_end;
  }
  if (use.memory.starts_with("state ")) {
    const auto& parts = jobs_[std::stoull(use.memory.substr(6))].state_parts;
    auto part = parts.upper_bound(use.offset_bytes);
    const bool has_memory =
        part != parts.begin() && (--part)->first + part->second >= use.offset_bytes + use.bytes;
    if (!has_memory) Fault(absl::StrCat("no memory in ", use.memory, " at ", use.offset_bytes));
    return;
  }
  if (use.offset_bytes > size || use.bytes > size - use.offset_bytes) {
    Fault(absl::StrCat("[", use.offset_bytes, " + ", use.bytes, ") is outside ", use.memory, " of ",
                       size, " bytes"));
  }
}

std::vector<NodeModel::Use> NodeModel::UsesOf(const Action& action) {
  std::vector<Use> uses;
  if (const auto* initial = std::get_if<CopyInitial>(&action)) {
    uses.push_back(GradUse(initial->session, initial->grad_offset_bytes, initial->bytes, false));
    uses.push_back({absl::StrCat("weights ", initial->job), initial->weights_offset_bytes,
                    initial->bytes, true});
  } else if (const auto* replaced = std::get_if<ReplaceStepArena>(&action)) {
    uses.push_back(StepUse(replaced->job, 0, jobs_[replaced->job].step_bytes, true));
    for (const BytesCopy& kept : replaced->extra_state) {
      CheckBounds(StepUse(replaced->job, kept.from_bytes, kept.size_bytes, false));
    }
  } else if (const auto* copy = std::get_if<CopyToStepArena>(&action)) {
    uses.push_back(GradUse(copy->session, copy->grad_offset_bytes, copy->bytes, false));
    uses.push_back(StepUse(copy->job, copy->step_offset_bytes, copy->bytes, true));
  } else if (const auto* add = std::get_if<AddGradients>(&action)) {
    const uint64_t bytes = add->elems * protocol::SizeBytes(add->dtype);
    for (const GradientSource& source : add->sources) {
      uses.push_back(source.session != 0
                         ? GradUse(source.session, source.offset_bytes, bytes, false)
                         : StepUse(add->job, source.offset_bytes, bytes, false));
    }
    uses.push_back(StepUse(add->job, add->accumulator_offset_bytes,
                           add->elems * protocol::SizeBytes(add->sum_dtype), true));
  } else if (const auto* sum = std::get_if<SumGradient>(&action)) {
    uses.push_back(StepUse(sum->job, sum->accumulator_offset_bytes,
                           sum->elems * protocol::SizeBytes(sum->sum_dtype), false));
  } else if (const auto* read = std::get_if<ReadBlock>(&action)) {
    uses.push_back(StateUse(read->job, read->place, read->bytes, true));
    CheckSlot(read->job, read->place, /*writes=*/false);
    if (const auto& slot = read->place.slot) {
      uses.push_back({absl::StrCat("disk ", slot->path), slot->offset_bytes, read->bytes, false});
    }
  } else if (const auto* update = std::get_if<UpdateBlock>(&action)) {
    uses.push_back(StateUse(update->job, update->place, update->bytes, true));
    const protocol::LayoutSpec& spec = jobs_[update->job].layout->spec();
    const uint64_t width = protocol::SizeBytes(spec.dtype);
    for (const UpdateSegment& segment : update->segments) {
      const bool masters = update->pass == UpdatePass::kMasters;
      const bool changes = update->pass == UpdatePass::kWhole;
      const std::optional<uint64_t>& aside = segment.weights.new_offset_bytes;
      if (!segment.weights.in_block) {
        uses.push_back({absl::StrCat("weights ", update->job), segment.weights.offset_bytes,
                        segment.elems * width, changes && !aside});
      }
      if (aside) uses.push_back(StepUse(update->job, *aside, segment.elems * width, true));
      if (!masters && !IsDone(*update)) AddSumUses(*update, segment, uses);
      if (segment.block_elem + segment.elems > update->block_elems) {
        Fault("a segment is outside its block");
      }
    }
  } else if (const auto* install = std::get_if<InstallWeights>(&action)) {
    for (const BytesCopy& part : install->copies) {
      uses.push_back(StepUse(install->job, part.from_bytes, part.size_bytes, false));
      uses.push_back(
          {absl::StrCat("weights ", install->job), part.to_bytes, part.size_bytes, true});
      CheckHeld(install->job, part.to_bytes, part.size_bytes);
    }
  } else if (const auto* write = std::get_if<WriteBlock>(&action)) {
    uses.push_back(StateUse(write->job, write->place, write->bytes, false));
    CheckSlot(write->job, write->place, /*writes=*/true);
    uses.push_back(DiskUse(*write->place.slot, write->bytes, true));
  } else if (const auto* state = std::get_if<DecodeState>(&action)) {
    uses.push_back(StateUse(state->job, state->place, state->block_bytes, false));
    uses.push_back(GradUse(state->session, state->grad_offset_bytes, state->elems * 4, true));
    if (state->block_elem + state->elems > state->block_elems) {
      Fault("a read of states is outside its block");
    }
  } else if (const auto* masters = std::get_if<SetState>(&action)) {
    const uint64_t width = protocol::SizeBytes(jobs_[masters->job].layout->spec().dtype);
    uses.push_back(GradUse(masters->session, masters->grad_offset_bytes,
                           masters->elems * protocol::SizeBytes(masters->dtype), false));
    if (!masters->weights.in_block) {
      uses.push_back({absl::StrCat("weights ", masters->job), masters->weights.offset_bytes,
                      masters->elems * width, true});
    }
    if (masters->in_block) {
      const SetState::InBlock& block = *masters->in_block;
      uses.push_back(StateUse(masters->job, block.place, block.block_bytes, true));
      const uint64_t elems =
          block.states_elems > 0 ? block.states_elems : block.block_bytes / width;
      if (block.block_elem + masters->elems > elems) {
        Fault("a write of masters is outside its block");
      }
      if (block.states_elems == 0 && !masters->weights.in_block) {
        Fault("a block without states or weights");
      }
    }
  } else if (const auto* load = std::get_if<LoadWeights>(&action)) {
    const BlockPlace place{
        .resident = false, .staging_slot = load->staging_slot, .slot = load->slot};
    uses.push_back(StateUse(load->job, place, load->bytes, true));
    CheckSlot(load->job, place, /*writes=*/false);
    uses.push_back({absl::StrCat("disk ", load->slot.path),
                    load->slot.offset_bytes + load->slot_offset_bytes, load->bytes, false});
    if (load->slot_offset_bytes + load->bytes > load->slot.size_bytes) {
      Fault("weights are read behind their slot");
    }
    for (const BytesCopy& part : load->copies) {
      uses.push_back({absl::StrCat("weights ", load->job), part.to_bytes, part.size_bytes, true});
      CheckHeld(load->job, part.to_bytes, part.size_bytes);
      if (part.from_bytes + part.size_bytes > load->bytes)
        Fault("weights are copied that were not read");
    }
  } else if (const auto* digest = std::get_if<DigestWeights>(&action)) {
    uses.push_back(
        {absl::StrCat("weights ", digest->job), digest->offset_bytes, digest->bytes, false});
  } else if (const auto* spill = std::get_if<SpillSums>(&action)) {
    uses.push_back(StepUse(spill->job, spill->offset_bytes, spill->bytes, false));
    CheckSlot(spill->job, {.resident = false, .slot = spill->slot}, /*writes=*/true);
    uses.push_back(DiskUse(spill->slot, spill->bytes, true));
  } else if (const auto* sums = std::get_if<LoadSums>(&action)) {
    uses.push_back(StepUse(sums->job, sums->offset_bytes, sums->bytes, true));
    CheckSlot(sums->job, {.resident = false, .slot = sums->slot}, /*writes=*/false);
    uses.push_back(DiskUse(sums->slot, sums->bytes, false));
  } else if (const auto* evict = std::get_if<EvictBlock>(&action)) {
    uses.push_back(StateUse(evict->job, evict->place, evict->bytes, true));
    CheckSlot(evict->job, evict->place, /*writes=*/true);
    uses.push_back(DiskUse(*evict->place.slot, evict->bytes, true));
  } else if (const auto* save = std::get_if<SavePart>(&action)) {
    const bool is_weights = save->arena == SavedArena::kWeights;
    uses.push_back({absl::StrCat(is_weights ? "weights " : "state ", save->job), save->offset_bytes,
                    save->bytes, false});
    CheckSlot(save->job, {.resident = false, .slot = save->slot}, /*writes=*/true);
    uses.push_back(DiskUse(save->slot, save->bytes, true));
    if (save->bytes > save->slot.size_bytes) Fault("a part is larger than its slot");
  } else if (const auto* restore = std::get_if<RestorePart>(&action)) {
    const bool is_weights = restore->arena == SavedArena::kWeights;
    uses.push_back({absl::StrCat(is_weights ? "weights " : "state ", restore->job),
                    restore->offset_bytes, restore->bytes, true});
    uses.push_back(DiskUse(restore->slot, restore->bytes, false));
  } else if (const auto* kept = std::get_if<KeepExtraStates>(&action)) {
    for (const StatePart& part : kept->parts) {
      uses.push_back(StepUse(kept->job, part.offset_bytes, part.bytes, false));
    }
  } else if (const auto* promote = std::get_if<PromoteBlock>(&action)) {
    AddStateMemory(promote->job, {promote->place.state_offset_bytes, promote->bytes});
    uses.push_back(StateUse(promote->job, promote->place, promote->bytes, true));
    CheckSlot(promote->job, promote->place, /*writes=*/false);
    if (const auto& slot = promote->place.slot) {
      uses.push_back(
          {absl::StrCat("disk ", slot->path), slot->offset_bytes, promote->bytes, false});
    }
  }
  return uses;
}

void NodeModel::Execute(const Action& action) {
  if (const auto* close = std::get_if<CloseSession>(&action)) {
    if (!closed_.insert(close->session).second) Fault("a session was closed twice");
    const std::string arena = absl::StrCat("grad ", close->session);
    for (const auto& [task, uses] : uses_) {
      for (const Use& use : uses) {
        if (use.memory == arena) Fault("a session was closed while a task uses its arena");
      }
    }
    sessions_.erase(close->session);
    return;
  }
  if (const auto* free_job = std::get_if<FreeJob>(&action)) {
    for (const auto& [id, session] : sessions_) {
      if (session.job == free_job->job) Fault("a job was freed while it has sessions");
    }
    if (!free_job->keeps_arenas) jobs_.erase(free_job->job);
    return;
  }
  if (const auto* dropped = std::get_if<EarlyUpdatesDropped>(&action)) {
    Dropped(*dropped);
    return;
  }
  if (const auto* committed = std::get_if<StepCommitted>(&action)) {
    JobMemory& job = jobs_[committed->job];
    job.is_updating = true;
    job.written = std::exchange(job.early, {});
    return;
  }
  if (std::holds_alternative<CommitLedger>(action)) BeginFlush();
  if (const auto* published = std::get_if<StepPublished>(&action)) {
    Published(*published);
    return;
  }
  const TaskId task = std::visit(
      []<typename A>(const A& a) -> TaskId {
        if constexpr (HasTask<A>) return a.task;
        return 0;
      },
      action);
  if (task == 0) return;
  if (const auto* update = std::get_if<UpdateBlock>(&action)) CheckHeld(*update);
  std::vector<Use> uses = UsesOf(action);
  for (const Use& use : uses) {
    CheckBounds(use);
    if (use.memory.starts_with("grad")) continue;  // a client may pass the same bytes twice
    for (const auto& [other_task, other_uses] : uses_) {
      for (const Use& other : other_uses) {
        const bool overlap = use.memory == other.memory &&
                             use.offset_bytes < other.offset_bytes + other.bytes &&
                             other.offset_bytes < use.offset_bytes + use.bytes;
        if (overlap && (use.writes || other.writes)) {
          Fault(absl::StrCat("tasks ", other_task, " and ", task, " race in ", use.memory, " at ",
                             use.offset_bytes));
        }
      }
    }
  }
  uses_.emplace(task, std::move(uses));
  if (!running_.emplace(task, action).second) Fault("a task number was used twice");
}

TaskDone NodeModel::Finish(TaskId task, const absl::Status& status) {
  const Action action = running_.at(task);
  running_.erase(task);
  uses_.erase(task);
  TaskDone done{.task = task, .status = status};
  const auto* commit = std::get_if<CommitLedger>(&action);
  if (commit != nullptr && NamesDoubted(*commit)) {
    done.status = absl::FailedPreconditionError("a slot must be written again");
  }
  const auto* write = std::get_if<WriteBlock>(&action);
  if (write != nullptr && write->read_from &&
      !(staging_[write->place.staging_slot] == TokenOf(write->identity, write->checksum))) {
    done.status = protocol::MakeError(protocol::ErrorId::kCorrupt, "other bytes were read");
    return done;  // the task also wrote no bytes
  }
  if (done.status.ok()) std::visit([&](const auto& a) { Apply(a, done); }, action);
  if (done.status.ok()) return done;
  if (commit != nullptr) FailFlush(done);
  if (write != nullptr) Write(*write->place.slot, {});
  if (const auto* spill = std::get_if<SpillSums>(&action))
    jobs_[spill->job].spilled.erase(spill->slot);
  if (const auto* evict = std::get_if<EvictBlock>(&action)) Write(*evict->place.slot, {});
  if (const auto* save = std::get_if<SavePart>(&action)) Write(save->slot, {});
  if (const auto* promote = std::get_if<PromoteBlock>(&action)) {
    FreeStateMemory(promote->job, promote->place.state_offset_bytes, promote->bytes);
  }
  return done;
}

void NodeModel::Apply(const CreateJobMemory& a, TaskDone&) {
  JobMemory& job = jobs_[a.job];
  job.step_bytes = a.step_bytes;
  const StatePart& sums = a.float_sums;
  const bool are_as_left = sums.bytes == 0
                               ? job.float_sums_end == 0
                               : job.float_sums_offset == sums.offset_bytes &&
                                     job.float_sums_end == sums.offset_bytes + sums.bytes;
  if (!are_as_left) Fault("a job is made with other sums in float32 than are there");
  if (a.is_kept) {
    if (job.weights_bytes != a.weights_bytes)
      Fault("a job is made with weights that were not kept");
    for (const StatePart& part : a.resident) CheckKept(job, part);
    return;
  }
  job.weights_bytes = a.weights_bytes;
  for (const StatePart& part : a.resident) {
    if (part.offset_bytes + part.bytes > a.state_bytes) Fault("a block is outside the state arena");
    AddStateMemory(a.job, part);
  }
}

// From the first eviction on, each block's states are a separate part; adjacent parts stay separate.
void NodeModel::AddStateMemory(uint64_t id, const StatePart& part) {
  std::map<uint64_t, uint64_t>& parts = jobs_[id].state_parts;
  auto next = parts.lower_bound(part.offset_bytes);
  if (next != parts.end() && next->first < part.offset_bytes + part.bytes) {
    Fault("memory of states is made twice");
  }
  if (next != parts.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second > part.offset_bytes) Fault("memory of states is made twice");
  }
  parts[part.offset_bytes] = part.bytes;
}

void NodeModel::FreeStateMemory(uint64_t id, uint64_t offset_bytes, uint64_t bytes) {
  std::map<uint64_t, uint64_t>& parts = jobs_[id].state_parts;
  const auto part = std::prev(parts.upper_bound(offset_bytes));
  const uint64_t begin = part->first;
  const uint64_t end = part->first + part->second;
  parts.erase(part);
  if (begin < offset_bytes) parts[begin] = offset_bytes - begin;
  if (offset_bytes + bytes < end) parts[offset_bytes + bytes] = end - offset_bytes - bytes;
}

uint64_t NodeModel::StateBytes(uint64_t id) {
  uint64_t total = 0;
  for (const auto& [offset, bytes] : jobs_[id].state_parts) total += bytes;
  return total;
}

void NodeModel::Apply(const EvictBlock& a, TaskDone& done) {
  JobMemory& job = jobs_[a.job];
  const BlockToken block = job.resident[a.place.state_offset_bytes];
  CheckResident(block, a.identity);
  done.checksum = ++checksums_;
  Write(*a.place.slot, TokenOf(a.identity, done.checksum));
  job.published[a.identity.block] = *a.place.slot;
  job.resident.erase(a.place.state_offset_bytes);
  FreeStateMemory(a.job, a.place.state_offset_bytes, a.bytes);
}

void NodeModel::Apply(const PromoteBlock& a, TaskDone&) {
  JobMemory& job = jobs_[a.job];
  if (a.place.slot) {
    if (!(disk_[*a.place.slot] == TokenOf(a.identity, a.checksum))) {
      Fault("a block was promoted from a slot that does not hold it");
    }
    job.resident[a.place.state_offset_bytes] = TokenOf(a.identity, 0);
  } else if (a.identity.written_step != 0) {
    Fault("a written block was promoted as zeros");
  }
  job.published.erase(a.identity.block);
}

void NodeModel::CheckResident(const BlockToken& block, const BlockIdentity& identity) {
  const bool fresh = identity.written_step == 0 && block.written_step == 0;
  if (!fresh && !(block == TokenOf(identity, 0))) {
    Fault(absl::StrCat("block ", identity.block, " in DRAM is not that of step ",
                       identity.written_step));
  }
}

void NodeModel::Apply(const CreateJobSwap& a, TaskDone&) {
  jobs_[a.job].slots.insert(a.slots.begin(), a.slots.end());
}

// The bytes of extra_state have no tokens. Checks that their new places are in the new arena and do not overlap.
void NodeModel::Apply(const ReplaceStepArena& a, TaskDone&) {
  JobMemory& job = jobs_[a.job];
  job.step_bytes = a.step_bytes;
  job.overflow.clear();
  job.accumulators.clear();
  job.float_sums.clear();
  job.float_sums_offset = UINT64_MAX;
  job.float_sums_end = 0;
  uint64_t end = 0;
  for (const BytesCopy& copy : a.extra_state) {
    if (copy.to_bytes < end || copy.to_bytes + copy.size_bytes > a.step_bytes) {
      Fault("extra_state is moved to a wrong place");
    }
    end = copy.to_bytes + copy.size_bytes;
  }
}

void NodeModel::Apply(const PopulateStepArena& a, TaskDone& done) {
  JobMemory& job = jobs_[a.job];
  if (job.float_sums_end != 0) Fault("float32 sums are made twice");
  if (a.offset_bytes < job.step_bytes) Fault("float32 sums lie over other parts of the step arena");
  if (!done.status.ok()) return;
  job.float_sums_offset = a.offset_bytes;
  job.float_sums_end = a.offset_bytes + a.bytes;
}

void NodeModel::Apply(const CreateSessionMemory& a, TaskDone&) {
  if (sessions_[a.session].bytes != 0) Fault("a session got its arena twice");
  sessions_[a.session].bytes = a.grad_bytes;
}

void NodeModel::Apply(const CopyInitial&, TaskDone&) {}

void NodeModel::Apply(const ReadBlock& a, TaskDone&) {
  staging_[a.place.staging_slot] =
      a.place.slot ? disk_[*a.place.slot] : BlockToken{.job = a.job, .block = UINT64_MAX};
}

std::optional<NodeModel::ElemPlace> NodeModel::WeightsAt(const JobMemory& job,
                                                         uint64_t weights_offset_bytes) {
  const uint64_t width = protocol::SizeBytes(job.layout->spec().dtype);
  const auto partitions = job.layout->partitions();
  uint64_t owner_begin = 0;
  for (const protocol::OwnerPlace& owner : job.layout->owners()) {
    for (uint32_t i = 0; i < partitions.size(); ++i) {
      const uint64_t begin = owner_begin + partitions[i].weights_offset_bytes;
      const uint64_t end = begin + partitions[i].elems * width;
      if (partitions[i].owner != owner.owner) continue;
      if (weights_offset_bytes < begin || weights_offset_bytes >= end) continue;
      return ElemPlace{.partition = i, .elem = (weights_offset_bytes - begin) / width};
    }
    owner_begin += owner.weights_bytes;
  }
  return std::nullopt;
}

// Checks that the weights and the gradient of a segment are of the same elements, and that its parameter has these elements.
void NodeModel::CheckElems(const JobMemory& job, const UpdateSegment& segment,
                           const ElemPlace& place) {
  // If only some partitions are in the arena, their offsets are not the layout's.
  const bool in_arena = !segment.weights.in_block && !job.has_paged_sums &&
                        job.weights_bytes >= job.layout->weights_bytes();
  if (in_arena && WeightsAt(job, segment.weights.offset_bytes) != place) {
    Fault("a segment takes the gradient of other weights");
  }
  const auto boxes = job.layout->boxes_of(place.partition);
  const bool found = std::any_of(boxes.begin(), boxes.end(), [&](const auto& box_place) {
    return box_place.box.param == segment.param && box_place.partition_elem <= place.elem &&
           place.elem + segment.elems <= box_place.partition_elem + box_place.box.elems();
  });
  if (!found) Fault("a segment is not that of its parameter");
}

void NodeModel::Apply(const UpdateBlock& a, TaskDone& done) {
  JobMemory& job = jobs_[a.job];
  BlockToken& block =
      a.place.resident ? job.resident[a.place.state_offset_bytes] : staging_[a.place.staging_slot];
  if (IsDone(a)) {
    done.checksum = block.checksum;
    done.weights_digests = DigestsOf(done.checksum, job.layout->spec(), a.block_elems, a.bytes);
    return;
  }
  const bool fresh =
      a.identity_before.written_step == 0 && !a.place.slot && block.written_step == 0;
  if (!fresh && !(block == TokenOf(a.identity_before, a.checksum_before))) {
    Fault(absl::StrCat("block ", a.identity_before.block, " is not that of step ",
                       a.identity_before.written_step));
  }
  if (a.pass == UpdatePass::kNorms) {
    for (const UpdateSegment& segment : a.segments) {  // ‖w‖ : ‖u‖ is 1 : 2 for every parameter
      const auto elems = static_cast<double>(segment.elems);
      done.norms.push_back({.weight_squares = elems, .update_squares = 4 * elems});
    }
    return;
  }
  done.count = std::exchange(masters_overflow_, 0);
  done.checksum = a.place.resident ? 0 : ++checksums_;
  done.weights_digests = DigestsOf(done.checksum, job.layout->spec(), a.block_elems, a.bytes);
  block = TokenOf(a.identity_after, done.checksum);
  BlockUpdate made;
  for (const UpdateSegment& segment : a.segments) {
    if (a.pass == UpdatePass::kMasters) continue;
    const std::vector<SumUnit> units = UnitsOf(job, a, segment);
    if (!segment.weights.in_block && !segment.weights.new_offset_bytes) {
      job.weights_steps[segment.weights.offset_bytes] = {
          segment.elems * protocol::SizeBytes(job.layout->spec().dtype),
          a.identity_after.written_step};
    }
    if (units.empty()) continue;
    const ElemPlace& place = units[0].place;
    CheckElems(job, segment, place);
    BlockUpdate of_segment{.elems = {{segment.param, segment.elems}}, .used = {}, .to_install = {}};
    if (segment.weights.new_offset_bytes) {
      of_segment.to_install[*segment.weights.new_offset_bytes] =
          segment.elems * protocol::SizeBytes(job.layout->spec().dtype);
    }
    for (const SumUnit& unit : units) {
      Merge({.elems = {},
             .used = {{{segment.param, place.partition}, unit.tokens}},
             .to_install = {}},
            of_segment);
    }
    Merge(of_segment, made);
  }
  if (a.pass == UpdatePass::kWhole && dropped_.erase(a.task) == 0) {
    job.updates[a.identity_before.block] = std::move(made);
  }
}

void NodeModel::Merge(const BlockUpdate& update, BlockUpdate& all) {
  for (const auto& [param, elems] : update.elems) all.elems[param] += elems;
  all.to_install.insert(update.to_install.begin(), update.to_install.end());
  for (const auto& [of, tokens] : update.used) {
    const auto [used, first] = all.used.emplace(of, tokens);
    if (first) continue;
    // Keeps ranks that are in every unit. Other ranks had a gradient of a neighbouring parameter only.
    std::erase_if(used->second, [&tokens = tokens](const GradientToken& token) {
      return std::none_of(tokens.begin(), tokens.end(), [&token](const GradientToken& other) {
        return other.rank == token.rank && other.session == token.session &&
               other.attempt == token.attempt && other.pass == token.pass;
      });
    });
  }
}

void NodeModel::Apply(const InstallWeights& a, TaskDone&) {
  JobMemory& job = jobs_[a.job];
  if (!job.is_updating) Fault("weights are installed before the decision");
  std::map<uint64_t, uint64_t>& to_install = job.updates[a.block].to_install;
  for (const BytesCopy& copy : a.copies) {
    const auto made = to_install.find(copy.from_bytes);
    job.weights_steps[copy.to_bytes] = {copy.size_bytes, job.committed_step + 1};
    // If only some partitions are in the arena, their offsets are not the layout's.
    const bool is_whole = !job.has_paged_sums && job.weights_bytes >= job.layout->weights_bytes();
    const auto to = is_whole ? WeightsAt(job, copy.to_bytes) : std::nullopt;
    if (made == to_install.end() || made->second != copy.size_bytes ||
        (to && !job.updates[a.block].HasPartition(to->partition))) {
      Fault(absl::StrCat("other weights are installed than block ", a.block, " has made"));
      continue;
    }
    to_install.erase(made);
  }
}

void NodeModel::Dropped(const EarlyUpdatesDropped& a) {
  JobMemory& job = jobs_[a.job];
  for (const uint64_t block : a.blocks) {
    job.updates.erase(block);
    job.early.erase(block);
    for (const auto& [task, action] : running_) {
      const auto* update = std::get_if<UpdateBlock>(&action);
      const auto* write = std::get_if<WriteBlock>(&action);
      if (update != nullptr && update->job == a.job && update->identity_before.block == block) {
        dropped_.insert(task);
      }
      if (write != nullptr && write->job == a.job && write->identity.block == block) {
        dropped_.insert(task);
      }
    }
  }
}

void NodeModel::Apply(const WriteBlock& a, TaskDone&) {
  if (!(staging_[a.place.staging_slot] == TokenOf(a.identity, a.checksum))) {
    Fault("a slot was written that does not hold its block");
  }
  Write(*a.place.slot, staging_[a.place.staging_slot]);
  JobMemory& job = jobs_[a.job];
  const bool relocates = !job.is_updating && job.published.contains(a.identity.block) &&
                         a.identity.written_step <= job.committed_step;
  const bool between_steps = job.masters_set.erase(a.identity.block) > 0 || relocates;
  if (dropped_.erase(a.task) > 0) return;
  const bool is_early = !job.is_updating && a.identity.written_step == job.committed_step + 1;
  auto& slots = between_steps ? job.published : is_early ? job.early : job.written;
  slots[a.identity.block] = *a.place.slot;
}

void NodeModel::Apply(const SetState& a, TaskDone& done) {
  if (!a.in_block || a.in_block->place.resident) return;
  const SetState::InBlock& block = *a.in_block;
  BlockToken& staged = staging_[block.place.staging_slot];
  const bool fresh = block.identity.written_step == 0 && !block.place.slot;
  if (!fresh && !(staged == TokenOf(block.identity, block.checksum))) {
    Fault("masters were set in a slot that does not hold its block");
  }
  done.checksum = ++checksums_;
  done.weights_digests =
      DigestsOf(done.checksum, jobs_[a.job].layout->spec(), block.states_elems, block.block_bytes);
  staged = TokenOf(block.identity, done.checksum);
  jobs_[a.job].masters_set.insert(block.identity.block);
}

// Weights are loaded as in the daemon, but in this model every page's digest is the block's checksum.
void NodeModel::Apply(const LoadWeights& a, TaskDone&) {
  JobMemory& job = jobs_[a.job];
  const BlockToken& block = disk_[a.slot];
  const bool is_it = block.job == a.job && block.block == a.block &&
                     a.first_page < a.digests->size() &&
                     (*a.digests)[a.first_page] == block.checksum;
  if (!is_it) Fault("weights were loaded from a slot that does not hold their block");
  for (const BytesCopy& copy : a.copies) {
    CheckHeld(a.job, copy.to_bytes, copy.size_bytes);
    std::erase_if(job.loaded, [&copy](const auto& entry) {
      return entry.first < copy.to_bytes + copy.size_bytes &&
             copy.to_bytes < entry.first + entry.second.bytes;
    });
    job.loaded[copy.to_bytes] = {
        .bytes = copy.size_bytes, .partition = a.partition, .block = block};
  }
  job.loaded_partitions.insert(a.partition);
}

void NodeModel::Apply(const DecodeState& a, TaskDone&) {
  if (a.place.resident || !a.place.slot) return;
  if (!(staging_[a.place.staging_slot] == TokenOf(a.identity, a.checksum))) {
    Fault("a state was read from a slot that does not hold its block");
  }
}

void NodeModel::Published(const StepPublished& a) {
  JobMemory& job = jobs_[a.job];
  const bool masters = a.step == 0 && !std::exchange(job.has_published, true);
  if (!masters && a.step != job.committed_step + 1) Fault("a step was published twice or left out");
  job.committed_step = a.step;
  job.is_updating = false;
  for (const auto& [block, slot] : job.written) {
    if (disk_[slot].written_step != a.step) Fault("a block was published that is not written");
    job.published[block] = slot;
  }
  job.written.clear();
  BlockUpdate all;
  for (const auto& [block, update] : std::exchange(job.updates, {})) {
    if (!update.to_install.empty()) {
      Fault(absl::StrCat("new weights of block ", block, " were not installed"));
    }
    Merge(update, all);
  }
  for (const auto& [param, elems] : all.elems) {
    uint64_t held = 0;  // elements that this node holds
    for (const protocol::BoxPlace& place : job.layout->boxes()) {
      if (place.box.param == param) held += place.box.elems();
    }
    if (elems != held) {
      Fault(absl::StrCat("step ", a.step, " updated ", elems, " elements of parameter ", param,
                         " of ", job.layout->params()[param].elems));
    }
  }
  job.history[a.step] = WrittenSteps(a.job);
  job.committed.clear();
  for (const auto& [of, tokens] : all.used) {
    const auto& [param, partition] = of;
    const protocol::PartitionPlace& place = job.layout->partitions()[partition];
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto turn = [](const GradientToken& token) {
        return std::pair(token.pass, token.rank);
      };
      if (i > 0 && turn(tokens[i]) <= turn(tokens[i - 1])) {
        Fault("passes and ranks were not added in order");
      }
      if (tokens[i].step != a.step) Fault("a gradient of another step was used");
      if (tokens[i].attempt != tokens[0].attempt) Fault("gradients of two attempts were used");
      if (tokens[i].partition != partition) Fault("a gradient of another partition was used");
      if (!job.layout->is_shared() && tokens[i].rank != place.owner) {
        Fault("a gradient of a rank that does not own the partition was used");
      }
    }
    auto& committed = job.committed[param];
    committed.insert(committed.end(), tokens.begin(), tokens.end());
  }
}

}  // namespace forebay::testing
