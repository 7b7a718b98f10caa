// SPDX-License-Identifier: Apache-2.0
// Runs commands on other hosts over ssh.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"
#include "tools/forebay/process.h"

namespace forebay::tools {

struct SshOptions {
  std::string command = "ssh";     // with its own options, separated by spaces: "ssh -F FILE"
  std::optional<int> port;         // nullopt: ssh's default
  std::string program;             // path of forebay on the hosts; empty: this program's path
  std::chrono::seconds limit{10};  // longest time to connect to a host
};

// Joins `words` into one shell command. Each word is quoted.
std::string ShellCommand(const std::vector<std::string>& words);

// Returns the address that ssh connects to for this host, without the user. Uses the HostName of ssh's settings if they name
// one.
std::string AddressOf(const SshOptions& options, const std::string& host);

enum class RemoteStdin { kNull, kPipe };

// Runs `forebay` with arguments on a host by ssh. ssh never asks for a password.
struct RemoteForebay {
  static absl::StatusOr<RemoteForebay> Start(const SshOptions& options, const std::string& host,
                                             const std::vector<std::string>& arguments,
                                             RemoteStdin stdin_use);

  Process ssh;
  // This process's pipe ends. All are non-blocking.
  protocol::UniqueFd stdin_fd;  // valid for RemoteStdin::kPipe only
  protocol::UniqueFd stdout_fd;
  protocol::UniqueFd stderr_fd;
};

// Appends the available bytes of `fd` to `text`, at most 1 MiB. Returns false at the end of the stream.
bool ReadAvailable(int fd, std::string& text);

// Splits a stream into lines. A carriage return also ends a line. A line longer than kLineMax is cut.
class LineSplitter {
 public:
  static constexpr size_t kLineMax = 64 << 10;
  using Sink = std::function<void(std::string_view)>;

  void Add(std::string_view bytes, const Sink& sink);
  void Finish(const Sink& sink);  // a last line without a newline

 private:
  std::string rest_;
};

}  // namespace forebay::tools
