// SPDX-License-Identifier: Apache-2.0
// `forebay run --keep NAME`: how a run is begun, ended so that its trainings go on later, listed and forgotten.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "tools/forebay/kept_run.h"
#include "tools/forebay/private_daemon.h"

namespace forebay::tools {

struct KeepOptions {
  std::string keep;    // the name of a new kept run
  std::string resume;  // or of one that goes on
  std::filesystem::path state_folder;
  std::string run_variable;  // FOREBAY_RUN of this process; empty: not set

  bool is_wanted() const { return !keep.empty() || !resume.empty(); }
};

// Takes the name of a new run, or opens the one that goes on, and makes the daemon's options those of the run.
//
// Errors  of KeptRunFile; E_OPTION: what is given contradicts the kept run, both are named.
absl::StatusOr<KeptRunFile> BeginKept(const KeepOptions& options, PrivateDaemonOptions& daemon);

// Once the daemon is ready: writes down how much DRAM it has.
//
// Errors  E_OPTION  it has less than the run was kept with; both numbers.
absl::Status CheckKeptDaemon(KeptRunFile& file, PrivateDaemon& daemon);

// After the command: each job's newest committed step is made durable, the daemon ends, and stderr says what is durable. A run
// without a training is given up. A signal that `signal_fd` has ends the wait for the disk.
//
// Errors  E_SWAP_IO  a training is not durable at its newest step; of the daemon's restart.
absl::Status EndKept(KeptRunFile& file, PrivateDaemon& daemon, int signal_fd);

// The durable steps of each kept run.
absl::StatusOr<nlohmann::ordered_json> ListKept(const std::filesystem::path& state_folder);
std::string KeptText(const nlohmann::ordered_json& runs);

// Gives the run up: its swap is free, its name too. Returns what was freed, as a sentence.
absl::StatusOr<std::string> ForgetKept(const std::filesystem::path& state_folder,
                                       const std::string& name);

}  // namespace forebay::tools
