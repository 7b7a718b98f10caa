// SPDX-License-Identifier: Apache-2.0
// Caches weights of partitions on swap in DRAM.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/views.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/update/step_pipeline.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// The cache is a part of the weights arena. A fetch of a partition without a copy reads the partition from its blocks on swap,
// and verifies each page. The copy stays until another partition needs its DRAM. The cache expects that each rank fetches in the
// order of the step before. The copy without a lease that is needed last in this order is evicted first.
//
// Partitions are read ahead in this order, into DRAM that no earlier fetch needs. If a rank's order differs from the step before,
// nothing is read ahead for the rank until the next step. Its partitions are then evicted by last use. A partition whose read
// ahead failed is read again when it is fetched, or in the next step.
//
// The states of a copy are those of CopyState.
//
// Invariants (CheckInvariants())
// 1. Only partitions with weights on swap have copies.
// 2. A copy is in kLoading while some of its reads have not ended, and in another state otherwise. Each read belongs to a copy.
// 3. No two copies overlap. All copies are within the cache.
//
// No read may be under way (is_loading()) when blocks are about to be overwritten, because a step is decided or masters are set
// (ForgetUpdated(), ForgetBlock()).
//
// An example. The cache has room for two partitions, and the rank fetched 0, 1, 2, 3 in the step before.
//
//   fetch 0           reads 0; reads 1 ahead, as no earlier fetch needs its DRAM
//   fetch 1           1 has arrived. 0 is leased, so that 2 has no room.
//   release 0         2 takes the place of 0, which is needed last
//   fetch 3, not 2    the order differs: nothing is read ahead until the next step; 3 replaces the copy used least recently
//
// Ownership  The arguments of the constructor outlive this object.
class WeightsCache {
 public:
  WeightsCache(JobTasks& io, std::shared_ptr<const protocol::Layout> layout, const MemoryPlan& plan,
               StepPipeline& pipeline, const LeaseTable& leases);

  bool Holds(uint32_t partition) const { return store_.map().is_on_swap(partition); }

  // Records that a rank fetches a partition for `step`, or a reader if `rank` is nullopt. Called once for each fetch, before
  // Find().
  void OnFetch(std::optional<uint32_t> rank, uint32_t partition, uint64_t step);
  // Begins a round, in which the caller calls Find() for each waiting fetch. Find() returns the offset of the partition's
  // weights in the arena, or nullopt if the weights are not in DRAM. EndRound() then reads these weights.
  //
  // Errors  the error of the last read of the weights. The next round reads them again.
  void BeginRound() { wanted_.clear(); }
  absl::StatusOr<std::optional<uint64_t>> Find(uint32_t partition);
  // True if the cache can hold the partition together with the partitions of `kept`.
  bool HasRoomBeside(std::span<const uint32_t> kept, uint32_t partition) const;
  // Begins to read the partitions for which Find() returned nullopt, in the order of these calls. If `begins` is false, only
  // continues reads that were begun.
  void EndRound(bool begins);
  // True if a partition that a fetch waits for had no room in the last EndRound(), and waits until leases end.
  bool lacks_room() const { return lacks_room_; }
  // Reads partitions ahead that ranks are expected to fetch next.
  void Prefetch();
  void OnLoaded(const TaskDone& done);
  bool is_loading() const { return !loads_.empty() || !pieces_.empty(); }

  // Restores a copy that a rank has leased from the previous daemon, at the same offset. Called before other functions. False
  // if the copy cannot be at that offset.
  bool Adopt(const KeptLease& lease);

  // Deletes copies of partitions that the decided step updates. Leased copies are deleted when their leases have ended.
  void ForgetUpdated();
  // Deletes copies of partitions in a block that was written between steps, leased copies when their leases have ended.
  void ForgetBlock(uint32_t block);

  uint32_t staging_slots() const { return static_cast<uint32_t>(loads_.size()); }
  const WeightsCounters& counters() const { return counters_; }
  void CheckInvariants() const;

 private:
  enum class CopyState : uint8_t {
    kLoading,  // the weights are being read from swap
    kCurrent,  // the copy has the newest weights of the partition, and may be leased
    kOld,      // the partition has changed; the copy is deleted when its leases have ended
  };
  struct Copy {
    uint64_t offset_bytes = 0;  // offset in the cache
    uint64_t bytes = 0;         // rounded up to whole pages
    CopyState state = CopyState::kCurrent;
    uint64_t loads_left = 0;   // reads that have not ended
    absl::Status status = {};  // result of the copy's reads
    uint64_t last_use = 0;
  };
  struct Load {
    uint32_t partition = 0;
    uint32_t block = 0;
    uint32_t staging_slot = 0;
    uint64_t bytes = 0;
    uint32_t path = 0;
  };
  // Partitions that a rank fetches in a step, in order.
  struct Order {
    uint64_t step = 0;
    std::vector<uint32_t> now = {};
    std::vector<uint32_t> before = {};
    bool is_same = false;  // so far the rank has fetched in the order of `before`
  };

  bool Make(uint32_t partition, uint64_t needed_in);
  bool MakeAhead(const Order& order, size_t ahead);
  bool MayEvict(uint32_t partition, const Copy& copy, uint64_t needed_in) const;
  uint64_t BytesOf(uint32_t partition) const;
  std::optional<uint64_t> FindRoom(std::pmr::vector<const Copy*> beside, uint64_t bytes) const;
  std::optional<uint64_t> FindRoom(uint64_t bytes) const;
  std::optional<uint32_t> ChooseVictim(uint64_t needed_in) const;
  // Returns the number of fetches that a rank is expected to make before it fetches the partition: the minimum over all ranks.
  // UINT64_MAX if no fetch of the partition is expected.
  uint64_t NextUse(uint32_t partition) const;
  bool IsWanted(uint32_t partition) const;
  void AddPieces(uint32_t partition, const Copy& copy);
  void StartPieces();
  void DropOld();

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  const MemoryPlan& plan_;
  StepPipeline& pipeline_;
  BlockStore& store_;
  const LeaseTable& leases_;
  std::pmr::map<uint32_t, Copy> copies_;     // by partition
  std::map<uint32_t, absl::Status> failed_;  // errors of reads of wanted partitions
  std::set<uint32_t> not_read_ahead_;        // partitions whose read ahead failed in this step
  std::vector<uint32_t> wanted_;  // partitions that fetches wait for, in the order of Find()
  bool lacks_room_ = false;
  std::pmr::deque<LoadWeights> pieces_;  // pieces that have no staging slot yet
  std::pmr::map<TaskId, Load> loads_;
  std::map<uint32_t, Order> orders_;  // by rank
  uint64_t uses_ = 0;
  WeightsCounters counters_;
};

}  // namespace forebay::daemon
