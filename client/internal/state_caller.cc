// SPDX-License-Identifier: Apache-2.0
#include "client/internal/state_caller.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

namespace {

constexpr uint64_t kReadPieceElemsMax = uint64_t{1} << 20;

// A parameter and one of its states as the wire numbers them.
struct StateIndex {
  uint32_t param = 0;
  uint16_t state = 0;
};

// Returns the wire's number of an optimizer state. E_RANGE lists the names of the optimizer's states.
absl::StatusOr<uint16_t> StateNumber(const protocol::Layout& layout, std::string_view state) {
  const protocol::Optimizer optimizer = layout.spec().optimizer;
  const std::vector<std::string> states = protocol::StateNames(optimizer);
  const auto found = std::find(states.begin(), states.end(), state);
  if (found != states.end()) return static_cast<uint16_t>(found - states.begin());
  return MakeError(ErrorId::kRange,
                   absl::StrCat("optimizer ", std::string(Name(optimizer)), " has no state \"",
                                std::string(state), "\""),
                   absl::StrCat("its states are ", absl::StrJoin(states, ", ")));
}

absl::StatusOr<StateIndex> IndexOf(const protocol::Layout& layout, const StateRange& range,
                                   uint64_t elems) {
  const protocol::LayoutSpec& spec = layout.spec();
  const auto param = std::find_if(spec.params.begin(), spec.params.end(),
                                  [&](const auto& one) { return one.name == range.param; });
  if (param == spec.params.end()) {
    return MakeError(ErrorId::kRange, absl::StrCat("the layout has no parameter ", range.param));
  }
  ASSIGN_OR_RETURN(const uint16_t state, StateNumber(layout, range.state));
  const auto index = static_cast<uint32_t>(param - spec.params.begin());
  const uint64_t param_elems = layout.params()[index].elems;
  if (elems > param_elems || range.first_elem > param_elems - elems) {
    return MakeError(ErrorId::kRange, absl::StrCat(elems, " elements from element ",
                                                   range.first_elem, " on are outside parameter ",
                                                   range.param, ", which has ", param_elems));
  }
  return StateIndex{.param = index, .state = state};
}

}  // namespace

absl::Status StateCaller::SendElements(protocol::Command command, std::span<const std::byte> bytes,
                                       uint64_t width, const WaitLimits& limits) {
  const uint64_t first_elem = command.element_offset;
  const uint64_t elems = parts_.layout->partitions()[command.partition].elems;
  const uint64_t unit = width * std::min(elems, protocol::kGradUnitElems);
  const uint64_t piece_bytes_max = parts_.layout->largest_piece_bytes() / unit * unit;
  for (uint64_t begin = 0; begin < bytes.size(); begin += piece_bytes_max) {
    const auto piece = bytes.subspan(begin, std::min(piece_bytes_max, bytes.size() - begin));
    ASSIGN_OR_RETURN(BusyRange range, link_.WaitForRange(piece.size(), limits));
    parts_.CopyToArena(range.offset_bytes(), piece);
    command.arena_offset_bytes = range.offset_bytes();
    command.length_bytes = piece.size();
    command.element_offset = first_elem + begin / width;
    RETURN_IF_ERROR(link_.Call(command, &range, limits).status());
  }
  return absl::OkStatus();
}

absl::Status StateCaller::WriteInitial(uint32_t partition, std::span<const std::byte> bytes,
                                       const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckHasRank());
  RETURN_IF_ERROR(parts_.CheckOwn(partition));
  const uint64_t partition_bytes = parts_.layout->partition_bytes(partition);
  if (bytes.size() != partition_bytes) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat(parts_.layout->is_shared() ? "group " : "partition ", partition,
                                  " has ", partition_bytes, " bytes, not ", bytes.size()));
  }
  return SendElements(MakeCommand(Op::kWriteInitial, partition), bytes,
                      SizeBytes(parts_.layout->spec().dtype), limits);
}

absl::Status StateCaller::InitialDone(const WaitLimits& limits) {
  return link_.Call(MakeCommand(Op::kInitialDone), nullptr, limits).status();
}

absl::Status StateCaller::CheckStateRange(const StateRange& range, uint64_t elems) const {
  return IndexOf(*parts_.layout, range, elems).status();
}

absl::StatusOr<uint64_t> StateCaller::ReadState(const StateRange& range, std::span<float> out,
                                                const WaitLimits& limits) {
  ASSIGN_OR_RETURN(const StateIndex index, IndexOf(*parts_.layout, range, out.size()));
  const uint64_t piece_elems_max =
      std::min(link_.slots().largest_bytes() / sizeof(float), kReadPieceElemsMax);
  uint64_t updates = 0;
  uint64_t step = 0;
  if (out.empty()) {
    Command command = MakeCommand(Op::kReadState, index.param);
    command.kind = index.state;
    ASSIGN_OR_RETURN(const Completion completion, link_.Call(command, nullptr, limits));
    return completion.offset_bytes;
  }
  for (uint64_t done = 0; done < out.size();) {
    const std::span<float> piece = out.subspan(done, std::min(piece_elems_max, out.size() - done));
    ASSIGN_OR_RETURN(BusyRange arena, link_.WaitForRange(piece.size_bytes(), limits));
    Command command = MakeCommand(Op::kReadState, index.param);
    command.kind = index.state;
    command.arena_offset_bytes = arena.offset_bytes();
    command.length_bytes = piece.size_bytes();
    command.element_offset = range.first_elem + done;
    ASSIGN_OR_RETURN(const Completion completion, link_.Call(command, &arena, limits));
    updates = completion.offset_bytes;
    // For a reader, the job may commit steps between two pieces.
    const uint64_t step_before = std::exchange(step, completion.committed_step);
    if (done > 0 && step != step_before) {
      done = 0;
      continue;
    }
    const auto read = parts_.grad->bytes().subspan(arena.offset_bytes(), piece.size_bytes());
    std::copy(read.begin(), read.end(), std::as_writable_bytes(piece).begin());
    done += piece.size();
  }
  return updates;
}

absl::Status StateCaller::WriteState(uint32_t partition, uint64_t first_elem,
                                     std::string_view state, std::span<const float> values,
                                     const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckHasRank());
  RETURN_IF_ERROR(parts_.CheckOwn(partition));
  const protocol::Layout& layout = *parts_.layout;
  ASSIGN_OR_RETURN(const uint16_t kind, StateNumber(layout, state));
  const uint64_t elems = layout.partitions()[partition].elems;
  if (first_elem > elems || values.size() > elems - first_elem) {
    return MakeError(
        ErrorId::kRange,
        absl::StrCat(values.size(), " elements from element ", first_elem, " on are outside ",
                     layout.DescribePartition(partition), ", which has ", elems));
  }
  // Checks all values before the first write.
  const protocol::LayoutSpec& spec = layout.spec();
  const auto bad = std::ranges::find_if(values, [&](float value) {
    return !protocol::IsStorable(spec.optimizer, {spec.format, spec.dtype}, kind, value);
  });
  if (bad != values.end()) {
    return MakeError(
        ErrorId::kNonfinite,
        absl::StrCat(std::string(state), " of element ",
                     first_elem + static_cast<uint64_t>(bad - values.begin()), " of ",
                     layout.DescribePartition(partition), " is ", *bad,
                     ", which the job cannot hold: ",
                     kind == 0 ? absl::StrCat("no finite ", std::string(Name(spec.dtype)))
                               : "not finite in its format, or a square below 0"),
        "check the values that are written");
  }
  RETURN_IF_ERROR(weights_.EndReads(limits));
  protocol::Command command = MakeCommand(Op::kWriteState, partition);
  command.kind = kind;
  command.element_offset = first_elem;
  return SendElements(command, std::as_bytes(values), sizeof(float), limits);
}

absl::Status StateCaller::WriteUpdates(uint32_t param, uint64_t updates, const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckHasRank());
  protocol::Command command = MakeCommand(Op::kWriteUpdates, param);
  command.step = updates;
  return link_.Call(command, nullptr, limits).status();
}

}  // namespace forebay::client::internal
