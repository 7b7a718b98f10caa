// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "protocol/os/check.h"

namespace forebay::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kDeadline = std::chrono::seconds(60);

int MillisecondsUntil(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  return left.count() < 0 ? 0 : static_cast<int>(left.count());
}

struct Child {
  pid_t pid;
  protocol::UniqueFd errors;
};

Child Spawn(const std::vector<std::string>& arguments, const Prepare& prepare = {}) {
  std::array<int, 2> ends{};
  FOREBAY_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.data()));
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  FOREBAY_CHECK(pid >= 0);
  if (pid == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    if (prepare) prepare();
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  return {pid, protocol::UniqueFd(ends[0])};
}

// Reads from the pipe into `seen` until it contains `wanted`, the pipe ends or the deadline has passed.
bool ReadUntil(int fd, const std::string& wanted, std::string& seen) {
  const auto deadline = Clock::now() + kDeadline;
  while (wanted.empty() || seen.find(wanted) == std::string::npos) {
    pollfd poll_fd{.fd = fd, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&poll_fd, 1, MillisecondsUntil(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    std::array<char, 4096> text{};
    const ssize_t got = ::read(fd, text.data(), text.size());
    if (got <= 0) return wanted.empty();
    seen.append(text.data(), static_cast<size_t>(got));
  }
  return true;
}

Ended Reap(pid_t pid, int errors, std::string seen) {
  if (!ReadUntil(errors, "", seen)) ::kill(pid, SIGKILL);
  int status = 0;
  FOREBAY_CHECK(::waitpid(pid, &status, 0) == pid);
  return {.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
          .signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0,
          .errors = std::move(seen)};
}

}  // namespace

TempDir::TempDir() {
  std::string pattern = std::filesystem::current_path().string() + "/test_XXXXXX";
  FOREBAY_CHECK(::mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TempDir::Make(const std::string& name) const {
  std::filesystem::create_directory(path_ + "/" + name);
  return path_ + "/" + name;
}

std::string TempDir::Write(const std::string& name, const std::string& text) const {
  std::ofstream(path_ + "/" + name) << text;
  return path_ + "/" + name;
}

Ended RunProgram(const std::vector<std::string>& arguments) {
  Child child = Spawn(arguments);
  return Reap(child.pid, child.errors.get(), {});
}

std::unique_ptr<RunningProgram> RunningProgram::Start(const std::vector<std::string>& arguments,
                                                      const std::string& sign) {
  Child child = Spawn(arguments);
  std::unique_ptr<RunningProgram> program(new RunningProgram());
  program->pid_ = child.pid;
  program->errors_ = std::move(child.errors);
  (void)ReadUntil(program->errors_.get(), sign, program->seen_);
  return program;
}

Ended RunningProgram::Wait() {
  return Reap(std::exchange(pid_, -1), errors_.get(), std::move(seen_));
}

void RunningProgram::Kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  int status = 0;
  ::waitpid(std::exchange(pid_, -1), &status, 0);
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(
    const std::string& socket, const std::vector<std::string>& settings, const Prepare& prepare) {
  // All clients of one test belong to one run, even clients in other processes.
  ::setenv("FOREBAY_RUN", "test", 0);
  std::vector<std::string> arguments = {FOREBAYD_PATH};
  // Worker memory is a part of dram.limit: a fixed number makes it equal on every machine.
  std::vector<std::string> all = {"socket.path=" + socket, "memlock=best_effort",
                                  "update.workers=2", "swap.probe=never", "dram.limit=1GiB"};
  if (std::ranges::find(settings, kDefaultDramLimit) != settings.end()) all.pop_back();
  std::ranges::copy_if(settings, std::back_inserter(all),
                       [](const std::string& setting) { return setting != kDefaultDramLimit; });
  for (const std::string& setting : all) {
    arguments.push_back("--set");
    arguments.push_back(setting);
  }
  Child child = Spawn(arguments, prepare);
  std::unique_ptr<DaemonProcess> process(new DaemonProcess());
  process->pid_ = child.pid;
  process->errors_ = std::move(child.errors);
  if (ReadUntil(process->errors_.get(), "forebayd ready", process->seen_)) return process;
  const Ended ended =
      Reap(std::exchange(process->pid_, -1), process->errors_.get(), std::move(process->seen_));
  return absl::InternalError(
      absl::StrCat("forebayd ended with ", ended.exit_code, ": ", ended.errors));
}

DaemonProcess::~DaemonProcess() { Kill(); }

Ended DaemonProcess::Stop() {
  ::kill(pid_, SIGTERM);
  return Reap(std::exchange(pid_, -1), errors_.get(), std::move(seen_));
}

void DaemonProcess::Kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  int status = 0;
  ::waitpid(std::exchange(pid_, -1), &status, 0);
}

int DaemonProcess::OpenFds() const {
  std::error_code error;
  const std::filesystem::directory_iterator fds(absl::StrCat("/proc/", pid_, "/fd"), error);
  return error ? -1 : static_cast<int>(std::distance(begin(fds), end(fds)));
}

bool DaemonProcess::IsAlive() const {
  siginfo_t info{};  // WNOWAIT: leaves the exit status for Stop()
  return pid_ > 0 &&
         ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == 0;
}

bool Eventually(bool (*done)(void*), void* context) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (!done(context)) {
    if (Clock::now() > deadline) return false;
    ::poll(nullptr, 0, 5);
  }
  return true;
}

}  // namespace forebay::testing
