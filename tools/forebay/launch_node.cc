// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/launch_node.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "protocol/error.h"
#include "tools/forebay/process.h"

namespace forebay::tools {
namespace {

using json = nlohmann::ordered_json;
using protocol::ErrorId;
using protocol::MakeError;

constexpr std::chrono::milliseconds kGrace(5000);

int Fail(const absl::Status& status, int exit_status) {
  protocol::PrintError(status);
  return exit_status;
}

// Splits stdin into lines.
class Lines {
 public:
  // Waits for more bytes. Returns false at the end of stdin or if too many bytes are unread.
  bool Read() { return ReadSome(STDIN_FILENO, text_) > 0 && text_.size() <= kNodeMessageMax; }

  std::optional<std::string> Next() {
    const size_t end = text_.find('\n');
    if (end == std::string::npos) return std::nullopt;
    std::string line = text_.substr(0, end);
    text_.erase(0, end + 1);
    return line;
  }

 private:
  std::string text_;
};

std::optional<NodeMessage> ReadMessage(Lines& lines) {
  std::optional<std::string> line;
  while (!(line = lines.Next()).has_value()) {
    if (!lines.Read()) return std::nullopt;
  }
  try {
    const json message = json::parse(*line);
    return NodeMessage{message.at("folder"), message.at("environment"), message.at("command")};
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

// Passes signals to the command until it ends, and returns its wait status. nullopt: stdin ended first.
std::optional<int> Watch(Process& command, Lines& lines) {
  std::array<pollfd, 2> watched = {{{STDIN_FILENO, POLLIN, 0}, {command.pidfd(), POLLIN, 0}}};
  while (true) {
    while (const std::optional<std::string> line = lines.Next()) {
      int number = 0;
      if (absl::SimpleAtoi(*line, &number) && number > 0) command.Signal(number);
    }
    if (::poll(watched.data(), watched.size(), -1) < 0) continue;
    if (watched[1].revents != 0) return command.WaitFor(std::chrono::seconds(1));
    if (watched[0].revents != 0 && !lines.Read()) return std::nullopt;
  }
}

}  // namespace

absl::StatusOr<std::string> FormatNodeMessage(const NodeMessage& message) {
  std::string text;
  try {
    text = json{{"folder", message.folder},
                {"environment", message.environment},
                {"command", message.command}}
               .dump() +
           "\n";
  } catch (const json::exception&) {
    return MakeError(ErrorId::kOption, "the command or its environment is no UTF-8",
                     "use names and arguments in UTF-8");
  }
  if (text.size() > kNodeMessageMax) {
    return MakeError(ErrorId::kLimit,
                     absl::StrCat("the command and its environment take ", text.size(),
                                  " bytes, more than ", kNodeMessageMax),
                     "put long arguments into a file that every host has");
  }
  return text;
}

int LaunchNode() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::signal(SIGPIPE, SIG_DFL);
  std::printf("%s\n", std::string(kNodeAnswer).c_str());
  std::fflush(stdout);
  Lines lines;
  const std::optional<NodeMessage> message = ReadMessage(lines);
  if (!message.has_value() || message->command.empty()) {
    return Fail(
        MakeError(ErrorId::kProtocol, "launch-node: stdin holds no message of forebay launch",
                  "run the same version of Forebay on every host"),
        kFailed);
  }
  if (::chdir(message->folder.c_str()) != 0) {
    return Fail(MakeError(ErrorId::kOption,
                          protocol::ErrnoText(absl::StrCat("folder ", message->folder), errno),
                          "--chdir names a folder that every host has"),
                kFailed);
  }
  for (const std::string& variable : message->environment) {
    const size_t equals = variable.find('=');
    if (equals == std::string::npos) continue;
    ::setenv(variable.substr(0, equals).c_str(), variable.c_str() + equals + 1, 1);
  }
  sigset_t none;
  sigemptyset(&none);
  auto command = Process::Start({.arguments = message->command,
                                 .environment = {},
                                 .own_group = true,
                                 .null_stdin = true,
                                 .signal_mask = none});
  if (!command.ok()) return Fail(command.status(), kNotFound);
  std::optional<int> status = Watch(*command, lines);
  if (!status.has_value()) {
    command->Signal(SIGTERM);
    status = command->WaitFor(kGrace);
    if (!status.has_value()) command->Signal(SIGKILL);
    if (!status.has_value()) status = command->WaitFor(std::chrono::seconds(1));
  }
  EndDescendants(/*spared=*/0, kLeftOverGrace);
  return ShellStatus(status.value_or(W_EXITCODE(kFailed, 0)));
}

}  // namespace forebay::tools
