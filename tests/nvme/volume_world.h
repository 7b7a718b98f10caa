// SPDX-License-Identifier: Apache-2.0
// A volume on simulated disks, and helpers that finish each call. Shared by the volume's tests.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/checksum.h"
#include "nvme/internal/protections.h"
#include "nvme/io/io_engine.h"
#include "nvme/verify.h"
#include "nvme/volume.h"
#include "protocol/os/status_macros.h"
#include "tests/support/pattern.h"

namespace forebay::nvme {

inline constexpr size_t kBlockBytes = 3 * 4096;  // several sectors and pages

// Contents of a block at a step, and their identity, as the daemon would write them.
inline testing::Bytes ContentOf(uint32_t block, uint32_t step) {
  return testing::Pattern(kBlockBytes, /*seed=*/1000 * step + block);
}

inline Identity IdentityOf(uint32_t block, uint32_t step) {
  Identity identity{};
  std::memcpy(identity.data(), &block, sizeof(block));
  std::memcpy(identity.data() + sizeof(block), &step, sizeof(step));
  return identity;
}

// Polls the engine until request `token` has finished. Returns its status.
inline absl::Status FinishOne(Volume& volume, IoEngine& engine, uint64_t token) {
  constexpr int kWaitsMax = 100000;
  std::array<Completion, 8> completions;
  std::vector<Finished> finished;
  for (int i = 0; i < kWaitsMax; ++i) {
    ASSIGN_OR_RETURN(const size_t count, engine.Wait(std::chrono::seconds(1), completions));
    for (size_t c = 0; c < count; ++c) volume.OnCompletion(completions[c], finished);
    for (const Finished& one : finished) {
      if (one.token == token) return one.status;
    }
  }
  return absl::DeadlineExceededError("the request never ends");
}

inline absl::Status ReadNow(Volume& volume, IoEngine& engine, const Slot& slot,
                            std::span<std::byte> bytes) {
  RETURN_IF_ERROR(volume.Read(slot, bytes, /*token=*/1));
  return FinishOne(volume, engine, 1);
}

inline absl::Status WriteNow(Volume& volume, IoEngine& engine, const Slot& slot,
                             std::span<const std::byte> bytes) {
  RETURN_IF_ERROR(volume.Write(slot, bytes, /*token=*/2));
  return FinishOne(volume, engine, 2);
}

inline absl::Status CommitNow(Volume& volume, IoEngine& engine, std::span<const std::byte> ledger,
                              std::span<const Slot> slots) {
  RETURN_IF_ERROR(volume.CommitLedger(ledger, slots, /*token=*/3));
  return FinishOne(volume, engine, 3);
}

inline absl::Status ZeroNow(Volume& volume, IoEngine& engine, std::span<const Slot> slots) {
  const testing::Bytes zeros(8192);
  RETURN_IF_ERROR(volume.Zero(slots, zeros, /*token=*/4));
  return FinishOne(volume, engine, 4);
}

// Result of reading a block: the block's step or the error. bytes_right is true if the bytes are those of that step.
struct BlockState {
  absl::Status status;
  uint32_t step = 0;
  bool bytes_right = false;
};

// Blocks in the slots of a volume, stored like a daemon's durable steps: a step is written to free slots and published at once.
// The ledger is this table.
class BlockStore {
 public:
  // Slots for the last two commits, for a commit of unknown outcome, and for the next write.
  static constexpr uint32_t kSlotsPerBlock = 4;

  struct Entry {
    Slot slot;
    uint32_t step = 0;  // 0: never written
    uint32_t unused = 0;
    uint64_t checksum = 0;
  };

  // Creates a new store, or restores it from the recovered ledger.
  BlockStore(Volume& volume, IoEngine& engine, uint32_t blocks)
      : volume_(volume), engine_(engine), map_(volume.free_slots()) {
    entries_.resize(volume.ledger().size() / sizeof(Entry));
    if (!entries_.empty()) {
      std::memcpy(entries_.data(), volume.ledger().data(), volume.ledger().size());
    } else if (volume.durable_sequence() == 0) {
      entries_.resize(blocks);
    }
    for (const Entry& entry : entries_) {
      if (entry.step > 0) slots_.push_back(entry.slot);
    }
    const size_t more = entries_.size() * kSlotsPerBlock - slots_.size();
    const auto allocated = map_.Allocate(more, kBlockBytes);
    if (allocated) slots_.insert(slots_.end(), allocated->begin(), allocated->end());
  }

  const std::vector<Slot>& slots() const { return slots_; }
  std::vector<Entry>& entries() { return entries_; }

  // A slot that no ledger needs.
  std::optional<Slot> FreeSlot() const {
    for (const Slot& slot : slots_) {
      const auto uses = [&slot](const Entry& entry) {
        return entry.step > 0 && entry.slot == slot;
      };
      if (overwrites_in_place || volume_.is_pinned(slot)) continue;
      if (std::any_of(entries_.begin(), entries_.end(), uses)) continue;
      if (std::find(writing_.begin(), writing_.end(), slot) != writing_.end()) continue;
      return slot;
    }
    return std::nullopt;
  }

  // Writes all blocks of a step concurrently, and publishes them once all are written. Skips blocks that already have the step.
  // Writes doubted blocks again.
  absl::Status WriteStep(uint32_t step) {
    constexpr uint64_t kFirstToken = 100;
    constexpr int kWaitsMax = 100000;
    const std::vector<Slot> doubted = volume_.Doubted();
    std::vector<Entry> next = entries_;
    std::vector<testing::Bytes> contents;
    size_t left = 0;
    absl::Status first_error;
    for (uint32_t block = 0; block < entries_.size(); ++block) {
      contents.push_back(ContentOf(block, step));
      const Entry& entry = entries_[block];
      const bool in_doubt = std::find(doubted.begin(), doubted.end(), entry.slot) != doubted.end();
      if (entry.step == step && !in_doubt) continue;
      const std::optional<Slot> slot = overwrites_in_place ? slots_[block] : FreeSlot();
      if (!slot) return absl::ResourceExhaustedError("no slot is free");
      next[block] = {.slot = *slot,
                     .step = step,
                     .checksum = Checksum(IdentityOf(block, step), contents.back())};
      const absl::Status status = volume_.Write(*slot, contents.back(), kFirstToken + block);
      first_error.Update(status);
      if (status.ok()) ++left;
      writing_.push_back(*slot);
    }
    writing_.clear();
    std::array<Completion, 8> completions;
    for (int i = 0; left > 0 && i < kWaitsMax; ++i) {
      ASSIGN_OR_RETURN(const size_t count, engine_.Wait(std::chrono::seconds(1), completions));
      std::vector<Finished> finished;
      for (size_t c = 0; c < count; ++c) volume_.OnCompletion(completions[c], finished);
      for (const Finished& one : finished) {
        --left;
        first_error.Update(one.status);
      }
    }
    RETURN_IF_ERROR(first_error);
    entries_ = std::move(next);
    return absl::OkStatus();
  }

  absl::Status Commit() {
    std::vector<Slot> named;
    for (const Entry& entry : entries_) {
      if (entry.step > 0) named.push_back(entry.slot);
    }
    return CommitNow(volume_, engine_, std::as_bytes(std::span(entries_)), named);
  }

  absl::Status CommitStep(uint32_t step) {
    RETURN_IF_ERROR(WriteStep(step));
    return Commit();
  }

  BlockState Read(uint32_t block, bool verified = true) {
    const Entry& entry = entries_[block];
    if (entry.step == 0) return {.status = absl::NotFoundError("never written")};
    testing::Bytes bytes(kBlockBytes);
    BlockState state;
    state.step = entry.step;
    state.status = ReadNow(volume_, engine_, entry.slot, bytes);
    if (state.status.ok() && verified) {
      state.status = Verify({.slot = entry.slot,
                             .path = volume_.path_name(entry.slot.path),
                             .identity = IdentityOf(block, entry.step),
                             .checksum = entry.checksum},
                            bytes);
    }
    state.bytes_right = bytes == ContentOf(block, state.step);
    return state;
  }

  // Writes every step to the same slots, without pins: for the test that shows what pins prevent.
  bool overwrites_in_place = false;

 private:
  Volume& volume_;
  IoEngine& engine_;
  SlotMap map_;
  std::vector<Slot> slots_;
  std::vector<Slot> writing_;
  std::vector<Entry> entries_;
};

}  // namespace forebay::nvme
