// SPDX-License-Identifier: Apache-2.0
// Saved runs of `forebay run --keep NAME`. Their trainings can be resumed after the run has ended.
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

// Returns "gpt at step 41, bert at step 7", or "no training" for an empty list.
std::string Describe(const std::vector<KeptTraining>& trainings);

struct KeptRun {
  std::string name;
  std::vector<std::string> places;  // the paths of --swap, absolute
  std::vector<std::string> paths;  // swap.paths: a folder in each place, or the block device itself
  uint64_t swap_bytes = 0;         // swap bytes on each path
  uint64_t dram_bytes = 0;         // the daemon's DRAM limit; 0: the daemon was never ready
  std::string dram;                // --dram; empty: `config` or `settings` has it
  std::string config;              // --config; empty: none
  std::vector<std::string> settings;         // --set
  std::string run;                           // FOREBAY_RUN of its commands
  std::vector<KeptTraining> trainings = {};  // durable steps at the run's newest end

  bool operator==(const KeptRun&) const = default;
};

// Name and state of a run that can be resumed, stored in the folder runs/NAME of the user's state folder. The folder is
// locked by one process at a time. A child of fork(2) shares the lock.
//
// Ownership  The files persist until Remove().
class KeptRunFile {
 public:
  // Reserves the name and creates a folder in each place of `run` that is a directory. `paths` of the run lists these folders.
  //
  // Errors  E_OPTION     a run of this name exists, the name is invalid, or the user has no state folder.
  //         E_SWAP_PATH  a folder cannot be created in a place; all that was created is removed.
  static absl::StatusOr<KeptRunFile> Create(const std::filesystem::path& state_folder, KeptRun run);

  // Opens a saved run and locks it.
  //
  // Errors  E_OPTION  no run of this name exists; names the existing runs.
  //         E_BUSY    another process has locked the run.
  //         E_CORRUPT the run's state cannot be read.
  static absl::StatusOr<KeptRunFile> Open(const std::filesystem::path& state_folder,
                                          const std::string& name);

  const KeptRun& run() const { return run_; }
  absl::Status Save(KeptRun run);

  // Removes the run's folders on swap with their content, then the name.
  //
  // Errors  E_SWAP_PATH  a folder cannot be removed; the name remains.
  absl::Status Remove();

 private:
  KeptRunFile(std::filesystem::path folder, protocol::UniqueFd lock);
  absl::Status MakeSwapFolders();

  std::filesystem::path folder_;
  protocol::UniqueFd lock_;
  KeptRun run_;
};

// Reads the newest saved state of a run. Works while another process has locked the run.
//
// Errors  E_CORRUPT  the state cannot be read.
absl::StatusOr<KeptRun> ReadKeptRun(const std::filesystem::path& state_folder,
                                    const std::string& name);

// Returns the names of all saved runs, sorted.
std::vector<std::string> KeptRunNames(const std::filesystem::path& state_folder);

}  // namespace forebay::tools
