#include "daemon/control/status_message.h"

#include <unistd.h>

#include <algorithm>
#include <string_view>

#include "daemon/control/version.h"
#include "protocol/dtype.h"
#include "protocol/error.h"
#include "protocol/wire.h"

namespace forebay::daemon {
namespace {

constexpr size_t kGroupNamesBytesMax = 128 << 10;  // in one status
constexpr size_t kEventNameBytesMax = 48;

std::string Text(std::string_view text) { return std::string(text); }

void FillMemory(const NodePicture& picture, schema::MemoryStatus::Builder memory) {
  memory.setLimitBytes(picture.node.dram_limit_bytes);
  memory.setUsedBytes(picture.memory.used_bytes);
  memory.setPrivateBytes(picture.memory.private_bytes);
  memory.setLockedBytes(picture.memory.locked_bytes);
  memory.setHugeBytes(picture.memory.huge_bytes);
  memory.setPeakBytes(picture.memory.peak_bytes);
  auto arenas = memory.initArenas(static_cast<unsigned>(picture.arenas.size()));
  for (unsigned i = 0; i < arenas.size(); ++i) {
    const ArenaLine& line = picture.arenas[i];
    arenas[i].setKind(Name(line.owner.kind));
    arenas[i].setJob(line.owner.job.c_str());
    arenas[i].setRank(line.owner.rank);
    arenas[i].setSizeBytes(line.size_bytes);
    arenas[i].setAllocatedBytes(line.allocated_bytes);
    arenas[i].setHugeBytes(line.huge_bytes);
    arenas[i].setLocked(line.locked);
  }
}

void FillSwap(const SwapPathPicture& picture, schema::SwapPathStatus::Builder swap) {
  swap.setPath(picture.path.c_str());
  swap.setCapacityBytes(picture.stats.capacity_bytes);
  swap.setUsedBytes(picture.stats.allocated_bytes);
  swap.setReadBytes(picture.stats.read_bytes);
  swap.setWrittenBytes(picture.stats.written_bytes);
  swap.setReadOps(picture.stats.reads);
  swap.setWriteOps(picture.stats.writes);
  swap.setErrors(picture.stats.errors);
  swap.setRetries(picture.stats.retries);
  swap.setDirect(true);  // a path without O_DIRECT is refused when the volume is opened
}

void FillJob(const JobPicture& picture, schema::JobStatus::Builder job) {
  const JobView& view = picture.view;
  const protocol::LayoutSpec& spec = view.layout->spec();
  job.setName(view.name.c_str());
  job.setId(view.id);
  job.setUid(view.uid);
  job.setWorldSize(spec.world_size);
  job.setSessions(static_cast<uint32_t>(view.sessions.size()));
  job.setCommittedStep(view.committed_step);
  job.setParams(view.params);
  job.setPaddedElems(view.padded_elems);
  job.setDtype(Text(protocol::Name(spec.dtype)).c_str());
  job.setOptimizer(Text(protocol::Name(spec.optimizer)).c_str());
  job.setFormat(Text(protocol::Name(spec.format)).c_str());
  job.setStateBytes(view.state_bytes);
  job.setBlocks(view.blocks);
  job.setResidentBlocks(view.resident_blocks);
  job.setLeases(static_cast<uint32_t>(view.leases));
  job.setUpdateReads(view.update_reads);
  job.setUpdateReadsEarly(view.update_reads_early);
  job.setStateReadBytes(view.state_read_bytes);
  job.setStateWrittenBytes(view.state_written_bytes);
  job.setLastStepReads(view.last_step_reads);
  job.setLastStepReadsEarly(view.last_step_reads_early);
  job.setLastStepSeconds(picture.last_step_seconds);
  if (!view.failed.ok()) job.setFailed(protocol::FormatError(view.failed).c_str());
}

}  // namespace

void FillInfo(schema::NodeInfo::Builder info) {
  info.setPid(static_cast<uint32_t>(::getpid()));
  info.setVersion(kVersion);
  info.setProtocolVersion(protocol::kProtocolVersion);
}

void FillStatus(const NodePicture& picture, const std::string& socket_path,
                const std::map<JobId, uint64_t>& rpc_calls, schema::NodeStatus::Builder status) {
  FillInfo(status.initInfo());
  status.setUptimeSeconds(picture.uptime_seconds);
  FillMemory(picture, status.initMemory());
  auto swap = status.initSwap(static_cast<unsigned>(picture.swap.size()));
  for (unsigned i = 0; i < swap.size(); ++i) FillSwap(picture.swap[i], swap[i]);
  auto jobs = status.initJobs(static_cast<unsigned>(picture.jobs.size()));
  size_t names_bytes = 0;
  for (unsigned i = 0; i < jobs.size(); ++i) {
    FillJob(picture.jobs[i], jobs[i]);
    const auto calls = rpc_calls.find(picture.jobs[i].view.id);
    jobs[i].setRpcCalls(calls == rpc_calls.end() ? 0 : calls->second);
    const auto& names = picture.jobs[i].view.layout->spec().group_names;
    for (const std::string& name : names) names_bytes += name.size() + 16;
    if (names_bytes > kGroupNamesBytesMax) continue;
    auto groups = jobs[i].initGroups(static_cast<unsigned>(names.size()));
    for (unsigned g = 0; g < groups.size(); ++g) groups.set(g, names[g].c_str());
  }
  status.setIoEngine(picture.io_engine.c_str());
  status.setIoEngineReason(picture.io_engine_reason.c_str());
  status.setAdamTarget(picture.adam_target.c_str());
  status.setWorkers(picture.workers);
  status.setSocketPath(socket_path.c_str());
}

void FillTrace(const std::vector<TimedEvent>& events,
               capnp::List<schema::TraceEvent>::Builder out) {
  for (unsigned i = 0; i < out.size(); ++i) {
    out[i].setLane(Name(events[i].lane));
    out[i].setName(events[i].name.substr(0, kEventNameBytesMax).c_str());
    out[i].setStartNs(events[i].start_ns);
    out[i].setEndNs(events[i].end_ns);
    out[i].setBytes(events[i].bytes);
  }
}

}  // namespace forebay::daemon
