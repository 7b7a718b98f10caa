// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/os/pidfd.h"
#include "protocol/os/status_macros.h"

namespace forebay::tools {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;
using Clock = std::chrono::steady_clock;

constexpr int kPassedFdsStart = 3;  // SD_LISTEN_FDS_START
constexpr std::string_view kListenPid = "LISTEN_PID=";
constexpr size_t kPidDigitsMax = 10;

std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Returns this process's environment. Variables of `extra` replace those of the same name.
std::vector<std::string> Environment(const std::vector<std::string>& extra) {
  std::vector<std::string> all = extra;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view name_and_value(*entry);
    const std::string_view name = name_and_value.substr(0, name_and_value.find('=') + 1);
    bool replaced = false;
    for (const std::string& mine : extra) replaced = replaced || mine.starts_with(name);
    if (!replaced) all.emplace_back(name_and_value);
  }
  return all;
}

// The environment variables that sd_listen_fds(3) reads. The child writes its own process id behind LISTEN_PID=.
std::vector<std::string> ListenVariables(const std::vector<PassedDescriptor>& passed) {
  const auto name = [](std::string* out, const PassedDescriptor& one) { *out += one.name; };
  std::string pid(kListenPid);
  pid.append(kPidDigitsMax, '\0');
  return {std::move(pid), absl::StrCat("LISTEN_FDS=", passed.size()),
          absl::StrCat("LISTEN_FDNAMES=", absl::StrJoin(passed, ":", name))};
}

// Memory prepared for the child before fork, because the child must not allocate between fork and exec.
struct Launch {
  std::vector<char*> arguments;
  std::vector<char*> environment;
  std::vector<int> passed_fds = {};
  char* listen_pid = nullptr;  // the child writes its id here; null: no descriptor is passed
  int errno_fd = -1;           // the child writes the errno of a failed exec here
};

// Runs in the child. First moves the descriptors above the target numbers, so that dup2 to kPassedFdsStart and the following
// numbers overwrites none of them. Returns 0 or an errno.
int PassDescriptors(Launch& launch) {
  const int end = kPassedFdsStart + static_cast<int>(launch.passed_fds.size());
  for (int& fd : launch.passed_fds) {
    if ((fd = ::fcntl(fd, F_DUPFD_CLOEXEC, end)) < 0) return errno;
  }
  const int errno_fd = ::fcntl(launch.errno_fd, F_DUPFD_CLOEXEC, end);
  if (errno_fd < 0) return errno;
  launch.errno_fd = errno_fd;
  for (int number = kPassedFdsStart; number < end; ++number) {
    const int fd = launch.passed_fds[static_cast<size_t>(number - kPassedFdsStart)];
    if (::dup2(fd, number) < 0) return errno;
  }
  *std::to_chars(launch.listen_pid, launch.listen_pid + kPidDigitsMax, ::getpid()).ptr = '\0';
  return 0;
}

// Runs in the child between fork and exec, with async-signal-safe calls only. Returns the errno of the call that failed.
int BecomeProgram(const ProcessOptions& options, pid_t parent, Launch& launch) {
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  if (::getppid() != parent) ::_exit(127);  // the parent died before prctl
  if (options.own_group && ::setpgid(0, 0) != 0) return errno;
  if (options.group.has_value() && ::setpgid(0, *options.group) != 0) return errno;
  if (options.null_stdin) {
    const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null < 0 || ::dup2(null, STDIN_FILENO) < 0) return errno;
  }
  if (options.stdin_fd.has_value() && ::dup2(*options.stdin_fd, STDIN_FILENO) < 0) return errno;
  if (options.stdout_fd.has_value() && ::dup2(*options.stdout_fd, STDOUT_FILENO) < 0) return errno;
  if (options.stderr_fd.has_value() && ::dup2(*options.stderr_fd, STDERR_FILENO) < 0) return errno;
  if (options.signal_mask.has_value()) {
    ::sigprocmask(SIG_SETMASK, &*options.signal_mask, nullptr);
  }
  if (launch.listen_pid != nullptr) {
    if (const int error = PassDescriptors(launch); error != 0) return error;
  }
  ::execvpe(launch.arguments[0], launch.arguments.data(), launch.environment.data());
  return errno;
}

// Returns the ids of this process's children, including zombies.
std::vector<pid_t> Children() {
  std::vector<pid_t> children;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(::opendir("/proc"), ::closedir);
  if (proc == nullptr) return children;
  while (const dirent* entry = ::readdir(proc.get())) {
    const int pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
    std::string line;
    std::getline(stat, line);
    const size_t name_end = line.rfind(')');  // "PID (NAME) STATE PPID ..."
    if (name_end == std::string::npos || name_end + 4 > line.size()) continue;
    if (std::atoi(line.c_str() + name_end + 4) == ::getpid()) children.push_back(pid);
  }
  return children;
}

}  // namespace

Process::Process(pid_t pid, UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pidfd_(std::move(other.pidfd_)),
      status_(std::exchange(other.status_, std::nullopt)) {}

Process::~Process() {
  if (pid_ < 0 || status_.has_value()) return;
  Signal(SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

absl::StatusOr<Process> Process::Start(const ProcessOptions& options) {
  std::vector<std::string> words = options.arguments;
  std::vector<std::string> added = options.environment;
  if (!options.passed.empty()) {
    for (std::string& variable : ListenVariables(options.passed)) {
      added.push_back(std::move(variable));
    }
  }
  std::vector<std::string> environment = Environment(added);
  Launch launch{.arguments = Pointers(words), .environment = Pointers(environment)};
  for (const PassedDescriptor& one : options.passed) launch.passed_fds.push_back(one.fd);
  for (std::string& variable : environment) {
    if (!options.passed.empty() && variable.starts_with(kListenPid)) {
      launch.listen_pid = variable.data() + kListenPid.size();
    }
  }
  // The pipe carries the errno of a failed exec. A successful exec closes it.
  ASSIGN_OR_RETURN(Pipe failure, MakePipe());
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return MakeError(ErrorId::kLimit, ErrnoText("fork", errno));
  if (pid == 0) {
    launch.errno_fd = failure.write_end.get();
    const int error = BecomeProgram(options, parent, launch);
    const ssize_t sent = ::write(launch.errno_fd, &error, sizeof(error));
    ::_exit(sent == sizeof(error) ? 127 : 126);
  }
  failure.write_end.Reset();
  Process process(pid, protocol::OpenPidfd(pid));
  int error = 0;
  if (::read(failure.read_end.get(), &error, sizeof(error)) == sizeof(error)) {
    return MakeError(
        ErrorId::kOption, ErrnoText(absl::StrCat("execute ", words[0]), error),
        "name a program that is there and may be executed: its path, or its name where "
        "PATH has it");
  }
  return process;
}

void Process::Signal(int number) const {
  if (!status_.has_value()) ::kill(pid_, number);
}

std::optional<int> Process::WaitFor(std::chrono::milliseconds limit) {
  if (status_.has_value()) return status_;
  pollfd watched{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  const Clock::time_point end = Clock::now() + limit;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    const int ready = ::poll(&watched, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (ready > 0) break;
    if (ready == 0) return std::nullopt;
  }
  int status = 0;
  if (::waitpid(pid_, &status, 0) == pid_) status_ = status;
  return status_;
}

absl::StatusOr<Pipe> MakePipe() {
  std::array<int, 2> ends;
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    return MakeError(ErrorId::kLimit, ErrnoText("pipe", errno));
  }
  return Pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

ssize_t ReadSome(int fd, std::string& text) {
  std::array<char, 4096> bytes;
  ssize_t got = -1;
  do {
    got = ::read(fd, bytes.data(), bytes.size());
  } while (got < 0 && errno == EINTR);
  if (got > 0) text.append(bytes.data(), static_cast<size_t>(got));
  return got;
}

std::optional<signalfd_siginfo> ReadSignal(int signal_fd) {
  signalfd_siginfo info;
  if (::read(signal_fd, &info, sizeof(info)) != sizeof(info)) return std::nullopt;
  return info;
}

protocol::UniqueFd CatchForwardedSignals(sigset_t* before) {
  sigset_t forwarded;
  sigemptyset(&forwarded);
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2}) {
    sigaddset(&forwarded, number);
  }
  ::sigprocmask(SIG_BLOCK, &forwarded, before);
  return protocol::UniqueFd(::signalfd(-1, &forwarded, SFD_CLOEXEC | SFD_NONBLOCK));
}

int ShellStatus(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string DescribeWaitStatus(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    const int number = WTERMSIG(wait_status);
    return absl::StrCat("signal ", number, " (", ::strsignal(number), ")");
  }
  return absl::StrCat("exit status ", WEXITSTATUS(wait_status));
}

void EndDescendants(pid_t spared, std::chrono::milliseconds grace,
                    const std::function<void()>& on_wait) {
  const Clock::time_point hard = Clock::now() + grace;
  for (bool asked = false;; asked = true) {
    std::vector<pid_t> left;
    for (const pid_t child : Children()) {
      if (child != spared && ::waitpid(child, nullptr, WNOHANG) == 0) left.push_back(child);
    }
    if (left.empty()) return;
    const bool kill = Clock::now() >= hard;
    for (const pid_t child : left) {
      if (kill || !asked) ::kill(child, kill ? SIGKILL : SIGTERM);
    }
    // Waits until a child ends, at most 20 ms. Orphans of a dead child become children of this process only at its death.
    const UniqueFd pidfd = protocol::OpenPidfd(left.front());
    pollfd watched{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
    ::poll(&watched, 1, 20);
    on_wait();
  }
}

}  // namespace forebay::tools
