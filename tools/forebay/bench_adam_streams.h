// The passes around an update, each beside the memory limit of its own streams.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_adam/gradient.h"
#include "tools/forebay/bench_adam_fixture.h"

namespace forebay::tools {

struct StreamKernel {
  enum class What { kSquareSum, kAdd, kRoundToBf16, kWidenBf16 } what;
  const char* name;
  protocol::DType source;
};

extern const std::vector<StreamKernel> kStreamKernels;

uint64_t MemoryFor(const StreamKernel& kernel, uint64_t params);

absl::StatusOr<BenchResult> MeasureStreamKernel(const AdamFixture& fixture, const BenchCase& what,
                                                const StreamKernel& kernel, int threads);

}  // namespace forebay::tools
