#include "tools/forebay/private_daemon.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"

namespace forebay::tools {
namespace {

namespace fs = std::filesystem;
using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;
using Clock = std::chrono::steady_clock;

// Populating hundreds of GiB of staging takes a while
constexpr std::chrono::seconds kReadyLimit(60);
constexpr std::chrono::seconds kStopLimit(10);

// The socket of sd_notify(3).
absl::StatusOr<UniqueFd> BindNotifySocket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return MakeError(ErrorId::kOption, absl::StrCat("socket path is too long: ", path),
                     "set XDG_RUNTIME_DIR to a shorter path");
  }
  std::memcpy(address.sun_path, path.c_str(), path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid() ||
      ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return MakeError(ErrorId::kOption, ErrnoText(absl::StrCat("bind ", path), errno));
  }
  return fd;
}

absl::StatusOr<PrivateFolder> RuntimeFolder(const std::string& wanted) {
  if (!wanted.empty()) {
    absl::StatusOr<PrivateFolder> folder = PrivateFolder::Create(wanted);
    if (folder.ok()) return folder;
  }
  return PrivateFolder::Create("/tmp");
}

}  // namespace

std::string QuotedPath(std::string_view path) {
  std::string text = "\"";
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppend(&text, "\\u", absl::Hex(byte, absl::kZeroPad4));
    } else {
      if (c == '"' || c == '\\') text += '\\';
      text += c;
    }
  }
  return text + '"';
}

std::string SwapPathsSetting(const std::vector<std::string>& paths) {
  const auto quoted = [](std::string* out, const std::string& path) { *out += QuotedPath(path); };
  return absl::StrCat("swap.paths=[", absl::StrJoin(paths, ",", quoted), "]");
}

absl::StatusOr<std::string> DaemonPath() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  const fs::path beside = self.parent_path() / "forebayd";
  if (error || !fs::exists(beside, error)) {
    return MakeError(ErrorId::kOption, absl::StrCat("there is no forebayd at ", beside.string()),
                     "build it: cmake --build --preset default --target forebayd");
  }
  return beside.string();
}

PrivateDaemon::PrivateDaemon(PrivateFolder folder) : folder_(std::move(folder)) {
  socket_ = (folder_.path() / "forebay.sock").string();
}

PrivateDaemon::~PrivateDaemon() { Stop(); }

absl::Status PrivateDaemon::MakeSwapFolders(const PrivateDaemonOptions& options) {
  for (const std::string& place : options.swap) {
    std::error_code error;
    if (place.empty()) {
      return MakeError(ErrorId::kSwapPath, "a swap path is empty", "name a directory after --swap");
    }
    if (fs::is_block_file(place, error)) {
      swap_paths_.push_back(place);
      continue;
    }
    const fs::path absolute = fs::absolute(place, error);
    absl::StatusOr<PrivateFolder> folder = PrivateFolder::Create(absolute);
    if (!folder.ok()) {
      return MakeError(ErrorId::kSwapPath,
                       absl::StrCat("swap path ", place, ": ", folder.status().message()),
                       "name a directory that exists and is writable, on a disk with O_DIRECT");
    }
    if (options.folder_made) options.folder_made(folder->path());
    swap_paths_.push_back(folder->path().string());
    swap_folders_.push_back(*std::move(folder));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PrivateDaemon>> PrivateDaemon::Start(
    const PrivateDaemonOptions& options, std::span<const int> abort_fds) {
  ASSIGN_OR_RETURN(const std::string program, DaemonPath());
  ASSIGN_OR_RETURN(PrivateFolder folder, RuntimeFolder(options.runtime_folder));
  if (options.folder_made) options.folder_made(folder.path());
  // The constructor is private: make_unique cannot reach it.
  std::unique_ptr<PrivateDaemon> daemon(new PrivateDaemon(std::move(folder)));
  RETURN_IF_ERROR(daemon->MakeSwapFolders(options));
  const std::string notify_path = (daemon->folder_.path() / "notify").string();
  ASSIGN_OR_RETURN(const UniqueFd notify_fd, BindNotifySocket(notify_path));

  ProcessOptions process{.arguments = {program},
                         .environment = {absl::StrCat("NOTIFY_SOCKET=", notify_path)},
                         .own_group = true,
                         .null_stdin = true,
                         .signal_mask = sigset_t{}};
  sigemptyset(&*process.signal_mask);
  if (!options.config.empty()) {
    process.arguments.insert(process.arguments.end(), {"--config", options.config});
  }
  std::vector<std::string> settings = {absl::StrCat("socket.path=", QuotedPath(daemon->socket_)),
                                       "socket.mode=\"0600\"", "memlock=best_effort",
                                       options.verbose ? "log.level=info" : "log.level=warning"};
  if (!options.dram.empty()) settings.push_back(absl::StrCat("dram.limit=\"", options.dram, "\""));
  if (!daemon->swap_paths_.empty()) {
    settings.push_back(SwapPathsSetting(daemon->swap_paths_));
    settings.push_back(absl::StrCat("swap.capacity=\"", options.swap_size, "\""));
    settings.push_back("swap.life=unlinked");  // the space is free however the daemon ends
  }
  settings.insert(settings.end(), options.settings.begin(), options.settings.end());
  for (const std::string& setting : settings) {
    process.arguments.insert(process.arguments.end(), {"--set", setting});
  }
  ASSIGN_OR_RETURN(Process started, Process::Start(process));
  daemon->process_.emplace(std::move(started));
  RETURN_IF_ERROR(daemon->AwaitReady(notify_fd.get(), abort_fds));
  return daemon;
}

absl::Status PrivateDaemon::AwaitReady(int notify_fd, std::span<const int> abort_fds) {
  std::vector<pollfd> watched = {{.fd = notify_fd, .events = POLLIN, .revents = 0},
                                 {.fd = process_->pidfd(), .events = POLLIN, .revents = 0}};
  for (const int fd : abort_fds) watched.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  const Clock::time_point end = Clock::now() + kReadyLimit;
  while (Clock::now() < end) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (::poll(watched.data(), watched.size(), static_cast<int>(left.count()) + 1) < 0) continue;
    for (size_t i = 2; i < watched.size(); ++i) {
      if (watched[i].revents != 0) {
        return MakeError(ErrorId::kInterrupted, "interrupted while the daemon was starting");
      }
    }
    std::array<char, 4096> text;
    const ssize_t size = ::recv(notify_fd, text.data(), text.size(), 0);
    if (size > 0 && std::string_view(text.data(), static_cast<size_t>(size)).find("READY=1") !=
                        std::string_view::npos) {
      return absl::OkStatus();
    }
    if (watched[1].revents != 0) {
      const std::optional<int> status = process_->WaitFor(kStopLimit);
      return MakeError(
          ErrorId::kNoDaemon,
          absl::StrCat("forebayd did not start: ", DescribeWaitStatus(status.value_or(0))),
          "its message is above");
    }
  }
  return MakeError(ErrorId::kTimeout,
                   absl::StrCat("forebayd was not ready within ", kReadyLimit.count(), " s"));
}

int PrivateDaemon::Stop() {
  if (!process_.has_value()) return 0;
  process_->Signal(SIGTERM);
  std::optional<int> status = process_->WaitFor(kStopLimit);
  if (!status.has_value()) {
    process_->Signal(SIGKILL);
    status = process_->WaitFor(kStopLimit);
  }
  return status.value_or(0);
}

}  // namespace forebay::tools
