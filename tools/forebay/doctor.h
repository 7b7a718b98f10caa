// SPDX-License-Identifier: Apache-2.0
// `forebay doctor`: what this machine offers Forebay, and the line that fixes what is missing.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace forebay::tools {

enum class CheckResult { kPass, kWarn, kFail };

struct Finding {
  std::string what;  // "memlock"
  CheckResult result = CheckResult::kPass;
  std::string seen;  // the numbers
  std::string fix;   // a command or a line to add; empty where nothing is to be fixed
};

// The instruction set that this process uses: a name that Examine() shows, or "" for the best.
//
// Errors  E_OPTION  not one of them; names them.
absl::Status ForceCpuTarget(const std::string& name);

// Probes by trying: locks, rings, direct writes and huge pages are made and given back. `folders`
// are candidates for swap.
std::vector<Finding> Examine(const std::vector<std::string>& folders);

std::string FindingsText(const std::vector<Finding>& findings);
nlohmann::json FindingsJson(const std::vector<Finding>& findings);

}  // namespace forebay::tools
