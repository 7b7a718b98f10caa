// SPDX-License-Identifier: Apache-2.0
// Simulates one node of a cluster in virtual time: the daemon's state machine with modeled disk, workers, links and GPUs,
// whose durations follow from their rates. The simulation does not sleep and moves no bytes.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "protocol/layout.h"

namespace forebay::tools {

// Options of the simulated node. Rates are in GB/s. A part whose rate is 0 takes no time.
struct VirtualNodeOptions {
  std::shared_ptr<const protocol::Layout> layout;  // the owners are this node's ranks
  uint64_t dram_bytes = 0;                         // 0: everything fits
  uint64_t block_elems = uint64_t{1} << 20;
  uint32_t workers = 2;
  uint64_t staging_bytes = 0;  // 0: the daemon's default
  bool early_updates = true;
  bool drain = true;  // the call of step returns at its decision
  // True: no link is used while GPUs compute. A group is fetched and gathered after the previous group is computed and its
  // gradient is reduced. FSDP2 works like this over gloo.
  bool in_turn = false;
  double compute_s = 0;  // forward and backward of all groups
  double forward_share = 1.0 / 3;
  // Seconds to gather one element of this node's partitions on all GPUs. The reduce-scatter of an element's gradient takes
  // the same time.
  double gather_s_per_elem = 0;
  double host_link_rate = 0;  // each way; 0: ranks compute in DRAM, without copies
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

// Simulates `steps` steps after the steps that reach a steady state. Collectives synchronize all ranks of the node. All ranks
// fetch a group, copy it to the GPUs and gather it while the previous group computes. A gradient is reduced, copied to DRAM
// and delivered in pieces.
//
// Limits  O(blocks + partitions) memory; a few microseconds an event.
// Errors  those of attach if the job does not fit.
absl::StatusOr<VirtualSteps> SimulateNode(const VirtualNodeOptions& options, uint32_t steps);

}  // namespace forebay::tools
