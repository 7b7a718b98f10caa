#include "client/python/src/admin.h"

#include <nanobind/stl/string.h>

#include <chrono>
#include <memory>
#include <string>

#include "client/admin.h"
#include "client/python/src/errors.h"

namespace forebay::python {
namespace nb = nanobind;
namespace {

using client::AdminClient;

std::unique_ptr<AdminClient> Connect(const std::string& socket, double timeout) {
  const auto limit =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(timeout));
  return ValueOrThrow(
      WithoutGil([&] { return AdminClient::Connect({.socket = socket, .timeout = limit}); }));
}

nb::dict ArenaDict(const client::ArenaStatus& arena) {
  nb::dict dict;
  dict["kind"] = arena.kind;
  dict["job"] = arena.job;
  dict["rank"] = arena.rank;
  nb::list nodes;
  for (const uint32_t node : arena.numa_nodes) nodes.append(node);
  dict["numa_nodes"] = nodes;
  dict["size_bytes"] = arena.size_bytes;
  dict["allocated_bytes"] = arena.allocated_bytes;
  dict["huge_bytes"] = arena.huge_bytes;
  dict["locked"] = arena.locked;
  return dict;
}

nb::dict MemoryDict(const client::MemoryStatus& memory) {
  nb::dict dict;
  dict["limit_bytes"] = memory.limit_bytes;
  dict["used_bytes"] = memory.used_bytes;
  dict["private_bytes"] = memory.private_bytes;
  dict["locked_bytes"] = memory.locked_bytes;
  dict["huge_bytes"] = memory.huge_bytes;
  dict["peak_bytes"] = memory.peak_bytes;
  nb::list arenas;
  for (const client::ArenaStatus& arena : memory.arenas) arenas.append(ArenaDict(arena));
  dict["arenas"] = arenas;
  return dict;
}

nb::dict SwapDict(const client::SwapPathStatus& swap) {
  nb::dict dict;
  dict["path"] = swap.path;
  dict["capacity_bytes"] = swap.capacity_bytes;
  dict["used_bytes"] = swap.used_bytes;
  dict["read_bytes"] = swap.read_bytes;
  dict["written_bytes"] = swap.written_bytes;
  dict["read_ops"] = swap.read_ops;
  dict["write_ops"] = swap.write_ops;
  dict["errors"] = swap.errors;
  dict["retries"] = swap.retries;
  dict["direct"] = swap.direct;
  dict["late"] = swap.late;
  dict["late_now"] = swap.late_now;
  dict["late_seconds"] = swap.late_seconds;
  return dict;
}

nb::dict JobDict(const client::JobStatus& job) {
  nb::dict dict;
  dict["name"] = job.name;
  dict["id"] = job.id;
  dict["uid"] = job.uid;
  dict["world_size"] = job.world_size;
  dict["sessions"] = job.sessions;
  dict["committed_step"] = job.committed_step;
  dict["params"] = job.params;
  dict["trainable_params"] = job.trainable_params;
  dict["dtype"] = job.dtype;
  dict["optimizer"] = job.optimizer;
  dict["format"] = job.format;
  dict["state_bytes"] = job.state_bytes;
  dict["blocks"] = job.blocks;
  dict["resident_blocks"] = job.resident_blocks;
  dict["leases"] = job.leases;
  dict["update_reads"] = job.update_reads;
  dict["update_reads_prefetched"] = job.update_reads_prefetched;
  dict["state_read_bytes"] = job.state_read_bytes;
  dict["state_written_bytes"] = job.state_written_bytes;
  dict["failed"] = job.failed;
  dict["swap_wait"] = job.swap_wait;
  nb::list groups;
  for (const std::string& group : job.groups) groups.append(group);
  dict["groups"] = groups;
  dict["last_step_reads"] = job.last_step_reads;
  dict["last_step_reads_prefetched"] = job.last_step_reads_prefetched;
  dict["last_step_seconds"] = job.last_step_seconds;
  dict["rpc_calls"] = job.rpc_calls;
  dict["made_bytes"] = job.made_bytes;
  dict["making_bytes"] = job.making_bytes;
  return dict;
}

nb::dict StatusDict(const client::NodeStatus& status) {
  nb::dict dict;
  dict["pid"] = status.info.pid;
  dict["version"] = status.info.version;
  dict["protocol_version"] = status.info.protocol_version;
  dict["uptime_seconds"] = status.uptime_seconds;
  dict["memory"] = MemoryDict(status.memory);
  nb::list swap;
  for (const client::SwapPathStatus& path : status.swap) swap.append(SwapDict(path));
  dict["swap"] = swap;
  nb::list jobs;
  for (const client::JobStatus& job : status.jobs) jobs.append(JobDict(job));
  dict["jobs"] = jobs;
  dict["io_engine"] = status.io_engine;
  dict["io_engine_reason"] = status.io_engine_reason;
  dict["adam_target"] = status.adam_target;
  dict["workers"] = status.workers;
  dict["socket_path"] = status.socket_path;
  return dict;
}

nb::dict Status(const std::string& socket, double timeout) {
  const std::unique_ptr<AdminClient> admin = Connect(socket, timeout);
  return StatusDict(ValueOrThrow(WithoutGil([&] { return admin->Status(); })));
}

nb::list Trace(const std::string& socket, const std::string& job, double timeout) {
  const std::unique_ptr<AdminClient> admin = Connect(socket, timeout);
  nb::list events;
  for (const client::TraceEvent& event :
       ValueOrThrow(WithoutGil([&] { return admin->Trace(job); }))) {
    nb::dict dict;
    dict["lane"] = event.lane;
    dict["name"] = event.name;
    dict["start_ns"] = event.start_ns;
    dict["end_ns"] = event.end_ns;
    dict["bytes"] = event.bytes;
    events.append(dict);
  }
  return events;
}

void DeleteJob(const std::string& socket, const std::string& job, double timeout) {
  const std::unique_ptr<AdminClient> admin = Connect(socket, timeout);
  Check(WithoutGil([&] { return admin->DeleteJob(job); }));
}

}  // namespace

void BindAdmin(nb::module_& module) {
  module.def("status", &Status, nb::arg("socket") = "", nb::arg("timeout") = 10.0);
  module.def("trace", &Trace, nb::arg("socket"), nb::arg("job"), nb::arg("timeout") = 10.0);
  module.def("delete_job", &DeleteJob, nb::arg("socket"), nb::arg("job"),
             nb::arg("timeout") = 10.0);
}

}  // namespace forebay::python
