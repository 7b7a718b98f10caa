// SPDX-License-Identifier: Apache-2.0
// Certificates and keys from files.
#pragma once

#include <kj/compat/tls.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/gateway/gateway_config.h"

namespace forebay::gateway {

// `timer`: for handshakes that take too long; null if nothing is accepted.
//
// Errors  E_CONFIG  names the file that is no certificate or key, whose time is over or has not begun, or that others can
//                   read.
absl::StatusOr<kj::Own<kj::TlsContext>> MakeServerTls(const GatewayConfig& config,
                                                      kj::Timer* timer);

// Credentials of an agent, from the files of a folder.
struct AgentCredentials {
  std::string ca;           // PEM: who signs gateways
  std::string certificate;  // PEM; empty: a token instead
  std::string key;
  std::string token;
};

// `ca.pem`, and `cert.pem` with `key.pem` or `token`. Errors as MakeServerTls.
absl::StatusOr<AgentCredentials> LoadCredentials(const std::string& folder);
absl::StatusOr<kj::Own<kj::TlsContext>> MakeClientTls(const AgentCredentials& credentials);

}  // namespace forebay::gateway
