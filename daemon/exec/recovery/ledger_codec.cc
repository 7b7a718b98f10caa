// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/ledger_codec.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "daemon/core/base/job_name.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/durable_content.h"
#include "daemon/exec/block_tasks.h"
#include "daemon/exec/recovery/ledger.capnp.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "protocol/layout_codec.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::kPageBytes;
using protocol::Layout;
using protocol::MakeError;

constexpr uint32_t kVersion = 2;
constexpr uint32_t kVersionWithoutBefore = 1;  // a version that older programs read
constexpr int kNestingMax = 8;
constexpr uint64_t kBlockElemsMax = uint64_t{1} << 26;  // of update.block_elems

absl::Status Corrupt(std::string_view what) {
  return MakeError(ErrorId::kCorrupt,
                   absl::StrCat("the ledger of the swap volume: ", std::string(what)),
                   "restore its jobs from a checkpoint, then start with forebayd --reclaim");
}

// ------------------------------------------------------------------------------------------ encoding

absl::Status WriteBytes(const DurableJob& job, const DurableBytes& bytes,
                        schema::Bytes::Builder to) {
  if (bytes.slot.size_bytes != job.slot_bytes) {
    return MakeError(ErrorId::kInternal,
                     absl::StrCat("job ", job.name, ": a slot of ", bytes.slot.size_bytes,
                                  " bytes among slots of ", job.slot_bytes));
  }
  to.setOffsetBytes(bytes.slot.offset_bytes);
  to.setChecksum(bytes.checksum);
  to.setWrittenStep(bytes.written_step);
  to.setPath(bytes.slot.path + 1);
  return absl::OkStatus();
}

absl::Status WriteBlocks(const DurableJob& job, schema::Job::Builder to) {
  size_t digest_pages = 0;
  auto blocks = to.initBlocks(static_cast<unsigned>(job.blocks.size()));
  for (unsigned i = 0; i < blocks.size(); ++i) {
    const std::optional<DurableBytes>& block = job.blocks[i];
    if (!block) continue;
    RETURN_IF_ERROR(WriteBytes(job, *block, blocks[i]));
    const size_t pages = block->weights_digests ? block->weights_digests->size() : 0;
    blocks[i].setDigestPages(static_cast<uint32_t>(pages));
    digest_pages += pages;
  }
  auto digests = to.initDigests(static_cast<unsigned>(digest_pages));
  unsigned next = 0;
  for (const std::optional<DurableBytes>& block : job.blocks) {
    if (!block || !block->weights_digests) continue;
    for (const uint64_t digest : *block->weights_digests) digests.set(next++, digest);
  }
  auto weights = to.initWeights(static_cast<unsigned>(job.weights.size()));
  for (unsigned i = 0; i < weights.size(); ++i) {
    RETURN_IF_ERROR(WriteBytes(job, job.weights[i], weights[i]));
  }
  return absl::OkStatus();
}

capnp::Data::Reader DataOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

void WriteSlots(const std::vector<nvme::Slot>& slots, capnp::List<schema::Bytes>::Builder to) {
  for (unsigned i = 0; i < to.size(); ++i) {
    to[i].setOffsetBytes(slots[i].offset_bytes);
    to[i].setPath(slots[i].path + 1);
  }
}

void WriteKept(const KeptMemory& kept, schema::Kept::Builder to) {
  auto resident = to.initResident(static_cast<unsigned>(kept.resident.size()));
  for (unsigned i = 0; i < resident.size(); ++i) resident.set(i, kept.resident[i]);
  auto steps = to.initWrittenSteps(static_cast<unsigned>(kept.written_steps.size()));
  for (unsigned i = 0; i < steps.size(); ++i) steps.set(i, kept.written_steps[i]);
  to.setWeightsBytes(kept.weights_bytes);
  to.setStepBytes(kept.step_bytes);
  to.setDramBytes(kept.dram_bytes);
  to.setWorldRanks(kept.session.world_ranks);
  to.setGradArenaBytes(kept.session.grad_arena_bytes);
  to.setExtraStateBytes(kept.session.extra_state_bytes);
  to.setActivationBytes(kept.session.activation_bytes);
  to.setTrace(kept.session.trace);
  to.setAccumulate(kept.session.accumulate);
  to.setEarlyUpdates(kept.session.early_updates);
  to.setEarlyWeightsSlots(kept.early_weights_slots);
  to.setSumFrames(kept.sum_frames);
  to.setAttempt(kept.attempt);
  to.setWasKilled(true);
  to.setNorm(kept.norm);
  to.setClipped(kept.clipped);
  to.setOverflowed(kept.overflowed);
  to.setSummary(DataOf(kept.summary));
  WriteSlots(kept.spare_slots, to.initSpareSlots(static_cast<unsigned>(kept.spare_slots.size())));
  WriteSlots(kept.sum_slots, to.initSumSlots(static_cast<unsigned>(kept.sum_slots.size())));
  if (!kept.sum_slots.empty()) to.setSumSlotBytes(kept.sum_slots.front().size_bytes);
  auto leases = to.initLeases(static_cast<unsigned>(kept.leases.size()));
  for (unsigned i = 0; i < leases.size(); ++i) {
    leases[i].setLease(kept.leases[i].lease);
    leases[i].setOffsetBytes(kept.leases[i].offset_bytes);
    leases[i].setRank(kept.leases[i].rank);
    leases[i].setPartition(kept.leases[i].partition);
  }
}

// Writes the fields that change with each step.
absl::Status WriteStep(const DurableJob& job, schema::Job::Builder to) {
  to.setRun({job.run.c_str(), job.run.size()});
  to.setStep(job.step);
  auto updates = to.initParamUpdates(static_cast<unsigned>(job.param_updates.size()));
  for (unsigned i = 0; i < updates.size(); ++i) updates.set(i, job.param_updates[i]);
  auto trace = to.initTrace(static_cast<unsigned>(job.trace.size()));
  for (unsigned i = 0; i < trace.size(); ++i) trace.set(i, job.trace[i]);
  if (job.extra_states != nullptr) {
    auto states = to.initExtraStates(static_cast<unsigned>(job.extra_states->size()));
    for (unsigned i = 0; i < states.size(); ++i) states.set(i, DataOf((*job.extra_states)[i]));
  }
  return WriteBlocks(job, to);
}

enum class Memory : uint8_t { kLeftOut, kWritten };

absl::Status WriteJob(const DurableJob& job, Memory memory, schema::Job::Builder to) {
  to.setId(job.id);
  to.setName(job.name.c_str());
  to.setUid(job.uid);
  to.setDurability(protocol::FormatDurability(job.durability).c_str());
  ASSIGN_OR_RETURN(const std::vector<std::byte> layout, protocol::EncodeLayout(job.layout->spec()));
  to.setLayout(DataOf(layout));
  to.setWorldSize(job.world_size);
  to.setBlockElems(job.block_elems);
  to.setSlotBytes(job.slot_bytes);
  auto on_swap = to.initWeightsOnSwap(static_cast<unsigned>(job.weights_on_swap.size()));
  for (unsigned i = 0; i < on_swap.size(); ++i) on_swap.set(i, job.weights_on_swap[i]);
  if (job.kept && memory == Memory::kWritten) WriteKept(*job.kept, to.initKept());
  if (job.before != nullptr) RETURN_IF_ERROR(WriteStep(*job.before, to.initBefore()));
  return WriteStep(job, to);
}

void WritePlace(const VolumePlace& place, schema::Ledger::Builder to) {
  if (place.paths.empty()) return;
  if (place.machine != MachineId{}) to.setMachine(DataOf(place.machine));
  auto paths = to.initPaths(static_cast<unsigned>(place.paths.size()));
  for (unsigned i = 0; i < paths.size(); ++i) {
    paths[i].setName({place.paths[i].name.c_str(), place.paths[i].name.size()});
    paths[i].setInode(place.paths[i].inode);
    paths[i].setDisk({place.paths[i].disk.c_str(), place.paths[i].disk.size()});
  }
}

// `write_rest` writes all fields other than version, nonce, last job and jobs.
absl::StatusOr<std::vector<std::byte>> Encode(
    const DurableNode& node, uint64_t nonce, Memory memory,
    absl::FunctionRef<void(schema::Ledger::Builder)> write_rest) {
  std::vector<std::byte> bytes;
  absl::Status status;
  const auto exception = kj::runCatchingExceptions([&] {
    capnp::MallocMessageBuilder builder;
    auto ledger = builder.initRoot<schema::Ledger>();
    const bool has_before =
        std::ranges::any_of(node.jobs, [](const auto& job) { return job->before != nullptr; });
    ledger.setVersion(has_before ? kVersion : kVersionWithoutBefore);
    ledger.setNonce(nonce);
    ledger.setLastJob(node.last_job);
    write_rest(ledger);
    auto jobs = ledger.initJobs(static_cast<unsigned>(node.jobs.size()));
    for (unsigned i = 0; i < jobs.size() && status.ok(); ++i) {
      status = WriteJob(*node.jobs[i], memory, jobs[i]);
    }
    if (!status.ok()) return;
    const kj::Array<capnp::word> words = capnp::messageToFlatArray(builder);
    const auto* begin = reinterpret_cast<const std::byte*>(words.asBytes().begin());
    bytes.assign(begin, begin + words.asBytes().size());
  });
  KJ_IF_MAYBE (e, exception) {
    return MakeError(ErrorId::kLimit,
                     absl::StrCat("the ledger cannot be encoded: ", e->getDescription().cStr()),
                     "delete jobs that are not needed any more");
  }
  RETURN_IF_ERROR(status);
  return bytes;
}

// ------------------------------------------------------------------------------------------ decoding

// Returns a lower bound of the number of blocks, without a BlockMap: the memory of a BlockMap is allocated only if the ledger
// names as many blocks.
uint64_t BlocksMin(const Layout& layout, const DurableJob& job) {
  uint64_t blocks = 0;
  for (const protocol::OwnerPlace& owner : layout.owners()) {
    blocks += (owner.states_elems + job.block_elems - 1) / job.block_elems;
  }
  if (job.weights_on_swap.empty()) return blocks;
  const protocol::LayoutSpec& spec = layout.spec();
  const uint64_t full_bytes =
      protocol::RoundUp(job.block_elems * protocol::SizeBytes(spec.dtype), kPageBytes) +
      BlockBytes(protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype), job.block_elems);
  return blocks + BlockMap::FrozenBytes(layout, job.weights_on_swap) / full_bytes;
}

// Reads one job of a message; errors name it.
class JobReader {
 public:
  explicit JobReader(schema::Job::Reader from) : from_(from) {}

  absl::StatusOr<DurableJob> Read(JobId last_job) {
    RETURN_IF_ERROR(ReadName(last_job));
    RETURN_IF_ERROR(ReadLayout());
    RETURN_IF_ERROR(ReadSizes());
    RETURN_IF_ERROR(ReadStep());
    if (from_.hasKept()) RETURN_IF_ERROR(ReadKept());
    if (from_.hasBefore()) {
      ASSIGN_OR_RETURN(DurableJob before, JobReader(from_.getBefore()).ReadBefore(job_));
      job_.before = std::make_shared<const DurableJob>(std::move(before));
    }
    return std::move(job_);
  }

 private:
  absl::Status Wrong(std::string_view what) const {
    return Corrupt(
        absl::StrCat("job ", job_.id, " (", absl::CHexEscape(job_.name), "): ", std::string(what)));
  }
  absl::Status WrongCount(std::string_view of_what, uint64_t have, uint64_t want) const {
    return Wrong(absl::StrCat(have, " ", std::string(of_what), "; its layout has ", want));
  }

  absl::Status ReadName(JobId last_job) {
    job_.id = from_.getId();
    const capnp::Text::Reader name = from_.getName();
    job_.name.assign(name.begin(), std::min<size_t>(name.size(), kJobNameBytesMax));
    job_.uid = from_.getUid();
    if (job_.id == 0 || job_.id > last_job) {
      return Wrong(absl::StrCat("ids up to ", last_job, " were given out"));
    }
    const std::string_view whole(name.begin(), name.size());
    const auto parsed = ParseJobName(whole, job_.uid, OtherUsers::kRefused);
    if (!parsed.ok() || parsed->name != whole) return Wrong("not a name of a job");
    const capnp::Text::Reader durability = from_.getDurability();
    const auto level = protocol::ParseDurability({durability.begin(), durability.size()});
    if (!level.ok()) return Wrong(std::string(level.status().message()));
    job_.durability = *level;
    return absl::OkStatus();
  }

  absl::Status ReadLayout() {
    const capnp::Data::Reader data = from_.getLayout();
    auto spec =
        protocol::DecodeLayout({reinterpret_cast<const std::byte*>(data.begin()), data.size()});
    if (!spec.ok())
      return Wrong(absl::StrCat("its layout: ", std::string(spec.status().message())));
    auto layout = Layout::Create(*std::move(spec));
    if (!layout.ok()) {
      return Wrong(absl::StrCat("its layout: ", std::string(layout.status().message())));
    }
    job_.layout = std::make_shared<const Layout>(*std::move(layout));
    return absl::OkStatus();
  }

  // Reads the durable step before that of `job`.
  absl::StatusOr<DurableJob> ReadBefore(const DurableJob& job) {
    job_.id = job.id;
    job_.name = job.name;
    job_.uid = job.uid;
    job_.durability = job.durability;
    job_.layout = job.layout;
    job_.world_size = job.world_size;
    job_.block_elems = job.block_elems;
    job_.slot_bytes = job.slot_bytes;
    job_.weights_on_swap = job.weights_on_swap;
    RETURN_IF_ERROR(ReadStep());
    if (job_.step < job.step && from_.getWeightsOnSwap().size() == 0 && !from_.hasKept()) {
      return std::move(job_);
    }
    return Wrong(absl::StrCat("step ", job_.step, " is before its step ", job.step));
  }

  absl::Status ReadStep() {
    const capnp::Text::Reader run = from_.getRun();
    if (run.size() > kRunTokenBytesMax) return Wrong("the token of its run is too long");
    job_.run.assign(run.begin(), run.size());
    job_.step = from_.getStep();
    RETURN_IF_ERROR(ReadLists());
    RETURN_IF_ERROR(ReadBlocks());
    return ReadWeights();
  }

  absl::Status ReadSizes() {
    job_.world_size = from_.getWorldSize();
    if (job_.world_size == 0 || job_.world_size > protocol::kWorldMax) {
      return Wrong(absl::StrCat(job_.world_size, " ranks"));
    }
    job_.block_elems = from_.getBlockElems();
    if (job_.block_elems == 0 || job_.block_elems > kBlockElemsMax ||
        job_.block_elems % job_.layout->states_align_elems() != 0) {
      return Wrong(absl::StrCat("blocks of ", job_.block_elems, " elements"));
    }
    job_.slot_bytes = from_.getSlotBytes();
    const bool has_slots = job_.slot_bytes > 0 || IsInMemoryAlone();
    if (!has_slots || job_.slot_bytes % kPageBytes != 0) {
      return Wrong(absl::StrCat("slots of ", job_.slot_bytes, " bytes"));
    }
    const auto on_swap = from_.getWeightsOnSwap();
    const size_t partitions = job_.layout->partitions().size();
    if (on_swap.size() > 0 && (on_swap.size() != partitions || job_.layout->is_shared())) {
      return WrongCount("partitions with a place of their weights", on_swap.size(), partitions);
    }
    for (const bool one : on_swap) job_.weights_on_swap.push_back(one);
    return absl::OkStatus();
  }

  absl::Status ReadLists() {
    const size_t partitions = job_.layout->partitions().size();
    const auto updates = from_.getParamUpdates();
    if (updates.size() != job_.layout->params().size()) {
      return WrongCount("parameters with steps", updates.size(), job_.layout->params().size());
    }
    for (const uint64_t steps : updates) {
      // Counts of loaded states continue from the job that they came from.
      if (steps > protocol::kUpdatesMax + job_.step) {
        return Wrong(
            absl::StrCat("a parameter with ", steps, " updates behind ", job_.step, " steps"));
      }
      job_.param_updates.push_back(steps);
    }
    const auto trace = from_.getTrace();
    if (trace.size() > partitions) return WrongCount("partitions traced", trace.size(), partitions);
    for (const uint32_t partition : trace) {
      if (partition >= partitions) return Wrong(absl::StrCat("a trace of partition ", partition));
      job_.trace.push_back(partition);
    }
    return ReadExtraStates();
  }

  absl::Status ReadExtraStates() {
    const auto states = from_.getExtraStates();
    if (states.size() > protocol::kWorldMax) {
      return Wrong(absl::StrCat("extra_state of ", states.size(), " ranks"));
    }
    std::vector<std::vector<std::byte>> by_rank;
    for (const capnp::Data::Reader state : states) {
      const auto* begin = reinterpret_cast<const std::byte*>(state.begin());
      by_rank.emplace_back(begin, begin + state.size());
    }
    job_.extra_states =
        std::make_shared<const std::vector<std::vector<std::byte>>>(std::move(by_rank));
    return absl::OkStatus();
  }

  // True if the arenas of the job hold content that no slot holds.
  bool IsInMemoryAlone() const {
    return from_.hasKept() && (from_.getKept().getWasKilled() ||
                               job_.durability.level == protocol::DurabilityLevel::kMemory);
  }

  absl::StatusOr<nvme::Slot> ReadSlot(schema::Bytes::Reader from, uint64_t size_bytes) const {
    const nvme::Slot slot{.path = from.getPath() - 1,
                          .offset_bytes = from.getOffsetBytes(),
                          .size_bytes = size_bytes};
    if (slot.path < nvme::Volume::kPathsMax && slot.offset_bytes % kPageBytes == 0 &&
        slot.size_bytes > 0 && slot.offset_bytes <= UINT64_MAX - slot.size_bytes) {
      return slot;
    }
    return Wrong(absl::StrCat("a slot at offset ", slot.offset_bytes, " of swap path ", slot.path));
  }

  absl::StatusOr<DurableBytes> ReadBytes(schema::Bytes::Reader from) const {
    ASSIGN_OR_RETURN(const nvme::Slot slot, ReadSlot(from, job_.slot_bytes));
    const DurableBytes bytes{
        .slot = slot, .checksum = from.getChecksum(), .written_step = from.getWrittenStep()};
    if (bytes.written_step > job_.step) {
      return Wrong(absl::StrCat("a slot of step ", bytes.written_step, " at step ", job_.step));
    }
    return bytes;
  }

  absl::Status ReadBlocks() {
    const auto blocks = from_.getBlocks();
    const uint64_t blocks_min = BlocksMin(*job_.layout, job_);
    if (blocks_min > blocks.size()) return WrongCount("blocks", blocks.size(), blocks_min);
    const BlockMap map(job_.layout, job_.block_elems, job_.weights_on_swap);
    if (map.blocks() != blocks.size()) return WrongCount("blocks", blocks.size(), map.blocks());
    const auto digests = from_.getDigests();
    unsigned next_digest = 0;
    for (uint32_t i = 0; i < map.blocks(); ++i) {
      const schema::Bytes::Reader block = blocks[i];
      std::optional<DurableBytes>& read = job_.blocks.emplace_back();
      if (block.getPath() == 0) continue;
      ASSIGN_OR_RETURN(read, ReadBytes(block));
      if (map.bytes(i) > job_.slot_bytes) {
        return Wrong(
            absl::StrCat("block ", i, " has ", map.bytes(i), " bytes, its slot ", job_.slot_bytes));
      }
      const uint64_t pages =
          map.has_weights(i) ? (map.bytes(i) - map.weights_plane_offset(i)) / kPageBytes : 0;
      if (block.getDigestPages() != pages || pages > digests.size() - next_digest) {
        return WrongCount(absl::StrCat("pages of weights in block ", i), block.getDigestPages(),
                          pages);
      }
      if (pages == 0) continue;
      std::vector<uint64_t> of_block;
      of_block.reserve(pages);
      for (uint64_t page = 0; page < pages; ++page) of_block.push_back(digests[next_digest++]);
      read->weights_digests = std::make_shared<const std::vector<uint64_t>>(std::move(of_block));
    }
    if (next_digest == digests.size()) return absl::OkStatus();
    return WrongCount("digests", digests.size(), next_digest);
  }

  absl::Status ReadWeights() {
    const auto weights = from_.getWeights();
    const uint64_t bytes = WeightsInDram(*job_.layout, job_.weights_on_swap);
    uint64_t parts = 0;
    if (!IsInMemoryAlone()) {
      parts = bytes / job_.slot_bytes + (bytes % job_.slot_bytes > 0 ? 1 : 0);
    }
    if (weights.size() != parts) return WrongCount("parts of weights", weights.size(), parts);
    for (const schema::Bytes::Reader part : weights) {
      if (part.getDigestPages() != 0) return Wrong("digests of a part of its weights");
      ASSIGN_OR_RETURN(DurableBytes read, ReadBytes(part));
      job_.weights.push_back(std::move(read));
    }
    return absl::OkStatus();
  }

  absl::Status ReadSlots(capnp::List<schema::Bytes>::Reader from, uint64_t size_bytes,
                         std::vector<nvme::Slot>& to) const {
    for (const schema::Bytes::Reader one : from) {
      ASSIGN_OR_RETURN(const nvme::Slot slot, ReadSlot(one, size_bytes));
      to.push_back(slot);
    }
    return absl::OkStatus();
  }

  absl::Status ReadKept() {
    const schema::Kept::Reader from = from_.getKept();
    KeptMemory kept{.resident = {},
                    .written_steps = {},
                    .weights_bytes = from.getWeightsBytes(),
                    .step_bytes = from.getStepBytes(),
                    .dram_bytes = from.getDramBytes(),
                    .session = {.world_size = job_.world_size,
                                .world_ranks = from.getWorldRanks(),
                                .grad_arena_bytes = from.getGradArenaBytes(),
                                .extra_state_bytes = from.getExtraStateBytes(),
                                .activation_bytes = from.getActivationBytes(),
                                .trace = from.getTrace(),
                                .accumulate = from.getAccumulate(),
                                .early_updates = from.getEarlyUpdates(),
                                .durability = job_.durability},
                    .early_weights_slots = from.getEarlyWeightsSlots(),
                    .sum_frames = from.getSumFrames(),
                    .attempt = from.getAttempt(),
                    .spare_slots = {},
                    .sum_slots = {},
                    .durable = nullptr,
                    .norm = from.getNorm(),
                    .clipped = from.getClipped(),
                    .overflowed = from.getOverflowed()};
    const capnp::Data::Reader summary = from.getSummary();
    const auto* const summary_begin = reinterpret_cast<const std::byte*>(summary.begin());
    kept.summary.assign(summary_begin, summary_begin + summary.size());
    const auto resident = from.getResident();
    if (resident.size() != job_.blocks.size()) {
      return WrongCount("blocks with a place", resident.size(), job_.blocks.size());
    }
    for (const bool one : resident) kept.resident.push_back(one);
    const auto steps = from.getWrittenSteps();
    if (steps.size() != resident.size()) {
      return WrongCount("blocks with a step", steps.size(), resident.size());
    }
    for (const uint64_t step : steps) kept.written_steps.push_back(step);
    RETURN_IF_ERROR(ReadSlots(from.getSpareSlots(), job_.slot_bytes, kept.spare_slots));
    RETURN_IF_ERROR(ReadSlots(from.getSumSlots(), from.getSumSlotBytes(), kept.sum_slots));
    for (const auto lease : from.getLeases()) {
      kept.leases.push_back({.lease = lease.getLease(),
                             .rank = lease.getRank(),
                             .partition = lease.getPartition(),
                             .offset_bytes = lease.getOffsetBytes()});
    }
    job_.kept = std::move(kept);
    return absl::OkStatus();
  }

  schema::Job::Reader from_;
  DurableJob job_;
};

absl::Status CheckSlots(const DurableNode& node) {
  std::vector<nvme::Slot> slots;
  for (const auto& job : node.jobs) {
    const std::vector<nvme::Slot> of_job = job->AllSlots();
    slots.insert(slots.end(), of_job.begin(), of_job.end());
  }
  std::ranges::sort(slots);
  for (size_t i = 1; i < slots.size(); ++i) {
    const nvme::Slot& before = slots[i - 1];
    if (before.path != slots[i].path ||
        before.offset_bytes + before.size_bytes <= slots[i].offset_bytes) {
      continue;
    }
    return Corrupt(absl::StrCat("two slots at offset ", slots[i].offset_bytes, " of swap path ",
                                slots[i].path));
  }
  return absl::OkStatus();
}

absl::StatusOr<VolumePlace> ReadPlace(schema::Ledger::Reader ledger) {
  VolumePlace place;
  const auto paths = ledger.getPaths();
  if (paths.size() > nvme::Volume::kPathsMax) {
    return Corrupt(absl::StrCat(paths.size(), " swap paths"));
  }
  const capnp::Data::Reader machine = ledger.getMachine();
  if (machine.size() != 0 && (machine.size() != place.machine.size() || paths.size() == 0)) {
    return Corrupt(absl::StrCat("the id of a machine has ", machine.size(), " bytes"));
  }
  std::copy_n(machine.begin(), machine.size(), reinterpret_cast<kj::byte*>(place.machine.data()));
  for (const schema::Path::Reader path : paths) {
    const capnp::Text::Reader name = path.getName();
    const capnp::Text::Reader disk = path.getDisk();
    if (name.size() == 0 || name.size() >= PATH_MAX || disk.size() >= PATH_MAX) {
      return Corrupt(absl::StrCat("the name of swap path ", place.paths.size(), " has ",
                                  name.size(), " bytes, that of its disk ", disk.size()));
    }
    place.paths.push_back({.name = std::string(name.begin(), name.size()),
                           .inode = path.getInode(),
                           .disk = std::string(disk.begin(), disk.size())});
  }
  return place;
}

absl::StatusOr<DecodedLedger> Read(schema::Ledger::Reader ledger) {
  const uint32_t version = ledger.getVersion();
  if (version > kVersion) {
    return MakeError(ErrorId::kSwapPath,
                     absl::StrCat("the ledger of the swap volume has version ", version,
                                  ", made by a newer forebayd; this one reads version ", kVersion),
                     "start the forebayd that made it; forebayd --reclaim gives its jobs up");
  }
  if (version == 0) return Corrupt("version 0");
  DecodedLedger decoded{.node = {.last_job = ledger.getLastJob(), .last_lease = 0, .jobs = {}},
                        .nonce = ledger.getNonce()};
  ASSIGN_OR_RETURN(decoded.place, ReadPlace(ledger));
  const auto jobs = ledger.getJobs();
  if (jobs.size() > kJobsMax) return Corrupt(absl::StrCat(jobs.size(), " jobs"));
  std::set<JobName> names;
  std::set<JobId> ids;
  for (const schema::Job::Reader from : jobs) {
    ASSIGN_OR_RETURN(DurableJob job, JobReader(from).Read(decoded.node.last_job));
    if (!ids.insert(job.id).second || !names.insert({.uid = job.uid, .name = job.name}).second) {
      return Corrupt(absl::StrCat("two jobs with id ", job.id, " or name ", job.name));
    }
    if (from.hasKept() && !from.getKept().getWasKilled()) decoded.handed_over.insert(job.id);
    decoded.node.jobs.push_back(std::make_shared<const DurableJob>(std::move(job)));
  }
  RETURN_IF_ERROR(CheckSlots(decoded.node));
  return decoded;
}

}  // namespace

absl::StatusOr<std::vector<std::byte>> EncodeLedger(const DurableNode& node, uint64_t nonce,
                                                    const VolumePlace& place) {
  return Encode(node, nonce, Memory::kLeftOut,
                [&](schema::Ledger::Builder ledger) { WritePlace(place, ledger); });
}

absl::StatusOr<std::vector<std::byte>> EncodeKept(const DurableNode& node, uint64_t nonce) {
  return Encode(node, nonce, Memory::kWritten, [](schema::Ledger::Builder) {});
}

absl::StatusOr<DecodedLedger> DecodeLedger(std::span<const std::byte> bytes) {
  if (bytes.empty() || bytes.size() % sizeof(capnp::word) != 0) {
    return Corrupt(absl::StrCat(bytes.size(), " bytes, not a multiple of 8"));
  }
  auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), bytes.data(), bytes.size());
  capnp::ReaderOptions options;
  // The limit allows each word once, and as many words again plus 64 for lists without elements.
  options.traversalLimitInWords = 2 * words.size() + 64;
  options.nestingLimit = kNestingMax;
  absl::StatusOr<DecodedLedger> decoded = Corrupt("not a message");
  const auto exception = kj::runCatchingExceptions([&] {
    capnp::FlatArrayMessageReader reader(words, options);
    decoded = Read(reader.getRoot<schema::Ledger>());
  });
  KJ_IF_MAYBE (e, exception) return Corrupt(e->getDescription().cStr());
  return decoded;
}

absl::StatusOr<DecodedLedger> DecodeLedgerOf(const nvme::Volume& volume) {
  ASSIGN_OR_RETURN(DecodedLedger decoded, DecodeLedger(volume.ledger()));
  std::vector<nvme::Slot> named = SlotsOf(decoded.node);
  std::vector<nvme::Slot> kept(volume.ledger_slots().begin(), volume.ledger_slots().end());
  std::ranges::sort(named);
  std::ranges::sort(kept);
  if (named == kept) return decoded;
  return MakeError(
      ErrorId::kCorrupt,
      absl::StrFormat("swap path 0 (%s): its ledger names %d slots, its volume keeps %d, others",
                      volume.path_name(0), named.size(), kept.size()),
      "restore its jobs from a checkpoint, then start with forebayd --reclaim");
}

}  // namespace forebay::daemon
