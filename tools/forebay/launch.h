// SPDX-License-Identifier: Apache-2.0
// `forebay launch`: one command on every host of a hostfile, over ssh.
#pragma once

#include <optional>
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
  std::string folder;                    // to work in; empty: this process's
  std::vector<std::string> exported;     // NAME, or NAME=VALUE
  std::vector<std::string> environment;  // of this process, "NAME=value"
  std::vector<std::string> command;      // not empty; one that begins with a script is torchrun's
};

// What every host gets of `environment`: what `exported` names, and what programs are found and collectives set by.
//
// Errors  E_OPTION  `exported` has a name that is not set.
absl::StatusOr<std::vector<std::string>> ExportedVariables(const LaunchOptions& options);

// What torchrun reads where its options are not given: `hosts[node]` as node so-and-so of all of them.
std::vector<std::string> TorchrunVariables(const std::vector<HostSlots>& hosts, size_t node,
                                           const std::string& master_addr, int master_port);

// Runs the command once on each host, its output line by line behind the host's name, and returns its exit status: 0
// where every host's is, else that of the host that failed first; the others' commands are then ended. Signals sent to
// this process reach every command. A command ends too when this process or its connection does.
//
// Threads  Before the process has a second thread.
int Launch(const LaunchOptions& options);

}  // namespace forebay::tools
