// SPDX-License-Identifier: Apache-2.0
// `forebay scrub`: reads and verifies the bytes of durable jobs on swap.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace forebay::tools {

enum class ScrubExtent {
  kSlots,   // reads every slot that the ledger names
  kLedger,  // reads only the jobs and steps in the ledger; the daemon must be stopped
};

struct ScrubOptions {
  std::vector<std::string> swap;  // directories or block devices, in the daemon's order
  std::string config;             // alternatively the daemon's TOML file
  // Limit in bytes a second, "500MiB"; for a stopped daemon the limit of each path. Empty: no limit, or the daemon's choice.
  std::string rate;
  std::string socket;  // a running daemon's; used if swap and config are empty
  ScrubExtent extent = ScrubExtent::kSlots;
};

// Returns a ScrubReport (forebay.capnp) from the running daemon, or from the forebayd in this program's folder, which reads the
// volume of a stopped daemon. Messages of that forebayd go to stderr. Returns nothing if that forebayd could not read the
// volume and has printed why.
//
// Errors  E_OPTION  the rate cannot be parsed, or forebayd does not exist. Else those of client::AdminClient::Scrub.
absl::StatusOr<std::optional<nlohmann::ordered_json>> Scrub(const ScrubOptions& options);

std::string ScrubText(const nlohmann::ordered_json& report);

}  // namespace forebay::tools
