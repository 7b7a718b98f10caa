// SPDX-License-Identifier: Apache-2.0
// The barrier of a step: the ranks that have called it, and a check that their calls agree.
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

// The step call of one rank. The fields have been checked.
struct StepCall {
  CommandId command = {};
  protocol::StepAnswer answered_when = protocol::StepAnswer::kPublished;
  protocol::StepRequest request{};
  std::pmr::vector<protocol::HyperParams> hyper_params;  // request.param_groups entries
  std::pmr::vector<uint64_t> presence = {};              // see wire.h
  uint64_t extra_state_offset_bytes = 0;                 // offset in the session's arena
  bool is_answered = false;  // the rank has the answer that the step is prepared
};

// Describes how two calls differ in the scalars of an update: grad_scale, grad_min, grad_max, and the hyper-parameters of the
// optimizer, all compared bit by bit. Returns a text such as "lr of parameter group 0: 0.1 and 0.2", or "" if the scalars are
// equal.
std::string DifferenceOfScalars(const StepCall& a, const StepCall& b,
                                protocol::Optimizer optimizer);

class StepBarrier {
 public:
  using Calls = std::pmr::map<uint32_t, StepCall>;  // by rank

  // `memory` outlives the barrier.
  explicit StepBarrier(std::pmr::memory_resource* memory) : barrier_(memory) {}

  // Compares `call` with the call of the lowest rank that has called: the scalars and max_grad_norm. extra_state may differ
  // between ranks.
  //
  // Errors  E_STEP  the calls differ. Names both ranks and values.
  absl::Status Compare(uint32_t rank, const StepCall& call, const protocol::Layout& layout) const;

  void Add(uint32_t rank, StepCall&& call) { barrier_.emplace(rank, std::move(call)); }
  bool has(uint32_t rank) const { return barrier_.contains(rank); }
  // True if every rank has called: the step can begin.
  bool IsComplete(uint32_t world_size) const { return barrier_.size() == world_size; }
  const Calls& by_rank() const { return barrier_; }
  Calls& by_rank() { return barrier_; }

  // Removes and returns all calls.
  Calls Drain();

 private:
  Calls barrier_;
};

}  // namespace forebay::daemon
