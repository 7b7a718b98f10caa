// What the client reads from environment variables, all of it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace forebay::client {

inline constexpr char kDefaultSocket[] = "/run/forebay/forebay.sock";

// `request`, else FOREBAY_SOCKET, else kDefaultSocket.
std::string SocketPath(std::string_view request);

// `request`, else FOREBAY_RUN, else a token of this process alone.
std::string RunToken(std::string_view request);

// `request`, else FOREBAY_DAEMON_WAIT in seconds, else kDaemonWait.
//
// Errors  E_OPTION  the variable is no number of seconds.
absl::StatusOr<Timeout> DaemonWait(std::optional<Timeout> request);

// Whether FOREBAY_DAEMON_WAIT says something.
bool SaysDaemonWait();

// How long an attach waits for a daemon where none answers: as DaemonWait() where one of both says something, else not at
// all.
absl::StatusOr<Timeout> FirstDaemonWait(std::optional<Timeout> request);

// NVTX_INJECTION64_PATH: the library of a tool of NVIDIA's; empty: none.
std::string NvtxTool();

// "pid-PID-START", START in clock ticks since boot: no two processes of one boot have the same.
//
// Source  proc_pid_stat(5), field 22.
std::string ProcessToken();

}  // namespace forebay::client
