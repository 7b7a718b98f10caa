// SPDX-License-Identifier: Apache-2.0
// `forebay run`: runs a command with a private daemon and cleans up afterwards.
#pragma once

#include <string>
#include <vector>

#include "tools/forebay/keep.h"
#include "tools/forebay/private_daemon.h"

namespace forebay::tools {

struct RunOptions {
  PrivateDaemonOptions daemon;
  KeepOptions keep;
  std::vector<std::string> command;  // not empty
};

// Runs the command with FOREBAY_SOCKET set and returns its exit status. If a signal ends the command, this process ends by
// the same signal. Signals sent to this process reach the command. A daemon that ends before the command is restarted with
// its retained descriptors, at most five times within a minute.
// A second process is the parent of daemon and command and outlives this process. It ends all remaining processes and
// removes the folders, also after a SIGKILL of this process or of its process group. If the second process is killed, this
// process cleans up. If both are killed at once, the next run in the same folders removes them. The swap of a --keep run
// persists, see keep.h.
//
// Threads  Before the process has a second thread.
int Run(const RunOptions& options);

}  // namespace forebay::tools
