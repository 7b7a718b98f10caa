// SPDX-License-Identifier: Apache-2.0
// A DeepSpeed hostfile, and the selections of --include and --exclude.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace forebay::tools {

// One line, "worker-1 slots=4".
struct HostSlots {
  std::string host;
  std::vector<int> slots;  // the chosen ones, ascending
  int slots_listed = 0;    // in the hostfile

  friend bool operator==(const HostSlots&, const HostSlots&) = default;
};

// Each "HOST[:SLOT[,SLOT]...]", joined by "@": "worker-0@worker-1:0,2". At most one of the two is not empty.
struct HostSelection {
  std::string include = {};
  std::string exclude = {};
};

inline constexpr size_t kHostsMax = 1024;
inline constexpr int kSlotsMax = 1024;  // of a host

// `path` names the file in errors. Comments begin with "#"; blank lines are left out.
//
// Errors  E_CONFIG  a line is no "HOST slots=N", or a host stands there twice, or there is none.
// Source  deepspeed/launcher/runner.py, _parse_hostfile.
absl::StatusOr<std::vector<HostSlots>> ParseHostfile(const std::string& text,
                                                     const std::string& path);

// In the hostfile's order. A host that is selected without slots is selected with all of them.
//
// Errors  E_OPTION  the hostfile has no such host or slot, or nothing is left.
// Source  deepspeed/launcher/runner.py, parse_resource_filter.
absl::StatusOr<std::vector<HostSlots>> SelectHosts(std::vector<HostSlots> hosts,
                                                   const HostSelection& selection);

// Both, of a file.
absl::StatusOr<std::vector<HostSlots>> ReadHostfile(const std::string& path,
                                                    const HostSelection& selection);

}  // namespace forebay::tools
