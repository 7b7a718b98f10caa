// `forebay run`: a private daemon, a command, tear-down.
#pragma once

#include <string>
#include <vector>

#include "tools/forebay/private_daemon.h"

namespace forebay::tools {

struct RunOptions {
  PrivateDaemonOptions daemon;
  std::vector<std::string> command;  // not empty
};

// Runs the command with FOREBAY_SOCKET set and returns its exit status; a command that a signal
// ended ends this process by the same signal. Signals sent to this process reach the command.
// Nothing is left over: a second process, which is the parent of daemon and command and outlives
// this one, ends what still runs and removes the folders, also after a SIGKILL of this one or of
// its process group. Should that second one be killed, this one does so.
//
// Threads  Before the process has a second thread.
int Run(const RunOptions& options);

}  // namespace forebay::tools
