// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/plan/table_bytes.h"

#include <algorithm>
#include <string>

#include "daemon/core/base/events.h"
#include "daemon/core/blocks/durable_content.h"
#include "daemon/core/blocks/record_sizes.h"
#include "daemon/core/blocks/undo_sizes.h"
#include "protocol/step_summary.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::kPageBytes;
using protocol::Layout;
using protocol::RoundUp;

// Number of records of a job that exist at once: the current record (KeptRecord), and the next record while it is being
// created.
constexpr uint64_t kRecords = 2;

// extra_state_bytes of a rank whose attach names no size, with what the client adds for itself.
constexpr uint64_t kExtraStateUncounted = 64 * protocol::kKiB + kPageBytes;

// Heap bytes that the allocator adds to a string or vector, and heap bytes of the tables for each parameter, group, partition,
// box, session and job, without names and shapes.
constexpr uint64_t kHeapBlockBytes = 32;
constexpr uint64_t kParamTableBytes = 160;
constexpr uint64_t kGroupTableBytes = 256;
constexpr uint64_t kPartitionTableBytes = 256;
constexpr uint64_t kBoxTableBytes = 160;
constexpr uint64_t kSessionTableBytes = 8 << 10;
constexpr uint64_t kJobTableBytes = 16 << 10;

uint64_t LayoutTableBytes(const protocol::LayoutSpec& spec, uint32_t world_size) {
  uint64_t bytes = kJobTableBytes + world_size * kSessionTableBytes;
  for (const auto& param : spec.params) {
    bytes += kParamTableBytes + param.name.size() + param.shape.size() * sizeof(uint64_t) +
             2 * kHeapBlockBytes;
  }
  for (const std::string& name : spec.group_names) {
    bytes += kGroupTableBytes + name.size() + kHeapBlockBytes;
  }
  for (const protocol::PartitionSpec& partition : spec.partitions) {
    bytes += kPartitionTableBytes + partition.boxes.size() * kBoxTableBytes;
  }
  return RoundUp(bytes, kPageBytes);
}

// Returns the bytes of a job's records (kRecords).
uint64_t RecordBytes(const Layout& layout, const NodeOptions& options, const MemoryPlan& plan,
                     uint64_t block_elems) {
  if (!options.keeps_jobs) return 0;
  const uint64_t blocks = layout.total_elems() / block_elems + layout.owners().size() + 1;
  const bool is_on_swap = plan.has_weights_on_swap();
  const RecordCounts counts{
      .params = layout.params().size(),
      .param_group_rows = layout.param_group_rows(),
      .partitions = layout.partitions().size(),
      .ranks = plan.session.world_size,
      .blocks = blocks,
      .block_digests =
          is_on_swap ? block_elems * protocol::SizeBytes(layout.spec().dtype) / kPageBytes + 1 : 0,
      .sum_pages = plan.sum_pages,
      .summary_bytes = plan.session.world_ranks == 0 ? 0 : protocol::NodeSummaryBytes(layout),
      .has_trust = protocol::Info(layout.spec().optimizer).passes > 1};
  // The slots of the job are counted a second time: it has a list of blocks and one of slots.
  const uint64_t bytes = LedgerBytes(layout, {.entries = 2 * blocks}) +
                         2 * SizesOf(counts).half_bytes() + RecordIndexBytes(counts) +
                         UndoBytes(layout.spec(), blocks, block_elems, options.workers) +
                         2 * kPageBytes;
  // A record refers to extra_state in the step arena. The next daemon reads it into a copy, which is counted with the tables of
  // durable steps if the job has them. The default size is not counted.
  const uint64_t counted = plan.session.extra_state_bytes -
                           std::min(plan.session.extra_state_bytes, kExtraStateUncounted);
  const uint64_t extra_states = plan.has_durable_steps() ? 0 : plan.session.world_size * counted;
  return RoundUp(extra_states, kPageBytes) + kRecords * RoundUp(bytes, kPageBytes) +
         (is_on_swap ? RecordSwapBytes(layout, options, plan.session.world_size) : 0);
}

// Returns the bytes of tables for durable steps: versions of blocks and of parts of the weights, and ledgers that are being
// encoded.
uint64_t DurableTableBytes(const Layout& layout, const MemoryPlan& plan, uint64_t block_elems) {
  constexpr uint64_t kEntryTableBytes = 512;
  constexpr uint64_t kLedgers = 3;
  // The weights have at most as many parts as the states have blocks.
  const uint64_t blocks = layout.total_elems() / block_elems + layout.owners().size() + 1;
  const uint64_t pages = plan.has_weights_on_swap() ? layout.weights_bytes() / kPageBytes : 0;
  const LedgerCounts counts{
      .entries = 2 * blocks,
      .digest_pages = pages,
      .extra_state_bytes = plan.session.world_size * plan.session.extra_state_bytes};
  return RoundUp(2 * blocks * kEntryTableBytes +
                     DurableStepsKept(plan.session) * kLedgers * LedgerBytes(layout, counts),
                 kPageBytes);
}

}  // namespace

uint64_t RecordSwapBytes(const Layout& layout, const NodeOptions& options, uint32_t world_size) {
  if (!options.keeps_jobs) return 0;
  const RecordCounts counts{.leases = LeasesRecordedMax(layout, world_size)};
  const uint64_t leases = counts.leases * 2 * kSmallEntryBytes + RecordIndexBytes(counts);
  // Each half of a record has room for the digests in two versions, as DigestBytes() has.
  return kRecords * (2 * DigestBytes(layout) + RoundUp(leases, kPageBytes));
}

uint64_t DigestBytes(const Layout& layout) {
  return RoundUp(2 * sizeof(uint64_t) * (layout.weights_bytes() / kPageBytes), kPageBytes);
}

uint64_t DurableStepsKept(const SessionRequest& session) { return session.world_ranks > 0 ? 2 : 1; }

uint64_t TableBytes(const Layout& layout, const NodeOptions& options, const MemoryPlan& plan,
                    uint64_t block_elems) {
  uint64_t bytes = LayoutTableBytes(layout.spec(), plan.session.world_size);
  if (plan.has_weights_on_swap()) bytes += DigestBytes(layout);
  if (plan.has_durable_steps()) bytes += DurableTableBytes(layout, plan, block_elems);
  return bytes + RecordBytes(layout, options, plan, block_elems);
}

}  // namespace forebay::daemon
