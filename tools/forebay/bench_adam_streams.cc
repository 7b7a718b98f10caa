#include "tools/forebay/bench_adam_streams.h"

#include <algorithm>
#include <chrono>

#include "cpu_adam/square_sum.h"
#include "cpu_adam/stream_kernel.h"
#include "protocol/dtype.h"
#include "protocol/os/check.h"
#include "protocol/units.h"
#include "tools/forebay/bench_workers.h"

namespace forebay::tools {
namespace {

using protocol::DType;
using Access = StreamShape::Access;
using Clock = std::chrono::steady_clock;
using What = StreamKernel::What;

constexpr double kGiga = 1e9;

std::vector<StreamShape> ShapesOf(const StreamKernel& kernel) {
  const auto shape = [](uint64_t elem_bytes, Access access) {
    return StreamShape{static_cast<uint32_t>(elem_bytes * kStreamGroupElems), access};
  };
  const StreamShape source = shape(protocol::SizeBytes(kernel.source), Access::kRead);
  switch (kernel.what) {
    case What::kSquareSum:
      return {source};
    case What::kAdd:
      return {source, shape(4, Access::kUpdate)};
    case What::kRoundToBf16:
      return {source, shape(2, Access::kWrite)};
    case What::kWidenBf16:
      return {source, shape(4, Access::kWrite)};
  }
  return {};
}

ArraySet ArraysOf(const StreamKernel& kernel, uint64_t params) {
  return {.shapes = ShapesOf(kernel), .elems = protocol::RoundUp(params, kLoopElems)};
}

// Elements `begin` to `begin + n` of the kernel's arrays, whose values are all 0.125.
void RunPart(const StreamKernel& kernel, const std::vector<BenchStream>& streams, uint64_t begin,
             uint64_t n) {
  const std::byte* const from = streams[0].from + begin * protocol::SizeBytes(kernel.source);
  switch (kernel.what) {
    case What::kSquareSum:
      FOREBAY_CHECK(cpu_adam::SumSquaresAndFinite(n, {from, kernel.source}).finite());
      return;
    case What::kAdd:
      return cpu_adam::AddGradient(n, {from, kernel.source}, cpu_adam::AddMode::kAdd,
                                   reinterpret_cast<float*>(streams[1].to) + begin);
    case What::kRoundToBf16:
      return cpu_adam::RoundToBf16(n, reinterpret_cast<const float*>(from),
                                   reinterpret_cast<uint16_t*>(streams[1].to) + begin);
    case What::kWidenBf16:
      return cpu_adam::WidenBf16(n, reinterpret_cast<const uint16_t*>(from),
                                 reinterpret_cast<float*>(streams[1].to) + begin);
  }
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

const std::vector<StreamKernel> kStreamKernels = {
    {What::kSquareSum, "square_sum", DType::kBFloat16},
    {What::kSquareSum, "square_sum", DType::kFloat32},
    {What::kAdd, "add", DType::kBFloat16},
    {What::kAdd, "add", DType::kFloat32},
    {What::kRoundToBf16, "round_to_bf16", DType::kFloat32},
    {What::kWidenBf16, "widen_bf16", DType::kBFloat16},
};

uint64_t MemoryFor(const StreamKernel& kernel, uint64_t params) {
  return BenchMemory::BytesFor(ArraysOf(kernel, params));
}

absl::StatusOr<BenchResult> MeasureStreamKernel(const AdamFixture& fixture, const BenchCase& what,
                                                const StreamKernel& kernel, int threads) {
  const ArraySet arrays = ArraysOf(kernel, fixture.params);
  const std::vector<BenchStream> streams = fixture.huge->Allocate(arrays);
  PutData(kernel.source, arrays.elems, streams[0].from);
  if (kernel.what == What::kAdd) PutData(DType::kFloat32, arrays.elems, streams[1].from);
  const PassBytes bytes = BytesOf(ShapesOf(kernel), fixture.params);
  const auto run = [&]() -> absl::StatusOr<Sample> {
    const auto began = Clock::now();
    RunOnAll(fixture.Pool(threads), [&](int task) {
      const auto t = static_cast<uint64_t>(task), count = static_cast<uint64_t>(threads);
      const auto cut = [&](uint64_t part) {
        if (part == count) return fixture.params;
        return fixture.params * part / count / cpu_adam::kSumChunkElems * cpu_adam::kSumChunkElems;
      };
      RunPart(kernel, streams, cut(t), cut(t + 1) - cut(t));
    });
    const std::chrono::duration<double> took = Clock::now() - began;
    return Sample{.value = static_cast<double>(bytes.read + bytes.written) / took.count() / kGiga,
                  .bytes_read = bytes.read,
                  .bytes_written = bytes.written};
  };
  return MeasureBesideLoops(fixture, what,
                            {.run = run, .streams = streams, .arrays = arrays, .threads = threads});
}

}  // namespace forebay::tools
