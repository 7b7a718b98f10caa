// SPDX-License-Identifier: Apache-2.0
// Swap slots of a job's pages of gradient sums, and the transfers between the slots and frames of the step arena.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/views.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/plan/memory_plan.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

// A page has a slot from the start of its write to swap until FreeSlot(). A page returns from swap with the same bytes: its
// checksum is verified.
class SumSwap {
 public:
  struct Copy {
    std::optional<nvme::Slot> slot = {};
    uint64_t checksum = 0;  // checksum of the bytes in the slot
    uint64_t writes = 0;    // number of writes of the page; part of its identity
  };

  struct Options {
    // Only the constructor reads these. `recorded`: pages of an update of the previous daemon.
    const std::vector<nvme::Slot>& slots;
    std::span<const KeptUpdate::Sums> recorded;
    nvme::SlotMap& swap;  // free slots of the node
    PathTable& path_table;
  };
  SumSwap(JobTasks& io, const MemoryPlan& plan, const Options& options);

  const Copy& copy(uint32_t page) const { return copies_[page]; }
  bool has_free_slot() const { return !free_slots_.empty(); }
  void FreeSlot(uint32_t page);

  // Start a transfer between the page's slot and the frame at `offset_bytes` of the step arena. Write() allocates the slot. If
  // the page's last write has ended with `error`, Write() repeats it in another slot.
  void Write(uint32_t page, uint64_t offset_bytes, const absl::Status& error = {});
  void Read(uint32_t page, uint64_t offset_bytes);
  // Handles the end of a transfer. Returns the page.
  uint32_t OnDone(const TaskDone& done);

  uint32_t writes() const { return writes_; }
  bool is_idle() const { return tasks_.empty(); }
  // OK, or the error of a page's write that is repeated in another slot.
  const absl::Status& write_error() const { return write_error_; }
  const SumsCounters& counters() const { return counters_; }
  // Returns the slots of the constructor, and the slots that the node granted when paths failed.
  const std::set<nvme::Slot>& slots() const { return slots_; }
  // Checks that each slot is free or belongs to one page.
  void CheckInvariants() const;

 private:
  struct Transfer {
    uint32_t page = 0;
    Direction direction = Direction::kRead;
  };

  BlockIdentity IdentityOf(uint32_t page) const;
  nvme::Slot AllocateSlot();

  JobTasks& io_;
  const MemoryPlan& plan_;
  nvme::SlotMap& swap_;  // free slots of the node
  PathTable& path_table_;
  std::set<nvme::Slot> slots_;
  std::pmr::deque<nvme::Slot> free_slots_;
  std::vector<Copy> copies_;  // by page
  std::pmr::map<TaskId, Transfer> tasks_;
  uint32_t writes_ = 0;  // running transfers to swap
  SumsCounters counters_;
  absl::Status write_error_;
};

}  // namespace forebay::daemon
