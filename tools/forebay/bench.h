// `forebay bench WHAT`: figures beside the limits of this machine, measured in the same run.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace forebay::tools {

struct BenchOptions {
  std::string what;               // one of BenchNames()
  uint32_t samples = 0;           // per case; 0: the bench's own number
  uint64_t params = 0;            // of the synthetic job; 0: the bench's own number
  std::string swap_folder = ".";  // for the cases on swap
  std::string runtime_folder;     // of the private daemon
};

std::string BenchNames();  // "fetch, update"

// Runs every case of one bench on a private daemon and prints a line a case: JSON, or a table.
//
// Errors  E_OPTION  no such bench; names them. Else what the daemon answers.
absl::Status Bench(const BenchOptions& options, bool as_json);

}  // namespace forebay::tools
