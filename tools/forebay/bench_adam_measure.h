// SPDX-License-Identifier: Apache-2.0
// Memory, worker pools and the measuring function that all cases of `forebay bench adam` share.
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
  std::unique_ptr<BenchMemory> huge;   // huge pages; room for the largest case
  std::unique_ptr<BenchMemory> small;  // 4 KiB pages; room for the largest case
  std::vector<std::unique_ptr<cpu_adam::WorkerPool>> pools;  // pools[i] has i + 1 threads

  cpu_adam::WorkerPool& Pool(int threads) const { return *pools[static_cast<size_t>(threads) - 1]; }
};

// A measured side and its arrays in `huge`.
struct MeasuredSide {
  Sampler run;
  std::vector<BenchStream> streams;
  ArraySet arrays = {};  // the arrays of `streams`; whole runs of kLoopElems elements
  int threads = 1;
  std::vector<BenchLoop> shown = {};
};

// Measures `side` in alternation with the loops of bench_adam_limits.h and with a ping-pong of two threads. The loops go over
// the arrays of `side` and over equal arrays on 4 KiB pages.
absl::StatusOr<BenchResult> MeasureBesideLoops(const AdamFixture& fixture, const BenchCase& what,
                                               MeasuredSide side);

const char* NameOf(protocol::DType type);  // "bf16"

}  // namespace forebay::tools
