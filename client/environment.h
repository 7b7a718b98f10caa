// SPDX-License-Identifier: Apache-2.0
// Reads every environment variable that the client uses. An empty variable counts as unset.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace forebay::client {

inline constexpr char kDefaultSocket[] = "/run/forebay/forebay.sock";

// Returns `request`, or if empty FOREBAY_SOCKET, or if unset kDefaultSocket.
std::string SocketPath(std::string_view request);

// Returns `request`, or if empty FOREBAY_RUN, or if unset a token of this process alone.
std::string RunToken(std::string_view request);

// Returns `request`, or if not set FOREBAY_DAEMON_WAIT in seconds, or if unset kDaemonWait.
//
// Errors  E_OPTION  the variable is no number of seconds.
absl::StatusOr<Timeout> DaemonWait(std::optional<Timeout> request);

// Returns whether FOREBAY_DAEMON_WAIT is set.
bool SaysDaemonWait();

// Time that an attach waits for a daemon if none answers: DaemonWait() if `request` or FOREBAY_DAEMON_WAIT is set, else 0.
absl::StatusOr<Timeout> FirstDaemonWait(std::optional<Timeout> request);

// FOREBAY_GATEWAY: path of the program forebay-gateway. Empty if unset: the client searches for the program.
std::string GatewayProgram();
// FOREBAY_REMOTE, or if unset /etc/forebay/remote: the folder of the address and credentials for a gateway on another node.
std::string RemoteFolder();
// Folders of PATH.
std::vector<std::string> ProgramFolders();
// Environment of forebay-gateway as an agent: all variables of this process, UCX_LOG_LEVEL=fatal unless UCX_LOG_LEVEL is set,
// and UCX_WARN_UNUSED_ENV_VARS=n.
std::vector<std::string> AgentEnvironment();

// NVTX_INJECTION64_PATH: path of the library of an NVIDIA tool. Empty if unset.
std::string NvtxTool();

// "pid-PID-START", START in clock ticks since boot: no two processes of one boot have the same.
//
// Source  proc_pid_stat(5), field 22.
std::string ProcessToken();

}  // namespace forebay::client
