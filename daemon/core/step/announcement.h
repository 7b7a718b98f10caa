// SPDX-License-Identifier: Apache-2.0
// The scalars of a step that its ranks announce before their last backward pass, so that blocks can be updated early.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "daemon/core/sessions/step_barrier.h"
#include "protocol/optimizer.h"

namespace forebay::daemon {

class Announcement {
 public:
  enum class State : uint8_t {
    kNone,     // no rank has announced scalars in this attempt
    kTrusted,  // blocks may be updated early with the scalars
    // Blocks are not updated early. Ranks have announced different scalars, or the last announced step was clipped or decided
    // with other scalars. Then this step may differ from its announcement too.
    kUntrusted,
  };

  explicit Announcement(protocol::Optimizer optimizer) : optimizer_(optimizer) {}

  State state() const { return state_; }
  bool is_trusted() const { return state_ == State::kTrusted; }
  // The call that announced the scalars first. Not in state kNone.
  const StepCall& call() const { return *call_; }

  // Adds a rank's announcement. Returns false if its scalars differ from those of the first announcement: early updates are then
  // dropped.
  bool Add(StepCall call) {
    if (state_ == State::kNone) {
      state_ = previous_was_right_ ? State::kTrusted : State::kUntrusted;
      call_ = std::move(call);
      return true;
    }
    if (DifferenceOfScalars(*call_, call, optimizer_).empty()) return true;
    state_ = State::kUntrusted;
    return false;
  }
  // Compares the announcement with the decided call. Returns true if the step is decided with the announced scalars and is not
  // clipped.
  enum class Clipped : uint8_t { kNo, kYes };
  bool OnDecided(const StepCall& decided, Clipped clipped) {
    if (state_ == State::kNone) return false;
    previous_was_right_ =
        clipped == Clipped::kNo && DifferenceOfScalars(*call_, decided, optimizer_).empty();
    return previous_was_right_;
  }
  void Reset() {
    state_ = State::kNone;
    call_.reset();
  }

 private:
  protocol::Optimizer optimizer_;
  State state_ = State::kNone;
  std::optional<StepCall> call_;
  bool previous_was_right_ = true;  // the last announced step was decided as announced
};

}  // namespace forebay::daemon
