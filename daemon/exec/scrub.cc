// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/scrub.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/blocks/durable_content.h"
#include "daemon/exec/block_tasks.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "nvme/find_volume.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/clock.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr uint64_t kScrubReadsPerPath = 4;  // in flight
constexpr std::chrono::seconds kSilentMax(60);

// One job after the other, the slots of each in the order in which they lie on the paths.
class Scrubber {
 public:
  Scrubber(nvme::Volume& volume, nvme::IoEngine& engine, uint64_t nonce,
           const pinned_mem::PinnedArena& memory, uint64_t buffer_bytes)
      : volume_(volume), engine_(engine), nonce_(nonce) {
    for (uint64_t at = 0; at + buffer_bytes <= memory.capacity_bytes(); at += buffer_bytes) {
      reads_.push_back({.memory = memory.bytes().subspan(at, buffer_bytes)});
    }
  }

  absl::StatusOr<ScrubbedJob> Run(std::shared_ptr<const DurableJob> job) {
    const uint64_t began_ns = protocol::MonotonicNs();
    const DurableContent content(job);
    content_ = &content;
    found_ = ScrubbedJob{.job = std::move(job), .damaged = {}};
    FindEntries();
    while (next_ < entries_.size() || in_flight_ > 0) {
      for (size_t read = 0; read < reads_.size() && next_ < entries_.size(); ++read) {
        if (!reads_[read].is_busy) Start(read);
      }
      RETURN_IF_ERROR(Wait());
    }
    found_.seconds = static_cast<double>(protocol::MonotonicNs() - began_ns) * 1e-9;
    std::ranges::sort(found_.damaged, {}, &DamagedSlot::slot);
    return std::move(found_);
  }

 private:
  struct Read {
    std::span<std::byte> memory;
    bool is_busy = false;
    uint32_t entry = 0;
    DurableContent::Expected expected = {};
  };

  void FindEntries() {
    entries_.clear();
    next_ = 0;
    for (uint32_t entry = 0; entry < content_->entries(); ++entry) {
      const std::optional<DurableContent::Expected> expected = content_->At(entry);
      if (!expected) continue;
      entries_.push_back(entry);
      ++found_.slots;
      found_.bytes += expected->bytes;
    }
    // All paths at once.
    std::ranges::stable_sort(entries_, {}, [this](uint32_t entry) {
      const nvme::Slot slot = content_->At(entry)->slot;
      return std::pair(slot.offset_bytes, slot.path);
    });
  }

  void Start(size_t number) {
    Read& read = reads_[number];
    read.entry = entries_[next_++];
    read.expected = *content_->At(read.entry);
    const absl::Status status =
        volume_.Read(read.expected.slot, read.memory.first(read.expected.bytes), /*token=*/number);
    if (!status.ok()) return Add(read, status);
    read.is_busy = true;
    ++in_flight_;
  }

  absl::Status Wait() {
    if (in_flight_ == 0) return absl::OkStatus();
    std::array<nvme::Completion, 64> completions;
    std::vector<nvme::Finished> finished;
    ASSIGN_OR_RETURN(const size_t count, engine_.Wait(kSilentMax, completions));
    if (count == 0) {
      if (++silent_waits_ == 1) return absl::OkStatus();  // a signal, or a process that slept
      return MakeError(ErrorId::kSwapTimeout,
                       absl::StrCat("the disk has not answered ", in_flight_, " reads for ",
                                    kSilentMax.count(), " s"),
                       "look at the device's health (dmesg)");
    }
    silent_waits_ = 0;
    for (size_t i = 0; i < count; ++i) volume_.OnCompletion(completions[i], finished);
    for (const nvme::Finished& one : finished) {
      Read& read = reads_[one.token];
      --in_flight_;
      read.is_busy = false;
      Add(read, one.status.ok() ? Verify(read) : one.status);
    }
    return absl::OkStatus();
  }

  absl::Status Verify(const Read& read) const {
    const DurableContent::Expected& expected = read.expected;
    return VerifyBlock(nvme::ExpectedContent{.slot = expected.slot,
                                             .path = volume_.path_name(expected.slot.path),
                                             .identity = MakeIdentity(expected.identity, nonce_),
                                             .checksum = expected.checksum},
                       expected.identity, read.memory.first(expected.bytes));
  }

  void Add(const Read& read, const absl::Status& status) {
    if (status.ok()) return;
    const nvme::Slot& slot = read.expected.slot;
    found_.damaged.push_back({.what = content_->Name(read.entry),
                              .slot = slot,
                              .path = std::string(volume_.path_name(slot.path)),
                              .params = content_->Params(read.entry),
                              .status = status});
  }

  nvme::Volume& volume_;
  nvme::IoEngine& engine_;
  uint64_t nonce_;
  std::vector<Read> reads_;
  // Of the job that is read.
  const DurableContent* content_ = nullptr;
  ScrubbedJob found_;
  std::vector<uint32_t> entries_;
  size_t next_ = 0;
  uint32_t in_flight_ = 0;
  uint32_t silent_waits_ = 0;
};

}  // namespace

bool ScrubReport::is_clean() const {
  return !recovery.fell_back &&
         std::ranges::all_of(jobs, [](const ScrubbedJob& job) { return job.damaged.empty(); });
}

absl::StatusOr<ScrubReport> ScrubVolume(nvme::Volume& volume, nvme::IoEngine& engine) {
  ScrubReport report{.recovery = volume.recovery(), .jobs = {}};
  if (volume.durable_sequence() == 0) return report;
  ASSIGN_OR_RETURN(const DecodedLedger ledger, DecodeLedgerOf(volume));
  uint64_t buffer_bytes = protocol::kPageBytes;
  for (const auto& job : ledger.node.jobs) buffer_bytes = std::max(buffer_bytes, job->slot_bytes);
  const uint64_t reads = kScrubReadsPerPath * volume.free_slots().paths();
  ASSIGN_OR_RETURN(const std::unique_ptr<pinned_mem::PinnedArena> memory,
                   pinned_mem::PinnedArena::Create({.name = "forebay-scrub",
                                                    .capacity_bytes = reads * buffer_bytes,
                                                    .lock = pinned_mem::LockPolicy::kBestEffort}));
  Scrubber scrubber(volume, engine, ledger.nonce, *memory, buffer_bytes);
  for (const std::shared_ptr<const DurableJob>& job : ledger.node.jobs) {
    ASSIGN_OR_RETURN(ScrubbedJob scrubbed, scrubber.Run(job));
    report.jobs.push_back(std::move(scrubbed));
  }
  return report;
}

absl::StatusOr<ScrubReport> ScrubPaths(const std::vector<nvme::PathOptions>& paths,
                                       nvme::IoEngine& engine) {
  ASSIGN_OR_RETURN(const std::vector<nvme::PathOptions> sized, nvme::WithSizes(paths));
  ASSIGN_OR_RETURN(const std::unique_ptr<nvme::Volume> volume, nvme::InspectVolume(sized, engine));
  if (volume == nullptr) return ScrubReport{};
  return ScrubVolume(*volume, engine);
}

}  // namespace forebay::daemon
