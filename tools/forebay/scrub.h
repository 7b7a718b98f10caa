// What durable jobs have on swap, read and verified.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace forebay::tools {

struct ScrubOptions {
  std::vector<std::string> swap;  // directories or block devices, in the daemon's order
  std::string config;             // or the daemon's TOML file
  std::string rate;               // "500MiB", bytes a second of each path at most; empty: no limit
};

// A ScrubReport (forebay.capnp), from the forebayd in this program's folder, which reads the volume of a stopped
// daemon. Its messages go to stderr. Nothing: it could not read the volume, and has said why.
//
// Errors  E_OPTION  no path is named, or there is no forebayd.
absl::StatusOr<std::optional<nlohmann::ordered_json>> Scrub(const ScrubOptions& options);

std::string ScrubText(const nlohmann::ordered_json& report);

}  // namespace forebay::tools
