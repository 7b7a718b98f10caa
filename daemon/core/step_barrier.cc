#include "daemon/core/step_barrier.h"

#include <bit>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::daemon {
namespace {

using protocol::HyperParams;

// Scalars are compared as the bits they are.
bool Same(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

// "lr of parameter group 0: 0.1 and 0.2", or empty.
std::string Difference(const StepCall& a, const StepCall& b) {
  const auto differ = [](std::string_view what, auto x, auto y) {
    return absl::StrCat(std::string(what), ": ", x, " and ", y);
  };
  if (a.request.param_groups != b.request.param_groups) {
    return differ("parameter groups", a.request.param_groups, b.request.param_groups);
  }
  if (!Same(a.request.max_grad_norm, b.request.max_grad_norm)) {
    return differ("max_grad_norm", a.request.max_grad_norm, b.request.max_grad_norm);
  }
  struct Field {
    std::string_view name;
    double HyperParams::*member;
  };
  constexpr Field kFields[] = {{"lr", &HyperParams::lr},
                               {"beta1", &HyperParams::beta1},
                               {"beta2", &HyperParams::beta2},
                               {"eps", &HyperParams::eps},
                               {"weight_decay", &HyperParams::weight_decay}};
  for (size_t i = 0; i < a.request.param_groups; ++i) {
    for (const Field& field : kFields) {
      const double x = a.hyper_params[i].*field.member;
      const double y = b.hyper_params[i].*field.member;
      if (!Same(x, y)) {
        return differ(absl::StrCat(std::string(field.name), " of parameter group ", i), x, y);
      }
    }
  }
  return {};
}

}  // namespace

absl::Status StepBarrier::Compare(uint32_t rank, const StepCall& call) const {
  if (barrier_.empty()) return absl::OkStatus();
  const auto& [other_rank, other] = *barrier_.begin();
  const std::string difference = Difference(other, call);
  if (difference.empty()) return absl::OkStatus();
  return protocol::MakeError(
      protocol::ErrorId::kStep,
      absl::StrCat("ranks ", other_rank, " and ", rank, " called step ", call.request.step,
                   " with different scalars: ", difference),
      "call step again with the same scalars on every rank; the gradients are kept");
}

std::map<uint32_t, StepCall> StepBarrier::Drain() { return std::exchange(barrier_, {}); }

}  // namespace forebay::daemon
