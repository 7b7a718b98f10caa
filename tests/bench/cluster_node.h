// SPDX-License-Identifier: Apache-2.0
// One node of a cluster in virtual time: the daemon's own state machine, with a disk, workers, links and GPUs
// that take as long as their rates say. Nothing sleeps, no byte is moved.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "protocol/layout.h"

namespace forebay::tools {

// Rates are in GB/s; 0: that part takes no time.
struct VirtualNodeOptions {
  std::shared_ptr<const protocol::Layout> layout;  // its owners are the ranks of this node
  uint64_t dram_bytes = 0;                         // 0: everything fits
  uint64_t block_elems = uint64_t{1} << 20;
  uint32_t workers = 2;
  uint64_t staging_bytes = 0;  // 0: the daemon's default
  bool early_updates = true;
  bool drain = true;  // the call of step returns at its decision
  // True: no link is used while GPUs compute. A group is fetched and gathered after the previous group is computed and its
  // gradient is reduced. FSDP2 works like this over gloo.
  bool in_turn = false;
  double compute_s = 0;  // of forward and backward of all groups
  double forward_share = 1.0 / 3;
  // Seconds in which one element of this node's partitions is gathered by all GPUs, and as long for the
  // reduce-scatter of its gradient.
  double gather_s_per_elem = 0;
  double host_link_rate = 0;  // each way; 0: ranks compute where the weights are
  double update_rate = 0;     // DRAM traffic of all workers
  double update_bytes_per_param = 0;
  // Rates of the swap.
  double read_rate = 0;
  double write_rate = 0;
};

struct VirtualSteps {
  double step_s = 0;
  // Averages for one step.
  double read_bytes = 0;
  double written_bytes = 0;
  double disk_s = 0;      // seconds in which the disk worked
  double gpu_wait_s = 0;  // seconds in which the GPUs waited for anything
  // Number of events that the state machine has handled in the whole run.
  uint64_t events = 0;
  uint32_t blocks = 0;
  uint32_t resident_blocks = 0;
  uint64_t weights_on_swap_bytes = 0;
};

// Trains `steps` steps after as many as a steady state takes. All ranks of the node go in lockstep, as
// collectives make them: a group is fetched by all, copied to the GPUs and gathered while the one before
// computes; a gradient is reduced, copied back and delivered in pieces.
//
// Limits  O(blocks + partitions) memory; a few microseconds an event.
// Errors  those of attach, where the job does not fit.
absl::StatusOr<VirtualSteps> SimulateNode(const VirtualNodeOptions& options, uint32_t steps);

}  // namespace forebay::tools
