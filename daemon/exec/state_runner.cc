// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/state_runner.h"

#include "daemon/exec/clock.h"

namespace forebay::daemon {

StateRunner::StateRunner(const NodeState::Options& options, std::function<void(Action&)> run)
    : start_ns_(MonotonicNs()), node_(options), run_(std::move(run)) {}

void StateRunner::Raise(Event event) {
  events_.push_back(std::move(event));
  if (running_) return;
  running_ = true;
  for (size_t next = 0; next < events_.size(); ++next) {  // an event may raise further events
    const Event handled = std::move(events_[next]);
    node_.Handle(handled, actions_);
    ++events_handled_;
    for (size_t i = 0; i < actions_.size(); ++i) {  // an action may append further actions
      Action action = std::move(actions_[i]);
      run_(action);
    }
    actions_.clear();
  }
  events_.clear();
  running_ = false;
}

uint64_t StateRunner::FireTimers() {
  while (!timers_.empty() && timers_.begin()->first <= MonotonicNs()) {
    Timer timer = timers_.extract(timers_.begin()).mapped();
    if (auto* const event = std::get_if<Event>(&timer)) {
      Raise(std::move(*event));
    } else {
      run_(std::get<Action>(timer));
    }
  }
  return timers_.empty() ? UINT64_MAX : timers_.begin()->first;
}

}  // namespace forebay::daemon
