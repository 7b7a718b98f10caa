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

// Of both actions: where the block is in the state arena.
template <typename A>
pinned_mem::ArenaPart PartOf(const A& action) {
  return {.offset_bytes = action.place.state_offset_bytes, .size_bytes = action.bytes};
}

template <typename A>
SwapTransfer TransferOf(const A& action, const ArenaRegistry::Arena& state) {
  FOREBAY_CHECK(action.place.state_offset_bytes + action.bytes <= state->capacity_bytes());
  return {.task = action.task,
          .job = action.job,
          .block = action.identity.block,
          .slot = *action.place.slot,
          .bytes = state->bytes().subspan(action.place.state_offset_bytes, action.bytes)};
}

void LogError(const absl::Status& status) {
  if (!status.ok()) spdlog::error("{}", protocol::FormatError(status));
}

}  // namespace

BlockMover::BlockMover(TaskRunner& runner, SwapSpace* swap, EndTransfers end_transfers, Raise raise)
    : runner_(runner),
      swap_(swap),
      end_transfers_(std::move(end_transfers)),
      raise_(std::move(raise)) {}

bool BlockMover::OnTransferred(const SwapDone& done) {
  auto next = next_.extract(done.task);
  if (next.empty()) return false;
  next.mapped()(done.status);
  return true;
}

void BlockMover::Evict(const EvictBlock& action, const ArenaRegistry::Arena& state) {
  FOREBAY_CHECK(swap_ != nullptr && action.place.slot.has_value());
  const auto bytes = TransferOf(action, state).bytes;
  const nvme::Identity identity = MakeIdentity(action.identity, swap_->nonce());
  runner_.Post(PoolId::kUpdate, [this, action, state, bytes, identity]() -> TaskRunner::Then {
    const uint64_t checksum = nvme::Checksum(identity, bytes);
    return [this, action, state, checksum] { Write(action, state, checksum); };
  });
}

void BlockMover::Write(const EvictBlock& action, const ArenaRegistry::Arena& state,
                       uint64_t checksum) {
  next_.emplace(action.task, [this, action, state, checksum](absl::Status written) {
    if (written.ok()) return FreeEvicted(action, state, checksum);
    raise_({.task = action.task, .status = std::move(written)});
  });
  std::vector<SwapDone> done;
  swap_->StartWrite(TransferOf(action, state), /*pause=*/false, done);
  end_transfers_(done);
}

void BlockMover::FreeEvicted(const EvictBlock& action, const ArenaRegistry::Arena& state,
                             uint64_t checksum) {
  runner_.Post(PoolId::kUpdate, [this, action, state, checksum]() -> TaskRunner::Then {
    const absl::Status freed = state->FreePart(PartOf(action));
    return [this, task = action.task, checksum, freed] {
      LogError(freed);
      raise_({.task = task, .status = absl::OkStatus(), .checksum = checksum});
    };
  });
}

void BlockMover::Promote(const PromoteBlock& action, const ArenaRegistry::Arena& state) {
  FOREBAY_CHECK(swap_ != nullptr);
  runner_.Post(PoolId::kUpdate, [this, action, state]() -> TaskRunner::Then {
    const absl::Status populated = state->Populate(PartOf(action));
    return [this, action, state, populated] {
      LogError(populated);
      if (populated.ok() && action.place.slot) return Read(action, state);
      raise_({.task = action.task, .status = populated});
    };
  });
}

void BlockMover::Read(const PromoteBlock& action, const ArenaRegistry::Arena& state) {
  next_.emplace(action.task, [this, action, state](absl::Status read) {
    Verify(action, state, std::move(read));
  });
  std::vector<SwapDone> done;
  swap_->StartRead(TransferOf(action, state), done);
  end_transfers_(done);
}

void BlockMover::Verify(const PromoteBlock& action, const ArenaRegistry::Arena& state,
                        absl::Status read) {
  const auto expected = swap_->Expected(action.place, action.identity, action.checksum);
  const auto bytes = TransferOf(action, state).bytes;
  runner_.Post(
      PoolId::kUpdate,
      [this, action, state, expected, bytes, read = std::move(read)]() -> TaskRunner::Then {
        const absl::Status verified =
            read.ok() ? VerifyBlock(expected, action.identity, bytes) : read;
        const absl::Status freed =
            verified.ok() ? absl::OkStatus() : state->FreePart(PartOf(action));
        return [this, task = action.task, verified, freed, was_read = read.ok()] {
          if (was_read) LogError(verified);  // a failed read is in the log
          LogError(freed);
          raise_({.task = task, .status = verified});
        };
      });
}

}  // namespace forebay::daemon
