// SPDX-License-Identifier: Apache-2.0
// The ledger of the swap volume: a DurableNode as bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/exec/volume_place.h"
#include "nvme/slot_map.h"
#include "nvme/volume.h"

namespace forebay::daemon {

struct DecodedLedger {
  DurableNode node;
  uint64_t nonce = 0;  // SwapSpace::nonce() of the bytes in the slots
  VolumePlace place = {};
  // Jobs that a daemon of release 0.2.0 has handed over (release_before.h). A ledger of this release has none.
  std::set<JobId> handed_over = {};
};

// Encodes the ledger of a volume as an unpacked Ledger (ledger.capnp). Omits the fields that exist in memory alone
// (DurableJob::kept, last_lease).
//
// Errors  E_LIMIT     a list is longer than such a message can hold.
//         E_INTERNAL  the size of a slot differs from the slot size of its job.
absl::StatusOr<std::vector<std::byte>> EncodeLedger(const DurableNode& node, uint64_t nonce,
                                                    const VolumePlace& place = {});

// Encodes jobs for a record: also the fields that exist in memory alone. Errors: of EncodeLedger.
absl::StatusOr<std::vector<std::byte>> EncodeKept(const DurableNode& node, uint64_t nonce);

// Reads bytes that may be damaged. The result is consistent in itself, so that no caller has to check it again. It is not
// checked against the paths, nor against the contents of the slots.
//
// Limits  Time and memory in proportion to the bytes, however they point at each other.
// Errors  E_CORRUPT    not a ledger; names the job and what is wrong.
//         E_SWAP_PATH  the ledger is of a newer version; names both versions.
absl::StatusOr<DecodedLedger> DecodeLedger(std::span<const std::byte> bytes);

// Decodes the ledger of the volume's last durable commit.
//
// Errors  of DecodeLedger.
//         E_CORRUPT  the ledger names other slots than the volume's commit does.
absl::StatusOr<DecodedLedger> DecodeLedgerOf(const nvme::Volume& volume);

}  // namespace forebay::daemon
