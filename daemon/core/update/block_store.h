// SPDX-License-Identifier: Apache-2.0
// Phases, placement and ledger of a job's blocks, which change together. They say where the bytes of each block are.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/blocks/block.h"
#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/update/swap_slots.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Invariants (CheckInvariants):
//
//   - A block in DRAM has no staging slot, and no slot as its current version.
//   - The newest version of a block, and its current version, are not newer than the committed step.
//   - The placement moves the block that is in Phase::kMoving.
//   - The job has at least as many slots as the placement needs.
//
// Ownership  The arguments of the constructor outlive this object.
class BlockStore {
 public:
  struct Options {
    const std::vector<nvme::Slot>& swap_slots;  // only the constructor reads the slots
    nvme::SlotMap& swap;
    PathTable& path_table;
    StagingPool& pool;
    bool keeps_jobs = false;
    // See Blocks::Options.
    std::function<bool(uint32_t block)> may_reclaim;
    std::function<uint32_t(uint32_t block)> position;
  };
  BlockStore(JobTasks& io, const protocol::Layout& layout, const BlockMap& map,
             const MemoryPlan& plan, Options options);

  const BlockMap& map() const { return map_; }
  Blocks& blocks() { return blocks_; }
  const Blocks& blocks() const { return blocks_; }
  BlockLedger& ledger() { return ledger_; }
  const BlockLedger& ledger() const { return ledger_; }
  Placement& placement() { return placement_; }
  const Placement& placement() const { return placement_; }
  SwapSlots& slots() { return slots_; }
  PathTable& path_table() const { return path_table_; }

  bool is_resident(uint32_t block) const {
    return placement_.WhereBlock(block).tier == Tier::kDram;
  }
  BlockPlace PlaceOf(uint32_t block) const;
  // Returns the place of a partition's weights from `partition_elem` on: in the weights arena, or in the partition's blocks.
  WeightsPlace PlaceOfWeights(uint32_t partition, uint64_t partition_elem) const;
  // Returns the offset in the step arena of an element's new weights, in bytes.
  uint64_t NewWeightsOffset(uint32_t weights_slot, uint64_t block_elem) const;
  BlockIdentity IdentityOf(uint32_t block) const;
  uint64_t checksum(uint32_t block) const { return ledger_.newest(block).checksum; }
  // Returns the error with the block, and the first parameter that has elements in the block, added to its text.
  absl::Status DescribeBlock(const absl::Status& status, uint32_t block) const;

  // Returns the action that writes a staged block to a free slot.
  WriteBlock BeginWrite(uint32_t block, const BlockIdentity& identity, uint64_t checksum);
  // Returns the record of a version of a block.
  RecordBlock RecordOf(uint32_t block, const BlockLedger::Version& version) const;
  // Call the function of the same name in BlockLedger, and emit a RecordBlock.
  void PublishBlock(uint32_t block);
  void SetResident(uint32_t block);
  // Records that a state of these elements was set, so that their bytes in DRAM differ from the saved copy.
  enum class StateSet : uint8_t { kMasters, kMoment };
  void OnStateSet(const ElementRun& elems, StateSet state);
  // Marks the parts of the weights arena with these elements as changed since they were saved.
  void SetWeightsChanged(uint32_t partition, uint64_t partition_elem, uint64_t elems);

  // Reserves the staging slots in which the previous daemon had blocks. Called on a new store.
  void KeepStaged(const KeptUpdate& update);
  // Sets a new store to the state of a recovered job. Without retained memory, blocks in DRAM are read from swap later.
  void Adopt(const DurableJob& job);

  // True while a block changes its place between steps (Residency or Relocation).
  bool is_moving() const { return blocks_.count(Purpose::kMove) > 0; }
  void CheckInvariants(uint64_t committed_step) const;

 private:
  JobTasks& io_;
  const protocol::Layout& layout_;
  const BlockMap& map_;
  const MemoryPlan& plan_;
  PathTable& path_table_;
  bool keeps_jobs_;
  Blocks blocks_;
  BlockLedger ledger_;
  Placement placement_;
  SwapSlots slots_;
};

}  // namespace forebay::daemon
