#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/internal/session.h"
#include "client/internal/stopwatch.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {
namespace {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

constexpr uint64_t kReadPieceBytesMax = uint64_t{4} << 20;

}  // namespace

absl::StatusOr<std::vector<std::byte>> Session::EncodeStep(
    uint64_t t, std::span<const protocol::HyperParams> hyper_params, double max_grad_norm,
    std::span<const std::byte> extra_state) const {
  if (extra_state.size() > options_.extra_state_bytes) {
    return MakeError(ErrorId::kExtraState,
                     absl::StrCat("extra_state has ", extra_state.size(), " bytes; ",
                                  options_.extra_state_bytes, " were taken at attach"),
                     "attach with a larger extra_state_bytes");
  }
  if (hyper_params.empty() || hyper_params.size() > protocol::kParamGroupsMax) {
    return MakeError(ErrorId::kOption, absl::StrCat(hyper_params.size(), " parameter groups (1 to ",
                                                    protocol::kParamGroupsMax, ")"));
  }
  protocol::StepRequest header{};
  header.step = t;
  header.param_groups = static_cast<uint32_t>(hyper_params.size());
  header.extra_state_bytes = static_cast<uint32_t>(extra_state.size());
  header.max_grad_norm = max_grad_norm;
  std::vector<std::byte> request;
  request.reserve(sizeof(header) + hyper_params.size_bytes() + extra_state.size());
  const auto append = [&request](std::span<const std::byte> bytes) {
    request.insert(request.end(), bytes.begin(), bytes.end());
  };
  append(std::as_bytes(std::span(&header, 1)));
  append(std::as_bytes(hyper_params));
  append(extra_state);
  if (request.size() > options_.step_region_bytes) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("a step request of ", request.size(), " bytes; the region has ",
                                  options_.step_region_bytes));
  }
  return request;
}

absl::StatusOr<StepResult> Session::Step(uint64_t t,
                                         std::span<const protocol::HyperParams> hyper_params,
                                         double max_grad_norm,
                                         std::span<const std::byte> extra_state, Timeout timeout) {
  const Stopwatch stopwatch(gauge_.wait_ns_step);
  const absl::Status kept = DrainKeptErrors();
  // What is not finite the daemon also knows: its answer frees every rank to repeat the step.
  if (!kept.ok() && protocol::IdOf(kept) != ErrorId::kNonfinite) return kept;
  ASSIGN_OR_RETURN(std::vector<std::byte> request,
                   EncodeStep(t, hyper_params, max_grad_norm, extra_state));
  const WaitLimits limits = Limits(timeout);
  if (step_.has_value() && (step_->t != t || step_->request != request)) {
    if (!step_->answer->arrived) {
      return MakeError(ErrorId::kStep,
                       absl::StrCat("step ", step_->t, " is still under way; step ", t,
                                    " or other scalars cannot begin before it ends"),
                       "repeat the call with the arguments of the step that is under way");
    }
    const absl::Status forgotten = step_->answer->status;
    step_.reset();
    RETURN_IF_ERROR(forgotten);
  }
  if (!step_.has_value()) RETURN_IF_ERROR(BeginStep(t, std::move(request), limits));
  const absl::Status waited = port_.Wait([&] { return step_->answer->arrived; }, limits);
  gauge_.sleeps = port_.sleeps();
  RETURN_IF_ERROR(waited);
  return EndStep();
}

absl::Status Session::BeginStep(uint64_t t, std::vector<std::byte> request,
                                const WaitLimits& limits) {
  RETURN_IF_ERROR(CopyIn(options_.step_region_offset, request));
  Command command = MakeCommand(Op::kStep);
  command.step = t;
  command.arena_offset_bytes = options_.step_region_offset;
  command.length_bytes = request.size();
  ASSIGN_OR_RETURN(std::shared_ptr<Answer> answer, Begin(command, limits));
  step_ = StepInFlight{.t = t, .request = std::move(request), .answer = std::move(answer)};
  return absl::OkStatus();
}

absl::StatusOr<StepResult> Session::EndStep() {
  const Answer answer = *step_->answer;
  step_.reset();
  const bool nonfinite = protocol::IdOf(answer.status) == ErrorId::kNonfinite ||
                         protocol::IdOf(kept_grad_error_) == ErrorId::kNonfinite;
  absl::Status kept = kept_grad_error_;
  if (nonfinite) kept_grad_error_ = absl::OkStatus();
  RETURN_IF_ERROR(answer.status);
  RETURN_IF_ERROR(kept);
  return StepResult{.committed_step = answer.completion.committed_step,
                    .norm = answer.completion.norm,
                    .clipped = (answer.completion.flags & protocol::kStepClipped) != 0,
                    .repeated = (answer.completion.flags & protocol::kStepRepeated) != 0};
}

// ----------------------------------------------------------------------------------------------
// state

absl::Status Session::ReadState(const StateRange& range, std::span<std::byte> out,
                                Timeout timeout) {
  const Stopwatch stopwatch(gauge_.wait_ns_other);
  RETURN_IF_ERROR(CheckGroup(range.group));
  const protocol::LayoutSpec& spec = options_.layout->spec();
  const auto planes = protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype);
  const uint64_t padded = options_.layout->groups()[range.group].padded_elems;
  const protocol::Plane plane = range.plane < planes.size()
                                    ? planes[range.plane]
                                    : protocol::Plane{{}, protocol::DType::kInt8};
  const uint64_t width = protocol::SizeBytes(plane.dtype);
  const uint64_t elems = out.size() / width * plane.elems_per_value;
  if (range.plane >= planes.size() || out.size() % width != 0 || elems > padded ||
      range.element_offset > padded - elems || range.element_offset % plane.elems_per_value != 0) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("plane ", range.plane, " of ", planes.size(), ", elements ",
                                  range.element_offset, " to ", range.element_offset, " + ", elems,
                                  " of ", padded, " in group ", range.group));
  }
  const WaitLimits limits = Limits(timeout);
  const uint64_t piece_bytes_max =
      std::min(options_.layout->largest_group_bytes(), kReadPieceBytesMax);
  for (uint64_t done = 0; done < out.size();) {
    const uint64_t piece_bytes = std::min(piece_bytes_max, out.size() - done);
    ASSIGN_OR_RETURN(BusyRange arena, WaitForRange(protocol::RoundUp(piece_bytes, 64), limits));
    Command command = MakeCommand(Op::kReadState, range.group);
    command.kind = static_cast<uint16_t>(range.plane);
    command.arena_offset_bytes = arena.offset_bytes();
    command.length_bytes = piece_bytes;
    command.element_offset = range.element_offset + done / width * plane.elems_per_value;
    RETURN_IF_ERROR(Ask(command, &arena, limits).status());
    RETURN_IF_ERROR(
        stream_->Copy(out.subspan(done, piece_bytes),
                      options_.grad->bytes().subspan(arena.offset_bytes(), piece_bytes)));
    RETURN_IF_ERROR(stream_->Synchronize());
    done += piece_bytes;
  }
  return absl::OkStatus();
}

Counters SessionGauge::Snapshot() const {
  return {.rpc_calls = rpc_calls,
          .commands = commands,
          .sleeps = sleeps,
          .wait_ns_fetch = wait_ns_fetch,
          .wait_ns_grad = wait_ns_grad,
          .wait_ns_step = wait_ns_step,
          .wait_ns_other = wait_ns_other,
          .fetched_bytes = fetched_bytes,
          .grad_bytes = grad_bytes,
          .private_slots = private_slots};
}

}  // namespace forebay::client::internal
