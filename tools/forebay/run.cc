// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/run.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/environment.h"
#include "protocol/error.h"
#include "protocol/os/pidfd.h"
#include "protocol/os/unique_fd.h"
#include "tools/forebay/process.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::PrintError;
using protocol::UniqueFd;
using Clock = std::chrono::steady_clock;

// Number of times that a daemon which has ended by itself is restarted within kStartsAgainPeriod, at most.
constexpr size_t kStartsAgainMax = 5;
constexpr std::chrono::seconds kStartsAgainPeriod(60);
constexpr int kOfTerminal = 0x666f7265;  // marks signals that the first process forwards

int ExitStatus(int code) { return W_EXITCODE(code, 0); }

struct Signal {
  int number = 0;
  bool of_terminal = false;  // the terminal sends the signal to the command too
};

// Reads the next signal like ReadSignal(), and tells whether the terminal has sent it.
std::optional<Signal> NextSignal(int signal_fd) {
  const std::optional<signalfd_siginfo> info = ReadSignal(signal_fd);
  if (!info) return std::nullopt;
  const bool handed_on = info->ssi_code == SI_QUEUE && info->ssi_int == kOfTerminal;
  return Signal{.number = static_cast<int>(info->ssi_signo),
                .of_terminal = info->ssi_code == SI_KERNEL || handed_on};
}

void HandOn(pid_t to, const Signal& signal) {
  ::sigqueue(to, signal.number, sigval{.sival_int = signal.of_terminal ? kOfTerminal : 0});
}

// The report of the second process to the first: the folders that the second has created, then the wait status to pass on.
class Report {
 public:
  static void Folder(int fd, const std::filesystem::path& folder) {
    const std::string text = absl::StrCat("F", folder.string(), std::string(1, '\0'));
    (void)!::write(fd, text.data(), text.size());  // below PIPE_BUF: all of it or nothing
  }
  static bool Status(int fd, int status) {
    const std::string text = absl::StrCat("S", status, std::string(1, '\0'));
    return ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  }

  // Reads more of the report. Returns false at the end of the pipe or after an error.
  bool Read(int fd) { return ReadSome(fd, text_) > 0; }

  std::optional<int> status() const {
    for (const std::string& line : Lines('S')) return std::atoi(line.c_str());
    return std::nullopt;
  }
  std::vector<std::string> folders() const { return Lines('F'); }

 private:
  std::vector<std::string> Lines(char kind) const {
    std::vector<std::string> lines;
    for (size_t at = 0, end; (end = text_.find('\0', at)) != std::string::npos; at = end + 1) {
      if (text_[at] == kind) lines.push_back(text_.substr(at + 1, end - at - 1));
    }
    return lines;
  }

  std::string text_;
};

// Environment of the command. FOREBAY_DAEMON_WAIT lets an attach wait while a daemon that has died is restarted.
std::vector<std::string> Environment(const std::string& socket, const std::string& run) {
  std::vector<std::string> variables = {absl::StrCat("FOREBAY_SOCKET=", socket),
                                        absl::StrCat("FOREBAY_RUN=", client::RunToken(run))};
  if (!client::SaysDaemonWait()) {
    const std::chrono::seconds wait =
        std::chrono::duration_cast<std::chrono::seconds>(client::kDaemonWait);
    variables.push_back(absl::StrCat("FOREBAY_DAEMON_WAIT=", wait.count()));
  }
  return variables;
}

// The second process: parent of the daemon and of the command.
class Supervisor {
 public:
  Supervisor(const RunOptions& options, KeptRunFile* kept, int signal_fd,
             const sigset_t& command_mask, pid_t command_group, UniqueFd front_pidfd)
      : options_(options),
        kept_(kept),
        signal_fd_(signal_fd),
        command_mask_(command_mask),
        command_group_(command_group),
        front_pidfd_(std::move(front_pidfd)) {}

  // Runs daemon and command. Returns the wait status to pass on.
  int Supervise() {
    const std::array abort_fds = {signal_fd_, front_pidfd_.get()};
    auto daemon = PrivateDaemon::Start(options_.daemon, abort_fds);
    absl::Status started = daemon.status();
    if (started.ok() && kept_ != nullptr) started = CheckKeptDaemon(*kept_, **daemon);
    if (const std::optional<Signal> signal = NextSignal(signal_fd_)) {
      GiveUpNew();
      return W_EXITCODE(0, signal->number);
    }
    if (!started.ok()) {
      PrintError(started);
      GiveUpNew();
      return ExitStatus(kFailed);
    }
    const int status = RunCommand(**daemon);
    if (kept_ == nullptr) return status;
    ::signal(SIGPIPE, SIG_IGN);  // the reader of stderr may have ended with the command
    while (NextSignal(signal_fd_)) {
      // Discards signals that the command has already received.
    }
    const absl::Status kept = EndKept(*kept_, **daemon, signal_fd_);
    if (kept.ok()) return status;
    PrintError(kept);
    return status == 0 ? ExitStatus(kFailed) : status;
  }

 private:
  // Removes the files of a new --keep run that has not started its command.
  void GiveUpNew() {
    if (kept_ == nullptr || options_.keep.keep.empty()) return;
    const absl::Status status = kept_->Remove();
    if (!status.ok()) PrintError(status);
  }

  // Runs the command. Returns the wait status to pass on after all processes that the command has started have ended.
  int RunCommand(PrivateDaemon& daemon) {
    auto command = Process::Start({.arguments = options_.command,
                                   .environment = Environment(daemon.socket(), Token()),
                                   .group = command_group_,
                                   .signal_mask = command_mask_});
    if (!command.ok()) {
      PrintError(command.status());
      return ExitStatus(kNotFound);
    }
    const std::optional<int> status = Watch(daemon, *command);
    EndDescendants(daemon.process().pid(),
                   status.has_value() ? kLeftOverGrace : std::chrono::milliseconds(0),
                   [&daemon] { daemon.HandleMessages(); });
    return status.value_or(ExitStatus(kFailed));
  }

  std::string Token() const { return kept_ == nullptr ? std::string() : kept_->run().run; }

  // Waits until the command has ended and returns its wait status. Returns nothing if the first process has died.
  std::optional<int> Watch(PrivateDaemon& daemon, Process& command) {
    std::array<pollfd, 5> watched = {{{signal_fd_, POLLIN, 0},
                                      {front_pidfd_.get(), POLLIN, 0},
                                      {command.pidfd(), POLLIN, 0},
                                      {daemon.process().pidfd(), POLLIN, 0},
                                      {daemon.messages_fd(), POLLIN, 0}}};
    while (true) {
      if (::poll(watched.data(), watched.size(), -1) < 0) continue;
      while (const std::optional<Signal> signal = NextSignal(signal_fd_)) {
        if (!signal->of_terminal) command.Signal(signal->number);
      }
      if (watched[4].revents != 0) daemon.HandleMessages();
      if (watched[2].revents != 0) return command.WaitFor(std::chrono::seconds(1));
      if (watched[1].revents != 0) return std::nullopt;
      if (watched[3].revents != 0) {
        const absl::Status status = StartAgain(daemon);
        if (!status.ok()) PrintError(status);
        watched[3].fd = status.ok() ? daemon.process().pidfd() : -1;
      }
    }
  }

  // Restarts a daemon that has ended while the command runs.
  absl::Status StartAgain(PrivateDaemon& daemon) {
    daemon.HandleMessages();  // the last ones of the ended daemon
    const std::string ended = absl::StrCat(
        "forebayd ended while the command ran: ",
        DescribeWaitStatus(daemon.process().WaitFor(std::chrono::seconds(1)).value_or(0)));
    if (!daemon.is_ready()) {
      return MakeError(ErrorId::kDaemonGone,
                       absl::StrCat(ended, ", started again but not ready yet"),
                       "its message is above");
    }
    const Clock::time_point now = Clock::now();
    std::erase_if(started_again_,
                  [now](Clock::time_point at) { return now - at > kStartsAgainPeriod; });
    if (started_again_.size() >= kStartsAgainMax) {
      return MakeError(ErrorId::kDaemonGone,
                       absl::StrCat(ended, ", after it was started again ", kStartsAgainMax,
                                    " times within ", kStartsAgainPeriod.count(), " s"),
                       "its messages are above; --verbose shows the whole log");
    }
    started_again_.push_back(now);
    std::fprintf(stderr, "%s; it is started again\n", ended.c_str());
    return daemon.StartAgain();
  }

  const RunOptions& options_;
  KeptRunFile* kept_;  // null: the run is not saved for --resume
  int signal_fd_;
  sigset_t command_mask_;
  pid_t command_group_;
  UniqueFd front_pidfd_;
  std::vector<Clock::time_point> started_again_;
};

// Work of the first process: forwards signals, waits for the report of the second process, and cleans up if the second
// process died without a report.
int PassOn(pid_t supervisor, int signal_fd, int report_fd, const KeptRunFile* kept) {
  std::array<pollfd, 2> watched = {{{signal_fd, POLLIN, 0}, {report_fd, POLLIN, 0}}};
  Report report;
  for (bool more = true; more;) {
    if (::poll(watched.data(), watched.size(), -1) < 0) continue;
    while (const std::optional<Signal> signal = NextSignal(signal_fd)) HandOn(supervisor, *signal);
    if (watched[1].revents != 0) more = report.Read(report_fd);
  }
  int supervisor_status = 0;
  ::waitpid(supervisor, &supervisor_status, 0);
  if (const std::optional<int> status = report.status()) return *status;
  PrintError(MakeError(
      ErrorId::kInternal,
      absl::StrCat("the supervising process ended: ", DescribeWaitStatus(supervisor_status)),
      absl::StrCat("see who ended it (dmesg, where memory was short), then run the command again: ",
                   kept == nullptr ? "it begins anew, since its daemon and swap are removed"
                                   : "--resume goes on from the newest durable step, which forebay "
                                     "run --kept shows")));
  // The children of the dead second process have become children of this process.
  EndDescendants(/*spared=*/0, std::chrono::milliseconds(0));
  for (const std::string& folder : report.folders()) {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  }
  return ExitStatus(kFailed);
}

[[noreturn]] void EndBySignal(int number) {
  const rlimit no_core{.rlim_cur = 0, .rlim_max = 0};
  ::setrlimit(RLIMIT_CORE, &no_core);  // only the command's core dump is useful
  ::signal(number, SIG_DFL);
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, number);
  ::raise(number);
  ::sigprocmask(SIG_UNBLOCK, &one, nullptr);
  ::_exit(128 + number);  // reached if the signal does not end processes
}

}  // namespace

int Run(const RunOptions& options) {
  sigset_t before;
  const UniqueFd signal_fd = CatchForwardedSignals(&before);
  const pid_t self = ::getpid();
  UniqueFd self_pidfd = protocol::OpenPidfd(self);
  if (!signal_fd.valid() || !self_pidfd.valid()) {
    PrintError(MakeError(ErrorId::kLimit, protocol::ErrnoText("signalfd or pidfd", errno)));
    return kFailed;
  }
  absl::StatusOr<Pipe> report = MakePipe();
  if (!report.ok()) {
    PrintError(report.status());
    return kFailed;
  }
  RunOptions wanted = options;
  std::optional<KeptRunFile> kept;
  if (options.keep.is_wanted()) {
    absl::StatusOr<KeptRunFile> begun = BeginKept(options.keep, wanted.daemon);
    if (!begun.ok()) {
      PrintError(begun.status());
      return kFailed;
    }
    kept.emplace(*std::move(begun));
  }
  KeptRunFile* const kept_run = kept.has_value() ? &*kept : nullptr;
  const pid_t group = ::getpgrp();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t supervisor = ::fork();
  if (supervisor < 0) {
    PrintError(MakeError(ErrorId::kLimit, protocol::ErrnoText("fork", errno)));
    return kFailed;
  }
  if (supervisor == 0) {
    report->read_end.Reset();
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    ::setpgid(0, 0);  // cleans up also after a SIGKILL of the first process's group
    wanted.daemon.can_start_again = true;
    wanted.daemon.folder_made = [fd =
                                     report->write_end.get()](const std::filesystem::path& folder) {
      Report::Folder(fd, folder);
    };
    const int status =
        Supervisor(wanted, kept_run, signal_fd.get(), before, group, std::move(self_pidfd))
            .Supervise();
    ::_exit(Report::Status(report->write_end.get(), status) ? 0 : kFailed);
  }
  report->write_end.Reset();
  const int status = PassOn(supervisor, signal_fd.get(), report->read_end.get(), kept_run);
  if (WIFSIGNALED(status)) EndBySignal(WTERMSIG(status));
  return WEXITSTATUS(status);
}

}  // namespace forebay::tools
