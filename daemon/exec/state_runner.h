// SPDX-License-Identifier: Apache-2.0
// Handles events by the state machine, one after the other, and has the resulting actions run.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/node/node_state.h"

namespace forebay::daemon {

// Invariants  1. Events are handled in the order in which they are raised. An event that is raised while an action runs is
//                handled after all actions of the running event.
//             2. All actions of an event run before the next event is handled.
//
// Threads  The loop thread.
// Limits   Allocates no heap memory unless more events or actions wait than ever before. A timer takes heap memory.
class StateRunner {
 public:
  // `run` runs an action, and may call all functions below.
  StateRunner(const NodeState::Options& options, std::function<void(Action&)> run);

  const NodeState& node() const { return node_; }
  uint64_t start_ns() const { return start_ns_; }  // MonotonicNs of the constructor
  uint64_t events_handled() const { return events_handled_; }

  void Raise(Event event);
  // Handles an event within an action that asks for it. The event's actions run after those that wait.
  void Answer(const Event& event) { node_.Handle(event, actions_); }
  // Raises an event, or runs an action, at MonotonicNs `at_ns` or later.
  using Timer = std::variant<Event, Action>;
  void StartTimer(uint64_t at_ns, Timer timer) { timers_.emplace(at_ns, std::move(timer)); }
  // Fires the timers whose time has come. Returns the time of the next one, UINT64_MAX: none.
  uint64_t FireTimers();

 private:
  const uint64_t start_ns_;
  NodeState node_;
  std::function<void(Action&)> run_;
  std::vector<Event> events_;
  std::vector<Action> actions_;
  std::multimap<uint64_t, Timer> timers_;
  bool running_ = false;
  uint64_t events_handled_ = 0;
};

}  // namespace forebay::daemon
