// SPDX-License-Identifier: Apache-2.0
// `forebay explain`: the meaning of each error id and its remedy. docs/reference/troubleshooting.md is generated from it.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace forebay::tools {

struct ExplainOptions {
  std::string id;  // "E_DRAM_LIMIT"; empty: all of them
  bool as_json = false;
};

// Returns the whole explanation of one id, or a table with a line for each id. JSON is a list of {"id", "class" (the Python
// exception), "retryable", "meaning", "remedy", "example", "hint" (the default hint)}.
//
// Errors  kInvalidArgument (E_OPTION)  the id does not exist.
absl::StatusOr<std::string> Explain(const ExplainOptions& options);

}  // namespace forebay::tools
