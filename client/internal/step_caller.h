// SPDX-License-Identifier: Apache-2.0
// A rank's calls of steps, and its part of the decisions of a job over several nodes.
#pragma once

#include "client/internal/gradient_sender.h"
#include "client/internal/node_agreement.h"
#include "client/internal/weights_reader.h"
#include "protocol/step_summary.h"

namespace forebay::client::internal {

// The scalars of a step's request.
protocol::StepRequest ScalarsOf(uint64_t t, double max_grad_norm, const GradientEdit& edit);

// Sends a rank's message to all ranks, and returns the messages of all ranks.
absl::StatusOr<std::vector<std::string>> GatherFrom(const Nodes& nodes, const NodeMessage& own);

// Owns the step in flight and its extra state.
//
// States   none       no step is in flight.
//          sent       the step's command was sent. If the call gives up, the step stays in flight: a call with the same
//                     arguments waits for the same step. Other arguments are refused until the daemon has answered.
//          answered   over several nodes the node has prepared or refused the step. The ranks agree on the outcome.
//          decided    the outcome was sent to the daemon. The daemon's answer to it ends the step.
// Threads  One at a time, under Attachment's mutex.
// Errors   As Attachment::Step and AnnounceStep.
class StepCaller {
 public:
  StepCaller(SessionParts& parts, SessionLink& link, SessionTrace& trace, WeightsReader& weights,
             GradientSender& gradients)
      : parts_(parts), link_(link), trace_(trace), weights_(weights), gradients_(gradients) {}

  absl::Status Announce(const protocol::StepRequest& scalars,
                        std::span<const protocol::HyperParams> hyper_params,
                        const WaitLimits& limits);
  absl::StatusOr<StepResult> Step(const protocol::StepRequest& scalars,
                                  std::span<const protocol::HyperParams> hyper_params,
                                  const ExtraState& extra_state, const WaitLimits& limits);

  // Returns this rank's message after attach.
  NodeMessage MessageOfAttach() const;
  // Does this rank's part of the outcome that all ranks have agreed on after attach.
  absl::Status Follow(const AttachOutcome& outcome);

 private:
  using Answer = SessionLink::Answer;
  struct StepInFlight {
    uint64_t t = 0;
    std::pmr::vector<std::byte> request;  // request of the step without extra_state
    std::pmr::vector<uint64_t> presence;
    std::shared_ptr<Answer> answer;
    // Over several nodes: the nodes' outcome, this rank's command that tells it to the daemon, and whether the gradients that
    // this rank has delivered are dropped.
    std::optional<StepOutcome> outcome = {};
    std::shared_ptr<Answer> decided = {};
    bool drops = false;
  };

  absl::StatusOr<std::pmr::vector<std::byte>> Encode(
      const protocol::StepRequest& scalars, std::span<const protocol::HyperParams> hyper_params,
      uint64_t extra_state_bytes, std::span<const uint64_t> present);
  bool IsInFlight(uint64_t t, std::span<const std::byte> request,
                  const ExtraState& extra_state) const;
  absl::Status Begin(uint64_t t, std::pmr::vector<std::byte> request, const ExtraState& extra_state,
                     const WaitLimits& limits);
  absl::StatusOr<StepResult> End();
  // Agrees with the other nodes on the step, once the daemon has answered this rank's call. The outcome becomes the answer of
  // the step.
  absl::Status DecideOverNodes(const WaitLimits& limits);
  // Tells the other ranks that this rank does not call the step, and why. The other ranks raise `error`.
  absl::Status RefuseOverNodes(uint64_t t, const absl::Status& error, const WaitLimits& limits);
  // Returns this rank's message about the step, after the daemon has answered the step's call. If the daemon refused the call
  // for a reason of this rank, the step is withdrawn on the node.
  absl::StatusOr<NodeMessage> MessageOfStep(const WaitLimits& limits);
  absl::Status Withdraw(uint64_t t, const WaitLimits& limits);
  // Sends the decision on a step to the daemon. `summary` has as many parameters as the layout.
  absl::StatusOr<std::shared_ptr<Answer>> SendDecision(const protocol::StepSummary& summary,
                                                       const WaitLimits& limits);
  // Bytes of the step region where the daemon writes its node's summary, and this rank writes the world's.
  std::span<std::byte> summary_bytes();

  SessionParts& parts_;
  SessionLink& link_;
  SessionTrace& trace_;
  WeightsReader& weights_;
  GradientSender& gradients_;
  std::optional<StepInFlight> step_;
  // Extra state of the step in flight, or of the newest step before it. Most of it is the same in each step.
  std::vector<std::byte> sent_extra_state_;
};

}  // namespace forebay::client::internal
