// SPDX-License-Identifier: Apache-2.0
// What each error id means and what to do about it: `forebay explain`, and the source of
// docs/reference/troubleshooting.md.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace forebay::tools {

struct ExplainOptions {
  std::string id;  // "E_DRAM_LIMIT"; empty: all of them
  bool as_json = false;
};

// Of one id all that is known, of all ids a line each. As JSON a list of {"id", "class" (of the
// Python package), "retryable", "meaning", "remedy", "example", "hint" (of an error without one of
// its own)}.
//
// Errors  kInvalidArgument (E_OPTION)  there is no such id.
absl::StatusOr<std::string> Explain(const ExplainOptions& options);

}  // namespace forebay::tools
