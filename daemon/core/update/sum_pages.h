// SPDX-License-Identifier: Apache-2.0
// Places of a job's gradient sums. All sums are in the step arena if they fit. Otherwise the sums are in pages, some in the
// step arena and the rest on swap.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/views.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/plan/memory_plan.h"
#include "nvme/slot_map.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Sums that are not paged are always resident, and this class does nothing. A page of paged sums has a frame of the step arena
// while sums are added to the page or an update reads it. While sums are gathered, frames of pages whose blocks have been
// updated early are freed before another page needs a frame. Such a page is needed again only if the decision differs from the
// announcement. If a frame is needed and none is free, the page that was used longest ago is written to swap. In backward's
// order the next forward needs that page last.
//
// After the decision, a page holds the sums of the running step until all blocks of the page are updated. Sums that are
// gathered for the next step use frames that the update does not need, and no page of the running step.
//
// A page returns from swap with the same bytes: its checksum is verified.
class SumPages {
 public:
  // Elements [begin, end) of a partition.
  struct Range {
    uint32_t partition = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  enum class Room : uint8_t {
    kThere,
    kComing,  // each page has a frame, and some pages are being read
    kNone,
  };

  // The arguments outlive this object. `slots`: swap slots for pages of sums.
  SumPages(JobTasks& io, const protocol::Layout& layout, const BlockMap& map,
           const MemoryPlan& plan, const std::vector<nvme::Slot>& slots, nvme::SlotMap& swap,
           PathTable& paths);

  bool is_paged() const { return plan_.has_paged_sums(); }

  // Returns the end of the partition's elements from `elem` on that are on the same page as `elem`.
  uint64_t EndOnPage(uint32_t partition, uint64_t elem) const;
  // Returns the byte offset in the step arena of an element whose page is resident.
  uint64_t OffsetOf(uint32_t partition, uint64_t elem) const;

  // True if sums can be added to the element's page, or read from it. Otherwise requests the page: DrainArrived() returns the
  // page's ranges once the page is resident. An arrived page may be evicted again if it is not pinned before the next Pump(). A
  // kSoon request waits for frames that become free as blocks are updated early. A later request for the same page may be kNow.
  enum class Need : uint8_t { kSoon, kNow };
  bool Request(uint32_t partition, uint64_t elem, Need need);
  std::pmr::vector<Range> DrainArrived();
  bool has_arrived() const { return !arrived_.empty(); }
  // Pin the element's page for a task of the gathering, and unpin it. ForgetGathered() removes all these pins. No page moves
  // while stale tasks run.
  void Pin(uint32_t partition, uint64_t elem);
  void Unpin(uint32_t partition, uint64_t elem);

  // IsThere() is true if all sums of a block are resident, so that the block can be updated. Prepare() also reads the block's
  // sums from swap if enough frames are free.
  bool IsThere(uint32_t block) const;
  Room Prepare(uint32_t block);
  // Pin the pages of a block while an update of the block runs.
  void PinBlock(uint32_t block);
  void UnpinBlock(uint32_t block);
  std::pmr::vector<SumFrame> FramesOf(uint32_t block) const;

  // Begins the update of `blocks` from their sums: the step is decided. Sums of other blocks are deleted. `recorded_step` is
  // the step if the next daemon can continue it (RecordSums), otherwise 0.
  void BeginUpdate(std::span<const uint32_t> blocks, uint64_t recorded_step);
  // Begins to record the places of all pages of a prepared step (RecordPrepared), until BeginUpdate() or EndPrepared().
  void BeginPrepared(uint64_t recorded_step);
  void EndPrepared();
  // Sets the place that a page had in the previous daemon. Called on a new object, before BeginUpdate() and BeginPrepared().
  void Adopt(const KeptUpdate::Sums& sums);
  void EndUpdateOf(uint32_t block);
  // Records, before the decision, that the early update of a block is on swap, or is dropped after all.
  void SetUpdatedEarly(uint32_t block, bool is_updated);
  // Deletes the gathered sums. Retains the sums of the running update.
  void ForgetGathered();

  // Starts the transfers that can start. `has_early_work`: blocks are being updated early.
  void Pump(bool has_early_work);

  // Handle transfers that have ended. After an error sums of the running update are lost.
  void OnSpilled(const TaskDone& done);
  absl::Status OnLoaded(const TaskDone& done);
  // Returns and clears the error of a requested page. OK if no request failed. Errors of the running update's pages do not
  // count.
  absl::Status DrainError() { return std::exchange(error_, absl::OkStatus()); }

  // Stops starting transfers, because the job failed or is deleted.
  void Abandon() { abandoned_ = true; }

  // OK, or the error of a page's write that is repeated in another slot.
  const absl::Status& write_error() const { return write_error_; }
  const SumsCounters& counters() const { return counters_; }
  // Returns the slots of the constructor, and the slots that the node granted when paths failed.
  const std::set<nvme::Slot>& slots() const { return slots_; }
  void CheckInvariants() const;

 private:
  enum class State : uint8_t { kNone, kThere, kSpilling, kOnSwap, kLoading };

  struct Page {
    State state = State::kNone;
    uint32_t frame = 0;                   // frame of the page; not in kNone and kOnSwap
    std::optional<nvme::Slot> slot = {};  // kSpilling, kOnSwap, kLoading
    uint64_t checksum = 0;                // checksum of the bytes in the slot
    uint64_t spills = 0;                  // number of writes to swap; part of the identity
    uint32_t adds = 0;                    // running tasks that add sums to the page
    uint32_t updates = 0;                 // running tasks of updates
    uint32_t updates_left = 0;            // blocks that the running update has not ended yet
    uint32_t prepared = 0;                // blocks with Prepare() called, update not begun
    bool is_requested = false;
    bool is_urgent = false;
    bool has_arrived = false;   // has arrived, not returned by DrainArrived() yet
    bool is_forgotten = false;  // delete the sums when the page's tasks end
    uint64_t used = 0;          // clock_ at the last use of the page
    uint32_t blocks = 0;
    uint32_t blocks_updated_early = 0;  // number of blocks that were updated early
    std::vector<Range> ranges = {};
  };

  // Time of the last use of a page, and the page.
  using ByUse = std::pmr::set<std::pair<uint64_t, uint32_t>>;

  uint64_t VirtualOffset(uint32_t partition, uint64_t elem) const;
  uint32_t PageOf(uint32_t partition, uint64_t elem) const {
    return static_cast<uint32_t>(VirtualOffset(partition, elem) / plan_.sum_page_bytes);
  }
  uint64_t FrameOffset(uint32_t frame) const { return frame * plan_.sum_page_bytes; }
  BlockIdentity IdentityOf(uint32_t page) const;
  bool IsNeeded(const Page& page) const { return page.updates_left > 0 || is_prepared_; }
  void Record(uint32_t page);
  bool HasFrameForAdds() const;
  void SetThere(uint32_t page);
  void AllocateFrame(uint32_t page);
  void FreeFrame(uint32_t page);
  void List(uint32_t page);
  void Unlist(uint32_t page);
  void SetUsed(uint32_t page);
  void FreeSlot(uint32_t page);
  void Forget(uint32_t page);
  absl::Status Describe(const absl::Status& status, uint32_t page) const;
  void StartLoad(uint32_t page);
  void StartSpill(uint32_t page);
  nvme::Slot AllocateSlot();
  void WriteToSlot(uint32_t page, bool pause);
  void CountTransfer(const nvme::Slot& slot, Direction direction, const TaskDone& done);
  bool StaysThere(const Page& page) const;
  void EndSpill(uint32_t page, uint64_t checksum);
  bool StartSpills(uint32_t frames, const std::function<std::optional<uint32_t>()>& choose);
  void Arrive(uint32_t page);
  void ServeRequests();
  static bool IsIdle(const Page& page);
  std::optional<uint32_t> OldestIdle(const ByUse& pages) const;
  std::optional<uint32_t> OldestIdleOfUpdate() const;

  JobTasks& io_;
  const protocol::Layout& layout_;
  const MemoryPlan& plan_;
  nvme::SlotMap& swap_;  // free slots of the node
  PathTable& path_table_;
  std::set<nvme::Slot> slots_;
  std::vector<Page> pages_;
  std::vector<std::vector<uint32_t>> block_pages_;
  uint32_t block_pages_max_ = 0;
  std::pmr::set<uint32_t> free_frames_;
  std::pmr::deque<nvme::Slot> free_slots_;
  ByUse gathered_;                       // pages in state kThere with sums that no update uses yet
  ByUse updated_early_;                  // pages of gathered_ whose blocks were all updated early
  std::pmr::vector<uint32_t> requests_;  // pages, oldest first
  size_t urgent_ = 0;                    // number of kNow requests
  std::pmr::vector<uint32_t> arrived_;
  std::pmr::set<uint32_t> prepared_;       // blocks with Prepare() called, update not begun
  std::pmr::map<TaskId, uint32_t> tasks_;  // page of each transfer
  uint32_t spilling_ = 0;
  uint32_t loading_ = 0;
  uint32_t update_tasks_ = 0;            // running updates that read sums
  uint32_t of_update_on_swap_ = 0;       // pages of the running update on swap
  std::optional<uint32_t> short_block_;  // first block of the update that found no frames
  bool abandoned_ = false;
  uint64_t recorded_step_ = 0;  // 0: the running update is not recorded
  bool is_prepared_ = false;
  uint64_t clock_ = 0;
  SumsCounters counters_;
  absl::Status error_;
  absl::Status write_error_;
};

}  // namespace forebay::daemon
