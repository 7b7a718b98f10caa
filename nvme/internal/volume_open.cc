// Volume: what happens once, blocking: a fresh start, or finding the newest durable state.
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
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::nvme {

using internal::Extent;
using internal::kCopies;
using internal::kNoSlot;
using internal::Label;
using internal::PageBuffer;
using internal::Path;
using internal::Place;
using internal::Record;
using internal::Slot;
using internal::SlotContent;
using internal::TableEntry;
using internal::VolumeId;
using protocol::ErrorId;
using protocol::kPageBytes;
using protocol::MakeError;

// The old labels of the first path die before the old records, and those before there are new
// labels: so a power cut in between leaves the old volume as it was, none, or the new one, empty.
absl::Status Volume::State::Initialise() {
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    return absl::InternalError(protocol::ErrnoText("getrandom", errno));
  }
  const PageBuffer zeros(kPageBytes);
  for (uint32_t copy = 0; copy < kCopies; ++copy) {
    RETURN_IF_ERROR(WriteNow(geometry.LabelPlace(0, copy), zeros));
  }
  RETURN_IF_ERROR(SyncNow());
  for (uint32_t slot = 0; slot < 2; ++slot) {
    for (uint32_t copy = 0; copy < kCopies; ++copy) {
      RETURN_IF_ERROR(WriteNow(geometry.RecordPlace(slot, copy), zeros));
    }
  }
  RETURN_IF_ERROR(SyncNow());
  for (uint32_t path = 0; path < paths.size(); ++path) {
    PageBuffer page(kPageBytes);
    EncodePage(Label{.path_index = path,
                     .volume = id,
                     .capacity_bytes = paths[path].stats.capacity_bytes,
                     .paths = static_cast<uint32_t>(paths.size()),
                     .extents_max = extents_max},
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

// Every path must have a label of one and the same volume, made with these options.
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
               label.paths == paths.size() && label.extents_max == extents_max &&
               label.capacity_bytes == paths[path].stats.capacity_bytes;
      });
    };
    uint32_t path = 0;
    while (path < paths.size() && has_label(path)) ++path;
    if (path == paths.size()) {
      id = candidate.volume;
      return absl::OkStatus();
    }
  }
  for (uint32_t path = 0; path < paths.size(); ++path) {
    if (!labels[path].empty()) continue;
    return MakeError(
        ErrorId::kSwapPath, absl::StrFormat("%s: holds no volume to recover", PathText(path)),
        "give the paths and sizes the volume was made with, or start without recovery");
  }
  return MakeError(ErrorId::kSwapPath,
                   absl::StrFormat("%s: the %d paths are not one volume in this order and with "
                                   "these sizes",
                                   PathText(0), paths.size()),
                   "give the paths and sizes the volume was made with, or start without recovery");
}

// Whole records of this volume, newest first, each once.
absl::StatusOr<std::vector<Record>> Volume::State::FindRecords(bool& never_committed) {
  std::vector<std::pair<Record, uint64_t>> whole;  // with its hash
  std::array<bool, 2> unused{};
  for (uint32_t slot = 0; slot < 2; ++slot) {
    for (uint32_t copy = 0; copy < kCopies; ++copy) {
      PageBuffer page(kPageBytes);
      RETURN_IF_ERROR(ReadNow(geometry.RecordPlace(slot, copy), page.bytes()));
      Record record;
      if (internal::IsZero(page.bytes())) {
        unused[slot] = true;
      } else if (DecodePage(page.bytes(), record) && record.volume == id && record.sequence > 0 &&
                 record.table_slot < 2 && record.table_bytes % kPageBytes == 0 &&
                 record.table_bytes <= geometry.table_area_bytes()) {
        whole.emplace_back(record, internal::PageChecksum(page.bytes()));
      } else {
        ++recovery.damaged_records;
      }
    }
  }
  never_committed = unused[0] || unused[1];
  std::stable_sort(whole.begin(), whole.end(), [](const auto& a, const auto& b) {
    return a.first.sequence > b.first.sequence;
  });
  std::vector<Record> records;
  for (const auto& candidate : whole) {
    const Record& record = candidate.first;
    last_sequence = std::max(last_sequence, record.sequence);
    if (!records.empty() && records.back().sequence == record.sequence) continue;
    // Hash-chained: the one it was written after must be the one that is there.
    const bool broken = std::any_of(whole.begin(), whole.end(), [&record](const auto& other) {
      return other.first.sequence == record.prev_sequence && other.second != record.prev_hash;
    });
    if (broken) {
      ++recovery.damaged_records;
    } else {
      records.push_back(record);
    }
  }
  return records;
}

// False where an entry names a place that is outside the data or taken twice.
bool Volume::State::AdoptTable(std::span<const std::byte> bytes) {
  const size_t count = std::min<size_t>(bytes.size() / sizeof(TableEntry), extents_max);
  std::vector<Extent> found(count);
  std::vector<internal::SpaceMap> spaces;
  for (uint32_t path = 0; path < paths.size(); ++path) {
    spaces.emplace_back(geometry.data_begin(path), geometry.data_end(path));
  }
  for (size_t i = 0; i < count; ++i) {
    TableEntry entry;
    std::memcpy(&entry, bytes.data() + i * sizeof(entry), sizeof(entry));
    if (entry.size_bytes == 0) continue;
    Extent& extent = found[i];
    extent.size_bytes = entry.size_bytes;
    for (size_t s = 0; s < 2; ++s) {
      if (entry.path[s] >= paths.size() || entry.size_bytes % kIoAlignment != 0 ||
          entry.offset_bytes[s] % kIoAlignment != 0 ||
          !spaces[entry.path[s]].AllocateAt(entry.offset_bytes[s], entry.size_bytes)) {
        return false;
      }
      extent.slots[s].path = entry.path[s];
      extent.slots[s].offset_bytes = entry.offset_bytes[s];
    }
    if (entry.current == kNoSlot) continue;
    if (entry.current > 1 || entry.content_bytes > entry.size_bytes) return false;
    Slot& slot = extent.slots[entry.current];
    slot.content = SlotContent::kWhole;
    slot.content_bytes = entry.content_bytes;
    slot.checksum = entry.checksum;
    slot.identity = entry.identity;
    extent.current = entry.current;
    extent.pinned = static_cast<uint8_t>(1u << entry.current);
  }
  extents = std::move(found);
  for (const Extent& extent : extents) {
    for (size_t s = 0; extent.size_bytes > 0 && s < 2; ++s) {
      paths[extent.slots[s].path].slot_bytes[s] += extent.size_bytes;
    }
  }
  for (uint32_t path = 0; path < paths.size(); ++path) {
    PathStats& stats = paths[path].stats;
    stats.allocated_bytes = paths[path].space.free_bytes() - spaces[path].free_bytes();
    paths[path].space = std::move(spaces[path]);
  }
  return true;
}

absl::StatusOr<bool> Volume::State::LoadTable(const Record& record) {
  const std::span<std::byte> bytes = table.bytes().first(record.table_bytes);
  for (uint32_t copy = 0; copy < kCopies; ++copy) {
    if (!bytes.empty()) {
      RETURN_IF_ERROR(ReadNow(geometry.TablePlace(record.table_slot, copy), bytes));
    }
    if (internal::TableChecksum(record, bytes) == record.table_checksum && AdoptTable(bytes)) {
      return true;
    }
    ++recovery.damaged_tables;
  }
  return false;
}

absl::Status Volume::State::Recover() {
  // What we read may still be in a volatile cache; before it is relied on it must be durable.
  RETURN_IF_ERROR(SyncNow());
  RETURN_IF_ERROR(FindVolume());
  bool never_committed = false;
  ASSIGN_OR_RETURN(const std::vector<Record> records, FindRecords(never_committed));
  for (const Record& record : records) {
    ASSIGN_OR_RETURN(const bool loaded, LoadTable(record));
    if (!loaded) {
      recovery.fell_back = true;
      continue;
    }
    durable = record;
    recovery.sequence = record.sequence;
    return absl::OkStatus();
  }
  if (records.empty() && never_committed) return absl::OkStatus();
  return MakeError(ErrorId::kCorrupt,
                   absl::StrFormat("%s: no durable state is whole: %d damaged records, %d damaged "
                                   "block tables",
                                   PathText(0), recovery.damaged_records, recovery.damaged_tables),
                   "restore the jobs from a checkpoint, then start without recovery");
}

}  // namespace forebay::nvme
