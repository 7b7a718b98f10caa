// SPDX-License-Identifier: Apache-2.0
// Copies in DRAM of partitions' weights that are on swap.
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

// A part of the weights arena, in which partitions have ranges. A fetch of a partition without a copy reads it from its blocks
// on swap; each page is verified. The copy stays until another partition needs its room. Among copies without a lease, the
// first to be evicted is the one that is needed last, by the order in which the ranks fetched in the step before. Along that
// order, partitions are read ahead into room that nothing needs earlier. If a rank's order differs from the step before,
// nothing is read ahead for it until the next step, and its partitions are evicted by last use. A partition whose read ahead
// failed is read again when it is fetched, or in the next step.
//
// A copy has the weights of the newest step that has updated the partition. No read may be under way (is_loading()) when blocks
// are about to be overwritten: when a step is decided, or masters are set.
//
// Ownership  What the constructor gets outlives it.
class WeightsCache {
 public:
  WeightsCache(JobTasks& io, std::shared_ptr<const protocol::Layout> layout, const MemoryPlan& plan,
               StepPipeline& pipeline, const LeaseTable& leases);

  bool Holds(uint32_t partition) const { return pipeline_.map().is_on_swap(partition); }

  // Records that a rank, or a reader (none), fetches a partition for `step`. Called once for each fetch, before Find().
  void OnFetch(std::optional<uint32_t> rank, uint32_t partition, uint64_t step);
  // One round asks about all fetches that wait. Find() returns the offset of the weights in the arena. Nothing: the weights are
  // now wanted.
  //
  // Errors  of the last read of the weights; the next round tries again.
  void BeginRound() { wanted_.clear(); }
  absl::StatusOr<std::optional<uint64_t>> Find(uint32_t partition);
  // True if there could be room for the partition beside the copies of `kept`.
  bool HasRoomBeside(std::span<const uint32_t> kept, uint32_t partition) const;
  // Begins to read the wanted partitions, in the order of asking. If `begins` is false, only reads that were begun continue.
  void EndRound(bool begins);
  // True if a partition that was wanted in the last EndRound() has to wait until leases end.
  bool lacks_room() const { return lacks_room_; }
  // Reads ahead what the ranks are expected to fetch.
  void Prefetch();
  void OnLoaded(const TaskDone& done);
  bool is_loading() const { return !loads_.empty() || !pieces_.empty(); }

  // Restores the copy under a lease of the previous daemon, in its place. Called before anything else. False: the copy cannot
  // be in that place.
  bool Adopt(const KeptLease& lease);

  // Forgets copies of partitions that the decided step updates. Leased copies are forgotten when their leases have ended.
  void ForgetUpdated();
  // Forgets copies of partitions in a block that was written between steps, in the same way.
  void ForgetBlock(uint32_t block);

  uint32_t staging_slots() const { return static_cast<uint32_t>(loads_.size()); }
  const WeightsCounters& counters() const { return counters_; }
  void CheckInvariants() const;

 private:
  struct Copy {
    uint64_t offset_bytes = 0;  // in the cache
    uint64_t bytes = 0;         // on whole pages
    bool is_old = false;        // forgotten when its leases have ended
    uint64_t loads_left = 0;    // 0: it may be leased
    absl::Status status = {};   // of its reads
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
    bool is_same = false;  // so far
  };

  bool Make(uint32_t partition, uint64_t needed_in);
  bool MakeAhead(const Order& order, size_t ahead);
  bool MayEvict(uint32_t partition, const Copy& copy, uint64_t needed_in) const;
  uint64_t BytesOf(uint32_t partition) const;
  std::optional<uint64_t> FindRoom(std::pmr::vector<const Copy*> beside, uint64_t bytes) const;
  std::optional<uint64_t> FindRoom(uint64_t bytes) const;
  std::optional<uint32_t> ChooseVictim(uint64_t needed_in) const;
  // Number of expected fetches of a rank before its fetch of the partition, the least of all ranks; UINT64_MAX: no fetch is
  // expected.
  uint64_t NextUse(uint32_t partition) const;
  bool IsWanted(uint32_t partition) const;
  void AddPieces(uint32_t partition, const Copy& copy);
  void StartPieces();
  void DropOld();

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  const MemoryPlan& plan_;
  StepPipeline& pipeline_;
  const LeaseTable& leases_;
  std::pmr::map<uint32_t, Copy> copies_;     // by partition
  std::map<uint32_t, absl::Status> failed_;  // reads of wanted partitions
  std::set<uint32_t> not_read_ahead_;        // reads ahead that failed: until the next step
  std::vector<uint32_t> wanted_;             // in the order of asking
  bool lacks_room_ = false;
  std::pmr::deque<LoadWeights> pieces_;  // without a staging slot yet
  std::pmr::map<TaskId, Load> loads_;
  std::map<uint32_t, Order> orders_;  // by rank
  uint64_t uses_ = 0;
  WeightsCounters counters_;
};

}  // namespace forebay::daemon
