// SPDX-License-Identifier: Apache-2.0
// What a job is made with, and keeps for its life.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/plan/memory_plan.h"
#include "nvme/slot_map.h"
#include "protocol/layout.h"

namespace forebay::daemon {

struct JobSpec {
  JobId id = 0;
  std::string name;
  uint32_t uid = 0;
  std::shared_ptr<const protocol::Layout> layout;
  MemoryPlan plan;
  std::vector<nvme::Slot> swap_slots;  // of blocks
  std::vector<nvme::Slot> sum_slots;   // of pages of gradient sums
  NodeOptions options;
  // The job comes back: what a ledger has named. Its slots are in `swap_slots`.
  std::shared_ptr<const DurableJob> recovered = {};
  // Of one whose arenas were kept: the ranks go on with theirs.
  bool keeps_gradients = false;

  uint32_t world_size() const { return plan.session.world_size; }
  bool is_over_nodes() const { return plan.session.world_ranks > 0; }
};

}  // namespace forebay::daemon
