// SPDX-License-Identifier: Apache-2.0
// Volume: the blocking steps of Open(), which create an empty volume or find the newest durable state.
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "nvme/internal/volume_state.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::nvme {

using internal::kCopies;
using internal::Label;
using internal::PageBuffer;
using internal::Path;
using internal::Place;
using internal::Record;
using internal::SlotEntry;
using internal::VolumeId;
using protocol::ErrorId;
using protocol::kPageBytes;
using protocol::MakeError;

namespace {

constexpr char kOtherVolumeHint[] =
    "give the paths and sizes the volume was made with; forebayd --reclaim makes it anew and gives "
    "up its jobs";

}  // namespace

// Erases the old labels of the first path, then the old records, then writes the new labels. A power cut in between leaves the
// old volume unchanged, no volume, or the new, empty volume.
absl::Status Volume::State::Initialise() {
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    return absl::InternalError(protocol::ErrnoText("getrandom", errno));
  }
  const PageBuffer zeros(kPageBytes);
  for (uint32_t copy = 0; copy < kCopies; ++copy) {
    RETURN_IF_ERROR(WriteNow(geometry.LabelPlace(0, copy), zeros));
  }
  RETURN_IF_ERROR(SyncNow());
  // Writes an empty ledger with sequence 0, to which recovery falls back if the first commit is interrupted.
  Record empty{.area = 1, .volume = id};
  empty.area_checksum = internal::AreaChecksum(empty, {});
  PageBuffer first(kPageBytes);
  EncodePage(empty, first.bytes());
  for (uint32_t copy = 0; copy < kCopies; ++copy) {
    RETURN_IF_ERROR(WriteNow(geometry.RecordPlace(0, copy), zeros));
    RETURN_IF_ERROR(WriteNow(geometry.RecordPlace(1, copy), first));
  }
  RETURN_IF_ERROR(SyncNow());
  for (uint32_t path = 0; path < paths.size(); ++path) {
    PageBuffer page(kPageBytes);
    EncodePage(Label{.path_index = path,
                     .volume = id,
                     .capacity_bytes = paths[path].stats.capacity_bytes,
                     .ledger_bytes_max = geometry.area_bytes(),
                     .paths = static_cast<uint32_t>(paths.size())},
               page.bytes());
    for (uint32_t copy = 0; copy < kCopies; ++copy) {
      RETURN_IF_ERROR(WriteNow(geometry.LabelPlace(path, copy), page));
    }
  }
  return SyncNow();
}

absl::Status Volume::State::WriteNow(Place place, const PageBuffer& page) {
  Path& path = paths[place.path];
  ++path.stats.writes;
  path.stats.written_bytes += kPageBytes;
  return path.file->Write(place.offset_bytes, page.bytes());
}

absl::Status Volume::State::ReadNow(Place place, std::span<std::byte> bytes) {
  Path& path = paths[place.path];
  ++path.stats.reads;
  path.stats.read_bytes += bytes.size();
  return path.file->Read(place.offset_bytes, bytes);
}

absl::Status Volume::State::SyncNow() {
  for (Path& path : paths) {
    ++path.stats.flushes;
    RETURN_IF_ERROR(path.file->Sync());
  }
  return absl::OkStatus();
}

// Checks that every path has a label of the same volume, created with these options.
absl::Status Volume::State::FindVolume() {
  std::vector<std::vector<Label>> labels(paths.size());
  for (uint32_t path = 0; path < paths.size(); ++path) {
    for (uint32_t copy = 0; copy < kCopies; ++copy) {
      PageBuffer page(kPageBytes);
      RETURN_IF_ERROR(ReadNow(geometry.LabelPlace(path, copy), page.bytes()));
      Label label;
      if (DecodePage(page.bytes(), label)) labels[path].push_back(label);
    }
  }
  for (const Label& candidate : labels[0]) {
    const auto has_label = [&](uint32_t path) {
      return std::any_of(labels[path].begin(), labels[path].end(), [&](const Label& label) {
        return label.volume == candidate.volume && label.path_index == path &&
               label.paths == paths.size() && label.ledger_bytes_max == geometry.area_bytes() &&
               label.capacity_bytes == paths[path].stats.capacity_bytes;
      });
    };
    uint32_t path = 0;
    while (path < paths.size() && has_label(path)) ++path;
    if (path == paths.size()) {
      id = candidate.volume;
      for (const std::vector<Label>& of_path : labels) {
        const auto whole = std::ranges::count(of_path, id, &Label::volume);
        recovery.damaged_labels += kCopies - static_cast<uint32_t>(whole);
      }
      return absl::OkStatus();
    }
  }
  for (uint32_t path = 0; path < paths.size(); ++path) {
    if (!labels[path].empty()) continue;
    return MakeError(ErrorId::kSwapPath,
                     absl::StrFormat("%s: holds no volume to recover", PathText(path)),
                     kOtherVolumeHint);
  }
  return MakeError(ErrorId::kSwapPath,
                   absl::StrFormat("%s: the %d paths are not one volume in this order and with "
                                   "these sizes",
                                   PathText(0), paths.size()),
                   kOtherVolumeHint);
}

// Returns the intact records of this volume, the newest first, without duplicates.
absl::StatusOr<std::vector<Record>> Volume::State::FindRecords() {
  std::vector<std::pair<Record, uint64_t>> whole;  // record and its checksum
  std::array<uint32_t, 2> whole_copies{};          // number of intact copies of each record
  uint32_t zeros = 0;
  for (uint32_t slot = 0; slot < 2; ++slot) {
    for (uint32_t copy = 0; copy < kCopies; ++copy) {
      PageBuffer page(kPageBytes);
      RETURN_IF_ERROR(ReadNow(geometry.RecordPlace(slot, copy), page.bytes()));
      Record record;
      if (internal::IsZero(page.bytes())) {
        ++zeros;
        continue;
      }
      if (DecodePage(page.bytes(), record) && record.volume == id && record.area < 2 &&
          internal::AreaBytes(record.slots, record.ledger_bytes).value_or(UINT64_MAX) <=
              geometry.area_bytes()) {
        whole.emplace_back(record, internal::PageChecksum(page.bytes()));
        ++whole_copies[slot];
      } else {
        ++recovery.damaged_records;
      }
    }
  }
  // If a record names a predecessor, two commits have written both record positions. A page of zeros is then a damaged record.
  const bool all_written =
      std::ranges::any_of(whole, [](const auto& one) { return one.first.prev_sequence > 0; });
  if (all_written) recovery.damaged_records += zeros;
  recovery.fell_back = all_written && std::ranges::count(whole_copies, 0U) > 0;
  std::stable_sort(whole.begin(), whole.end(), [](const auto& a, const auto& b) {
    return a.first.sequence > b.first.sequence;
  });
  std::vector<Record> records;
  for (const auto& candidate : whole) {
    const Record& record = candidate.first;
    last_sequence = std::max(last_sequence, record.sequence);
    if (!records.empty() && records.back().sequence == record.sequence) continue;
    // Skips a record whose predecessor on disk has another checksum than the predecessor that the record names.
    const bool broken = std::any_of(whole.begin(), whole.end(), [&record](const auto& other) {
      return record.prev_sequence > 0 && other.first.sequence == record.prev_sequence &&
             other.second != record.prev_hash;
    });
    if (broken) {
      ++recovery.damaged_records;
    } else {
      records.push_back(record);
    }
  }
  return records;
}

// Returns false if an entry names space outside the data, or space that another entry names too.
bool Volume::State::AdoptSlots(const Record& record, std::span<const std::byte> bytes,
                               std::vector<Slot>& found) const {
  std::vector<PathSpace> spaces;
  for (const Path& path : paths) spaces.push_back(path.space);
  SlotMap used(spaces);
  found.clear();
  for (size_t i = 0; i < record.slots; ++i) {
    SlotEntry entry;
    std::memcpy(&entry, bytes.data() + i * sizeof(entry), sizeof(entry));
    const Slot slot = {
        .path = entry.path, .offset_bytes = entry.offset_bytes, .size_bytes = entry.size_bytes};
    if (slot.offset_bytes % kIoAlignment != 0 || slot.size_bytes % kIoAlignment != 0 ||
        !used.Reserve(slot)) {
      return false;
    }
    found.push_back(slot);
  }
  return true;
}

absl::StatusOr<bool> Volume::State::LoadLedger(const Record& record, std::vector<Slot>& found,
                                               std::vector<std::byte>& ledger) {
  const std::span<std::byte> bytes =
      area.bytes().first(*internal::AreaBytes(record.slots, record.ledger_bytes));
  for (uint32_t copy = 0; copy < kCopies; ++copy) {
    if (!bytes.empty()) RETURN_IF_ERROR(ReadNow(geometry.AreaPlace(record.area, copy), bytes));
    if (internal::AreaChecksum(record, bytes) == record.area_checksum &&
        AdoptSlots(record, bytes, found)) {
      const auto begin = bytes.subspan(record.slots * sizeof(SlotEntry));
      ledger.assign(begin.begin(), begin.begin() + static_cast<ptrdiff_t>(record.ledger_bytes));
      return true;
    }
    ++recovery.damaged_ledgers;
  }
  return false;
}

absl::Status Volume::State::Recover() {
  // Makes durable the pages that recovery reads and relies on: they may still be in a volatile cache.
  if (!is_read_only) RETURN_IF_ERROR(SyncNow());
  RETURN_IF_ERROR(FindVolume());
  ASSIGN_OR_RETURN(const std::vector<Record> records, FindRecords());
  bool found_whole = false;
  for (const Record& record : records) {
    std::vector<Slot> found;
    std::vector<std::byte> ledger;
    ASSIGN_OR_RETURN(const bool loaded, LoadLedger(record, found, ledger));
    if (!loaded) {
      recovery.fell_back = recovery.fell_back || !found_whole;
      continue;
    }
    // Slots of the ledger before the newest stay pinned too, so that damage to the newest leaves an intact ledger.
    Pin(record.sequence, found);
    std::swap(named.front(), named.back());
    if (found_whole) continue;
    found_whole = true;
    durable = record;
    durable_ledger = std::move(ledger);
    recovery.sequence = record.sequence;
    for (const Slot& slot : found) FOREBAY_CHECK(free_slots.Reserve(slot));
  }
  if (found_whole) return absl::OkStatus();
  return MakeError(ErrorId::kCorrupt,
                   absl::StrFormat("%s: no durable state is whole: %d damaged records, %d damaged "
                                   "ledgers",
                                   PathText(0), recovery.damaged_records, recovery.damaged_ledgers),
                   "forebayd --reclaim makes the volume anew and gives up its jobs: begin them "
                   "again from weights that were saved elsewhere");
}

}  // namespace forebay::nvme
