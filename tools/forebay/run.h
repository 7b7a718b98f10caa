// SPDX-License-Identifier: Apache-2.0
// `forebay run`: a private daemon, a command, tear-down.
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

// Runs the command with FOREBAY_SOCKET set and returns its exit status; a command that a signal
// ended ends this process by the same signal. Signals sent to this process reach the command. A
// daemon that ends before the command is started again, with the descriptors that it has kept, at
// most five times within a minute.
// Nothing is left over: a second process, which is the parent of daemon and command and outlives
// this one, ends what still runs and removes the folders, also after a SIGKILL of this one or of
// its process group. Should that second one be killed, this one does so; should both be killed at
// once, the next run in the same folders removes them. The swap of a run that is kept stays, see keep.h.
//
// Threads  Before the process has a second thread.
int Run(const RunOptions& options);

}  // namespace forebay::tools
