// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/left_jobs.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/node/killed_jobs.h"
#include "daemon/exec/clock.h"
#include "daemon/exec/recovery/record_before.h"
#include "daemon/exec/recovery/release_before.h"
#include "daemon/exec/session_io.h"
#include "daemon/exec/swap_space.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {

namespace {

constexpr char kRecordPrefix[] = "record.";

using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

absl::StatusOr<UniqueFd> Take(const std::string& name, const DurableJob& job,
                              DescriptorsByName& from) {
  auto node = from.extract(name);
  if (!node.empty()) return std::move(node.mapped());
  return MakeError(ErrorId::kCorrupt, absl::StrCat("job ", job.name, ": of what the daemon before ",
                                                   "has left, ", name, " is missing"));
}

// Frees the memory of the arena outside `parts`. A daemon that was killed may have populated parts that its record does not
// name, or not yet freed parts that the record has dropped.
absl::Status FreeBeside(std::vector<StatePart> parts, const UniqueFd& fd) {
  ASSIGN_OR_RETURN(const uint64_t size, SizeOf(fd));
  parts.push_back({.offset_bytes = size, .bytes = 0});
  std::ranges::sort(parts, {}, &StatePart::offset_bytes);
  uint64_t end = 0;
  for (const StatePart& part : parts) {
    if (part.offset_bytes > end &&
        ::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(end),
                    static_cast<off_t>(part.offset_bytes - end)) != 0) {
      return MakeError(ErrorId::kInternal, protocol::ErrnoText("free memory of an arena", errno));
    }
    end = std::max(end, part.offset_bytes + part.bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<AdoptedJob> AdoptArenas(const DurableJob& job, const ArenaPolicy& policy,
                                       DescriptorsByName& from) {
  AdoptedJob adopted{.id = job.id, .memory = {}};
  JobMemory& memory = adopted.memory;
  memory.name = {.uid = job.uid, .name = job.name};
  memory.layout = job.layout;
  const auto adopt = [](const pinned_mem::ArenaOptions& options,
                        UniqueFd fd) -> absl::StatusOr<ArenaRegistry::Arena> {
    ASSIGN_OR_RETURN(auto arena, pinned_mem::PinnedArena::Adopt(options, std::move(fd)));
    // Holds until Recovery::Own(): if the daemon fails to start, the pages retain their bytes.
    arena->SetAtEnd(pinned_mem::AtEnd::kKeepForReaders);
    return ArenaRegistry::Arena(std::move(arena));
  };
  const KeptMemory& kept = *job.kept;
  ASSIGN_OR_RETURN(UniqueFd weights, Take(WeightsDescriptor(job.id), job, from));
  ASSIGN_OR_RETURN(memory.weights, adopt(WeightsOptions(policy, memory.name, kept.weights_bytes),
                                         std::move(weights)));
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  const Placement placement(*job.layout, map, kept.resident, {});
  if (placement.arena_bytes() > 0) {
    ASSIGN_OR_RETURN(UniqueFd states, Take(StatesDescriptor(job.id), job, from));
    RETURN_IF_ERROR(FreeBeside(placement.ResidentParts(), states));
    ASSIGN_OR_RETURN(memory.state,
                     adopt(StateOptions(policy, memory.name, placement.arena_bytes(),
                                        map.full_block_bytes(), placement.ResidentParts()),
                           std::move(states)));
  }
  if (auto step = from.extract(StepDescriptor(job.id)); !step.empty()) {
    ASSIGN_OR_RETURN(const uint64_t size, SizeOf(step.mapped()));
    const StatePart float_sums = kept.update == nullptr ? StatePart{} : kept.update->float_sums;
    std::vector<StatePart> parts{{.offset_bytes = 0, .bytes = kept.step_bytes}};
    if (float_sums.bytes > 0) parts.push_back(float_sums);
    RETURN_IF_ERROR(FreeBeside(std::move(parts), step.mapped()));
    ASSIGN_OR_RETURN(memory.step,
                     adopt(StepOptions(policy, memory.name, kept.step_bytes, float_sums, size),
                           std::move(step.mapped())));
  }
  for (uint32_t rank = 0; rank < job.world_size; ++rank) {
    for (const bool has_detached : {false, true}) {
      auto process = from.extract(ProcessDescriptor(job.id, rank, has_detached));
      if (process.empty()) continue;
      adopted.ranks[rank] = {.process = std::move(process.mapped()), .has_detached = has_detached};
    }
    auto node = from.extract(GradientsDescriptor(job.id, rank));
    if (node.empty()) continue;
    ASSIGN_OR_RETURN(const uint64_t size, SizeOf(node.mapped()));
    auto gradients = adopt(GradientOptions(policy, job.name, static_cast<int32_t>(rank), size),
                           std::move(node.mapped()));
    if (gradients.ok()) {
      memory.gradients[rank] = *std::move(gradients);
      adopted.ranks.try_emplace(rank);  // the process of a rank of another node is unknown
    } else {                            // the rank gets another arena
      spdlog::warn("{}", protocol::FormatError(gradients.status()));
    }
  }
  return adopted;
}

bool HasNumber(const DurableNode& node, JobId id) {
  return std::ranges::any_of(node.jobs, [id](const auto& job) { return job->id == id; });
}

absl::Status CheckOnSwap(const DurableJob& job, const SwapSpace* swap, bool is_same_volume,
                         const DurableNode& on_disk) {
  if (!is_same_volume && !job.AllSlots().empty()) {
    return MakeError(ErrorId::kConfig,
                     swap == nullptr ? "a part of it is on swap, and this daemon has none"
                                     : "a part of it is on swap, and this is another volume",
                     "restart the daemon with the swap.paths that it had");
  }
  const auto named = FindNamed(on_disk, job);
  if (named == nullptr || (is_same_volume && named->id == job.id)) return absl::OkStatus();
  return MakeError(ErrorId::kConfig,
                   absl::StrCat("swap has another job of this name, at step ", named->step),
                   "restart the daemon with the swap.paths that it had");
}

// Gives the job a new id if another job on disk has its id. Checksums of swap slots cover the id.
absl::Status Renumber(RecordedJob& left, DurableNode& on_disk) {
  DurableJob& job = left.job;
  if (!HasNumber(on_disk, job.id) || FindNamed(on_disk, job) != nullptr) return absl::OkStatus();
  if (!job.AllSlots().empty() || job.kept->update != nullptr) {
    return MakeError(ErrorId::kConfig, "swap has another job with its number",
                     "restart the daemon with the swap.paths that it had");
  }
  on_disk.last_job = std::max(on_disk.last_job, job.id) + 1;
  job.id = on_disk.last_job;
  job.kept->has_record = false;
  left.record.record = nullptr;
  return absl::OkStatus();
}

const char* Where(const DurableJob& job) {
  const auto& update = job.kept->update;
  if (update == nullptr) return "at";
  return update->prepared ? "with what it had prepared behind" : "in the middle of the update of";
}

// Reads the record that has the name record.JOB.NUMBER.
absl::StatusOr<RecordedJob> ReadRecord(const std::string& name, UniqueFd fd,
                                       const DescriptorsByName& left) {
  JobId id = 0;
  uint64_t number = 0;
  const std::string job = name.substr(sizeof(kRecordPrefix) - 1);
  const size_t point = std::min(job.find('.'), job.size() - 1);
  if (!absl::SimpleAtoi(job.substr(0, point), &id) ||
      !absl::SimpleAtoi(job.substr(point + 1), &number)) {
    return MakeError(ErrorId::kCorrupt, absl::StrCat(name, " is no name of a record"));
  }
  const bool is_converted = IsRecordBefore(fd);
  if (is_converted) {
    ASSIGN_OR_RETURN(fd, ConvertRecord(fd));
  }
  const auto step = left.find(StepDescriptor(id));
  ASSIGN_OR_RETURN(KeptRecord::Adopted read,
                   KeptRecord::Adopt(std::move(fd), step == left.end() ? -1 : step->second.get()));
  if (read.job.id != id) {
    return MakeError(ErrorId::kCorrupt, absl::StrCat(name, " is of another job"));
  }
  const uint64_t nonce = read.record->nonce();
  return RecordedJob{
      .job = std::move(read.job),
      .nonce = nonce,
      .record = {.record = std::move(read.record), .number = number, .is_converted = is_converted}};
}

// Mapping of shared memory of the earlier daemon.
class Mapping {
 public:
  static absl::StatusOr<Mapping> Of(const UniqueFd& fd) {
    if (!fd.valid()) return Mapping({});
    ASSIGN_OR_RETURN(const uint64_t size, SizeOf(fd));
    void* const mapped =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), /*offset=*/0);
    if (mapped == MAP_FAILED) {
      return MakeError(ErrorId::kInternal, protocol::ErrnoText("map staging slots", errno));
    }
    return Mapping({static_cast<std::byte*>(mapped), size});
  }
  Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
  }
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit Mapping(std::span<std::byte> bytes) : bytes_(bytes) {}

  std::span<std::byte> bytes_;
};

// Restores the elements that workers were changing when the daemon was killed. Copies blocks from `staging`, the slots of the
// killed daemon, to the same slots of this daemon. `taken` has the slots of other jobs; those of this job are added.
absl::Status UndoUpdate(const RecordedJob& killed, const JobMemory& arenas, const SwapSpace* swap,
                        std::span<std::byte> staging, std::set<uint32_t>& taken) {
  const auto& update = killed.job.kept->update;
  if (update == nullptr) return absl::OkStatus();
  if (arenas.step == nullptr) {
    return MakeError(ErrorId::kCorrupt, "the gradients of the step that was updated are missing");
  }
  std::set<uint32_t> slots;
  for (const KeptUpdate::Block& block : update->blocks) {
    if (!block.staging_slot) continue;
    const bool is_there =
        swap != nullptr && *block.staging_slot < swap->staging_slots() &&
        (*block.staging_slot + uint64_t{1}) * swap->staging_slot_bytes() <= staging.size();
    if (!is_there) {
      return MakeError(ErrorId::kConfig,
                       absl::StrCat("its step ", killed.job.step,
                                    " was being updated in staging slots, which are not there, or "
                                    "have other sizes"),
                       "restart the daemon with the configuration that it had");
    }
    if (taken.contains(*block.staging_slot) || !slots.insert(*block.staging_slot).second) {
      return MakeError(ErrorId::kCorrupt, "two blocks are in one staging slot");
    }
  }
  const auto bytes_of = [](const ArenaRegistry::Arena& arena) {
    return arena == nullptr ? std::span<std::byte>() : arena->bytes();
  };
  RETURN_IF_ERROR(killed.record.record->undo().Undo(
      killed.job.step,
      {.states = bytes_of(arenas.state), .weights = bytes_of(arenas.weights), .staging = staging}));
  for (const uint32_t slot : slots) {
    const uint64_t bytes = swap->staging_slot_bytes();
    std::ranges::copy(staging.subspan(slot * bytes, bytes), swap->Slot(slot, bytes).begin());
  }
  taken.merge(slots);
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckVolume(const std::vector<RecordedJob>& recorded, const SwapSpace* swap) {
  for (const RecordedJob& left : recorded) {
    const DurableJob& job = left.job;
    if (job.AllSlots().empty() || (swap != nullptr && swap->nonce() == left.nonce)) continue;
    return MakeError(
        ErrorId::kConfig,
        absl::StrCat("job ", job.name, " at step ", job.step,
                     " of the daemon before is kept in memory, and a part of it is on swap; this "
                     "daemon has ",
                     swap == nullptr ? "no swap" : "another volume there"),
        absl::StrCat("start it with the swap.paths that it had", kGiveUpHint));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RecordedJob>> ReadRecords(DescriptorsByName& left) {
  std::map<JobId, RecordedJob> jobs;  // the newest intact record of each job
  for (auto next = left.begin(); next != left.end();) {
    const auto it = next++;
    if (!it->first.starts_with(kRecordPrefix)) continue;
    auto node = left.extract(it);
    absl::StatusOr<RecordedJob> read = ReadRecord(node.key(), std::move(node.mapped()), left);
    if (protocol::IdOf(read.status()) == ErrorId::kConfig) return read.status();
    if (!read.ok()) {
      spdlog::warn("{}", protocol::FormatError(read.status()));
      continue;
    }
    const JobId id = read->job.id;
    const auto found = jobs.find(id);
    const bool is_newer = found == jobs.end() || found->second.record.number < read->record.number;
    if (is_newer) jobs.insert_or_assign(id, *std::move(read));
  }
  std::vector<RecordedJob> all;
  for (auto& [id, job] : jobs) all.push_back(std::move(job));
  AddHandedOver(left, all);
  return all;
}

LeftStaging FindStaging(uint64_t slot_bytes, DescriptorsByName& left) {
  LeftStaging newest;
  uint64_t newest_number = 0;
  const std::string prefix = absl::StrCat("staging.", slot_bytes, ".");
  for (auto& [name, fd] : left) {
    uint64_t number = 0;
    const bool is_one =
        name.starts_with(prefix) && absl::SimpleAtoi(name.substr(prefix.size()), &number);
    if (!is_one || number < newest_number) continue;
    newest_number = number;
    newest.name = name;
  }
  if (!newest.name.empty()) newest.fd = std::move(left.extract(newest.name).mapped());
  return newest;
}

std::vector<AdoptedJob> AdoptJobs(std::vector<RecordedJob> jobs, const SwapSpace* swap,
                                  const LeftStaging& staging, const ArenaPolicy& arenas,
                                  DescriptorsByName& left, NodeOptions& node) {
  // If the staging arena cannot be mapped, only jobs with a block in a staging slot cannot continue.
  const absl::StatusOr<Mapping> left_slots = Mapping::Of(staging.fd);
  if (!left_slots.ok()) spdlog::warn("{}", protocol::FormatError(left_slots.status()));
  const std::span<std::byte> slots = left_slots.ok() ? left_slots->bytes() : std::span<std::byte>();
  std::set<uint32_t> taken_slots;
  std::vector<AdoptedJob> adopted;
  std::vector<DurableJob> going_on;
  const auto adopt = [&](RecordedJob& one) -> absl::Status {
    const bool is_same_volume = swap != nullptr && swap->nonce() == one.nonce;
    RETURN_IF_ERROR(CheckOnSwap(one.job, swap, is_same_volume, node.recovered));
    ASSIGN_OR_RETURN(AdoptedJob taken, AdoptArenas(one.job, arenas, left));
    RETURN_IF_ERROR(UndoUpdate(one, taken.memory, swap, slots, taken_slots));
    RETURN_IF_ERROR(Renumber(one, node.recovered));
    RETURN_IF_ERROR(ReserveKilled(one.job, node));
    taken.id = one.job.id;
    taken.record = std::move(one.record);
    adopted.push_back(std::move(taken));
    return absl::OkStatus();
  };
  for (RecordedJob& one : jobs) {
    if (const absl::Status status = adopt(one); !status.ok()) {
      spdlog::error("job {} does not go on from the memory that the daemon before has left: {}",
                    one.job.name, protocol::FormatError(status));
      continue;
    }
    spdlog::info("job {} goes on {} step {}{}", one.job.name, Where(one.job), one.job.step,
                 one.job.kept->update == nullptr ? "" : ", after the daemon before was killed");
    going_on.push_back(std::move(one.job));
  }
  AddKilled(std::move(going_on), node);
  // Lease numbers grow far more slowly than one a nanosecond.
  if (!adopted.empty()) node.recovered.last_lease = MonotonicNs();
  return adopted;
}

}  // namespace forebay::daemon
