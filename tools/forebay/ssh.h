// SPDX-License-Identifier: Apache-2.0
// Commands on other hosts, over ssh.
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
  std::optional<int> port;         // else ssh's
  std::string program;             // forebay on the hosts; empty: the path of this one
  std::chrono::seconds limit{10};  // until a host answers
};

// `words` as one command of a shell, each of them quoted.
std::string ShellCommand(const std::vector<std::string>& words);

// The address that ssh connects to for this host: without the user, and by its HostName where ssh's settings give one.
std::string AddressOf(const SshOptions& options, const std::string& host);

enum class RemoteStdin { kNull, kPipe };

// `forebay` with arguments on a host. It asks for no password.
struct RemoteForebay {
  static absl::StatusOr<RemoteForebay> Start(const SshOptions& options, const std::string& host,
                                             const std::vector<std::string>& arguments,
                                             RemoteStdin stdin_use);

  Process ssh;
  // Our ends, none of which blocks.
  protocol::UniqueFd stdin_fd;  // of RemoteStdin::kPipe
  protocol::UniqueFd stdout_fd;
  protocol::UniqueFd stderr_fd;
};

// Appends what is there now, at most 1 MiB; false at the end.
bool ReadAvailable(int fd, std::string& text);

// Cuts a stream into lines; a carriage return ends one too. A longer one than kLineMax is cut.
class LineSplitter {
 public:
  static constexpr size_t kLineMax = 64 << 10;
  using Sink = std::function<void(std::string_view)>;

  void Add(std::string_view bytes, const Sink& sink);
  void Finish(const Sink& sink);  // a last line without its end

 private:
  std::string rest_;
};

}  // namespace forebay::tools
