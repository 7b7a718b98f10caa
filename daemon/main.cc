// SPDX-License-Identifier: Apache-2.0
// forebayd: the service.

#include <capnp/message.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "daemon/config.h"
#include "daemon/control/scrub_message.h"
#include "daemon/control/version.h"
#include "daemon/daemon.h"
#include "daemon/fd_store.h"
#include "daemon/notify.h"
#include "protocol/error.h"
#include "protocol/forebay.capnp.h"
#include "protocol/json.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/standard_output.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace {

using forebay::daemon::Config;
using forebay::daemon::Daemon;
using forebay::daemon::FdStore;
using forebay::daemon::LogLevel;

constexpr int kExitError = 1;
constexpr int kExitUsage = 2;

// Time limit of a planned stop; it fits into TimeoutStopSec= of the unit with the steps that follow.
constexpr std::chrono::seconds kStopLimit(45);
constexpr std::chrono::seconds kMakeDurableLimit(10);
// Time limit of a stop by SIGINT, which comes from a person or from `forebay run`. A second SIGINT ends the wait.
constexpr std::chrono::seconds kInterruptedLimit(3600);
constexpr std::chrono::seconds kStoreLimit(5);

struct CommandLine {
  std::string config_path;
  std::vector<std::string> settings;
  bool check = false;
  bool reclaim = false;
  bool adopt = false;
  bool scrub = false;
  bool jobs = false;
};

int Fail(const absl::Status& status) {
  if (!absl::IsCancelled(status)) {  // cancelled: the reader of the output has closed it
    forebay::protocol::PrintError(status);
  }
  return kExitError;
}

std::string KeysHelp() {
  std::string help = "keys:\n";
  for (const auto& key : forebay::daemon::ConfigKeys()) {
    absl::StrAppendFormat(&help, "  %-20s %s\n  %-20s %s\n", key.name, key.value, "", key.help);
  }
  return help;
}

// Parses the command line. Returns the exit status if the process can end at once.
std::optional<int> Parse(int argc, char** argv, CommandLine& line) {
  CLI::App app("Serves training jobs on this node", "forebayd");
  app.footer(KeysHelp());
  app.set_version_flag("--version", std::string("forebayd ") + forebay::daemon::kVersion);
  app.add_option("--config", line.config_path, "settings; forebay.toml has every key");
  app.add_option("--set", line.settings, "KEY=VALUE, over those of the file")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_flag("--check", line.check,
               "only checks the settings; does not look at the socket and the swap paths");
  app.add_flag("--reclaim", line.reclaim,
               "makes swap anew: jobs that are durable on it are lost; asks before on a terminal");
  app.add_flag("--adopt", line.adopt,
               "takes over a volume, with its durable jobs, that was last used on another machine "
               "or on other swap.paths: from then on it belongs here; stop what uses it there "
               "before, unless this is a copy");
  app.add_flag(
      "--scrub", line.scrub,
      "only reads and verifies what durable jobs have on swap.paths, and prints a report in JSON: "
      "forebay scrub shows it; status 0: clean, 1: damage");
  app.add_flag(
      "--jobs", line.jobs,
      "only lists the jobs that are durable on swap.paths, with their steps: the report of "
      "--scrub, without reading what they have there");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;
    const int code = app.exit(error, text, std::cerr) == 0 ? 0 : kExitUsage;
    const absl::Status written = forebay::protocol::WriteOutput(text.str());
    return written.ok() ? code : Fail(written);
  }
  if (line.adopt && line.reclaim) {
    std::fprintf(stderr, "--adopt keeps the jobs that --reclaim gives up: give one of them\n");
    return kExitUsage;
  }
  return std::nullopt;
}

absl::StatusOr<Config> ReadConfig(const CommandLine& line) {
  Config config;
  if (!line.config_path.empty()) {
    RETURN_IF_ERROR(forebay::daemon::LoadConfigFile(line.config_path, config));
  }
  for (const std::string& setting : line.settings) {
    RETURN_IF_ERROR(forebay::daemon::ApplySetting(setting, config));
  }
  return config;
}

// Returns the first folder of a list with colons, the form in which systemd gives folders.
std::string FirstFolder(std::string_view folders) {
  return std::string(folders.substr(0, folders.find(':')));
}

void SetUpLog(LogLevel level) {
  spdlog::set_default_logger(spdlog::stderr_logger_mt("forebayd"));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::set_level(spdlog::level::debug);
    case LogLevel::kInfo:
      return spdlog::set_level(spdlog::level::info);
    case LogLevel::kWarning:
      return spdlog::set_level(spdlog::level::warn);
    case LogLevel::kError:
      return spdlog::set_level(spdlog::level::err);
  }
}

// True if durable jobs may be given up. Asks the user on a terminal. Without a terminal the option --reclaim suffices.
bool MayReclaim(const absl::StatusOr<std::string>& jobs) {
  if (jobs.ok() && jobs->empty()) return true;
  const std::string lost = jobs.ok() ? *jobs
                                     : absl::StrCat("what is on swap, which cannot be read: ",
                                                    std::string(jobs.status().message()));
  if (::isatty(STDIN_FILENO) == 0 || ::isatty(STDERR_FILENO) == 0) {
    spdlog::warn("--reclaim gives up {}", lost);
    return true;
  }
  std::fprintf(stderr, "--reclaim gives up %s\nGo on? [y/N] ", lost.c_str());
  std::array<char, 16> answer{};
  if (std::fgets(answer.data(), answer.size(), stdin) != nullptr && answer[0] == 'y') return true;
  std::fprintf(stderr, "nothing was changed\n");
  return false;
}

int Print(const absl::StatusOr<forebay::daemon::ScrubReport>& report) {
  if (!report.ok()) return Fail(report.status());
  capnp::MallocMessageBuilder message;
  auto out = message.initRoot<forebay::schema::ScrubReport>();
  forebay::daemon::FillScrubReport(*report, {}, out);
  const absl::Status written =
      forebay::protocol::WriteOutput(forebay::protocol::JsonOf(out.asReader()) + "\n");
  if (!written.ok()) return Fail(written);
  return report->is_clean() ? 0 : kExitError;
}

// Connection with the service manager: messages, watchdog and store of descriptors.
struct Service {
  forebay::daemon::Notifier notifier;
  std::chrono::microseconds watchdog_limit;
  FdStore store;
};

// Waits until a signal asks for the end (true) or the daemon fails (false). Tells the service manager meanwhile that both
// threads make progress.
bool WaitForEnd(Daemon& daemon, const Service& service, int signals_fd) {
  // The watchdog is notified twice within the limit.
  const auto limit =
      std::chrono::duration_cast<std::chrono::milliseconds>(service.watchdog_limit / 2);
  const int period_ms = limit.count() == 0 ? -1 : std::max(1, static_cast<int>(limit.count()));
  std::array<pollfd, 2> fds = {pollfd{.fd = signals_fd, .events = POLLIN, .revents = 0},
                               pollfd{.fd = daemon.failure_fd(), .events = POLLIN, .revents = 0}};
  while (true) {
    const int ready = ::poll(fds.data(), fds.size(), period_ms);
    if (ready == 0 && daemon.MadeProgress()) service.notifier.Watchdog();
    if (ready <= 0) continue;
    if (fds[1].revents != 0) return false;
    if (fds[0].revents != 0) return true;
  }
}

// Removes all descriptors from the store except those in `kept`. A timeout is not an error: the service manager has the request
// and will handle it.
absl::Status ForgetLeft(FdStore& store, const std::set<std::string>& kept) {
  const absl::Status status = store.Forget(kStoreLimit, kept);
  if (forebay::protocol::IdOf(status) != forebay::protocol::ErrorId::kTimeout) return status;
  spdlog::warn("{}", forebay::protocol::FormatError(status));
  return absl::OkStatus();
}

// Functions of the store for the time that the daemon runs.
forebay::daemon::DescriptorStore StoreOf(FdStore& store) {
  if (!store.is_available()) return {};
  return {.keep = [&store](const std::string& name, int fd) { return store.Keep(name, fd); },
          .drop =
              [&store](const std::string& name) {
                const absl::Status status = store.Drop(name);
                if (!status.ok()) spdlog::warn("{}", forebay::protocol::FormatError(status));
              }};
}

// Returns the next signal that has arrived; 0: none.
int ReadSignal(int signals_fd) {
  signalfd_siginfo info{};
  if (::read(signals_fd, &info, sizeof(info)) != sizeof(info)) return 0;
  return static_cast<int>(info.ssi_signo);
}

// Called while the daemon ends: tells the service manager that the daemon makes progress. A signal ends the wait.
auto OnWait(Daemon& daemon, const Service& service, int signals_fd) {
  return [&daemon, &service, signals_fd] {
    if (daemon.MadeProgress()) service.notifier.Watchdog();
    return ReadSignal(signals_fd) == 0;
  };
}

// Retains the jobs in memory for the next daemon, if the service manager stores descriptors for it. A second signal ends the
// wait for jobs that are in the middle of a step. Does not return if some jobs do not become quiescent, or if the service manager
// does not answer.
void StopJobs(Daemon& daemon, Service& service, int signals_fd) {
  const auto flush = [&store = service.store] { return store.Flush(kStoreLimit); };
  const absl::Status status =
      daemon.StopJobs(flush, kStopLimit, OnWait(daemon, service, signals_fd));
  if (status.ok()) return;
  spdlog::warn("the others go on as after a kill of this daemon: {}",
               forebay::protocol::FormatError(status));
  // Ends the process like a kill: the stored descriptors and records of the jobs stay valid.
  std::_Exit(0);
}

// Writes the newest step of each durable job to swap. Without a store of descriptors, the next daemon reads the jobs from swap.
// A second signal ends the wait.
void MakeDurable(Daemon& daemon, const Service& service, std::chrono::seconds limit,
                 int signals_fd) {
  const absl::Status status = daemon.StopJobs(nullptr, limit, OnWait(daemon, service, signals_fd));
  if (!status.ok()) spdlog::warn("{}", forebay::protocol::FormatError(status));
}

int Serve(const Config& config, Service& service) {
  FdStore& store = service.store;
  // Blocked before the first thread is started, so that all inherit it.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGIO, SIG_IGN);    // signal of leases on files, see pinned_mem
  ::signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit of a file's size fails with EFBIG
  const forebay::protocol::UniqueFd signals_fd(
      ::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));

  forebay::daemon::DescriptorsByName left;
  for (const std::string& name : store.names()) left.emplace(name, store.Release(name));
  const auto forget = [&store](const std::set<std::string>& kept) {
    return ForgetLeft(store, kept);
  };
  auto daemon = Daemon::Start(config, std::move(left), forget, StoreOf(store));
  if (!daemon.ok()) return Fail(daemon.status());
  // Scripts wait for this line, so it is written at every log level.
  std::fprintf(stderr, "forebayd ready socket=%s\n", config.socket_path.c_str());
  service.notifier.Ready(absl::StrCat("serving ", config.socket_path));

  const bool asked = WaitForEnd(**daemon, service, signals_fd.get());
  service.notifier.Stopping();
  // The loop thread has ended: a clean stop would wait for it permanently.
  if (!asked) std::_Exit(kExitError);
  // SIGINT ends the jobs that are in memory alone: no daemon is to continue them.
  const int signal = ReadSignal(signals_fd.get());
  if (signal == SIGTERM && store.is_available()) {
    StopJobs(**daemon, service, signals_fd.get());
  } else {
    MakeDurable(**daemon, service, signal == SIGINT ? kInterruptedLimit : kMakeDurableLimit,
                signals_fd.get());
  }
  (*daemon)->Stop();
  spdlog::info("stopped");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  // The threshold is fixed. By default glibc raises it to the largest piece that was ever freed, and then retains the memory of
  // a layout that came with an attach: megabytes that dram.limit does not count.
  (void)::mallopt(M_MMAP_THRESHOLD, 128 << 10);
  CommandLine line;
  if (const std::optional<int> exit_status = Parse(argc, argv, line)) return *exit_status;
  const char* const target = std::getenv("FOREBAY_CPU_TARGET");
  const char* const notify_socket = std::getenv("NOTIFY_SOCKET");
  Service service{.notifier = forebay::daemon::Notifier(notify_socket),
                  .watchdog_limit = forebay::daemon::WatchdogLimit(std::getenv("WATCHDOG_USEC"),
                                                                   std::getenv("WATCHDOG_PID")),
                  .store = FdStore::Take({.notify_socket = notify_socket,
                                          .fdstore = std::getenv("FDSTORE"),
                                          .listen_pid = std::getenv("LISTEN_PID"),
                                          .listen_fds = std::getenv("LISTEN_FDS"),
                                          .listen_fdnames = std::getenv("LISTEN_FDNAMES")})};
  const char* const state_folders = std::getenv("STATE_DIRECTORY");
  auto config = ReadConfig(line);
  if (!config.ok()) return Fail(config.status());
  if (state_folders != nullptr) config->state_folder = FirstFolder(state_folders);
  if (target != nullptr && config->update_target == "best") config->update_target = target;
  SetUpLog(config->log_level);
  if (config->sets_endurance) {
    spdlog::warn(
        "swap.endurance has no effect and is removed in the next release: take it out of the "
        "settings; forebay swap shows the bytes written to each path");
  }
  if (line.check) {
    const absl::Status status = Daemon::Check(*config);
    return status.ok() ? 0 : Fail(status);
  }
  if (line.scrub) return Print(Daemon::Scrub(*config));
  if (line.jobs) return Print(Daemon::ListJobs(*config));
  if (line.reclaim) {
    const absl::StatusOr<std::string> jobs = Daemon::DurableJobs(*config);
    if (forebay::protocol::IdOf(jobs.status()) == forebay::protocol::ErrorId::kBusy) {
      return Fail(jobs.status());
    }
    if (!MayReclaim(jobs)) return kExitError;
    config->swap_mode = forebay::nvme::OpenMode::kReclaim;
  }
  if (line.adopt) config->swap_other_place = forebay::daemon::OtherPlace::kAdopted;
  return Serve(*config, service);
}
