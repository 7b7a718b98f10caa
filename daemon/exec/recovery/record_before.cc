// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/record_before.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/exec/recovery/kept_record.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "nvme/checksum.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "protocol/os/memfd.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::daemon {
namespace before {
namespace {

constexpr uint64_t kMagic = 0x6472'6f63'6572'6266;  // "fbrecord"
constexpr uint64_t kVersion = 7;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kNoSlot = UINT64_MAX;
constexpr int kStagedBits = 16;
constexpr int kAttemptBits = 16;
constexpr uint64_t kAttemptMax = (uint64_t{1} << kAttemptBits) - 1;

absl::Status CorruptBefore(const std::string& what) {
  return protocol::MakeError(protocol::ErrorId::kCorrupt,
                             absl::StrCat("the record of a job, of release 0.2.0: ", what));
}

// Offsets and sizes of the sections. Sections of a step exist twice; step % 2 selects one.
struct Header {
  uint64_t magic;
  uint64_t version;
  uint64_t file_bytes;
  uint64_t nonce;
  uint64_t job_bytes;
  uint64_t params;
  uint64_t partitions;
  uint64_t ranks;
  uint64_t blocks;
  uint64_t digests;  // largest number of digests of a block
  uint64_t job_offset;
  uint64_t values_offset;
  uint64_t values_bytes;
  uint64_t blocks_offset;
  uint64_t digests_offset;
  uint64_t order_offset;
  uint64_t sums_offset;
  uint64_t sum_pages;
  uint64_t undo_offset;
  uint64_t undo_bytes;
  uint64_t undo_area_bytes;
  uint64_t block_elems;
  uint64_t workers;
  uint64_t is_valid;
  uint64_t published;
  uint64_t decided;
  uint64_t attempt;  // the step, then kAttemptBits bits of the attempt
  uint64_t trusts;
  uint64_t trust_step;
  uint64_t leases_offset;
  uint64_t leases;
  uint64_t summary_bytes;
  uint64_t prepared_offset;
  uint64_t prepared;
  uint64_t checksum;  // checksum of the job and of the constant fields
};

struct Version {
  uint64_t path;
  uint64_t offset_bytes;
  uint64_t size_bytes;
  uint64_t checksum;
  uint64_t written_step;
  uint64_t digests;
  uint64_t is_resident;
  uint64_t overflows;
  uint64_t weights_slot;  // 1 + the slot of the new weights; 0: the weights are installed
};

// `state`: step << 1 | copy. `copy` is current until `step` is published. `staged`: the step, then kStagedBits bits of the slot.
struct Block {
  uint64_t state;
  uint64_t staged;
  std::array<Version, 2> versions;
};

// `state`: the step, one bit for the place, one bit that is set if the page is needed.
struct Sums {
  struct Place {
    uint64_t frame;
    uint64_t path;
    uint64_t offset_bytes;
    uint64_t size_bytes;
    uint64_t checksum;
    uint64_t spills;
  };
  uint64_t state;
  std::array<Place, 2> places;
};

struct Lease {
  uint64_t lease;  // 0 if the entry is free
  uint64_t rank;
  uint64_t partition;
  uint64_t offset_bytes;
};

struct Order {
  uint64_t param_groups;
  float grad_scale;
  float grad_min;
  float grad_max;
  StatePart float_sums;
};

struct Prepared {
  uint64_t attempt;
  uint64_t param_groups;
  protocol::StepRequest request;
  StatePart float_sums;
};

struct Values {
  uint64_t step;
  uint64_t ranks;
  uint64_t traced;
  double norm;
  uint64_t clipped;
  uint64_t overflowed;
  uint64_t summary_bytes;
};

// Reads the sections of a copy of the file.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  absl::StatusOr<protocol::UniqueFd> Convert() {
    RETURN_IF_ERROR(CheckHeader());
    ASSIGN_OR_RETURN(RecordJob made, ReadJob());
    ASSIGN_OR_RETURN(std::unique_ptr<KeptRecord> record,
                     KeptRecord::Make(made, at_.nonce, at_.workers));
    if (record->undo_bytes().size() != at_.undo_bytes) return CorruptBefore("its undo log");
    std::ranges::copy(bytes_.subspan(at_.undo_offset, at_.undo_bytes),
                      record->undo_bytes().begin());
    const uint64_t attempt = at_.attempt;
    record->Set(RecordAttempt{.step = attempt >> kAttemptBits, .attempt = attempt & kAttemptMax});
    if (at_.decided > at_.published) {
      SetUpdate(*record);
    } else if (at_.prepared == at_.decided + 1) {
      RETURN_IF_ERROR(SetPrepared(*record));
    }
    return KeptRecord::Release(std::move(record));
  }

 private:
  // Returns `count` values at `offset`. The sections of a record whose header is intact are in the file.
  template <typename T>
  std::span<const T> At(uint64_t offset, uint64_t count) const {
    return {reinterpret_cast<const T*>(bytes_.data() + offset), count};
  }
  const Values& values(uint64_t step) const { return At<Values>(ValuesAt(step), 1)[0]; }
  uint64_t ValuesAt(uint64_t step) const {
    return at_.values_offset + (step % 2) * at_.values_bytes;
  }
  std::span<const uint64_t> updates(uint64_t step) const {
    return At<uint64_t>(ValuesAt(step) + sizeof(Values), at_.params);
  }
  uint64_t StatesAt(uint64_t step) const {
    return ValuesAt(step) + sizeof(Values) + at_.params * sizeof(uint64_t);
  }
  std::span<const StatePart> states(uint64_t step) const {
    return At<StatePart>(StatesAt(step), values(step).ranks);
  }
  std::span<const uint32_t> trace(uint64_t step) const {
    return At<uint32_t>(StatesAt(step) + at_.ranks * sizeof(StatePart), values(step).traced);
  }
  std::span<const std::byte> summary(uint64_t step) const {
    return At<std::byte>(
        StatesAt(step) + at_.ranks * sizeof(StatePart) + at_.partitions * sizeof(uint32_t),
        values(step).summary_bytes);
  }
  const Block& block(uint32_t index) const {
    return At<Block>(at_.blocks_offset, at_.blocks)[index];
  }
  const Order& order() const { return At<Order>(at_.order_offset, 1)[0]; }
  const Prepared& prepared() const { return At<Prepared>(at_.prepared_offset, 1)[0]; }

  // Returns the number of parameter groups for which the record has room. The room behind the last one is smaller than a row.
  uint64_t group_rows() const {
    const uint64_t bytes =
        at_.sums_offset - at_.order_offset - kAlignment - at_.trusts * sizeof(float) - at_.params;
    return bytes / sizeof(protocol::HyperParams);
  }

  absl::Status CheckHeader() {
    if (bytes_.size() < sizeof(Header)) return CorruptBefore("it is cut short");
    at_ = At<Header>(0, 1)[0];
    if (at_.file_bytes != bytes_.size() || at_.job_offset > bytes_.size() ||
        at_.job_bytes > bytes_.size() - at_.job_offset) {
      return CorruptBefore("it is damaged, or cut");
    }
    Header fixed = at_;
    fixed.is_valid = fixed.published = fixed.decided = fixed.attempt = 0;
    fixed.trust_step = fixed.prepared = fixed.checksum = 0;
    const uint64_t checksum = nvme::Checksum({}, std::as_bytes(std::span(&fixed, 1))) ^
                              nvme::Checksum({}, bytes_.subspan(at_.job_offset, at_.job_bytes));
    if (checksum != at_.checksum) return CorruptBefore("it is damaged");
    if (at_.is_valid == 0) {
      return protocol::MakeError(protocol::ErrorId::kJobFailed,
                                 "a job: nothing was recorded of it when the daemon was killed");
    }
    return CheckChanging();
  }

  // Checks the numbers that change. Counts and entries of the new record follow from these numbers.
  absl::Status CheckChanging() const {
    if (at_.decided != at_.published && at_.decided != at_.published + 1) {
      return CorruptBefore("its steps");
    }
    for (const uint64_t step : {at_.published, at_.decided}) {
      const Values& of = values(step);
      if (of.step != step || of.ranks > at_.ranks || of.traced > at_.partitions ||
          of.summary_bytes > at_.summary_bytes || !AreStates(states(step)) ||
          std::ranges::any_of(trace(step), [&](uint32_t one) { return one >= at_.partitions; })) {
        return CorruptBefore("values of a step");
      }
    }
    if (at_.decided > at_.published && order().param_groups > group_rows()) {
      return CorruptBefore("the order of its update");
    }
    for (uint32_t i = 0; i < at_.blocks; ++i) {
      if (std::ranges::any_of(block(i).versions, [&](const Version& version) {
            return version.digests > at_.digests || !IsSlotOrNone(version);
          })) {
        return CorruptBefore("the place of a block");
      }
    }
    for (const Sums& page : At<Sums>(at_.sums_offset, at_.sum_pages)) {
      if (!std::ranges::all_of(page.places, IsSlotOrNone<Sums::Place>)) {
        return CorruptBefore("a page of gradient sums");
      }
    }
    return absl::OkStatus();
  }

  static bool AreStates(std::span<const StatePart> states) {
    return std::ranges::all_of(
        states, [](const StatePart& part) { return part.bytes <= protocol::kExtraStateBytesMax; });
  }
  template <typename Place>
  static bool IsSlotOrNone(const Place& place) {
    return place.path == kNoSlot ||
           (place.path < nvme::Volume::kPathsMax && place.offset_bytes <= INT64_MAX &&
            place.offset_bytes % protocol::kPageBytes == 0);
  }

  uint64_t CurrentCopy(uint32_t index) const {
    const uint64_t step = block(index).state >> 1;
    const bool is_other = step != 0 && step <= at_.published;
    return (block(index).state & 1) ^ (is_other ? 1 : 0);
  }

  RecordBlock BlockOf(uint32_t index, uint64_t copy) const {
    const Version& from = block(index).versions[copy];
    RecordBlock to{.block = index,
                   .checksum = from.checksum,
                   .written_step = from.written_step,
                   .overflows = from.overflows};
    if (from.path != kNoSlot) {
      to.slot = nvme::Slot{.path = static_cast<uint32_t>(from.path),
                           .offset_bytes = from.offset_bytes,
                           .size_bytes = from.size_bytes};
    }
    if (from.weights_slot > 0) to.weights_slot = static_cast<uint32_t>(from.weights_slot - 1);
    if (from.digests > 0) {
      const uint64_t offset =
          at_.digests_offset + (2 * uint64_t{index} + copy) * at_.digests * sizeof(uint64_t);
      const auto digests = At<uint64_t>(offset, from.digests);
      to.weights_digests =
          std::make_shared<const std::vector<uint64_t>>(digests.begin(), digests.end());
    }
    return to;
  }

  // Returns the job at its published step.
  absl::StatusOr<RecordJob> ReadJob() const {
    ASSIGN_OR_RETURN(const DecodedLedger decoded,
                     DecodeLedger(bytes_.subspan(at_.job_offset, at_.job_bytes)));
    if (decoded.node.jobs.size() != 1 || !decoded.node.jobs[0]->kept)
      return CorruptBefore("of no job");
    DurableJob job = *decoded.node.jobs[0];
    if (job.blocks.size() != at_.blocks || job.world_size != at_.ranks ||
        job.param_updates.size() != at_.params ||
        job.layout->partitions().size() != at_.partitions ||
        at_.workers > bytes_.size() / protocol::kPageBytes) {
      return CorruptBefore("other sizes");
    }
    std::vector<nvme::Slot> slots = job.BlockSlots();
    KeptMemory& kept = *job.kept;
    const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
    const auto state_bytes = [&] {
      return Placement(*job.layout, map, kept.resident, {}).state_bytes();
    };
    kept.dram_bytes -= state_bytes();
    job.step = at_.published;
    const Values& of_step = values(job.step);
    job.param_updates.assign(updates(job.step).begin(), updates(job.step).end());
    job.trace.assign(trace(job.step).begin(), trace(job.step).end());
    for (uint32_t i = 0; i < at_.blocks; ++i) {
      const RecordBlock from = BlockOf(i, CurrentCopy(i));
      kept.resident[i] = block(i).versions[CurrentCopy(i)].is_resident != 0;
      kept.written_steps[i] = from.written_step;
      job.blocks[i].reset();
      if (!from.slot) continue;
      job.blocks[i] = {.slot = *from.slot,
                       .checksum = from.checksum,
                       .written_step = from.written_step,
                       .weights_digests = from.weights_digests};
    }
    kept.dram_bytes += state_bytes();
    kept.norm = of_step.norm;
    kept.clipped = of_step.clipped != 0;
    kept.overflowed = of_step.overflowed;
    kept.summary.assign(summary(job.step).begin(), summary(job.step).end());
    kept.leases.clear();
    for (const Lease& one : At<Lease>(at_.leases_offset, at_.leases)) {
      if (one.lease == 0) continue;
      kept.leases.push_back({.lease = one.lease,
                             .rank = static_cast<uint32_t>(one.rank),
                             .partition = static_cast<uint32_t>(one.partition),
                             .offset_bytes = one.offset_bytes});
    }
    kept.spare_slots.clear();
    job.RemoveOwn(slots);
    kept.spare_slots = std::move(slots);
    return RecordJob{.job = std::make_shared<const DurableJob>(job),
                     .extra_states = {states(job.step).begin(), states(job.step).end()},
                     .sum_pages = static_cast<uint32_t>(at_.sum_pages)};
  }

  void SetSums(KeptRecord& record, uint64_t step) const {
    for (uint32_t page = 0; page < at_.sum_pages; ++page) {
      const Sums& of = At<Sums>(at_.sums_offset, at_.sum_pages)[page];
      if (of.state >> 2 != step || (of.state & 1) == 0) continue;
      const Sums::Place& place = of.places[of.state >> 1 & 1];
      RecordSums to{.page = page, .step = step, .checksum = place.checksum, .spills = place.spills};
      if (place.frame != kNoSlot) to.frame = static_cast<uint32_t>(place.frame);
      if (place.path != kNoSlot) {
        to.slot = nvme::Slot{.path = static_cast<uint32_t>(place.path),
                             .offset_bytes = place.offset_bytes,
                             .size_bytes = place.size_bytes};
      }
      record.Set(to);
    }
  }

  void SetUpdate(KeptRecord& record) const {
    const uint64_t step = at_.decided;
    const Values& of_step = values(step);
    const Order& from = order();
    const uint64_t rows_at = at_.order_offset + kAlignment;
    const uint64_t trust_at = rows_at + group_rows() * sizeof(protocol::HyperParams);
    const auto groups = At<protocol::HyperParams>(rows_at, from.param_groups);
    const auto params = At<uint8_t>(trust_at + at_.trusts * sizeof(float), at_.params);
    RecordDecision to{.step = step,
                      .order = {.step = step,
                                .grad_scale = from.grad_scale,
                                .grad_min = from.grad_min,
                                .grad_max = from.grad_max,
                                .hyper_params = {groups.begin(), groups.end()},
                                .params = {params.begin(), params.end()}},
                      .float_sums = from.float_sums,
                      .param_updates = {updates(step).begin(), updates(step).end()},
                      .trace = {trace(step).begin(), trace(step).end()},
                      .extra_states = {states(step).begin(), states(step).end()},
                      .norm = of_step.norm,
                      .clipped = of_step.clipped != 0,
                      .overflowed = of_step.overflowed,
                      .summary = {summary(step).begin(), summary(step).end()}};
    record.Set(to);
    if (at_.trusts > 0 && at_.trust_step == step) {
      const auto trust = At<float>(trust_at, at_.trusts);
      record.Set(RecordTrust{.step = step, .trust = {trust.begin(), trust.end()}});
    }
    for (uint32_t i = 0; i < at_.blocks; ++i) {
      const Block& of = block(i);
      if (of.staged >> kStagedBits == step) {
        record.Set(RecordStaged{
            .block = i,
            .step = step,
            .staging_slot = static_cast<uint32_t>(of.staged & ((1U << kStagedBits) - 1))});
      }
      if (of.state >> 1 != step) continue;
      RecordBlock written = BlockOf(i, 1 - CurrentCopy(i));
      written.step = step;
      record.Set(written);
    }
    SetSums(record, step);
  }

  absl::Status SetPrepared(KeptRecord& record) const {
    const Prepared& from = prepared();
    const uint64_t rows_at = at_.prepared_offset + sizeof(Prepared);
    const uint64_t states_at = rows_at + group_rows() * sizeof(protocol::HyperParams);
    const auto parts = At<StatePart>(states_at, at_.ranks);
    if (at_.summary_bytes == 0 || from.param_groups > group_rows() || !AreStates(parts)) {
      return CorruptBefore("the step that is prepared");
    }
    const auto groups = At<protocol::HyperParams>(rows_at, from.param_groups);
    const auto bytes = At<std::byte>(states_at + at_.ranks * sizeof(StatePart), at_.summary_bytes);
    SetSums(record, at_.prepared);
    record.Set(RecordPrepared{.step = at_.prepared,
                              .attempt = from.attempt,
                              .request = from.request,
                              .hyper_params = {groups.begin(), groups.end()},
                              .float_sums = from.float_sums,
                              .extra_states = {parts.begin(), parts.end()},
                              .summary = {bytes.begin(), bytes.end()}});
    return absl::OkStatus();
  }

  std::span<const std::byte> bytes_;
  Header at_ = {};
};

}  // namespace
}  // namespace before

bool IsRecordBefore(const protocol::UniqueFd& fd) {
  std::array<uint64_t, 2> begin = {};
  return protocol::ReadFromStart(fd.get(), std::as_writable_bytes(std::span(begin))) ==
             static_cast<int64_t>(sizeof(begin)) &&
         begin[0] == before::kMagic && begin[1] == before::kVersion;
}

absl::StatusOr<protocol::UniqueFd> ConvertRecord(const protocol::UniqueFd& fd) {
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0)
    return before::CorruptBefore(protocol::ErrnoText("fstat", errno));
  std::vector<std::byte> bytes(static_cast<uint64_t>(info.st_size));
  if (protocol::ReadFromStart(fd.get(), bytes) != info.st_size)
    return before::CorruptBefore("it is cut short");
  return before::Reader(bytes).Convert();
}

}  // namespace forebay::daemon
