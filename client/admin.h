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

// Messages of the schema, which explains their fields. protocol/json.h writes the messages as JSON. Fields read from a
// message are valid as long as the message.
using NodeStatus = std::shared_ptr<const schema::NodeStatus::Reader>;
using Trace = std::shared_ptr<const schema::Admin::TraceResults::Reader>;
using ScrubReport = std::shared_ptr<const schema::ScrubReport::Reader>;
using JobPlan = std::shared_ptr<const schema::JobPlan::Reader>;

struct AdminOptions {
  std::string socket;  // empty: FOREBAY_SOCKET, else /run/forebay/forebay.sock
  std::chrono::milliseconds timeout = std::chrono::seconds(10);  // of Connect and of each call
};

// A connection to the daemon without a session.
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
  // Reads and verifies the data on swap of all durable jobs that the caller may see. Waits without a time limit. `bytes_per_s`
  // limits the rate; 0: the daemon chooses. E_BUSY: another scrub runs.
  absl::StatusOr<ScrubReport> Scrub(uint64_t bytes_per_s);
  struct NodeSize {
    uint64_t dram_bytes = 0;
    uint64_t swap_bytes = 0;
  };
  // Plans an attach with these options and creates nothing. The plan is for the node as it is, or for an empty node with the
  // DRAM and swap of `node`. The socket and the job of the options are ignored.
  //
  // Errors  those of Attachment::Attach: E_DRAM_LIMIT and E_SWAP_NOSPC with the sum, E_LAYOUT, E_OPTION.
  absl::StatusOr<JobPlan> Plan(const AttachOptions& options, const std::optional<NodeSize>& node);
  // Returns the resources that a job takes now, or that it would take on an empty node with the DRAM and swap of `node`.
  // E_JOB_NAME: no such job. E_NOT_READY: no session has attached to the job since the daemon was started.
  absl::StatusOr<JobPlan> PlanJob(const std::string& job, const std::optional<NodeSize>& node);

 private:
  class Impl;
  explicit AdminClient(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay::client
