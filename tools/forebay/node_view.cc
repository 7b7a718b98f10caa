#include "tools/forebay/node_view.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "protocol/units.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

using nlohmann::json;
using protocol::FormatBytes;

double Share(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string Milliseconds(uint64_t ns) {
  return absl::StrFormat("%.3f", static_cast<double>(ns) / 1e6);
}

json ArenaJson(const client::ArenaStatus& arena) {
  return {{"kind", arena.kind},
          {"job", arena.job},
          {"rank", arena.rank},
          {"numa_nodes", arena.numa_nodes},
          {"size_bytes", arena.size_bytes},
          {"allocated_bytes", arena.allocated_bytes},
          {"huge_bytes", arena.huge_bytes},
          {"locked", arena.locked}};
}

}  // namespace

json ToJson(const client::MemoryStatus& memory) {
  json arenas = json::array();
  for (const client::ArenaStatus& arena : memory.arenas) arenas.push_back(ArenaJson(arena));
  return {{"limit_bytes", memory.limit_bytes},
          {"used_bytes", memory.used_bytes},
          {"private_bytes", memory.private_bytes},
          {"locked_bytes", memory.locked_bytes},
          {"huge_bytes", memory.huge_bytes},
          {"peak_bytes", memory.peak_bytes},
          {"arenas", std::move(arenas)}};
}

json ToJson(const client::SwapPathStatus& path) {
  return {{"path", path.path},
          {"capacity_bytes", path.capacity_bytes},
          {"used_bytes", path.used_bytes},
          {"read_bytes", path.read_bytes},
          {"written_bytes", path.written_bytes},
          {"read_ops", path.read_ops},
          {"write_ops", path.write_ops},
          {"errors", path.errors},
          {"retries", path.retries},
          {"direct", path.direct},
          {"late", path.late},
          {"late_now", path.late_now},
          {"late_seconds", path.late_seconds}};
}

json ToJson(const client::JobStatus& job) {
  return {{"name", job.name},
          {"id", job.id},
          {"uid", job.uid},
          {"world_size", job.world_size},
          {"sessions", job.sessions},
          {"committed_step", job.committed_step},
          {"params", job.params},
          {"trainable_params", job.trainable_params},
          {"dtype", job.dtype},
          {"optimizer", job.optimizer},
          {"format", job.format},
          {"state_bytes", job.state_bytes},
          {"blocks", job.blocks},
          {"resident_blocks", job.resident_blocks},
          {"leases", job.leases},
          {"update_reads", job.update_reads},
          {"update_reads_prefetched", job.update_reads_prefetched},
          {"state_read_bytes", job.state_read_bytes},
          {"state_written_bytes", job.state_written_bytes},
          {"failed", job.failed},
          {"swap_wait", job.swap_wait},
          {"groups", job.groups},
          {"last_step_reads", job.last_step_reads},
          {"last_step_reads_prefetched", job.last_step_reads_prefetched},
          {"last_step_seconds", job.last_step_seconds},
          {"rpc_calls", job.rpc_calls},
          {"made_bytes", job.made_bytes},
          {"making_bytes", job.making_bytes}};
}

json ToJson(const client::TraceEvent& event) {
  return {{"lane", event.lane},
          {"name", event.name},
          {"start_ns", event.start_ns},
          {"end_ns", event.end_ns},
          {"bytes", event.bytes}};
}

json ToJson(const client::NodeStatus& status) {
  return {{"info",
           {{"pid", status.info.pid},
            {"version", status.info.version},
            {"protocol_version", status.info.protocol_version}}},
          {"uptime_seconds", status.uptime_seconds},
          {"memory", ToJson(status.memory)},
          {"swap", ToJson(status.swap)},
          {"jobs", ToJson(status.jobs)},
          {"io_engine", status.io_engine},
          {"io_engine_reason", status.io_engine_reason},
          {"adam_target", status.adam_target},
          {"workers", status.workers},
          {"socket_path", status.socket_path}};
}

// "1", or "0,1 interleaved".
std::string NodesText(const std::vector<uint32_t>& nodes) {
  if (nodes.empty()) return "-";
  return absl::StrCat(absl::StrJoin(nodes, ","), nodes.size() > 1 ? " interleaved" : "");
}

std::string MemoryText(const client::MemoryStatus& memory) {
  Table arenas({"ARENA", "JOB", "RANK", "NODE", "SIZE", "ALLOCATED", "HUGE PAGES", "LOCKED"});
  for (const client::ArenaStatus& arena : memory.arenas) {
    arenas.Add({arena.kind, arena.job.empty() ? "-" : arena.job,
                arena.rank < 0 ? "-" : absl::StrCat(arena.rank), NodesText(arena.numa_nodes),
                FormatBytes(arena.size_bytes), FormatBytes(arena.allocated_bytes),
                Percent(Share(arena.huge_bytes, arena.allocated_bytes)),
                arena.locked ? "yes" : "no"});
  }
  return absl::StrCat(
      "dram  ", FormatBytes(memory.used_bytes), " of ", FormatBytes(memory.limit_bytes), ", peak ",
      FormatBytes(memory.peak_bytes), "; private ", FormatBytes(memory.private_bytes), ", locked ",
      FormatBytes(memory.locked_bytes), ", on 2 MiB pages ", FormatBytes(memory.huge_bytes), "\n",
      arenas.empty() ? "" : "\n", arenas.empty() ? "" : arenas.Text());
}

// "well", or why not; a job that is being made says how far it is.
std::string HealthOf(const client::JobStatus& job) {
  if (!job.failed.empty()) return job.failed;
  if (job.making_bytes > 0) {
    return absl::StrCat("making memory: ", FormatBytes(job.made_bytes), " of ",
                        FormatBytes(job.making_bytes));
  }
  return job.swap_wait.empty() ? "well" : absl::StrCat("waits for swap: ", job.swap_wait);
}

std::string HealthOf(const client::SwapPathStatus& path) {
  if (path.late_now == 0) return "well";
  return absl::StrFormat("does not answer: %d requests wait, the longest for %.0f s", path.late_now,
                         path.late_seconds);
}

std::string SwapText(const client::NodeStatus& status) {
  if (status.swap.empty()) return "no swap\n";
  Table paths(
      {"PATH", "CAPACITY", "USED", "READ", "WRITTEN", "ERRORS", "RETRIES", "O_DIRECT", "HEALTH"});
  for (const client::SwapPathStatus& path : status.swap) {
    paths.Add({path.path, FormatBytes(path.capacity_bytes), FormatBytes(path.used_bytes),
               FormatBytes(path.read_bytes), FormatBytes(path.written_bytes),
               absl::StrCat(path.errors), absl::StrCat(path.retries), path.direct ? "yes" : "no",
               HealthOf(path)});
  }
  return absl::StrCat(
      "engine  ", status.io_engine,
      status.io_engine_reason.empty() ? "" : absl::StrCat(" (", status.io_engine_reason, ")"),
      "\n\n", paths.Text());
}

std::string JobsText(const std::vector<client::JobStatus>& jobs) {
  if (jobs.empty()) return "no jobs\n";
  Table table({"JOB", "UID", "RANKS", "STEP", "PARAMS", "FORMAT", "STATE", "ON SWAP", "STEP TIME",
               "HEALTH"});
  for (const client::JobStatus& job : jobs) {
    table.Add({job.name, absl::StrCat(job.uid), absl::StrCat(job.sessions, "/", job.world_size),
               absl::StrCat(job.committed_step), absl::StrCat(job.params), job.format,
               FormatBytes(job.state_bytes),
               Percent(Share(job.blocks - std::min(job.blocks, job.resident_blocks), job.blocks)),
               absl::StrFormat("%.3f s", job.last_step_seconds), HealthOf(job)});
  }
  return table.Text();
}

std::string TraceText(const std::vector<client::TraceEvent>& events) {
  if (events.empty()) return "no events yet: no step has been committed\n";
  uint64_t first = events.front().start_ns;
  for (const client::TraceEvent& event : events) first = std::min(first, event.start_ns);
  Table table({"START ms", "TOOK ms", "LANE", "WHAT", "BYTES"});
  for (const client::TraceEvent& event : events) {
    table.Add({Milliseconds(event.start_ns - first), Milliseconds(event.end_ns - event.start_ns),
               event.lane, event.name, FormatBytes(event.bytes)});
  }
  return table.Text();
}

std::string StatusText(const client::NodeStatus& status) {
  return absl::StrCat("forebayd ", status.info.version, "  pid ", status.info.pid, "  up ",
                      absl::StrFormat("%.0f s", status.uptime_seconds), "  socket ",
                      status.socket_path, "\nadam  ", status.adam_target, ", ", status.workers,
                      " workers\n",
                      MemoryText({.limit_bytes = status.memory.limit_bytes,
                                  .used_bytes = status.memory.used_bytes,
                                  .private_bytes = status.memory.private_bytes,
                                  .locked_bytes = status.memory.locked_bytes,
                                  .huge_bytes = status.memory.huge_bytes,
                                  .peak_bytes = status.memory.peak_bytes,
                                  .arenas = {}}),
                      "\n", SwapText(status), "\n", JobsText(status.jobs));
}

}  // namespace forebay::tools
