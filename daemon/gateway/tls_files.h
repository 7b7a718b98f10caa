// SPDX-License-Identifier: Apache-2.0
// Certificates and keys from files.
#pragma once

#include <kj/compat/tls.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/gateway/gateway_config.h"

namespace forebay::gateway {

// Makes the TLS context of a gateway. `timer`: timer for the limit of handshakes; null if no connections are accepted.
//
// Errors  E_CONFIG  names the file that is no certificate or key, whose time is over or has not begun, or that others can
//                   read.
absl::StatusOr<kj::Own<kj::TlsContext>> MakeServerTls(const GatewayConfig& config,
                                                      kj::Timer* timer);

// Credentials of an agent, from the files of a folder.
struct AgentCredentials {
  std::string ca;           // PEM: authority that signs certificates of gateways
  std::string certificate;  // PEM; empty if the agent has a token instead
  std::string key;
  std::string token;
};

// Reads `ca.pem`, and either `cert.pem` with `key.pem` or `token`. Errors are those of MakeServerTls.
absl::StatusOr<AgentCredentials> LoadCredentials(const std::string& folder);
absl::StatusOr<kj::Own<kj::TlsContext>> MakeClientTls(const AgentCredentials& credentials);

}  // namespace forebay::gateway
