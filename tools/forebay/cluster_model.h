// SPDX-License-Identifier: Apache-2.0
// A cluster of equal nodes that train one model by ZeRO-3 on Forebay, in closed form: what each node holds,
// what crosses each link in a step, and how long a step takes at given rates.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "protocol/optimizer_ids.h"

namespace forebay::tools {

// Rates are in GB/s (1e9 bytes), of a node unless they say otherwise, each way; 0: that part takes no time.
struct ClusterOptions {
  uint32_t nodes = 0;  // 0: not of a cluster
  uint32_t gpus = 8;   // GPUs of each node
  // GPUs of a node that split each layer; the others of the cluster are data-parallel to it. Divides `gpus`.
  uint32_t tensor_parallel = 1;
  uint64_t tokens = 2048;     // tokens of one step for each GPU of the cluster
  bool recompute = false;     // activation checkpointing: a second forward under backward
  double gpu_tflops = 0;      // rate of a GPU that never waits
  double gpu_link_rate = 0;   // one GPU to the other GPUs of its node
  double link_rate = 0;       // one node to the other nodes
  double host_link_rate = 0;  // between DRAM and all GPUs of the node
  double update_rate = 0;     // DRAM traffic of the optimizer's pass
  // Rates of a node's swap. Reads and writes share the disk: their times add up.
  double read_rate = 0;
  double write_rate = 0;
  // True: the update runs during backward and the next forward. False: it runs after backward.
  bool early_updates = true;
  // Limits of one node. dram_bytes 0: DRAM holds everything. swap_bytes 0: no limit.
  uint64_t dram_bytes = 0;
  uint64_t swap_bytes = 0;
};

struct ClusterModel {
  uint64_t params = 0;
  uint64_t layers = 0;  // groups that are gathered one after the other
  protocol::DType dtype = protocol::DType::kBFloat16;
  protocol::Format format = protocol::Format::kExact;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
};

// Bytes of one node.
struct ClusterMemory {
  double params = 0;  // elements whose states the node owns
  double weights = 0;
  double states = 0;
  double gradients = 0;    // retained until their step is decided
  double new_weights = 0;  // those of swapped blocks that are updated early
  double weights_on_swap = 0;
  double states_on_swap = 0;
  double gradients_on_swap = 0;  // written and read again, at most; the closed form places none
  double swap = 0;               // two slots for each block

  double dram() const { return weights + states + gradients + new_weights; }
};

// Bytes of one step through the links of one node. `gpu_link` counts the bytes into one GPU. As many bytes leave as enter.
struct ClusterTraffic {
  double link = 0;
  double gpu_link = 0;
  double to_gpus = 0;
  double from_gpus = 0;
  double swap_read = 0;
  double swap_written = 0;
  double update = 0;     // DRAM bytes of the optimizer's pass
  double additions = 0;  // DRAM bytes to add gradients up: each piece is read, and its sum written
};

// Seconds of one step. Each part counts the seconds that it takes alone.
struct ClusterTime {
  double compute = 0;
  double link = 0;
  double gpu_link = 0;
  double host_link = 0;  // the longer of both directions
  double swap = 0;
  double update = 0;
  double additions = 0;
  // The first group of forward and the last gradient of backward, which no compute hides.
  double tail = 0;
  // Seconds of compute from which only the tail shows. 0 without early updates.
  double hiding = 0;
  double step = 0;
  std::string bound;   // the part that determines the step: "compute"
  double exposed = 0;  // (step - compute) / compute
  double tflops = 0;   // rate of one GPU averaged over the whole step
};

struct ClusterPlan {
  ClusterMemory node;
  ClusterTraffic traffic;
  ClusterTime seconds;
};

// Computes memory, traffic and time of a step:
// - The copy and the gather of one group overlap the compute of the group before it.
// - The update of states on swap overlaps forward and backward.
// - The update of states in DRAM follows the decision. It overlaps the next forward, which waits for each group in turn.
// - Without early updates, all updates follow backward.
//
// Errors  E_OPTION      a number breaks its rule above, or the format does not support the weights' type.
//         E_DRAM_LIMIT  the gradients, or the gradients and two layers of weights, do not fit; names both sizes in bytes.
//         E_SWAP_NOSPC  the bytes that do not fit in DRAM do not fit on swap either.
absl::StatusOr<ClusterPlan> PlanCluster(const ClusterModel& model, const ClusterOptions& options);
// The same for a node whose bytes are placed already.
absl::StatusOr<ClusterPlan> PlanPlaced(const ClusterModel& model, const ClusterOptions& options,
                                       const ClusterMemory& node);

// The closed form and the simulation of a node share the following functions and constants.

// Collectives of a step: gathers of the weights for forward and for backward, and the reduce-scatter of the gradient.
inline constexpr double kCollectives = 3;
// Pieces of gradients that the arena of a rank has room for. A rank on a GPU has room for three layers (attach_request.cc), which
// neither the closed form nor the simulation counts.
inline constexpr uint64_t kPiecesOfARank = 2;
// Seconds to transfer `bytes` at `rate` GB/s. Returns 0 if the rate is 0.
double TransferSeconds(double bytes, double rate);
// Bytes that an update reads and writes in DRAM for one parameter: states, gradient and weights.
double UpdateBytesPerParam(const ClusterModel& model);
// Share of forward in the compute of a step.
double ForwardShare(const ClusterOptions& options);

// Operations of one GPU in one step: 6 a parameter and token, 8 with recomputation.
double ClusterFlops(const ClusterModel& model, const ClusterOptions& options);

nlohmann::ordered_json SecondsJson(const ClusterTime& time);
nlohmann::ordered_json ClusterJson(const ClusterModel& model, const ClusterOptions& options,
                                   const ClusterPlan& plan);
std::string ClusterText(const ClusterModel& model, const ClusterOptions& options,
                        const ClusterPlan& plan);

}  // namespace forebay::tools
