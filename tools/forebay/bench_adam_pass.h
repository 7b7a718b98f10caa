// SPDX-License-Identifier: Apache-2.0
// Measures one update of synthetic blocks. The result is compared with the speed at which bare loops read and write the same
// arrays.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "tools/forebay/bench_adam_blocks.h"
#include "tools/forebay/bench_adam_measure.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {

// Returns the arrays that a pass reads or writes: gradient, weights and the planes of the states.
ArraySet Streams(const AdamPass& pass, uint64_t params);

// Bytes of each memory that the pass needs.
uint64_t MemoryFor(const AdamPass& pass, uint64_t params);

absl::StatusOr<BenchResult> MeasurePass(const AdamFixture& fixture, const BenchCase& what,
                                        const AdamPass& pass);

}  // namespace forebay::tools
