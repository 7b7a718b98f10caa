// SPDX-License-Identifier: Apache-2.0
// The program that `forebay launch` starts on each host. It runs one command and ends it when the connection ends.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace forebay::tools {

// The hidden command of forebay, and the line that it writes to stdout before it starts the host's command.
inline constexpr std::string_view kNodeCommand = "launch-node";
inline constexpr std::string_view kNodeAnswer = "forebay launch-node 1";
inline constexpr size_t kNodeMessageMax = 512 << 10;  // bytes

struct NodeMessage {
  std::string folder;                    // to work in
  std::vector<std::string> environment;  // "NAME=value", on top of the host's own
  std::vector<std::string> command;
};

// Formats the message as one line with a newline at its end.
//
// Errors  E_OPTION  a text is no UTF-8.
//         E_LIMIT   longer than kNodeMessageMax.
absl::StatusOr<std::string> FormatNodeMessage(const NodeMessage& message);

// Reads a message from stdin, runs its command there and returns its exit status, 128 and the number of a signal that
// ended it. Each further line of stdin is the number of a signal for the command. At the end of stdin the command and
// what it has started get SIGTERM, and 5 s later SIGKILL; what it leaves running when it ends too.
//
// Threads  Before the process has a second thread.
int LaunchNode();

}  // namespace forebay::tools
