// SPDX-License-Identifier: Apache-2.0
// One update of synthetic blocks beside the memory limit of its own streams.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "tools/forebay/bench_adam_blocks.h"
#include "tools/forebay/bench_adam_measure.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {

// The arrays that a pass reads or writes: gradient, weights, planes.
ArraySet Streams(const AdamPass& pass, uint64_t params);

// Bytes of each memory that the pass needs.
uint64_t MemoryFor(const AdamPass& pass, uint64_t params);

absl::StatusOr<BenchResult> MeasurePass(const AdamFixture& fixture, const BenchCase& what,
                                        const AdamPass& pass);

}  // namespace forebay::tools
