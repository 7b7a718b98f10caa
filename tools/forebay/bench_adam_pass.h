// One fused pass of an optimizer over synthetic arrays, beside the memory limit of its own streams.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_adam/update_kernel.h"
#include "tools/forebay/bench_adam_fixture.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {

// The arrays of one state format; a new format is one line of kAdamFormats.
struct AdamFormat {
  const char* name;   // as a person types it
  const char* param;  // type of the served parameter
  protocol::StateFormat format;
  protocol::DType grad;
  enum class Beside { kNothing, kRemainder, kMaster } beside;  // the weights
  uint32_t moment_bytes;
  uint32_t scale_group_bytes;  // of each moment; 0: none
};

extern const std::vector<AdamFormat> kAdamFormats;

// LAMB's case is its whole step, three passes over flat arrays, beside the limit of one.
struct AdamPass {
  const AdamFormat* format = nullptr;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  Place place = Place::kInPlace;
  int threads = 1;
  uint64_t partitions = 1;  // of equal size
  Offsets offsets = Offsets::kStaggered;
  enum class Hash { kOff, kOn } hash = Hash::kOff;
  enum class Data { kNormal, kDenormal } data = Data::kNormal;  // second moments
};

// Bytes of each memory that the pass needs.
uint64_t MemoryFor(const AdamPass& pass, uint64_t params);

absl::StatusOr<BenchResult> MeasurePass(const AdamFixture& fixture, const BenchCase& what,
                                        const AdamPass& pass);

}  // namespace forebay::tools
