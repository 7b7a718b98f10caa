// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/plan/memory_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/base/node_options.h"
#include "daemon/core/blocks/durable_content.h"
#include "daemon/core/plan/table_bytes.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/step_summary.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::kPageBytes;
using protocol::Layout;
using protocol::MakeError;
using protocol::RoundUp;

// Returns the hint to raise swap by `missing` bytes and 1/32 of them, which the volume itself takes, or to do `otherwise`.
std::string RaiseSwap(uint64_t missing, const char* otherwise) {
  const uint64_t more = RoundUp(missing + missing / 32, protocol::kMiB);
  return absl::StrCat("raise --swap-size / swap.capacity by ", FormatBytes(more), ", ", otherwise);
}

std::string Where(bool holds, std::string text) { return holds ? std::move(text) : std::string(); }

constexpr char kOrLimit[] = "or raise dram.limit, or delete stale jobs: forebay jobs";

// "12.0 MiB (12582912 bytes)": people read the first, tests and scripts the second.
std::string Bytes(uint64_t bytes) {
  return absl::StrCat(FormatBytes(bytes), " (", bytes, " bytes)");
}

// Places the sums of each owner's partitions one after the other, in pages. A page ends within a partition only between units,
// so that sums of squares do not depend on the pages. Returns the number of pages.
uint32_t PlaceSumsInPages(const Layout& layout, MemoryPlan& plan) {
  const uint64_t width = protocol::SizeBytes(plan.sum_dtype);
  const uint64_t unit_bytes = protocol::kGradUnitElems * width;
  plan.accumulator_offsets.assign(layout.partitions().size(), 0);
  uint64_t at = 0;
  for (const protocol::OwnerPlace& owner : layout.owners()) {
    for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
      if (layout.partitions()[i].owner != owner.owner) continue;
      const uint64_t bytes = layout.partitions()[i].gradient_elems * width;
      if (at % plan.sum_page_bytes + bytes > plan.sum_page_bytes) at = RoundUp(at, unit_bytes);
      plan.accumulator_offsets[i] = at;
      at = RoundUp(at + bytes, protocol::kCacheLineBytes);
    }
  }
  return static_cast<uint32_t>(RoundUp(at, plan.sum_page_bytes) / plan.sum_page_bytes);
}

// Places the sums of all partitions one after the other from `offset_bytes` on. Returns the end offset, rounded up to a page.
uint64_t PlaceSums(const Layout& layout, uint64_t offset_bytes, MemoryPlan& plan) {
  plan.accumulator_offsets.clear();
  for (const protocol::PartitionPlace& partition : layout.partitions()) {
    plan.accumulator_offsets.push_back(offset_bytes);
    offset_bytes += SumBytes(partition, plan.sum_dtype);
  }
  return RoundUp(offset_bytes, kPageBytes);
}

void PlanStepArena(const Layout& layout, MemoryPlan& plan) {
  const uint32_t world_size = plan.session.world_size;
  plan.sum_dtype = plan.session.accumulate
                       ? protocol::DType::kFloat32
                       : GradientSumType(layout.grad_dtype(), layout.is_shared() ? world_size : 1);
  plan.session.accumulate = plan.sum_dtype == protocol::DType::kFloat32;  // float32 in either case
  uint64_t at = plan.sum_frames * plan.sum_page_bytes;
  if (plan.has_paged_sums()) {
    plan.sum_pages = PlaceSumsInPages(layout, plan);
  } else {
    at = PlaceSums(layout, 0, plan);
  }
  plan.overflow_offset = at;
  plan.piece_bytes = layout.largest_piece_bytes();
  // Only shared attachment needs the overflow, because a reduced gradient never waits for another rank.
  plan.overflow_slots = layout.is_shared() ? kOverflowSlotsPerRank * world_size : 0;
  at += plan.piece_bytes * plan.overflow_slots;
  plan.extra_state_offset = at = RoundUp(at, kPageBytes);
  plan.extra_state_slot_bytes = RoundUp(plan.session.extra_state_bytes, protocol::kCacheLineBytes);
  at += plan.extra_state_slot_bytes * 2 * world_size;
  plan.early_weights_offset = at = RoundUp(at, kPageBytes);
  at += plan.early_weights_bytes;
  plan.step_bytes = RoundUp(at, kPageBytes);
  plan.float_sums_offset = plan.float_sums_bytes = 0;
  if (!plan.has_paged_sums() && !plan.session.accumulate) {
    MemoryPlan wide = plan;
    wide.sum_dtype = protocol::DType::kFloat32;
    plan.float_sums_offset = RoundUp(plan.step_bytes, protocol::kHugePageBytes);
    plan.float_sums_bytes =
        PlaceSums(layout, plan.float_sums_offset, wide) - plan.float_sums_offset;
  }
}

void PlanSessionArena(const Layout& layout, MemoryPlan& plan) {
  plan.step_region_offset = RoundUp(plan.session.grad_arena_bytes, kPageBytes);
  plan.step_region_bytes = StepRegionBytes(layout, plan.session);
  plan.trace_bytes = plan.session.trace ? RoundUp(sizeof(protocol::TraceMemory), kPageBytes) : 0;
  plan.session_arena_bytes = plan.step_region_offset + plan.step_region_bytes +
                             RoundUp(plan.session.activation_bytes, kPageBytes) + plan.trace_bytes;
  plan.ring_bytes = RoundUp(sizeof(protocol::RingMemory), kPageBytes);
  plan.extra_state_copy_bytes =
      RoundUp(plan.session.extra_state_bytes * std::min(plan.session.world_size, 2U), kPageBytes);
}

// Returns the number of elements of a block. Staging slots fit the planes of AdamW, and an optimizer with more planes gets
// smaller blocks.
uint64_t BlockElems(const Layout& layout, const NodeOptions& options, const MemoryPlan& plan) {
  const uint64_t elems = RoundUp(options.block_elems, layout.states_align_elems());
  const uint64_t within =
      BlockMap::ElemsWithin(layout, options.staging_slot_bytes, plan.has_weights_on_swap());
  return within == 0 ? elems : std::min(elems, within);
}

// Plans the tables, and all arenas except the state arena.
absl::Status PlanArenas(const Layout& layout, const SessionRequest& request,
                        const NodeOptions& options, MemoryPlan& plan) {
  RETURN_IF_ERROR(CheckSessionRequest(layout, request));
  const auto check_size = [&](std::string_view what, uint64_t bytes) -> absl::Status {
    if (bytes <= kGradArenaBytesMax) return absl::OkStatus();
    return MakeError(ErrorId::kDramLimit,
                     absl::StrCat(std::string(what), " of ", Bytes(bytes), " (at most ",
                                  Bytes(kGradArenaBytesMax), "); the limit is ",
                                  Bytes(options.dram_limit_bytes)),
                     "ask for less");
  };
  // The sums below cannot overflow after these checks.
  RETURN_IF_ERROR(check_size("a gradient arena", request.grad_arena_bytes));
  RETURN_IF_ERROR(check_size("room for activations", request.activation_bytes));
  plan.session = request;
  if (!plan.has_weights_on_swap()) plan.weights_bytes = layout.weights_bytes();
  plan.table_bytes = TableBytes(layout, options, plan, BlockElems(layout, options, plan));
  PlanStepArena(layout, plan);
  PlanSessionArena(layout, plan);
  plan.fixed_bytes = plan.weights_bytes + plan.step_bytes +
                     request.world_size * (plan.session_arena_bytes + plan.ring_bytes +
                                           plan.extra_state_copy_bytes) +
                     plan.table_bytes;
  return absl::OkStatus();
}

bool HasEarlyUpdates(const Layout& layout, const SessionRequest& request) {
  return request.early_updates && protocol::Info(layout.spec().optimizer).passes == 1;
}

// Puts weights on swap, except groups that fit into `room` bytes together with a cache for the weights on swap. If
// `was_on_swap` is not empty, exactly the partitions that it marks are on swap.
void PutWeightsOnSwap(const Layout& layout, const SessionRequest& request, uint64_t room,
                      const std::vector<bool>& was_on_swap, MemoryPlan& plan) {
  // new weights of early updates take DRAM in addition to the old weights
  const bool has_early_updates = HasEarlyUpdates(layout, request);
  const auto partitions = layout.partitions();
  plan.weights_on_swap.assign(partitions.size(), true);
  uint64_t pinned_bytes = 0;
  uint64_t new_bytes = 0;
  uint64_t cache_bytes = 0;
  std::map<uint32_t, std::multiset<uint64_t>> on_swap;  // sizes of partitions on swap, by owner
  std::vector<std::vector<uint32_t>> by_group(layout.groups().size());
  const auto bytes_of = [&](uint32_t partition) {
    return RoundUp(layout.partition_bytes(partition), kPageBytes);
  };
  const auto new_bytes_of = [&](uint32_t partition) {
    const uint64_t width = protocol::SizeBytes(layout.spec().dtype);
    return RoundUp(partitions[partition].gradient_elems * width, kPageBytes);
  };
  const auto largest = [&](uint32_t owner) {
    return on_swap[owner].empty() ? 0 : *on_swap[owner].rbegin();
  };
  const auto move = [&](uint32_t partition, bool to_swap) {
    const uint32_t owner = partitions[partition].owner;
    const uint64_t before = largest(owner);
    std::multiset<uint64_t>& sizes = on_swap[owner];
    if (to_swap) {
      sizes.insert(bytes_of(partition));
    } else {
      sizes.erase(sizes.find(bytes_of(partition)));
    }
    cache_bytes += kCachedPartitionsPerOwner * (largest(owner) - before);
  };
  for (uint32_t i = 0; i < partitions.size(); ++i) {
    by_group[partitions[i].group].push_back(i);
    move(i, true);
  }
  for (const std::vector<uint32_t>& group : by_group) {
    uint64_t group_bytes = 0;
    uint64_t group_new_bytes = 0;
    for (const uint32_t partition : group) {
      move(partition, false);
      group_bytes += bytes_of(partition);
      if (has_early_updates) group_new_bytes += new_bytes_of(partition);
    }
    const bool fits =
        was_on_swap.empty()
            ? pinned_bytes + new_bytes + group_bytes + group_new_bytes + cache_bytes <= room
            : group.empty() || !was_on_swap[group.front()];
    if (fits) {
      pinned_bytes += group_bytes;
      new_bytes += group_new_bytes;
    }
    for (const uint32_t partition : group) {
      plan.weights_on_swap[partition] = !fits;
      if (!fits) move(partition, true);
    }
  }
  plan.weights_on_swap_bytes = 0;
  for (uint32_t i = 0; i < partitions.size(); ++i) {
    if (plan.weights_on_swap[i]) plan.weights_on_swap_bytes += layout.partition_bytes(i);
  }
  plan.weights_cache_offset = pinned_bytes;
  plan.weights_cache_bytes = cache_bytes;
  plan.weights_bytes = pinned_bytes + cache_bytes;
}

// Returns a map that must not outlive `layout`.
BlockMap MapOf(const Layout& layout, const MemoryPlan& plan) {
  const std::shared_ptr<const Layout> borrowed(std::shared_ptr<void>(), &layout);
  return {borrowed, plan.block_elems, plan.weights_on_swap};
}

// Returns the maximum number of pages that the update of one block reads.
uint32_t PagesOfABlock(const Layout& layout, const MemoryPlan& plan) {
  const BlockMap map = MapOf(layout, plan);
  size_t most = 1;
  for (uint32_t block = 0; block < map.state_blocks(); ++block) {
    most = std::max(most, SumPagesOf(plan, map, block).size());
  }
  return static_cast<uint32_t>(most);
}

// Plans frames in the step arena for paged gradient sums: at least twice the pages of a block plus kSpareSumFrames, and more if
// they fit into `limit` bytes with the rest of the job. If `kept` is not 0, plans `kept` frames, as the retained step arena
// has.
absl::Status PlanSumFrames(const Layout& layout, const SessionRequest& request,
                           const NodeOptions& options, uint64_t limit, uint32_t kept,
                           MemoryPlan& plan) {
  // The tables do not fit, so a map of the job's blocks would not fit either.
  if (plan.table_bytes > limit) return absl::OkStatus();
  MemoryPlan paged = plan;
  const uint64_t page_elems =
      std::min(kSumPageElemsMax, RoundUp(plan.block_elems / 2, protocol::kGradUnitElems));
  paged.sum_page_bytes = page_elems * protocol::SizeBytes(plan.sum_dtype);
  RETURN_IF_ERROR(PlanArenas(layout, request, options, paged));
  const uint32_t block_pages = PagesOfABlock(layout, paged);
  paged.sum_frames = 2 * block_pages + kSpareSumFrames;
  if (kept == 0 && paged.sum_frames >= paged.sum_pages) return absl::OkStatus();
  RETURN_IF_ERROR(PlanArenas(layout, request, options, paged));
  const uint64_t left = limit - std::min(limit, paged.fixed_bytes);
  const auto frames = static_cast<uint32_t>(
      std::min<uint64_t>(paged.sum_pages, paged.sum_frames + left / paged.sum_page_bytes));
  paged.sum_frames = kept > 0 ? kept : frames;
  paged.sum_slots = std::min(
      paged.sum_pages, paged.sum_pages - paged.sum_frames + std::max(kSpareSumFrames, block_pages));
  RETURN_IF_ERROR(PlanArenas(layout, request, options, paged));
  plan = std::move(paged);
  return absl::OkStatus();
}

// Plans slots in the step arena for new weights of blocks whose weights are in DRAM, as many as fit into `room` bytes. The rest
// of `room` is for states. Plans no slots if all states fit into `room`. If `kept` is not null, plans as many slots as the
// retained step arena has.
absl::Status PlanEarlyWeights(const Layout& layout, const SessionRequest& request,
                              const NodeOptions& options, uint64_t state_bytes, uint64_t room,
                              const KeptMemory* kept, MemoryPlan& plan) {
  const bool had_slots = kept != nullptr && kept->early_weights_slots > 0;
  if (!HasEarlyUpdates(layout, request) || (state_bytes <= room && !had_slots)) {
    return absl::OkStatus();
  }
  const uint64_t slot_bytes = plan.block_elems * protocol::SizeBytes(layout.spec().dtype);
  uint64_t blocks = 0;
  const BlockMap map = MapOf(layout, plan);
  for (uint32_t block = 0; block < map.blocks(); ++block) blocks += map.has_weights(block) ? 0 : 1;
  room -= room % kPageBytes;
  uint64_t slots = std::min(blocks, room / slot_bytes);
  if (!plan.has_weights_on_swap() && room > blocks * slot_bytes) {
    // Leaves out blocks with states in DRAM, which need no slot.
    const uint64_t block_bytes = std::max(map.full_block_bytes(), slot_bytes + 1);
    slots = blocks - std::min(blocks, (room - blocks * slot_bytes) / (block_bytes - slot_bytes));
  }
  plan.early_weights_slots =
      kept != nullptr ? kept->early_weights_slots : static_cast<uint32_t>(slots);
  slots = plan.early_weights_slots;
  plan.early_weights_bytes = RoundUp(slots * slot_bytes, kPageBytes);
  return PlanArenas(layout, request, options, plan);
}

// Uses float32 sums if the retained step is being updated from float32 sums that were created late.
void UseKeptFloatSums(const Layout& layout, const KeptMemory* kept, MemoryPlan& plan) {
  if (kept == nullptr || kept->update == nullptr || plan.float_sums_bytes == 0) return;
  const StatePart& sums = kept->update->float_sums;
  if (sums.bytes != plan.float_sums_bytes || sums.offset_bytes != plan.float_sums_offset) return;
  plan.fixed_bytes += plan.float_sums_bytes;
  plan.UseFloatSums(layout);
}

// Returns the number of slots for each block of a job at a durable level.
uint32_t SlotsPerBlock(const protocol::Durability& durability) {
  return durability.level == protocol::DurabilityLevel::kStep ? kSwapSlotsPerBlockAtStep
                                                              : kSwapSlotsPerBlockAtEpoch;
}

// Places blocks in DRAM: the lowest blocks that fit into `room` bytes, or the blocks that are in the retained state arena. The
// other blocks get swap slots.
void PlaceBlocks(const Layout& layout, const NodeOptions& options, uint64_t room,
                 const KeptMemory* kept, MemoryPlan& plan) {
  const BlockMap map = MapOf(layout, plan);
  plan.block_bytes = map.full_block_bytes();
  Placement::DurableSlots durable;
  if (plan.has_durable_steps()) {
    durable.per_block = SlotsPerBlock(plan.session.durability);
    // A block has 0 bytes if the optimizer has no states and no weights are on swap. Parts of the weights then have the size of
    // a page.
    plan.block_bytes = std::max(plan.block_bytes, kPageBytes);
    plan.weights_parts = durable.weights_parts = static_cast<uint32_t>(
        RoundUp(plan.weights_bytes - plan.weights_cache_bytes, plan.block_bytes) /
        plan.block_bytes);
    // The plane of weights of each block begins on a new page.
    const uint64_t pages = plan.weights_on_swap_bytes / kPageBytes + map.blocks();
    const LedgerCounts counts{
        .entries = map.blocks() + plan.weights_parts,
        .digest_pages = plan.has_weights_on_swap() ? pages : 0,
        .extra_state_bytes = plan.session.world_size * (plan.session.extra_state_bytes + 16)};
    plan.ledger_bytes = DurableStepsKept(plan.session) * LedgerBytes(layout, counts);
  }
  plan.placement = kept != nullptr ? Placement(layout, map, kept->resident, durable)
                                   : Placement(layout, map, room, durable);
  plan.swap_slots = plan.placement.slots_needed();
  const bool can_swap = options.swap.capacity_bytes() > 0 && options.staging_slots > 0 &&
                        options.staging_slot_bytes >= plan.block_bytes;
  if (can_swap) plan.swap_slot_bytes = plan.block_bytes;
}

// Counts `bytes` less of the tables of a job with retained memory, which would exceed the limit by these bytes. The job's arenas
// exist already, and a daemon of another release may have counted smaller tables. False if the tables are not the reason.
bool UncountTables(uint64_t bytes, const KeptMemory* kept, MemoryPlan& plan) {
  if (kept == nullptr || bytes > plan.table_bytes) return false;
  plan.table_bytes -= bytes;
  plan.fixed_bytes -= bytes;
  return true;
}

// Checks that the retained arenas have the sizes of the plan, and that they fit in the limit.
absl::Status CheckKept(const KeptMemory& kept, const NodeOptions& options, const NodeUse& use,
                       MemoryPlan& plan) {
  if (kept.weights_bytes != plan.weights_bytes) {
    return MakeError(
        ErrorId::kConfig,
        absl::StrCat("the weights that the daemon before has left take ", Bytes(kept.weights_bytes),
                     ", by this daemon's configuration ", Bytes(plan.weights_bytes)),
        "start the daemon with the configuration that it had before");
  }
  if (kept.update != nullptr) {
    const uint64_t float_sums_bytes = kept.update->float_sums.bytes;
    const bool fit =
        kept.step_bytes == plan.step_bytes && plan.uses_float_sums == (float_sums_bytes > 0);
    if (!fit) {
      return MakeError(
          ErrorId::kConfig,
          absl::StrCat("the gradients of the step that the daemon before was killed in take ",
                       Bytes(kept.step_bytes), " and ", Bytes(float_sums_bytes),
                       ", by this daemon's configuration ", Bytes(plan.step_bytes), " and ",
                       Bytes(plan.float_sums_bytes)),
          "start the daemon with the configuration that it had before");
    }
  }
  const uint64_t needed =
      TakenBytes(options, use) + plan.fixed_bytes + plan.placement.state_bytes();
  if (needed <= options.dram_limit_bytes) return absl::OkStatus();
  if (UncountTables(needed - options.dram_limit_bytes, &kept, plan)) return absl::OkStatus();
  return DramLimitError(plan, options, use, plan.placement.state_bytes());
}

// Checks that swap has room for all states and for the weights on swap.
absl::Status CheckBlocksOnSwap(const Layout& layout, const MemoryPlan& plan, uint64_t state_bytes,
                               const nvme::SlotMap& swap) {
  const uint64_t frozen_bytes = BlockMap::FrozenBytes(layout, plan.weights_on_swap);
  const uint64_t trained_bytes = state_bytes + plan.weights_on_swap_bytes - frozen_bytes;
  const uint64_t free_bytes = swap.free_bytes();
  const bool fits = frozen_bytes <= free_bytes &&
                    trained_bytes <= (free_bytes - frozen_bytes) / kSwapSlotsPerBlock;
  if (fits) return absl::OkStatus();
  return MakeError(
      ErrorId::kSwapNospc,
      absl::StrCat("the job needs swap slots for ", Bytes(trained_bytes),
                   " of states and their weights, two each",
                   Where(frozen_bytes > 0,
                         absl::StrCat(", and for ", Bytes(frozen_bytes), " of frozen weights")),
                   "; free are ", Bytes(free_bytes)),
      RaiseSwap(frozen_bytes + kSwapSlotsPerBlock * trained_bytes - free_bytes, kOrLimit));
}

absl::Status DurableSlotsError(const MemoryPlan& plan, uint64_t slots, uint64_t free_bytes) {
  const uint32_t blocks = plan.placement.blocks() - plan.placement.frozen_blocks();
  return MakeError(
      ErrorId::kSwapNospc,
      absl::StrCat("durability ", protocol::FormatDurability(plan.session.durability), " needs ",
                   plan.swap_slots, " swap slots of ", Bytes(plan.block_bytes), ", ",
                   Bytes(plan.swap_slots * plan.block_bytes),
                   " in all: ", SlotsPerBlock(plan.session.durability), " for each of ", blocks,
                   " blocks, ", kSwapSlotsPerWeightsPart, " for each of ", plan.weights_parts,
                   " parts of the weights",
                   Where(plan.placement.frozen_blocks() > 0,
                         absl::StrCat(", ", plan.placement.frozen_blocks(), " for frozen weights")),
                   ", and one more; there are ", slots, " in ", Bytes(free_bytes)),
      RaiseSwap((plan.swap_slots - slots) * plan.block_bytes,
                "or choose durability memory, without --keep or jobs.at_stop"));
}

// Checks that swap has room for the plan's slots. Slots for pages of sums are allocated first, because they may reduce the
// number of free slots for blocks, which are no smaller.
absl::Status CheckSwap(const NodeOptions& options, const DurableJob* recovered, nvme::SlotMap swap,
                       MemoryPlan& plan) {
  if (plan.swap_slots == 0 && plan.sum_slots == 0) return absl::OkStatus();
  const uint64_t sum_bytes = plan.sum_slots * plan.sum_page_bytes;
  if (plan.sum_slots > 0 && !HasOwnSumSlots(plan, recovered) &&
      !swap.Allocate(plan.sum_slots, plan.sum_page_bytes)) {
    return MakeError(ErrorId::kSwapNospc,
                     absl::StrCat("the gradients that do not fit in DRAM need ", Bytes(sum_bytes),
                                  " of swap; free are ", Bytes(swap.free_bytes())),
                     RaiseSwap(sum_bytes, kOrLimit));
  }
  const uint64_t own_slots = recovered == nullptr ? 0 : recovered->BlockSlots().size();
  const uint64_t free_slots = swap.SlotsFree(plan.block_bytes);
  // A recovered job gives up its spare slot if swap is full.
  const bool may_do_without = recovered != nullptr && plan.placement.frozen_blocks() == 0;
  if (plan.has_durable_steps() && may_do_without && own_slots + free_slots + 1 == plan.swap_slots) {
    plan.placement.GiveUpSpareSlot();
    --plan.swap_slots;
  }
  if (plan.has_durable_steps() && own_slots + free_slots < plan.swap_slots) {
    return DurableSlotsError(plan, own_slots + free_slots, swap.free_bytes());
  }
  if (own_slots + free_slots < plan.swap_slots) {
    return MakeError(
        ErrorId::kSwapNospc,
        absl::StrCat(
            "the job needs ", plan.swap_slots, " swap slots of ", Bytes(plan.block_bytes), ", ",
            Bytes(plan.swap_slots * plan.block_bytes), " in all, for ",
            plan.placement.swapped_blocks() - plan.placement.frozen_blocks(),
            " blocks that do not fit in DRAM (two slots each)",
            Where(plan.placement.frozen_blocks() > 0,
                  absl::StrCat(" and ", plan.placement.frozen_blocks(),
                               " of frozen weights (one each, and one more)")),
            Where(sum_bytes > 0, absl::StrCat(", beside ", Bytes(sum_bytes), " for gradients")),
            "; free are ", free_slots, " slots in ", Bytes(swap.free_bytes())),
        RaiseSwap((plan.swap_slots - own_slots - free_slots) * plan.block_bytes, kOrLimit));
  }
  if (plan.swap_slots > 0 && plan.swap_slot_bytes == 0) {
    return MakeError(ErrorId::kSwapNospc,
                     absl::StrCat("a block of ", Bytes(plan.block_bytes), " needs a staging slot; ",
                                  options.staging_slots, " slots of ",
                                  Bytes(options.staging_slot_bytes), " are free"),
                     options.staging_slots == 0
                         ? "the daemon has no swap: start it with --swap or swap.paths"
                         : "raise swap.staging or lower update.block_elems");
  }
  return absl::OkStatus();
}

}  // namespace

bool HasOwnSumSlots(const MemoryPlan& plan, const DurableJob* recovered) {
  const KeptMemory* const kept = KeptOf(recovered);
  if (kept == nullptr) return false;
  const std::vector<nvme::Slot>& slots = kept->sum_slots;
  return slots.size() >= plan.sum_slots && std::ranges::all_of(slots, [&](const nvme::Slot& slot) {
           return slot.size_bytes == plan.sum_page_bytes;
         });
}

std::vector<uint32_t> SumPagesOf(const MemoryPlan& plan, const BlockMap& map, uint32_t block) {
  const uint64_t width = protocol::SizeBytes(plan.sum_dtype);
  std::set<uint32_t> pages;
  for (const BlockRun& run : map.Runs(block)) {
    const uint64_t at = plan.accumulator_offsets[run.partition] + run.partition_elem * width;
    const uint64_t last = (at + run.elems * width - 1) / plan.sum_page_bytes;
    for (uint64_t page = at / plan.sum_page_bytes; page <= last; ++page) {
      pages.insert(static_cast<uint32_t>(page));
    }
  }
  return {pages.begin(), pages.end()};
}

uint64_t TakenBytes(const NodeOptions& options, const NodeUse& use) {
  return options.node_bytes + use.jobs_dram_bytes + use.deleted_weights_bytes;
}

void MemoryPlan::UseFloatSums(const Layout& layout) {
  uses_float_sums = true;
  sum_dtype = protocol::DType::kFloat32;
  session.accumulate = true;
  PlaceSums(layout, float_sums_offset, *this);
}

absl::Status DramLimitError(const MemoryPlan& plan, const NodeOptions& options, const NodeUse& use,
                            uint64_t state_bytes_needed) {
  const uint64_t world_size = plan.session.world_size;
  const uint64_t accumulator_bytes = plan.overflow_offset;
  const uint64_t overflow_bytes = plan.piece_bytes * plan.overflow_slots;
  const uint64_t extra_bytes =
      plan.step_bytes - accumulator_bytes - overflow_bytes - plan.early_weights_bytes;
  const uint64_t needed = TakenBytes(options, use) + plan.fixed_bytes + state_bytes_needed;
  std::string of_weights;
  if (plan.has_weights_on_swap()) {
    of_weights = " (two partitions of each rank; the others are on swap)";
  }
  std::string message = absl::StrCat(
      "the job needs ", Bytes(plan.fixed_bytes + state_bytes_needed), " of DRAM: weights ",
      Bytes(plan.weights_bytes), of_weights, " + gradient sums ", Bytes(accumulator_bytes),
      plan.has_paged_sums() ? " (the others are on swap)" : "", " + overflow ",
      Bytes(overflow_bytes), " + extra_state and rounding ", Bytes(extra_bytes));
  if (plan.early_weights_bytes > 0) {
    absl::StrAppend(&message, " + new weights ", Bytes(plan.early_weights_bytes));
  }
  const uint64_t activation_bytes = RoundUp(plan.session.activation_bytes, kPageBytes);
  absl::StrAppend(&message, " + ", world_size, " x (gradient arena ",
                  Bytes(plan.session_arena_bytes - activation_bytes),
                  activation_bytes == 0 ? "" : " + activations " + Bytes(activation_bytes),
                  " + ring ", Bytes(plan.ring_bytes), " + extra_state ",
                  Bytes(plan.extra_state_copy_bytes), ") + tables ", Bytes(plan.table_bytes));
  if (state_bytes_needed > 0) {
    absl::StrAppend(&message, " + states in DRAM ", Bytes(state_bytes_needed),
                    options.swap.capacity_bytes() > 0 ? "" : " (there is no swap)");
  }
  absl::StrAppend(&message, "; the limit is ", Bytes(options.dram_limit_bytes),
                  ", of which the node itself holds ", Bytes(options.node_bytes),
                  " and other jobs hold ", Bytes(use.jobs_dram_bytes));
  if (plan.missing_bytes > 0 && use.jobs_dram_bytes > 0) {
    absl::StrAppend(&message, "; of their states ", Bytes(use.movable_bytes),
                    " can move to the free swap slots");
  }
  if (use.deleted_weights_bytes > 0) {
    absl::StrAppend(&message, "; processes still have weights of deleted jobs mapped: ",
                    Bytes(use.deleted_weights_bytes), " (forebay mem)");
  }
  return MakeError(ErrorId::kDramLimit, message,
                   absl::StrCat("raise --dram / dram.limit to at least ", needed, " bytes (",
                                FormatBytes(RoundUp(needed, protocol::kMiB)),
                                "), or delete jobs that hold memory"));
}

StatePart MemoryPlan::WeightsPart(uint32_t part) const {
  return daemon::WeightsPart(RoundUp(weights_bytes - weights_cache_bytes, kPageBytes), block_bytes,
                             part);
}

uint64_t SumBytes(const protocol::PartitionPlace& partition, protocol::DType sum_dtype) {
  return RoundUp(partition.gradient_elems * protocol::SizeBytes(sum_dtype),
                 protocol::kCacheLineBytes);
}

uint64_t StepRegionBytes(const Layout& layout, const SessionRequest& session) {
  return RoundUp(sizeof(protocol::StepRequest) +
                     layout.param_group_rows() * sizeof(protocol::HyperParams) +
                     protocol::PresenceBytes(layout.params().size()) + session.extra_state_bytes +
                     protocol::StepRegionTailBytes(layout, session.world_ranks > 0),
                 kPageBytes);
}

uint64_t MemoryPlan::summary_offset(const Layout& layout) const {
  return protocol::StepSummaryOffset(
      {.offset_bytes = step_region_offset, .size_bytes = step_region_bytes}, layout);
}

uint64_t ReaderArenaBytes(uint64_t grad_arena_bytes) {
  return RoundUp(grad_arena_bytes, kPageBytes);
}

absl::Status CheckReaderRequest(uint64_t grad_arena_bytes) {
  if (grad_arena_bytes >= kPageBytes && grad_arena_bytes <= kGradArenaBytesMax) {
    return absl::OkStatus();
  }
  return MakeError(ErrorId::kRange,
                   absl::StrCat("a reader's arena of ", grad_arena_bytes, " bytes (", kPageBytes,
                                " to ", kGradArenaBytesMax, ")"),
                   "ask for about 1 MiB: states are read in pieces of that size");
}

absl::Status CheckSessionRequest(const Layout& layout, const SessionRequest& request) {
  const uint64_t least = kGradPiecesMin * layout.largest_piece_bytes();
  if (request.grad_arena_bytes < least) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("a gradient arena of ", Bytes(request.grad_arena_bytes),
                                  " is too small: ", kGradPiecesMin, " pieces are ", Bytes(least)),
                     absl::StrCat("ask for at least ", least, " bytes"));
  }
  if (request.extra_state_bytes > protocol::kExtraStateBytesMax) {
    return MakeError(
        ErrorId::kExtraState,
        absl::StrCat("room for ", Bytes(request.extra_state_bytes), " of extra_state (at most ",
                     Bytes(protocol::kExtraStateBytesMax), ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<MemoryPlan> PlanJob(const Layout& layout, const SessionRequest& request,
                                   const NodeOptions& options, const NodeUse& use) {
  MemoryPlan plan;
  const KeptMemory* const kept = KeptOf(use.recovered);
  RETURN_IF_ERROR(PlanArenas(layout, request, options, plan));
  const bool has_swap = options.swap.capacity_bytes() > 0;
  const uint64_t others = TakenBytes(options, use) + plan.fixed_bytes - plan.weights_bytes;
  const bool weights_fit =
      others + plan.weights_bytes <= options.dram_limit_bytes + use.movable_bytes;
  const bool were_on_swap = use.recovered != nullptr && !use.recovered->weights_on_swap.empty();
  const bool go_to_swap = use.recovered == nullptr ? !weights_fit : were_on_swap;
  if (has_swap && !layout.is_shared() && go_to_swap) {
    const uint64_t beside =
        others + DigestBytes(layout) + RecordSwapBytes(layout, options, request.world_size);
    const uint64_t room = options.dram_limit_bytes - std::min(beside, options.dram_limit_bytes);
    PutWeightsOnSwap(layout, request, room,
                     were_on_swap ? use.recovered->weights_on_swap : std::vector<bool>(), plan);
    RETURN_IF_ERROR(PlanArenas(layout, request, options, plan));
  }
  plan.block_elems =
      use.recovered == nullptr ? BlockElems(layout, options, plan) : use.recovered->block_elems;
  const uint64_t state_bytes = BlockMap::TotalBytes(layout, plan.block_elems);
  const auto needed = [&] { return TakenBytes(options, use) + plan.fixed_bytes; };
  const auto room = [&] {
    return options.dram_limit_bytes - std::min(needed(), options.dram_limit_bytes);
  };
  const uint64_t for_job =
      options.dram_limit_bytes - std::min(TakenBytes(options, use), options.dram_limit_bytes);
  const bool fits = plan.fixed_bytes <= for_job + use.movable_bytes;
  if (plan.has_weights_on_swap()) {
    // Checks swap before creating a map of the blocks, because the client determines the size of that map, even for a job that
    // cannot fit. Skips a recovered job, which has slots for most of its blocks already.
    if (use.recovered == nullptr) {
      RETURN_IF_ERROR(CheckBlocksOnSwap(layout, plan, state_bytes, *use.swap));
    }
    // Gradient sums of a step that is being updated stay in their frames.
    const bool is_updated = kept != nullptr && kept->update != nullptr;
    const bool has_frames = is_updated ? kept->sum_frames > 0 : !fits;
    if (has_frames) {
      RETURN_IF_ERROR(PlanSumFrames(layout, request, options, for_job,
                                    is_updated ? kept->sum_frames : 0, plan));
    }
  }
  plan.missing_bytes = needed() - std::min(needed(), options.dram_limit_bytes);
  if (plan.missing_bytes > use.movable_bytes) {
    if (!UncountTables(plan.missing_bytes - use.movable_bytes, kept, plan)) {
      return DramLimitError(plan, options, use, has_swap ? 0 : state_bytes);
    }
    plan.missing_bytes = use.movable_bytes;
  }
  if (!has_swap && state_bytes > room() && !UncountTables(state_bytes - room(), kept, plan)) {
    return DramLimitError(plan, options, use, state_bytes);
  }
  // The layout is known to fit, so a map of its blocks fits too.
  RETURN_IF_ERROR(PlanEarlyWeights(layout, request, options, state_bytes, room(), kept, plan));
  UseKeptFloatSums(layout, kept, plan);
  PlaceBlocks(layout, options, plan.has_weights_on_swap() ? 0 : room(), kept, plan);
  if (kept != nullptr) RETURN_IF_ERROR(CheckKept(*kept, options, use, plan));
  RETURN_IF_ERROR(CheckSwap(options, use.recovered, *use.swap, plan));
  return plan;
}

absl::StatusOr<uint64_t> LimitWithoutSwap(const Layout& layout, const SessionRequest& request,
                                          const NodeOptions& options, const NodeUse& use) {
  MemoryPlan plan;
  RETURN_IF_ERROR(PlanArenas(layout, request, options, plan));
  return TakenBytes(options, use) + plan.fixed_bytes +
         BlockMap::TotalBytes(layout, BlockElems(layout, options, plan));
}

absl::StatusOr<LeastLimits> LeastLimitsOf(const Layout& layout, const SessionRequest& request,
                                          const NodeOptions& options, const NodeUse& use) {
  const uint64_t taken_bytes = TakenBytes(options, use);
  MemoryPlan plan;
  RETURN_IF_ERROR(PlanArenas(layout, request, options, plan));
  LeastLimits least;
  least.states_on_swap = taken_bytes + plan.fixed_bytes;
  least.weights_on_swap = least.gradients_on_swap = least.states_on_swap;
  if (layout.is_shared()) return least;
  PutWeightsOnSwap(layout, request, /*room=*/0, /*was_on_swap=*/{}, plan);
  RETURN_IF_ERROR(PlanArenas(layout, request, options, plan));
  least.weights_on_swap = std::min(least.states_on_swap, taken_bytes + plan.fixed_bytes);
  least.gradients_on_swap = least.weights_on_swap;
  plan.block_elems = BlockElems(layout, options, plan);
  if (layout.total_elems() / plan.block_elems > kAdvisedBlocksMax) return least;
  RETURN_IF_ERROR(
      PlanSumFrames(layout, request, options, /*limit=*/plan.table_bytes, /*kept=*/0, plan));
  least.gradients_on_swap = std::min(least.weights_on_swap, taken_bytes + plan.fixed_bytes);
  return least;
}

absl::StatusOr<MemoryPlan> PlanWorld(const Layout& layout, const MemoryPlan& job,
                                     const SessionRequest& request, const NodeOptions& options,
                                     const NodeUse& use) {
  MemoryPlan plan = job;
  plan.uses_float_sums = false;
  SessionRequest wanted = request;
  wanted.extra_state_bytes = std::max(wanted.extra_state_bytes, job.session.extra_state_bytes);
  wanted.durability = job.session.durability;
  RETURN_IF_ERROR(PlanArenas(layout, wanted, options, plan));
  const uint64_t needed = TakenBytes(options, use) + plan.fixed_bytes + use.own_state_bytes;
  plan.missing_bytes = needed - std::min(needed, options.dram_limit_bytes);
  if (plan.missing_bytes > use.movable_bytes) {
    return DramLimitError(plan, options, use, use.own_state_bytes);
  }
  return plan;
}

}  // namespace forebay::daemon
