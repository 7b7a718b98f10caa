// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/weights_cache.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "daemon/core/base/limits.h"
#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/block_map.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::daemon {

using protocol::kPageBytes;

WeightsCache::WeightsCache(JobTasks& io, std::shared_ptr<const protocol::Layout> layout,
                           const MemoryPlan& plan, StepPipeline& pipeline, const LeaseTable& leases)
    : io_(io),
      layout_(std::move(layout)),
      plan_(plan),
      pipeline_(pipeline),
      store_(pipeline.store()),
      leases_(leases),
      copies_(io.memory()),
      pieces_(io.memory()),
      loads_(io.memory()) {}

// ------------------------------------------------------------------------------------------ fetches

void WeightsCache::OnFetch(std::optional<uint32_t> rank, uint32_t partition, uint64_t step) {
  const auto copy = copies_.find(partition);
  if (copy != copies_.end() && copy->second.state != CopyState::kOld) ++counters_.fetches_ahead;
  if (!rank) return;
  Order& order = orders_[*rank];
  if (order.step != step) {
    order.step = step;
    if (!order.now.empty()) order.before.swap(order.now);
    order.now.clear();
    order.is_same = true;
    not_read_ahead_.clear();
  }
  const size_t at = order.now.size();
  order.is_same = order.is_same && at < order.before.size() && order.before[at] == partition;
  order.now.push_back(partition);
}

absl::StatusOr<std::optional<uint64_t>> WeightsCache::Find(uint32_t partition) {
  if (const auto failed = failed_.extract(partition); !failed.empty()) return failed.mapped();
  const auto copy = copies_.find(partition);
  if (copy != copies_.end() && copy->second.state == CopyState::kCurrent) {
    copy->second.last_use = ++uses_;
    ++counters_.fetches;
    return plan_.weights_cache_offset + copy->second.offset_bytes;
  }
  if (!IsWanted(partition)) wanted_.push_back(partition);
  return std::nullopt;
}

bool WeightsCache::IsWanted(uint32_t partition) const {
  return std::ranges::find(wanted_, partition) != wanted_.end();
}

// --------------------------------------------------------------------------------------------- room

uint64_t WeightsCache::BytesOf(uint32_t partition) const {
  return protocol::RoundUp(layout_->partition_bytes(partition), kPageBytes);
}

std::optional<uint64_t> WeightsCache::FindRoom(std::pmr::vector<const Copy*> beside,
                                               uint64_t bytes) const {
  std::ranges::sort(beside, {}, [](const Copy* copy) { return copy->offset_bytes; });
  uint64_t begin = 0;
  for (const Copy* copy : beside) {
    if (copy->offset_bytes - begin >= bytes) return begin;
    begin = copy->offset_bytes + copy->bytes;
  }
  if (plan_.weights_cache_bytes - begin >= bytes) return begin;
  return std::nullopt;
}

std::optional<uint64_t> WeightsCache::FindRoom(uint64_t bytes) const {
  std::pmr::vector<const Copy*> all(io_.memory());
  for (const auto& [partition, copy] : copies_) all.push_back(&copy);
  return FindRoom(std::move(all), bytes);
}

bool WeightsCache::HasRoomBeside(std::span<const uint32_t> kept, uint32_t partition) const {
  std::pmr::vector<const Copy*> beside(io_.memory());
  for (const uint32_t other : kept) {
    if (const auto copy = copies_.find(other); copy != copies_.end())
      beside.push_back(&copy->second);
  }
  return FindRoom(std::move(beside), BytesOf(partition)).has_value();
}

uint64_t WeightsCache::NextUse(uint32_t partition) const {
  uint64_t next = UINT64_MAX;
  for (const auto& [rank, order] : orders_) {
    if (!order.is_same) continue;
    const auto at = order.before.begin() + static_cast<int64_t>(order.now.size());
    const auto use = std::find(at, order.before.end(), partition);
    if (use == order.before.end()) continue;
    next = std::min(next, static_cast<uint64_t>(use - at));
  }
  return next;
}

// True if the copy is read completely, not leased and not wanted, and not expected to be fetched within the next `needed_in`
// fetches.
bool WeightsCache::MayEvict(uint32_t partition, const Copy& copy, uint64_t needed_in) const {
  return copy.state != CopyState::kLoading && !leases_.IsLeased(partition) &&
         !IsWanted(partition) && NextUse(partition) >= needed_in;
}

// Returns the copy that is needed last among copies that may be evicted.
std::optional<uint32_t> WeightsCache::ChooseVictim(uint64_t needed_in) const {
  std::optional<uint32_t> victim;
  uint64_t victim_use = 0;
  for (const auto& [partition, copy] : copies_) {
    if (!MayEvict(partition, copy, needed_in)) continue;
    const uint64_t use = NextUse(partition);
    const bool later = !victim || use > victim_use ||
                       (use == victim_use && copy.last_use < copies_.at(*victim).last_use);
    if (!later) continue;
    victim = partition;
    victim_use = use;
  }
  return victim;
}

// Begins to read a partition that has no copy. Returns false without evicting if evictions cannot free enough DRAM. Such an
// eviction would be repeated without end, because the evicted copy is read ahead again.
bool WeightsCache::Make(uint32_t partition, uint64_t needed_in) {
  const uint64_t bytes = BytesOf(partition);
  std::optional<uint64_t> offset = FindRoom(bytes);
  if (!offset) {
    std::pmr::vector<const Copy*> kept(io_.memory());
    for (const auto& [other, copy] : copies_) {
      if (!MayEvict(other, copy, needed_in)) kept.push_back(&copy);
    }
    if (!FindRoom(std::move(kept), bytes)) return false;
  }
  while (!offset) {
    const std::optional<uint32_t> victim = ChooseVictim(needed_in);
    FOREBAY_CHECK(victim);
    copies_.erase(*victim);
    offset = FindRoom(bytes);
  }
  Copy& copy = copies_[partition];
  copy = {.offset_bytes = *offset, .bytes = bytes, .last_use = ++uses_};
  AddPieces(partition, copy);
  return true;
}

// -------------------------------------------------------------------------------------------- reads

// Adds a read for each block that has elements of the partition: the read covers the pages with these elements.
void WeightsCache::AddPieces(uint32_t partition, const Copy& copy) {
  const uint64_t width = protocol::SizeBytes(layout_->spec().dtype);
  const uint64_t to = plan_.weights_cache_offset + copy.offset_bytes;
  const std::pmr::vector<ElementRun> runs = store_.map().LocateInPartition(
      partition, 0, layout_->partitions()[partition].elems, io_.memory());
  for (auto run = runs.begin(); run != runs.end();) {
    const auto end = std::find_if(
        run, runs.end(), [&](const ElementRun& other) { return other.block != run->block; });
    const BlockLedger::Version& version = store_.ledger().newest(run->block);
    FOREBAY_CHECK(version.slot && version.weights_digests != nullptr);
    const uint64_t first_page = run->block_elem * width / kPageBytes;
    const ElementRun& last = *std::prev(end);
    const uint64_t end_bytes =
        protocol::RoundUp((last.block_elem + last.elems) * width, kPageBytes);
    LoadWeights load{.partition = partition,
                     .block = run->block,
                     .slot = *version.slot,
                     .slot_offset_bytes =
                         store_.map().weights_plane_offset(run->block) + first_page * kPageBytes,
                     .bytes = end_bytes - first_page * kPageBytes,
                     .digests = version.weights_digests,
                     .first_page = first_page,
                     .copies = std::pmr::vector<BytesCopy>(io_.memory())};
    for (; run != end; ++run) {
      load.copies.push_back({.from_bytes = run->block_elem * width - first_page * kPageBytes,
                             .to_bytes = to + run->partition_elem * width,
                             .size_bytes = run->elems * width});
    }
    Copy& of = copies_.at(partition);
    of.state = CopyState::kLoading;
    ++of.loads_left;
    pieces_.push_back(std::move(load));
  }
}

void WeightsCache::StartPieces() {
  while (!pieces_.empty()) {
    // Pieces take slots from states that were read ahead, up to kStagingSlotsForWeights slots.
    const bool is_urgent = loads_.size() < kStagingSlotsForWeights;
    const std::optional<uint32_t> slot =
        is_urgent ? store_.blocks().AllocateUrgent() : store_.blocks().AllocateFree(0);
    if (!slot) return;
    LoadWeights piece = std::move(pieces_.front());
    pieces_.pop_front();
    piece.staging_slot = *slot;
    const Load load{.partition = piece.partition,
                    .block = static_cast<uint32_t>(piece.block),
                    .staging_slot = *slot,
                    .bytes = piece.bytes,
                    .path = piece.slot.path};
    loads_.emplace(io_.Start(TaskKind::kLoadWeights, 0, std::move(piece)), load);
  }
}

void WeightsCache::OnLoaded(const TaskDone& done) {
  const auto node = loads_.extract(done.task);
  FOREBAY_CHECK(!node.empty());
  const Load& load = node.mapped();
  store_.blocks().Release(load.staging_slot);
  counters_.read_bytes += load.bytes;
  pipeline_.tasks().CountRead(load.path, load.bytes, done);
  Copy& copy = copies_.at(load.partition);
  copy.status.Update(store_.DescribeBlock(done.status, load.block));
  if (--copy.loads_left > 0) return;
  copy.state = CopyState::kCurrent;
  if (copy.status.ok()) return;
  if (IsWanted(load.partition)) {
    failed_[load.partition] = copy.status;
  } else {
    not_read_ahead_.insert(load.partition);
  }
  copies_.erase(load.partition);
}

void WeightsCache::EndRound(bool begins) {
  DropOld();
  std::erase_if(failed_, [this](const auto& entry) { return !IsWanted(entry.first); });
  lacks_room_ = false;
  for (const uint32_t partition : wanted_) {
    if (!begins || lacks_room_) break;
    if (copies_.contains(partition) || failed_.contains(partition)) continue;
    lacks_room_ = !Make(partition, /*needed_in=*/0);
  }
  StartPieces();
}

// Begins to read the partition that a rank is expected to fetch after `ahead` other fetches. False if this partition and later
// partitions have to wait.
bool WeightsCache::MakeAhead(const Order& order, size_t ahead) {
  const size_t next = order.now.size() + ahead;
  if (next >= order.before.size()) return false;
  const uint32_t partition = order.before[next];
  if (copies_.contains(partition) || not_read_ahead_.contains(partition)) return true;
  // Make() evicts only copies that are needed later than this partition.
  return pipeline_.queue().IsPartitionDone(partition) && Make(partition, ahead + 1);
}

void WeightsCache::Prefetch() {
  // Partitions that a fetch waits for are read first.
  if (!pieces_.empty() || std::ranges::any_of(wanted_, [this](uint32_t partition) {
        return !copies_.contains(partition);
      })) {
    return;
  }
  std::pmr::vector<const Order*> going(io_.memory());
  for (const auto& [rank, order] : orders_) {
    if (order.is_same) going.push_back(&order);
  }
  // Partitions that any rank needs first are read first. Otherwise a partition that one rank needs later would fill the DRAM
  // that another rank's next partition needs.
  for (size_t ahead = 0; !going.empty(); ++ahead) {
    std::erase_if(going, [&](const Order* order) { return !MakeAhead(*order, ahead); });
  }
  StartPieces();
}

bool WeightsCache::Adopt(const KeptLease& lease) {
  if (lease.partition >= layout_->partitions().size()) return false;
  if (!Holds(lease.partition)) return true;
  const uint64_t bytes = BytesOf(lease.partition);
  const uint64_t offset = lease.offset_bytes - plan_.weights_cache_offset;
  const bool is_inside = lease.offset_bytes >= plan_.weights_cache_offset &&
                         offset <= plan_.weights_cache_bytes &&
                         bytes <= plan_.weights_cache_bytes - offset;
  if (!is_inside) return false;
  for (const auto& [partition, copy] : copies_) {
    if (partition == lease.partition) return copy.offset_bytes == offset;
    if (offset < copy.offset_bytes + copy.bytes && copy.offset_bytes < offset + bytes) return false;
  }
  copies_[lease.partition] = {.offset_bytes = offset, .bytes = bytes, .last_use = ++uses_};
  return true;
}

// ------------------------------------------------------------------------------------------ updates

void WeightsCache::ForgetUpdated() {
  FOREBAY_CHECK(!is_loading());
  for (auto& [partition, copy] : copies_) {
    if (pipeline_.queue().Updates(partition)) copy.state = CopyState::kOld;
  }
  DropOld();
}

void WeightsCache::ForgetBlock(uint32_t block) {
  FOREBAY_CHECK(!is_loading());
  for (const uint32_t partition : store_.map().Partitions(block)) {
    const auto copy = copies_.find(partition);
    if (copy != copies_.end()) copy->second.state = CopyState::kOld;
  }
  DropOld();
}

void WeightsCache::DropOld() {
  std::erase_if(copies_, [this](const auto& entry) {
    return entry.second.state == CopyState::kOld && !leases_.IsLeased(entry.first);
  });
}

void WeightsCache::CheckInvariants() const {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  uint64_t loads_left = 0;
  for (const auto& [partition, copy] : copies_) {
    FOREBAY_CHECK(Holds(partition));                                              // 1
    FOREBAY_CHECK((copy.state == CopyState::kLoading) == (copy.loads_left > 0));  // 2
    ranges.emplace_back(copy.offset_bytes, copy.offset_bytes + copy.bytes);
    loads_left += copy.loads_left;
  }
  FOREBAY_CHECK(loads_left == loads_.size() + pieces_.size());  // 2
  std::ranges::sort(ranges);
  uint64_t end = 0;
  for (const auto& [begin, range_end] : ranges) {
    FOREBAY_CHECK(begin >= end);  // 3
    end = range_end;
  }
  FOREBAY_CHECK(end <= plan_.weights_cache_bytes);  // 3
}

}  // namespace forebay::daemon
