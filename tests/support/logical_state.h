// SPDX-License-Identifier: Apache-2.0
// A small model with frozen parameters, trained through real clients at any world size. Sums and means of its gradients are
// exact in float32. Reads everything that a client can read of it, bit by bit.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "protocol/layout.h"
#include "tests/support/daemon_process.h"

namespace forebay::testing {

struct LogicalJob {
  std::string socket;
  std::string job = "job";
  protocol::LayoutSpec layout = {};
};

// Four layers, each with a weight, a frozen parameter, a bias and a scalar, and one group that is entirely frozen: 140,000
// elements in three hyper-parameter groups.
protocol::LayoutSpec MakeMixedLayout(protocol::Optimizer optimizer, protocol::Format format,
                                     protocol::DType dtype);

// Names of all optimizers with formats that compute the same masters in any world.
struct StateKind {
  std::string name;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  protocol::Format format = protocol::Format::kFp32;
  protocol::DType dtype = protocol::DType::kFloat32;
};
void PrintTo(const StateKind& kind, std::ostream* out);
std::vector<StateKind> KindsOfAllOptimizers(const std::vector<StateKind>& formats);

// Starts a daemon with swap and DRAM for about half of the job's states.
absl::StatusOr<std::unique_ptr<DaemonProcess>> StartWithSwap(const TempDir& dir,
                                                             const LogicalJob& job,
                                                             uint32_t world_size);

struct LogicalTraining {
  uint32_t world_size = 1;
  // Steps [first, end).
  uint64_t first = 1;
  uint64_t end = 1;
  // Step whose gradient the parameter gets in step t; 0: no gradient. If empty, step t itself.
  std::function<uint64_t(uint32_t param, uint64_t t)> gradient_of = {};  // 0: none
};

// Attaches all ranks, writes initial parameters that are still unwritten, trains, detaches.
absl::Status Train(const LogicalJob& job, const LogicalTraining& training);

// Bits of a job, read by rank 0. Keys: "parameter/weights", "parameter/step", "parameter/STATE". Frozen parameters have weights
// only.
using LogicalState = std::map<std::string, std::vector<uint32_t>>;
absl::StatusOr<LogicalState> ReadLogicalState(const LogicalJob& job, uint32_t world_size = 1);

// Names of entries that differ, or that only one of the two states has.
std::vector<std::string> Differences(const LogicalState& a, const LogicalState& b);

}  // namespace forebay::testing
