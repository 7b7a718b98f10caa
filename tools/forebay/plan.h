// SPDX-License-Identifier: Apache-2.0
// `forebay plan`: the memory and swap that a job would take, or that an existing job takes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/forebay/cluster_model.h"

namespace forebay::tools {

struct PlanOptions {
  std::string socket;
  // Exactly one of the next four names the model.
  std::string job;           // an existing job on this node; with `dram`: planned for another node
  std::string hugging_face;  // a config.json
  uint64_t params = 0;       // elements in `layers` equal layers
  uint64_t width = 0;        // width of a decoder of `layers` layers
  uint32_t layers = 32;
  uint64_t vocab = 50257;

  uint32_t ranks = 1;
  bool is_shared = false;
  bool is_on_gpu = false;  // excludes is_shared
  bool accumulate = false;
  std::string buffers = {};   // bytes of the model's persistent buffers; empty: none
  bool early_updates = true;  // ignored for a shared job
  std::string dtype = "bfloat16";
  std::string format = {};  // empty: exact for bfloat16, else fp32
  std::string optimizer = "adamw";
  std::string durability = {};  // "memory", "epoch=N", "step"; empty: the daemon's default
  // DRAM and swap of another node with this daemon's settings. Empty: plans for this node.
  std::string dram;
  std::string swap_size;
  // Rates of the node's swap, in GB/s. 0: the measured rates of this node; without these, no time is shown.
  double read_rate = 0;
  double write_rate = 0;
  // Seconds that forward and backward compute in a step. 0: unknown.
  double compute_s = 0;
  bool as_json = false;
  // If cluster.nodes > 0, plans a cluster by its closed form, without a daemon. The cluster's swap rates, memory sizes and
  // early_updates are the fields above.
  ClusterOptions cluster;
};

// Returns the model and the cluster that the options describe.
//
// Errors  E_OPTION  the options name no model or several, an unknown name, or a size that cannot be parsed.
absl::StatusOr<ClusterModel> ClusterModelOf(const PlanOptions& options);
absl::StatusOr<ClusterOptions> ClusterOptionsOf(const PlanOptions& options);

// Prints the plan.
//
// Errors  E_OPTION; those of AdminClient::Plan and PlanJob, with the needed sum if the job does not fit.
absl::Status Plan(const PlanOptions& options);

}  // namespace forebay::tools
