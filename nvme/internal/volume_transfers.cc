// SPDX-License-Identifier: Apache-2.0
// Volume: reads, writes and zeroing, from their start to their last completion.
#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <set>
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

using internal::Request;
using internal::RequestKind;
using internal::SlotState;
using internal::ZeroBatch;

constexpr double kSecondNs = 1e9;

// Returns the engine token of a request: tag, 16 bits of index, 32 bits of generation.
uint64_t EngineToken(uint32_t index, uint32_t generation) {
  return Volume::kTokenTag | (static_cast<uint64_t>(index) << 32) | generation;
}

const char* Verb(const Request& request) {
  switch (request.io) {
    case IoKind::kRead:
      return "read";
    case IoKind::kWrite:
      return request.kind == RequestKind::kZero ? "zero-write" : "write";
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
  const char* object = request.kind == RequestKind::kCommitPart ? " of a ledger" : "";
  const std::string what =
      request.io == IoKind::kFlush
          ? absl::StrFormat("%s: flush%s", PathText(request.path), object)
          : absl::StrFormat("%s: %s%s at offset %d: %d of %d bytes", PathText(request.path),
                            Verb(request), object, request.offset_bytes, request.done_bytes,
                            request.size_bytes);
  return protocol::MakeError(protocol::ErrorId::kSwapIo, protocol::ErrnoText(what, error_number),
                             "look at the kernel's log (dmesg) and at the device's health");
}

absl::Status Volume::State::TimeoutError(const Request& request) const {
  return protocol::MakeError(
      protocol::ErrorId::kSwapTimeout,
      absl::StrFormat("%s: %s at offset %d: %d of %d bytes after %.1f s: the disk does not answer",
                      PathText(request.path), Verb(request), request.offset_bytes,
                      request.done_bytes, request.size_bytes,
                      static_cast<double>(now_ns() - request.start_ns) / kSecondNs));
}

absl::Status Volume::State::GivenUpError(const Slot& slot) const {
  return protocol::MakeError(
      protocol::ErrorId::kSwapTimeout,
      absl::StrFormat("%s: the slot at offset %d: the disk has not ended an earlier write of it",
                      PathText(slot.path), slot.offset_bytes));
}

// Returns E_SWAP_TIMEOUT if the path does not answer requests of this kind.
absl::Status Volume::State::CheckAnswers(uint32_t index, IoKind io) const {
  const internal::Path& path = paths[index];
  const bool is_read = io == IoKind::kRead;
  const internal::Answers& answers = is_read ? path.to_reads : path.to_writes;
  if (answers.given_up == 0) return absl::OkStatus();
  const uint64_t silent_ns = now_ns() - answers.answered_ns;
  // Lets one request through, which shows whether the path answers again.
  const bool has_other = std::ranges::any_of(requests, [index, is_read](const Request& request) {
    return request.active && request.path == index && !request.given_up &&
           request.kind != RequestKind::kCommitPart && (request.io == IoKind::kRead) == is_read;
  });
  const bool is_silent = has_other && silent_ns >= path.deadline_ns;
  if (!is_silent && answers.given_up <= kGivenUpMax) return absl::OkStatus();
  return protocol::MakeError(
      protocol::ErrorId::kSwapTimeout,
      absl::StrFormat("%s: the disk has not ended %s (%d), and has answered none for %.1f s",
                      PathText(index), is_read ? "reads" : "writes", answers.given_up,
                      static_cast<double>(silent_ns) / kSecondNs));
}

SlotState& Volume::State::SlotAt(const Slot& slot) {
  SlotState& is = slots[{slot.path, slot.offset_bytes}];
  is.size_bytes = slot.size_bytes;
  return is;
}

void Volume::State::ForgetIfDefault(const Slot& slot) {
  const auto known = slots.find({slot.path, slot.offset_bytes});
  if (known != slots.end() && known->second.is_default()) slots.erase(known);
}

absl::Status Volume::State::CheckSlot(const Slot& slot, uint64_t offset_bytes,
                                      std::span<const std::byte> bytes) const {
  const auto multiple = [](uint64_t value) { return value % kIoAlignment == 0; };
  if (slot.path >= paths.size() || slot.size_bytes == 0 || !multiple(slot.size_bytes) ||
      !multiple(slot.offset_bytes) || slot.offset_bytes < paths[slot.path].space.begin_bytes ||
      slot.offset_bytes > paths[slot.path].space.end_bytes ||
      slot.size_bytes > paths[slot.path].space.end_bytes - slot.offset_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d bytes at offset %d of swap path %d are no slot", slot.size_bytes,
                        slot.offset_bytes, slot.path));
  }
  if (bytes.empty() || !multiple(bytes.size()) || !multiple(offset_bytes) ||
      offset_bytes > slot.size_bytes || bytes.size() > slot.size_bytes - offset_bytes ||
      !multiple(reinterpret_cast<uintptr_t>(bytes.data()))) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d bytes at %p do not fit a slot of %d bytes from %d on, or are not whole pages",
        bytes.size(), bytes.data(), slot.size_bytes, offset_bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> Volume::State::AllocateTransfer(RequestKind kind, uint64_t token) {
  const bool is_user = kind == RequestKind::kRead || kind == RequestKind::kWrite;
  if (is_user && user_requests == kRequestsMax) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d swap requests are unfinished: that is the maximum", kRequestsMax));
  }
  FOREBAY_CHECK(!free_requests.empty());
  const uint32_t index = free_requests.back();
  free_requests.pop_back();
  Request& request = requests[index];
  const uint32_t generation = request.generation;
  request = {.active = true, .kind = kind, .generation = generation, .token = token};
  request.start_ns = now_ns();
  if (is_user) ++user_requests;
  return index;
}

void Volume::State::Release(uint32_t index) {
  Request& request = requests[index];
  if (request.kind == RequestKind::kRead || request.kind == RequestKind::kWrite) --user_requests;
  request.active = false;
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

// Starts pieces of zeros until kZerosInFlight are in flight on the path. Takes pieces of the oldest batch first.
void Volume::State::StartZeros(uint32_t path, std::vector<Finished>& finished) {
  for (ZeroBatch& batch : zero_batches) {
    ZeroBatch::Cursor& cursor = batch.paths[path];
    while (batch.status.ok() && cursor.next < cursor.slots.size() &&
           paths[path].zeros_in_flight < kZerosInFlight) {
      const Slot& slot = cursor.slots[cursor.next];
      const absl::StatusOr<uint32_t> index = AllocateTransfer(RequestKind::kZero, batch.token);
      Request& request = requests[*index];
      request.io = IoKind::kWrite;
      request.path = path;
      request.offset_bytes = slot.offset_bytes + cursor.offset_bytes;
      request.slot_offset_bytes = slot.offset_bytes;
      request.data = batch.zeros;
      request.size_bytes = static_cast<size_t>(
          std::min<uint64_t>(slot.size_bytes - cursor.offset_bytes, batch.zeros_bytes));
      request.batch = &batch;
      const absl::Status status = Start(*index);
      if (!status.ok()) {
        Release(*index);
        batch.status.Update(status);
        break;
      }
      ++batch.in_flight;
      ++paths[path].zeros_in_flight;
      cursor.offset_bytes += request.size_bytes;
      if (cursor.offset_bytes < slot.size_bytes) continue;
      ++cursor.next;
      cursor.offset_bytes = 0;
    }
  }
  for (auto batch = zero_batches.begin(); batch != zero_batches.end();) {
    const bool started = std::all_of(
        batch->paths.begin(), batch->paths.end(),
        [](const ZeroBatch::Cursor& cursor) { return cursor.next == cursor.slots.size(); });
    if (batch->in_flight > 0 || (batch->status.ok() && !started)) {
      ++batch;
      continue;
    }
    for (const ZeroBatch::Cursor& cursor : batch->paths) {
      for (const Slot& slot : cursor.slots) slots.erase({slot.path, slot.offset_bytes});
    }
    finished.push_back(
        {.token = batch->token,
         .status = batch->status,
         .kind = batch->given_up ? Finished::Kind::kReleased : Finished::Kind::kEnded});
    batch = zero_batches.erase(batch);
  }
}

// Forgets the slots of a batch that was given up, except slots that a piece of zeros in flight may still write.
void Volume::State::KeepUnended(ZeroBatch& batch) {
  std::set<internal::SlotKey> unended;
  for (const Request& request : requests) {
    if (!request.active || request.batch != &batch) continue;
    unended.emplace(request.path, request.slot_offset_bytes);
  }
  for (ZeroBatch::Cursor& cursor : batch.paths) {
    std::erase_if(cursor.slots, [&](const Slot& slot) {
      const internal::SlotKey key = {slot.path, slot.offset_bytes};
      if (!unended.contains(key)) return slots.erase(key) > 0;
      slots.at(key).given_up = true;
      return false;
    });
    cursor.next = cursor.slots.size();
  }
}

void Volume::State::EndZero(const Request& request, const absl::Status& status,
                            std::vector<Finished>& finished) {
  ZeroBatch& batch = *request.batch;
  ++paths[request.path].writes;
  --paths[request.path].zeros_in_flight;
  if (request.given_up) --paths[request.path].to_writes.given_up;
  --batch.in_flight;
  batch.status.Update(status);
  batch.done_bytes += request.done_bytes;
  if (batch.given_up) KeepUnended(batch);
  StartZeros(request.path, finished);
}

// Counts the result of a transfer. Returns true if the request has ended, with `status`. Returns false if the rest of the
// request must be started.
bool Volume::State::Account(Request& request, int64_t result, absl::Status& status) {
  PathStats& stats = paths[request.path].stats;
  if (request.io == IoKind::kFlush) {
    ++stats.flushes;
    // A failed flush is never repeated: after the failure the kernel may have dropped bytes that it could not write.
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
  // A short transfer continues after the last whole multiple of kIoAlignment, because O_DIRECT needs aligned offsets.
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
  if (request.kind != RequestKind::kCommitPart) {
    paths[request.path].answers_to(request.io).answered_ns = now_ns();
  }
  absl::Status status;
  const bool has_ended = Account(request, completion.result, status);
  if (request.given_up) return Complete(index, absl::OkStatus(), finished);
  if (!has_ended) {
    status = Start(index);
    if (status.ok()) return;
  }
  if (!status.ok()) {
    PathStats& stats = paths[request.path].stats;
    ++stats.errors;
    if (request.io == IoKind::kRead) ++stats.read_errors;
  }
  Complete(index, std::move(status), finished);
}

void Volume::State::Complete(uint32_t index, absl::Status status, std::vector<Finished>& finished) {
  // A copy: the end of this transfer may start another one, which may reuse this entry.
  const Request ended = requests[index];
  Release(index);
  if (ended.kind == RequestKind::kCommitPart) return EndPart(ended, status, finished);
  if (ended.kind == RequestKind::kZero) return EndZero(ended, status, finished);
  if (ended.given_up) return EndGivenUp(ended, finished);
  const Slot slot = {.path = ended.path, .offset_bytes = ended.slot_offset_bytes};
  SlotState& is = slots.at({slot.path, slot.offset_bytes});
  if (ended.kind == RequestKind::kRead) {
    --is.readers;
  } else {
    is.writing = false;
    is.broken = !status.ok();
    is.write_number = ++paths[slot.path].writes;
  }
  ForgetIfDefault(slot);
  finished.push_back({.token = ended.token, .status = std::move(status)});
}

// Reports a request as given up. Its memory stays in use until it ends, and so does the slot of a write. The result of a read
// is ignored, and its slot is free as if the read had ended.
void Volume::State::GiveUp(uint32_t index, std::vector<Finished>& finished) {
  Request& request = requests[index];
  internal::Path& path = paths[request.path];
  absl::Status status = TimeoutError(request);
  request.given_up = true;
  internal::Answers& answers = path.answers_to(request.io);
  ++answers.given_up;
  if (answers.answered_ns == 0) answers.answered_ns = request.start_ns;
  ++path.stats.errors;
  if (request.kind == RequestKind::kZero) {
    ZeroBatch& batch = *request.batch;
    batch.status.Update(status);
    if (std::exchange(batch.given_up, true)) return;
    KeepUnended(batch);
  } else {
    const Slot slot = {.path = request.path, .offset_bytes = request.slot_offset_bytes};
    SlotState& is = slots.at({slot.path, slot.offset_bytes});
    if (request.kind == RequestKind::kRead) {
      ++path.stats.read_errors;
      --is.readers;
    } else {
      is.broken = true;
      is.given_up = is.writing = protections.given_up_slots;
    }
    ForgetIfDefault(slot);
  }
  finished.push_back(
      {.token = request.token, .status = std::move(status), .kind = Finished::Kind::kGivenUp});
}

void Volume::State::EndGivenUp(const Request& request, std::vector<Finished>& finished) {
  --paths[request.path].answers_to(request.io).given_up;
  const Slot slot = {.path = request.path, .offset_bytes = request.slot_offset_bytes};
  if (request.kind == RequestKind::kWrite) {
    SlotState& is = SlotAt(slot);
    is.writing = is.given_up = false;
    is.write_number = ++paths[slot.path].writes;
    ForgetIfDefault(slot);
  }
  finished.push_back(
      {.token = request.token, .status = absl::OkStatus(), .kind = Finished::Kind::kReleased});
}

}  // namespace forebay::nvme
