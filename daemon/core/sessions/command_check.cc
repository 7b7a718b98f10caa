// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/sessions/command_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {
namespace {

using protocol::Command;
using protocol::ErrorId;
using protocol::HyperParams;
using protocol::Layout;
using protocol::MakeError;
using protocol::Op;

constexpr uint64_t kArenaAlignBytes = 64;

struct ByteRange {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// Checks that the command's bytes lie within `region` of the arena. Never adds two words of a client, because the sum could
// overflow.
absl::Status CheckWithin(const Command& command, const ByteRange& region) {
  const uint64_t offset = command.arena_offset_bytes;
  const uint64_t length = command.length_bytes;
  if (offset % kArenaAlignBytes != 0) {
    return MakeError(ErrorId::kRange, absl::StrCat("arena offset ", offset,
                                                   " is not a multiple of ", kArenaAlignBytes));
  }
  if (offset < region.offset || offset - region.offset > region.bytes ||
      length > region.bytes - (offset - region.offset)) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat(length, " bytes at arena offset ", offset, " are outside [",
                                  region.offset, ", ", region.offset + region.bytes, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckLength(const Command& command, uint64_t want, std::string_view what) {
  if (command.length_bytes == want) return absl::OkStatus();
  return MakeError(ErrorId::kRange,
                   absl::StrCat("length ", command.length_bytes, " is not that of ",
                                std::string(what), ", ", want, " bytes"));
}

// Checks that a rank with sharded attachment writes only its own partitions.
absl::Status CheckOwner(uint32_t partition, const Layout& layout, const CommandLimits& limits) {
  const uint32_t owner = layout.partitions()[partition].owner;
  if (layout.is_shared() || owner == limits.rank) return absl::OkStatus();
  return MakeError(ErrorId::kRank,
                   absl::StrCat("rank ", layout.WorldRank(limits.rank), " writes partition ",
                                partition, " (", layout.PartitionName(partition),
                                "), which is rank ", layout.WorldRank(owner), "'s"),
                   "each rank writes the parameters and gradients of its own partitions");
}

// Checks that the command names whole float32 elements of an object of `elems` elements, within the gradients' part of the
// arena.
absl::Status CheckFloats(const Command& command, uint64_t elems, std::string_view what,
                         const ByteRange& gradients) {
  const uint64_t count = command.length_bytes / sizeof(float);
  if (count == 0 || command.length_bytes % sizeof(float) != 0 || count > elems ||
      command.element_offset > elems - count) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat(command.length_bytes, " bytes of float32 from element ",
                                  command.element_offset, " are outside ", std::string(what),
                                  " of ", elems, " elements"));
  }
  return CheckWithin(command, gradients);
}

// Checks that the command names a range (see wire.h) within the first `partition_elems` of a partition, that the length is
// exactly that of the range, and that the bytes are within the gradients' part of the arena.
absl::Status CheckElemRange(const Command& command, uint64_t partition_elems, protocol::DType dtype,
                            const ByteRange& gradients) {
  const uint64_t width = protocol::SizeBytes(dtype);
  const uint64_t elems = command.length_bytes / width;
  const bool fits = command.length_bytes <= protocol::kGradPieceBytesMax &&
                    command.element_offset < partition_elems &&
                    elems <= partition_elems - command.element_offset;
  if (!fits || elems == 0 || command.length_bytes % width != 0 ||
      command.element_offset % protocol::kGradUnitElems != 0 ||
      (elems % protocol::kGradUnitElems != 0 &&
       command.element_offset + elems != partition_elems)) {
    return MakeError(
        ErrorId::kRange,
        absl::StrCat(command.length_bytes, " bytes from element ", command.element_offset,
                     " are no range of partition ", command.partition, ", which has ",
                     partition_elems, " elements of ", width,
                     " bytes: a range begins at a multiple of ", protocol::kGradUnitElems,
                     " elements, ends at one or at the partition's end, and ", "has at most ",
                     protocol::kGradPieceBytesMax, " bytes"));
  }
  return CheckWithin(command, gradients);
}

// Refuses gradients of a partition whose parameters are all frozen.
absl::Status CheckTrainable(uint32_t partition, const Layout& layout) {
  if (layout.partitions()[partition].gradient_elems > 0) return absl::OkStatus();
  return MakeError(ErrorId::kUnsupported,
                   absl::StrCat("a gradient for ", layout.DescribePartition(partition),
                                ", whose parameters are all frozen"),
                   "deliver gradients of trainable parameters alone");
}

// Checks a command whose `partition` field is a parameter.
absl::Status CheckParam(uint32_t param, const Layout& layout) {
  if (param < layout.params().size()) return absl::OkStatus();
  return MakeError(ErrorId::kRange, absl::StrCat("there is no parameter ", param, ": the job has ",
                                                 layout.params().size(), " parameters"));
}

// Checks a command whose `kind` field is a state.
absl::Status CheckStateKind(uint16_t kind, const Layout& layout) {
  const size_t states = protocol::StateNames(layout.spec().optimizer).size();
  if (kind < states) return absl::OkStatus();
  return MakeError(ErrorId::kRange,
                   absl::StrCat("there is no state ", kind, ": the optimizer has ", states));
}

absl::Status CheckHasStates(uint32_t param, const Layout& layout) {
  if (layout.params()[param].trainable) return absl::OkStatus();
  return MakeError(
      ErrorId::kRange,
      absl::StrCat("parameter ", layout.spec().params[param].name, " is frozen: no states"),
      "its weights are all there is of it");
}

absl::Status CheckReadState(const Command& command, const Layout& layout,
                            const ByteRange& gradients) {
  RETURN_IF_ERROR(CheckParam(command.partition, layout));
  RETURN_IF_ERROR(CheckStateKind(command.kind, layout));
  RETURN_IF_ERROR(CheckHasStates(command.partition, layout));
  if (command.length_bytes == 0 && command.element_offset == 0) return absl::OkStatus();
  return CheckFloats(command, layout.params()[command.partition].elems,
                     absl::StrCat("parameter ", layout.spec().params[command.partition].name),
                     gradients);
}

// Checks that a moment is written for trainable parameters alone, and in whole groups of elements that share a scale.
absl::Status CheckMomentRange(const Command& command, const Layout& layout) {
  const uint64_t begin = command.element_offset;
  const uint64_t end = begin + command.length_bytes / sizeof(float);
  const bool has_scales = layout.spec().format == protocol::Format::kInt8;
  const uint64_t align = has_scales ? protocol::kScaleElems : 1;
  for (const protocol::BoxPlace& place : layout.boxes_of(command.partition)) {
    const uint64_t box_begin = place.partition_elem;
    const uint64_t box_end = box_begin + place.box.elems();
    if (box_end <= begin || end <= box_begin) continue;
    RETURN_IF_ERROR(CheckHasStates(place.box.param, layout));
    const bool begins_well = begin <= box_begin || (begin - box_begin) % align == 0;
    const bool ends_well = end >= box_end || (end - box_begin) % align == 0;
    if (begins_well && ends_well) continue;
    return MakeError(
        ErrorId::kRange,
        absl::StrCat("elements ", std::max(begin, box_begin) - box_begin, " to ",
                     std::min(end, box_end) - box_begin, " of this rank's part of parameter ",
                     layout.spec().params[place.box.param].name, " are no whole groups of ", align,
                     " elements, which share a scale"),
        "write from a multiple of it to a multiple of it or to the end of the part");
  }
  return absl::OkStatus();
}

absl::Status CheckWriteState(const Command& command, const Layout& layout,
                             const ByteRange& gradients) {
  RETURN_IF_ERROR(CheckStateKind(command.kind, layout));
  RETURN_IF_ERROR(CheckFloats(command, layout.partitions()[command.partition].elems,
                              absl::StrCat("partition ", command.partition), gradients));
  return command.kind == 0 ? absl::OkStatus() : CheckMomentRange(command, layout);
}

absl::Status CheckWriteUpdates(const Command& command, const Layout& layout) {
  RETURN_IF_ERROR(CheckParam(command.partition, layout));
  RETURN_IF_ERROR(CheckHasStates(command.partition, layout));
  if (command.step <= protocol::kUpdatesMax) return absl::OkStatus();
  return MakeError(ErrorId::kRange,
                   absl::StrCat(command.step, " updates of parameter ",
                                layout.spec().params[command.partition].name, ": at most ",
                                protocol::kUpdatesMax, " can be counted"));
}

absl::Status CheckStepAnswer(const Command& command) {
  if (command.kind <= static_cast<uint16_t>(protocol::StepAnswer::kCommitted)) {
    return absl::OkStatus();
  }
  return MakeError(ErrorId::kProtocol, absl::StrCat("unknown kind of step call ", command.kind));
}

absl::Status CheckPresence(std::span<const uint64_t> presence, const Layout& layout) {
  const uint64_t params = layout.params().size();
  const uint64_t rest = params % 64;
  const bool ends_well = rest == 0 || (!presence.empty() && (presence.back() >> rest) == 0);
  if (presence.size() != protocol::PresenceWords(params) || !ends_well) {
    return MakeError(ErrorId::kRange, absl::StrCat("the presence bitmap has ", presence.size(),
                                                   " words, or a bit beyond the ", params,
                                                   " parameters of the layout (",
                                                   protocol::PresenceWords(params), " words)"));
  }
  for (uint32_t param = 0; param < params; ++param) {
    if (!protocol::IsPresent(presence, param) || layout.params()[param].trainable) continue;
    return MakeError(ErrorId::kUnsupported,
                     absl::StrCat("a gradient of parameter ", layout.spec().params[param].name,
                                  ", which is frozen"),
                     "deliver gradients of trainable parameters alone");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCommand(const Command& command, const Layout& layout,
                          const CommandLimits& limits) {
  if (command.op < static_cast<uint16_t>(Op::kWriteInitial) ||
      command.op > static_cast<uint16_t>(Op::kGoBack)) {
    return MakeError(ErrorId::kProtocol, absl::StrCat("unknown op ", command.op));
  }
  const Op op = static_cast<Op>(command.op);
  const bool has_attempt = op == Op::kGradReady || op == Op::kGradNorm || op == Op::kStep ||
                           op == Op::kAnnounceStep || op == Op::kDecide;
  if (command.attempt != 0 && !has_attempt) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("op ", command.op, " carries attempt ", command.attempt,
                                  "; gradients, step calls and their announcements alone do"));
  }
  const bool writes = op == Op::kWriteInitial || op == Op::kGradReady || op == Op::kWriteState;
  if ((writes || op == Op::kFetch) && command.partition >= layout.partitions().size()) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("there is no partition ", command.partition, ": the job has ",
                                  layout.partitions().size(), " partitions"));
  }
  if (writes) RETURN_IF_ERROR(CheckOwner(command.partition, layout, limits));
  const ByteRange gradients{.offset = 0, .bytes = limits.grad_bytes};
  switch (op) {
    case Op::kWriteInitial:
      return CheckElemRange(command, layout.partitions()[command.partition].elems,
                            layout.spec().dtype, gradients);
    case Op::kWriteState:
      return CheckWriteState(command, layout, gradients);
    case Op::kWriteUpdates:
      return CheckWriteUpdates(command, layout);
    case Op::kGradReady:
      RETURN_IF_ERROR(CheckTrainable(command.partition, layout));
      return CheckElemRange(command, layout.partitions()[command.partition].gradient_elems,
                            layout.grad_dtype(), gradients);
    case Op::kStep:
    case Op::kAnnounceStep:
      if (op == Op::kStep) RETURN_IF_ERROR(CheckStepAnswer(command));
      if (command.length_bytes < sizeof(protocol::StepRequest)) {
        return MakeError(ErrorId::kRange,
                         absl::StrCat("a step request of ", command.length_bytes,
                                      " bytes (at least ", sizeof(protocol::StepRequest), ")"));
      }
      return CheckWithin(command,
                         {.offset = limits.step_region_offset, .bytes = limits.step_region_bytes});
    case Op::kDecide:
      return CheckStepAnswer(command);
    case Op::kGradNorm:
      return command.partition == protocol::kAllParams ? absl::OkStatus()
                                                       : CheckParam(command.partition, layout);
    case Op::kReadState:
      return CheckReadState(command, layout, gradients);
    case Op::kFetch:
      if (command.kind > static_cast<uint16_t>(protocol::FetchKind::kPlace)) {
        return MakeError(ErrorId::kProtocol, absl::StrCat("unknown kind of fetch ", command.kind));
      }
      return absl::OkStatus();
    case Op::kInitialDone:
    case Op::kRelease:
    case Op::kCheck:
    case Op::kGoBack:
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status CheckStepRequest(const Command& command, const StepRequestCopied& copied,
                              const Layout& layout, const CommandLimits& limits) {
  const protocol::StepRequest& request = copied.request;
  const std::span<const HyperParams> hyper_params = copied.hyper_params;
  if (request.step != command.step) {
    return MakeError(ErrorId::kStep, absl::StrCat("the command says step ", command.step,
                                                  ", its request says step ", request.step));
  }
  if (request.param_groups < layout.param_groups() ||
      request.param_groups > layout.param_group_rows()) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("hyper-parameters for ", request.param_groups,
                                  " parameter groups; the layout has ", layout.param_groups(),
                                  " (at most ", layout.param_group_rows(), ")"));
  }
  if (request.extra_state_bytes > limits.extra_state_bytes) {
    return MakeError(ErrorId::kExtraState,
                     absl::StrCat("extra_state of ", request.extra_state_bytes,
                                  " bytes; the session took room for ", limits.extra_state_bytes),
                     "ask for more extra_state_bytes at attach");
  }
  const uint64_t want = sizeof(protocol::StepRequest) +
                        uint64_t{request.param_groups} * sizeof(HyperParams) +
                        protocol::PresenceBytes(layout.params().size()) + request.extra_state_bytes;
  RETURN_IF_ERROR(CheckLength(command, want, "the step request's parts"));
  if (hyper_params.size() < request.param_groups) {
    return MakeError(
        ErrorId::kRange,
        absl::StrCat("the step request ends after the hyper-parameters of ", hyper_params.size(),
                     " of ", request.param_groups, " parameter groups"));
  }
  RETURN_IF_ERROR(CheckPresence(copied.presence, layout));
  if (!(std::abs(request.grad_scale) <= std::numeric_limits<float>::max())) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("grad_scale ", request.grad_scale, " is not finite in float32"),
                     "it is what the gradients were multiplied by after backward (clip_grad_norm_, "
                     "GradScaler, mul_); zero_grad leaves the batch out");
  }
  if (!(request.max_grad_norm >= 0)) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("max_grad_norm ", request.max_grad_norm, " is not 0 or above"));
  }
  const bool has_bounds = request.grad_min != 0 || request.grad_max != 0;
  if (has_bounds && !(request.grad_min < 0 && request.grad_max > 0)) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("gradient bounds ", request.grad_min, " to ", request.grad_max,
                                  " are not below and above 0"));
  }
  if (has_bounds && request.max_grad_norm > 0) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("gradient bounds ", request.grad_min, " to ", request.grad_max,
                                  " beside max_grad_norm ", request.max_grad_norm),
                     "clip gradients by value or by norm");
  }
  for (size_t i = 0; i < request.param_groups; ++i) {
    const absl::Status checked =
        protocol::CheckHyperParams(layout.spec().optimizer, hyper_params[i]);
    if (!checked.ok()) {
      return MakeError(ErrorId::kOption,
                       absl::StrCat("parameter group ", i, ": ", checked.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace forebay::daemon
