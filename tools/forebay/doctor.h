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
  std::string seen;  // the measured numbers
  std::string fix;   // a command or a line to add; empty: nothing to fix
};

// Sets the instruction set that this process uses: a name that Examine() shows, or "" for the best.
//
// Errors  E_OPTION  the name is unknown; lists the known names.
absl::Status ForceCpuTarget(const std::string& name);

// Tests what this machine can do by trying: takes locks, rings and huge pages, makes direct writes, and releases all of
// them. `folders` are candidates for swap.
std::vector<Finding> Examine(const std::vector<std::string>& folders);

std::string FindingsText(const std::vector<Finding>& findings);
nlohmann::json FindingsJson(const std::vector<Finding>& findings);

}  // namespace forebay::tools
