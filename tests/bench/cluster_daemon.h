// SPDX-License-Identifier: Apache-2.0
// Runs the daemon's state machine in virtual time, with a modeled disk and workers whose durations follow from their rates.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/node/node_state.h"
#include "protocol/wire.h"
#include "tests/bench/cluster_node.h"

namespace forebay::tools {

// Virtual time in seconds, with a queue of callbacks. Callbacks run in the order of their times. Callbacks of the same time run
// in the order in which they were added.
class VirtualClock {
 public:
  double now() const { return now_; }
  void At(double time, std::function<void()> what) {
    due_.emplace(std::pair(std::max(time, now_), ++last_), std::move(what));
  }
  bool RunOne() {
    if (due_.empty()) return false;
    auto first = due_.extract(due_.begin());
    now_ = first.key().first;
    first.mapped()();
    return true;
  }

 private:
  double now_ = 0;
  uint64_t last_ = 0;
  std::map<std::pair<double, uint64_t>, std::function<void()>> due_;
};

// A resource that serves one request after the other. Times are virtual seconds.
struct Server {
  double free_at = 0;
  double worked_s = 0;

  // Returns the time at which the request ends.
  double Serve(double now, double seconds) {
    free_at = std::max(free_at, now) + seconds;
    worked_s += seconds;
    return free_at;
  }
};

// Bytes that were transferred in each direction.
struct Transfer {
  uint64_t read = 0;
  uint64_t written = 0;
};

// Carries out the actions of the state machine. Events that follow from one another are handled before time advances.
class VirtualDaemon {
 public:
  using OnAnswer = std::function<void(const protocol::Completion&)>;

  // `options` and `clock` outlive the daemon. Tasks take no time before StartTime().
  VirtualDaemon(const VirtualNodeOptions& options, VirtualClock& clock);

  void Send(daemon::Event event);
  void Call(uint64_t session, protocol::Command command, OnAnswer on_answer);
  // Sends a call of step. `copied` has the contents of the step region.
  void CallStep(uint64_t session, protocol::Command command, daemon::StepRequestCopied copied,
                OnAnswer on_answer);
  void StartTime() { takes_time_ = true; }

  // Returns the answer to a session's attach, or null if it is not answered yet.
  const daemon::AnswerAttach* attached(uint64_t session) const;
  // Returns the first error among all answers.
  const absl::Status& status() const { return status_; }
  daemon::JobView View() const { return state_.Jobs().at(0); }
  uint64_t handled() const { return handled_; }
  const Transfer& moved() const { return moved_; }
  double disk_s() const { return disk_.worked_s; }

 private:
  void Execute(const daemon::Action& action);
  void Begin(const daemon::Action& action, daemon::TaskId task);
  double WorkSeconds(const daemon::Action& action) const;

  const VirtualNodeOptions& options_;
  VirtualClock& clock_;
  daemon::NodeState state_;
  std::vector<Server> workers_;
  Server disk_;
  Transfer moved_;
  bool takes_time_ = false;
  bool is_handling_ = false;
  uint64_t handled_ = 0;
  uint64_t last_tag_ = 0;
  std::deque<daemon::Event> events_;
  std::unordered_map<uint64_t, OnAnswer> answers_;                         // by tag
  std::unordered_map<uint64_t, daemon::StepRequestCopied> step_requests_;  // by tag
  std::map<uint64_t, daemon::AnswerAttach> attached_;                      // by session
  // The simulation does not verify weights. The state machine requires digests for each page of weights.
  const daemon::WeightsDigests digests_ = std::make_shared<const std::vector<uint64_t>>();
  absl::Status status_;
};

}  // namespace forebay::tools
