// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/gpu_step.h"

#include <cmath>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "protocol/optimizer.h"
#include "protocol/units.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

// Tokens of a step from which only the tail shows. 0: no number of tokens is enough, or compute is unknown.
uint64_t HidingTokens(const GpuStep& step) {
  const ClusterTime& time = step.plan.seconds;
  if (time.compute == 0) return 0;
  return static_cast<uint64_t>(
      std::ceil(static_cast<double>(step.options.tokens) * time.hiding / time.compute));
}

}  // namespace

absl::StatusOr<ClusterPlan> PlanGpuStep(const ClusterModel& model, const ClusterOptions& options,
                                        schema::JobPlan::Reader placed) {
  ClusterMemory node{.params = static_cast<double>(model.params),
                     .weights = static_cast<double>(placed.getWeights()),
                     .states = static_cast<double>(placed.getStates()),
                     .gradients = static_cast<double>(model.params) *
                                  static_cast<double>(protocol::SizeBytes(model.dtype)),
                     .new_weights = static_cast<double>(placed.getNewWeights()),
                     .weights_on_swap = static_cast<double>(placed.getWeightsOnSwap()),
                     .gradients_on_swap = static_cast<double>(placed.getGradientsOnSwap()),
                     .swap = static_cast<double>(placed.getSwap())};
  for (const auto rank : placed.getRanks()) {
    node.states_on_swap += static_cast<double>(rank.getStatesOnSwap());
  }
  return PlanPlaced(model, options, node);
}

std::string GpuStepText(const GpuStep& step) {
  const ClusterTime& time = step.plan.seconds;
  const ClusterTraffic& traffic = step.plan.traffic;
  Table table({"PER STEP", "BYTES", "SECONDS"});
  const auto add = [&](std::string what, double bytes, double seconds) {
    table.Add({std::move(what),
               bytes > 0 ? protocol::FormatBytes(static_cast<uint64_t>(bytes)) : "-",
               seconds > 0 ? absl::StrFormat("%.3f", seconds) : "-"});
  };
  add(absl::StrCat("compute of ", step.options.tokens, " tokens"), 0, time.compute);
  add("DRAM to the GPUs", traffic.to_gpus,
      TransferSeconds(traffic.to_gpus, step.options.host_link_rate));
  add("GPUs to DRAM", traffic.from_gpus,
      TransferSeconds(traffic.from_gpus, step.options.host_link_rate));
  add("update, after the decision for states in DRAM", traffic.update, time.update);
  add("additions of gradients", traffic.additions, time.additions);
  if (time.swap > 0) add("swap", traffic.swap_read + traffic.swap_written, time.swap);
  add("tail: first and last group", 0, time.tail);
  std::string text = absl::StrCat("\n", table.Text());
  if (step.plan.node.swap > 0 && time.swap == 0) {
    absl::StrAppend(&text, "\nthe disk is not counted: give --read-rate and --write-rate\n");
  }
  absl::StrAppendFormat(&text, "\na step takes %.3f s and waits for %s", time.step, time.bound);
  if (time.compute == 0) return text + "\n";
  absl::StrAppendFormat(&text, ": %.0f %% more than compute\n", 100 * time.exposed);
  if (const uint64_t tokens = HidingTokens(step); tokens > step.options.tokens) {
    absl::StrAppend(&text, "more tokens a step hide more: from ", tokens,
                    " on, only the tail shows\n");
  }
  if (step.with_int8) {
    const ClusterTime& with_int8 = step.with_int8->seconds;
    absl::StrAppendFormat(&text, "--format int8 takes %.3f s, %.0f %% more than compute\n",
                          with_int8.step, 100 * with_int8.exposed);
  }
  return text;
}

nlohmann::ordered_json GpuStepJson(const GpuStep& step) {
  nlohmann::ordered_json json = SecondsJson(step.plan.seconds);
  json["hiding_tokens"] = HidingTokens(step);
  if (step.with_int8) json["step_with_int8"] = step.with_int8->seconds.step;
  return json;
}

}  // namespace forebay::tools
