// SPDX-License-Identifier: Apache-2.0
// Places of a job's gradient sums. All sums are in the step arena if they fit. Otherwise the sums are in pages, some in the
// step arena and the rest on swap.
#pragma once

#include <cstdint>
#include <functional>
#include <memory_resource>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/update/sum_swap.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Sums that are not paged are always resident, and this class does nothing. A page of paged sums has a frame of the step arena
// while sums are added to the page or an update reads it.
//
// While sums are gathered, frames of pages whose blocks have been updated early are freed before another page needs a frame. Such
// a page is needed again only if the decision differs from the announcement. If a frame is needed and none is free, the page
// that was used longest ago is written to swap. In backward's order the next forward needs that page last.
//
// After the decision, a page holds the sums of the running step until all blocks of the page are updated. Sums that are
// gathered for the next step use frames that the update does not need, and no page of the running step.
//
// Invariants
//   1. A page has a frame in the states kResident, kSpilling and kLoading. Each frame is free or belongs to one page.
//   2. A page has a slot in the states kSpilling, kOnSwap and kLoading. Each slot is free or belongs to one page.
//   3. A page that an update reads is in the state kResident, or in kNone if its parameters have no gradient.
//   4. gathered_ has the pages in the state kResident without blocks of the running update (forgotten pages may be in it).
//      updated_early_ has the pages of gathered_ whose blocks were all updated early.
//   5. of_update_on_swap_ is the number of pages in the state kOnSwap with blocks of the running update.
class SumPages {
 public:
  using Range = PartitionRange;
  enum class Room : uint8_t {
    kThere,   // each page of the block is resident
    kComing,  // each page has a frame, and some pages are being read
    kNone,    // too few frames are free
  };

  // The arguments outlive this object, except for SumSwap::Options::slots and `recorded`.
  SumPages(JobTasks& io, const protocol::Layout& layout, const BlockMap& map,
           const MemoryPlan& plan, const SumSwap::Options& options);

  bool is_paged() const { return plan_.has_paged_sums(); }
  // Returns the end of the partition's elements from `elem` on that are on the same page as `elem`.
  uint64_t EndOnPage(uint32_t partition, uint64_t elem) const;
  const SumSwap& swap() const { return swap_; }

  // True if sums can be added to the element's page, or read from it. Otherwise requests the page: DrainArrived() returns the
  // page's ranges once the page is resident. An arrived page may be evicted again if it is not pinned before the next Pump(). A
  // kSoon request waits for frames that become free as blocks are updated early. A later request for the same page may be kNow.
  enum class Need : uint8_t { kNone, kSoon, kNow };
  bool Request(uint32_t partition, uint64_t elem, Need need);
  std::pmr::vector<Range> DrainArrived();
  bool has_arrived() const { return !arrived_.empty(); }
  // Pin the element's page, which is resident, for a task of the gathering, and unpin it. Pin() returns the byte offset of the
  // element in the step arena. ForgetGathered() removes all these pins. No page moves while stale tasks run.
  uint64_t Pin(uint32_t partition, uint64_t elem);
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
  void EndUpdateOf(uint32_t block);
  // Records, before the decision, that the early update of a block is on swap, or is dropped after all.
  void SetUpdatedEarly(uint32_t block, bool is_updated);
  // Deletes the gathered sums. Retains the sums of the running update.
  void ForgetGathered();

  // Starts the transfers that can start. `has_early_work`: blocks are being updated early.
  void Pump(bool has_early_work);

  // Handles a transfer that has ended. After an error sums of the running update are lost.
  absl::Status OnTransferred(const TaskDone& done);
  // Returns and clears the error of a requested page. OK if no request failed. Errors of the running update's pages do not
  // count.
  absl::Status DrainError() { return std::exchange(error_, absl::OkStatus()); }

  // Stops starting transfers, because the job failed or is deleted.
  void Abandon() { abandoned_ = true; }

  // Checks the invariants.
  void CheckInvariants() const;

 private:
  enum class State : uint8_t {
    kNone,      // the page has no sums
    kResident,  // the sums are in a frame
    kSpilling,  // the sums are in a frame, and are being written to a slot
    kOnSwap,    // the sums are in a slot
    kLoading,   // the sums are in a slot, and are being read to a frame
  };

  struct Page {
    State state = State::kNone;
    uint32_t frame = 0;         // frame of the page; not in kNone and kOnSwap
    uint32_t adds = 0;          // running tasks that add sums to the page
    uint32_t updates = 0;       // running updates that read the page
    uint32_t updates_left = 0;  // blocks of the page that the running update still has to update
    uint32_t prepared = 0;      // blocks after Prepare() whose update has not begun
    Need requested = Need::kNone;
    bool has_arrived = false;   // the page has arrived, and DrainArrived() has not returned it yet
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
  uint64_t FrameOffset(const Page& page) const { return page.frame * plan_.sum_page_bytes; }
  bool IsNeeded(const Page& page) const { return page.updates_left > 0 || is_prepared_; }
  void Record(uint32_t page);
  bool HasFrameForAdds() const;
  void SetResident(uint32_t page);
  void AllocateFrame(uint32_t page);
  void FreeFrame(uint32_t page);
  void List(uint32_t page);
  void Unlist(uint32_t page);
  void SetUsed(uint32_t page);
  void Forget(uint32_t page);
  void StartLoad(uint32_t page);
  bool StaysResident(const Page& page) const;
  absl::Status OnLoaded(uint32_t page, const absl::Status& status);
  void OnSpilled(uint32_t page, const absl::Status& status);
  bool StartSpills(uint32_t frames, const std::function<std::optional<uint32_t>()>& choose);
  void Arrive(uint32_t page);
  void ServeRequests();
  static bool IsIdle(const Page& page);
  std::optional<uint32_t> OldestIdle(const ByUse& pages) const;
  std::optional<uint32_t> OldestIdleOfUpdate() const;

  JobTasks& io_;
  const protocol::Layout& layout_;
  const MemoryPlan& plan_;
  SumSwap swap_;
  std::vector<Page> pages_;
  std::vector<std::vector<uint32_t>> block_pages_;
  uint32_t block_pages_max_ = 0;
  std::pmr::set<uint32_t> free_frames_;
  ByUse gathered_;       // pages in state kResident with sums that no update uses yet
  ByUse updated_early_;  // pages of gathered_ whose blocks were all updated early
  std::pmr::vector<uint32_t> requests_;  // pages, oldest first
  std::pmr::vector<uint32_t> arrived_;
  std::pmr::set<uint32_t> prepared_;     // blocks after Prepare() whose update has not begun
  uint32_t of_update_on_swap_ = 0;       // pages of the running update on swap
  std::optional<uint32_t> short_block_;  // first block of the update that found no frames
  bool abandoned_ = false;
  uint64_t recorded_step_ = 0;  // 0: the running update is not recorded
  bool is_prepared_ = false;
  uint64_t clock_ = 0;
  absl::Status error_;
};

}  // namespace forebay::daemon
