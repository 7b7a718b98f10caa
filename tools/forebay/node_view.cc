// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/node_view.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

// "1 request", "2 requests".
std::string Counted(uint64_t count, const char* what) {
  return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
}

using SwapPaths = capnp::List<schema::SwapPathStatus>::Reader;

uint32_t SwappedBlocks(schema::JobStatus::Reader job) {
  return job.getBlocks() - std::min(job.getBlocks(), job.getResidentBlocks());
}

// An error without its hint, which would tear a table; --json has both.
std::string FirstLine(std::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

// "ok", or the reason if not; a job under creation or restore shows its progress.
std::string HealthOf(schema::JobStatus::Reader job, SwapPaths swap) {
  if (job.hasFailed()) return FirstLine(job.getFailed().cStr());
  if (job.getMakingBytes() > 0) {
    return absl::StrCat(job.getDurableStep() > 0 ? "restoring from swap: " : "creating: ",
                        FormatBytes(job.getMadeBytes()), " of ", FormatBytes(job.getMakingBytes()));
  }
  if (job.hasSwapWait())
    return absl::StrCat("waiting for swap: ", FirstLine(job.getSwapWait().cStr()));
  for (const auto path : swap) {
    if (SwappedBlocks(job) == 0 || path.getReadErrors() == 0) continue;
    return absl::StrCat("has blocks on swap; ", path.getPath().cStr(), " had ",
                        Counted(path.getReadErrors(), "failed read"), " since the daemon started");
  }
  return "ok";
}

std::string HealthOf(schema::SwapPathStatus::Reader path) {
  if (path.getLateNow() > 0) {
    return absl::StrFormat("not responding: %s for up to %.0f s",
                           Counted(path.getLateNow(), "request"), path.getLateSeconds());
  }
  if (path.getErrors() == 0) return "ok";
  const std::string errors = absl::StrCat(Counted(path.getErrors(), "request"), " failed, ",
                                          path.getReadErrors(), " of them reads: see the log");
  if (!path.getMarked()) return errors;
  return absl::StrCat("failing, used only if no other path has room: ", errors);
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

// Returns the measured rates of a path in GB/s: "2.17 read, 1.20 written".
std::string RatesOf(schema::SwapPathStatus::Reader path) {
  if (path.getReadRate() <= 0) return "-";
  return absl::StrFormat("%.2f read, %.2f written", path.getReadRate() / protocol::kGb,
                         path.getWriteRate() / protocol::kGb);
}

// Returns the GB/s of the last transfers and their share of the measured rate: "2.10 (97 %) read, 1.15 (96 %) written".
std::string RatesNow(schema::SwapPathStatus::Reader path) {
  std::vector<std::string> rates;
  const auto add = [&](double rate, double measured, double share, const char* what) {
    if (measured > 0 && share > 0) {
      rates.push_back(
          absl::StrFormat("%.2f (%.0f %%) %s", rate / protocol::kGb, 100 * share, what));
    } else if (measured == 0 && rate > 0) {
      rates.push_back(absl::StrFormat("%.2f %s", rate / protocol::kGb, what));
    }
  };
  add(path.getReadRateNow(), path.getReadRate(), path.getReadShare(), "read");
  add(path.getWriteRateNow(), path.getWriteRate(), path.getWriteShare(), "written");
  return rates.empty() ? "-" : absl::StrJoin(rates, ", ");
}

std::string SwapText(schema::NodeStatus::Reader status) {
  if (status.getSwap().size() == 0) return "no swap\n";
  Table paths({"PATH", "CAPACITY", "USED", "READ", "WRITTEN", "WRITTEN TOTAL", "RATE GB/S",
               "RATE NOW GB/S", "SHARE", "ERRORS", "RETRIES", "O_DIRECT", "HEALTH"});
  for (const auto path : status.getSwap()) {
    paths.Add({path.getPath(), FormatBytes(path.getCapacityBytes()),
               FormatBytes(path.getUsedBytes()), FormatBytes(path.getReadBytes()),
               FormatBytes(path.getWrittenBytes()), FormatBytes(path.getWrittenInAll()),
               RatesOf(path), RatesNow(path), Percent(path.getShare()),
               absl::StrCat(path.getErrors()), absl::StrCat(path.getRetries()),
               path.getDirect() ? "yes" : "no", HealthOf(path)});
  }
  const std::string reason = status.getIoEngineReason();
  return absl::StrCat("engine  ", status.getIoEngine().cStr(),
                      reason.empty() ? "" : absl::StrCat(" (", reason, ")"), "\n\n", paths.Text());
}

// Returns the share of a job's states on swap, and the bytes of its weights on swap if it has any: "60 %", or
// "100 %, weights 7.0 MiB".
std::string OnSwap(schema::JobStatus::Reader job) {
  const std::string states = Percent(Share(SwappedBlocks(job), job.getBlocks()));
  if (job.getWeightsOnSwapBytes() == 0) return states;
  return absl::StrCat(states, ", weights ", FormatBytes(job.getWeightsOnSwapBytes()));
}

// Returns the swap traffic of the newest step's updates: "1.2 GiB read, 1.2 GiB written".
std::string StepTraffic(schema::JobStatus::Reader job) {
  if (job.getLastStepReadBytes() + job.getLastStepWrittenBytes() == 0) return "-";
  return absl::StrCat(FormatBytes(job.getLastStepReadBytes()), " read, ",
                      FormatBytes(job.getLastStepWrittenBytes()), " written");
}

// Returns the time of the newest step: "0.482 s", or "0.482 s, 0.93 of the disk's rate". The second number is the rate of
// swap transfers after the step's decision, as a share of the measured rate of all paths.
std::string StepTime(schema::JobStatus::Reader job, schema::NodeStatus::Reader status) {
  std::string text = absl::StrFormat("%.3f s", job.getLastStepSeconds());
  const auto bytes = static_cast<double>(job.getLastUpdateBytes());
  const double seconds = job.getLastStepSeconds() - job.getLastDecisionSeconds();
  double rate = 0;
  for (const auto path : status.getSwap()) {
    if (path.getMixedRate() <= 0) return text;
    rate += path.getMixedRate();
  }
  if (bytes == 0 || rate == 0 || seconds <= 0) return text;
  absl::StrAppendFormat(&text, ", %.2f of the disk's rate", bytes / seconds / rate);
  return text;
}

// Returns the newest step that survives the daemon's death, or "-" if the job is not durable.
std::string DurableStep(schema::JobStatus::Reader job) {
  const bool is_durable = job.getDurability() != "memory";
  return is_durable ? absl::StrCat(job.getDurableStep()) : "-";
}

std::string JobsText(schema::NodeStatus::Reader status) {
  const auto jobs = status.getJobs();
  if (jobs.size() == 0) return "no jobs\n";
  Table table({"JOB", "UID", "RANKS", "STEP", "DURABILITY", "DURABLE STEP", "PARAMS", "FORMAT",
               "WEIGHTS+STATES", "ON SWAP", "SWAP PER STEP", "STEP TIME", "HEALTH"});
  for (const auto job : jobs) {
    table.Add({job.getName(), absl::StrCat(job.getUid()),
               absl::StrCat(job.getSessions(), "/", job.getWorldSize()),
               absl::StrCat(job.getCommittedStep()), job.getDurability(), DurableStep(job),
               absl::StrCat(job.getParams()), job.getFormat(), FormatBytes(job.getStateBytes()),
               OnSwap(job), StepTraffic(job), StepTime(job, status),
               HealthOf(job, status.getSwap())});
  }
  return table.Text();
}

std::string TraceText(capnp::List<schema::TraceEvent>::Reader events) {
  if (events.size() == 0) return "no events yet: no step has been committed\n";
  uint64_t first = UINT64_MAX;
  for (const auto event : events) first = std::min(first, event.getStartNs());
  Table table({"START ms", "DURATION ms", "PROCESS", "LANE", "EVENT", "BYTES"});
  for (const auto event : events) {
    table.Add({Milliseconds(event.getStartNs() - first),
               Milliseconds(event.getEndNs() - event.getStartNs()), event.getProcess(),
               event.getLane(), event.getName(), FormatBytes(event.getBytes())});
  }
  return table.Text();
}

nlohmann::json TraceForPerfetto(capnp::List<schema::TraceEvent>::Reader events) {
  constexpr double kNsPerUs = 1000;
  std::vector<schema::TraceEvent::Reader> by_start;
  for (const auto event : events) by_start.push_back(event);
  std::ranges::stable_sort(by_start, {}, [](const auto& event) { return event.getStartNs(); });
  nlohmann::json out = nlohmann::json::array();
  std::map<std::string, int> processes;
  // For each process and lane, the lane's tracks: the time in ns from which a track is free, and the track's number.
  std::map<std::pair<std::string, std::string>, std::vector<std::pair<uint64_t, int>>> lanes;
  int tracks = 0;
  const auto name = [&](const char* what, int pid, int tid, const std::string& text) {
    out.push_back(
        {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{"name", text}}}});
  };
  for (const schema::TraceEvent::Reader& event : by_start) {
    const std::string process = event.getProcess();
    const auto [found, is_new] = processes.emplace(process, static_cast<int>(processes.size()) + 1);
    const int pid = found->second;
    if (is_new) name("process_name", pid, 0, process);
    auto& of_lane = lanes[{process, event.getLane()}];
    auto track = std::ranges::find_if(
        of_lane, [&](const auto& one) { return one.first <= event.getStartNs(); });
    if (track == of_lane.end()) {
      name("thread_name", pid, ++tracks, event.getLane());
      track = of_lane.insert(of_lane.end(), {0, tracks});
    }
    track->first = event.getEndNs();
    out.push_back({{"ph", "X"},
                   {"name", event.getName().cStr()},
                   {"cat", event.getLane().cStr()},
                   {"pid", pid},
                   {"tid", track->second},
                   {"ts", static_cast<double>(event.getStartNs()) / kNsPerUs},
                   {"dur", static_cast<double>(event.getEndNs() - event.getStartNs()) / kNsPerUs},
                   {"args", {{"bytes", event.getBytes()}}}});
  }
  return {{"displayTimeUnit", "ms"}, {"traceEvents", out}};
}

// Returns a line with the progress of a scrub, or nothing if no scrub runs.
std::string ScrubLine(schema::NodeStatus::Reader status) {
  if (status.getScrubBytes() == 0) return "";
  return absl::StrCat("scrub  ", FormatBytes(status.getScrubbedBytes()), " of ",
                      FormatBytes(status.getScrubBytes()), " verified\n");
}

std::string StatusText(schema::NodeStatus::Reader status) {
  return absl::StrCat(
      "forebayd ", status.getInfo().getVersion().cStr(), "  pid ", status.getInfo().getPid(),
      "  up ", absl::StrFormat("%.0f s", status.getUptimeSeconds()), "  socket ",
      status.getSocketPath().cStr(), "\nadam  ", status.getAdamTarget().cStr(), ", ",
      Counted(status.getWorkers(), "worker"), "\n", MemoryLine(status.getMemory()),
      ScrubLine(status), "\n", SwapText(status), "\n", JobsText(status));
}

}  // namespace forebay::tools
