// SPDX-License-Identifier: Apache-2.0
// Volume: making a ledger durable.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
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
using internal::kCopies;
using internal::NamedSlots;
using internal::Path;
using internal::Place;
using internal::Request;
using internal::RequestKind;
using internal::SlotEntry;
using internal::SlotState;
using protocol::ErrorId;

absl::Status Volume::State::CheckNamed(std::span<const Slot> named_slots) const {
  std::vector<Slot> sorted(named_slots.begin(), named_slots.end());
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    const Slot& slot = sorted[i];
    const std::byte* no_bytes = nullptr;
    RETURN_IF_ERROR(CheckSlot(slot, 0, {no_bytes, kIoAlignment}));
    if (i > 0 && sorted[i - 1].path == slot.path &&
        sorted[i - 1].offset_bytes + sorted[i - 1].size_bytes > slot.offset_bytes) {
      return absl::InvalidArgumentError(absl::StrFormat("commit: slots overlap at offset %d of %s",
                                                        slot.offset_bytes, PathText(slot.path)));
    }
    const auto known = slots.find({slot.path, slot.offset_bytes});
    if (known == slots.end()) continue;
    const SlotState& is = known->second;
    if (!is.writing && !is.broken && !is.doubted) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "commit: the slot at offset %d of %s %s", slot.offset_bytes, PathText(slot.path),
        is.writing ? "is being written" : "must be written again: its last write or flush failed"));
  }
  return absl::OkStatus();
}

absl::Status Volume::State::BeginCommit(std::span<const std::byte> ledger,
                                        std::span<const Slot> named_slots, uint64_t token) {
  if (commit.phase != CommitPhase::kIdle) {
    return absl::FailedPreconditionError("commit: another one is pending");
  }
  const auto bytes = internal::AreaBytes(named_slots.size(), ledger.size());
  if (!bytes || *bytes > geometry.area_bytes()) {
    return protocol::MakeError(
        ErrorId::kLimit,
        absl::StrFormat(
            "a ledger of %d bytes that names %d slots: the volume has room for %d bytes",
            ledger.size(), named_slots.size(), geometry.area_bytes()),
        "make the volume anew with a larger ledger");
  }
  RETURN_IF_ERROR(CheckNamed(named_slots));
  commit.token = token;
  commit.first_error = absl::OkStatus();
  commit.parts = 0;
  commit.ledger.assign(ledger.begin(), ledger.end());
  EncodeLedger(ledger, named_slots);
  Pin(commit.record.sequence, named_slots);
  commit.phase = CommitPhase::kFlushData;
  StartPhase();
  if (AdvanceCommit()) return EndCommit();
  return absl::OkStatus();
}

void Volume::State::EncodeLedger(std::span<const std::byte> ledger,
                                 std::span<const Slot> named_slots) {
  const std::span<std::byte> bytes = area.bytes();
  size_t used = 0;
  for (const Slot& slot : named_slots) {
    const SlotEntry entry = {
        .path = slot.path, .offset_bytes = slot.offset_bytes, .size_bytes = slot.size_bytes};
    std::memcpy(bytes.data() + used, &entry, sizeof(entry));
    used += sizeof(entry);
  }
  if (!ledger.empty()) std::memcpy(bytes.data() + used, ledger.data(), ledger.size());
  used += ledger.size();
  const size_t padded = protocol::RoundUp(used, protocol::kPageBytes);
  std::memset(bytes.data() + used, 0, padded - used);

  internal::Record& record = commit.record;
  record = {};
  // Writes to the area that the last durable ledger does not use, even after failed commits.
  record.area = durable.sequence == 0 ? 0 : durable.area ^ 1;
  record.volume = id;
  record.sequence = ++last_sequence;
  if (durable.sequence > 0) {
    record.prev_sequence = durable.sequence;
    internal::PageBuffer page(protocol::kPageBytes);
    EncodePage(durable, page.bytes());
    record.prev_hash = internal::PageChecksum(page.bytes());
  }
  record.slots = named_slots.size();
  record.ledger_bytes = ledger.size();
  record.area_checksum = internal::AreaChecksum(record, bytes.first(padded));
  EncodePage(record, record_page.bytes());
}

void Volume::State::Pin(uint64_t sequence, std::span<const Slot> named_slots) {
  named.push_back({.sequence = sequence, .slots = {named_slots.begin(), named_slots.end()}});
  for (const Slot& slot : named_slots) ++SlotAt(slot).pins;
}

void Volume::State::Unpin(const NamedSlots& unpinned) {
  for (const Slot& slot : unpinned.slots) {
    --SlotAt(slot).pins;
    ForgetIfDefault(slot);
  }
}

void Volume::State::StartPart(IoKind io, Place place, std::span<std::byte> bytes) {
  // Allocation cannot fail: request entries are reserved for commits.
  const absl::StatusOr<uint32_t> index = AllocateTransfer(RequestKind::kCommitPart, 0);
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
  const internal::Record& record = commit.record;
  const size_t area_bytes = *internal::AreaBytes(record.slots, record.ledger_bytes);
  switch (commit.phase) {
    case CommitPhase::kIdle:
      break;
    case CommitPhase::kFlushData:
      for (uint32_t path = 0; path <= last; ++path) {
        if (paths[path].writes > paths[path].flushed) flush(path);
      }
      break;
    case CommitPhase::kWriteLedger:
      for (uint32_t copy = 0; copy < kCopies; ++copy) {
        if (area_bytes > 0) {
          StartPart(IoKind::kWrite, geometry.AreaPlace(record.area, copy),
                    area.bytes().first(area_bytes));
        }
        StartPart(IoKind::kWrite, geometry.RecordPlace(record.area, copy), record_page.bytes());
      }
      break;
    case CommitPhase::kFlushLedger:
      flush(0);
      if (last > 0) flush(last);
      break;
  }
}

bool Volume::State::AdvanceCommit() {
  while (commit.parts == 0) {
    if (!commit.first_error.ok() || commit.phase == CommitPhase::kFlushLedger) return true;
    commit.phase = static_cast<CommitPhase>(static_cast<uint8_t>(commit.phase) + 1);
    StartPhase();
  }
  return false;
}

void Volume::State::EndFlush(const Request& request, const absl::Status& status) {
  Path& path = paths[request.path];
  if (status.ok()) {
    path.flushed = std::max(path.flushed, request.covers);
  } else {
    path.stats.flush_failed = true;
  }
  const auto begin = slots.lower_bound({request.path, 0});
  const auto end = slots.lower_bound({request.path + 1, 0});
  for (auto entry = begin; entry != end;) {
    SlotState& is = entry->second;
    if (is.write_number > 0 && is.write_number <= path.flushed) is.write_number = 0;
    if (!status.ok() && is.write_number > 0 && !is.writing && !is.broken) is.doubted = true;
    entry = is.is_default() ? slots.erase(entry) : std::next(entry);
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
}

absl::Status Volume::State::EndCommit() {
  // If the write of a failed ledger has begun, recovery may still find that ledger. Its slots stay pinned, in addition to those
  // of earlier ledgers.
  const bool unknown = commit.phase >= CommitPhase::kWriteLedger;
  commit.phase = CommitPhase::kIdle;
  if (commit.first_error.ok()) {
    const uint64_t previous = durable.sequence;
    durable = commit.record;
    durable_ledger = std::move(commit.ledger);
    ++commits;
    for (auto old = named.begin(); old != named.end();) {
      if (old->sequence == durable.sequence || old->sequence == previous) {
        ++old;
        continue;
      }
      Unpin(*old);
      old = named.erase(old);
    }
  } else if (!unknown) {
    Unpin(named.back());
    named.pop_back();
  }
  return commit.first_error;
}

}  // namespace forebay::nvme
