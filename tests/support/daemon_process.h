// SPDX-License-Identifier: Apache-2.0
// A real forebayd process with its own directory.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::testing {

// A new directory below the working directory (the build tree, where O_DIRECT works). The destructor removes the directory and
// its contents.
class TempDir {
 public:
  TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir();

  const std::string& path() const { return path_; }
  std::string Make(const std::string& name) const;  // makes a directory in this one
  std::string Write(const std::string& name, const std::string& text) const;  // writes a file

 private:
  std::string path_;
};

struct Ended {
  int exit_code = -1;  // -1 if a signal ended the program
  int signal = 0;
  std::string errors;  // stderr of the program
};

// Runs a program until it ends. Kills it after 60 s.
Ended RunProgram(const std::vector<std::string>& arguments);

// A program that runs until it is killed.
//
// Threads  One.
class RunningProgram {
 public:
  // Returns when `sign` appears in the program's stderr, when the program has ended, or after 60 s.
  static std::unique_ptr<RunningProgram> Start(const std::vector<std::string>& arguments,
                                               const std::string& sign);
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;
  ~RunningProgram() { Kill(); }

  pid_t pid() const { return pid_; }
  const std::string& errors() const { return seen_; }  // stderr read so far
  Ended Wait();                                        // waits for the program's end
  void Kill();                                         // SIGKILL

 private:
  RunningProgram() = default;

  pid_t pid_ = -1;
  protocol::UniqueFd errors_;
  std::string seen_;
};

// A function that runs between fork and exec. It may only make system calls.
using Prepare = std::function<void()>;

// Threads  One.
class DaemonProcess {
 public:
  // Setting that starts the daemon without a dram.limit.
  static constexpr char kDefaultDramLimit[] = "dram.limit=default";

  // Starts a daemon with `settings` (key=value). Defaults: memlock best_effort, dram.limit 1GiB. `prepare` runs in the new
  // process before exec.
  //
  // Errors  kInternal  the daemon ended before it was ready; the message has its exit status and stderr.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(
      const std::string& socket, const std::vector<std::string>& settings = {},
      const Prepare& prepare = {});

  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;
  ~DaemonProcess();  // SIGKILL

  pid_t pid() const { return pid_; }
  Ended Stop();  // sends SIGTERM and waits for the end
  void Kill();   // SIGKILL

  int OpenFds() const;   // entries of /proc/PID/fd
  bool IsAlive() const;  // the process has not ended

 private:
  DaemonProcess() = default;

  pid_t pid_ = -1;
  protocol::UniqueFd errors_;
  std::string seen_;  // stderr read so far
};

// Calls `done` until it is true or 30 s have passed; yields the CPU in between.
bool Eventually(bool (*done)(void*), void* context);

template <typename Done>
bool Eventually(Done done) {
  return Eventually([](void* context) { return (*static_cast<Done*>(context))(); }, &done);
}

// Waits until work that changes `count()` has ended: calls it until it has returned the same value 21 times in a row, or for
// 30 s. Returns the last value.
template <typename Count>
int Quiescent(Count count) {
  int last = count();
  int same = 0;
  Eventually([&] {
    const int now = count();
    same = now == last ? same + 1 : 0;
    last = now;
    return same == 20;
  });
  return last;
}

}  // namespace forebay::testing
