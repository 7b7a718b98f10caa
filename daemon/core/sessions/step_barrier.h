// SPDX-License-Identifier: Apache-2.0
// The barrier of a step: which ranks have called it, and that they agree.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/job_tasks.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// One rank's call, checked by itself.
struct StepCall {
  CommandId command = {};
  protocol::StepAnswer answered_when = protocol::StepAnswer::kPublished;
  protocol::StepRequest request{};
  std::pmr::vector<protocol::HyperParams> hyper_params;  // request.param_groups of them
  std::pmr::vector<uint64_t> presence = {};              // see wire.h
  uint64_t extra_state_offset_bytes = 0;                 // in the session's arena
  bool is_answered = false;                              // with what the node has prepared
};

// How two calls differ in the scalars that an update takes: grad_scale, grad_min, grad_max, and the
// hyper-parameters that the optimizer has, all as the bits they are. "lr of parameter group 0: 0.1 and 0.2", or
// empty.
std::string DifferenceOfScalars(const StepCall& a, const StepCall& b,
                                protocol::Optimizer optimizer);

class StepBarrier {
 public:
  using Calls = std::pmr::map<uint32_t, StepCall>;  // by rank

  // `memory` outlives it.
  explicit StepBarrier(std::pmr::memory_resource* memory) : barrier_(memory) {}

  // Compares `call` with that of the lowest rank that has called, in its scalars and max_grad_norm.
  // extra_state may differ between ranks.
  //
  // Errors  E_STEP  names both ranks and values.
  absl::Status Compare(uint32_t rank, const StepCall& call, const protocol::Layout& layout) const;

  void Add(uint32_t rank, StepCall&& call) { barrier_.emplace(rank, std::move(call)); }
  bool has(uint32_t rank) const { return barrier_.contains(rank); }
  // Every rank has called: the step can begin.
  bool IsComplete(uint32_t world_size) const { return barrier_.size() == world_size; }
  const Calls& by_rank() const { return barrier_; }
  Calls& by_rank() { return barrier_; }

  // Takes all calls out.
  Calls Drain();

 private:
  Calls barrier_;
};

}  // namespace forebay::daemon
