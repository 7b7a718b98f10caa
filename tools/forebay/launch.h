// SPDX-License-Identifier: Apache-2.0
// `forebay launch`: runs one command on each host of a hostfile, over ssh.
#pragma once

#include <string>
#include <vector>

#include "tools/forebay/hostfile.h"
#include "tools/forebay/ssh.h"

namespace forebay::tools {

struct LaunchOptions {
  std::string hostfile;
  HostSelection selection;
  SshOptions ssh;
  std::string master_addr;  // empty: the address of the first host
  int master_port = 29500;
  std::string folder;                    // working folder; empty: this process's
  std::vector<std::string> exported;     // NAME, or NAME=VALUE
  std::vector<std::string> environment;  // of this process, "NAME=value"
  std::vector<std::string> command;      // not empty; torchrun runs it if it begins with a script
};

// Variables of `environment` that every host gets: those named by `exported`, and those that programs are found by or that
// configure Forebay, Python, torch and collectives.
//
// Errors  E_OPTION  `exported` has a name that is not set.
absl::StatusOr<std::vector<std::string>> ExportedVariables(const LaunchOptions& options);

// Variables from which torchrun takes the options that its command line does not give: `hosts[node]` is node `node` of
// hosts.size().
std::vector<std::string> TorchrunVariables(const std::vector<HostSlots>& hosts, size_t node,
                                           const std::string& master_addr, int master_port);

// Runs the command once on each host and prints its output line by line behind the host's name. Returns 0 if the command
// succeeds on every host. At the first failure, ends the commands of the other hosts and returns the exit status of the failed
// one. Signals sent to this process reach every command. A command also ends when this process or its connection ends.
//
// Threads  Before the process has a second thread.
int Launch(const LaunchOptions& options);

}  // namespace forebay::tools
