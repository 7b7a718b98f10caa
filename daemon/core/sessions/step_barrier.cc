// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/sessions/step_barrier.h"

#include <bit>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"

namespace forebay::daemon {
namespace {

// True if two scalars have the same bits.
bool Same(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

std::string Differ(std::string_view what, auto x, auto y) {
  return absl::StrCat(std::string(what), ": ", x, " and ", y);
}

}  // namespace

std::string DifferenceOfScalars(const StepCall& a, const StepCall& b,
                                protocol::Optimizer optimizer) {
  if (a.request.param_groups != b.request.param_groups) {
    return Differ("parameter groups", a.request.param_groups, b.request.param_groups);
  }
  if (!Same(a.request.grad_scale, b.request.grad_scale)) {
    return Differ("grad_scale", a.request.grad_scale, b.request.grad_scale);
  }
  if (!Same(a.request.grad_min, b.request.grad_min)) {
    return Differ("grad_min", a.request.grad_min, b.request.grad_min);
  }
  if (!Same(a.request.grad_max, b.request.grad_max)) {
    return Differ("grad_max", a.request.grad_max, b.request.grad_max);
  }
  for (size_t i = 0; i < a.request.param_groups; ++i) {
    for (const protocol::HyperParamInfo& info : protocol::Info(optimizer).hyper_params) {
      const double x = a.hyper_params[i].*info.field;
      const double y = b.hyper_params[i].*info.field;
      if (!Same(x, y)) {
        return Differ(absl::StrCat(std::string(info.name), " of parameter group ", i), x, y);
      }
    }
  }
  return {};
}

absl::Status StepBarrier::Compare(uint32_t rank, const StepCall& call,
                                  const protocol::Layout& layout) const {
  if (barrier_.empty()) return absl::OkStatus();
  const auto& [other_rank, other] = *barrier_.begin();
  std::string difference = DifferenceOfScalars(other, call, layout.spec().optimizer);
  const double norm = call.request.max_grad_norm;
  if (difference.empty() && !Same(other.request.max_grad_norm, norm)) {
    difference = Differ("max_grad_norm", other.request.max_grad_norm, norm);
  }
  if (difference.empty()) return absl::OkStatus();
  return protocol::MakeError(
      protocol::ErrorId::kStep,
      absl::StrCat("ranks ", layout.WorldRank(other_rank), " and ", layout.WorldRank(rank),
                   " called step ", call.request.step, " with different scalars: ", difference),
      "call step again with the same scalars on every rank; the gradients are kept");
}

StepBarrier::Calls StepBarrier::Drain() { return std::exchange(barrier_, {}); }

}  // namespace forebay::daemon
