// SPDX-License-Identifier: Apache-2.0
// Exchanges swap slots between a job and its node.
#pragma once

#include <cstdint>
#include <optional>

#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/plan/memory_plan.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

// The ledger has the slots of the job, and the placement says how many the job needs. With durable steps, a block that has moved
// or was written between steps needs an additional slot until the next durable step.
//
// Ownership  The arguments of the constructor outlive this object.
class SwapSlots {
 public:
  // `swap`: free slots of the node. A write takes one if the job has no free slot on the write's path.
  SwapSlots(const BlockMap& map, const MemoryPlan& plan, const Placement& placement,
            BlockLedger& ledger, nvme::SlotMap& swap, PathTable& path_table)
      : map_(map),
        plan_(plan),
        placement_(placement),
        ledger_(ledger),
        swap_(swap),
        path_table_(path_table) {}

  // Allocates the slot for the block's next version.
  BlockLedger::Target AllocateTarget(uint32_t block);
  // Allocates the slot for a copy of an entry of the ledger that is in DRAM.
  BlockLedger::Target AllocateSave(uint32_t entry);
  // Takes one slot from the node, on a path that works, if no free slot of the job is on such a path.
  void AddSpare();
  // Provides a swap slot for a new version of the block between steps, in addition to slots that durable steps name. Takes one
  // slot from the node if the job has too few slots for that version and the next step. False if the node has no free slot.
  enum class NodeSlot : uint8_t { kAny, kOnWorkingPath };
  bool AddForVersion(uint32_t block, NodeSlot which = NodeSlot::kAny);
  // Like AddForVersion(), for a slot on a path that works.
  bool AddForMove(uint32_t block);
  bool AddNodeSlot(NodeSlot which = NodeSlot::kAny);
  // Returns slots that the placement does not need to the node, while no step runs. ReturnSurplus() does nothing with durable
  // steps.
  void ReturnSurplus();
  void ReturnFree();

 private:
  BlockLedger::Target Allocate(std::optional<BlockLedger::Target> (BlockLedger::*begin)(uint32_t),
                               uint32_t entry);
  void Exchange();
  void ExchangeOn(uint32_t path);
  uint32_t WantedBy(uint32_t block) const;
  uint64_t Wanted() const;

  const BlockMap& map_;
  const MemoryPlan& plan_;
  const Placement& placement_;
  BlockLedger& ledger_;
  nvme::SlotMap& swap_;
  PathTable& path_table_;
};

}  // namespace forebay::daemon
