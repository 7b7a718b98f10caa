#include "nvme/volume.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "nvme/internal/volume_state.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::nvme {
namespace {

using internal::CommitPhase;
using internal::Extent;
using internal::Job;
using internal::kNoSlot;
using internal::Request;
using internal::Slot;
using internal::SlotContent;
using protocol::ErrorId;
using protocol::MakeError;

absl::Status Refuse(const char* call, ExtentId extent, std::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrFormat("%s extent %d: %s", call, static_cast<uint32_t>(extent), why));
}

absl::Status CheckOptions(const VolumeOptions& options) {
  if (options.paths.empty() || options.paths.size() > Volume::kPathsMax) {
    return MakeError(ErrorId::kConfig, absl::StrFormat("%d swap paths: not in [1, %d]",
                                                       options.paths.size(), Volume::kPathsMax));
  }
  if (options.extents_max == 0 || options.extents_max > Volume::kExtentsMax) {
    return MakeError(ErrorId::kConfig, absl::StrFormat("extents_max %d: not in [1, %d]",
                                                       options.extents_max, Volume::kExtentsMax));
  }
  if (options.mode == OpenMode::kRecover && options.life == FileLife::kUnlinked) {
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

bool PageMultiple(std::span<const std::byte> bytes) {
  return !bytes.empty() && bytes.size() % kIoAlignment == 0 &&
         reinterpret_cast<uintptr_t>(bytes.data()) % kIoAlignment == 0;
}

}  // namespace

absl::Status Verify(const ExpectedContent& expected, std::span<const std::byte> bytes) {
  if (!expected.verified) return absl::OkStatus();
  const uint64_t found = Checksum(expected.identity, bytes);
  if (found == expected.checksum && bytes.size() == expected.size_bytes) return absl::OkStatus();
  const std::string identity = absl::BytesToHexString(
      {reinterpret_cast<const char*>(expected.identity.data()), expected.identity.size()});
  return MakeError(
      ErrorId::kCorrupt,
      absl::StrFormat("swap path %d (%s): extent %d is not the content of identity %s: checksum "
                      "%016x, expected %016x over %d bytes",
                      expected.path_index, expected.path, static_cast<uint32_t>(expected.extent),
                      identity, found, expected.checksum, expected.size_bytes),
      "the device lost or changed data: restore the job from a checkpoint");
}

Volume::State::State(IoEngine& io_engine, const internal::Geometry& disk_geometry)
    : engine(io_engine),
      geometry(disk_geometry),
      requests(kRequestsMax + kPathsMax + 4),
      table(disk_geometry.table_area_bytes()),
      record_page(protocol::kPageBytes) {
  for (size_t i = requests.size(); i > 0; --i)
    free_requests.push_back(static_cast<uint32_t>(i - 1));
}

Volume::State::~State() {
  for (const internal::Path& path : paths) {
    if (path.index.has_value()) engine.UnregisterFile(*path.index);
  }
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
  const internal::Geometry geometry(capacity_bytes, options.extents_max);
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    const uint64_t needed = geometry.capacity_bytes_min(i);
    if (wanted[i].capacity_bytes >= needed) continue;
    return MakeError(
        ErrorId::kSwapNospc,
        absl::StrFormat("swap path %d (%s): its size of %s is too small: needed %s for the block "
                        "tables alone",
                        i, wanted[i].path, protocol::FormatBytes(wanted[i].capacity_bytes),
                        protocol::FormatBytes(needed)),
        "raise the swap size");
  }

  auto state = std::make_unique<State>(engine, geometry);
  state->protections = protections;
  state->extents_max = options.extents_max;
  ASSIGN_OR_RETURN(auto opened, files.Open(wanted, options.mode, options.life));
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    internal::Path path;
    path.file = std::move(opened[i]);
    path.weight = wanted[i].weight;
    path.space = internal::SpaceMap(geometry.data_begin(i), geometry.data_end(i));
    path.stats.capacity_bytes = wanted[i].capacity_bytes;
    state->paths.push_back(std::move(path));
  }
  for (internal::Path& path : state->paths) {
    ASSIGN_OR_RETURN(path.index, engine.RegisterFile(path.file->fd()));
  }
  RETURN_IF_ERROR(options.mode == OpenMode::kRecover ? state->Recover() : state->Initialise());
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

absl::StatusOr<std::vector<ExtentId>> Volume::AllocateExtents(uint32_t count, uint64_t size_bytes) {
  return state_->Allocate(count, size_bytes);
}

absl::Status Volume::FreeExtents(std::span<const ExtentId> extents) {
  return state_->Free(extents);
}

absl::Status Volume::ZeroExtents(std::span<const ExtentId> extents,
                                 std::span<const std::byte> zeros, uint64_t token) {
  if (extents.empty() || !PageMultiple(zeros)) {
    return absl::InvalidArgumentError("zero extents: none named, or a misaligned buffer");
  }
  for (const ExtentId id : extents) {
    const Extent* extent = state_->Find(id);
    if (extent == nullptr) return Refuse("zero", id, "it is not allocated");
    if (extent->busy > 0 || extent->pinned != 0 || extent->current != kNoSlot) {
      return Refuse("zero", id, "it is in use");
    }
  }
  ASSIGN_OR_RETURN(const uint32_t index, state_->AllocateTransfer(Job::kZero, token));
  Request& request = state_->requests[index];
  request.io = IoKind::kWrite;
  request.data = const_cast<std::byte*>(zeros.data());  // read through it alone
  request.zero_extents.assign(extents.begin(), extents.end());
  request.zero_next = 0;
  request.zero_offset_bytes = 0;
  request.zero_piece_bytes = zeros.size();
  state_->NextZeroPiece(request);
  const absl::Status status = state_->Start(index);
  if (!status.ok()) {
    state_->Release(index);
    return status;
  }
  for (const ExtentId id : extents) ++state_->Find(id)->busy;
  return absl::OkStatus();
}

absl::Status Volume::Read(ExtentId id, std::span<std::byte> bytes, uint64_t token) {
  Extent* extent = state_->Find(id);
  if (extent == nullptr) return Refuse("read", id, "it is not allocated");
  if (extent->current == kNoSlot) return Refuse("read", id, "it was never written");
  Slot& slot = extent->slots[extent->current];
  if (slot.content == SlotContent::kWriting) {
    return Refuse("read", id, "it is being overwritten in place");
  }
  if (slot.content != SlotContent::kWhole) {
    return MakeError(ErrorId::kSwapIo,
                     absl::StrFormat("%s: extent %d was lost when a write failed",
                                     state_->PathText(slot.path), static_cast<uint32_t>(id)));
  }
  if (!PageMultiple(bytes) || bytes.size() > slot.content_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat("read extent %d: %d bytes of %d",
                                                      static_cast<uint32_t>(id), bytes.size(),
                                                      slot.content_bytes));
  }
  ASSIGN_OR_RETURN(const uint32_t index, state_->AllocateTransfer(Job::kRead, token));
  Request& request = state_->requests[index];
  request.io = IoKind::kRead;
  request.path = slot.path;
  request.offset_bytes = slot.offset_bytes;
  request.data = bytes.data();
  request.size_bytes = bytes.size();
  request.extent = id;
  request.slot = extent->current;
  const absl::Status status = state_->Start(index);
  if (!status.ok()) {
    state_->Release(index);
    return status;
  }
  ++slot.readers;
  ++extent->busy;
  return absl::OkStatus();
}

absl::Status Volume::Write(ExtentId id, std::span<const std::byte> bytes, const Identity& identity,
                           uint64_t checksum, uint64_t token) {
  Extent* extent = state_->Find(id);
  if (extent == nullptr) return Refuse("write", id, "it is not allocated");
  if (extent->writing) return Refuse("write", id, "another write is in flight");
  if (!PageMultiple(bytes) || bytes.size() > extent->size_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat("write extent %d: %d bytes of %d",
                                                      static_cast<uint32_t>(id), bytes.size(),
                                                      extent->size_bytes));
  }
  ASSIGN_OR_RETURN(const uint32_t index, state_->AllocateTransfer(Job::kWrite, token));
  Request& request = state_->requests[index];
  request.io = IoKind::kWrite;
  request.data = const_cast<std::byte*>(bytes.data());  // read through it alone
  request.size_bytes = bytes.size();
  request.extent = id;
  request.identity = identity;
  request.checksum = checksum;
  const absl::Status status = state_->StartWrite(index);
  if (!status.ok()) {
    state_->Release(index);
    return status;
  }
  extent->writing = true;
  ++extent->busy;
  return absl::OkStatus();
}

absl::Status Volume::Publish(ExtentId id) {
  Extent* extent = state_->Find(id);
  if (extent == nullptr) return Refuse("publish", id, "it is not allocated");
  if (extent->written == kNoSlot) return Refuse("publish", id, "there is no finished write");
  extent->current = extent->written;
  extent->written = kNoSlot;
  return absl::OkStatus();
}

absl::Status Volume::Commit(uint64_t token) { return state_->BeginCommit(token); }

std::vector<ExtentId> Volume::NeedsRewrite() const {
  std::vector<ExtentId> ids;
  for (uint32_t i = 0; i < state_->extents.size(); ++i) {
    const Extent& extent = state_->extents[i];
    if (!extent.allocated() || extent.current == kNoSlot) continue;
    const Slot& slot = extent.slots[extent.current];
    if (slot.doubted || slot.content == SlotContent::kBroken) ids.push_back(ExtentId{i});
  }
  return ids;
}

void Volume::OnCompletion(const Completion& completion, std::vector<Finished>& finished) {
  state_->OnCompletion(completion, finished);
}

std::optional<ExpectedContent> Volume::expected(ExtentId id) const {
  const Extent* extent = state_->Find(id);
  if (extent == nullptr || extent->current == kNoSlot) return std::nullopt;
  const Slot& slot = extent->slots[extent->current];
  return ExpectedContent{.extent = id,
                         .path_index = slot.path,
                         .path = state_->paths[slot.path].file->name(),
                         .identity = slot.identity,
                         .checksum = slot.checksum,
                         .size_bytes = static_cast<size_t>(slot.content_bytes),
                         .verified = state_->protections.checksum};
}

std::vector<ExtentId> Volume::extents() const {
  std::vector<ExtentId> ids;
  for (uint32_t i = 0; i < state_->extents.size(); ++i) {
    if (state_->extents[i].allocated()) ids.push_back(ExtentId{i});
  }
  return ids;
}

uint64_t Volume::size_bytes(ExtentId id) const {
  const Extent* extent = state_->Find(id);
  return extent == nullptr ? 0 : extent->size_bytes;
}

uint64_t Volume::free_bytes() const { return state_->FreeBytes(); }

uint64_t Volume::durable_sequence() const { return state_->durable.sequence; }

const RecoveryReport& Volume::recovery() const { return state_->recovery; }

uint32_t Volume::requests_in_flight() const {
  return state_->user_requests + (state_->commit.phase == CommitPhase::kIdle ? 0 : 1);
}

VolumeStats Volume::stats() const {
  VolumeStats stats;
  for (const internal::Path& path : state_->paths) stats.paths.push_back(path.stats);
  for (const Extent& extent : state_->extents) stats.extents += extent.allocated() ? 1 : 0;
  stats.commits = state_->commits;
  return stats;
}

}  // namespace forebay::nvme
