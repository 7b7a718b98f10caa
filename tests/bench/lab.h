// SPDX-License-Identifier: Apache-2.0
// Benches that `forebay-bench` has in addition to those of `forebay bench`.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/plan.h"

namespace forebay::tools {

struct ClusterBenchOptions {
  PlanOptions plan;  // the model without --params, and the cluster
  uint32_t workers = 2;
  uint64_t blocks = 4096;  // most blocks of a node; larger models get larger blocks
  uint32_t ranks = 4;      // most ranks of a node; with more GPUs several share a rank
  bool drain = true;       // the step call returns at its decision
  bool in_turn = false;    // links and GPUs take turns
  std::string staging;     // "64MiB"; empty: the daemon's default
};

absl::Status BenchCluster(const BenchOptions& options, const ClusterBenchOptions& asked,
                          const Report& report);
absl::Status BenchCommit(const BenchOptions& options, const Report& report);
absl::Status BenchFetch(const BenchOptions& options, const Report& report);
absl::Status BenchPipeline(const BenchOptions& options, const Report& report);
absl::Status BenchUpdate(const BenchOptions& options, const Report& report);

}  // namespace forebay::tools
