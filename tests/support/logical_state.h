// SPDX-License-Identifier: Apache-2.0
// A small model with frozen parameters, trained through real clients at any world size with gradients
// whose sums and means are exact in float32, and everything of it that a client can read, bit by bit.
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

// Four layers, each with a weight, a frozen parameter, a bias and a scalar, then a group that is
// wholly frozen: 140,000 elements in three hyper-parameter groups.
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

// A daemon with swap and room for about half of the job's states in DRAM.
absl::StatusOr<std::unique_ptr<DaemonProcess>> StartWithSwap(const TempDir& dir,
                                                             const LogicalJob& job,
                                                             uint32_t world_size);

struct LogicalTraining {
  uint32_t world_size = 1;
  // Steps [first, end).
  uint64_t first = 1;
  uint64_t end = 1;
  // Whether a parameter has a gradient in a step, and which step's gradient it is; empty: its own.
  std::function<uint64_t(uint32_t param, uint64_t t)> gradient_of = {};  // 0: none
};

// Attaches all ranks, writes the initial parameters where they are not written, trains, detaches.
absl::Status Train(const LogicalJob& job, const LogicalTraining& training);

// By "parameter/weights", "parameter/step", "parameter/STATE": the bits. Frozen parameters have
// weights alone. Read by rank 0.
using LogicalState = std::map<std::string, std::vector<uint32_t>>;
absl::StatusOr<LogicalState> ReadLogicalState(const LogicalJob& job, uint32_t world_size = 1);

// Names of entries that differ, or are in one of them alone.
std::vector<std::string> Differences(const LogicalState& a, const LogicalState& b);

}  // namespace forebay::testing
