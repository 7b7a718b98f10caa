#include "tools/forebay/run.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/unique_fd.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::FormatError;
using protocol::MakeError;
using protocol::UniqueFd;

constexpr int kFailed = 1;
constexpr int kNotFound = 127;                     // as a shell says it
constexpr std::chrono::milliseconds kGrace(3000);  // for what the command left running
constexpr std::array kForwarded = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

void Print(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", FormatError(status).c_str());
}

int ExitStatus(int code) { return W_EXITCODE(code, 0); }

// What came through a signalfd, a signal of the terminal aside: that one reaches the command by
// itself.
std::optional<int> NextSignal(int signal_fd) {
  signalfd_siginfo info;
  while (::read(signal_fd, &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_code != SI_KERNEL) return static_cast<int>(info.ssi_signo);
  }
  return std::nullopt;
}

// The second process: parent of the daemon and of the command.
class Supervisor {
 public:
  Supervisor(const RunOptions& options, int signal_fd, const sigset_t& command_mask,
             UniqueFd front_pidfd)
      : options_(options),
        signal_fd_(signal_fd),
        command_mask_(command_mask),
        front_pidfd_(std::move(front_pidfd)) {}

  // The wait status to pass on.
  int Supervise() {
    const std::array abort_fds = {signal_fd_, front_pidfd_.get()};
    auto daemon = PrivateDaemon::Start(options_.daemon, abort_fds);
    if (!daemon.ok()) {
      const std::optional<int> number = NextSignal(signal_fd_);
      if (number.has_value()) return W_EXITCODE(0, *number);
      Print(daemon.status());
      return ExitStatus(kFailed);
    }
    auto command =
        Process::Start({.arguments = options_.command,
                        .environment = {absl::StrCat("FOREBAY_SOCKET=", (*daemon)->socket())},
                        .signal_mask = command_mask_});
    if (!command.ok()) {
      Print(command.status());
      return ExitStatus(kNotFound);
    }
    const std::optional<int> status = Watch(**daemon, *command);
    EndDescendants((*daemon)->process().pid(),
                   status.has_value() ? kGrace : std::chrono::milliseconds(0));
    return status.value_or(ExitStatus(kFailed));
  }

 private:
  // Until the command has ended: its wait status; absent when the first process has died.
  std::optional<int> Watch(PrivateDaemon& daemon, Process& command) {
    std::array<pollfd, 4> watched = {{{signal_fd_, POLLIN, 0},
                                      {front_pidfd_.get(), POLLIN, 0},
                                      {command.pidfd(), POLLIN, 0},
                                      {daemon.process().pidfd(), POLLIN, 0}}};
    while (true) {
      if (::poll(watched.data(), watched.size(), -1) < 0) continue;
      while (const std::optional<int> number = NextSignal(signal_fd_)) command.Signal(*number);
      if (watched[2].revents != 0) return command.WaitFor(std::chrono::seconds(1));
      if (watched[1].revents != 0) return std::nullopt;
      if (watched[3].revents != 0) {
        watched[3].fd = -1;
        const int ended = daemon.process().WaitFor(std::chrono::seconds(1)).value_or(0);
        Print(MakeError(ErrorId::kDaemonGone, absl::StrCat("forebayd ended while the command ran: ",
                                                           DescribeWaitStatus(ended))));
      }
    }
  }

  const RunOptions& options_;
  int signal_fd_;
  sigset_t command_mask_;
  UniqueFd front_pidfd_;
};

// The first process: hands signals on, waits for the second one's word.
int PassOn(pid_t supervisor, int signal_fd, int report_fd) {
  std::array<pollfd, 2> watched = {{{signal_fd, POLLIN, 0}, {report_fd, POLLIN, 0}}};
  while (watched[1].revents == 0) {
    if (::poll(watched.data(), watched.size(), -1) < 0) continue;
    while (const std::optional<int> number = NextSignal(signal_fd)) ::kill(supervisor, *number);
  }
  int status = 0;
  const bool told = ::read(report_fd, &status, sizeof(status)) == sizeof(status);
  int supervisor_status = 0;
  ::waitpid(supervisor, &supervisor_status, 0);
  if (!told) {
    Print(MakeError(ErrorId::kInternal, absl::StrCat("the supervising process ended: ",
                                                     DescribeWaitStatus(supervisor_status))));
    return ExitStatus(kFailed);
  }
  return status;
}

[[noreturn]] void EndBySignal(int number) {
  const rlimit no_core{.rlim_cur = 0, .rlim_max = 0};
  ::setrlimit(RLIMIT_CORE, &no_core);  // the core that matters is the command's
  ::signal(number, SIG_DFL);
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, number);
  ::raise(number);
  ::sigprocmask(SIG_UNBLOCK, &one, nullptr);
  ::_exit(128 + number);  // a signal that does not end processes
}

}  // namespace

int Run(const RunOptions& options) {
  sigset_t handled;
  sigemptyset(&handled);
  for (const int number : kForwarded) sigaddset(&handled, number);
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &handled, &before);
  const UniqueFd signal_fd(::signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  std::array<int, 2> report_ends = {-1, -1};
  const pid_t self = ::getpid();
  UniqueFd self_pidfd = OpenPidfd(self);
  if (!signal_fd.valid() || !self_pidfd.valid() || ::pipe2(report_ends.data(), O_CLOEXEC) != 0) {
    Print(MakeError(ErrorId::kLimit, protocol::ErrnoText("signalfd, pidfd or pipe", errno)));
    return kFailed;
  }
  UniqueFd report_read(report_ends[0]);
  UniqueFd report_write(report_ends[1]);
  const pid_t supervisor = ::fork();
  if (supervisor < 0) {
    Print(MakeError(ErrorId::kLimit, protocol::ErrnoText("fork", errno)));
    return kFailed;
  }
  if (supervisor == 0) {
    report_read.Reset();
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    const int status =
        Supervisor(options, signal_fd.get(), before, std::move(self_pidfd)).Supervise();
    const ssize_t told = ::write(report_write.get(), &status, sizeof(status));
    ::_exit(told == sizeof(status) ? 0 : kFailed);
  }
  report_write.Reset();
  const int status = PassOn(supervisor, signal_fd.get(), report_read.get());
  if (WIFSIGNALED(status)) EndBySignal(WTERMSIG(status));
  return WEXITSTATUS(status);
}

}  // namespace forebay::tools
