// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/kept_record.h"

#include <fcntl.h>
#include <kj/exception.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/undo_sizes.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "daemon/exec/recovery/record_entry.h"
#include "daemon/exec/recovery/record_index.h"
#include "nvme/checksum.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/step_summary.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr uint64_t kMagic = 0x6472'6f63'6572'6266;  // "fbrecord"
constexpr uint64_t kRecordVersion = 8;
constexpr uint64_t kAlignment = 64;
constexpr int kHalfBit = 63;  // bit of Header::current that selects the half
constexpr uint64_t kTailMask = (uint64_t{1} << kHalfBit) - 1;

absl::Status NewerRecord(uint64_t version) {
  return MakeError(
      ErrorId::kConfig,
      absl::StrCat("the daemon before keeps a job in memory, in a record of version ", version,
                   ", made by a newer forebayd; this one reads version ", kRecordVersion),
      absl::StrCat("start the newer forebayd again", kGiveUpHint));
}

uint64_t Aligned(uint64_t bytes) { return protocol::RoundUp(bytes, kAlignment); }

RecordCounts CountsOf(const DurableJob& job, uint64_t sum_pages) {
  const protocol::Layout& layout = *job.layout;
  RecordCounts counts{
      .params = layout.params().size(),
      .param_group_rows = layout.param_group_rows(),
      .partitions = layout.partitions().size(),
      .ranks = job.world_size,
      .blocks = job.blocks.size(),
      .sum_pages = sum_pages,
      .leases = job.weights_on_swap.empty() ? 0 : LeasesRecordedMax(layout, job.world_size),
      .summary_bytes = job.kept->session.world_ranks == 0 ? 0 : protocol::NodeSummaryBytes(layout),
      .has_trust = protocol::Info(layout.spec().optimizer).passes > 1};
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  for (uint32_t i = 0; i < map.blocks(); ++i) {
    if (!map.has_weights(i)) continue;
    const uint64_t digests = (map.bytes(i) - map.weights_plane_offset(i)) / protocol::kPageBytes;
    counts.digests += digests;
    counts.block_digests = std::max(counts.block_digests, digests);
  }
  return counts;
}

// Returns the job as the record holds it: all slots are spare. The entries say which block has which slot.
DurableJob RecordedForm(DurableJob job) {
  job.kept->durable = nullptr;
  std::vector<nvme::Slot> slots = job.BlockSlots();
  for (auto& block : job.blocks) block.reset();
  job.kept->spare_slots.clear();
  job.RemoveOwn(slots);
  job.kept->spare_slots = std::move(slots);
  return job;
}

absl::StatusOr<DurableJob> DecodeJob(std::span<const std::byte> bytes) {
  ASSIGN_OR_RETURN(const DecodedLedger decoded, DecodeLedger(bytes));
  if (decoded.node.jobs.size() == 1 && decoded.node.jobs[0]->kept) return *decoded.node.jobs[0];
  return CorruptRecord("of no job");
}

}  // namespace

// All fields but `current` are constant. Each version has `magic` and `version` in these places. A change raises the version if an
// older daemon would read the file wrongly, or if the halves become larger (RecordSizes).
struct KeptRecord::Header {
  uint64_t magic = 0;
  uint64_t version = 0;
  uint64_t file_bytes = 0;
  uint64_t nonce = 0;
  uint64_t job_bytes = 0;
  uint64_t half_bytes = 0;
  uint64_t sum_pages = 0;
  uint64_t workers = 0;
  uint64_t checksum = 0;  // checksum of the fields above and of the job
  // The current half in bit kHalfBit, and the bytes of its entries. 0: the record was dropped.
  std::atomic<uint64_t> current = 0;

  uint64_t halves_offset() const { return Aligned(sizeof(Header)) + Aligned(job_bytes); }
  uint64_t undo_offset() const {
    return protocol::RoundUp(halves_offset() + 2 * half_bytes, protocol::kPageBytes);
  }
  std::span<const std::byte> job() const {
    return {reinterpret_cast<const std::byte*>(this) + Aligned(sizeof(Header)), job_bytes};
  }
  uint64_t Checksum() const {
    const auto* const begin = reinterpret_cast<const std::byte*>(this);
    return nvme::Checksum({}, {begin, offsetof(Header, checksum)}) ^ nvme::Checksum({}, job());
  }
};

// The job as it was recorded, and how much its record holds.
struct KeptRecord::Fixed {
  DurableJob job;
  RecordCounts counts;
};

KeptRecord::KeptRecord(protocol::UniqueFd fd, std::span<std::byte> bytes, const DurableJob& job,
                       const RecordCounts& counts)
    : fd_(std::move(fd)),
      bytes_(bytes),
      sizes_(SizesOf(counts)),
      index_(std::make_unique<RecordIndex>(counts)),
      undo_(undo_bytes(), job.blocks.size(), job.block_elems, header().workers,
            UndoAreaBytes(job.layout->spec())) {}

KeptRecord::~KeptRecord() {
  if (is_owned_) Drop();
  ::munmap(bytes_.data(), bytes_.size());
}

KeptRecord::Header& KeptRecord::header() const { return *reinterpret_cast<Header*>(bytes_.data()); }

std::span<std::byte> KeptRecord::half(uint64_t index) const {
  const Header& at = header();
  return bytes_.subspan(at.halves_offset() + index * at.half_bytes, at.half_bytes);
}

std::span<std::byte> KeptRecord::undo_bytes() const {
  return bytes_.subspan(header().undo_offset());
}

uint64_t KeptRecord::step() const { return index_->published(); }

bool KeptRecord::is_in_step() const { return index_->is_in_step(); }

uint64_t KeptRecord::nonce() const { return header().nonce; }

void KeptRecord::Drop() { header().current = 0; }

bool KeptRecord::is_dropped() const { return header().current == 0; }

// ------------------------------------------------------------------------------------------- making

absl::StatusOr<std::unique_ptr<KeptRecord>> KeptRecord::Make(const RecordJob& record,
                                                             uint64_t nonce, uint64_t workers) {
  const DurableJob& job = *record.job;
  FOREBAY_CHECK(job.kept.has_value());
  const auto recorded = std::make_shared<const DurableJob>(RecordedForm(job));
  ASSIGN_OR_RETURN(const std::vector<std::byte> encoded,
                   EncodeKept({.last_job = job.id, .last_lease = 0, .jobs = {recorded}}, nonce));
  const RecordCounts counts = CountsOf(job, record.sum_pages);
  Header sizes{.magic = kMagic,
               .version = kRecordVersion,
               .nonce = nonce,
               .job_bytes = encoded.size(),
               .half_bytes = SizesOf(counts).half_bytes(),
               .sum_pages = record.sum_pages,
               .workers = workers};
  const uint64_t bytes = sizes.undo_offset() +
                         UndoBytes(job.layout->spec(), job.blocks.size(), job.block_elems, workers);
  sizes.file_bytes = bytes;

  protocol::UniqueFd fd(::memfd_create("forebay-record", MFD_CLOEXEC));
  // Allocates the memory now. Without memory, a later store would end the process with SIGBUS.
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
  auto& header = *reinterpret_cast<Header*>(begin);
  std::memcpy(begin + Aligned(sizeof(Header)), encoded.data(), encoded.size());
  header.checksum = header.Checksum();
  std::unique_ptr<KeptRecord> made(new KeptRecord(std::move(fd), {begin, bytes}, job, counts));
  made->AppendBase(record);
  made->Publish();
  made->Own();
  return made;
}

void KeptRecord::AppendBase(const RecordJob& record) {
  const DurableJob& job = *record.job;
  RecordDecision values{.step = job.step,
                        .norm = job.kept->norm,
                        .clipped = job.kept->clipped,
                        .summary = job.kept->summary};
  values.param_updates.assign(job.param_updates.begin(), job.param_updates.end());
  values.trace.assign(job.trace.begin(), job.trace.end());
  values.extra_states.assign(record.extra_states.begin(), record.extra_states.end());
  Append(values);
  Append(RecordStep{.step = job.step, .overflowed = job.kept->overflowed});
  for (uint32_t i = 0; i < job.blocks.size(); ++i) {
    if (!job.blocks[i]) continue;
    Append(RecordBlock{.block = i,
                       .slot = job.blocks[i]->slot,
                       .checksum = job.blocks[i]->checksum,
                       .written_step = job.blocks[i]->written_step,
                       .weights_digests = job.blocks[i]->weights_digests});
  }
  Append(RecordAttempt{.step = job.step + 1, .attempt = job.kept->attempt});
  for (const KeptLease& lease : job.kept->leases) Append(RecordLease{.lease = lease});
}

// ------------------------------------------------------------------------------------------ adopting

absl::StatusOr<KeptRecord::Adopted> KeptRecord::Adopt(protocol::UniqueFd fd, int step_arena) {
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0) return CorruptRecord(protocol::ErrnoText("fstat", errno));
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (bytes < sizeof(Header)) return CorruptRecord(absl::StrCat("only ", bytes, " bytes"));
  void* const mapped =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), /*offset=*/0);
  if (mapped == MAP_FAILED) return CorruptRecord(protocol::ErrnoText("mmap", errno));
  const std::span all(static_cast<std::byte*>(mapped), bytes);
  absl::StatusOr<Fixed> fixed = CheckFixed(all);
  if (!fixed.ok()) {
    ::munmap(mapped, bytes);  // the daemon that wrote the record may still read it
    return fixed.status();
  }
  std::unique_ptr<KeptRecord> record(new KeptRecord(std::move(fd), all, fixed->job, fixed->counts));
  if (record->is_dropped()) {
    return MakeError(ErrorId::kJobFailed,
                     absl::StrCat("job ", fixed->job.name,
                                  ": nothing was recorded of it when the daemon was killed"));
  }
  absl::StatusOr<DurableJob> job = CorruptRecord("not read");
  const auto exception =
      kj::runCatchingExceptions([&] { job = record->Read(std::move(fixed->job), step_arena); });
  KJ_IF_MAYBE (e, exception) return CorruptRecord(e->getDescription().cStr());
  RETURN_IF_ERROR(job.status());
  return Adopted{.record = std::move(record), .job = *std::move(job)};
}

protocol::UniqueFd KeptRecord::Release(std::unique_ptr<KeptRecord> record) {
  record->Leave();
  return std::move(record->fd_);
}

// Checks all of the record but its entries.
absl::StatusOr<KeptRecord::Fixed> KeptRecord::CheckFixed(std::span<const std::byte> bytes) {
  const auto& at = *reinterpret_cast<const Header*>(bytes.data());
  if (at.magic == kMagic && at.version > kRecordVersion) return NewerRecord(at.version);
  if (at.magic != kMagic || at.version != kRecordVersion) {
    return CorruptRecord(
        absl::StrCat("version ", at.version, "; this forebayd reads version ", kRecordVersion));
  }
  const bool is_whole = at.file_bytes == bytes.size() && at.job_bytes <= bytes.size() &&
                        at.half_bytes <= bytes.size() && at.workers <= bytes.size() &&
                        at.undo_offset() <= bytes.size() && at.Checksum() == at.checksum;
  if (!is_whole) {
    return CorruptRecord(
        absl::StrCat("it is damaged, or cut: ", bytes.size(), " bytes of ", at.file_bytes));
  }
  ASSIGN_OR_RETURN(DurableJob job, DecodeJob(at.job()));
  const RecordCounts counts = CountsOf(job, at.sum_pages);
  const uint64_t undo_bytes =
      UndoBytes(job.layout->spec(), job.blocks.size(), job.block_elems, at.workers);
  const bool fits = at.half_bytes >= SizesOf(counts).half_bytes() &&
                    at.undo_offset() + undo_bytes == bytes.size();
  if (!fits) return CorruptRecord("other sizes");
  return Fixed{.job = std::move(job), .counts = counts};
}

// May throw kj::Exception.
absl::Status KeptRecord::ReadEntries() {
  const uint64_t current = header().current;
  half_ = current >> kHalfBit;
  const uint64_t tail = current & kTailMask;
  if (tail > header().half_bytes) return CorruptRecord(absl::StrCat(tail, " bytes of entries"));
  while (tail_ < tail) {
    const std::span<const std::byte> rest = half(half_).subspan(tail_, tail - tail_);
    ASSIGN_OR_RETURN(const uint64_t bytes, CheckEntry(rest));
    RETURN_IF_ERROR(index_->Add(EntryReader(rest).Get(), tail_));
    tail_ += bytes;
  }
  return index_->is_whole() ? absl::OkStatus() : CorruptRecord("no values of a step");
}

// May throw kj::Exception.
absl::StatusOr<DurableJob> KeptRecord::Read(DurableJob job, int step_arena) {
  RETURN_IF_ERROR(ReadEntries());
  return index_->Read(std::move(job), half(half_), step_arena);
}

// ------------------------------------------------------------------------------------------ writing

void KeptRecord::Publish() {
  header().current.store(half_ << kHalfBit | tail_, std::memory_order_release);
}

template <typename Record>
void KeptRecord::Append(const Record& record) {
  FOREBAY_CHECK(tail_ + EntryBytesMax(record) <= header().half_bytes);  // RecordSizes
  const std::span<std::byte> entry = half(half_).subspan(tail_);
  const uint64_t bytes = WriteEntry(record, entry);
  const absl::Status added = index_->Add(EntryReader(entry).Get(), tail_);
  FOREBAY_CHECK(added.ok());
  tail_ += bytes;
}

// Adds the entries. One store makes all of them count.
template <typename... Records>
void KeptRecord::AppendAndPublish(const Records&... records) {
  if (is_dropped()) return;
  if (tail_ + (EntryBytesMax(records) + ...) > header().half_bytes) Compact();
  (Append(records), ...);
  Publish();
}

// Copies the entries that count to the other half. Until Publish(), the half that the header selects still counts.
void KeptRecord::Compact() {
  const std::span<const std::byte> from = half(half_);
  const std::span<std::byte> to = half(1 - half_);
  uint64_t end = 0;
  index_->Move([&](uint64_t offset) {
    EntryHead head;
    std::memcpy(&head, from.data() + offset, sizeof(head));
    const uint64_t bytes = sizeof(head) + head.message_bytes;
    std::ranges::copy(from.subspan(offset, bytes), to.subspan(end).begin());
    return std::exchange(end, end + bytes);
  });
  half_ = 1 - half_;
  tail_ = end;
}

void KeptRecord::Set(const RecordBlock& record) {
  // An earlier daemon has recorded the block for this step already. A second entry could name weights that were installed since.
  if (record.step != 0 && index_->HasWritten(record.block, record.step)) return;
  AppendAndPublish(record);
}

void KeptRecord::Set(const RecordDecision& record) {
  AppendAndPublish(RecordOrder{record}, record);
}

void KeptRecord::Set(const RecordStep& record) {
  AppendAndPublish(record);
  if (is_dropped() || tail_ + sizes_.step_bytes <= header().half_bytes) return;
  Compact();
  Publish();
}

void KeptRecord::Set(const RecordInstalled& record) { AppendAndPublish(record); }
void KeptRecord::Set(const RecordStaged& record) { AppendAndPublish(record); }
void KeptRecord::Set(const RecordSums& record) { AppendAndPublish(record); }
void KeptRecord::Set(const RecordAttempt& record) { AppendAndPublish(record); }
void KeptRecord::Set(const RecordPrepared& record) { AppendAndPublish(record); }
void KeptRecord::Set(const RecordTrust& record) { AppendAndPublish(record); }
void KeptRecord::Set(const RecordUpdates& record) { AppendAndPublish(record); }
void KeptRecord::Set(const RecordLease& record) { AppendAndPublish(record); }
void KeptRecord::Set(const RecordLeaseEnd& record) { AppendAndPublish(record); }

}  // namespace forebay::daemon
