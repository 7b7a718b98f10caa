// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/launch.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/environment.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/standard_output.h"
#include "tools/forebay/launch_node.h"
#include "tools/forebay/process.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::PrintError;
using protocol::UniqueFd;
using Clock = std::chrono::steady_clock;

// Time after which hosts that were asked to end their command lose their ssh by SIGKILL. It is longer than the grace that
// launch-node gives the command.
constexpr std::chrono::seconds kEndLimit(15);
constexpr std::array<std::string_view, 4> kExportedNames = {"PATH", "LD_LIBRARY_PATH",
                                                            "VIRTUAL_ENV", "CONDA_PREFIX"};
constexpr std::array<std::string_view, 9> kExportedPrefixes = {
    "FOREBAY_", "PYTHON", "TORCH_", "NCCL_", "GLOO_", "UCX_", "OMP_", "MKL_", "HF_"};

// "a=b" -> "a".
std::string_view NameOf(std::string_view variable) {
  return variable.substr(0, variable.find('='));
}

bool IsExported(std::string_view name) {
  return std::ranges::find(kExportedNames, name) != kExportedNames.end() ||
         std::ranges::any_of(kExportedPrefixes,
                             [name](std::string_view prefix) { return name.starts_with(prefix); });
}

// The command on one host, and the ssh that runs it.
struct Node {
  std::string host;
  RemoteForebay remote;
  LineSplitter out = {};
  LineSplitter err = {};
  bool has_answered = false;
  std::optional<int> exit_status = {};
};

std::string LineOf(const Node& node, std::string_view line) {
  return absl::StrCat(node.host, ": ", std::string(line), "\n");
}

void PrintError(const Node& node, std::string_view line) {
  std::fprintf(stderr, "%s", LineOf(node, line).c_str());
}

// Runs the commands of all hosts and waits until each has ended.
class Nodes {
 public:
  explicit Nodes(int signal_fd) : signal_fd_(signal_fd) {}

  absl::Status Start(const SshOptions& ssh, const std::string& host, const NodeMessage& message) {
    ASSIGN_OR_RETURN(const std::string text, FormatNodeMessage(message));
    ASSIGN_OR_RETURN(
        RemoteForebay remote,
        RemoteForebay::Start(ssh, host, {std::string(kNodeCommand)}, RemoteStdin::kPipe));
    nodes_.push_back(std::make_unique<Node>(Node{.host = host, .remote = std::move(remote)}));
    Send(*nodes_.back(), text);
    return absl::OkStatus();
  }

  // Waits until all commands have ended. Returns the exit status for this process.
  int Wait() {
    while (std::ranges::any_of(nodes_, IsRunning)) {
      Poll();
      if (const auto signal = ReadSignal(signal_fd_)) {
        is_signalled_ = true;
        for (const auto& node : nodes_) Send(*node, absl::StrCat(signal->ssi_signo, "\n"));
      }
      for (const auto& node : nodes_) Handle(*node);
      if (end_.has_value() && Clock::now() > *end_) {
        for (const auto& node : nodes_) node->remote.ssh.Signal(SIGKILL);
      }
    }
    return exit_status_;
  }

 private:
  static bool IsRunning(const std::unique_ptr<Node>& node) {
    return !node->exit_status.has_value();
  }

  // Writes `text` into the pipe to launch-node. The pipe has room for it. Has no effect if the reader has ended.
  static void Send(const Node& node, const std::string& text) {
    (void)!::write(node.remote.stdin_fd.get(), text.data(), text.size());
  }

  void Poll() {
    constexpr int kEndingMs = 100;
    std::vector<pollfd> watched = {{signal_fd_, POLLIN, 0}};
    for (const auto& node : nodes_) {
      if (!IsRunning(node)) continue;
      for (const int fd :
           {node->remote.stdout_fd.get(), node->remote.stderr_fd.get(), node->remote.ssh.pidfd()}) {
        if (fd >= 0) watched.push_back({fd, POLLIN, 0});
      }
    }
    ::poll(watched.data(), watched.size(), end_.has_value() ? kEndingMs : -1);
  }

  // Prints a line of a host. Lines that the host's login shell prints before launch-node answers go to stderr.
  void PrintOutput(Node& node, std::string_view line) {
    if (node.has_answered) {
      const absl::Status written = protocol::WriteOutput(LineOf(node, line));
      if (!written.ok() && exit_status_ == 0) OnLostOutput(written);
    } else if (line == kNodeAnswer) {
      node.has_answered = true;
    } else {
      PrintError(node, line);
    }
  }

  void Handle(Node& node) {
    if (node.exit_status.has_value()) return;
    const std::optional<int> ended = node.remote.ssh.WaitFor(std::chrono::milliseconds(0));
    const auto to_stdout = [&](std::string_view line) { PrintOutput(node, line); };
    const auto to_stderr = [&](std::string_view line) { PrintError(node, line); };
    Forward(node.remote.stdout_fd, node.out, to_stdout);
    Forward(node.remote.stderr_fd, node.err, to_stderr);
    if (!ended.has_value()) return;
    node.out.Finish(to_stdout);
    node.err.Finish(to_stderr);
    node.exit_status = ShellStatus(*ended);
    if (*node.exit_status != 0 && exit_status_ == 0) OnFirstFailure(node);
  }

  static void Forward(UniqueFd& fd, LineSplitter& lines, const LineSplitter::Sink& sink) {
    std::string text;
    if (!fd.valid()) return;
    if (!ReadAvailable(fd.get(), text)) fd.Reset();
    lines.Add(text, sink);
  }

  void OnFirstFailure(const Node& node) {
    exit_status_ = *node.exit_status;
    if (!is_signalled_) Report(node);
    EndAll();
  }

  // Handles a failed write to stdout: sets the exit status and ends all commands.
  void OnLostOutput(const absl::Status& status) {
    exit_status_ = kFailed;
    if (!absl::IsCancelled(status)) PrintError(status);
    EndAll();
  }

  void EndAll() {
    end_ = Clock::now() + kEndLimit;
    for (const auto& other : nodes_) other->remote.stdin_fd.Reset();
  }

  void Report(const Node& node) const {
    const std::string others = nodes_.size() > 1 ? "; those of the other hosts are ended" : "";
    if (node.has_answered) {
      PrintError(MakeError(
          ErrorId::kRankLost,
          absl::StrCat("host ", node.host, ": the command ended with exit status ",
                       *node.exit_status, others),
          "its output is above; with torchrun --max-restarts N a rank that ends is started again"));
      return;
    }
    PrintError(MakeError(
        ErrorId::kOption,
        absl::StrCat("host ", node.host, ": nothing was started there: ssh ended with exit status ",
                     *node.exit_status, others),
        absl::StrCat("`ssh ", node.host,
                     " true` must work without a question, and forebay be there "
                     "at the same path as here, or at the one that --forebay names")));
  }

  int signal_fd_;
  std::vector<std::unique_ptr<Node>> nodes_;
  bool is_signalled_ = false;
  int exit_status_ = 0;                   // the status of the first failed command
  std::optional<Clock::time_point> end_;  // when the remaining commands get SIGKILL
};

// Returns the command to run. A command that begins with a Python script is run by torchrun, like `deepspeed train.py`.
std::vector<std::string> CommandOf(const LaunchOptions& options) {
  std::vector<std::string> command = options.command;
  if (command[0].ends_with(".py")) command.insert(command.begin(), "torchrun");
  return command;
}

absl::StatusOr<int> LaunchOn(const LaunchOptions& options, int signal_fd) {
  ASSIGN_OR_RETURN(const std::vector<HostSlots> hosts,
                   ReadHostfile(options.hostfile, options.selection));
  ASSIGN_OR_RETURN(const std::vector<std::string> exported, ExportedVariables(options));
  const std::string master_addr = options.master_addr.empty()
                                      ? AddressOf(options.ssh, hosts.front().host)
                                      : options.master_addr;
  std::error_code ignored;
  NodeMessage message{.folder = options.folder.empty()
                                    ? std::filesystem::current_path(ignored).string()
                                    : options.folder,
                      .environment = {},
                      .command = CommandOf(options)};
  Nodes nodes(signal_fd);
  for (size_t node = 0; node < hosts.size(); ++node) {
    message.environment = TorchrunVariables(hosts, node, master_addr, options.master_port);
    message.environment.insert(message.environment.end(), exported.begin(), exported.end());
    RETURN_IF_ERROR(nodes.Start(options.ssh, hosts[node].host, message));
  }
  return nodes.Wait();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ExportedVariables(const LaunchOptions& options) {
  std::vector<std::string> variables;
  const auto set = [&variables](const std::string& variable) {
    std::erase_if(variables,
                  [&](const std::string& one) { return NameOf(one) == NameOf(variable); });
    variables.push_back(variable);
  };
  // All ranks get the same token. A rank's process can replace an earlier one of the same run.
  set(absl::StrCat("FOREBAY_RUN=", client::RunToken({})));
  for (const std::string& variable : options.environment) {
    if (IsExported(NameOf(variable))) set(variable);
  }
  for (const std::string& name : options.exported) {
    if (name.find('=') != std::string::npos) {
      set(name);
      continue;
    }
    const auto found = std::ranges::find(
        options.environment, name, [](const std::string& one) { return std::string(NameOf(one)); });
    if (found == options.environment.end()) {
      return MakeError(ErrorId::kOption, absl::StrCat("--env ", name, ": it is not set here"),
                       absl::StrCat("--env ", name, "=VALUE"));
    }
    set(*found);
  }
  return variables;
}

std::vector<std::string> TorchrunVariables(const std::vector<HostSlots>& hosts, size_t node,
                                           const std::string& master_addr, int master_port) {
  const HostSlots& own = hosts[node];
  std::vector<std::string> variables = {
      absl::StrCat("PET_NNODES=", hosts.size()), absl::StrCat("PET_NODE_RANK=", node),
      absl::StrCat("PET_NPROC_PER_NODE=", own.slots.size()),
      absl::StrCat("PET_MASTER_ADDR=", master_addr), absl::StrCat("PET_MASTER_PORT=", master_port)};
  if (own.slots.size() < static_cast<size_t>(own.slots_listed)) {
    variables.push_back(absl::StrCat("CUDA_VISIBLE_DEVICES=", absl::StrJoin(own.slots, ",")));
  }
  return variables;
}

int Launch(const LaunchOptions& options) {
  ::signal(SIGPIPE, SIG_IGN);  // writes to a host whose ssh has ended
  const UniqueFd signal_fd = CatchForwardedSignals();
  if (!signal_fd.valid()) {
    PrintError(MakeError(ErrorId::kLimit, protocol::ErrnoText("signalfd", errno)));
    return kFailed;
  }
  const absl::StatusOr<int> exit_status = LaunchOn(options, signal_fd.get());
  if (!exit_status.ok()) PrintError(exit_status.status());
  return exit_status.value_or(kFailed);
}

}  // namespace forebay::tools
