// forebayd: the service.

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_adam/targets.h"
#include "daemon/config.h"
#include "daemon/control/version.h"
#include "daemon/daemon.h"
#include "daemon/notify.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace {

using forebay::daemon::Config;
using forebay::daemon::Daemon;
using forebay::daemon::LogLevel;

constexpr int kExitError = 1;
constexpr int kExitUsage = 2;

struct CommandLine {
  std::string config_path;
  std::vector<std::string> settings;
  bool check = false;
  bool version = false;
  bool help = false;
};

void PrintHelp() {
  std::printf(
      "usage: forebayd [--config FILE] [--set KEY=VALUE]... [--check] [--version] [--help]\n\n"
      "Serves training jobs on this node. Settings of --set go over those of the file; --check "
      "only\n"
      "reads them. FOREBAY_CPU_TARGET forces an instruction set: forebay doctor lists them.\n\n"
      "keys:\n");
  for (const auto& key : forebay::daemon::ConfigKeys()) {
    std::printf("  %-20.*s %.*s\n  %-20s %.*s\n", static_cast<int>(key.name.size()),
                key.name.data(), static_cast<int>(key.value.size()), key.value.data(), "",
                static_cast<int>(key.help.size()), key.help.data());
  }
}

// False after a message where the arguments make no sense.
bool Parse(int argc, char** argv, CommandLine& line) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const bool takes_value = argument == "--config" || argument == "--set";
    if (takes_value && (i + 1 == argc || *argv[i + 1] == '\0')) {
      std::fprintf(stderr, "forebayd: %s takes a value\n", argv[i]);
      return false;
    }
    if (argument == "--config") {
      line.config_path = argv[++i];
    } else if (argument == "--set") {
      line.settings.emplace_back(argv[++i]);
    } else if (argument == "--check") {
      line.check = true;
    } else if (argument == "--version") {
      line.version = true;
    } else if (argument == "--help" || argument == "-h") {
      line.help = true;
    } else {
      std::fprintf(stderr, "forebayd: unknown argument %s\n", argv[i]);
      return false;
    }
  }
  return true;
}

absl::StatusOr<Config> ReadConfig(const CommandLine& line) {
  Config config;
  if (!line.config_path.empty()) {
    RETURN_IF_ERROR(forebay::daemon::LoadConfigFile(line.config_path, config));
  }
  for (const std::string& setting : line.settings) {
    RETURN_IF_ERROR(forebay::daemon::ApplySetting(setting, config));
  }
  RETURN_IF_ERROR(forebay::daemon::CheckConfig(config));
  return config;
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

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", forebay::protocol::FormatError(status).c_str());
  return kExitError;
}

// Until a signal asks for the end (true) or the daemon fails (false).
bool WaitForEnd(int signals_fd, int failure_fd) {
  std::array<pollfd, 2> fds = {pollfd{.fd = signals_fd, .events = POLLIN, .revents = 0},
                               pollfd{.fd = failure_fd, .events = POLLIN, .revents = 0}};
  while (true) {
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;
    if (fds[1].revents != 0) return false;
    if (fds[0].revents != 0) return true;
  }
}

int Serve(const Config& config) {
  // Blocked before the first thread is made, so that all inherit it.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGIO, SIG_IGN);  // of leases on files, see pinned_mem
  const forebay::protocol::UniqueFd signals_fd(::signalfd(-1, &signals, SFD_CLOEXEC));

  auto daemon = Daemon::Start(config);
  if (!daemon.ok()) return Fail(daemon.status());
  // One line that scripts wait for, whatever the log level.
  std::fprintf(stderr, "forebayd ready socket=%s\n", config.socket_path.c_str());
  forebay::daemon::NotifyReady(absl::StrCat("serving ", config.socket_path));

  const bool asked = WaitForEnd(signals_fd.get(), (*daemon)->failure_fd());
  forebay::daemon::NotifyStopping();
  if (!asked)
    std::_Exit(kExitError);  // the loop is dead: a clean stop would wait for it permanently
  (*daemon)->Stop();
  spdlog::info("stopped");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine line;
  if (!Parse(argc, argv, line)) return kExitUsage;
  if (line.help) {
    PrintHelp();
    return 0;
  }
  if (line.version) {
    std::printf("forebayd %s\n", forebay::daemon::kVersion);
    return 0;
  }
  const char* const target = std::getenv("FOREBAY_CPU_TARGET");
  const absl::Status forced = forebay::cpu_adam::ForceTarget(target == nullptr ? "" : target);
  if (!forced.ok()) return Fail(forced);
  const auto config = ReadConfig(line);
  if (!config.ok()) return Fail(config.status());
  if (line.check) return 0;
  SetUpLog(config->log_level);
  return Serve(*config);
}
