#include "client/admin.h"

#include <kj/debug.h>

#include <utility>

#include "client/environment.h"
#include "client/internal/control.h"
#include "protocol/descriptor.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {
namespace {

using internal::Deadline;
using internal::Peer;
using internal::WaitLimits;

NodeInfo InfoOf(schema::NodeInfo::Reader from) {
  return {.pid = from.getPid(),
          .version = from.getVersion().cStr(),
          .protocol_version = from.getProtocolVersion()};
}

ArenaStatus ArenaOf(schema::ArenaStatus::Reader from) {
  ArenaStatus arena{.kind = from.getKind().cStr(),
                    .job = from.getJob().cStr(),
                    .rank = from.getRank(),
                    .numa_nodes = {},
                    .size_bytes = from.getSizeBytes(),
                    .allocated_bytes = from.getAllocatedBytes(),
                    .huge_bytes = from.getHugeBytes(),
                    .locked = from.getLocked()};
  for (const uint32_t node : from.getNumaNodes()) arena.numa_nodes.push_back(node);
  return arena;
}

MemoryStatus MemoryOf(schema::MemoryStatus::Reader from) {
  MemoryStatus memory{.limit_bytes = from.getLimitBytes(),
                      .used_bytes = from.getUsedBytes(),
                      .private_bytes = from.getPrivateBytes(),
                      .locked_bytes = from.getLockedBytes(),
                      .huge_bytes = from.getHugeBytes(),
                      .peak_bytes = from.getPeakBytes(),
                      .arenas = {}};
  for (const auto arena : from.getArenas()) memory.arenas.push_back(ArenaOf(arena));
  return memory;
}

SwapPathStatus SwapPathOf(schema::SwapPathStatus::Reader from) {
  return {.path = from.getPath().cStr(),
          .capacity_bytes = from.getCapacityBytes(),
          .used_bytes = from.getUsedBytes(),
          .read_bytes = from.getReadBytes(),
          .written_bytes = from.getWrittenBytes(),
          .read_ops = from.getReadOps(),
          .write_ops = from.getWriteOps(),
          .errors = from.getErrors(),
          .retries = from.getRetries(),
          .direct = from.getDirect(),
          .late = from.getLate(),
          .late_now = from.getLateNow(),
          .late_seconds = from.getLateSeconds()};
}

JobStatus JobOf(schema::JobStatus::Reader from) {
  JobStatus job{.name = from.getName().cStr(),
                .id = from.getId(),
                .uid = from.getUid(),
                .world_size = from.getWorldSize(),
                .sessions = from.getSessions(),
                .committed_step = from.getCommittedStep(),
                .params = from.getParams(),
                .trainable_params = from.getTrainableParams(),
                .dtype = from.getDtype().cStr(),
                .optimizer = from.getOptimizer().cStr(),
                .format = from.getFormat().cStr(),
                .state_bytes = from.getStateBytes(),
                .blocks = from.getBlocks(),
                .resident_blocks = from.getResidentBlocks(),
                .leases = from.getLeases(),
                .update_reads = from.getUpdateReads(),
                .update_reads_prefetched = from.getUpdateReadsPrefetched(),
                .state_read_bytes = from.getStateReadBytes(),
                .state_written_bytes = from.getStateWrittenBytes(),
                .failed = from.getFailed().cStr(),
                .swap_wait = from.getSwapWait().cStr(),
                .groups = {},
                .last_step_reads = from.getLastStepReads(),
                .last_step_reads_prefetched = from.getLastStepReadsPrefetched(),
                .last_step_seconds = from.getLastStepSeconds(),
                .rpc_calls = from.getRpcCalls(),
                .made_bytes = from.getMadeBytes(),
                .making_bytes = from.getMakingBytes()};
  for (const auto group : from.getGroups()) job.groups.emplace_back(group.cStr());
  return job;
}

NodeStatus StatusFrom(schema::NodeStatus::Reader from) {
  NodeStatus status{.info = InfoOf(from.getInfo()),
                    .uptime_seconds = from.getUptimeSeconds(),
                    .memory = MemoryOf(from.getMemory()),
                    .swap = {},
                    .jobs = {},
                    .io_engine = from.getIoEngine().cStr(),
                    .io_engine_reason = from.getIoEngineReason().cStr(),
                    .adam_target = from.getAdamTarget().cStr(),
                    .workers = from.getWorkers(),
                    .socket_path = from.getSocketPath().cStr()};
  for (const auto path : from.getSwap()) status.swap.push_back(SwapPathOf(path));
  for (const auto job : from.getJobs()) status.jobs.push_back(JobOf(job));
  return status;
}

schema::Admin::Client& AdminOf(Peer& peer) { return KJ_ASSERT_NONNULL(peer.admin); }

}  // namespace

class AdminClient::Impl {
 public:
  Impl(std::unique_ptr<internal::Control> control, std::chrono::milliseconds timeout)
      : control_(std::move(control)), timeout_(timeout) {}

  WaitLimits Limits() const { return {.deadline = Deadline::After(timeout_)}; }
  internal::Control& control() { return *control_; }

 private:
  std::unique_ptr<internal::Control> control_;
  std::chrono::milliseconds timeout_;
};

AdminClient::AdminClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AdminClient::~AdminClient() = default;

const NodeInfo& AdminClient::info() const { return impl_->control().info(); }

absl::StatusOr<std::unique_ptr<AdminClient>> AdminClient::Connect(const AdminOptions& options) {
  const WaitLimits limits{.deadline = Deadline::After(options.timeout)};
  ASSIGN_OR_RETURN(auto control,
                   internal::Control::Connect({.socket = SocketPath(options.socket)}, limits));
  const auto ask_admin = [](Peer& peer) -> kj::Promise<absl::StatusOr<bool>> {
    return peer.node.adminRequest().send().then([&peer](auto&& response) -> absl::StatusOr<bool> {
      RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
      peer.admin = response.getAdmin();
      return true;
    });
  };
  RETURN_IF_ERROR(control->thread().Call<bool>("admin", limits, ask_admin).status());
  return std::unique_ptr<AdminClient>(
      new AdminClient(std::make_unique<Impl>(std::move(control), options.timeout)));
}

absl::StatusOr<NodeStatus> AdminClient::Status() {
  return impl_->control().thread().Call<NodeStatus>(
      "status", impl_->Limits(), [](Peer& peer) -> kj::Promise<absl::StatusOr<NodeStatus>> {
        return AdminOf(peer).statusRequest().send().then(
            [](auto&& response) -> absl::StatusOr<NodeStatus> {
              return StatusFrom(response.getStatus());
            });
      });
}

absl::StatusOr<std::vector<TraceEvent>> AdminClient::Trace(const std::string& job) {
  using Events = std::vector<TraceEvent>;
  return impl_->control().thread().Call<Events>(
      "trace", impl_->Limits(), [job](Peer& peer) -> kj::Promise<absl::StatusOr<Events>> {
        auto request = AdminOf(peer).traceRequest();
        request.setJob(kj::StringPtr(job.c_str(), job.size()));
        return request.send().then([](auto&& response) -> absl::StatusOr<Events> {
          RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
          Events events;
          for (const auto event : response.getEvents()) {
            events.push_back({.lane = event.getLane().cStr(),
                              .name = event.getName().cStr(),
                              .start_ns = event.getStartNs(),
                              .end_ns = event.getEndNs(),
                              .bytes = event.getBytes()});
          }
          return events;
        });
      });
}

absl::Status AdminClient::DeleteJob(const std::string& job) {
  return impl_->control()
      .thread()
      .Call<bool>("deleteJob", impl_->Limits(),
                  [job](Peer& peer) -> kj::Promise<absl::StatusOr<bool>> {
                    auto request = AdminOf(peer).deleteJobRequest();
                    request.setJob(kj::StringPtr(job.c_str(), job.size()));
                    return request.send().then([](auto&& response) -> absl::StatusOr<bool> {
                      RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
                      return true;
                    });
                  })
      .status();
}

}  // namespace forebay::client
