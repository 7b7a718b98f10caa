// SPDX-License-Identifier: Apache-2.0
// What the cases of `forebay bench adam` share: memories, pools, and one way to measure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_adam/gradient.h"
#include "cpu_adam/worker_pool.h"
#include "tools/forebay/bench_adam_limits.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {

struct AdamFixture {
  uint64_t params = 0;
  uint32_t samples = 0;
  std::unique_ptr<BenchMemory> huge;                         // both have room for the largest case
  std::unique_ptr<BenchMemory> small;                        // 4 KiB pages
  std::vector<std::unique_ptr<cpu_adam::WorkerPool>> pools;  // of 1 thread, of 2, …, of every core

  cpu_adam::WorkerPool& Pool(int threads) const { return *pools[static_cast<size_t>(threads) - 1]; }
};

// A measured side and its arrays in `huge`.
struct MeasuredSide {
  Sampler run;
  std::vector<BenchStream> streams;
  ArraySet arrays = {};  // that the streams are of; whole runs of kLoopElems elements
  int threads = 1;
  std::vector<BenchLoop> shown = {};
};

// Measures it beside the four loops of bench_adam_limits.h over the same arrays and over such on
// pages of 4 KiB, and a ping-pong of two threads.
absl::StatusOr<BenchResult> MeasureBesideLoops(const AdamFixture& fixture, const BenchCase& what,
                                               MeasuredSide side);

const char* NameOf(protocol::DType type);  // "bf16"

}  // namespace forebay::tools
