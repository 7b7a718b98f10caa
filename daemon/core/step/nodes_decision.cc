// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/nodes_decision.h"

#include <array>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "cpu_adam/square_sum.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/optimizer.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::StepDecision;
using protocol::StepSummary;

void NodesDecision::Prepare(const StepSummary& own, std::span<const uint64_t> digests) {
  prepared_ = protocol::EncodeStepSummary(own);
  const auto bytes = std::as_bytes(digests);
  prepared_.insert(prepared_.end(), bytes.begin(), bytes.end());
}

void NodesDecision::PrepareBefore(std::vector<std::byte> summary) {
  prepared_ = std::move(summary);
  is_prepared_before_ = true;
}

absl::Status NodesDecision::Check(const protocol::Command& command, const StepSummary& summary,
                                  Prepared prepared, const StepCall* own) const {
  if (summary.head.step != command.step || summary.head.decision == StepDecision::kNone) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a decision on step ", command.step, " that is of step ",
                                  summary.head.step, ", or decides nothing"));
  }
  if (summary.head.decision != StepDecision::kCommit) return absl::OkStatus();
  if (prepared == Prepared::kNo && !decision_) {
    return MakeError(ErrorId::kStep, absl::StrCat("step ", command.step, " of job ", spec_.name,
                                                  " is to be committed, and is not prepared"));
  }
  if (summary.head.scalars == ScalarsOf(*own)) return absl::OkStatus();
  return MakeError(ErrorId::kStep, absl::StrCat("step ", command.step, " of job ", spec_.name,
                                                " is to be committed with other scalars than its "
                                                "ranks have called it with"));
}

double NodesDecision::squares() const {
  return cpu_adam::SquareSum::FromDigits(decision_->head.squares).ToDouble();
}

std::pmr::vector<bool> NodesDecision::ParamsWithGradient(std::pmr::memory_resource* memory) const {
  std::pmr::vector<bool> params(decision_->head.params, false, memory);
  for (uint32_t param = 0; param < params.size(); ++param) {
    params[param] = protocol::IsPresent(decision_->present, param);
  }
  return params;
}

void NodesDecision::Commit() {
  if (decision_) last_ = std::exchange(decision_, std::nullopt);
  is_prepared_before_ = false;
}

void NodesDecision::Recover(std::span<const std::byte> last) {
  auto summary = protocol::DecodeStepSummary(last, spec_.layout->params().size());
  if (summary.ok()) last_ = *std::move(summary);
}

std::vector<std::byte> NodesDecision::EncodeLast() const {
  return last_ ? protocol::EncodeStepSummary(*last_) : std::vector<std::byte>();
}

uint64_t NodesDecision::ScalarsOf(const StepCall& call) const {
  std::string bytes;
  const auto add = [&bytes](double value) {
    const auto bits = std::bit_cast<std::array<char, sizeof(value)>>(value);
    bytes.append(bits.data(), bits.size());
  };
  for (const double value : {call.request.grad_scale, call.request.grad_min, call.request.grad_max,
                             call.request.max_grad_norm}) {
    add(value);
  }
  for (const protocol::HyperParams& group : call.hyper_params) {
    for (const auto& info : protocol::Info(spec_.layout->spec().optimizer).hyper_params) {
      add(group.*info.field);
    }
  }
  return protocol::NameHash(bytes);
}

}  // namespace forebay::daemon
