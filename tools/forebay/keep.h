// SPDX-License-Identifier: Apache-2.0
// `forebay run --keep NAME`: functions that begin a named run, end the run so that its trainings can continue later, and
// list and forget such runs.
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
  std::string keep;    // name of a new run that can be resumed later
  std::string resume;  // or name of the earlier run to continue
  std::filesystem::path state_folder;
  std::string run_variable;  // FOREBAY_RUN of this process; empty: not set

  bool is_wanted() const { return !keep.empty() || !resume.empty(); }
};

// Reserves the name of a new run, or opens the run to continue. Sets the daemon's options to those of the run.
//
// Errors  those of KeptRunFile; E_OPTION: an option contradicts the saved run; names both values.
absl::StatusOr<KeptRunFile> BeginKept(const KeepOptions& options, PrivateDaemonOptions& daemon);

// Saves the DRAM limit of the daemon, which is ready, in the run's state.
//
// Errors  E_OPTION  the limit is lower than the saved one; names both numbers.
absl::Status CheckKeptDaemon(KeptRunFile& file, PrivateDaemon& daemon);

// Makes each job's newest committed step durable, ends the daemon, and prints the durable steps to stderr. Called after the
// command has ended. Removes a run that has no training. A signal from `signal_fd` ends the wait for the disk.
//
// Errors  E_SWAP_IO  a training is not durable at its newest step. Also the errors of a restart of the daemon.
absl::Status EndKept(KeptRunFile& file, PrivateDaemon& daemon, int signal_fd);

// Returns each --keep run, running or ended, with its swap and the durable steps of its trainings.
absl::StatusOr<nlohmann::ordered_json> ListKept(const std::filesystem::path& state_folder);
std::string KeptText(const nlohmann::ordered_json& runs);

// Removes the run: frees its swap and its name. Returns a sentence that says what was freed.
absl::StatusOr<std::string> ForgetKept(const std::filesystem::path& state_folder,
                                       const std::string& name);

}  // namespace forebay::tools
