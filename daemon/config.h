// SPDX-License-Identifier: Apache-2.0
// Settings of the daemon: a TOML file, and `--set key=value` options that override the file.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "daemon/exec/volume_place.h"
#include "nvme/io/engine_factory.h"
#include "nvme/swap_files.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/durability.h"

namespace forebay::daemon {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

// Behaviour of a daemon on a kernel without pidfd_open(2).
enum class PidfdPolicy : uint8_t {
  kRequired,    // does not start
  kBestEffort,  // starts with ControlPlaneOptions::serves_without_pidfds
};

struct Config {
  std::string socket_path = "/run/forebay/forebay.sock";
  uint32_t socket_mode = 0660;
  // Name or number of the group that sees the jobs of all users. Empty: no such group.
  std::string socket_operators;
  // Limit on the memory of all jobs and the daemon. 0: half of the memory of the control group or the machine.
  uint64_t dram_limit_bytes = 0;
  uint32_t dram_job_percent = 100;  // percent of the limit that one job may take
  uint64_t dram_uid_bytes = 0;      // bytes that the jobs of one user may take; 0: no quota
  uint64_t swap_uid_bytes = 0;      // bytes of swap that the jobs of one user may take; 0: no quota
  std::vector<std::string> swap_paths;
  std::vector<uint64_t> swap_capacity_bytes;  // one value for all paths, or a value for each path
  uint64_t swap_staging_bytes = 0;            // 0: two slots per worker and four more
  // Limit of transfers in bytes a second: one value for all paths, or a value for each path. Empty: no limit.
  std::vector<uint64_t> swap_limit_rate;
  uint64_t swap_ledger_bytes = 0;  // bytes for a ledger; 0: chosen by the capacity
  nvme::FileLife swap_life = nvme::FileLife::kKept;
  // Treatment of durable jobs that the paths hold: kReclaim gives them up. Not set by a key.
  nvme::OpenMode swap_mode = nvme::OpenMode::kRecover;
  // Treatment of a volume that was last used elsewhere: kAdopted takes it over. Not set by a key.
  OtherPlace swap_other_place = OtherPlace::kRefused;
  // Folder with the records of swap paths that are block devices. Empty: block devices have no records. Not set by a key.
  std::string state_folder;
  // True if the settings contain swap.endurance, a key without effect.
  bool sets_endurance = false;
  std::chrono::milliseconds swap_deadline = std::chrono::seconds(60);  // deadline of a transfer
  // True if the daemon measures swap paths that have no recorded rates. Has an effect only with swap.life = "kept".
  bool swap_probe = true;
  nvme::EngineChoice io_engine = nvme::EngineChoice::kAuto;
  uint32_t workers = 0;          // 0: one per physical core
  std::vector<int> update_cpus;  // CPUs of the workers; empty: all that the daemon may use
  int update_numa_node = -1;     // NUMA node whose CPUs the workers use; -1: not bound to one
  int update_nice = 5;           // weight of the workers against other processes
  std::string update_target = "best";
  uint64_t block_elems = uint64_t{1} << 20;
  protocol::Durability durability;  // durability of jobs that do not choose one
  // Jobs of level memory get the swap space of level epoch, and become durable when the daemon stops.
  bool durable_at_stop = false;
  std::chrono::milliseconds reader_lease_max = std::chrono::seconds(10);
  LogLevel log_level = LogLevel::kInfo;
  pinned_mem::LockPolicy lock = pinned_mem::LockPolicy::kRequired;
  PidfdPolicy pidfd = PidfdPolicy::kRequired;
};

// Description of a key, for help texts and for the search of the nearest key.
struct ConfigKey {
  std::string_view name;   // "dram.limit"
  std::string_view value;  // kind of its value: "size", "path", "auto | io_uring | threads"
  std::string_view help;
};

std::vector<ConfigKey> ConfigKeys();

// Reads a TOML file. Its settings override those in `config`.
//
// Errors  E_CONFIG  the file cannot be read or parsed, a key is unknown (hint: the nearest one), or
//                   a value has another type or is out of range: file and line.
absl::Status LoadConfigFile(const std::string& path, Config& config);

// Applies one setting "key=value". The value is TOML as in the file. A string may be written without quotes, and a list as
// "a,b".
//
// Errors  E_CONFIG  the key or the value is wrong, as in LoadConfigFile(); the message names "--set".
absl::Status ApplySetting(std::string_view setting, Config& config);

// Checks settings against each other: paths and capacities, CPUs and NUMA node.
absl::Status CheckConfig(const Config& config);

}  // namespace forebay::daemon
