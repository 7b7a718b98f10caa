// SPDX-License-Identifier: Apache-2.0
// Where a volume with durable jobs is: what tells a daemon that the jobs on its swap paths are its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nvme/swap_files.h"

namespace forebay::daemon {

// All zeros: not known.
using MachineId = std::array<std::byte, 16>;

// Of one path.
struct PathPlace {
  std::string name;       // of the file or device, without symbolic links
  uint64_t inode = 0;     // 0: of a device
  std::string disk = {};  // of a device: what it says of itself; empty: nothing

  bool operator==(const PathPlace&) const = default;
};

// The ledger has it. A file is the name and the inode number together: a copy (cp, tar, a backup that was restored)
// has another inode, what was moved or mounted elsewhere another name. Numbers of devices and file systems are left
// out: they may change when the machine starts. So may the name of a block device: one that says which disk it is is
// known by that alone.
//
// A copy of a whole disk in the place of the original, on the same machine or on one with the same machine-id, has all
// of this too. It is the volume as it was at an earlier durable step.
struct VolumePlace {
  MachineId machine{};
  std::vector<PathPlace> paths = {};  // in the volume's order; empty: not known

  bool operator==(const VolumePlace&) const = default;
};

// What happens to durable jobs of a volume that was last used on another machine or on other paths.
enum class OtherPlace : uint8_t { kRefused, kAdopted };

// A hash of the machine-id, which is itself for the machine alone; not known where there is none, as in containers.
//
// Source  machine-id(5), sd_id128_get_machine_app_specific(3).
MachineId ThisMachine();

// Of paths that exist.
//
// Errors  E_SWAP_PATH  a path is missing.
absl::StatusOr<VolumePlace> PlaceOf(std::span<const nvme::PathOptions> paths,
                                    const MachineId& machine);

// "swap path 0 (/b/forebay.swap) was last used as /a/forebay.swap": everything that differs. Empty: they are the same,
// or `before` is not known. A machine counts where both are known.
std::string DescribeMove(const VolumePlace& before, const VolumePlace& now);

// What a ledger needs for it.
uint64_t LedgerBytes(const VolumePlace& place);

}  // namespace forebay::daemon
