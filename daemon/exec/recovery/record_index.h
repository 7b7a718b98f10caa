// SPDX-License-Identifier: Apache-2.0
// Tracks which entries of a record (KeptRecord) count, and reads the job from these entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/blocks/record_sizes.h"
#include "daemon/exec/recovery/record_entry.h"

namespace forebay::daemon {

// Offsets of the newest entry of each block, page, parameter, lease and kind. An entry that has been replaced, or whose step is
// over, does not count.
//
// In a step a block may have two entries: `current` counts until the step is published, then `written` becomes the current one.
//
// Limits  The constructor allocates RecordIndexBytes(). Add() and Move() allocate nothing, except for errors.
class RecordIndex {
 public:
  explicit RecordIndex(const RecordCounts& counts);

  // Adds an entry at `offset` that is behind all others. May throw kj::Exception if the entry is damaged.
  //
  // Errors  E_CORRUPT  the entry has numbers that no entry of this record has.
  //         E_CONFIG   the entry is of a kind that only newer daemons write.
  absl::Status Add(schema::RecordEntry::Reader entry, uint64_t offset);

  // Calls `move` with the offset of each entry that counts, and sets the offset to the result. The entries in the order of the
  // calls give another RecordIndex the same state.
  void Move(absl::FunctionRef<uint64_t(uint64_t)> move);

  uint64_t published() const { return published_; }
  // False if the entries have no values of a published step, so that no job can be read from them.
  bool is_whole() const { return step_ != kNone; }
  // True if a step is prepared or decided, and not published.
  bool is_in_step() const { return is_decided() || is_prepared(); }
  // True if the block has an entry of this step.
  bool HasWritten(uint32_t block, uint64_t step) const;

  // Returns `job` with the values that the entries in `half` have. `job` has all slots of the job in KeptMemory::spare_slots.
  // `step_arena`: descriptor; -1: none. May throw kj::Exception.
  //
  // Errors  E_CORRUPT  the step arena is too short, or two contents have one place.
  absl::StatusOr<DurableJob> Read(DurableJob job, std::span<const std::byte> half,
                                  int step_arena) const;

 private:
  static constexpr uint64_t kNone = UINT64_MAX;
  struct OfStep {
    uint64_t offset = kNone;
    uint64_t step = 0;
  };
  struct Block {
    uint64_t current = kNone;
    OfStep written = {};
    uint64_t installed = kNone;  // RecordInstalled of `written`
    OfStep staged = {};
  };
  struct Lease {
    uint64_t lease = 0;
    uint64_t offset = kNone;
  };

  bool is_decided() const { return decided_ > published_; }
  bool is_prepared() const { return !is_decided() && prepared_.step == decided_ + 1; }
  bool has_trust() const { return is_decided() && trust_.step == decided_; }
  bool IsOpen(const OfStep& entry) const {
    return entry.offset != kNone && entry.step > published_;
  }
  // Returns the offset of the block's entry at the published step.
  uint64_t CurrentOf(const Block& block) const;

  absl::Status Add(schema::BlockEntry::Reader entry, uint64_t offset);
  absl::Status Add(schema::StagedEntry::Reader entry, uint64_t offset);
  absl::Status Add(schema::SumsEntry::Reader entry, uint64_t offset);
  absl::Status Add(schema::PreparedEntry::Reader entry, uint64_t offset);
  absl::Status Add(schema::DecisionEntry::Reader entry, uint64_t offset);
  absl::Status Add(schema::OrderEntry::Reader entry, uint64_t offset);
  absl::Status Add(schema::StepEntry::Reader entry, uint64_t offset);
  absl::Status Add(schema::UpdatesEntry::Reader entry, uint64_t offset);
  absl::Status Add(schema::Lease::Reader entry, uint64_t offset);
  void EndLease(uint64_t lease);
  absl::Status AddInstalled(uint32_t block, uint64_t offset);
  absl::Status CheckValues(auto entry) const;

  absl::Status ReadValues(std::span<const std::byte> half, int step_arena, DurableJob& job,
                          KeptMemory& kept) const;
  void ReadBlocks(std::span<const std::byte> half, DurableJob& job, KeptMemory& kept) const;
  std::shared_ptr<const KeptUpdate> ReadUpdate(uint64_t slot_bytes,
                                               std::span<const std::byte> half) const;
  absl::StatusOr<std::shared_ptr<const KeptUpdate>> ReadPrepared(std::span<const std::byte> half,
                                                                 int step_arena) const;
  std::vector<KeptUpdate::Sums> ReadSums(uint64_t step, std::span<const std::byte> half) const;

  RecordCounts counts_;
  uint64_t published_ = 0;
  uint64_t decided_ = 0;
  // RecordDecision of the published step, and of the decided one. They are equal if the decided step is published.
  uint64_t values_ = kNone;
  uint64_t decision_ = kNone;
  uint64_t step_ = kNone;
  OfStep order_;
  OfStep attempt_;
  OfStep prepared_;
  OfStep trust_;
  uint64_t updates_set_ = 0;       // number of RecordUpdates since the published step
  std::vector<uint64_t> updates_;  // by parameter: newest RecordUpdates since the published step
  std::vector<Block> blocks_;
  std::vector<OfStep> sums_;  // by page
  std::vector<Lease> leases_;
};

}  // namespace forebay::daemon
