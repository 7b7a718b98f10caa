// SPDX-License-Identifier: Apache-2.0
// Values with which a job is created.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/node_options.h"
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
  std::vector<nvme::Slot> swap_slots;  // slots for blocks and for parts of the weights
  std::vector<nvme::Slot> sum_slots;   // slots for pages of gradient sums
  NodeOptions options;
  // The job as this daemon has recovered it from a ledger or from the previous daemon. The slots of its blocks are in
  // `swap_slots`. Null for a new job.
  std::shared_ptr<const DurableJob> recovered = {};
  // True if the ranks reattach with the grad arenas that they have mapped. The previous daemon has retained these arenas.
  bool keeps_gradients = false;

  // The memory of `recovered` that was retained, and the update that the previous daemon did not end. Null if there is none.
  const KeptMemory* kept() const { return KeptOf(recovered.get()); }
  const KeptUpdate* kept_update() const {
    return kept() == nullptr ? nullptr : kept()->update.get();
  }

  uint32_t world_size() const { return plan.session.world_size; }
  bool is_over_nodes() const { return plan.session.world_ranks > 0; }
};

}  // namespace forebay::daemon
