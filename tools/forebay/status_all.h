// SPDX-License-Identifier: Apache-2.0
// `forebay status --all`: the daemons of every host of a hostfile, asked over ssh.
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
  std::string socket;  // of the daemons; empty: each host's own
};

struct HostStatus {
  std::string host;
  // Output of `forebay status --json` on the host; null if the host did not answer.
  nlohmann::ordered_json status;
  std::string error;  // one line: why the host did not answer; empty if it did
};

// Asks all hosts at once; each has ssh.limit to connect, and as long again to answer.
absl::StatusOr<std::vector<HostStatus>> AskAllHosts(const StatusAllOptions& options);

// A table of the nodes, one of their jobs, and a line for each host that does not answer.
std::string StatusAllText(const std::vector<HostStatus>& hosts);

// {"nodes": [{"host": ..., "status": {...} or null, "error": "..."}, ...]}
nlohmann::ordered_json StatusAllJson(const std::vector<HostStatus>& hosts);

}  // namespace forebay::tools
