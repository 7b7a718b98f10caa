// SPDX-License-Identifier: Apache-2.0
// A forebayd for one command, with a private folder, socket and swap. All three are removed when the daemon stops.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/forebay/descriptor_store.h"
#include "tools/forebay/private_folder.h"
#include "tools/forebay/process.h"

namespace forebay::tools {

// Returns the path of the forebayd in this program's folder.
//
// Errors  E_OPTION  this folder has no forebayd.
absl::StatusOr<std::string> DaemonPath();

// Quotes a path as a TOML string. The path may contain any bytes.
std::string QuotedPath(std::string_view path);

// "swap.paths=[...]", for --set.
std::string SwapPathsSetting(const std::vector<std::string>& paths);

struct PrivateDaemonOptions {
  // Candidates for the parent of the private folder. The first one that works is used, or else /tmp. Empty ones are skipped.
  std::vector<std::string> runtime_folders;
  std::string dram;  // "2GiB"; empty: what `config` says
  // Swap places: directories, in each of which a private directory is created, or block devices.
  std::vector<std::string> swap;
  std::string swap_size;  // size on each place
  // The daemon makes each job durable when the daemon ends. The places of `swap` are used directly: no private directory is
  // created or removed.
  bool is_kept = false;
  std::string config;                 // a TOML file, or empty
  std::vector<std::string> settings;  // "key=value", override all other settings
  bool verbose = false;               // the daemon logs at level info; false: only warnings
  // Enables StartAgain(): the daemon's swap files keep their names, and its descriptors are retained when it ends.
  bool can_start_again = false;
  // Called with each created folder, so that another process can remove the folder if this one is killed.
  std::function<void(const std::filesystem::path&)> folder_made = {};
};

// Runs a forebayd as a child process. A daemon with can_start_again sends messages as to a service manager and may block on
// them: its owner must call HandleMessages() whenever messages_fd() is readable.
//
// Ownership  The destructor stops the daemon and removes its folders.
// Threads    Start() before the process has a second thread; one at a time.
class PrivateDaemon {
 public:
  // Starts the forebayd in this program's folder and returns once the daemon accepts clients. The daemon's messages go to
  // stderr. The daemon is killed when the calling thread dies.
  //
  // Errors  E_OPTION, E_SWAP_PATH  no folder can be created, or the program is missing.
  //         E_NO_DAEMON            the daemon ended before it was ready; its message says why.
  //         E_TIMEOUT              the daemon was not ready within a minute.
  //         E_INTERRUPTED          one of `abort_fds` became readable.
  static absl::StatusOr<std::unique_ptr<PrivateDaemon>> Start(const PrivateDaemonOptions& options,
                                                              std::span<const int> abort_fds = {});

  PrivateDaemon(const PrivateDaemon&) = delete;
  PrivateDaemon& operator=(const PrivateDaemon&) = delete;
  ~PrivateDaemon();

  const std::string& socket() const { return socket_; }
  Process& process() { return *process_; }

  int messages_fd() const { return store_.socket_fd(); }
  void HandleMessages() { store_.Drain(); }
  // True if the daemon has accepted clients since its last start.
  bool is_ready() const { return store_.is_ready(); }

  // Starts the next daemon after process() has ended, with the same options and the retained descriptors. Returns before the
  // daemon is ready.
  //
  // Errors  those of Process::Start().
  absl::Status StartAgain();

  // Waits until the daemon accepts clients.
  //
  // Errors  E_NO_DAEMON, E_TIMEOUT, E_INTERRUPTED  as for Start().
  absl::Status AwaitReady(std::span<const int> abort_fds);

  // Asks a daemon with is_kept to end, and waits about an hour at most until each job's newest step is durable. A signal from
  // `signal_fd` ends that wait. Returns the wait status.
  int StopDurably(int signal_fd);

  // Asks the daemon to end, and sends SIGKILL if it has not ended within ten seconds. The daemon's jobs end too. Returns the
  // wait status.
  int Stop();

 private:
  PrivateDaemon(PrivateFolder folder, DescriptorStore store);
  absl::Status MakeSwapFolders(const PrivateDaemonOptions& options);
  void SetCommand(const std::string& program, const PrivateDaemonOptions& options);
  absl::Status Launch();
  std::optional<int> AwaitEnd(std::chrono::milliseconds limit);

  PrivateFolder folder_;
  DescriptorStore store_;
  std::vector<PrivateFolder> swap_folders_;
  std::vector<std::string> swap_paths_;
  std::string socket_;
  ProcessOptions command_;
  std::optional<Process> process_;
};

}  // namespace forebay::tools
