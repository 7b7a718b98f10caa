// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_adam_measure.h"

#include <utility>

#include "cpu_adam/targets.h"
#include "protocol/os/status_macros.h"

namespace forebay::tools {

using protocol::DType;

absl::StatusOr<BenchResult> MeasureBesideLoops(const AdamFixture& fixture, const BenchCase& what,
                                               MeasuredSide side) {
  std::vector<BenchLoop> loops = LimitLoops(fixture.Pool(side.threads), side.arrays.elems,
                                            side.streams, fixture.small->Allocate(side.arrays));
  for (BenchLoop& shown : side.shown) loops.push_back(std::move(shown));
  if (fixture.pools.size() >= 2) {
    loops.push_back(
        {"ping_pong_ns", BenchLoop::Role::kShown, [&fixture]() -> absl::StatusOr<Sample> {
           return Sample{.value = PingPongNs(fixture.Pool(2))};
         }});
  }
  ASSIGN_OR_RETURN(BenchResult result, MeasureCase(what, fixture.samples, side.run, loops));
  const PassBytes bytes = BytesOf(side.arrays.shapes, kStreamGroupElems);
  result.more["ns_per_elem"] = static_cast<double>(bytes.read + bytes.written) /
                               static_cast<double>(kStreamGroupElems) / result.value;
  result.more["threads"] = side.threads;
  result.more["target"] = cpu_adam::ChosenTarget();
  result.more["limit_target"] = LimitLoopsTarget();
  result.more["huge_share"] = fixture.huge->huge_share();
  return result;
}

const char* NameOf(DType type) {
  switch (type) {
    case DType::kFloat32:
      return "fp32";
    case DType::kBFloat16:
      return "bf16";
    default:  // kFloat16
      return "fp16";
  }
}

}  // namespace forebay::tools
