// SPDX-License-Identifier: Apache-2.0
// Sizes of the record of a job (KeptRecord), from which the next daemon continues the job.
#pragma once

#include <cstdint>

namespace forebay::daemon {

// Numbers that determine how much a record holds.
struct RecordCounts {
  uint64_t params = 0;
  uint64_t param_group_rows = 0;
  uint64_t partitions = 0;
  uint64_t ranks = 0;
  uint64_t blocks = 0;
  uint64_t digests = 0;        // number of digests of weights pages, in all blocks
  uint64_t block_digests = 0;  // largest number of digests of a block
  uint64_t sum_pages = 0;
  uint64_t leases = 0;
  uint64_t summary_bytes = 0;  // bytes of an encoded StepSummary; 0 if the job is on one node
  bool has_trust = false;      // each step has a RecordTrust
};

// Bytes of an entry without its lists. kPlaceEntryBytes is for RecordBlock and RecordSums. kValuesEntryBytes is for RecordDecision,
// its order, RecordPrepared and RecordTrust. kSmallEntryBytes is for all other kinds.
inline constexpr uint64_t kPlaceEntryBytes = 104;
inline constexpr uint64_t kValuesEntryBytes = 176;
inline constexpr uint64_t kSmallEntryBytes = 64;
// Bytes of a group's hyper-parameters in an entry.
inline constexpr uint64_t kHyperParamsEntryBytes = 80;

// Upper bounds of the bytes of the entries that count.
struct RecordSizes {
  uint64_t base_bytes = 0;  // entries that count between two steps
  uint64_t step_bytes = 0;  // entries that count in a step, in addition to base_bytes
  // The largest entry that may replace an entry that counts. A decision replaces none, because a step is decided once.
  uint64_t entry_bytes = 0;

  // A half that begins with the entries that count has room for one more entry at every moment.
  uint64_t half_bytes() const;
};

RecordSizes SizesOf(const RecordCounts& counts);

// Bytes of the heap that the writer of a record uses to find the entries that count.
uint64_t RecordIndexBytes(const RecordCounts& counts);

}  // namespace forebay::daemon
