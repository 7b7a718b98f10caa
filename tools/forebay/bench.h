// `forebay bench WHAT`: results beside the limits of this machine, measured in the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace forebay::tools {

struct BenchOptions {
  std::string what;               // one of BenchNames()
  uint32_t samples = 0;           // per case; 0: the bench's own number
  uint64_t params = 0;            // of the synthetic job; 0: the bench's own number
  std::string swap_folder = ".";  // for the cases on swap
  std::string runtime_folder;     // of the private daemon
  std::string driver;             // copies: as dlopen(3) takes it; empty: NVIDIA's
  std::string only;               // adam: the cases whose name contains this
  // step, update: "500MiB" or "500MiB,250MiB": bytes a second of swap at most, reads and writes together, of
  // as many paths; empty: one path and no limit. Bench() makes the numbers of it.
  std::string limit_rate;
  std::vector<uint64_t> limit_rates;
  uint32_t compute_ms = 0;  // step: of a forward and a backward; 0: as long as the update takes
  enum class List { kNo, kNames } list = List::kNo;  // adam: kNames measures nothing
};

std::string BenchNames();  // "adam, commit, copies, fetch, pipeline, step, swap, update"

// Runs every case of one bench, on a private daemon where it needs one, and prints a line a case:
// JSON as each comes, or a table at the end.
//
// Errors  E_OPTION  no such bench, or none of its cases is meant; names them. Else what the daemon
//                   answers.
absl::Status Bench(const BenchOptions& options, bool as_json);

}  // namespace forebay::tools
