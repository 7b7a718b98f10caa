// `forebay bench WHAT`: results beside the limits of this machine, measured in the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/forebay/plan.h"

namespace forebay::tools {

struct BenchOptions {
  std::string what;                          // one of BenchNames()
  uint32_t samples = 0;                      // per case; 0: the bench's own number
  uint64_t params = 0;                       // of the synthetic job; 0: the bench's own number
  std::string swap_folder = ".";             // for the cases on swap
  std::vector<std::string> runtime_folders;  // of the private daemon
  std::string driver;                        // copies: as dlopen(3) takes it; empty: NVIDIA's
  std::string only;                          // adam: the cases whose name contains this
  // step, update: "500MiB" or "500MiB,250MiB": bytes a second of swap at most, reads and writes together, of
  // as many paths; empty: one path and no limit. Bench() makes the numbers of it.
  std::string limit_rate;
  std::vector<uint64_t> limit_rates;
  // step, cluster: of a forward and a backward; 0: as long as the update takes, or as the GPUs' rate says.
  uint32_t compute_ms = 0;
  // cluster: the model, but for its --params, and the cluster.
  PlanOptions plan;
  uint32_t workers = 2;    // cluster
  uint64_t blocks = 4096;  // cluster: of a node, at most; then they are larger than the daemon's
  uint32_t ranks = 4;      // cluster: of a node, at most; then several GPUs share one
  bool drain = true;       // cluster: step returns at its decision
  bool in_turn = false;    // cluster: links and GPUs take turns
  std::string staging;     // cluster: "64MiB"; empty: the daemon's default
  uint64_t staging_bytes = 0;                        // Bench() makes it of `staging`
  enum class List { kNo, kNames } list = List::kNo;  // adam: kNames measures nothing
};

std::string BenchNames();  // "adam, cluster, commit, copies, fetch, pipeline, step, swap, update"

// Runs every case of one bench, on a private daemon where it needs one, and prints a line a case:
// JSON as each comes, or a table at the end.
//
// Errors  E_OPTION  no such bench, or none of its cases is meant; names them. Else what the daemon
//                   answers.
absl::Status Bench(const BenchOptions& options, bool as_json);

}  // namespace forebay::tools
