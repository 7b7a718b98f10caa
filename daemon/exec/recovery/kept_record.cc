// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/kept_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "nvme/checksum.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/step_summary.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr uint64_t kMagic = 0x6472'6f63'6572'6266;  // "fbrecord"
constexpr uint64_t kRecordVersion = 7;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kNoSlot = UINT64_MAX;
constexpr int kStagedBits = 16;
constexpr int kAttemptBits = 16;
constexpr uint64_t kAttemptMax = (uint64_t{1} << kAttemptBits) - 1;

absl::Status CorruptRecord(const std::string& what) {
  return MakeError(ErrorId::kCorrupt, absl::StrCat("the record of a job: ", what));
}

absl::Status NewerRecord(uint64_t version) {
  return MakeError(
      ErrorId::kConfig,
      absl::StrCat("the daemon before keeps a job in memory, in a record of version ", version,
                   ", made by a newer forebayd; this one reads version ", kRecordVersion),
      absl::StrCat("start the newer forebayd again", kGiveUpHint));
}

uint64_t Aligned(uint64_t bytes) { return protocol::RoundUp(bytes, kAlignment); }

uint64_t DigestsMax(const BlockMap& map) {
  uint64_t pages = 0;
  for (uint32_t i = 0; i < map.blocks(); ++i) {
    if (!map.has_weights(i)) continue;
    pages = std::max(pages, (map.bytes(i) - map.weights_plane_offset(i)) / protocol::kPageBytes);
  }
  return pages;
}

}  // namespace

// Offsets and sizes of all sections. Sections of a step exist twice; step % 2 selects one.
struct KeptRecord::Header {
  uint64_t magic = 0;
  uint64_t version = 0;
  uint64_t file_bytes = 0;
  uint64_t nonce = 0;
  uint64_t job_bytes = 0;
  uint64_t params = 0;
  uint64_t partitions = 0;
  uint64_t ranks = 0;
  uint64_t blocks = 0;
  uint64_t digests = 0;  // largest number of digests of a block
  uint64_t job_offset = 0;
  uint64_t values_offset = 0;
  uint64_t values_bytes = 0;  // bytes of the values of one step
  uint64_t blocks_offset = 0;
  uint64_t digests_offset = 0;
  uint64_t order_offset = 0;
  uint64_t sums_offset = 0;
  uint64_t sum_pages = 0;
  uint64_t undo_offset = 0;
  uint64_t undo_bytes = 0;
  uint64_t undo_area_bytes = 0;
  uint64_t block_elems = 0;
  uint64_t workers = 0;
  std::atomic<uint64_t> is_valid = 0;
  std::atomic<uint64_t> published = 0;
  std::atomic<uint64_t> decided = 0;
  // Step, followed by kAttemptBits bits of the attempt.
  std::atomic<uint64_t> attempt = 0;
  uint64_t trusts = 0;  // number of trust values of a step: as many as parameters, or 0
  std::atomic<uint64_t> trust_step = 0;
  uint64_t leases_offset = 0;
  uint64_t leases = 0;
  // Bytes of an encoded StepSummary for a job over several nodes; 0 for other jobs.
  uint64_t summary_bytes = 0;
  uint64_t prepared_offset = 0;
  // Step of the Prepared section. The section is valid if this step is `decided` + 1.
  std::atomic<uint64_t> prepared = 0;
  uint64_t checksum = 0;  // FixedChecksum()
};

struct KeptRecord::Version {
  uint64_t path = kNoSlot;
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
  uint64_t checksum = 0;
  uint64_t written_step = 0;
  uint64_t digests = 0;
  uint64_t is_resident = 0;
  uint64_t overflows = 0;
  // 1 + index of the slot of the new weights; 0 if the weights are installed.
  uint64_t weights_slot = 0;
};

// Record of a block. `state`: step << 1 | copy. `copy` is the current version until `step` is published; then the other version
// is current. If the step is 0, `copy` stays current. `staged`: the step in which the block is updated in a staging slot,
// followed by kStagedBits bits of the slot.
struct KeptRecord::Block {
  std::atomic<uint64_t> state = 0;
  std::atomic<uint64_t> staged = 0;
  std::array<Version, 2> versions;
};

// Record of a page of gradient sums. `state`: the step, one bit for the current place, and one bit that is set if the page is
// needed.
struct KeptRecord::Sums {
  struct Place {
    uint64_t frame = kNoSlot;
    uint64_t path = kNoSlot;
    uint64_t offset_bytes = 0;
    uint64_t size_bytes = 0;
    uint64_t checksum = 0;
    uint64_t spills = 0;
  };

  std::atomic<uint64_t> state = 0;
  std::array<Place, 2> places;
};

struct KeptRecord::Lease {
  std::atomic<uint64_t> lease = 0;  // 0 if the entry is free
  uint64_t rank = 0;
  uint64_t partition = 0;
  uint64_t offset_bytes = 0;
};

// Order of the newest decided step. Behind it are HyperParams by group, the values of RecordTrust, and one byte for each
// parameter.
struct KeptRecord::Order {
  uint64_t param_groups = 0;
  float grad_scale = 0;
  float grad_min = 0;
  float grad_max = 0;
  StatePart float_sums = {};
};

// The step that is prepared. Behind it are HyperParams by group, extra_state of each rank, and the node's summary.
struct KeptRecord::Prepared {
  uint64_t attempt = 0;
  uint64_t param_groups = 0;
  protocol::StepRequest request = {};
  StatePart float_sums = {};
};

// Values of a decided step. Behind them are updates of each parameter, extra_state of each rank, the trace, and the summary by
// which the step was decided.
struct KeptRecord::Values {
  uint64_t step = 0;
  uint64_t ranks = 0;
  uint64_t traced = 0;
  double norm = 0;
  uint64_t clipped = 0;
  uint64_t overflowed = 0;
  uint64_t summary_bytes = 0;  // 0 if the step has no summary
};

// Returns the checksum of the job and of the header's fields that never change.
uint64_t KeptRecord::FixedChecksum(std::span<const std::byte> bytes) {
  alignas(Header) std::array<std::byte, sizeof(Header)> copy;
  std::ranges::copy(bytes.first(copy.size()), copy.begin());
  auto& fixed = *reinterpret_cast<Header*>(copy.data());
  fixed.is_valid = fixed.published = fixed.decided = fixed.attempt = 0;
  fixed.trust_step = fixed.prepared = fixed.checksum = 0;
  return nvme::Checksum({}, copy) ^
         nvme::Checksum({}, bytes.subspan(fixed.job_offset, fixed.job_bytes));
}

KeptRecord::KeptRecord(protocol::UniqueFd fd, std::span<std::byte> bytes)
    : fd_(std::move(fd)),
      bytes_(bytes),
      undo_(bytes.subspan(header().undo_offset, header().undo_bytes), header().blocks,
            header().block_elems, header().workers, header().undo_area_bytes) {}

KeptRecord::~KeptRecord() {
  if (is_owned_) Drop();
  ::munmap(bytes_.data(), bytes_.size());
}

KeptRecord::Header& KeptRecord::header() const { return *reinterpret_cast<Header*>(bytes_.data()); }

uint64_t KeptRecord::step() const { return header().published; }

uint64_t KeptRecord::nonce() const { return header().nonce; }

KeptRecord::Values& KeptRecord::values(uint64_t step) const {
  const Header& at = header();
  return *reinterpret_cast<Values*>(bytes_.data() + at.values_offset +
                                    (step % 2) * at.values_bytes);
}

uint64_t* KeptRecord::param_updates(uint64_t step) const {
  return reinterpret_cast<uint64_t*>(&values(step) + 1);
}

StatePart* KeptRecord::extra_states(uint64_t step) const {
  return reinterpret_cast<StatePart*>(param_updates(step) + header().params);
}

uint32_t* KeptRecord::trace(uint64_t step) const {
  return reinterpret_cast<uint32_t*>(extra_states(step) + header().ranks);
}

std::byte* KeptRecord::summary(uint64_t step) const {
  return reinterpret_cast<std::byte*>(trace(step) + header().partitions);
}

KeptRecord::Prepared& KeptRecord::prepared() const {
  return *reinterpret_cast<Prepared*>(bytes_.data() + header().prepared_offset);
}

protocol::HyperParams* KeptRecord::prepared_hyper_params() const {
  return reinterpret_cast<protocol::HyperParams*>(&prepared() + 1);
}

StatePart* KeptRecord::prepared_extra_states() const {
  return reinterpret_cast<StatePart*>(prepared_hyper_params() + param_group_rows());
}

std::byte* KeptRecord::prepared_summary() const {
  return reinterpret_cast<std::byte*>(prepared_extra_states() + header().ranks);
}

KeptRecord::Order& KeptRecord::order() const {
  return *reinterpret_cast<Order*>(bytes_.data() + header().order_offset);
}

protocol::HyperParams* KeptRecord::hyper_params() const {
  return reinterpret_cast<protocol::HyperParams*>(bytes_.data() + header().order_offset +
                                                  kAlignment);
}

uint64_t KeptRecord::param_group_rows() const {
  const Header& at = header();
  const uint64_t order_bytes = at.sums_offset - at.order_offset;
  const uint64_t rows_bytes = order_bytes - kAlignment - at.trusts * sizeof(float) - at.params;
  static_assert(kAlignment < sizeof(protocol::HyperParams));
  return rows_bytes / sizeof(protocol::HyperParams);
}

std::span<KeptRecord::Lease> KeptRecord::leases() const {
  return {reinterpret_cast<Lease*>(bytes_.data() + header().leases_offset), header().leases};
}

float* KeptRecord::trust() const {
  return reinterpret_cast<float*>(hyper_params() + param_group_rows());
}

uint8_t* KeptRecord::params_updated() const {
  return reinterpret_cast<uint8_t*>(trust() + header().trusts);
}

bool KeptRecord::is_in_step() const {
  const Header& at = header();
  return at.decided > at.published || at.prepared == at.decided + 1;
}

KeptRecord::Block& KeptRecord::block(uint32_t index) const {
  FOREBAY_CHECK(index < header().blocks);
  return reinterpret_cast<Block*>(bytes_.data() + header().blocks_offset)[index];
}

KeptRecord::Sums& KeptRecord::sums(uint32_t page) const {
  FOREBAY_CHECK(page < header().sum_pages);
  return reinterpret_cast<Sums*>(bytes_.data() + header().sums_offset)[page];
}

uint64_t* KeptRecord::digests(uint32_t index, uint64_t copy) const {
  return reinterpret_cast<uint64_t*>(bytes_.data() + header().digests_offset) +
         (2 * uint64_t{index} + copy) * header().digests;
}

absl::StatusOr<std::unique_ptr<KeptRecord>> KeptRecord::Make(const RecordJob& record,
                                                             uint64_t nonce, uint64_t workers) {
  const DurableJob& job = *record.job;
  FOREBAY_CHECK(job.kept.has_value());
  ASSIGN_OR_RETURN(const std::vector<std::byte> encoded,
                   EncodeKept({.last_job = job.id, .last_lease = 0, .jobs = {record.job}}, nonce));
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  Header sizes{.magic = kMagic,
               .version = kRecordVersion,
               .nonce = nonce,
               .job_bytes = encoded.size(),
               .params = job.param_updates.size(),
               .partitions = job.layout->partitions().size(),
               .ranks = job.world_size,
               .blocks = job.blocks.size(),
               .digests = DigestsMax(map)};
  if (job.kept->session.world_ranks > 0) {
    sizes.summary_bytes = protocol::NodeSummaryBytes(*job.layout);
  }
  sizes.job_offset = Aligned(sizeof(Header));
  sizes.values_offset = Aligned(sizes.job_offset + sizes.job_bytes);
  sizes.values_bytes =
      Aligned(sizeof(Values) + sizes.params * sizeof(uint64_t) + sizes.ranks * sizeof(StatePart) +
              sizes.partitions * sizeof(uint32_t) + sizes.summary_bytes);
  sizes.blocks_offset = sizes.values_offset + 2 * sizes.values_bytes;
  sizes.digests_offset = Aligned(sizes.blocks_offset + sizes.blocks * sizeof(Block));
  sizes.order_offset =
      Aligned(sizes.digests_offset + 2 * sizes.blocks * sizes.digests * sizeof(uint64_t));
  sizes.sum_pages = record.sum_pages;
  sizes.trusts = protocol::Info(job.layout->spec().optimizer).passes > 1 ? sizes.params : 0;
  sizes.sums_offset = Aligned(sizes.order_offset + kAlignment +
                              job.layout->param_group_rows() * sizeof(protocol::HyperParams) +
                              sizes.trusts * sizeof(float) + sizes.params);
  sizes.leases_offset = Aligned(sizes.sums_offset + sizes.sum_pages * sizeof(Sums));
  sizes.leases = job.weights_on_swap.empty() ? 0 : LeasesRecordedMax(*job.layout, job.world_size);
  static_assert(sizeof(Lease) == kLeaseRecordBytes);
  sizes.prepared_offset = Aligned(sizes.leases_offset + sizes.leases * sizeof(Lease));
  const uint64_t prepared_bytes =
      sizes.summary_bytes == 0
          ? 0
          : sizeof(Prepared) + job.layout->param_group_rows() * sizeof(protocol::HyperParams) +
                sizes.ranks * sizeof(StatePart) + sizes.summary_bytes;
  sizes.undo_offset =
      protocol::RoundUp(sizes.prepared_offset + prepared_bytes, protocol::kPageBytes);
  const protocol::LayoutSpec& spec = job.layout->spec();
  sizes.block_elems = job.block_elems;
  sizes.workers = workers;
  sizes.undo_area_bytes = UndoAreaBytes(spec);
  sizes.undo_bytes = UndoBytes(spec, sizes.blocks, job.block_elems, workers);
  const uint64_t bytes = sizes.undo_offset + sizes.undo_bytes;
  sizes.file_bytes = bytes;

  protocol::UniqueFd fd(::memfd_create("forebay-record", MFD_CLOEXEC));
  // Memory that cannot be had is an error here, not a signal at a store.
  if (!fd.valid() || ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    return MakeError(ErrorId::kLimit,
                     protocol::ErrnoText("a memfd for the record of a job", errno));
  }
  void* const mapped =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), /*offset=*/0);
  if (mapped == MAP_FAILED) {
    return MakeError(ErrorId::kLimit, protocol::ErrnoText("map the record of a job", errno));
  }
  auto* const begin = static_cast<std::byte*>(mapped);
  std::memcpy(begin, &sizes, sizeof(sizes));
  std::memcpy(begin + sizes.job_offset, encoded.data(), encoded.size());
  reinterpret_cast<Header*>(begin)->checksum = FixedChecksum({begin, bytes});
  std::unique_ptr<KeptRecord> made(new KeptRecord(std::move(fd), {begin, bytes}));
  made->header().published = made->header().decided = job.step;
  for (uint32_t i = 0; i < job.blocks.size(); ++i) {
    RecordBlock one{.job = job.id, .block = i};
    if (job.blocks[i]) {
      one.slot = job.blocks[i]->slot;
      one.checksum = job.blocks[i]->checksum;
      one.written_step = job.blocks[i]->written_step;
      one.weights_digests = job.blocks[i]->weights_digests;
    } else {
      one.written_step = job.kept->written_steps[i];
    }
    made->Write(one, 0);
    made->block(i).versions[0].is_resident = job.kept->resident[i] ? 1 : 0;
  }
  RecordDecision values{.job = job.id,
                        .step = job.step,
                        .norm = job.kept->norm,
                        .clipped = job.kept->clipped,
                        .overflowed = job.kept->overflowed,
                        .summary = job.kept->summary};
  values.param_updates.assign(job.param_updates.begin(), job.param_updates.end());
  values.trace.assign(job.trace.begin(), job.trace.end());
  values.extra_states.assign(record.extra_states.begin(), record.extra_states.end());
  made->WriteValues(values);
  made->Set(RecordAttempt{.job = job.id, .step = job.step + 1, .attempt = job.kept->attempt});
  for (const KeptLease& lease : job.kept->leases) made->Set(RecordLease{.lease = lease});
  made->header().is_valid = 1;
  made->Own();
  return made;
}

absl::StatusOr<std::unique_ptr<KeptRecord>> KeptRecord::Adopt(protocol::UniqueFd fd) {
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0) return CorruptRecord(protocol::ErrnoText("fstat", errno));
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (bytes < sizeof(Header)) return CorruptRecord(absl::StrCat("only ", bytes, " bytes"));
  void* const mapped =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), /*offset=*/0);
  if (mapped == MAP_FAILED) return CorruptRecord(protocol::ErrnoText("mmap", errno));
  const auto* const header = static_cast<const Header*>(mapped);
  const bool is_ours = header->magic == kMagic && header->version == kRecordVersion;
  const bool is_whole =
      is_ours && header->file_bytes == bytes && header->job_offset <= bytes &&
      header->job_bytes <= bytes - header->job_offset &&
      FixedChecksum({static_cast<const std::byte*>(mapped), bytes}) == header->checksum;
  if (is_whole) {
    return std::unique_ptr<KeptRecord>(
        new KeptRecord(std::move(fd), {static_cast<std::byte*>(mapped), bytes}));
  }
  const bool is_newer = header->magic == kMagic && header->version > kRecordVersion;
  const absl::Status status =
      is_newer  ? NewerRecord(header->version)
      : is_ours ? CorruptRecord(absl::StrCat("it is damaged, or cut: ", bytes, " bytes of ",
                                             header->file_bytes))
                : CorruptRecord(absl::StrCat("version ", header->version,
                                             "; this forebayd reads version ", kRecordVersion));
  ::munmap(mapped, bytes);  // the daemon that wrote the record may still read it
  return status;
}

// Returns the version of the block in the newest published step: 0 or 1.
uint64_t KeptRecord::CurrentCopy(uint32_t index) const {
  const uint64_t state = block(index).state;
  const uint64_t step = state >> 1;
  const bool is_other = step != 0 && step <= header().published;
  return (state & 1) ^ (is_other ? 1 : 0);
}

void KeptRecord::Write(const RecordBlock& record, uint64_t copy) {
  Version& to = block(record.block).versions[copy];
  to = {.path = record.slot ? record.slot->path : kNoSlot,
        .offset_bytes = record.slot ? record.slot->offset_bytes : 0,
        .size_bytes = record.slot ? record.slot->size_bytes : 0,
        .checksum = record.checksum,
        .written_step = record.written_step,
        .digests = record.weights_digests ? record.weights_digests->size() : 0,
        .is_resident = record.slot ? 0U : 1U,
        .overflows = record.overflows,
        .weights_slot = record.weights_slot ? *record.weights_slot + uint64_t{1} : 0};
  if (to.digests == 0) return;
  FOREBAY_CHECK(to.digests <= header().digests);
  std::ranges::copy(*record.weights_digests, digests(record.block, copy));
}

void KeptRecord::Set(const RecordBlock& record) {
  // An earlier daemon has recorded this step already. To write it again would remove it for a moment.
  if (record.step != 0 && block(record.block).state >> 1 == record.step) return;
  const uint64_t current = CurrentCopy(record.block);
  block(record.block).state = current;  // clears the step of the other version
  Write(record, 1 - current);
  block(record.block).state = record.step == 0 ? 1 - current : record.step << 1 | current;
}

void KeptRecord::Set(const RecordInstalled& record) {
  for (Version& version : block(record.block).versions) {
    std::atomic_ref(version.weights_slot).store(0);
  }
}

void KeptRecord::Set(const RecordStaged& record) {
  FOREBAY_CHECK(record.staging_slot < uint64_t{1} << kStagedBits);
  block(record.block).staged = record.step << kStagedBits | record.staging_slot;
}

void KeptRecord::Set(const RecordSums& record) {
  Sums& of = sums(record.page);
  const uint64_t other = (of.state >> 1 & 1) ^ 1;
  of.places[other] = {.frame = record.frame ? *record.frame : kNoSlot,
                      .path = record.slot ? record.slot->path : kNoSlot,
                      .offset_bytes = record.slot ? record.slot->offset_bytes : 0,
                      .size_bytes = record.slot ? record.slot->size_bytes : 0,
                      .checksum = record.checksum,
                      .spills = record.spills};
  const bool is_needed = record.frame || record.slot;
  of.state = record.step << 2 | other << 1 | (is_needed ? 1U : 0U);
}

void KeptRecord::Set(const RecordAttempt& record) {
  header().attempt = record.step << kAttemptBits | std::min(record.attempt, kAttemptMax);
}

void KeptRecord::Set(const RecordPrepared& record) {
  header().prepared = 0;
  if (record.step == 0) return;
  FOREBAY_CHECK(record.step == header().published + 1 &&
                record.summary.size() == header().summary_bytes &&
                record.extra_states.size() == header().ranks &&
                record.hyper_params.size() <= param_group_rows());
  prepared() = {.attempt = record.attempt,
                .param_groups = record.hyper_params.size(),
                .request = record.request,
                .float_sums = record.float_sums};
  std::ranges::copy(record.hyper_params, prepared_hyper_params());
  std::ranges::copy(record.extra_states, prepared_extra_states());
  std::ranges::copy(record.summary, prepared_summary());
  header().prepared = record.step;
}

void KeptRecord::WriteValues(const RecordDecision& record) {
  Values& to = values(record.step);
  const uint64_t ranks = std::min<uint64_t>(record.extra_states.size(), header().ranks);
  to = {.step = record.step,
        .ranks = ranks,
        .traced = record.trace.size(),
        .norm = record.norm,
        .clipped = record.clipped ? 1U : 0U,
        .overflowed = record.overflowed,
        .summary_bytes = record.summary.size()};
  FOREBAY_CHECK(record.summary.size() <= header().summary_bytes);
  std::ranges::copy(record.summary, summary(record.step));
  FOREBAY_CHECK(record.param_updates.size() == header().params &&
                record.trace.size() <= header().partitions);
  std::ranges::copy(record.param_updates, param_updates(record.step));
  std::copy_n(record.extra_states.begin(), ranks, extra_states(record.step));
  std::ranges::copy(record.trace, trace(record.step));
}

void KeptRecord::WriteOrder(const RecordDecision& record) {
  Order& to = order();
  const StepOrder& from = record.order;
  FOREBAY_CHECK(from.hyper_params.size() <= param_group_rows() &&
                from.params.size() == header().params);
  to = {.param_groups = from.hyper_params.size(),
        .grad_scale = from.grad_scale,
        .grad_min = from.grad_min,
        .grad_max = from.grad_max,
        .float_sums = record.float_sums};
  std::ranges::copy(from.hyper_params, hyper_params());
  std::ranges::copy(from.params, params_updated());
}

void KeptRecord::Set(const RecordDecision& record) {
  FOREBAY_CHECK(record.step == header().published + 1);
  WriteValues(record);
  WriteOrder(record);
  header().decided = record.step;
}

void KeptRecord::Set(const RecordTrust& record) {
  FOREBAY_CHECK(record.trust.size() == header().trusts && header().trust_step != record.step);
  std::ranges::copy(record.trust, trust());
  header().trust_step = record.step;
}

void KeptRecord::Set(const RecordStep& record) {
  FOREBAY_CHECK(record.step == header().decided);
  values(record.step).overflowed = record.overflowed;
  header().published = record.step;
}

void KeptRecord::Set(const RecordUpdates& record) {
  FOREBAY_CHECK(header().decided == header().published && record.param < header().params);
  param_updates(header().published)[record.param] = record.updates;
}

void KeptRecord::Set(const RecordLease& record) {
  const auto free = std::ranges::find_if(leases(), [](const Lease& one) { return one.lease == 0; });
  FOREBAY_CHECK(free != leases().end());  // LeasesRecordedMax()
  free->rank = record.lease.rank;
  free->partition = record.lease.partition;
  free->offset_bytes = record.lease.offset_bytes;
  free->lease = record.lease.lease;
}

void KeptRecord::Set(const RecordLeaseEnd& record) {
  const auto found =
      std::ranges::find_if(leases(), [&](const Lease& one) { return one.lease == record.lease; });
  if (found != leases().end()) found->lease = 0;
}

void KeptRecord::Drop() { header().is_valid = 0; }

std::optional<DurableBytes> KeptRecord::BytesOf(uint32_t index, uint64_t copy) const {
  const Version& version = block(index).versions[copy];
  if (version.path == kNoSlot) return std::nullopt;
  DurableBytes bytes{.slot = {.path = static_cast<uint32_t>(version.path),
                              .offset_bytes = version.offset_bytes,
                              .size_bytes = version.size_bytes},
                     .checksum = version.checksum,
                     .written_step = version.written_step};
  if (version.digests > 0) {
    const uint64_t* const from = digests(index, copy);
    bytes.weights_digests =
        std::make_shared<const std::vector<uint64_t>>(from, from + version.digests);
  }
  return bytes;
}

std::shared_ptr<const KeptUpdate> KeptRecord::ReadUpdate() const {
  const Header& at = header();
  const Order& from = order();
  auto update = std::make_shared<KeptUpdate>();
  update->order = {.step = at.decided,
                   .grad_scale = from.grad_scale,
                   .grad_min = from.grad_min,
                   .grad_max = from.grad_max};
  update->float_sums = from.float_sums;
  update->order.hyper_params.assign(hyper_params(), hyper_params() + from.param_groups);
  update->order.params.assign(params_updated(), params_updated() + at.params);
  if (at.trust_step == at.decided) update->trust.assign(trust(), trust() + at.trusts);
  update->blocks.resize(at.blocks);
  for (uint32_t i = 0; i < at.blocks; ++i) {
    KeptUpdate::Block& of = update->blocks[i];
    const uint64_t staged = block(i).staged;
    if (block(i).state >> 1 == at.decided) {
      const uint64_t copy = 1 - CurrentCopy(i);
      const Version& version = block(i).versions[copy];
      of.written = BytesOf(i, copy);
      of.overflows = version.overflows;
      if (version.weights_slot > 0) {
        of.weights_slot = static_cast<uint32_t>(version.weights_slot - 1);
      }
    } else if (staged >> kStagedBits == at.decided) {
      of.staging_slot = static_cast<uint32_t>(staged & ((uint64_t{1} << kStagedBits) - 1));
    }
  }
  update->sums = ReadSums(at.decided);
  return update;
}

std::vector<KeptUpdate::Sums> KeptRecord::ReadSums(uint64_t step) const {
  std::vector<KeptUpdate::Sums> read;
  for (uint32_t page = 0; page < header().sum_pages; ++page) {
    const uint64_t state = sums(page).state;
    if (state >> 2 != step || (state & 1) == 0) continue;
    const Sums::Place& place = sums(page).places[state >> 1 & 1];
    KeptUpdate::Sums& of = read.emplace_back();
    of = {.page = page, .checksum = place.checksum, .spills = place.spills};
    if (place.frame != kNoSlot) of.frame = static_cast<uint32_t>(place.frame);
    if (place.path == kNoSlot) continue;
    of.slot = {.path = static_cast<uint32_t>(place.path),
               .offset_bytes = place.offset_bytes,
               .size_bytes = place.size_bytes};
  }
  return read;
}

absl::StatusOr<std::shared_ptr<const KeptUpdate>> KeptRecord::ReadPrepared(int step_arena) const {
  const Header& at = header();
  const Prepared& from = prepared();
  auto update = std::make_shared<KeptUpdate>();
  update->order.step = at.prepared;
  update->order.hyper_params.assign(prepared_hyper_params(),
                                    prepared_hyper_params() + from.param_groups);
  update->float_sums = from.float_sums;
  update->blocks.resize(at.blocks);
  update->sums = ReadSums(at.prepared);
  KeptPrepared& of = update->prepared.emplace();
  of.attempt = from.attempt;
  of.request = from.request;
  ASSIGN_OR_RETURN(of.extra_states, ReadStates({prepared_extra_states(), at.ranks}, step_arena));
  of.summary.assign(prepared_summary(), prepared_summary() + at.summary_bytes);
  return update;
}

absl::StatusOr<ExtraStates> KeptRecord::ReadStates(std::span<const StatePart> parts,
                                                   int step_arena) {
  std::vector<std::vector<std::byte>> read;
  for (const StatePart& part : parts) {
    std::vector<std::byte>& bytes = read.emplace_back(part.bytes);
    if (part.bytes == 0) continue;
    const ssize_t got =
        ::pread(step_arena, bytes.data(), part.bytes, static_cast<off_t>(part.offset_bytes));
    if (got != static_cast<ssize_t>(part.bytes))
      return CorruptRecord("its step arena is cut short");
  }
  return std::make_shared<const std::vector<std::vector<std::byte>>>(std::move(read));
}

// Checks the numbers that readers of the record rely on.
absl::Status KeptRecord::CheckChanging() const {
  const Header& at = header();
  const uint64_t published = at.published;
  const uint64_t decided = at.decided;
  if (decided != published && decided != published + 1) return CorruptRecord("its steps");
  const Values& of_step = values(decided);
  if (of_step.step != decided || values(published).step != published || of_step.ranks > at.ranks ||
      of_step.traced > at.partitions || of_step.summary_bytes > at.summary_bytes) {
    return CorruptRecord("values of a step");
  }
  for (uint64_t i = 0; i < of_step.traced; ++i) {
    if (trace(decided)[i] >= at.partitions) return CorruptRecord("its trace");
  }
  for (uint64_t rank = 0; rank < of_step.ranks; ++rank) {
    if (extra_states(decided)[rank].bytes > protocol::kExtraStateBytesMax) {
      return CorruptRecord("extra_state");
    }
  }
  if (decided > published && order().param_groups > param_group_rows()) {
    return CorruptRecord("the order of its update");
  }
  const bool is_prepared = at.prepared == decided + 1;
  if (is_prepared && (at.summary_bytes == 0 || prepared().param_groups > param_group_rows())) {
    return CorruptRecord("the step that is prepared");
  }
  for (uint64_t rank = 0; is_prepared && rank < at.ranks; ++rank) {
    if (prepared_extra_states()[rank].bytes > protocol::kExtraStateBytesMax) {
      return CorruptRecord("extra_state of the step that is prepared");
    }
  }
  for (uint32_t i = 0; i < at.blocks; ++i) {
    for (const Version& version : block(i).versions) {
      if (version.digests > at.digests) return CorruptRecord("digests of a block");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<DurableJob> KeptRecord::Read(int step_arena) const {
  const Header& at = header();
  ASSIGN_OR_RETURN(const DecodedLedger decoded,
                   DecodeLedger(bytes_.subspan(at.job_offset, at.job_bytes)));
  if (decoded.node.jobs.size() != 1 || !decoded.node.jobs[0]->kept)
    return CorruptRecord("of no job");
  DurableJob job = *decoded.node.jobs[0];
  std::vector<nvme::Slot> slots = job.BlockSlots();
  KeptMemory kept = *std::exchange(job.kept, std::nullopt);
  if (job.blocks.size() != at.blocks || job.world_size != at.ranks)
    return CorruptRecord("other sizes");
  const uint64_t published = at.published;
  const uint64_t decided = at.decided;
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  const auto state_bytes = [&] {
    return Placement(*job.layout, map, kept.resident, {}).state_bytes();
  };
  kept.dram_bytes -= state_bytes();
  if (at.is_valid == 0) {
    return MakeError(
        ErrorId::kJobFailed,
        absl::StrCat("job ", job.name, ": nothing was recorded of it when the daemon was killed"));
  }
  RETURN_IF_ERROR(CheckChanging());
  job.step = decided;
  job.param_updates.assign(param_updates(published), param_updates(published) + at.params);
  const Values& of_step = values(decided);
  job.trace.assign(trace(decided), trace(decided) + of_step.traced);
  ASSIGN_OR_RETURN(job.extra_states,
                   ReadStates({extra_states(decided), of_step.ranks}, step_arena));
  for (uint32_t i = 0; i < at.blocks; ++i) {
    const uint64_t copy = CurrentCopy(i);
    const Version& version = block(i).versions[copy];
    kept.resident[i] = version.is_resident != 0;
    kept.written_steps[i] = kept.resident[i] ? published : version.written_step;
    job.blocks[i] = BytesOf(i, copy);
  }
  const bool is_prepared = decided == published && at.prepared == decided + 1;
  if (decided > published) kept.update = ReadUpdate();
  if (is_prepared) {
    ASSIGN_OR_RETURN(kept.update, ReadPrepared(step_arena));
  }
  if (kept.update != nullptr) {
    // If the session accumulates, the recorded dram_bytes count the float32 sums already.
    if (!kept.session.accumulate) kept.dram_bytes += kept.update->float_sums.bytes;
    // Slots that the node granted because a path failed are not in the recorded list.
    for (const KeptUpdate::Sums& sums : kept.update->sums) {
      const bool is_known =
          !sums.slot || std::ranges::find(kept.sum_slots, *sums.slot) != kept.sum_slots.end();
      if (!is_known) kept.sum_slots.push_back(*sums.slot);
    }
  }
  kept.leases.clear();
  for (const Lease& one : leases()) {
    if (one.lease == 0) continue;
    kept.leases.push_back({.lease = one.lease,
                           .rank = static_cast<uint32_t>(one.rank),
                           .partition = static_cast<uint32_t>(one.partition),
                           .offset_bytes = one.offset_bytes});
  }
  kept.norm = of_step.norm;
  kept.clipped = of_step.clipped != 0;
  kept.overflowed = of_step.overflowed;
  const uint64_t attempt = at.attempt;
  kept.attempt = attempt >> kAttemptBits == decided + 1 ? attempt & kAttemptMax : 0;
  if (is_prepared) kept.attempt = prepared().attempt;
  kept.summary.assign(summary(decided), summary(decided) + of_step.summary_bytes);
  kept.dram_bytes += state_bytes();
  job.kept = std::move(kept);
  // Slots that the job had when it was recorded and does not have now. Other jobs may have some of them now.
  job.kept->spare_slots.clear();
  job.RemoveOwn(slots);
  job.kept->spare_slots = std::move(slots);
  return job;
}

}  // namespace forebay::daemon
