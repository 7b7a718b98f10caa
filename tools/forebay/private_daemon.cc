// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/private_daemon.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::tools {
namespace {

namespace fs = std::filesystem;
using protocol::ErrorId;
using protocol::MakeError;
using Clock = std::chrono::steady_clock;

// Populating hundreds of GiB of staging takes a while
constexpr std::chrono::seconds kReadyLimit(60);
constexpr std::chrono::seconds kStopLimit(10);
constexpr char kSocketName[] = "forebay.sock";
// The daemon binds its socket at a path with ".new" behind it, then renames it. sun_path also has room for a zero byte.
constexpr size_t kRuntimeFolderBytesMax = sizeof(sockaddr_un::sun_path) -
                                          sizeof("/forebay-run-XXXXXX") - sizeof(kSocketName) -
                                          (sizeof(".new") - 1);
// Longer than the daemon waits for its disk.
constexpr std::chrono::minutes kStopDurablyLimit(65);

// Returns the number of the daemon's descriptors that the store retains. A daemon has five a job, two a rank and one for
// staging slots. The limit of open files bounds the number, because a child that receives the descriptors has each twice for
// a moment.
uint32_t StoreCapacity() {
  constexpr rlim_t kOthers = 64;
  constexpr rlim_t kCapacityMax = 4096;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur <= 2 * kOthers) return 0;
  return static_cast<uint32_t>(std::min((limit.rlim_cur - kOthers) / 2, kCapacityMax));
}

// The private folder and the socket in it that the daemon's messages come to.
struct Runtime {
  PrivateFolder folder;
  DescriptorStore store;
};

absl::StatusOr<Runtime> MakeRuntimeIn(const std::string& parent, uint32_t store_capacity) {
  if (parent.size() > kRuntimeFolderBytesMax) {
    return MakeError(ErrorId::kOption, absl::StrCat(parent, " has ", parent.size(), " bytes"));
  }
  ASSIGN_OR_RETURN(PrivateFolder folder, PrivateFolder::Create(parent));
  ASSIGN_OR_RETURN(DescriptorStore store,
                   DescriptorStore::Create((folder.path() / "notify").string(), store_capacity));
  return Runtime{.folder = std::move(folder), .store = std::move(store)};
}

// Creates the runtime in the first of `parents` that can hold it, or in /tmp.
absl::StatusOr<Runtime> MakeRuntime(std::vector<std::string> parents, uint32_t store_capacity) {
  parents.push_back("/tmp");
  std::vector<std::string> refused;
  for (const std::string& parent : parents) {
    if (parent.empty()) continue;
    std::error_code ignored;
    auto made = MakeRuntimeIn(fs::absolute(parent, ignored).string(), store_capacity);
    if (made.ok()) return made;
    refused.emplace_back(made.status().message());
  }
  return MakeError(
      ErrorId::kOption,
      absl::StrCat("no folder for the daemon's socket: ", absl::StrJoin(refused, "; ")),
      absl::StrCat("set XDG_RUNTIME_DIR or TMPDIR to a folder that you may write, on a file system "
                   "that takes sockets, with a path of at most ",
                   kRuntimeFolderBytesMax, " bytes"));
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
    return MakeError(
        ErrorId::kOption, absl::StrCat("there is no forebayd at ", beside.string()),
        "install both again (pip install --force-reinstall forebay), or build it: cmake "
        "--build --preset default --target forebayd");
  }
  return beside.string();
}

PrivateDaemon::PrivateDaemon(PrivateFolder folder, DescriptorStore store)
    : folder_(std::move(folder)), store_(std::move(store)) {
  socket_ = (folder_.path() / kSocketName).string();
}

PrivateDaemon::~PrivateDaemon() { Stop(); }

absl::Status PrivateDaemon::MakeSwapFolders(const PrivateDaemonOptions& options) {
  if (options.is_kept) {
    swap_paths_ = options.swap;
    return absl::OkStatus();
  }
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
  ASSIGN_OR_RETURN(Runtime made, MakeRuntime(options.runtime_folders,
                                             options.can_start_again ? StoreCapacity() : 0));
  if (options.folder_made) options.folder_made(made.folder.path());
  // The constructor is private: make_unique cannot reach it.
  std::unique_ptr<PrivateDaemon> daemon(
      new PrivateDaemon(std::move(made.folder), std::move(made.store)));
  RETURN_IF_ERROR(daemon->MakeSwapFolders(options));
  daemon->SetCommand(program, options);
  RETURN_IF_ERROR(daemon->Launch());
  RETURN_IF_ERROR(daemon->AwaitReady(abort_fds));
  return daemon;
}

void PrivateDaemon::SetCommand(const std::string& program, const PrivateDaemonOptions& options) {
  command_ = {.arguments = {program},
              .environment = store_.environment(),
              .own_group = true,
              .null_stdin = true,
              .signal_mask = sigset_t{}};
  sigemptyset(&*command_.signal_mask);
  if (!options.config.empty()) {
    command_.arguments.insert(command_.arguments.end(), {"--config", options.config});
  }
  std::vector<std::string> settings = {absl::StrCat("socket.path=", QuotedPath(socket_)),
                                       "socket.mode=\"0600\"", "memlock=best_effort",
                                       options.verbose ? "log.level=info" : "log.level=warning"};
  if (!options.dram.empty()) settings.push_back(absl::StrCat("dram.limit=\"", options.dram, "\""));
  if (!swap_paths_.empty()) {
    settings.push_back(SwapPathsSetting(swap_paths_));
    settings.push_back(absl::StrCat("swap.capacity=\"", options.swap_size, "\""));
    if (options.can_start_again) {
      // The swap files live for one command. A measurement would delay the command, and its result is lost with the files.
      settings.insert(settings.end(), {"swap.life=kept", "swap.probe=never"});
    } else {
      settings.push_back("swap.life=unlinked");  // frees the space at each end of the daemon
    }
  }
  if (options.is_kept) settings.push_back("jobs.at_stop=durable");
  settings.insert(settings.end(), options.settings.begin(), options.settings.end());
  for (const std::string& setting : settings) {
    command_.arguments.insert(command_.arguments.end(), {"--set", setting});
  }
}

absl::Status PrivateDaemon::Launch() {
  command_.passed = store_.kept();
  ASSIGN_OR_RETURN(Process started, Process::Start(command_));
  process_.emplace(std::move(started));
  return absl::OkStatus();
}

absl::Status PrivateDaemon::StartAgain() {
  store_.NextProcess();
  return Launch();
}

absl::Status PrivateDaemon::AwaitReady(std::span<const int> abort_fds) {
  if (is_ready()) return absl::OkStatus();
  std::vector<pollfd> watched = {{.fd = store_.socket_fd(), .events = POLLIN, .revents = 0},
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
    store_.Drain();
    if (store_.is_ready()) return absl::OkStatus();
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

// Waits up to `limit` for the daemon's end and reads its messages meanwhile, because the daemon may block on them.
std::optional<int> PrivateDaemon::AwaitEnd(std::chrono::milliseconds limit) {
  std::array<pollfd, 2> watched = {{{.fd = store_.socket_fd(), .events = POLLIN, .revents = 0},
                                    {.fd = process_->pidfd(), .events = POLLIN, .revents = 0}}};
  const Clock::time_point end = Clock::now() + limit;
  for (auto left = limit; left.count() > 0;) {
    ::poll(watched.data(), watched.size(), static_cast<int>(left.count()));
    store_.Drain();
    if (watched[1].revents != 0) break;
    left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
  }
  return process_->WaitFor(std::chrono::milliseconds(0));
}

int PrivateDaemon::StopDurably(int signal_fd) {
  std::array<pollfd, 3> watched = {{{.fd = store_.socket_fd(), .events = POLLIN, .revents = 0},
                                    {.fd = process_->pidfd(), .events = POLLIN, .revents = 0},
                                    {.fd = signal_fd, .events = POLLIN, .revents = 0}}};
  process_->Signal(is_ready() ? SIGINT : SIGTERM);
  const Clock::time_point end = Clock::now() + kStopDurablyLimit;
  while (watched[1].revents == 0 && Clock::now() < end) {
    ::poll(watched.data(), watched.size(), 1000);
    store_.Drain();
    while (watched[2].revents != 0 && ReadSignal(signal_fd)) {
      process_->Signal(SIGINT);
    }
  }
  return Stop();
}

int PrivateDaemon::Stop() {
  if (!process_.has_value()) return 0;
  // SIGINT ends the daemon, and its jobs with it. Before the daemon is ready it has no jobs and may ignore SIGINT.
  process_->Signal(is_ready() ? SIGINT : SIGTERM);
  std::optional<int> status = AwaitEnd(kStopLimit);
  if (!status.has_value()) {
    process_->Signal(SIGKILL);
    status = AwaitEnd(kStopLimit);
  }
  return status.value_or(0);
}

}  // namespace forebay::tools
