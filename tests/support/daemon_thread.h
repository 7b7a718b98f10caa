// SPDX-License-Identifier: Apache-2.0
// A daemon on threads of this process, with 512 MiB of DRAM and one worker.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/daemon.h"

namespace forebay::testing {

inline absl::StatusOr<std::unique_ptr<daemon::Daemon>> StartDaemonThread(
    const std::string& socket) {
  daemon::Config config;
  config.socket_path = socket;
  config.dram_limit_bytes = 512 << 20;
  config.workers = 1;
  config.lock = pinned_mem::LockPolicy::kBestEffort;
  config.pidfd = daemon::PidfdPolicy::kBestEffort;  // daemon and clients share this process
  return daemon::Daemon::Start(config);
}

}  // namespace forebay::testing
