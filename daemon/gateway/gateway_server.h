// SPDX-License-Identifier: Apache-2.0
// The service: accepts agents over TLS and gives each principal's sessions their data plane.
#pragma once

#include <kj/async-io.h>

#include "absl/status/status.h"
#include "daemon/gateway/gateway_config.h"

namespace forebay::gateway {

// Serves until SIGTERM or SIGINT. Writes "forebay-gateway ready bind=ADDRESS port=PORT" to stderr once it listens.
//
// Errors  E_CONFIG  a file of the settings cannot be used; E_BUSY  it cannot listen at the address; those of UcxWorker::Create.
absl::Status ServeGateway(const GatewayConfig& config);
// Checks the settings as far as that is possible without listening.
absl::Status CheckGateway(const GatewayConfig& config);

}  // namespace forebay::gateway
