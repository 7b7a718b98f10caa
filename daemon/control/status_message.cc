// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/status_message.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "daemon/control/version.h"
#include "protocol/dtype.h"
#include "protocol/durability.h"
#include "protocol/error.h"
#include "protocol/wire.h"

namespace forebay::daemon {
namespace {

constexpr size_t kGroupNamesBytesMax = 128 << 10;  // bytes of all group names in one status
constexpr size_t kEventNameBytesMax = 48;
constexpr char kOfAnother[] = "(another user)";

std::string Text(std::string_view text) { return std::string(text); }

// Name of the job that owns an arena; empty if no job owns it.
std::string JobText(const JobName& job, const Viewer& viewer) {
  if (job.name.empty()) return {};
  return viewer.MaySee(job.uid) ? JobNameFor(viewer.uid, job) : kOfAnother;
}

void FillMemory(const NodeSnapshot& snapshot, const Viewer& viewer,
                schema::MemoryStatus::Builder memory) {
  memory.setLimitBytes(snapshot.node.dram_limit_bytes);
  memory.setUsedBytes(snapshot.memory.used_bytes);
  memory.setPrivateBytes(snapshot.memory.private_bytes);
  memory.setLockedBytes(snapshot.memory.locked_bytes);
  memory.setHugeBytes(snapshot.memory.huge_bytes);
  memory.setPeakBytes(snapshot.memory.peak_bytes);
  auto arenas = memory.initArenas(static_cast<unsigned>(snapshot.arenas.size()));
  for (unsigned i = 0; i < arenas.size(); ++i) {
    const ArenaLine& line = snapshot.arenas[i];
    arenas[i].setKind(Name(line.owner.kind));
    arenas[i].setJob(JobText(line.owner.job, viewer).c_str());
    arenas[i].setRank(line.owner.rank);
    arenas[i].setSizeBytes(line.size_bytes);
    arenas[i].setAllocatedBytes(line.allocated_bytes);
    arenas[i].setHugeBytes(line.huge_bytes);
    arenas[i].setLocked(line.locked);
    auto nodes = arenas[i].initNumaNodes(static_cast<unsigned>(line.numa_nodes.size()));
    for (unsigned n = 0; n < nodes.size(); ++n) {
      nodes.set(n, static_cast<uint32_t>(line.numa_nodes[n]));
    }
  }
}

void FillSwap(const SwapPathSnapshot& snapshot, schema::SwapPathStatus::Builder swap) {
  swap.setPath(snapshot.path.c_str());
  swap.setCapacityBytes(snapshot.stats.capacity_bytes);
  swap.setUsedBytes(snapshot.view.used_bytes);
  swap.setShare(snapshot.view.share);
  swap.setReadRateNow(snapshot.view.read_rate);
  swap.setWriteRateNow(snapshot.view.write_rate);
  swap.setMarked(snapshot.view.marked);
  swap.setReadBytes(snapshot.stats.read_bytes);
  swap.setWrittenBytes(snapshot.stats.written_bytes);
  swap.setReadOps(snapshot.stats.reads);
  swap.setWriteOps(snapshot.stats.writes);
  swap.setErrors(snapshot.stats.errors);
  swap.setReadErrors(snapshot.stats.read_errors);
  swap.setRetries(snapshot.stats.retries);
  swap.setLate(snapshot.stats.late);
  swap.setLateNow(snapshot.late_requests);
  swap.setLateSeconds(snapshot.late_seconds);
  swap.setWrittenInAll(snapshot.wear.written_bytes);
  if (snapshot.rates) {
    swap.setReadRate(snapshot.rates->read);
    swap.setWriteRate(snapshot.rates->write);
    swap.setMixedRate(snapshot.rates->mixed);
    swap.setRequestBytes(snapshot.rates->request_bytes);
    swap.setRequestsAtOnce(snapshot.rates->depth);
    swap.setReadSeconds(snapshot.rates->read_seconds);
    swap.setReadShare(snapshot.view.current_read_rate / snapshot.rates->read);
    swap.setWriteShare(snapshot.view.current_write_rate / snapshot.rates->write);
  }
  swap.setDirect(true);  // a path without O_DIRECT is refused when the volume is opened
}

void FillJob(const JobSnapshot& snapshot, const Viewer& viewer, schema::JobStatus::Builder job) {
  const JobView& view = snapshot.view;
  const protocol::LayoutSpec& spec = view.layout->spec();
  job.setName(JobNameFor(viewer.uid, {.uid = view.uid, .name = view.name}).c_str());
  job.setId(view.id);
  job.setUid(view.uid);
  job.setWorldSize(view.world_size);
  job.setSessions(static_cast<uint32_t>(view.sessions.size()));
  job.setCommittedStep(view.committed_step);
  job.setPublishedStep(view.published_step);
  job.setDurability(protocol::FormatDurability(view.durability).c_str());
  job.setDurableStep(view.durable_step);
  job.setParams(view.params);
  job.setTrainableParams(view.trainable_params);
  job.setDtype(Text(protocol::Name(spec.dtype)).c_str());
  job.setOptimizer(Text(protocol::Name(spec.optimizer)).c_str());
  job.setFormat(Text(protocol::Name(spec.format)).c_str());
  job.setStateBytes(view.state_bytes);
  job.setBlocks(view.blocks);
  job.setResidentBlocks(view.resident_blocks);
  job.setLeases(static_cast<uint32_t>(view.leases));
  job.setUpdateReads(view.update_reads);
  job.setUpdateReadsPrefetched(view.update_reads_prefetched);
  job.setStateReadBytes(view.state_read_bytes);
  job.setStateWrittenBytes(view.state_written_bytes);
  job.setReclaimedReads(view.reclaimed_reads);
  job.setLastStepReads(view.last_step_reads);
  job.setLastStepReadsPrefetched(view.last_step_reads_prefetched);
  job.setLastStepReadBytes(view.last_step_read_bytes);
  job.setLastStepWrittenBytes(view.last_step_written_bytes);
  job.setLastUpdateBytes(view.last_update_bytes);
  job.setSwapBytes(view.swap_bytes);
  job.setStepReadBytes(view.step_traffic.read_bytes);
  job.setStepWrittenBytes(view.step_traffic.written_bytes);
  job.setNewWeightsBytes(view.new_weights_bytes);
  job.setGradientsOnSwapBytes(view.sums_on_swap_bytes);
  job.setGradientReadBytes(view.sums.read_bytes);
  job.setGradientWrittenBytes(view.sums.written_bytes);
  job.setEarlyUpdates(view.early_updates);
  job.setDroppedUpdates(view.dropped_updates);
  job.setLastStepEarlyUpdates(view.last_step_early_updates);
  job.setLastStepSeconds(snapshot.last_step_seconds);
  job.setRpcCalls(snapshot.rpc_calls);
  job.setLastDecisionSeconds(snapshot.last_decision_seconds);
  if (!view.swap_wait.ok()) job.setSwapWait(protocol::FormatError(view.swap_wait).c_str());
  job.setMadeBytes(snapshot.made_bytes);
  job.setMakingBytes(snapshot.making_bytes);
  job.setEvictedBlocks(view.moves.evicted);
  job.setPromotedBlocks(view.moves.promoted);
  job.setFailedMoves(view.moves.failed);
  job.setRelocatedBlocks(view.moves.relocated);
  job.setWeightsOnSwapBytes(view.weights_on_swap_bytes);
  job.setWeightsCacheBytes(view.weights_cache_bytes);
  job.setWeightFetches(view.weights.fetches);
  job.setWeightFetchesAhead(view.weights.fetches_ahead);
  job.setWeightReadBytes(view.weights.read_bytes);
  if (!view.failed.ok()) job.setFailed(protocol::FormatError(view.failed).c_str());
}

}  // namespace

void FillInfo(const std::string& identity, schema::NodeInfo::Builder info) {
  info.setPid(static_cast<uint32_t>(::getpid()));
  info.setVersion(kVersion);
  info.setProtocolVersion(protocol::kProtocolVersion);
  info.setIdentity(identity.c_str());
}

void FillStatus(const NodeSnapshot& snapshot, const Viewer& viewer, const ServedAt& served_at,
                schema::NodeStatus::Builder status) {
  FillInfo(served_at.identity, status.initInfo());
  status.setUptimeSeconds(snapshot.uptime_seconds);
  FillMemory(snapshot, viewer, status.initMemory());
  auto swap = status.initSwap(static_cast<unsigned>(snapshot.swap.size()));
  for (unsigned i = 0; i < swap.size(); ++i) {
    FillSwap(snapshot.swap[i], swap[i]);
  }
  std::vector<const JobSnapshot*> shown;
  for (const JobSnapshot& job : snapshot.jobs) {
    if (viewer.MaySee(job.view.uid)) shown.push_back(&job);
  }
  auto jobs = status.initJobs(static_cast<unsigned>(shown.size()));
  size_t names_bytes = 0;
  for (unsigned i = 0; i < jobs.size(); ++i) {
    FillJob(*shown[i], viewer, jobs[i]);
    const auto& names = shown[i]->view.layout->spec().group_names;
    for (const std::string& name : names) names_bytes += name.size() + 16;
    if (names_bytes > kGroupNamesBytesMax) continue;
    auto groups = jobs[i].initGroups(static_cast<unsigned>(names.size()));
    for (unsigned g = 0; g < groups.size(); ++g) groups.set(g, names[g].c_str());
  }
  status.setIoEngine(snapshot.io_engine.c_str());
  status.setIoEngineReason(snapshot.io_engine_reason.c_str());
  status.setAdamTarget(snapshot.adam_target.c_str());
  status.setWorkers(snapshot.workers);
  status.setSocketPath(served_at.socket_path.c_str());
  status.setScrubbedBytes(snapshot.scrub.scrubbed_bytes);
  status.setScrubBytes(snapshot.scrub.total_bytes);
  status.setLoopEvents(snapshot.loop_events);
  status.setLoopCpuSeconds(snapshot.loop_cpu_seconds);
}

void FillTrace(const std::vector<ShownEvent>& events,
               capnp::List<schema::TraceEvent>::Builder out) {
  for (unsigned i = 0; i < out.size(); ++i) {
    out[i].setProcess(events[i].process.c_str());
    out[i].setLane(events[i].lane.c_str());
    out[i].setName(events[i].name.substr(0, kEventNameBytesMax).c_str());
    out[i].setStartNs(events[i].start_ns);
    out[i].setEndNs(events[i].end_ns);
    out[i].setBytes(events[i].bytes);
  }
}

}  // namespace forebay::daemon
