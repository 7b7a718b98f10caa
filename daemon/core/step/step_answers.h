// SPDX-License-Identifier: Apache-2.0
// The answers to calls of a committed step.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/session.h"
#include "protocol/step_summary.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// A call is answered at the commit, at the publication or, at level step, when the step is durable. All answers of one step
// carry the norm, whether the gradients were clipped, and an error if masters overflowed.
//
// An overflow is known at the publication. If calls were answered before, the next step's answers report it. In a job over
// several nodes the overflow is always reported with the next step, so that all nodes report it together.
//
// Ownership  The arguments of the constructor outlive this object.
class StepAnswers {
 public:
  // A call of step that waits for an answer.
  struct Call {
    CommandId command;
    bool repeated = false;  // the client has sent the call again
  };

  // Sets the values of the recovered job's step.
  StepAnswers(const JobSpec& spec, JobTasks& io);

  // Values in the answers to calls of the decided step. `overflowed`: number of masters that overflowed in the step before, on
  // all nodes.
  struct Decided {
    double norm = 0;
    bool clipped = false;
    uint64_t overflowed = 0;
  };
  void OnDecided(const Decided& decided, uint64_t published_step);
  // Sets the number of masters that overflowed in the published step.
  void OnPublished(uint64_t overflowed, uint64_t step);
  // Records that the previous daemon has answered the calls of the resumed step.
  void OnResumed() { has_answered_early_ = true; }

  // Adds a kDecide call, which has brought the decision of the nodes.
  void AddDeciding(const CommandId& command, protocol::StepAnswer when) {
    deciding_.push_back({.command = command, .when = when});
  }
  // Answers the kDecide calls of the step that is committed now, or lets them wait.
  void AnswerDeciding();
  // Answers a call of the committed step, or lets it wait.
  void AnswerCommitted(const CommandId& command, protocol::StepAnswer when);
  void Answer(const Call& call) const;
  void Wait(const Call& call) { waiting_.push_back(call); }
  void AnswerWaiting();
  void Fail(const absl::Status& status);

  // True if calls are answered only when their step is durable.
  bool is_durable_first() const {
    return spec_.plan.session.durability.level == protocol::DurabilityLevel::kStep;
  }
  bool has_waiting() const { return !waiting_.empty(); }
  // OK, or an overflow that no answer has reported.
  const absl::Status& unreported() const { return unreported_; }
  // Returns the number of masters that overflowed in the published step. 0 if no master has, or if an answer has reported them.
  uint64_t unreported_overflow() const { return unreported_.ok() ? 0 : overflowed_; }
  // Returns the number of masters that overflowed in the step before. 0 if answers to calls of the decided step report no overflow.
  uint64_t overflow_to_report() const { return status_.ok() ? 0 : overflowed_; }
  double norm() const { return norm_; }
  bool clipped() const { return clipped_; }
  uint64_t overflowed() const { return overflowed_; }
  uint64_t unanswered(SessionId session) const;

 private:
  struct Deciding {
    CommandId command;
    protocol::StepAnswer when = protocol::StepAnswer::kPublished;
  };

  absl::Status OverflowError(uint64_t overflowed, uint64_t step) const;

  const JobSpec& spec_;
  JobTasks& io_;
  double norm_ = 0;
  bool clipped_ = false;
  absl::Status status_;
  uint64_t overflowed_ = 0;
  // Calls that wait for the publication or, at level step, for the durable step.
  std::pmr::vector<Call> waiting_;
  std::pmr::vector<Deciding> deciding_;  // for the commit
  bool has_answered_early_ = false;      // calls of the step were answered before its publication
  absl::Status unreported_;
};

}  // namespace forebay::daemon
