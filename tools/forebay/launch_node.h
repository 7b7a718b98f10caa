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
  std::string folder;                    // working folder of the command
  std::vector<std::string> environment;  // "NAME=value", on top of the host's own
  std::vector<std::string> command;
};

// Formats the message as one line with a newline at its end.
//
// Errors  E_OPTION  a text is no UTF-8.
//         E_LIMIT   longer than kNodeMessageMax.
absl::StatusOr<std::string> FormatNodeMessage(const NodeMessage& message);

// Reads a message from stdin, runs its command in its folder and returns the command's exit status. If a signal ended the
// command, returns 128 plus the signal's number. Each further line of stdin is the number of a signal for the command. At
// the end of stdin the command and its descendants get SIGTERM, and 5 s later SIGKILL. Descendants that still run when the
// command ends get the same.
//
// Threads  Before the process has a second thread.
int LaunchNode();

}  // namespace forebay::tools
