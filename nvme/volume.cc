// SPDX-License-Identifier: Apache-2.0
#include "nvme/volume.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "nvme/internal/volume_state.h"
#include "protocol/error.h"
#include "protocol/os/clock.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::nvme {
namespace {

using internal::CommitPhase;
using internal::Request;
using internal::RequestKind;
using internal::SlotState;
using protocol::ErrorId;
using protocol::MakeError;

absl::Status Refuse(const char* call, const Slot& slot, std::string_view why) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "%s the slot at offset %d of swap path %d: %s", call, slot.offset_bytes, slot.path, why));
}

absl::Status ReadOnlyError() {
  return absl::FailedPreconditionError("the volume was opened to be read alone");
}

absl::Status CheckOptions(const VolumeOptions& options) {
  if (options.paths.empty() || options.paths.size() > Volume::kPathsMax) {
    return MakeError(ErrorId::kConfig, absl::StrFormat("%d swap paths: not in [1, %d]",
                                                       options.paths.size(), Volume::kPathsMax));
  }
  if (options.ledger_bytes_max == 0 || options.ledger_bytes_max > Volume::kLedgerBytesMax) {
    return MakeError(ErrorId::kConfig,
                     absl::StrFormat("ledger_bytes_max %d: not in [1, %d]",
                                     options.ledger_bytes_max, Volume::kLedgerBytesMax));
  }
  if (options.mode != OpenMode::kReclaim && options.life == FileLife::kUnlinked) {
    return absl::InvalidArgumentError("an unlinked swap file cannot be recovered");
  }
  for (size_t i = 0; i < options.paths.size(); ++i) {
    if (options.paths[i].capacity_bytes > 0 && options.paths[i].weight > 0) continue;
    return MakeError(ErrorId::kConfig,
                     absl::StrFormat("swap path %d (%s): size and weight must be above 0", i,
                                     options.paths[i].path));
  }
  return absl::OkStatus();
}

// Checks the format version of a path's label. An older format held nothing durable: kReclaim creates the volume from scratch.
// A newer format is refused, because its content is unknown.
absl::Status CheckVersion(OpenMode mode, std::string_view name, std::span<const std::byte> page) {
  const std::optional<uint32_t> version = internal::LabelVersion(page);
  if (!version || *version == internal::kFormatVersion) return absl::OkStatus();
  if (mode == OpenMode::kReclaim && *version <= internal::kOldVersionMax) return absl::OkStatus();
  return internal::OtherFormatError(name, *version);
}

}  // namespace

Volume::State::State(IoEngine& io_engine, const internal::Geometry& disk_geometry)
    : engine(io_engine),
      geometry(disk_geometry),
      // Reserves request entries for commits and zeroing, in addition to reads and writes.
      requests(kRequestsMax + kPathsMax * (kZerosInFlight + 1) + 2 * internal::kCopies),
      area(disk_geometry.area_bytes()),
      record_page(protocol::kPageBytes) {
  for (size_t i = requests.size(); i > 0; --i)
    free_requests.push_back(static_cast<uint32_t>(i - 1));
}

Volume::State::~State() {
  const bool is_idle = free_requests.size() == requests.size();
  for (const internal::Path& path : paths) {
    if (path.index.has_value()) engine.UnregisterFile(*path.index);
    if (is_idle) path.file->Unlock();
  }
}

uint64_t Volume::OwnBytes(uint64_t ledger_bytes_max) {
  const std::array<uint64_t, 1> paths{0};
  return internal::Geometry(paths, ledger_bytes_max).capacity_bytes_min(0) - kIoAlignment;
}

absl::StatusOr<std::unique_ptr<Volume>> Volume::OpenForTest(
    const VolumeOptions& options, const internal::Protections& protections, IoEngine& engine,
    SwapFileSystem& files) {
  RETURN_IF_ERROR(CheckOptions(options));
  std::vector<PathOptions> wanted = options.paths;
  std::vector<uint64_t> capacity_bytes;
  for (PathOptions& path : wanted) {
    path.capacity_bytes = protocol::RoundUp(path.capacity_bytes, kIoAlignment);
    capacity_bytes.push_back(path.capacity_bytes);
  }
  const internal::Geometry geometry(capacity_bytes, options.ledger_bytes_max);
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    const uint64_t needed = geometry.capacity_bytes_min(i);
    if (wanted[i].capacity_bytes >= needed) continue;
    return MakeError(
        ErrorId::kSwapNospc,
        absl::StrFormat("swap path %d (%s): its size of %s is too small: the ledgers alone take %s",
                        i, wanted[i].path, protocol::FormatBytes(wanted[i].capacity_bytes),
                        protocol::FormatBytes(needed)),
        "raise --swap-size / swap.capacity");
  }

  auto state = std::make_unique<State>(engine, geometry);
  state->protections = protections;
  state->is_read_only = options.mode == OpenMode::kInspect;
  state->now_ns = options.now_ns ? options.now_ns : protocol::MonotonicNs;
  const auto check = [mode = options.mode](std::string_view name, std::span<const std::byte> page) {
    return CheckVersion(mode, name, page);
  };
  ASSIGN_OR_RETURN(auto opened, files.Open(wanted, options.mode, options.life, check));
  std::vector<PathSpace> spaces;
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    internal::Path path;
    path.file = std::move(opened[i]);
    path.space = {.begin_bytes = geometry.data_begin(i),
                  .end_bytes = geometry.data_end(i),
                  .weight = wanted[i].weight};
    spaces.push_back(path.space);
    path.stats.capacity_bytes = wanted[i].capacity_bytes;
    state->paths.push_back(std::move(path));
  }
  state->free_slots = SlotMap(spaces);
  for (internal::Path& path : state->paths) {
    ASSIGN_OR_RETURN(path.index, engine.RegisterFile(path.file->fd()));
  }
  RETURN_IF_ERROR(options.mode == OpenMode::kReclaim ? state->Initialise() : state->Recover());
  return std::unique_ptr<Volume>(new Volume(std::move(state)));
}

absl::StatusOr<std::unique_ptr<Volume>> Volume::Open(const VolumeOptions& options, IoEngine& engine,
                                                     SwapFileSystem& files) {
  return OpenForTest(options, internal::Protections{}, engine, files);
}

absl::StatusOr<std::unique_ptr<Volume>> Volume::Open(const VolumeOptions& options,
                                                     IoEngine& engine) {
  const std::unique_ptr<SwapFileSystem> files = MakePosixSwapFileSystem();
  return Open(options, engine, *files);
}

Volume::Volume(std::unique_ptr<State> state) : state_(std::move(state)) {}

Volume::~Volume() = default;

const SlotMap& Volume::free_slots() const { return state_->free_slots; }

absl::Status Volume::Zero(std::span<const Slot> slots, std::span<const std::byte> zeros,
                          uint64_t token) {
  if (state_->is_read_only) return ReadOnlyError();
  if (slots.empty()) return absl::InvalidArgumentError("zero: no slots are named");
  for (const Slot& slot : slots) {
    // Checks only the first page, because a slot may be smaller than `zeros`.
    RETURN_IF_ERROR(state_->CheckSlot(slot, 0, zeros.first(std::min(zeros.size(), kIoAlignment))));
    const auto known = state_->slots.find({slot.path, slot.offset_bytes});
    if (known == state_->slots.end()) continue;
    const SlotState& is = known->second;
    if (is.given_up) return state_->GivenUpError(slot);
    if (is.writing || is.readers > 0) return Refuse("zero", slot, "it is being read or written");
    if (is.pins > 0) return Refuse("zero", slot, "a durable ledger names it");
  }
  for (const Slot& slot : slots) RETURN_IF_ERROR(state_->CheckAnswers(slot.path, IoKind::kWrite));
  if (zeros.empty() || zeros.size() % kIoAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("zero: %d bytes are not whole pages", zeros.size()));
  }
  internal::ZeroBatch& batch = state_->zero_batches.emplace_back();
  batch.token = token;
  batch.zeros = const_cast<std::byte*>(zeros.data());  // used only to read
  batch.zeros_bytes = zeros.size();
  batch.paths.resize(state_->paths.size());
  for (const Slot& slot : slots) {
    batch.paths[slot.path].slots.push_back(slot);
    state_->SlotAt(slot) = {.size_bytes = slot.size_bytes, .writing = true};
  }
  std::vector<Finished> finished;
  for (uint32_t path = 0; path < state_->paths.size(); ++path) state_->StartZeros(path, finished);
  // Nothing was started.
  if (!finished.empty()) return finished.front().status;
  return absl::OkStatus();
}

uint64_t Volume::zeroed_bytes(uint64_t token) const {
  for (const internal::ZeroBatch& batch : state_->zero_batches) {
    if (batch.token == token) return batch.done_bytes;
  }
  return 0;
}

absl::Status Volume::Read(const Slot& slot, uint64_t offset_bytes, std::span<std::byte> bytes,
                          uint64_t token) {
  RETURN_IF_ERROR(state_->CheckSlot(slot, offset_bytes, bytes));
  const auto known = state_->slots.find({slot.path, slot.offset_bytes});
  if (known != state_->slots.end() && known->second.writing) {
    return Refuse("read", slot, "it is being written");
  }
  if (known != state_->slots.end() && known->second.broken) {
    return MakeError(ErrorId::kSwapIo,
                     absl::StrFormat("%s: the slot at offset %d: its last write failed",
                                     state_->PathText(slot.path), slot.offset_bytes));
  }
  RETURN_IF_ERROR(state_->CheckAnswers(slot.path, IoKind::kRead));
  ASSIGN_OR_RETURN(const uint32_t index, state_->AllocateTransfer(RequestKind::kRead, token));
  Request& request = state_->requests[index];
  request.io = IoKind::kRead;
  request.path = slot.path;
  request.offset_bytes = slot.offset_bytes + offset_bytes;
  request.slot_offset_bytes = slot.offset_bytes;
  request.data = bytes.data();
  request.size_bytes = bytes.size();
  const absl::Status status = state_->Start(index);
  if (!status.ok()) {
    state_->Release(index);
    return status;
  }
  ++state_->SlotAt(slot).readers;
  return absl::OkStatus();
}

absl::Status Volume::Write(const Slot& slot, std::span<const std::byte> bytes, uint64_t token) {
  if (state_->is_read_only) return ReadOnlyError();
  RETURN_IF_ERROR(state_->CheckSlot(slot, 0, bytes));
  const auto known = state_->slots.find({slot.path, slot.offset_bytes});
  if (known != state_->slots.end()) {
    const SlotState& is = known->second;
    if (is.given_up) return state_->GivenUpError(slot);
    if (is.writing || is.readers > 0) return Refuse("write", slot, "it is being read or written");
    if (is.pins > 0 && state_->protections.pins) {
      return Refuse("write", slot, "a durable ledger names it");
    }
  }
  RETURN_IF_ERROR(state_->CheckAnswers(slot.path, IoKind::kWrite));
  ASSIGN_OR_RETURN(const uint32_t index, state_->AllocateTransfer(RequestKind::kWrite, token));
  Request& request = state_->requests[index];
  request.io = IoKind::kWrite;
  request.path = slot.path;
  request.offset_bytes = request.slot_offset_bytes = slot.offset_bytes;
  request.data = const_cast<std::byte*>(bytes.data());  // used only to read
  request.size_bytes = bytes.size();
  const absl::Status status = state_->Start(index);
  if (!status.ok()) {
    state_->Release(index);
    return status;
  }
  SlotState& is = state_->SlotAt(slot);
  is.writing = true;
  is.doubted = false;
  return absl::OkStatus();
}

absl::Status Volume::CommitLedger(std::span<const std::byte> ledger, std::span<const Slot> slots,
                                  uint64_t token) {
  if (state_->is_read_only) return ReadOnlyError();
  return state_->BeginCommit(ledger, slots, token);
}

std::span<const std::byte> Volume::ledger() const { return state_->durable_ledger; }

std::span<const Slot> Volume::ledger_slots() const {
  for (const internal::NamedSlots& named : state_->named) {
    if (named.sequence == state_->durable.sequence) return named.slots;
  }
  return {};
}

bool Volume::is_pinned(const Slot& slot) const {
  const auto known = state_->slots.find({slot.path, slot.offset_bytes});
  return known != state_->slots.end() && known->second.pins > 0;
}

std::vector<Slot> Volume::Doubted() const {
  std::vector<Slot> doubted;
  for (const auto& [key, is] : state_->slots) {
    if (!is.doubted) continue;
    doubted.push_back({.path = key.first, .offset_bytes = key.second, .size_bytes = is.size_bytes});
  }
  return doubted;
}

std::vector<LateRequests> Volume::CheckDeadlines(uint64_t deadline_ns) {
  const uint64_t now = state_->now_ns();
  std::vector<LateRequests> by_path;
  for (Request& request : state_->requests) {
    if (!request.active || now - request.start_ns < deadline_ns) continue;
    auto found = std::ranges::lower_bound(by_path, request.path, {}, &LateRequests::path);
    if (found == by_path.end() || found->path != request.path) {
      found = by_path.insert(found, {.path = request.path});
    }
    LateRequests& late = *found;
    ++late.requests;
    late.oldest_ns = std::max(late.oldest_ns, now - request.start_ns);
    if (!request.late) ++state_->paths[request.path].stats.late;
    request.late = true;
  }
  return by_path;
}

void Volume::GiveUp(uint64_t deadline_ns, const std::function<bool(uint64_t token)>& may_give_up,
                    std::vector<Finished>& finished) {
  const uint64_t now = state_->now_ns();
  for (uint32_t index = 0; index < state_->requests.size(); ++index) {
    const Request& request = state_->requests[index];
    if (!request.active || request.given_up || !request.late) continue;
    if (request.kind == RequestKind::kCommitPart || now - request.start_ns < deadline_ns) continue;
    if (!may_give_up(request.token)) continue;
    state_->paths[request.path].deadline_ns = deadline_ns;
    state_->GiveUp(index, finished);
  }
}

void Volume::OnCompletion(const Completion& completion, std::vector<Finished>& finished) {
  state_->OnCompletion(completion, finished);
}

std::string_view Volume::path_name(uint32_t path) const { return state_->paths[path].file->name(); }

uint64_t Volume::durable_sequence() const { return state_->durable.sequence; }

const RecoveryReport& Volume::recovery() const { return state_->recovery; }

uint32_t Volume::requests_in_flight() const {
  return state_->user_requests + static_cast<uint32_t>(state_->zero_batches.size()) +
         (state_->commit.phase == CommitPhase::kIdle ? 0 : 1);
}

VolumeStats Volume::stats() const {
  VolumeStats stats;
  for (const internal::Path& path : state_->paths) stats.paths.push_back(path.stats);
  stats.commits = state_->commits;
  return stats;
}

}  // namespace forebay::nvme
