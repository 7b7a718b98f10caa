// SPDX-License-Identifier: Apache-2.0
// Runs whose trainings outlive them: `forebay run --keep NAME`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::tools {

struct KeptTraining {
  std::string job;
  uint64_t step = 0;  // durable

  bool operator==(const KeptTraining&) const = default;
};

// "gpt at step 41, bert at step 7"; "no training": there is none.
std::string Describe(const std::vector<KeptTraining>& trainings);

struct KeptRun {
  std::string name;
  std::vector<std::string> places;  // of --swap: absolute
  std::vector<std::string> paths;  // swap.paths: a folder in each place, or the block device itself
  uint64_t swap_bytes = 0;         // of each path
  uint64_t dram_bytes = 0;         // the daemon's limit; 0: it has not been ready yet
  std::string dram;                // --dram; empty: `config` or `settings` say it
  std::string config;              // --config; empty: none
  std::vector<std::string> settings;         // --set
  std::string run;                           // FOREBAY_RUN of its commands
  std::vector<KeptTraining> trainings = {};  // as its newest end has left them

  bool operator==(const KeptRun&) const = default;
};

// A kept run's name and state: the folder runs/NAME in the user's state folder. One process at a time has it; a child made
// by fork(2) shares it.
//
// Ownership  The files stay until Remove().
class KeptRunFile {
 public:
  // Takes the name, and makes a folder in each place of `run` that is a directory: `paths` names them.
  //
  // Errors  E_OPTION     a run of this name is kept, the name is none, or there is no state folder.
  //         E_SWAP_PATH  a folder cannot be made in a place; nothing is left.
  static absl::StatusOr<KeptRunFile> Create(const std::filesystem::path& state_folder, KeptRun run);

  // Errors  E_OPTION  no run of this name is kept; names those that are.
  //         E_BUSY    another process has it.
  //         E_CORRUPT its state cannot be read.
  static absl::StatusOr<KeptRunFile> Open(const std::filesystem::path& state_folder,
                                          const std::string& name);

  const KeptRun& run() const { return run_; }
  absl::Status Save(KeptRun run);

  // Removes the folders on swap with all that is in them, then the name.
  //
  // Errors  E_SWAP_PATH  one cannot be removed: the name stays.
  absl::Status Remove();

 private:
  KeptRunFile(std::filesystem::path folder, protocol::UniqueFd lock);
  absl::Status MakeSwapFolders();

  std::filesystem::path folder_;
  protocol::UniqueFd lock_;
  KeptRun run_;
};

// The run as it was saved last, also while a process has it.
//
// Errors  E_CORRUPT  it cannot be read.
absl::StatusOr<KeptRun> ReadKeptRun(const std::filesystem::path& state_folder,
                                    const std::string& name);

// Sorted.
std::vector<std::string> KeptRunNames(const std::filesystem::path& state_folder);

}  // namespace forebay::tools
