// Reading a node's state and deleting jobs: what tools show.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::client {

// Field for field the structs of protocol/forebay.capnp, where each is explained.

struct NodeInfo {
  uint32_t pid = 0;
  std::string version;
  uint32_t protocol_version = 0;
};

struct ArenaStatus {
  std::string kind;
  std::string job;
  int32_t rank = -1;
  std::vector<uint32_t> numa_nodes;
  uint64_t size_bytes = 0;
  uint64_t allocated_bytes = 0;
  uint64_t huge_bytes = 0;
  bool locked = false;
};

struct MemoryStatus {
  uint64_t limit_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t private_bytes = 0;
  uint64_t locked_bytes = 0;
  uint64_t huge_bytes = 0;
  uint64_t peak_bytes = 0;
  std::vector<ArenaStatus> arenas;
};

struct SwapPathStatus {
  std::string path;
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t read_ops = 0;
  uint64_t write_ops = 0;
  uint64_t errors = 0;
  uint64_t retries = 0;
  bool direct = false;
  uint64_t late = 0;
  uint32_t late_now = 0;
  double late_seconds = 0;
};

struct JobStatus {
  std::string name;
  uint64_t id = 0;
  uint32_t uid = 0;
  uint32_t world_size = 0;
  uint32_t sessions = 0;
  uint64_t committed_step = 0;
  uint64_t params = 0;
  uint64_t trainable_params = 0;
  std::string dtype;
  std::string optimizer;
  std::string format;
  uint64_t state_bytes = 0;
  uint32_t blocks = 0;
  uint32_t resident_blocks = 0;
  uint32_t leases = 0;
  uint64_t update_reads = 0;
  uint64_t update_reads_prefetched = 0;
  uint64_t state_read_bytes = 0;
  uint64_t state_written_bytes = 0;
  std::string failed;
  std::string swap_wait;
  std::vector<std::string> groups;
  uint64_t last_step_reads = 0;
  uint64_t last_step_reads_prefetched = 0;
  double last_step_seconds = 0;
  uint64_t rpc_calls = 0;
  uint64_t made_bytes = 0;
  uint64_t making_bytes = 0;
};

struct NodeStatus {
  NodeInfo info;
  double uptime_seconds = 0;
  MemoryStatus memory;
  std::vector<SwapPathStatus> swap;
  std::vector<JobStatus> jobs;
  std::string io_engine;
  std::string io_engine_reason;
  std::string adam_target;
  uint32_t workers = 0;
  std::string socket_path;
};

struct TraceEvent {
  std::string lane;
  std::string name;
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint64_t bytes = 0;
};

struct AdminOptions {
  std::string socket;  // empty: FOREBAY_SOCKET, else /run/forebay/forebay.sock
  std::chrono::milliseconds timeout = std::chrono::seconds(10);  // of Connect and of each call
};

// One connection without a session.
//
// Threads  Any, one call at a time.
// Errors   E_NO_DAEMON, E_PROTOCOL, E_PERMISSION, E_DAEMON_GONE, E_TIMEOUT from each call.
class AdminClient {
 public:
  static absl::StatusOr<std::unique_ptr<AdminClient>> Connect(const AdminOptions& options);

  AdminClient(const AdminClient&) = delete;
  AdminClient& operator=(const AdminClient&) = delete;
  ~AdminClient();

  const NodeInfo& info() const;  // of the handshake
  absl::StatusOr<NodeStatus> Status();
  absl::StatusOr<std::vector<TraceEvent>> Trace(const std::string& job);  // E_JOB_NAME: no such job
  absl::Status DeleteJob(const std::string& job);

 private:
  class Impl;
  explicit AdminClient(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay::client
