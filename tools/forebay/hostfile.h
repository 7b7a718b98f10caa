// SPDX-License-Identifier: Apache-2.0
// A DeepSpeed hostfile, and the selections of --include and --exclude.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace forebay::tools {

// A line of a hostfile, "worker-1 slots=4".
struct HostSlots {
  std::string host;
  std::vector<int> slots;  // the chosen ones, ascending
  int slots_listed = 0;    // number of slots in the hostfile

  friend bool operator==(const HostSlots&, const HostSlots&) = default;
};

// Hosts to use or to leave out. Each list joins "HOST[:SLOT[,SLOT]...]" by "@": "worker-0@worker-1:0,2". At most one of the
// two lists is not empty.
struct HostSelection {
  std::string include = {};
  std::string exclude = {};
};

inline constexpr size_t kHostsMax = 1024;
inline constexpr int kSlotsMax = 1024;  // most slots of one host

// Parses the text of a hostfile. `path` names the file in errors. Comments begin with "#". Blank lines are skipped.
//
// Errors  E_CONFIG  a line is not "HOST slots=N", a host occurs twice, or the text has no host.
// Source  deepspeed/launcher/runner.py, _parse_hostfile.
absl::StatusOr<std::vector<HostSlots>> ParseHostfile(const std::string& text,
                                                     const std::string& path);

// Returns the selected hosts and slots in the order of `hosts`. A selection without slots means all slots of the host.
//
// Errors  E_OPTION  the hostfile lacks a selected host or slot, or no slot remains.
// Source  deepspeed/launcher/runner.py, parse_resource_filter.
absl::StatusOr<std::vector<HostSlots>> SelectHosts(std::vector<HostSlots> hosts,
                                                   const HostSelection& selection);

// Reads and parses a hostfile, then applies the selection. Errors are those of ParseHostfile() and SelectHosts().
absl::StatusOr<std::vector<HostSlots>> ReadHostfile(const std::string& path,
                                                    const HostSelection& selection);

}  // namespace forebay::tools
