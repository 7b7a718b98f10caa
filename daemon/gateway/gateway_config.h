// SPDX-License-Identifier: Apache-2.0
// Settings of the gateway: gateway.toml.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/gateway/gateway_session.h"
#include "protocol/ucx/ucx_worker.h"

namespace forebay::gateway {

inline constexpr uint32_t kSessionsOfPrincipalMax = 64;

// A principal on another node, for whom the gateway acts as a user of this node.
struct Principal {
  std::string name;  // the certificate's common name, or a name in the token file
  uint32_t uid = 0;  // user with the principal's jobs and quotas; never root
  uint32_t sessions_max = kSessionsOfPrincipalMax;
};

struct GatewayConfig {
  std::string bind;  // "10.0.0.1:7700"
  std::string daemon_socket = "/run/forebay/forebay.sock";
  std::string certificate;  // PEM files of the gateway's certificate and key
  std::string key;
  // Set either client_ca or tokens: a client needs a certificate of the authority client_ca, or a token of the file `tokens`.
  std::string client_ca;
  std::string tokens;
  std::chrono::milliseconds keepalive{10000};
  // Time in which a rank whose connection is lost may attach again before its session ends.
  std::chrono::milliseconds session_wait{60000};
  std::string ucx_tls;
  std::string ucx_net_devices;
  ReadPolicy reads = ReadPolicy::kAuto;
  std::map<std::string, Principal, std::less<>> principals;
};

// Errors  E_CONFIG  names file, line and key.
absl::StatusOr<GatewayConfig> LoadGatewayConfig(const std::string& path);

// A secret of the configuration: a file that its owner alone can read.
//
// Errors  E_CONFIG  it cannot be read, or others can read it.
absl::StatusOr<std::string> ReadSecretFile(const std::string& path, std::string_view what);
absl::StatusOr<std::string> ReadTextFile(const std::string& path, std::string_view what);

// Parses lines of "NAME TOKEN" and returns the names by token. Ignores empty lines, and lines that begin with "#".
//
// Errors  E_CONFIG  a line of another form, a token of less than 16 characters.
absl::StatusOr<std::map<std::string, std::string>> ParseTokens(const std::string& text,
                                                               const std::string& path);

// Returns the name that has this token. Returns nothing if no name has it. The time of the comparison does not depend on the
// token.
std::optional<std::string> NameOfToken(const std::map<std::string, std::string>& tokens,
                                       std::string_view token);

}  // namespace forebay::gateway
