// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/block_mover.h"

#include <span>
#include <utility>

#include "daemon/exec/block_tasks.h"
#include "nvme/checksum.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

void LogError(const absl::Status& status) {
  if (!status.ok()) spdlog::error("{}", protocol::FormatError(status));
}

}  // namespace

BlockMover::BlockMover(TaskRunner& runner, SwapSpace* swap, EndTransfers end_transfers, Raise raise,
                       std::pmr::memory_resource* memory, Evicted evicted)
    : runner_(runner),
      swap_(swap),
      end_transfers_(std::move(end_transfers)),
      raise_(std::move(raise)),
      evicted_(std::move(evicted)),
      next_(memory) {}

bool BlockMover::OnTransferred(const SwapDone& done, uint64_t end_ns) {
  auto next = next_.extract(done.task);
  if (next.empty()) return false;
  next.mapped()({.status = done.status, .begin_ns = done.start_ns, .end_ns = end_ns});
  return true;
}

SwapTransfer BlockMover::TransferOf(const Moved& moved) {
  FOREBAY_CHECK(moved.part.offset_bytes + moved.part.size_bytes <= moved.arena->capacity_bytes());
  return {.task = moved.task,
          .job = moved.identity.job,
          .block = moved.identity.block,
          .part = moved.identity.part,
          .slot = *moved.place.slot,
          .bytes = moved.arena->bytes().subspan(moved.part.offset_bytes, moved.part.size_bytes),
          .order = moved.order};
}

void BlockMover::Evict(const EvictBlock& action, const ArenaRegistry::Arena& state) {
  DigestAndWrite(
      {.task = action.task,
       .identity = action.identity,
       .arena = state,
       .part = {.offset_bytes = action.place.state_offset_bytes, .size_bytes = action.bytes},
       .place = action.place});
}

void BlockMover::Spill(const SpillSums& action, const ArenaRegistry::Arena& step) {
  Moved moved = PartOf(action, step);
  moved.pause = action.pause;
  DigestAndWrite(std::move(moved));
}

void BlockMover::Save(const SavePart& action, const ArenaRegistry::Arena& arena) {
  Moved moved = PartOf(action, arena);
  moved.pause = action.pause;
  moved.order = TransferQueue::Order::kBackground;
  DigestAndWrite(std::move(moved));
}

void BlockMover::DigestAndWrite(Moved moved) {
  FOREBAY_CHECK(swap_ != nullptr && moved.place.slot.has_value());
  const auto bytes = TransferOf(moved).bytes;
  const nvme::Identity identity = MakeIdentity(moved.identity, swap_->nonce());
  runner_.Post(PoolId::kUpdate,
               [this, moved = std::move(moved), bytes, identity]() -> TaskRunner::Then {
                 const uint64_t checksum = nvme::Checksum(identity, bytes);
                 return [this, moved, checksum] { Write(moved, checksum); };
               });
}

void BlockMover::Write(const Moved& moved, uint64_t checksum) {
  next_.emplace(moved.task, [this, moved, checksum](const Transferred& written) {
    if (written.status.ok() && moved.leaves_memory) return FreeWritten(moved, checksum);
    raise_({.task = moved.task,
            .status = written.status,
            .checksum = checksum,
            .begin_ns = written.begin_ns,
            .end_ns = written.end_ns});
  });
  std::vector<SwapDone> done;
  swap_->StartWrite(TransferOf(moved), moved.pause, done);
  end_transfers_(done);
}

void BlockMover::FreeWritten(const Moved& moved, uint64_t checksum) {
  if (evicted_) {
    evicted_({.job = moved.identity.job,
              .block = static_cast<uint32_t>(moved.identity.block),
              .slot = moved.place.slot,
              .checksum = checksum,
              .written_step = moved.identity.written_step,
              .weights_digests = nullptr});
  }
  runner_.Post(PoolId::kUpdate, [this, moved, checksum]() -> TaskRunner::Then {
    const absl::Status freed = moved.arena->FreePart(moved.part);
    return [this, task = moved.task, checksum, freed] {
      LogError(freed);
      raise_({.task = task, .status = absl::OkStatus(), .checksum = checksum});
    };
  });
}

void BlockMover::Promote(const PromoteBlock& action, const ArenaRegistry::Arena& state) {
  FOREBAY_CHECK(swap_ != nullptr);
  const Moved moved{
      .task = action.task,
      .identity = action.identity,
      .arena = state,
      .part = {.offset_bytes = action.place.state_offset_bytes, .size_bytes = action.bytes},
      .place = action.place,
      .checksum = action.checksum};
  runner_.Post(PoolId::kUpdate, [this, moved]() -> TaskRunner::Then {
    const absl::Status populated = moved.arena->Populate(moved.part);
    return [this, moved, populated] {
      LogError(populated);
      if (populated.ok() && moved.place.slot) return Read(moved);
      raise_({.task = moved.task, .status = populated});
    };
  });
}

void BlockMover::Read(const Moved& moved) {
  FOREBAY_CHECK(swap_ != nullptr);
  next_.emplace(moved.task, [this, moved](const Transferred& read) { Verify(moved, read); });
  std::vector<SwapDone> done;
  swap_->StartRead(TransferOf(moved), done);
  end_transfers_(done);
}

void BlockMover::Verify(const Moved& moved, const Transferred& read) {
  const auto expected = swap_->Expected(moved.place, moved.identity, moved.checksum);
  const auto bytes = TransferOf(moved).bytes;
  runner_.Post(PoolId::kUpdate, [this, moved, expected, bytes, read]() -> TaskRunner::Then {
    const absl::Status verified =
        read.status.ok() ? VerifyBlock(expected, moved.identity, bytes) : read.status;
    const bool is_freed = !verified.ok() && moved.leaves_memory;
    const absl::Status freed = is_freed ? moved.arena->FreePart(moved.part) : absl::OkStatus();
    return [this, task = moved.task, verified, freed, read] {
      if (read.status.ok()) LogError(verified);  // a failed read is in the log already
      LogError(freed);
      raise_({.task = task, .status = verified, .begin_ns = read.begin_ns, .end_ns = read.end_ns});
    };
  });
}

}  // namespace forebay::daemon
