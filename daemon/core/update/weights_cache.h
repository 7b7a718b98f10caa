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

// A part of the weights arena, in which partitions have ranges. A fetch of one that is not there reads it
// from its blocks on swap, page by page verified; then it stays until another needs its room. What is not
// leased and is needed last, by the order in which the ranks fetched in the step before, goes first. Along
// that order partitions are read ahead, into room that nothing needs earlier. Where a rank's order is another
// than before, nothing is read ahead for it until the next step, and what was used longest ago goes first. What
// could not be read ahead is read again when it is fetched, or in the next step.
//
// A copy is of the newest step that has updated the partition. Before blocks are written over (a step is
// decided, masters are set) nothing may be on its way here: is_loading().
//
// Ownership  What the constructor gets outlives it.
class WeightsCache {
 public:
  WeightsCache(JobTasks& io, std::shared_ptr<const protocol::Layout> layout, const MemoryPlan& plan,
               StepPipeline& pipeline, const LeaseTable& leases);

  bool Holds(uint32_t partition) const { return pipeline_.map().is_on_swap(partition); }

  // A rank, or a reader (none), fetches a partition for `step`: before Find, once for each fetch.
  void OnFetch(std::optional<uint32_t> rank, uint32_t partition, uint64_t step);
  // All fetches that wait are asked about in one round. Where the weights are in the arena; nothing: they
  // are wanted.
  //
  // Errors  of their last read; the next round tries again.
  void BeginRound() { wanted_.clear(); }
  absl::StatusOr<std::optional<uint64_t>> Find(uint32_t partition);
  // Whether there could be room for the partition beside copies of `kept`.
  bool HasRoomBeside(std::span<const uint32_t> kept, uint32_t partition) const;
  // Reads what is wanted, in the order of asking; without `begins` only what was begun.
  void EndRound(bool begins);
  // Something that was wanted then has to wait until leases end.
  bool lacks_room() const { return lacks_room_; }
  // Reads what will be wanted.
  void Prefetch();
  void OnLoaded(const TaskDone& done);
  bool is_loading() const { return !loads_.empty() || !pieces_.empty(); }

  // Before anything else: what a lease of the daemon before is on stays where it is. False: it cannot be there.
  bool Adopt(const KeptLease& lease);

  // A step is decided: copies from blocks that it writes are of before. They are forgotten, leased ones when
  // their leases have ended.
  void ForgetUpdated();
  // The block was written between steps.
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
  // What a rank fetches in a step, in order.
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
  // How many fetches of a rank come before one of the partition; UINT64_MAX: none is expected.
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
  std::map<uint32_t, absl::Status> failed_;  // reads of wanted ones
  std::set<uint32_t> not_read_ahead_;        // that failed when they were: until the next step
  std::vector<uint32_t> wanted_;             // in the order of asking
  bool lacks_room_ = false;
  std::pmr::deque<LoadWeights> pieces_;  // that have no staging slot yet
  std::pmr::map<TaskId, Load> loads_;
  std::map<uint32_t, Order> orders_;  // by rank
  uint64_t uses_ = 0;
  WeightsCounters counters_;
};

}  // namespace forebay::daemon
