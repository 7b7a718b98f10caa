// SPDX-License-Identifier: Apache-2.0
// The time of a step of one node's GPUs: `forebay plan --gpu` with the rates of the machine.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "protocol/forebay.capnp.h"
#include "tools/forebay/cluster_model.h"

namespace forebay::tools {

// A step, and the same step with states in format int8 if this takes less time.
struct GpuStep {
  ClusterOptions options;
  ClusterPlan plan;
  std::optional<ClusterPlan> with_int8;
};

// Returns the closed form of a step with the memory that the daemon has planned.
//
// Errors  E_OPTION  as PlanCluster.
absl::StatusOr<ClusterPlan> PlanGpuStep(const ClusterModel& model, const ClusterOptions& options,
                                        schema::JobPlan::Reader placed);

// Describes the parts of the step, what bounds it, and what makes less of it show beside compute.
std::string GpuStepText(const GpuStep& step);
nlohmann::ordered_json GpuStepJson(const GpuStep& step);

}  // namespace forebay::tools
