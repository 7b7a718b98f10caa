// SPDX-License-Identifier: Apache-2.0
// What durable jobs have on swap, read and verified.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace forebay::tools {

enum class ScrubExtent {
  kSlots,   // all that the ledger names is read
  kLedger,  // jobs and steps alone; of a stopped daemon
};

struct ScrubOptions {
  std::vector<std::string> swap;  // directories or block devices, in the daemon's order
  std::string config;             // or the daemon's TOML file
  // "500MiB": bytes a second at most, of a stopped daemon of each path; empty: no limit, or the daemon's choice.
  std::string rate;
  std::string socket;  // of a daemon that runs, where neither swap nor config is given
  ScrubExtent extent = ScrubExtent::kSlots;
};

// A ScrubReport (forebay.capnp): from the daemon that runs, or from the forebayd in this program's folder, which reads
// the volume of a stopped one. Its messages go to stderr. Nothing: it could not read the volume, and has said why.
//
// Errors  E_OPTION  the rate is none, or there is no forebayd. Else those of client::AdminClient::Scrub.
absl::StatusOr<std::optional<nlohmann::ordered_json>> Scrub(const ScrubOptions& options);

std::string ScrubText(const nlohmann::ordered_json& report);

}  // namespace forebay::tools
