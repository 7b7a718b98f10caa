// SPDX-License-Identifier: Apache-2.0
// A synthetic job on a private daemon: AdamW, groups of equal size, all ranks in this process.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/admin.h"
#include "client/client.h"
#include "protocol/durability.h"
#include "protocol/layout.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/private_daemon.h"

namespace forebay::tools {

struct BenchJobOptions {
  PrivateDaemonOptions daemon = {};
  protocol::Format format = protocol::Format::kFp32;  // kExact: bfloat16 parameters and gradients
  uint64_t params = 0;                                // > 0
  uint64_t group_elems = 0;                           // > 0; the last group may be smaller
  bool is_sharded = false;
  uint32_t ranks = 1;  // more than one: sharded
  bool drain = false;  // Step returns at its decision
  bool early_updates = false;
  std::optional<protocol::Durability> durability = {};
};

// Ownership  The destructor detaches and stops the daemon.
// Threads    The main thread of the process, which the daemon does not outlive.
class BenchJob {
 public:
  static absl::StatusOr<std::unique_ptr<BenchJob>> Create(const BenchJobOptions& options);

  BenchJob(const BenchJob&) = delete;
  BenchJob& operator=(const BenchJob&) = delete;

  client::Attachment& attachment() { return *attachments_.front(); }  // the attachment of rank 0
  uint32_t groups() const;

  // Runs work(attachment, the rank's partitions in the order of the groups) for all ranks at once; rank 0 runs on this thread.
  // Returns the error of the lowest rank that failed.
  using RankWork = std::function<absl::Status(client::Attachment&, std::span<const uint32_t>)>;
  absl::Status OnEachRank(const RankWork& work);

  absl::Status DeliverGradient(uint32_t group);  // needs a job of one rank
  // Delivers the gradients of all groups on all ranks. The benches do not time this.
  absl::Status DeliverGradients();

  // Announces the scalars of the next step. Gradients delivered after this call belong to the step's last backward pass.
  absl::Status AnnounceStep();
  // Runs the next step on all ranks. Returns the seconds from the call to the answer.
  absl::StatusOr<double> TimedStep();

  absl::StatusOr<client::NodeStatus> Status();  // lists exactly one job
  // Bytes that dram.limit counts besides the staging buffer and the job's states. A dram.limit of these bytes plus the staging
  // buffer puts all states on swap.
  absl::StatusOr<uint64_t> BytesBesideStates();
  // Returns the plan of this job on an empty node that has `dram_bytes` of DRAM and no swap.
  absl::StatusOr<client::JobPlan> Plan(uint64_t dram_bytes);

 private:
  protocol::HyperParams HyperParams() const;

  explicit BenchJob(std::unique_ptr<PrivateDaemon> daemon);

  std::unique_ptr<PrivateDaemon> daemon_;
  std::unique_ptr<client::AdminClient> admin_;
  std::vector<std::unique_ptr<client::Attachment>> attachments_;  // by rank
  std::vector<std::vector<uint32_t>> partitions_;                 // by rank
  std::jthread keeper_;  // reads the messages of a daemon that can restart
};

// Gives the daemon one swap path in the bench's folder for each limit rate of the options, or one path without a limit.
void UseSwap(const BenchOptions& options, PrivateDaemonOptions& daemon);
// Sum of options.limit_rates, in bytes a second.
double TotalRate(const BenchOptions& options);

}  // namespace forebay::tools
