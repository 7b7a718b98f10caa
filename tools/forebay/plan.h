// SPDX-License-Identifier: Apache-2.0
// `forebay plan`: what a job would take, before there is one; and what one that is there takes.
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
  // One of these.
  std::string job;           // as it is on this node; with `dram` on another one
  std::string hugging_face;  // a config.json
  uint64_t params = 0;       // in `layers` layers of one size
  uint64_t width = 0;        // of a decoder of `layers` layers
  uint32_t layers = 32;
  uint64_t vocab = 50257;

  uint32_t ranks = 1;
  bool is_shared = false;
  bool is_on_gpu = false;  // not of a shared job
  bool accumulate = false;
  std::string buffers = {};   // bytes of the model's persistent buffers; empty: none
  bool early_updates = true;  // not of a shared job
  std::string dtype = "bfloat16";
  std::string format = {};  // empty: exact for bfloat16, else fp32
  std::string optimizer = "adamw";
  std::string durability = {};  // "memory", "epoch=N", "step"; empty: the daemon's default
  // Of another node, with this daemon's settings; empty: this node as it is.
  std::string dram;
  std::string swap_size;
  // Of the node's swap, GB/s; 0: no time is shown.
  double read_rate = 0;
  double write_rate = 0;
  // Of forward and backward, seconds a step; 0: not known.
  double compute_s = 0;
  bool as_json = false;
  // With nodes: of a cluster, by its closed form, without a daemon. Its rates of swap, placing and early_updates
  // are those above.
  ClusterOptions cluster;
};

// What options of a cluster say.
//
// Errors  E_OPTION  none or two models, or a name or size that is none.
absl::StatusOr<ClusterModel> ClusterModelOf(const PlanOptions& options);
absl::StatusOr<ClusterOptions> ClusterOptionsOf(const PlanOptions& options);

// Prints the plan.
//
// Errors  E_OPTION; those of AdminClient::Plan and PlanJob, with the sum where it does not fit.
absl::Status Plan(const PlanOptions& options);

}  // namespace forebay::tools
