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
  // Where the private folder goes: XDG_RUNTIME_DIR; empty or unusable: /tmp.
  std::string runtime_folder;
  std::string dram;  // "2GiB"; empty: what `config` says
  // Directories (a private one is made inside each) or block devices.
  std::vector<std::string> swap;
  std::string swap_size;              // of each
  std::string config;                 // a TOML file, or empty
  std::vector<std::string> settings;  // "key=value", on top of everything
  bool verbose = false;               // its log at level info; else warnings alone
  // Called with each folder that is made, for somebody who removes it where this process cannot.
  std::function<void(const std::filesystem::path&)> folder_made = {};
};

// Ownership  The destructor stops the daemon and removes its folders.
// Threads    Start() before the process has a second thread; one at a time.
class PrivateDaemon {
 public:
  // Starts the forebayd in this program's folder and returns once it accepts clients. Its
  // messages go to stderr. It is killed when the calling thread dies.
  //
  // Errors  E_OPTION, E_SWAP_PATH  a folder or the program is missing.
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

  // SIGTERM, and SIGKILL for one that does not end within ten seconds. Returns the wait status.
  int Stop();

 private:
  explicit PrivateDaemon(PrivateFolder folder);
  absl::Status MakeSwapFolders(const PrivateDaemonOptions& options);
  absl::Status AwaitReady(int notify_fd, std::span<const int> abort_fds);

  PrivateFolder folder_;
  std::vector<PrivateFolder> swap_folders_;
  std::vector<std::string> swap_paths_;
  std::string socket_;
  std::optional<Process> process_;
};

}  // namespace forebay::tools
