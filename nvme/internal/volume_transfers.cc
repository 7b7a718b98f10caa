// Volume: reads, writes and zeroing, from their start to their last completion.
#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nvme/internal/volume_state.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::nvme {
namespace {

using internal::Extent;
using internal::Job;
using internal::kNoSlot;
using internal::Request;
using internal::Slot;
using internal::SlotContent;

// Token: tag, 16 bits of index, 32 bits of generation.
uint64_t EngineToken(uint32_t index, uint32_t generation) {
  return Volume::kTokenTag | (static_cast<uint64_t>(index) << 32) | generation;
}

const char* Verb(const Request& request) {
  switch (request.io) {
    case IoKind::kRead:
      return "read";
    case IoKind::kWrite:
      return request.job == Job::kZero ? "zero-write" : "write";
    case IoKind::kFlush:
      return "flush";
    case IoKind::kEvent:
      break;
  }
  return "transfer";
}

}  // namespace

std::string Volume::State::PathText(uint32_t path) const {
  return absl::StrFormat("swap path %d (%s)", path, paths[path].file->name());
}

absl::Status Volume::State::IoError(const Request& request, int error_number) const {
  const std::string object =
      request.job == Job::kCommitPart
          ? std::string("of a commit")
          : absl::StrCat("of extent ", static_cast<uint32_t>(request.extent));
  const std::string what =
      request.io == IoKind::kFlush
          ? absl::StrFormat("%s: flush %s", PathText(request.path), object)
          : absl::StrFormat("%s: %s %s at offset %d: %d of %d bytes", PathText(request.path),
                            Verb(request), object, request.offset_bytes, request.done_bytes,
                            request.size_bytes);
  return protocol::MakeError(protocol::ErrorId::kSwapIo, protocol::ErrnoText(what, error_number),
                             "look at the kernel's log (dmesg) and at the device's health");
}

absl::StatusOr<uint32_t> Volume::State::AllocateTransfer(Job job, uint64_t token) {
  if (job != Job::kCommitPart && user_requests == kRequestsMax) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d swap requests are unfinished: that is the maximum", kRequestsMax));
  }
  FOREBAY_CHECK(!free_requests.empty());
  const uint32_t index = free_requests.back();
  free_requests.pop_back();
  Request& request = requests[index];
  request.active = true;
  request.deferred = false;
  request.job = job;
  request.token = token;
  request.done_bytes = 0;
  request.stalls = 0;
  request.errors = 0;
  if (job != Job::kCommitPart) ++user_requests;
  return index;
}

void Volume::State::Release(uint32_t index) {
  Request& request = requests[index];
  if (request.job != Job::kCommitPart) --user_requests;
  request.active = false;
  request.zero_extents.clear();
  ++request.generation;
  free_requests.push_back(index);
}

absl::Status Volume::State::Start(uint32_t index) {
  const Request& request = requests[index];
  return engine.Submit({.kind = request.io,
                        .file = *paths[request.path].index,
                        .offset_bytes = request.offset_bytes + request.done_bytes,
                        .data = request.data + request.done_bytes,
                        .size_bytes = request.size_bytes - request.done_bytes,
                        .token = EngineToken(index, request.generation)});
}

uint8_t Volume::State::PickSlot(const Extent& extent) const {
  if (!protections.two_slots) return extent.current == kNoSlot ? uint8_t{0} : extent.current;
  const uint8_t other = extent.current == 0 ? 1 : 0;
  if ((extent.pinned & (1u << other)) == 0) return other;
  const uint8_t same = other ^ 1;
  if ((extent.pinned & (1u << same)) == 0) return same;
  return kNoSlot;
}

// The request has everything but its place.
absl::Status Volume::State::StartWrite(uint32_t index) {
  Request& request = requests[index];
  Extent& extent = extents[static_cast<uint32_t>(request.extent)];
  const uint8_t target = PickSlot(extent);
  if (target == kNoSlot) {
    if (commit.phase != internal::CommitPhase::kIdle) {
      request.deferred = true;
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(
        absl::StrFormat("write extent %d: both slots may be durable since a commit failed; commit "
                        "again first",
                        static_cast<uint32_t>(request.extent)));
  }
  Slot& slot = extent.slots[target];
  if (slot.readers > 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("write extent %d: a read of the same slot is in flight",
                        static_cast<uint32_t>(request.extent)));
  }
  request.deferred = false;
  request.slot = target;
  request.path = slot.path;
  request.offset_bytes = slot.offset_bytes;
  RETURN_IF_ERROR(Start(index));
  slot.content = SlotContent::kWriting;
  slot.doubted = false;
  extent.written = kNoSlot;
  return absl::OkStatus();
}

// Points the request at its next piece; false when every slot is done.
bool Volume::State::NextZeroPiece(Request& request) {
  while (request.zero_next < 2 * request.zero_extents.size()) {
    request.extent = request.zero_extents[request.zero_next / 2];
    request.slot = static_cast<uint8_t>(request.zero_next % 2);
    const Extent& extent = extents[static_cast<uint32_t>(request.extent)];
    const uint64_t left = extent.size_bytes - request.zero_offset_bytes;
    if (left > 0) {
      const Slot& slot = extent.slots[request.slot];
      request.path = slot.path;
      request.offset_bytes = slot.offset_bytes + request.zero_offset_bytes;
      request.size_bytes = static_cast<size_t>(std::min<uint64_t>(left, request.zero_piece_bytes));
      request.done_bytes = 0;
      request.stalls = 0;
      request.errors = 0;
      request.zero_offset_bytes += request.size_bytes;
      return true;
    }
    ++request.zero_next;
    request.zero_offset_bytes = 0;
  }
  return false;
}

// Books one result. True when the request has ended, with `status`; false: start the rest.
bool Volume::State::Account(Request& request, int64_t result, absl::Status& status) {
  PathStats& stats = paths[request.path].stats;
  if (request.io == IoKind::kFlush) {
    ++stats.flushes;
    // Never repeated: after a failure the kernel may have dropped what it could not write.
    if (result < 0) status = IoError(request, static_cast<int>(-result));
    return true;
  }
  request.io == IoKind::kRead ? ++stats.reads : ++stats.writes;
  const size_t left = request.size_bytes - request.done_bytes;
  if (result > static_cast<int64_t>(left)) {
    status = IoError(request, EPROTO);
    return true;
  }
  if (result < 0) {
    const int error = static_cast<int>(-result);
    const bool transient = error == EAGAIN || error == EINTR;
    const bool again =
        transient ? ++request.stalls <= kRetriesMax : ++request.errors <= kErrorRetriesMax;
    if (!again) status = IoError(request, error);
    stats.retries += again ? 1 : 0;
    return !again;
  }
  (request.io == IoKind::kRead ? stats.read_bytes : stats.written_bytes) +=
      static_cast<uint64_t>(result);
  if (static_cast<size_t>(result) == left) {
    request.done_bytes = request.size_bytes;
    return true;
  }
  // Short: go on from the last whole piece, O_DIRECT takes no other.
  const size_t whole = static_cast<size_t>(result) / kIoAlignment * kIoAlignment;
  request.done_bytes += whole;
  request.stalls = whole > 0 ? 0 : request.stalls + 1;
  if (request.stalls > kRetriesMax) {
    status = IoError(request, request.io == IoKind::kRead ? ENODATA : ENOSPC);
    return true;
  }
  ++stats.retries;
  return false;
}

void Volume::State::OnCompletion(const Completion& completion, std::vector<Finished>& finished) {
  const auto index = static_cast<uint32_t>((completion.token >> 32) & 0xFFFF);
  if (!Owns(completion.token) || index >= requests.size()) return;
  Request& request = requests[index];
  if (!request.active || request.generation != static_cast<uint32_t>(completion.token)) return;
  absl::Status status;
  if (!Account(request, completion.result, status)) {
    status = Start(index);
    if (status.ok()) return;
  }
  if (!status.ok()) ++paths[request.path].stats.errors;
  Complete(index, std::move(status), finished);
}

void Volume::State::EndWrite(Request& request, const absl::Status& status) {
  Extent& extent = extents[static_cast<uint32_t>(request.extent)];
  extent.writing = false;
  Slot& slot = extent.slots[request.slot];
  slot.write_number = ++paths[slot.path].writes;
  if (!status.ok()) {
    slot.content = SlotContent::kBroken;
    return;
  }
  slot.content = SlotContent::kWhole;
  slot.content_bytes = request.size_bytes;
  slot.checksum = request.checksum;
  slot.identity = request.identity;
  extent.written = request.slot;
}

void Volume::State::Complete(uint32_t index, absl::Status status, std::vector<Finished>& finished) {
  Request& request = requests[index];
  if (request.job == Job::kCommitPart) {
    // A part of a later phase may take this entry again.
    const Request ended = request;
    Release(index);
    EndPart(ended, status, finished);
    return;
  }
  if (request.job == Job::kZero && status.ok()) {
    ++paths[request.path].writes;
    if (NextZeroPiece(request)) {
      status = Start(index);
      if (status.ok()) return;
    }
  }
  if (request.job == Job::kZero) {
    for (const ExtentId zeroed : request.zero_extents)
      --extents[static_cast<uint32_t>(zeroed)].busy;
  } else {
    Extent& extent = extents[static_cast<uint32_t>(request.extent)];
    --extent.busy;
    if (request.job == Job::kRead) {
      --extent.slots[request.slot].readers;
    } else {
      EndWrite(request, status);
    }
  }
  finished.push_back({.token = request.token, .status = std::move(status)});
  Release(index);
}

}  // namespace forebay::nvme
