// Volume: making the published state durable.
#include <algorithm>
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

using internal::CommitPhase;
using internal::Extent;
using internal::Job;
using internal::kCopies;
using internal::kNoSlot;
using internal::Path;
using internal::Place;
using internal::Request;
using internal::Slot;
using internal::SlotContent;
using internal::TableEntry;

absl::Status Volume::State::BeginCommit(uint64_t token) {
  if (commit.phase != CommitPhase::kIdle) {
    return absl::FailedPreconditionError("commit: another one is pending");
  }
  for (size_t i = 0; i < extents.size(); ++i) {
    const Extent& extent = extents[i];
    if (!extent.allocated() || extent.current == kNoSlot) continue;
    const Slot& slot = extent.slots[extent.current];
    if (slot.content != SlotContent::kWhole || slot.doubted) {
      return absl::FailedPreconditionError(
          absl::StrFormat("commit: extent %d %s", i,
                          slot.content == SlotContent::kWriting
                              ? "is being written in place"
                              : "must be written again: its content is in doubt"));
    }
  }
  commit.token = token;
  commit.first_error = absl::OkStatus();
  commit.parts = 0;
  commit.snapshot.assign(extents.size(), kNoSlot);
  for (size_t i = 0; i < extents.size(); ++i) {
    Extent& extent = extents[i];
    extent.pinned_before = extent.pinned;
    if (!extent.allocated() || extent.current == kNoSlot) continue;
    commit.snapshot[i] = extent.current;
    // From the record's write on a power cut may leave it as the newest.
    extent.pinned = static_cast<uint8_t>(extent.pinned | (1u << extent.current));
  }
  EncodeTable();
  commit.phase = CommitPhase::kFlushData;
  StartPhase();
  if (AdvanceCommit()) return EndCommit();
  return absl::OkStatus();
}

void Volume::State::EncodeTable() {
  size_t count = extents.size();
  while (count > 0 && !extents[count - 1].allocated()) --count;
  const std::span<std::byte> bytes = table.bytes();
  for (size_t i = 0; i < count; ++i) {
    const Extent& extent = extents[i];
    TableEntry entry;
    if (extent.allocated()) {
      entry.size_bytes = extent.size_bytes;
      entry.current = extent.current;
      for (size_t s = 0; s < 2; ++s) {
        entry.path[s] = static_cast<uint16_t>(extent.slots[s].path);
        entry.offset_bytes[s] = extent.slots[s].offset_bytes;
      }
      if (extent.current != kNoSlot) {
        const Slot& slot = extent.slots[extent.current];
        entry.content_bytes = slot.content_bytes;
        entry.checksum = slot.checksum;
        entry.identity = slot.identity;
      }
    }
    std::memcpy(bytes.data() + i * sizeof(entry), &entry, sizeof(entry));
  }
  const size_t used = count * sizeof(TableEntry);
  const size_t padded = protocol::RoundUp(used, protocol::kPageBytes);
  std::memset(bytes.data() + used, 0, padded - used);

  internal::Record& record = commit.record;
  record = {};
  // Beside the last durable one, whatever became of failed commits since.
  record.table_slot = durable.sequence == 0 ? 0 : durable.table_slot ^ 1;
  record.volume = id;
  record.sequence = ++last_sequence;
  if (durable.sequence > 0) {
    record.prev_sequence = durable.sequence;
    internal::PageBuffer page(protocol::kPageBytes);
    EncodePage(durable, page.bytes());
    record.prev_hash = internal::PageChecksum(page.bytes());
  }
  record.table_bytes = padded;
  record.table_checksum = internal::TableChecksum(record, bytes.first(padded));
  EncodePage(record, record_page.bytes());
}

void Volume::State::StartPart(IoKind io, Place place, std::span<std::byte> bytes) {
  // There is always room: Open() made entries for every part beside those of the caller.
  const absl::StatusOr<uint32_t> index = AllocateTransfer(Job::kCommitPart, 0);
  Request& request = requests[*index];
  request.io = io;
  request.path = place.path;
  request.offset_bytes = place.offset_bytes;
  request.data = bytes.data();
  request.size_bytes = bytes.size();
  request.covers = paths[place.path].writes;
  const absl::Status status = Start(*index);
  if (status.ok()) {
    ++commit.parts;
    return;
  }
  commit.first_error.Update(status);
  Release(*index);
}

void Volume::State::StartPhase() {
  const auto flush = [this](uint32_t path) {
    StartPart(IoKind::kFlush, {.path = path, .offset_bytes = 0}, {});
  };
  const auto last = static_cast<uint32_t>(paths.size() - 1);
  const uint32_t slot = commit.record.table_slot;
  switch (commit.phase) {
    case CommitPhase::kIdle:
      break;
    case CommitPhase::kFlushData:
      for (uint32_t path = 0; path <= last; ++path) {
        if (paths[path].writes > paths[path].flushed) flush(path);
      }
      break;
    case CommitPhase::kWriteTable:
      for (uint32_t copy = 0; commit.record.table_bytes > 0 && copy < kCopies; ++copy) {
        StartPart(IoKind::kWrite, geometry.TablePlace(slot, copy),
                  table.bytes().first(commit.record.table_bytes));
      }
      break;
    case CommitPhase::kWriteRecord:
      for (uint32_t copy = 0; copy < kCopies; ++copy) {
        StartPart(IoKind::kWrite, geometry.RecordPlace(slot, copy), record_page.bytes());
      }
      break;
    case CommitPhase::kFlushTable:
      if (commit.record.table_bytes == 0) break;
      [[fallthrough]];
    case CommitPhase::kFlushRecord:
      flush(0);
      if (last > 0) flush(last);
      break;
  }
}

bool Volume::State::AdvanceCommit() {
  while (commit.parts == 0) {
    if (!commit.first_error.ok() || commit.phase == CommitPhase::kFlushRecord) return true;
    commit.phase = static_cast<CommitPhase>(static_cast<uint8_t>(commit.phase) + 1);
    StartPhase();
  }
  return false;
}

void Volume::State::EndFlush(const Request& request, const absl::Status& status) {
  Path& path = paths[request.path];
  if (status.ok()) {
    path.flushed = std::max(path.flushed, request.covers);
    return;
  }
  path.stats.flush_failed = true;
  for (Extent& extent : extents) {
    for (Slot& slot : extent.slots) {
      if (extent.size_bytes > 0 && slot.path == request.path &&
          slot.content == SlotContent::kWhole && slot.write_number > path.flushed) {
        slot.doubted = true;
      }
    }
  }
}

void Volume::State::EndPart(const Request& request, const absl::Status& status,
                            std::vector<Finished>& finished) {
  if (request.io == IoKind::kFlush) {
    EndFlush(request, status);
  } else {
    ++paths[request.path].writes;
  }
  --commit.parts;
  commit.first_error.Update(status);
  if (!AdvanceCommit()) return;
  finished.push_back({.token = commit.token, .status = EndCommit()});
  StartDeferred(finished);
}

absl::Status Volume::State::EndCommit() {
  const bool ok = commit.first_error.ok();
  // Once its write has begun, a failed record may still be the one that reopening finds.
  const bool unknown = !ok && commit.phase >= CommitPhase::kWriteRecord;
  commit.phase = CommitPhase::kIdle;
  if (unknown) return commit.first_error;
  if (ok) {
    durable = commit.record;
    ++commits;
  }
  for (size_t i = 0; i < commit.snapshot.size(); ++i) {
    Extent& extent = extents[i];
    if (ok) {
      extent.pinned = commit.snapshot[i] == kNoSlot
                          ? uint8_t{0}
                          : static_cast<uint8_t>(1u << commit.snapshot[i]);
    } else {
      extent.pinned = extent.pinned_before;
    }
    if (extent.retired && extent.pinned == 0) ReleaseSpace(extent);
  }
  return commit.first_error;
}

void Volume::State::StartDeferred(std::vector<Finished>& finished) {
  for (uint32_t index = 0; index < requests.size(); ++index) {
    Request& request = requests[index];
    if (!request.active || !request.deferred) continue;
    const absl::Status status = StartWrite(index);
    if (status.ok()) continue;
    Extent& extent = extents[static_cast<uint32_t>(request.extent)];
    --extent.busy;
    extent.writing = false;
    finished.push_back({.token = request.token, .status = status});
    Release(index);
  }
}

}  // namespace forebay::nvme
