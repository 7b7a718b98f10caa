// SPDX-License-Identifier: Apache-2.0
// Measures the daemon's tasks that add or copy gradients. Each result is compared with the speed at which bare loops read
// and write the same arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/dtype.h"
#include "tools/forebay/bench_adam_measure.h"

namespace forebay::tools {

// One task over gradients. ranks > 1: adds the gradients of `ranks` ranks. ranks == 1: copies one gradient. ranks == 0: sums
// the squares of an existing sum.
struct GradientTask {
  size_t ranks = 0;
  protocol::DType source = protocol::DType::kFloat32;
};

extern const std::vector<GradientTask> kGradientTasks;

uint64_t MemoryFor(const GradientTask& task, uint64_t params);

absl::StatusOr<BenchResult> MeasureGradientTask(const AdamFixture& fixture, const BenchCase& what,
                                                const GradientTask& task, int threads);

}  // namespace forebay::tools
