// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_adam_gradients.h"

#include <algorithm>
#include <chrono>
#include <span>

#include "daemon/exec/block_tasks.h"
#include "protocol/os/check.h"
#include "protocol/units.h"
#include "tools/forebay/bench_workers.h"

namespace forebay::tools {
namespace {

using protocol::DType;
using Access = StreamShape::Access;
using Clock = std::chrono::steady_clock;

// Type of the sum's elements. The gradient of a single rank is its own sum and has the type of the source.
DType SumTypeOf(const GradientTask& task) {
  return task.ranks == 1 ? task.source : DType::kFloat32;
}

// Shapes of the source arrays, followed by the shape of the sum.
std::vector<StreamShape> ShapesOf(const GradientTask& task) {
  const auto shape = [](DType type, Access access) {
    return StreamShape{static_cast<uint32_t>(protocol::SizeBytes(type) * kStreamGroupElems),
                       access};
  };
  std::vector<StreamShape> shapes(task.ranks, shape(task.source, Access::kRead));
  shapes.push_back(shape(SumTypeOf(task), task.ranks == 0 ? Access::kRead : Access::kWrite));
  return shapes;
}

ArraySet ArraysOf(const GradientTask& task, uint64_t params) {
  return {.shapes = ShapesOf(task), .elems = protocol::RoundUp(params, kLoopElems)};
}

// Runs the task over one range of elements. All values in the arrays are 0.125, so that no value is rejected as not finite.
void RunPart(const GradientTask& task, const std::vector<BenchStream>& streams,
             daemon::ElemRange range) {
  const BenchStream& sum = streams.back();
  if (task.ranks == 0) {
    FOREBAY_CHECK(
        daemon::RunSumGradient(protocol::DType::kFloat32, range, {sum.from, sum.bytes}).finite());
    return;
  }
  const daemon::AddGradients action{
      .dtype = task.source, .sum_dtype = SumTypeOf(task), .assign = true};
  std::vector<std::span<const std::byte>> sources;
  for (size_t i = 0; i < task.ranks; ++i) sources.emplace_back(streams[i].from, streams[i].bytes);
  const daemon::AddedGradients added =
      daemon::RunAddGradients(action, range, sources, {sum.to, sum.bytes});
  FOREBAY_CHECK(added.culprit == 0);
}

void PutData(DType type, uint64_t n, std::byte* array) {
  if (type == DType::kFloat32) {
    std::fill_n(reinterpret_cast<float*>(array), n, 0.125f);
    return;
  }
  const uint16_t eighth = type == DType::kBFloat16 ? 0x3E00 : 0x3000;
  std::fill_n(reinterpret_cast<uint16_t*>(array), n, eighth);
}

}  // namespace

const std::vector<GradientTask> kGradientTasks = {
    {0, DType::kFloat32},  {1, DType::kBFloat16}, {1, DType::kFloat32},
    {2, DType::kBFloat16}, {2, DType::kFloat32},  {8, DType::kBFloat16},
};

uint64_t MemoryFor(const GradientTask& task, uint64_t params) {
  return BenchMemory::BytesFor(ArraysOf(task, params));
}

absl::StatusOr<BenchResult> MeasureGradientTask(const AdamFixture& fixture, const BenchCase& what,
                                                const GradientTask& task, int threads) {
  const ArraySet arrays = ArraysOf(task, fixture.params);
  const std::vector<BenchStream> streams = fixture.huge->Allocate(arrays);
  for (size_t i = 0; i < streams.size(); ++i) {
    const DType type = i < task.ranks ? task.source : SumTypeOf(task);
    PutData(type, arrays.elems, streams[i].from != nullptr ? streams[i].from : streams[i].to);
  }
  const PassBytes bytes = BytesOf(ShapesOf(task), fixture.params);
  const auto run = [&]() -> absl::StatusOr<Sample> {
    const auto began = Clock::now();
    RunOnParts(fixture.Pool(threads), fixture.params,
               [&](daemon::ElemRange part) { RunPart(task, streams, part); });
    const std::chrono::duration<double> took = Clock::now() - began;
    return Sample{
        .value = static_cast<double>(bytes.read + bytes.written) / took.count() / protocol::kGb,
        .bytes_read = bytes.read,
        .bytes_written = bytes.written};
  };
  return MeasureBesideLoops(fixture, what,
                            {.run = run, .streams = streams, .arrays = arrays, .threads = threads});
}

}  // namespace forebay::tools
