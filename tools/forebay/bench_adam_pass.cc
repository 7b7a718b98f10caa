// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_adam_pass.h"

#include <chrono>
#include <vector>

#include "protocol/units.h"

namespace forebay::tools {
namespace {

using Access = StreamShape::Access;
using Clock = std::chrono::steady_clock;

StreamShape ShapeOf(uint64_t group_bytes, Access access) {
  return {static_cast<uint32_t>(group_bytes), access};
}

// Bytes by which page rounding of the last block's planes may exceed the arrays.
uint64_t SlackBytes(const AdamPass& pass) {
  return (PlanesOf(pass).size() + 2) * protocol::kPageBytes;
}

// Runs an optimizer pass in the fixture's memory.
class PassRun {
 public:
  PassRun(const AdamFixture& fixture, const AdamPass& pass)
      : pass_(pass),
        elems_(fixture.params),
        blocks_(pass, fixture.params, fixture.Pool(pass.threads), Allocate(fixture, pass)),
        // the limit's loops use the same memory
        streams_(fixture.huge->Allocate(Streams(pass, fixture.params))) {}

  absl::StatusOr<Sample> Run(AdamPass::Hash hash) {
    const auto began = Clock::now();
    blocks_.Update(hash);
    const std::chrono::duration<double> took = Clock::now() - began;
    const PassBytes bytes = BytesOf(Streams(pass_, elems_).shapes, elems_);
    return Sample{
        .value = static_cast<double>(bytes.read + bytes.written) / took.count() / protocol::kGb,
        .bytes_read = bytes.read,
        .bytes_written = bytes.written};
  }

  const std::vector<BenchStream>& streams() const { return streams_; }

 private:
  static AdamMemory Allocate(const AdamFixture& fixture, const AdamPass& pass) {
    const ArraySet streams = Streams(pass, fixture.params);
    ArraySet arrays{.shapes = {streams.shapes[0], streams.shapes[1]}, .elems = streams.elems};
    arrays.shapes.push_back(ShapeOf(0, Access::kUpdate));
    for (size_t s = 2; s < streams.shapes.size(); ++s) {
      arrays.shapes[2].group_bytes += streams.shapes[s].group_bytes;
    }
    const std::vector<BenchStream> allocated = fixture.huge->Allocate(arrays);
    // The states are the last array. The slack behind the array holds the rounding of the last block's planes.
    return {.gradient = {allocated[0].from, allocated[0].bytes},
            .weights = {allocated[1].to, allocated[1].bytes},
            .states = {allocated[2].to, allocated[2].bytes + SlackBytes(pass)}};
  }

  AdamPass pass_;
  uint64_t elems_;
  AdamBlocks blocks_;
  std::vector<BenchStream> streams_;
};

}  // namespace

ArraySet Streams(const AdamPass& pass, uint64_t params) {
  const auto planes = PlanesOf(pass);
  const uint64_t width = protocol::SizeBytes(pass.format.weights) * kStreamGroupElems;
  const bool only_written = planes[0].name == "master";
  ArraySet arrays{.shapes = {}, .elems = ElemsOf(pass, params)};
  arrays.shapes.push_back(ShapeOf(width, Access::kRead));
  arrays.shapes.push_back(ShapeOf(width, only_written ? Access::kWrite : Access::kUpdate));
  for (const protocol::Plane& plane : planes) {
    arrays.shapes.push_back(
        ShapeOf(protocol::PlaneBytes(plane, kStreamGroupElems), Access::kUpdate));
  }
  return arrays;
}

uint64_t MemoryFor(const AdamPass& pass, uint64_t params) {
  return BenchMemory::BytesFor(Streams(pass, params)) + SlackBytes(pass);
}

absl::StatusOr<BenchResult> MeasurePass(const AdamFixture& fixture, const BenchCase& what,
                                        const AdamPass& pass) {
  PassRun run(fixture, pass);
  MeasuredSide side{.run = [&run, &pass] { return run.Run(pass.hash); },
                    .streams = run.streams(),
                    .arrays = Streams(pass, fixture.params),
                    .threads = pass.threads};
  if (pass.hash == AdamPass::Hash::kOn) {
    side.shown = {
        {"unhashed", BenchLoop::Role::kShown, [&run] { return run.Run(AdamPass::Hash::kOff); }}};
  }
  return MeasureBesideLoops(fixture, what, std::move(side));
}

}  // namespace forebay::tools
