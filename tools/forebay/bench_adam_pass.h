// One update of an optimizer over synthetic blocks, as the daemon's workers do it, beside the memory
// limit of its own streams.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/optimizer.h"
#include "tools/forebay/bench_adam_fixture.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {

// Gradients have the type of the weights, as those of one rank. LAMB's case is its whole step, both
// passes over all blocks, beside the limit of one.
struct AdamPass {
  protocol::StateFormat format = protocol::StateFormat::kExact;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  int threads = 1;
  uint64_t parameters = 1;  // of equal size
  // kOff: resident blocks. kOn: blocks that go to disk, with their checksums.
  enum class Hash { kOff, kOn } hash = Hash::kOff;
  enum class Data { kNormal, kDenormal } data = Data::kNormal;  // second moments
};

// Bytes of each memory that the pass needs.
uint64_t MemoryFor(const AdamPass& pass, uint64_t params);

absl::StatusOr<BenchResult> MeasurePass(const AdamFixture& fixture, const BenchCase& what,
                                        const AdamPass& pass);

}  // namespace forebay::tools
