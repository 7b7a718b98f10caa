// SPDX-License-Identifier: Apache-2.0
// `forebay status --all`: asks the daemons of all hosts in a hostfile for their status, over ssh.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "tools/forebay/hostfile.h"
#include "tools/forebay/ssh.h"

namespace forebay::tools {

struct StatusAllOptions {
  std::string hostfile;
  HostSelection selection;
  SshOptions ssh;
  std::string socket;  // the daemon's on all hosts; empty: each host's default
};

struct HostStatus {
  std::string host;
  // Output of `forebay status --json` on the host; null if the host did not answer.
  nlohmann::ordered_json status;
  std::string error;  // one line: why the host did not answer; empty if it did
};

// Asks all hosts at once. Each host has ssh.limit to connect and the same time to answer.
absl::StatusOr<std::vector<HostStatus>> AskAllHosts(const StatusAllOptions& options);

// Returns a table of the nodes, a table of their jobs, and a line for each host that did not answer.
std::string StatusAllText(const std::vector<HostStatus>& hosts);

// Returns {"nodes": [{"host": ..., "status": {...} or null, "error": "..."}, ...]}.
nlohmann::ordered_json StatusAllJson(const std::vector<HostStatus>& hosts);

}  // namespace forebay::tools
