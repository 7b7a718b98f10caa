// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_disk_limit.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nvme/io/engine_factory.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kPieceBytes = protocol::kMiB;

}  // namespace

absl::StatusOr<std::unique_ptr<DiskLimit>> DiskLimit::Create(const std::string& folder,
                                                             uint64_t bytes) {
  auto limit = std::make_unique<DiskLimit>();
  limit->pieces_ = std::max<uint64_t>(1, bytes / kPieceBytes);
  std::string path = (std::filesystem::path(folder) / "forebay-bench-XXXXXX").string();
  limit->file_.Reset(::mkostemp(path.data(), O_DIRECT | O_CLOEXEC));
  const int error = errno;
  ::unlink(path.c_str());
  if (!limit->file_.valid()) {
    return MakeError(ErrorId::kSwapPath, protocol::ErrnoText(absl::StrCat("make ", path), error));
  }
  const uint64_t file_bytes = 2 * limit->pieces_ * kPieceBytes;
  if (::posix_fallocate(limit->file_.get(), 0, static_cast<off_t>(file_bytes)) != 0) {
    return MakeError(
        ErrorId::kSwapNospc,
        absl::StrCat("no room for ", protocol::FormatBytes(file_bytes), " in ", folder));
  }
  RETURN_IF_ERROR(limit->Prepare());
  RETURN_IF_ERROR(limit->RunCopies().status());  // allocates each piece on the disk
  std::swap(limit->read_half_, limit->write_half_);
  RETURN_IF_ERROR(limit->RunCopies().status());
  return limit;
}

absl::StatusOr<std::unique_ptr<DiskLimit>> DiskLimit::Over(const Part& part) {
  auto limit = std::make_unique<DiskLimit>();
  limit->begin_bytes_ = part.begin_bytes;
  limit->pieces_ = std::max<uint64_t>(1, part.bytes / kPieceBytes);
  limit->file_.Reset(::open(part.path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
  if (!limit->file_.valid()) {
    return MakeError(ErrorId::kSwapPath,
                     protocol::ErrnoText(absl::StrCat("open ", part.path), errno));
  }
  RETURN_IF_ERROR(limit->Prepare());
  return limit;
}

absl::Status DiskLimit::Prepare() {
  ASSIGN_OR_RETURN(buffer_,
                   pinned_mem::PinnedArena::Create({.name = "bench-disk",
                                                    .capacity_bytes = kDepth * kPieceBytes,
                                                    .lock = pinned_mem::LockPolicy::kBestEffort}));
  ASSIGN_OR_RETURN(nvme::ChosenEngine chosen, nvme::CreateIoEngine({}));
  engine_ = std::move(chosen.engine);
  engine_->RegisterBuffer(buffer_->bytes());
  ASSIGN_OR_RETURN(index_, engine_->RegisterFile(file_.get()));
  return absl::OkStatus();
}

// Transfers all pieces of a half, kDepth at once. A slot reads or writes a piece, or reads the piece and writes the same
// bytes to the other half. Then the slot takes the next piece.
absl::StatusOr<Sample> DiskLimit::Run(Transfers transfers) {
  std::array<nvme::Completion, kDepth> done;
  const auto began = Clock::now();
  uint64_t next = 0;
  uint64_t ended = 0;
  std::array<uint64_t, kDepth> piece_of{};
  const auto first = transfers == Transfers::kWrites ? nvme::IoKind::kWrite : nvme::IoKind::kRead;
  const auto begin_next = [&](uint32_t slot) {
    return Submit(first, slot, piece_of[slot] = next++);
  };
  for (uint32_t slot = 0; slot < kDepth && next < pieces_; ++slot) {
    RETURN_IF_ERROR(begin_next(slot));
  }
  while (ended < pieces_) {
    ASSIGN_OR_RETURN(const size_t count, engine_->Wait(nvme::IoEngine::kForever, done));
    for (size_t i = 0; i < count; ++i) {
      if (done[i].result != static_cast<int64_t>(kPieceBytes)) {
        return MakeError(ErrorId::kSwapIo, absl::StrCat("the bare disk loop got ", done[i].result,
                                                        " of ", kPieceBytes, " bytes"));
      }
      const auto slot = static_cast<uint32_t>(done[i].token);
      if (done[i].kind == nvme::IoKind::kRead && transfers == Transfers::kCopies) {
        RETURN_IF_ERROR(Submit(nvme::IoKind::kWrite, slot, piece_of[slot]));
        continue;
      }
      ++ended;
      if (next < pieces_) RETURN_IF_ERROR(begin_next(slot));
    }
  }
  const std::chrono::duration<double> took = Clock::now() - began;
  const double times = transfers == Transfers::kCopies ? 2 : 1;
  const double bytes = times * static_cast<double>(pieces_ * kPieceBytes);
  return Sample{.value = bytes / took.count() / protocol::kGb};
}

// Starts a transfer between the slot's memory and a piece of the read half or of the written half.
absl::Status DiskLimit::Submit(nvme::IoKind kind, uint32_t slot, uint64_t piece) {
  const uint64_t half = kind == nvme::IoKind::kRead ? read_half_ : write_half_;
  return engine_->Submit({.kind = kind,
                          .file = index_,
                          .offset_bytes = begin_bytes_ + (half * pieces_ + piece) * kPieceBytes,
                          .data = buffer_->bytes().data() + slot * kPieceBytes,
                          .size_bytes = kPieceBytes,
                          .token = slot});
}

}  // namespace forebay::tools
