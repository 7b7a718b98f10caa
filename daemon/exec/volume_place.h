// SPDX-License-Identifier: Apache-2.0
// Place of a volume with durable jobs, by which a daemon knows that the jobs on its swap paths are its own.
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

// Identity of a machine; all zeros if unknown.
using MachineId = std::array<std::byte, 16>;

// Place of one path of the volume.
struct PathPlace {
  std::string name;       // name of the file or device, without symbolic links
  uint64_t inode = 0;     // 0 for a device
  std::string disk = {};  // identity that a device states; empty if none

  bool operator==(const PathPlace&) const = default;
};

// Place of the volume in its ledger. A file is identified by its name and inode number together: a copy (cp, tar, a restored
// backup) has another inode, a file that was moved or mounted elsewhere another name. Numbers of devices and file systems are
// not part of it: they may change when the machine starts. The name of a block device may change too: a device that states its
// disk's identity is known by that alone.
//
// A copy of a whole disk in the place of the original, on the same machine or on a machine with the same machine-id, has the
// same place. It is the volume in the state of an earlier durable step.
struct VolumePlace {
  MachineId machine{};
  std::vector<PathPlace> paths = {};  // places in the order of the paths; empty if unknown

  bool operator==(const VolumePlace&) const = default;
};

// Treatment of durable jobs of a volume that was last used on another machine or on other paths.
enum class OtherPlace : uint8_t { kRefused, kAdopted };

// Returns a hash of the machine-id; the machine-id itself is not disclosed. Returns all zeros if the machine has no machine-id,
// as in containers.
//
// Source  machine-id(5), sd_id128_get_machine_app_specific(3).
MachineId ThisMachine();

// Returns the place of a volume on these paths, which must exist.
//
// Errors  E_SWAP_PATH  a path is missing.
absl::StatusOr<VolumePlace> PlaceOf(std::span<const nvme::PathOptions> paths,
                                    const MachineId& machine);

// Describes all differences: "swap path 0 (/b/forebay.swap) was last used as /a/forebay.swap". Returns an empty text if the
// places are the same, or `before` is unknown. The machines are compared if both are known.
std::string DescribeMove(const VolumePlace& before, const VolumePlace& now);

// Bytes that a ledger needs for `place`.
uint64_t LedgerBytes(const VolumePlace& place);

}  // namespace forebay::daemon
