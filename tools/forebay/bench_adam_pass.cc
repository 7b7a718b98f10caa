// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_adam_pass.h"

#include <algorithm>
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

uint64_t WeightsBytes(const AdamPass& pass) {
  return protocol::SizeBytes(pass.format.weights) * kStreamGroupElems;
}

// The arrays of AdamMemory: gradient, weights, new weights, which an update does not have, and states. The limit's loops use the
// same memory; a stream of Streams() that is only written begins where one of these arrays begins that holds no input.
ArraySet BlockArrays(const AdamPass& pass, uint64_t params) {
  const uint64_t width = WeightsBytes(pass);
  uint64_t states = 0;
  for (const protocol::Plane& plane : PlanesOf(pass)) {
    states += protocol::PlaneBytes(plane, kStreamGroupElems);
  }
  const uint64_t new_weights = pass.task == AdamPass::Task::kWeights ? width : 0;
  return {.shapes = {ShapeOf(width, Access::kRead), ShapeOf(width, Access::kUpdate),
                     ShapeOf(new_weights, Access::kWrite), ShapeOf(states, Access::kUpdate)},
          .elems = ElemsOf(pass, params)};
}

// Runs an optimizer pass in the fixture's memory.
class PassRun {
 public:
  PassRun(const AdamFixture& fixture, const AdamPass& pass)
      : pass_(pass),
        elems_(fixture.params),
        blocks_(pass, fixture.params, fixture.Pool(pass.threads), Allocate(fixture, pass)),
        streams_(fixture.huge->Allocate(Streams(pass, fixture.params))) {}

  absl::StatusOr<Sample> Run(AdamPass::Hash hash) {
    const auto began = Clock::now();
    blocks_.Run(hash);
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
    const std::vector<BenchStream> allocated =
        fixture.huge->Allocate(BlockArrays(pass, fixture.params));
    const BenchStream &weights = allocated[1], &new_weights = allocated[2], &states = allocated[3];
    // The slack behind the last array holds the rounding of the last block's planes.
    return {.gradient = {allocated[0].from, allocated[0].bytes},
            .weights = {weights.to, new_weights.to + new_weights.bytes},
            .states = {states.to, states.bytes + SlackBytes(pass)},
            .new_weights_offset_bytes = static_cast<uint64_t>(new_weights.to - weights.to)};
  }

  AdamPass pass_;
  uint64_t elems_;
  AdamBlocks blocks_;
  std::vector<BenchStream> streams_;
};

}  // namespace

ArraySet Streams(const AdamPass& pass, uint64_t params) {
  const auto planes = PlanesOf(pass);
  const uint64_t width = WeightsBytes(pass);
  const bool has_master = planes[0].name == "master";  // then weights are only written
  const bool updates = pass.task == AdamPass::Task::kUpdate;
  const Access access = updates ? Access::kUpdate : Access::kRead;
  ArraySet arrays{.shapes = {}, .elems = ElemsOf(pass, params)};
  arrays.shapes.push_back(ShapeOf(width, Access::kRead));
  if (!has_master) arrays.shapes.push_back(ShapeOf(width, access));
  if (has_master || !updates) arrays.shapes.push_back(ShapeOf(width, Access::kWrite));
  for (const protocol::Plane& plane : planes) {
    arrays.shapes.push_back(ShapeOf(protocol::PlaneBytes(plane, kStreamGroupElems), access));
  }
  return arrays;
}

uint64_t MemoryFor(const AdamPass& pass, uint64_t params) {
  return std::max(BenchMemory::BytesFor(Streams(pass, params)),
                  BenchMemory::BytesFor(BlockArrays(pass, params)) + SlackBytes(pass));
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
