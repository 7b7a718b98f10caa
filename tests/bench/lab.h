// SPDX-License-Identifier: Apache-2.0
// The benches that `forebay-bench` has beside those of `forebay bench`.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/plan.h"

namespace forebay::tools {

struct ClusterBenchOptions {
  PlanOptions plan;  // the model, but for its --params, and the cluster
  uint32_t workers = 2;
  uint64_t blocks = 4096;  // of a node, at most; then they are larger than the daemon's
  uint32_t ranks = 4;      // of a node, at most; then several GPUs share one
  bool drain = true;       // step returns at its decision
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
