// SPDX-License-Identifier: Apache-2.0
// Gradients in a NodeModel: contents and places of the sums.

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/units.h"
#include "tests/support/node_model.h"

namespace forebay::testing {

// NOLINTNEXTLINE(google-build-using-namespace): the actions
using namespace daemon;

using protocol::kGradUnitElems;

void NodeModel::Apply(const CopyToStepArena& a, TaskDone&) {
  const auto& gradients = sessions_[a.session].gradients;
  const auto it = gradients.find(a.grad_offset_bytes);
  jobs_[a.job].overflow[a.step_offset_bytes] = it != gradients.end() ? it->second : GradientToken{};
}

// Sums of partitions are adjacent; each begins at a cache line.
NodeModel::ElemPlace NodeModel::AccumulatorAt(const JobMemory& job, protocol::DType sum_dtype,
                                              uint64_t offset_bytes) {
  const uint64_t width = protocol::SizeBytes(sum_dtype);
  if (offset_bytes >= job.float_sums_offset) offset_bytes -= job.float_sums_offset;
  uint32_t partition = 0;
  while (true) {
    const uint64_t elems = job.layout->partitions()[partition].gradient_elems;
    const uint64_t bytes = protocol::RoundUp(elems * width, protocol::kCacheLineBytes);
    if (offset_bytes < bytes) return {.partition = partition, .elem = offset_bytes / width};
    offset_bytes -= bytes;
    ++partition;
  }
}

NodeModel::Accumulators& NodeModel::AccumulatorsAt(JobMemory& job, uint64_t offset_bytes) {
  return offset_bytes >= job.float_sums_offset ? job.float_sums : job.accumulators;
}

// Returns the token at an offset. Returns an empty token for bytes that were returned to the client. That is correct if the
// attempt was dropped; in a committed step the empty token is found as a fault.
GradientToken NodeModel::TokenAt(const std::map<uint64_t, GradientToken>& tokens, uint64_t width,
                                 uint64_t offset_bytes) {
  auto it = tokens.upper_bound(offset_bytes);
  if (it == tokens.begin()) return {};
  --it;
  const uint64_t size_bytes = (it->second.end - it->second.begin) * width;
  return offset_bytes < it->first + size_bytes ? it->second : GradientToken{};
}

// The paged sum at an offset of the step arena. Returns null if no gradient was added at that offset.
const NodeModel::PagedSum* NodeModel::PagedSumAt(const JobMemory& job, uint64_t offset_bytes) {
  auto it = job.paged.upper_bound(offset_bytes);
  if (it == job.paged.begin()) return nullptr;
  --it;
  return offset_bytes < it->first + it->second.bytes ? &it->second : nullptr;
}

void NodeModel::AddPaged(JobMemory& job, const AddGradients& a,
                         const std::vector<GradientToken>& tokens) {
  const uint64_t width = protocol::SizeBytes(a.sum_dtype);
  for (uint64_t elem = 0; elem < a.elems; elem += kGradUnitElems) {
    const uint64_t offset = a.accumulator_offset_bytes + elem * width;
    const PagedSum unit{.place = {.partition = a.partition, .elem = a.first_elem + elem},
                        .bytes = std::min(kGradUnitElems, a.elems - elem) * width,
                        .tokens = tokens};
    const auto found = job.paged.find(offset);
    if (!a.assign) {
      if (found == job.paged.end() || found->second.place != unit.place) {
        Fault("a gradient is added to the sum of other elements");
        return;
      }
      found->second.tokens.insert(found->second.tokens.end(), tokens.begin(), tokens.end());
      continue;
    }
    ForgetPaged(job, offset, unit.bytes);
    job.paged[offset] = unit;
  }
}

void NodeModel::ForgetPaged(JobMemory& job, uint64_t offset_bytes, uint64_t bytes) {
  std::erase_if(job.paged, [=](const auto& entry) {
    return entry.first < offset_bytes + bytes && offset_bytes < entry.first + entry.second.bytes;
  });
}

void NodeModel::Apply(const AddGradients& a, TaskDone& done) {
  JobMemory& job = jobs_[a.job];
  const uint64_t width = protocol::SizeBytes(a.dtype);
  const ElemPlace place{.partition = a.partition, .elem = a.first_elem};
  const bool is_there =
      job.has_paged_sums || AccumulatorAt(job, a.sum_dtype, a.accumulator_offset_bytes) == place;
  if (!is_there) Fault("a gradient is added to the sum of other elements");
  if (place.elem % kGradUnitElems != 0) Fault("a pass begins within a unit");
  std::vector<GradientToken> tokens;
  // A source without a session is the overflow or, if the target is in the float32 sums, the narrow accumulator.
  const bool widens =
      a.sources[0].session == 0 && a.accumulator_offset_bytes >= job.float_sums_offset;
  if (widens && (AccumulatorAt(job, a.dtype, a.sources[0].offset_bytes) != place || !a.assign)) {
    Fault("the sum of other elements is widened, or added to");
  }
  for (size_t i = widens ? 1 : 0; i < a.sources.size(); ++i) {
    const GradientSource& source = a.sources[i];
    const auto& from = source.session != 0 ? sessions_[source.session].gradients : job.overflow;
    tokens.push_back(TokenAt(from, width, source.offset_bytes));
    if (!tokens.back().finite && done.count == 0) done.count = i + 1;
  }
  if (done.count > 0) return;
  if (job.has_paged_sums) {
    AddPaged(job, a, tokens);
    const PagedSum* sum = PagedSumAt(job, a.accumulator_offset_bytes);
    if (sum != nullptr) done.squares.AddChunk(static_cast<double>(sum->tokens.size()));
    return;
  }
  for (uint64_t elem = 0; elem < a.elems; elem += kGradUnitElems) {
    const uint64_t unit = (place.elem + elem) / kGradUnitElems;
    std::vector<GradientToken>& sum =
        AccumulatorsAt(job, a.accumulator_offset_bytes)[{place.partition, unit}];
    if (a.assign) sum.clear();
    if (widens) sum = job.accumulators[{place.partition, unit}];
    sum.insert(sum.end(), tokens.begin(), tokens.end());
    if (elem == 0) done.squares.AddChunk(static_cast<double>(sum.size()));
  }
}

void NodeModel::Apply(const SumGradient& a, TaskDone& done) {
  JobMemory& job = jobs_[a.job];
  if (job.has_paged_sums) {
    const PagedSum* sum = PagedSumAt(job, a.accumulator_offset_bytes);
    if (sum == nullptr || sum->place.partition != a.partition) {
      Fault("a norm is taken of sums that are not there");
      return;
    }
    done.squares.AddChunk(static_cast<double>(sum->tokens.size()));
    return;
  }
  const ElemPlace place = AccumulatorAt(job, a.sum_dtype, a.accumulator_offset_bytes);
  const uint64_t unit = place.elem / kGradUnitElems;
  const auto& sum = AccumulatorsAt(job, a.accumulator_offset_bytes)[{place.partition, unit}];
  done.squares.AddChunk(static_cast<double>(sum.size()));
}

// Ranges of the step arena that hold the sums of a segment, one for each page.
std::vector<NodeModel::Use> NodeModel::PiecesOf(const UpdateBlock& a,
                                                const UpdateSegment& segment) {
  const uint64_t bytes = segment.elems * protocol::SizeBytes(a.sum_dtype);
  const uint64_t begin = segment.accumulator_offset_bytes;
  if (a.sum_page_bytes == 0) return {StepUse(a.job, begin, bytes, false)};
  std::vector<Use> pieces;
  for (uint64_t at = begin; at < begin + bytes;) {
    const uint64_t page = at / a.sum_page_bytes;
    const uint64_t end = std::min(begin + bytes, (page + 1) * a.sum_page_bytes);
    const auto frame = std::ranges::find(a.sum_frames, page, &SumFrame::page);
    if (frame == a.sum_frames.end()) {
      Fault(absl::StrCat("an update reads page ", page, " of sums, which is not there"));
      return {};
    }
    pieces.push_back(StepUse(a.job, frame->offset_bytes + at % a.sum_page_bytes, end - at, false));
    at = end;
  }
  return pieces;
}

void NodeModel::AddSumUses(const UpdateBlock& a, const UpdateSegment& segment,
                           std::vector<Use>& uses) {
  const std::vector<Use> pieces = PiecesOf(a, segment);
  uses.insert(uses.end(), pieces.begin(), pieces.end());
}

// The units that hold a segment's sums. The place of the first unit is the segment's first element.
std::vector<NodeModel::SumUnit> NodeModel::UnitsOf(JobMemory& job, const UpdateBlock& a,
                                                   const UpdateSegment& segment) {
  std::vector<SumUnit> units;
  if (!job.has_paged_sums) {
    const ElemPlace place = AccumulatorAt(job, a.sum_dtype, segment.accumulator_offset_bytes);
    Accumulators& sums = AccumulatorsAt(job, segment.accumulator_offset_bytes);
    for (uint64_t elem = place.elem; elem < place.elem + segment.elems;
         elem = (elem / kGradUnitElems + 1) * kGradUnitElems) {
      units.push_back({.place = {.partition = place.partition, .elem = elem},
                       .tokens = sums[{place.partition, elem / kGradUnitElems}]});
    }
    return units;
  }
  const uint64_t width = protocol::SizeBytes(a.sum_dtype);
  for (const Use& piece : PiecesOf(a, segment)) {
    for (uint64_t at = piece.offset_bytes; at < piece.offset_bytes + piece.bytes;) {
      const auto found = std::prev(job.paged.upper_bound(at));
      const PagedSum* sum = PagedSumAt(job, at);
      if (sum == nullptr) {
        Fault("an update reads sums that are not there");
        return {};
      }
      ElemPlace place = sum->place;
      place.elem += (at - found->first) / width;
      const bool goes_on =
          units.empty() ||
          (units.back().place.partition == place.partition && place.elem % kGradUnitElems == 0 &&
           units.back().place.elem / kGradUnitElems + 1 == place.elem / kGradUnitElems);
      if (!goes_on) Fault("the sums of a segment are not those of consecutive elements");
      units.push_back({.place = place, .tokens = sum->tokens});
      at = found->first + sum->bytes;
    }
  }
  return units;
}

void NodeModel::Apply(const SpillSums& a, TaskDone& done) {
  JobMemory& job = jobs_[a.job];
  done.checksum = ++checksums_;
  Spilled spilled{.checksum = done.checksum, .page = a.identity.block, .sums = {}};
  for (const auto& [offset, sum] : job.paged) {
    if (offset < a.offset_bytes || offset >= a.offset_bytes + a.bytes) continue;
    spilled.sums[offset - a.offset_bytes] = sum;
  }
  job.spilled[a.slot] = std::move(spilled);
}

void NodeModel::Apply(const LoadSums& a, TaskDone&) {
  JobMemory& job = jobs_[a.job];
  const auto found = job.spilled.find(a.slot);
  if (found == job.spilled.end() || found->second.checksum != a.checksum ||
      found->second.page != a.identity.block) {
    Fault("sums were loaded from a slot that does not hold them");
    return;
  }
  ForgetPaged(job, a.offset_bytes, a.bytes);
  for (const auto& [offset, sum] : found->second.sums) job.paged[a.offset_bytes + offset] = sum;
}

}  // namespace forebay::testing
