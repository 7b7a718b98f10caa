// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/block_tasks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_adam/decode.h"
#include "cpu_adam/square_sum.h"
#include "cpu_adam/stream_kernel.h"
#include "cpu_adam/update_kernel.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using cpu_adam::Gradient;
using cpu_adam::kSavedElems;
using cpu_adam::kSumChunkElems;
using cpu_adam::StatePlanes;
using protocol::DType;
using protocol::Format;
using protocol::StateFormat;

// Returns elements [first, first + elems) of an array of Value that starts at `offset_bytes`. Offsets come from the state
// machine, not from a client.
template <typename Value>
Value* Elems(std::span<std::byte> bytes, uint64_t offset_bytes, uint64_t first, uint64_t elems) {
  FOREBAY_CHECK(offset_bytes + (first + elems) * sizeof(Value) <= bytes.size());
  return reinterpret_cast<Value*>(bytes.data() + offset_bytes) + first;
}

// Returns the bytes of the elements in `range` of an array of `dtype` that starts at `offset_bytes`.
template <typename Byte>
std::span<Byte> Part(std::span<Byte> bytes, DType dtype, uint64_t offset_bytes, ElemRange range) {
  const uint64_t width = protocol::SizeBytes(dtype);
  FOREBAY_CHECK(range.begin <= range.end && offset_bytes + range.end * width <= bytes.size());
  return bytes.subspan(offset_bytes + range.begin * width, (range.end - range.begin) * width);
}

Gradient GradientOf(DType dtype, std::span<const std::byte> bytes) { return {bytes.data(), dtype}; }

size_t ElemsOf(DType dtype, std::span<const std::byte> bytes) {
  return bytes.size() / protocol::SizeBytes(dtype);
}

}  // namespace

nvme::Identity MakeIdentity(const BlockIdentity& identity, uint64_t nonce) {
  const uint64_t block = identity.block << 8 | static_cast<uint8_t>(identity.part);
  const std::array<uint64_t, 4> words = {identity.job, block, identity.written_step, nonce};
  nvme::Identity bytes;
  static_assert(sizeof(words) == sizeof(bytes));
  std::memcpy(bytes.data(), words.data(), sizeof(bytes));
  return bytes;
}

uint64_t PlaneOffsetBytes(std::span<const protocol::Plane> planes, size_t plane,
                          uint64_t block_elems) {
  uint64_t offset_bytes = 0;
  for (size_t i = 0; i < plane; ++i) {
    offset_bytes +=
        protocol::RoundUp(protocol::PlaneBytes(planes[i], block_elems), protocol::kPageBytes);
  }
  return offset_bytes;
}

uint64_t BlockBytes(std::span<const protocol::Plane> planes, uint64_t block_elems) {
  return PlaneOffsetBytes(planes, planes.size(), block_elems);
}

namespace {

// Elements [skipped, skipped + elems) of a segment, which a part updates.
struct SegmentPart {
  const UpdateSegment& segment;
  uint64_t skipped;
  uint64_t elems;
};

// Consecutive elements of a block and of the weights.
struct StateRange {
  uint64_t block_elems = 0;  // size of the block; 0 if the elements have weights alone
  uint64_t block_elem = 0;
  uint64_t elems = 0;
  WeightsPlace weights;  // place of the weights of block_elem
};

// Returns the offset in bytes of the plane of weights within a block of `block_elems` elements.
uint64_t WeightsPlane(uint64_t block_elems, const StateMemory& memory) {
  return BlockBytes(protocol::StatePlanes(memory.optimizer, memory.format, memory.dtype),
                    block_elems);
}

std::span<std::byte> WeightsOf(const StateRange& range, const StateMemory& memory) {
  const uint64_t width = protocol::SizeBytes(memory.dtype);
  const std::span<std::byte> in = range.weights.in_block ? memory.block : memory.weights;
  const uint64_t offset = range.weights.in_block
                              ? WeightsPlane(range.block_elems, memory) + range.block_elem * width
                              : range.weights.offset_bytes;
  FOREBAY_CHECK(offset + range.elems * width <= in.size());
  return in.subspan(offset, range.elems * width);
}

// Returns the planes of a range. A block has its planes in the order of protocol::StatePlanes: remainder or master, moments,
// scales.
StatePlanes PlanesOf(const StateRange& range, const StateMemory& memory) {
  const auto planes = protocol::StatePlanes(memory.optimizer, memory.format, memory.dtype);
  const auto at = [&](size_t plane) {
    const uint64_t begin = PlaneOffsetBytes(planes, plane, range.block_elems);
    const uint64_t end = protocol::PlaneBytes(planes[plane], range.block_elem + range.elems);
    FOREBAY_CHECK(begin + end <= memory.block.size());
    return memory.block.data() + begin + protocol::PlaneBytes(planes[plane], range.block_elem);
  };
  StatePlanes state;
  state.weights = WeightsOf(range, memory).data();
  size_t next = 0;
  if (memory.format != Format::kFp32) {
    state.remainder = reinterpret_cast<int16_t*>(at(next++));
  } else if (memory.dtype != DType::kFloat32) {
    state.master = reinterpret_cast<float*>(at(next++));
  }
  const size_t moments = protocol::Info(memory.optimizer).moments.size();
  for (size_t m = 0; m < moments; ++m) state.moments[m] = at(next++);
  for (size_t m = 0; next < planes.size(); ++m) {
    state.scales[m] = reinterpret_cast<float*>(at(next++));
  }
  return state;
}

// Returns the planes that the update of a part reads and writes. If an early update writes the new weights to another place
// (new_offset_bytes), first copies the present weights to that place, because an update reads the weights where it writes them.
StatePlanes PlanesOf(const UpdateBlock& action, const SegmentPart& part,
                     const UpdateMemory& update_memory) {
  const StateMemory& memory = update_memory.states;
  const uint64_t width = protocol::SizeBytes(memory.dtype);
  StatePlanes state = PlanesOf(
      {.block_elems = action.block_elems,
       .block_elem = part.segment.block_elem + part.skipped,
       .elems = part.elems,
       .weights = {.in_block = part.segment.weights.in_block,
                   .offset_bytes = part.segment.weights.offset_bytes + part.skipped * width}},
      memory);
  state.first_elem = static_cast<uint32_t>(part.segment.param_elem + part.skipped);
  if (part.segment.weights.new_offset_bytes) {
    const bool is_weights_pass = action.pass == UpdatePass::kWeights;
    const std::span<std::byte> to =
        Part(is_weights_pass ? memory.weights : update_memory.new_weights, memory.dtype,
             *part.segment.weights.new_offset_bytes, {part.skipped, part.skipped + part.elems});
    if (is_weights_pass) {
      state.new_weights = to.data();
    } else {
      std::memcpy(to.data(), state.weights, to.size());
      state.weights = to.data();
    }
  }
  return state;
}

// Returns the segments that have elements in `range`.
std::span<const UpdateSegment> SegmentsIn(const UpdateBlock& action, ElemRange range) {
  const auto begin =
      std::ranges::partition_point(action.segments, [&](const UpdateSegment& segment) {
        return segment.block_elem + segment.elems <= range.begin;
      });
  const auto end = std::partition_point(
      begin, action.segments.end(),
      [&](const UpdateSegment& segment) { return segment.block_elem < range.end; });
  return {begin, end};
}

// Returns the gradient sums of a part. Sums on several pages are joined in memory of the thread, which stays valid until the
// thread's next call.
std::span<const std::byte> SumsOf(const UpdateBlock& action, const SegmentPart& part,
                                  const UpdateMemory& memory) {
  const uint64_t width = protocol::SizeBytes(action.sum_dtype);
  const uint64_t bytes = part.elems * width;
  const uint64_t at = part.segment.accumulator_offset_bytes + part.skipped * width;
  if (action.sum_page_bytes == 0) {
    FOREBAY_CHECK(at + bytes <= memory.accumulators.size());
    return memory.accumulators.subspan(at, bytes);
  }
  const auto on_page = [&](uint64_t offset) {
    const uint64_t page = offset / action.sum_page_bytes;
    const auto frame = std::ranges::lower_bound(action.sum_frames, page, {}, &SumFrame::page);
    FOREBAY_CHECK(frame != action.sum_frames.end() && frame->page == page);
    const uint64_t in_page = offset % action.sum_page_bytes;
    return memory.accumulators.subspan(frame->offset_bytes + in_page,
                                       action.sum_page_bytes - in_page);
  };
  const std::span<const std::byte> first = on_page(at);
  if (first.size() >= bytes) return first.first(bytes);
  thread_local std::vector<std::byte> joined;
  joined.resize(std::max<size_t>(joined.size(), bytes));
  for (uint64_t done = 0; done < bytes;) {
    const std::span<const std::byte> from = on_page(at + done);
    const uint64_t count = std::min<uint64_t>(from.size(), bytes - done);
    std::memcpy(joined.data() + done, from.data(), count);
    done += count;
  }
  return std::span(joined).first(bytes);
}

// The planes of an update, in the order of cpu_adam::StatePlanes, from element `first` of the block on.
class PlanesInArenas {
 public:
  PlanesInArenas(const UpdateBlock& action, const UpdateSegment& segment, uint64_t first,
                 const UpdateMemory& memory) {
    const StateMemory& states = memory.states;
    const uint64_t width = protocol::SizeBytes(states.dtype);
    const auto planes = protocol::StatePlanes(states.optimizer, states.format, states.dtype);
    const auto add_of_block = [&](uint64_t plane_begin, uint64_t value_bytes,
                                  uint64_t elems_per_value) {
      // Whole groups of codes are written.
      const bool is_code = value_bytes == 1;
      Add({.arena = memory.block_arena,
           .offset_bytes =
               memory.block_offset_bytes + plane_begin + first / elems_per_value * value_bytes,
           .group_bytes = kSavedElems / elems_per_value * value_bytes,
           .elem_bytes = elems_per_value > 1 || is_code ? 0 : value_bytes});
    };
    const auto add_plane = [&](size_t plane) {
      add_of_block(PlaneOffsetBytes(planes, plane, action.block_elems),
                   protocol::SizeBytes(planes[plane].dtype), planes[plane].elems_per_value);
    };
    if (segment.weights.in_block) {
      add_of_block(WeightsPlane(action.block_elems, states), width, /*elems_per_value=*/1);
    } else {
      Add({.arena = UndoneArena::kWeights,
           .offset_bytes = segment.weights.offset_bytes + (first - segment.block_elem) * width,
           .group_bytes = kSavedElems * width,
           .elem_bytes = width});
    }
    const bool has_master = states.format == Format::kFp32 && states.dtype != DType::kFloat32;
    for (size_t plane = has_master ? 1 : 0; plane < planes.size(); ++plane) add_plane(plane);
    if (has_master) add_plane(0);
  }

  std::span<const UndoPlane> all() const { return std::span(planes_).first(count_); }

 private:
  void Add(const UndoPlane& plane) { planes_.at(count_++) = plane; }

  size_t count_ = 0;
  std::array<UndoPlane, kUndoPlanesMax> planes_;
};

uint64_t UpdatePart(const SegmentPart& part, const StateMemory& memory, const Gradient& gradient,
                    const StatePlanes& state, const cpu_adam::SavedElems* saved) {
  const StateFormat format{memory.format, memory.dtype};
  const UpdateSegment& segment = part.segment;
  if (memory.optimizer == protocol::Optimizer::kLamb) {
    return cpu_adam::UpdateLamb(format, segment.scalars, segment.trust, part.elems, gradient, state,
                                saved);
  }
  return cpu_adam::Update(memory.optimizer, format, segment.scalars, part.elems, gradient, state,
                          saved);
}

// Updates the elements of `range` that the log does not count as done, and records the progress in the log.
void UpdateWithUndo(const UpdateBlock& action, ElemRange range, const UpdateMemory& memory,
                    UndoLog::Part& log) {
  const uint64_t part_begin = range.begin / kPartElems * kPartElems;
  for (const UpdateSegment& segment : SegmentsIn(action, range)) {
    const uint64_t end = std::min(segment.block_elem + segment.elems, range.end);
    const uint64_t first = std::max({segment.block_elem, range.begin, part_begin + log.done()});
    if (first >= end) continue;
    const SegmentPart part{segment, first - segment.block_elem, end - first};
    const StatePlanes state = PlanesOf(action, part, memory);
    const cpu_adam::SavedElems saved = log.Begin(
        first - part_begin, part.elems, PlanesInArenas(action, segment, first, memory).all());
    const Gradient gradient = GradientOf(action.sum_dtype, SumsOf(action, part, memory));
    const uint64_t overflows = UpdatePart(part, memory.states, gradient, state, &saved);
    log.SetDone(end - part_begin, log.overflows() + overflows);
  }
}

}  // namespace

UpdateFound RunUpdate(const UpdateBlock& action, ElemRange range, const UpdateMemory& memory) {
  const StateMemory& states = memory.states;
  const StateFormat format{states.format, states.dtype};
  UpdateFound found;
  if (memory.undo != nullptr) {
    UndoLog::Part part(*memory.undo, action.identity_after.block, range.begin / kPartElems,
                       action.identity_after.written_step);
    // Overflows that an earlier daemon found in the part count with the first range of the part.
    const uint64_t before = range.begin % kPartElems == 0 ? 0 : part.overflows();
    UpdateWithUndo(action, range, memory, part);
    found.overflows = part.overflows() - before;
    return found;
  }
  if (action.pass == UpdatePass::kNorms) found.norms.resize(action.segments.size());
  for (const UpdateSegment& segment : SegmentsIn(action, range)) {
    const uint64_t first = std::max(segment.block_elem, range.begin);
    const uint64_t end = std::min(segment.block_elem + segment.elems, range.end);
    const SegmentPart part{segment, first - segment.block_elem, end - first};
    const StatePlanes state = PlanesOf(action, part, memory);
    if (action.pass == UpdatePass::kMasters) {
      if (state.master == nullptr) continue;
      cpu_adam::AddGradient(part.elems, {state.weights, states.dtype}, cpu_adam::AddMode::kSet,
                            state.master);
      continue;
    }
    const Gradient gradient = GradientOf(action.sum_dtype, SumsOf(action, part, memory));
    if (action.pass == UpdatePass::kNorms) {
      found.norms[static_cast<size_t>(&segment - action.segments.data())] =
          cpu_adam::SumLamb(format, segment.scalars, part.elems, gradient, state);
    } else if (action.pass == UpdatePass::kWeights) {
      FOREBAY_CHECK(state.new_weights != nullptr);
      cpu_adam::UpdateWeights(states.optimizer, format, segment.scalars, part.elems, gradient,
                              state);
    } else {
      found.overflows += UpdatePart(part, states, gradient, state, /*saved=*/nullptr);
    }
  }
  return found;
}

TaskDone JoinUpdate(std::span<const UpdateFound> found, std::pmr::memory_resource* memory) {
  TaskDone done{.status = {}, .norms = std::pmr::vector<SegmentNorms>(memory)};
  std::pmr::vector<cpu_adam::LambSums> norms(found.empty() ? 0 : found[0].norms.size(), memory);
  for (const UpdateFound& part : found) {
    done.count += part.overflows;
    for (size_t i = 0; i < norms.size(); ++i) norms[i].Merge(part.norms[i]);
  }
  for (const cpu_adam::LambSums& sums : norms) {
    done.norms.push_back(
        {.weight_squares = sums.weight.ToDouble(), .update_squares = sums.update.ToDouble()});
  }
  return done;
}

namespace {

// Digests the pages that the elements of `range` complete. All elements before `range` must be done.
void AddPages(ElemRange range, const UpdateBlock& action, const StateMemory& memory,
              nvme::PageDigests& digests) {
  const auto planes = protocol::StatePlanes(memory.optimizer, memory.format, memory.dtype);
  for (size_t plane = 0; plane < planes.size(); ++plane) {
    const uint64_t first =
        PlaneOffsetBytes(planes, plane, action.block_elems) / protocol::kPageBytes;
    const uint64_t begin = protocol::PlaneBytes(planes[plane], range.begin) / protocol::kPageBytes;
    const uint64_t end_bytes = protocol::PlaneBytes(planes[plane], range.end);
    const uint64_t end =
        (range.end == action.block_elems ? protocol::RoundUp(end_bytes, protocol::kPageBytes)
                                         : end_bytes) /
        protocol::kPageBytes;
    digests.Add(first + begin, first + end);
  }
  const uint64_t first = WeightsPlane(action.block_elems, memory) / protocol::kPageBytes;
  if (first == digests.pages()) return;
  const uint64_t width = protocol::SizeBytes(memory.dtype);
  const bool is_last = range.end == action.block_elems;
  digests.Add(first + range.begin * width / protocol::kPageBytes,
              is_last ? digests.pages() : first + range.end * width / protocol::kPageBytes);
}

// Sets in `done` the checksum of a block on a staging slot, and the digests of its plane of weights if it has one.
void SetDigests(const nvme::PageDigests& digests, const nvme::Identity& identity,
                uint64_t states_elems, const StateMemory& memory, TaskDone& done) {
  done.checksum = digests.Checksum(identity);
  const auto of_weights =
      digests.digests().subspan(WeightsPlane(states_elems, memory) / protocol::kPageBytes);
  if (of_weights.empty()) return;
  done.weights_digests =
      std::make_shared<const std::vector<uint64_t>>(of_weights.begin(), of_weights.end());
}

}  // namespace

TaskDone RunUpdateForSwap(const UpdateBlock& action, const UpdateMemory& memory, uint64_t nonce) {
  const bool changes = action.pass != UpdatePass::kNorms && action.pass != UpdatePass::kWeights;
  const uint64_t stride = action.pass == UpdatePass::kWhole ? kTileElems : kPartElems;
  nvme::PageDigests digests(memory.states.block);
  std::vector<UpdateFound> found;
  for (uint64_t begin = 0; begin < action.block_elems; begin += stride) {
    const ElemRange range{begin, std::min(begin + stride, action.block_elems)};
    found.push_back(RunUpdate(action, range, memory));
    if (changes) AddPages(range, action, memory.states, digests);
  }
  TaskDone done = JoinUpdate(found);
  if (!changes) return done;
  SetDigests(digests, MakeIdentity(action.identity_after, nonce), action.block_elems, memory.states,
             done);
  return done;
}

void RunCopies(std::span<const BytesCopy> copies, std::span<const std::byte> from,
               std::span<std::byte> to) {
  for (const BytesCopy& copy : copies) {
    FOREBAY_CHECK(copy.from_bytes + copy.size_bytes <= from.size() &&
                  copy.to_bytes + copy.size_bytes <= to.size());
    std::memcpy(to.data() + copy.to_bytes, from.data() + copy.from_bytes, copy.size_bytes);
  }
}

ExtraStates RunKeepExtraStates(std::span<const StatePart> parts, std::span<const std::byte> step) {
  std::vector<std::vector<std::byte>> by_rank;
  by_rank.reserve(parts.size());
  for (const StatePart& part : parts) {
    FOREBAY_CHECK(part.offset_bytes + part.bytes <= step.size());
    const auto bytes = step.subspan(part.offset_bytes, part.bytes);
    by_rank.emplace_back(bytes.begin(), bytes.end());
  }
  return std::make_shared<const std::vector<std::vector<std::byte>>>(std::move(by_rank));
}

void RunRestoreExtraStates(const RestoreExtraStates& action, std::span<std::byte> step) {
  for (size_t rank = 0; rank < action.offsets_bytes.size(); ++rank) {
    const std::vector<std::byte>& bytes = action.extra_states->at(rank);
    FOREBAY_CHECK(action.offsets_bytes[rank] + bytes.size() <= step.size());
    std::ranges::copy(bytes, step.subspan(action.offsets_bytes[rank]).begin());
  }
}

absl::Status VerifyBlock(const std::optional<nvme::ExpectedContent>& expected,
                         const BlockIdentity& identity, std::span<const std::byte> bytes) {
  if (expected.has_value()) return nvme::Verify(*expected, bytes);
  const bool zeros =
      std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; });
  if (zeros && identity.written_step == 0) return absl::OkStatus();
  return protocol::MakeError(
      protocol::ErrorId::kCorrupt,
      absl::StrCat("block ", identity.block, " of job ", identity.job, " written in step ",
                   identity.written_step, " has no bytes on swap that could be verified"));
}

namespace {

constexpr uint64_t kPieceElems = 64 * kSumChunkElems;  // elements whose chunk sums fit on the stack

// Returns 1 + the index of the first source that is not finite in `range`; 0 if all sources are finite.
uint64_t FindCulprit(DType dtype, ElemRange range,
                     std::span<const std::span<const std::byte>> sources) {
  const uint64_t elems = range.end - range.begin;
  for (size_t i = 0; i < sources.size(); ++i) {
    const Gradient gradient = GradientOf(dtype, Part(sources[i], dtype, 0, range));
    if (!cpu_adam::AllFinite(elems, gradient)) return i + 1;
  }
  return 0;
}

}  // namespace

AddedGradients RunAddGradients(const AddGradients& action, ElemRange range,
                               std::span<const std::span<const std::byte>> sources,
                               std::span<std::byte> accumulator) {
  FOREBAY_CHECK(range.begin % kSumChunkElems == 0 && !sources.empty());
  const bool copies = action.sum_dtype == action.dtype && sources.size() == 1 && action.assign;
  FOREBAY_CHECK(copies || action.sum_dtype == DType::kFloat32);
  AddedGradients added;
  std::vector<Gradient> gradients(sources.size());
  for (uint64_t begin = range.begin; begin < range.end; begin += kPieceElems) {
    const ElemRange piece{begin, std::min(begin + kPieceElems, range.end)};
    const uint64_t elems = piece.end - piece.begin;
    std::array<double, kPieceElems / kSumChunkElems> sums;
    std::byte* const to = Part(accumulator, action.sum_dtype, 0, piece).data();
    for (size_t i = 0; i < sources.size(); ++i) {
      gradients[i] = GradientOf(action.dtype, Part(sources[i], action.dtype, 0, piece));
    }
    if (copies) {  // a single rank: its gradient is the sum
      cpu_adam::CopyWithSquareSums(elems, gradients[0], to, sums.data());
    } else {
      cpu_adam::AddGradients(elems, gradients.data(), gradients.size(),
                             action.assign ? cpu_adam::AddMode::kSet : cpu_adam::AddMode::kAdd,
                             reinterpret_cast<float*>(to), sums.data());
    }
    const uint64_t chunks = (elems + kSumChunkElems - 1) / kSumChunkElems;
    for (uint64_t chunk = 0; chunk < chunks; ++chunk) added.squares.AddChunk(sums[chunk]);
    if (added.squares.finite()) continue;
    added.culprit = FindCulprit(action.dtype, piece, sources);
    break;
  }
  return added;
}

cpu_adam::SquareSum RunSumGradient(DType sum_dtype, ElemRange range,
                                   std::span<const std::byte> accumulator) {
  return cpu_adam::SumSquaresAndFinite(
      range.end - range.begin, GradientOf(sum_dtype, Part(accumulator, sum_dtype, 0, range)));
}

void RunDecodeState(const DecodeState& action, const StateMemory& memory, std::span<std::byte> to) {
  const StateFormat format{memory.format, memory.dtype};
  const bool of_moment = action.state > 0;
  // Codes are read from the first element of their scale on.
  const uint64_t align = of_moment && memory.format == Format::kInt8 ? protocol::kScaleElems : 1;
  const uint64_t first = action.block_elem % align;
  const StatePlanes planes = PlanesOf({.block_elems = action.block_elems,
                                       .block_elem = action.block_elem - first,
                                       .elems = action.elems,
                                       .weights = action.weights},
                                      memory);
  float* const out = Elems<float>(to, 0, 0, action.elems);
  if (of_moment) {
    cpu_adam::DecodeMoment(memory.optimizer, format, action.state - 1,
                           {.first = first, .n = action.elems}, planes, out);
  } else {
    cpu_adam::DecodeMasters(format, action.elems, planes, out);
  }
}

namespace {

constexpr uint64_t kValuesAtOnce = uint64_t{1} << 16;  // elements that a worker copies at once
static_assert(kValuesAtOnce % protocol::kScaleElems == 0);

// Returns the planes (weights and states) of the action's elements in the range `part`; the weights alone if they have no states.
StatePlanes PlanesOf(const SetState& action, ElemRange part, const StateMemory& memory) {
  StateRange range{.elems = part.end - part.begin, .weights = action.weights};
  range.weights.offset_bytes += part.begin * protocol::SizeBytes(memory.dtype);
  if (action.in_block) {
    range.block_elems = action.in_block->states_elems;
    range.block_elem = action.in_block->block_elem + part.begin;
  }
  if (range.block_elems > 0) return PlanesOf(range, memory);
  StatePlanes weights_alone;
  weights_alone.weights = WeightsOf(range, memory).data();
  return weights_alone;
}

}  // namespace

bool RunSetState(const SetState& action, const StateMemory& memory,
                 std::span<const std::byte> from) {
  const StateFormat format{memory.format, memory.dtype};
  const auto is_storable = [&](float one) {
    return protocol::IsStorable(memory.optimizer, format, action.state, one);
  };
  std::vector<std::byte> copied;
  std::vector<float> values;
  // The first pass checks all elements. The second pass sets them.
  for (const bool sets : {false, true}) {
    for (uint64_t begin = 0; begin < action.elems; begin += kValuesAtOnce) {
      const ElemRange part{begin, std::min(begin + kValuesAtOnce, action.elems)};
      // A private copy: the client could change its bytes behind the check.
      const std::span<const std::byte> bytes = Part(from, action.dtype, 0, part);
      copied.assign(bytes.begin(), bytes.end());
      values.resize(part.end - part.begin);
      cpu_adam::AddGradient(values.size(), GradientOf(action.dtype, copied),
                            cpu_adam::AddMode::kSet, values.data());
      if (!std::ranges::all_of(values, is_storable)) return false;
      if (!sets) continue;
      const StatePlanes planes = PlanesOf(action, part, memory);
      if (action.state == 0) {
        cpu_adam::EncodeMasters(format, values.size(), values.data(), planes);
      } else {
        cpu_adam::EncodeMoment(memory.optimizer, format, action.state - 1, values.size(),
                               values.data(), planes);
      }
    }
  }
  return true;
}

TaskDone DigestBlock(const BlockIdentity& identity, uint64_t nonce, uint64_t states_elems,
                     const StateMemory& memory) {
  nvme::PageDigests digests(memory.block);
  digests.Add(0, digests.pages());
  TaskDone done;
  SetDigests(digests, MakeIdentity(identity, nonce), states_elems, memory, done);
  return done;
}

absl::Status RunLoadWeights(const LoadWeights& action, std::string_view path,
                            std::span<const std::byte> from, std::span<std::byte> weights) {
  const uint64_t pages = action.bytes / protocol::kPageBytes;
  FOREBAY_CHECK(action.first_page + pages <= action.digests->size());
  RETURN_IF_ERROR(nvme::Verify(
      nvme::ExpectedPages{.slot = action.slot,
                          .path = path,
                          .offset_bytes = action.slot_offset_bytes,
                          .digests = std::span(*action.digests).subspan(action.first_page, pages)},
      from));
  RunCopies(action.copies, from, weights);
  return absl::OkStatus();
}

bool RunCopyInitial(DType dtype, std::span<const std::byte> from, std::span<std::byte> to,
                    uint64_t checked_bytes) {
  std::memcpy(to.data(), from.data(), from.size());
  const std::span<std::byte> checked = to.first(checked_bytes);
  return cpu_adam::AllFinite(ElemsOf(dtype, checked), GradientOf(dtype, checked));
}

}  // namespace forebay::daemon
