// SPDX-License-Identifier: Apache-2.0
// AdminClient: reads a node's status and traces, deletes jobs, scrubs swap and plans jobs.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "protocol/forebay.capnp.h"

namespace forebay::client {

// Messages of the schema, which explains their fields; protocol/json.h writes them as JSON. What is
// read from one lives as long as it.
using NodeStatus = std::shared_ptr<const schema::NodeStatus::Reader>;
using Trace = std::shared_ptr<const schema::Admin::TraceResults::Reader>;
using ScrubReport = std::shared_ptr<const schema::ScrubReport::Reader>;
using JobPlan = std::shared_ptr<const schema::JobPlan::Reader>;

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

  absl::StatusOr<NodeStatus> Status();
  absl::StatusOr<client::Trace> Trace(const std::string& job);  // E_JOB_NAME: no such job
  absl::Status DeleteJob(const std::string& job);
  // Reads and verifies what durable jobs have on swap, of all jobs that the caller may see; waits as long as it
  // takes. `bytes_per_s`: at most; 0: the daemon's choice. E_BUSY: a scrub runs.
  absl::StatusOr<ScrubReport> Scrub(uint64_t bytes_per_s);
  struct NodeSize {
    uint64_t dram_bytes = 0;
    uint64_t swap_bytes = 0;
  };
  // What an attach with these options would make, on the node as it is, or on an empty one with so much DRAM
  // and swap; nothing is made. Connection and job of the options are ignored.
  //
  // Errors  those of Attachment::Attach: E_DRAM_LIMIT and E_SWAP_NOSPC with the sum, E_LAYOUT, E_OPTION.
  absl::StatusOr<JobPlan> Plan(const AttachOptions& options, const std::optional<NodeSize>& node);
  // What a job that was attached to takes now; with `node`, what it would on such an empty one. E_JOB_NAME: no such
  // job. E_NOT_READY: nobody has attached to it since the daemon was started.
  absl::StatusOr<JobPlan> PlanJob(const std::string& job, const std::optional<NodeSize>& node);

 private:
  class Impl;
  explicit AdminClient(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay::client
