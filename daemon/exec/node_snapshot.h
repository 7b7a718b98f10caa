// SPDX-License-Identifier: Apache-2.0
// A snapshot of the node as values, taken on the loop thread and written into a message on the
// control thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/core/node/node_state.h"
#include "daemon/exec/arena_registry.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/path_wear.h"
#include "daemon/exec/scrub.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"
#include "nvme/io/io_engine.h"
#include "nvme/path_probe.h"
#include "nvme/volume.h"

namespace forebay::daemon {

struct SwapPathSnapshot {
  std::string path;
  nvme::PathStats stats;
  SwapPathView view;
  PathWear wear;
  std::optional<nvme::PathRates> rates = {};
  // Number of requests that the device has not answered in time, and the waiting time of the oldest of them.
  uint32_t late_requests = 0;
  double late_seconds = 0;
};

struct JobSnapshot {
  JobView view;
  double last_step_seconds = 0;
  double last_decision_seconds = 0;
  uint64_t rpc_calls = 0;
  // Bytes of arenas and swap slots created so far, and the bytes to create. Both are 0 once the job is created.
  uint64_t made_bytes = 0;
  uint64_t making_bytes = 0;
};

struct NodeSnapshot {
  double uptime_seconds = 0;
  NodeView node;
  MemoryTotals memory;
  std::vector<ArenaLine> arenas;
  std::vector<SwapPathSnapshot> swap;
  std::vector<JobSnapshot> jobs;
  std::string io_engine;
  std::string io_engine_reason;
  std::string adam_target;
  uint32_t workers = 0;
  ScrubProgress scrub;
  uint64_t loop_events = 0;
  double loop_cpu_seconds = 0;
};

struct SnapshotSources {
  uint64_t start_ns;  // MonotonicNs of the daemon's start
  const NodeState& state;
  ArenaRegistry& registry;
  const JobMemoryTable& jobs;
  const SwapSpace* swap;  // may be null
  const TaskRunner& runner;
  const nvme::IoEngine& engine;
  const std::string& io_engine_reason;
  ScrubProgress scrub;
  uint64_t events;  // number of events that the executor has handled
};

// Returns a snapshot of the node. Call it on the loop thread: loop_cpu_seconds is the CPU time of the calling thread.
NodeSnapshot MakeSnapshot(const SnapshotSources& from);

}  // namespace forebay::daemon
