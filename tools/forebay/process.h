// SPDX-License-Identifier: Apache-2.0
// Starts child processes and waits for them by descriptor. No child outlives its owner.
#pragma once

#include <signal.h>
#include <sys/signalfd.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::tools {

// A descriptor that is passed to a child. The descriptor is borrowed.
struct PassedDescriptor {
  std::string name;
  int fd = -1;
};

struct ProcessOptions {
  std::vector<std::string> arguments;    // the first one is looked up in PATH
  std::vector<std::string> environment;  // "NAME=value", on top of this process's own
  bool own_group = false;                // the terminal's signals do not reach the child
  std::optional<pid_t> group = {};       // a process group of this session to join
  bool null_stdin = false;
  // Descriptors that replace this process's own in the child.
  std::optional<int> stdin_fd = {};
  std::optional<int> stdout_fd = {};
  std::optional<int> stderr_fd = {};
  // Descriptors that the child gets from number 3 on. The variables LISTEN_* name them for sd_listen_fds(3).
  std::vector<PassedDescriptor> passed = {};
  std::optional<sigset_t> signal_mask;  // the child's; nullopt: this thread's mask
};

// A child process. It gets SIGKILL when the thread that started it dies.
//
// Ownership  The destructor kills and reaps a child that still lives.
// Threads    One at a time.
class Process {
 public:
  // Errors  E_OPTION  the program cannot be executed; names it and the errno.
  //         E_LIMIT   a limit on processes or descriptors is reached.
  static absl::StatusOr<Process> Start(const ProcessOptions& options);

  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  ~Process();

  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }  // readable once the child has ended
  void Signal(int number) const;              // no effect once the child has been reaped

  // Waits up to `limit` for the child's end and returns its wait status. nullopt: the child still runs.
  std::optional<int> WaitFor(std::chrono::milliseconds limit);

 private:
  Process(pid_t pid, protocol::UniqueFd pidfd);

  pid_t pid_;
  protocol::UniqueFd pidfd_;
  std::optional<int> status_;
};

struct Pipe {
  protocol::UniqueFd read_end;
  protocol::UniqueFd write_end;
};

// Errors  E_LIMIT  a limit on descriptors is reached.
absl::StatusOr<Pipe> MakePipe();

// Appends the bytes that read(2) returns to `text`. Returns its result; repeats the call after EINTR.
ssize_t ReadSome(int fd, std::string& text);

// Blocks the signals that a wrapper command passes on to its child and returns a signalfd for them. The signalfd is invalid if
// it cannot be created; errno says why. `before` gets the previous mask.
protocol::UniqueFd CatchForwardedSignals(sigset_t* before = nullptr);

// Reads the next signal from a signalfd. Returns nothing if none is pending.
std::optional<signalfd_siginfo> ReadSignal(int signal_fd);

// Exit statuses of a wrapper command for its own failures.
inline constexpr int kFailed = 1;
inline constexpr int kNotFound = 127;  // the status of shells if a command cannot be executed

// The time between SIGTERM and SIGKILL for processes that a command has left running.
inline constexpr std::chrono::milliseconds kLeftOverGrace(3000);

// Converts a wait status to the exit status that a shell reports: 128 plus the number for a signal.
int ShellStatus(int wait_status);

// Describes a wait status: "exit status 3", "signal 9 (Killed)".
std::string DescribeWaitStatus(int wait_status);

// Ends and reaps all descendants of this process except `spared` and its children. Sends SIGTERM first, and SIGKILL after
// `grace`. This process must be a subreaper (PR_SET_CHILD_SUBREAPER), so that no descendant escapes. `on_wait` is called at
// least every 20 ms.
void EndDescendants(
    pid_t spared, std::chrono::milliseconds grace, const std::function<void()>& on_wait = [] {});

}  // namespace forebay::tools
