// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/hand_over.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

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
#include "daemon/exec/session_io.h"
#include "daemon/exec/swap_space.h"
#include "protocol/error.h"
#include "protocol/os/memfd.h"
#include "protocol/os/status_macros.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {

namespace {
constexpr char kRecordPrefix[] = "record.";
constexpr char kStagingPrefix[] = "staging.";
}  // namespace

std::string WeightsDescriptor(JobId job) { return absl::StrCat("weights.", job); }
std::string StatesDescriptor(JobId job) { return absl::StrCat("states.", job); }
std::string StepDescriptor(JobId job) { return absl::StrCat("step.", job); }
std::string GradientsDescriptor(JobId job, uint32_t rank) {
  return absl::StrCat("gradients.", job, ".", rank);
}
std::string ProcessDescriptor(JobId job, uint32_t rank, bool has_detached) {
  return absl::StrCat(has_detached ? "detached." : "process.", job, ".", rank);
}
std::string StagingDescriptor(uint64_t slot_bytes, uint64_t number) {
  return absl::StrCat(kStagingPrefix, slot_bytes, ".", number);
}
std::string RecordDescriptor(JobId job, uint64_t number) {
  return absl::StrCat(kRecordPrefix, job, ".", number);
}

namespace {

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

absl::StatusOr<uint64_t> SizeOf(const UniqueFd& fd) {
  struct stat info = {};
  if (::fstat(fd.get(), &info) == 0) return static_cast<uint64_t>(info.st_size);
  return MakeError(ErrorId::kInternal, protocol::ErrnoText("fstat of an arena", errno));
}

absl::StatusOr<DecodedLedger> ReadLedger(const DescriptorsByName& from) {
  const auto found = from.find(kLedgerDescriptor);
  if (found == from.end()) return DecodedLedger{};
  ASSIGN_OR_RETURN(const uint64_t size, SizeOf(found->second));
  if (size > nvme::Volume::kLedgerBytesMax) {
    return MakeError(
        ErrorId::kCorrupt,
        absl::StrCat("the ledger that the daemon before has left has ", size, " bytes"));
  }
  std::vector<std::byte> bytes(size);
  if (protocol::ReadFromStart(found->second.get(), bytes) != static_cast<int64_t>(size)) {
    return MakeError(ErrorId::kCorrupt, "the ledger that the daemon before has left is cut short");
  }
  return DecodeLedger(bytes);
}

// Frees the memory of the arena outside `parts`. A daemon that was killed may have populated parts that its record does not
// name, or not yet freed parts that the record has given up.
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

absl::StatusOr<AdoptedArenas> AdoptArenas(const DurableJob& job, const ArenaPolicy& policy,
                                          DescriptorsByName& from) {
  AdoptedArenas adopted{.id = job.id,
                        .name = {.uid = job.uid, .name = job.name},
                        .layout = job.layout,
                        .weights = nullptr,
                        .state = nullptr,
                        .step = nullptr};
  const auto adopt = [](const pinned_mem::ArenaOptions& options,
                        UniqueFd fd) -> absl::StatusOr<ArenaRegistry::Arena> {
    ASSIGN_OR_RETURN(auto arena, pinned_mem::PinnedArena::Adopt(options, std::move(fd)));
    // Holds until OwnAdopted(): if the daemon fails to start, the pages retain their bytes.
    arena->SetAtEnd(pinned_mem::AtEnd::kKeepForReaders);
    return ArenaRegistry::Arena(std::move(arena));
  };
  const KeptMemory& kept = *job.kept;
  ASSIGN_OR_RETURN(UniqueFd weights, Take(WeightsDescriptor(job.id), job, from));
  ASSIGN_OR_RETURN(adopted.weights, adopt(WeightsOptions(policy, adopted.name, kept.weights_bytes),
                                          std::move(weights)));
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  const Placement placement(*job.layout, map, kept.resident, {});
  if (placement.arena_bytes() > 0) {
    ASSIGN_OR_RETURN(UniqueFd states, Take(StatesDescriptor(job.id), job, from));
    if (kept.was_killed) RETURN_IF_ERROR(FreeBeside(placement.ResidentParts(), states));
    ASSIGN_OR_RETURN(adopted.state,
                     adopt(StateOptions(policy, adopted.name, placement.arena_bytes(),
                                        map.full_block_bytes(), placement.ResidentParts()),
                           std::move(states)));
  }
  if (auto step = from.extract(StepDescriptor(job.id)); !step.empty()) {
    ASSIGN_OR_RETURN(const uint64_t size, SizeOf(step.mapped()));
    const StatePart float_sums = kept.update == nullptr ? StatePart{} : kept.update->float_sums;
    std::vector<StatePart> parts{{.offset_bytes = 0, .bytes = kept.step_bytes}};
    if (float_sums.bytes > 0) parts.push_back(float_sums);
    RETURN_IF_ERROR(FreeBeside(std::move(parts), step.mapped()));
    ASSIGN_OR_RETURN(adopted.step,
                     adopt(StepOptions(policy, adopted.name, kept.step_bytes, float_sums, size),
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
      adopted.gradients[rank] = *std::move(gradients);
    } else {  // the rank gets another arena
      spdlog::warn("{}", protocol::FormatError(gradients.status()));
    }
  }
  return adopted;
}

bool HasNumber(const DurableNode& node, JobId id) {
  return std::ranges::any_of(node.jobs, [id](const auto& job) { return job->id == id; });
}

absl::Status CheckHandedOver(const DurableJob& job, const SwapSpace* swap, bool is_same_volume,
                             const DurableNode& on_disk) {
  if (!is_same_volume && !job.AllSlots().empty()) {
    return MakeError(ErrorId::kConfig,
                     swap == nullptr
                         ? "a part of it is on swap, and this daemon has none"
                         : "a part of it is on swap, and this is another volume, or it was "
                           "used since",
                     "restart the daemon with the swap.paths that it had");
  }
  const auto named = FindNamed(on_disk, job);
  if (named == nullptr || (is_same_volume && named->id == job.id)) return absl::OkStatus();
  return MakeError(ErrorId::kConfig,
                   absl::StrCat("swap has another job of this name, at step ", named->step),
                   "restart the daemon with the swap.paths that it had");
}

absl::StatusOr<AdoptedArenas> AdoptJob(std::shared_ptr<const DurableJob> job,
                                       const ArenaPolicy& arenas, DescriptorsByName& left,
                                       NodeOptions& node) {
  ASSIGN_OR_RETURN(AdoptedArenas adopted, AdoptArenas(*job, arenas, left));
  DurableNode& recovered = node.recovered;
  RETURN_IF_ERROR(ReserveSlots(*job, job->AllSlots(), node));
  if (const auto named = FindNamed(recovered, *job)) {
    if (job->kept->was_killed && job->durability.level != protocol::DurabilityLevel::kMemory) {
      DurableJob with_durable = *job;
      with_durable.kept->durable = named;
      job = std::make_shared<const DurableJob>(std::move(with_durable));
    }
    std::erase(recovered.jobs, named);
  }
  if (HasNumber(recovered, job->id)) {
    DurableJob renumbered = *job;
    adopted.id = renumbered.id = ++recovered.last_job;
    job = std::make_shared<const DurableJob>(std::move(renumbered));
  }
  recovered.jobs.push_back(std::move(job));
  return adopted;
}

const char* Where(const DurableJob& job) {
  const auto& update = job.kept->update;
  if (update == nullptr) return "at";
  return update->prepared ? "with what it had prepared behind" : "in the middle of the update of";
}

// Gives a job that was handed over its present record, if the record is of the same step and of no update in progress.
void AdoptRecord(const DurableJob& job, std::vector<RecordedJob>& recorded,
                 AdoptedArenas& adopted) {
  const auto found =
      std::ranges::find_if(recorded, [&](const RecordedJob& one) { return one.job.id == job.id; });
  if (found == recorded.end()) return;
  const DurableJob& as_recorded = found->job;
  if (adopted.id == job.id && as_recorded.step == job.step && as_recorded.kept->update == nullptr) {
    adopted.record = std::move(found->record);
    adopted.record_number = found->number;
  }
  recorded.erase(found);
}

absl::StatusOr<RecordedJob> ReadRecord(const std::string& name, UniqueFd fd,
                                       const DescriptorsByName& left) {
  ASSIGN_OR_RETURN(std::unique_ptr<KeptRecord> record, KeptRecord::Adopt(std::move(fd)));
  // record.JOB.NUMBER
  JobId id = 0;
  uint64_t number = 0;
  const std::string job = name.substr(sizeof(kRecordPrefix) - 1);
  const size_t point = std::min(job.find('.'), job.size() - 1);
  if (!absl::SimpleAtoi(job.substr(0, point), &id) ||
      !absl::SimpleAtoi(job.substr(point + 1), &number)) {
    return MakeError(ErrorId::kCorrupt, absl::StrCat(name, " is no name of a record"));
  }
  const auto step = left.find(StepDescriptor(id));
  ASSIGN_OR_RETURN(DurableJob read, record->Read(step == left.end() ? -1 : step->second.get()));
  if (read.id != id) return MakeError(ErrorId::kCorrupt, absl::StrCat(name, " is of another job"));
  const uint64_t nonce = record->nonce();
  return RecordedJob{
      .job = std::move(read), .nonce = nonce, .record = std::move(record), .number = number};
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
absl::Status UndoUpdate(const RecordedJob& killed, const AdoptedArenas& arenas,
                        const SwapSpace* swap, std::span<std::byte> staging,
                        std::set<uint32_t>& taken) {
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
  RETURN_IF_ERROR(killed.record->undo().Undo(
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

absl::Status CheckVolume(const DecodedLedger& ledger, const std::vector<RecordedJob>& recorded,
                         const SwapSpace* swap) {
  const auto check = [swap](const DurableJob& job, uint64_t nonce) -> absl::Status {
    if (job.AllSlots().empty() || (swap != nullptr && swap->nonce() == nonce)) {
      return absl::OkStatus();
    }
    return MakeError(
        ErrorId::kConfig,
        absl::StrCat("job ", job.name, " at step ", job.step,
                     " of the daemon before is kept in memory, and a part of it is on swap; this "
                     "daemon has ",
                     swap == nullptr ? "no swap" : "another volume there"),
        "start it with the swap.paths that it had; to give up what is kept, stop the service "
        "before "
        "it is started (systemctl stop forebayd)");
  };
  for (const auto& job : ledger.node.jobs) RETURN_IF_ERROR(check(*job, ledger.nonce));
  for (const RecordedJob& one : recorded) RETURN_IF_ERROR(check(one.job, one.nonce));
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
    const bool is_newer = found == jobs.end() || found->second.number < read->number;
    if (is_newer) jobs.insert_or_assign(id, *std::move(read));
  }
  std::vector<RecordedJob> all;
  for (auto& [id, job] : jobs) all.push_back(std::move(job));
  return all;
}

LeftStaging FindStaging(uint64_t slot_bytes, DescriptorsByName& left) {
  LeftStaging newest;
  uint64_t newest_number = 0;
  const std::string prefix = absl::StrCat(kStagingPrefix, slot_bytes, ".");
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

std::vector<AdoptedArenas> AdoptKilled(std::vector<RecordedJob> jobs, const SwapSpace* swap,
                                       const LeftStaging& staging, const ArenaPolicy& arenas,
                                       DescriptorsByName& left, NodeOptions& node) {
  // If the staging arena cannot be mapped, only jobs with a block in a staging slot cannot continue.
  const absl::StatusOr<Mapping> left_slots = Mapping::Of(staging.fd);
  if (!left_slots.ok()) spdlog::warn("{}", protocol::FormatError(left_slots.status()));
  std::set<uint32_t> taken_slots;
  std::vector<AdoptedArenas> adopted;
  std::vector<DurableJob> going_on;
  for (RecordedJob& killed : jobs) {
    DurableJob& job = killed.job;
    const bool is_same_volume = swap != nullptr && swap->nonce() == killed.nonce;
    absl::Status status = CheckHandedOver(job, swap, is_same_volume, node.recovered);
    if (status.ok() && HasNumber(node.recovered, job.id) &&
        FindNamed(node.recovered, job) == nullptr) {
      status = MakeError(ErrorId::kConfig, "swap has another job with its number",
                         "restart the daemon with the swap.paths that it had");
    }
    if (status.ok()) {
      absl::StatusOr<AdoptedArenas> taken = AdoptArenas(job, arenas, left);
      status = taken.status();
      if (status.ok()) {
        status =
            UndoUpdate(killed, *taken, swap,
                       left_slots.ok() ? left_slots->bytes() : std::span<std::byte>(), taken_slots);
      }
      if (status.ok()) status = ReserveKilled(job, node);
      if (status.ok()) {
        taken->record = std::move(killed.record);
        taken->record_number = killed.number;
        adopted.push_back(*std::move(taken));
        going_on.push_back(std::move(job));
        continue;
      }
    }
    spdlog::error("job {} does not go on after the daemon before was killed: {}", job.name,
                  protocol::FormatError(status));
  }
  for (const DurableJob& job : going_on) {
    spdlog::info("job {} goes on {} step {}, after the daemon before was killed", job.name,
                 Where(job), job.step);
  }
  AddKilled(std::move(going_on), node);
  // Lease numbers grow far more slowly than one a nanosecond.
  if (!adopted.empty()) node.recovered.last_lease = MonotonicNs();
  return adopted;
}

absl::Status AddHandedOver(const DurableNode& node, uint64_t nonce, uint64_t sequence,
                           DescriptorsByName& to) {
  ASSIGN_OR_RETURN(const std::vector<std::byte> ledger, EncodeHandedOver(node, nonce, sequence));
  UniqueFd fd = protocol::MakeSealedMemfd("forebay-ledger", ledger);
  if (!fd.valid()) {
    return MakeError(ErrorId::kLimit, protocol::ErrnoText("a memfd for the ledger", errno));
  }
  to.emplace(kLedgerDescriptor, std::move(fd));
  return absl::OkStatus();
}

DecodedLedger ReadHandedOver(const DescriptorsByName& from) {
  absl::StatusOr<DecodedLedger> ledger = ReadLedger(from);
  if (ledger.ok()) return *std::move(ledger);
  spdlog::error("what the daemon before has left is not used: {}",
                protocol::FormatError(ledger.status()));
  return {};
}

std::vector<AdoptedArenas> AdoptJobs(const DecodedLedger& ledger,
                                     std::vector<RecordedJob>& recorded, const SwapSpace* swap,
                                     const ArenaPolicy& arenas, DescriptorsByName& left,
                                     NodeOptions& node) {
  const bool is_same_volume =
      swap != nullptr && swap->nonce() == ledger.nonce && swap->found_sequence() == ledger.sequence;
  node.recovered.last_job = std::max(node.recovered.last_job, ledger.node.last_job);
  node.recovered.last_lease = ledger.node.last_lease;
  std::vector<AdoptedArenas> adopted;
  for (const auto& job : ledger.node.jobs) {
    absl::Status status = CheckHandedOver(*job, swap, is_same_volume, node.recovered);
    if (status.ok()) {
      absl::StatusOr<AdoptedArenas> taken = AdoptJob(job, arenas, left, node);
      status = taken.status();
      if (taken.ok()) {
        AdoptRecord(*job, recorded, *taken);
        adopted.push_back(*std::move(taken));
      }
    }
    if (status.ok()) {
      spdlog::info("job {} goes on at step {}", job->name, job->step);
    } else {
      spdlog::error("job {} does not go on from the memory that the daemon before has left: {}",
                    job->name, protocol::FormatError(status));
    }
  }
  return adopted;
}

}  // namespace forebay::daemon
