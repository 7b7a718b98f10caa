// SPDX-License-Identifier: Apache-2.0
// A forebayd for one command, with a folder, a socket and swap of its own; all are removed when it
// stops.
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

// The forebayd in this program's folder.
//
// Errors  E_OPTION  there is none.
absl::StatusOr<std::string> DaemonPath();

// A path as a string of TOML, whatever bytes are in it.
std::string QuotedPath(std::string_view path);

// "swap.paths=[...]", for --set.
std::string SwapPathsSetting(const std::vector<std::string>& paths);

struct PrivateDaemonOptions {
  // The private folder goes into the first of these that takes it, or into /tmp. Empty ones are skipped.
  std::vector<std::string> runtime_folders;
  std::string dram;  // "2GiB"; empty: what `config` says
  // Directories (a private one is made inside each) or block devices.
  std::vector<std::string> swap;
  std::string swap_size;  // of each
  // The daemon makes each job durable when it ends, on `swap` as it is: nothing is made inside it, or removed.
  bool is_kept = false;
  std::string config;                 // a TOML file, or empty
  std::vector<std::string> settings;  // "key=value", on top of everything
  bool verbose = false;               // its log at level info; else warnings alone
  // For StartAgain(): its swap files keep their names, and its descriptors are kept when it ends.
  bool can_start_again = false;
  // Called with each folder that is made, for somebody who removes it where this process cannot.
  std::function<void(const std::filesystem::path&)> folder_made = {};
};

// One that can start again waits for its owner, as for a service manager: where its owner waits, and
// messages_fd() is readable, HandleMessages().
//
// Ownership  The destructor stops the daemon and removes its folders.
// Threads    Start() before the process has a second thread; one at a time.
class PrivateDaemon {
 public:
  // Starts the forebayd in this program's folder and returns once it accepts clients. Its
  // messages go to stderr. It is killed when the calling thread dies.
  //
  // Errors  E_OPTION, E_SWAP_PATH  no folder can be made, or the program is missing.
  //         E_NO_DAEMON            it ended before it was ready; it has said why.
  //         E_TIMEOUT              it was not ready within a minute.
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
  // Whether it has accepted clients since it was last started.
  bool is_ready() const { return store_.is_ready(); }

  // Once process() has ended: the next one, as the first was started, with the descriptors that are kept. Returns
  // before it is ready.
  //
  // Errors  of Process::Start().
  absl::Status StartAgain();

  // Returns once it accepts clients, at once where it does.
  //
  // Errors  E_NO_DAEMON, E_TIMEOUT, E_INTERRUPTED  of Start().
  absl::Status AwaitReady(std::span<const int> abort_fds);

  // Asks a kept daemon to end, and waits until each job's newest step is durable, an hour at most. A signal that
  // `signal_fd` has ends that wait. Returns the wait status.
  int StopDurably(int signal_fd);

  // Asks it to end, and sends SIGKILL where it does not within ten seconds. Its jobs end with it. Returns the wait
  // status.
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
