#include "tools/forebay/node_view.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "protocol/units.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

using protocol::FormatBytes;

double Share(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string Milliseconds(uint64_t ns) {
  return absl::StrFormat("%.3f", static_cast<double>(ns) / 1e6);
}

// "1", or "0,1 interleaved".
std::string NodesText(capnp::List<uint32_t>::Reader nodes) {
  if (nodes.size() == 0) return "-";
  return absl::StrCat(absl::StrJoin(nodes, ","), nodes.size() > 1 ? " interleaved" : "");
}

std::string MemoryLine(schema::MemoryStatus::Reader memory) {
  return absl::StrCat(
      "dram  ", FormatBytes(memory.getUsedBytes()), " of ", FormatBytes(memory.getLimitBytes()),
      ", peak ", FormatBytes(memory.getPeakBytes()), "; private ",
      FormatBytes(memory.getPrivateBytes()), ", locked ", FormatBytes(memory.getLockedBytes()),
      ", on 2 MiB pages ", FormatBytes(memory.getHugeBytes()), "\n");
}

// "well", or why not; a job that is being made says how far it is.
std::string HealthOf(schema::JobStatus::Reader job) {
  if (job.hasFailed()) return job.getFailed();
  if (job.getMakingBytes() > 0) {
    return absl::StrCat("is being made: ", FormatBytes(job.getMadeBytes()), " of ",
                        FormatBytes(job.getMakingBytes()));
  }
  return job.hasSwapWait() ? absl::StrCat("waits for swap: ", job.getSwapWait().cStr()) : "well";
}

std::string HealthOf(schema::SwapPathStatus::Reader path) {
  if (path.getLateNow() == 0) return "well";
  return absl::StrFormat("does not answer: %d requests wait, the longest for %.0f s",
                         path.getLateNow(), path.getLateSeconds());
}

}  // namespace

std::string MemoryText(schema::MemoryStatus::Reader memory) {
  Table arenas({"ARENA", "JOB", "RANK", "NODE", "SIZE", "ALLOCATED", "HUGE PAGES", "LOCKED"});
  for (const auto arena : memory.getArenas()) {
    arenas.Add({arena.getKind(), arena.hasJob() ? arena.getJob().cStr() : "-",
                arena.getRank() < 0 ? "-" : absl::StrCat(arena.getRank()),
                NodesText(arena.getNumaNodes()), FormatBytes(arena.getSizeBytes()),
                FormatBytes(arena.getAllocatedBytes()),
                Percent(Share(arena.getHugeBytes(), arena.getAllocatedBytes())),
                arena.getLocked() ? "yes" : "no"});
  }
  return absl::StrCat(MemoryLine(memory), arenas.empty() ? "" : "\n" + arenas.Text());
}

std::string SwapText(schema::NodeStatus::Reader status) {
  if (status.getSwap().size() == 0) return "no swap\n";
  Table paths(
      {"PATH", "CAPACITY", "USED", "READ", "WRITTEN", "ERRORS", "RETRIES", "O_DIRECT", "HEALTH"});
  for (const auto path : status.getSwap()) {
    paths.Add({path.getPath(), FormatBytes(path.getCapacityBytes()),
               FormatBytes(path.getUsedBytes()), FormatBytes(path.getReadBytes()),
               FormatBytes(path.getWrittenBytes()), absl::StrCat(path.getErrors()),
               absl::StrCat(path.getRetries()), path.getDirect() ? "yes" : "no", HealthOf(path)});
  }
  const std::string reason = status.getIoEngineReason();
  return absl::StrCat("engine  ", status.getIoEngine().cStr(),
                      reason.empty() ? "" : absl::StrCat(" (", reason, ")"), "\n\n", paths.Text());
}

std::string JobsText(capnp::List<schema::JobStatus>::Reader jobs) {
  if (jobs.size() == 0) return "no jobs\n";
  Table table({"JOB", "UID", "RANKS", "STEP", "PARAMS", "FORMAT", "STATE", "ON SWAP", "STEP TIME",
               "HEALTH"});
  for (const auto job : jobs) {
    const uint32_t swapped = job.getBlocks() - std::min(job.getBlocks(), job.getResidentBlocks());
    table.Add({job.getName(), absl::StrCat(job.getUid()),
               absl::StrCat(job.getSessions(), "/", job.getWorldSize()),
               absl::StrCat(job.getCommittedStep()), absl::StrCat(job.getParams()), job.getFormat(),
               FormatBytes(job.getStateBytes()), Percent(Share(swapped, job.getBlocks())),
               absl::StrFormat("%.3f s", job.getLastStepSeconds()), HealthOf(job)});
  }
  return table.Text();
}

std::string TraceText(capnp::List<schema::TraceEvent>::Reader events) {
  if (events.size() == 0) return "no events yet: no step has been committed\n";
  uint64_t first = UINT64_MAX;
  for (const auto event : events) first = std::min(first, event.getStartNs());
  Table table({"START ms", "TOOK ms", "LANE", "WHAT", "BYTES"});
  for (const auto event : events) {
    table.Add({Milliseconds(event.getStartNs() - first),
               Milliseconds(event.getEndNs() - event.getStartNs()), event.getLane(),
               event.getName(), FormatBytes(event.getBytes())});
  }
  return table.Text();
}

std::string StatusText(schema::NodeStatus::Reader status) {
  return absl::StrCat("forebayd ", status.getInfo().getVersion().cStr(), "  pid ",
                      status.getInfo().getPid(), "  up ",
                      absl::StrFormat("%.0f s", status.getUptimeSeconds()), "  socket ",
                      status.getSocketPath().cStr(), "\nadam  ", status.getAdamTarget().cStr(),
                      ", ", status.getWorkers(), " workers\n", MemoryLine(status.getMemory()), "\n",
                      SwapText(status), "\n", JobsText(status.getJobs()));
}

}  // namespace forebay::tools
