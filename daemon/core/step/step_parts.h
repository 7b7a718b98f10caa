// SPDX-License-Identifier: Apache-2.0
// The phase, the numbers and the parts of a job's step, which the classes of the step share.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/trace.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/membership.h"
#include "daemon/core/sessions/session.h"
#include "daemon/core/sessions/step_barrier.h"
#include "daemon/core/step/announcement.h"
#include "daemon/core/step/gradient_accumulator.h"
#include "daemon/core/step/step_answers.h"
#include "daemon/core/step/step_extra_states.h"
#include "daemon/core/update/durable_steps.h"
#include "daemon/core/update/replica_digests.h"
#include "daemon/core/update/step_pipeline.h"

namespace forebay::daemon {

enum class StepPhase : uint8_t {
  kOpen,      // gathers gradients (or initial parameters) of the next step
  kMasters,   // sets masters from the initial parameters
  kReducing,  // all ranks have called step; adds the last gradients
  kPrepared,  // gradients are added; waits for the decision of the nodes
  kFailed,    // the job has failed, and every call gets the first error
};

struct StepParts {
  // Sets the values of the recovered job, if `job_spec` has one. The arguments outlive the parts.
  StepParts(const JobSpec& job_spec, JobTasks& job_io, Membership& job_members,
            StepPipeline& job_pipeline, DurableSteps& job_durable);

  uint64_t next_step() const { return committed_step + 1; }
  bool is_published() const { return published_step == committed_step; }
  // Returns the step that is prepared and not decided, or 0 if no step is prepared.
  uint64_t prepared_step() const { return phase == StepPhase::kPrepared ? next_step() : 0; }
  // True if gradients of the next step have been delivered, or the step is announced.
  bool is_gathering() const {
    return !gradients.empty() || announcement.state() != Announcement::State::kNone;
  }
  // True if a published step is being made durable, and the calls of that step wait until it is durable.
  bool is_awaiting_durable() const { return answers.is_durable_first() && durable.in_progress(); }
  // True if the rank of the session has called the next step.
  bool HasCalled(const Session& session) const {
    return barrier.has(session.rank) || session.step_being_copied || phase != StepPhase::kOpen;
  }
  // True if the rank of the session has delivered gradients of the next step, or has called it.
  bool HasContributed(const Session& session) const {
    return gradients.turns().has_delivered(session.rank) || barrier.has(session.rank) ||
           session.step_being_copied;
  }

  // Returns the parameters for which a rank that has called step reports a gradient, in the form of StepCall::presence.
  std::pmr::vector<uint64_t> Presence() const;
  // Number of ranks whose gradients are summed. 1 for reduced gradients, which are the mean already.
  uint32_t addends() const { return spec.layout->is_shared() ? members.world_size() : 1; }
  double ScaleOf(const StepCall& call) const { return call.request.grad_scale / addends(); }
  // Returns the order of the next step, without the parameters that have a gradient.
  StepOrder OrderOf(const StepCall& call, double scale) const;
  absl::Status DetachedError(uint32_t rank) const;

  const JobSpec& spec;
  JobTasks& io;
  Membership& members;
  StepPipeline& pipeline;
  DurableSteps& durable;
  StepPhase phase = StepPhase::kOpen;
  uint64_t committed_step = 0;
  uint64_t published_step = 0;  // committed_step, or the step before it
  GradientAccumulator gradients;
  Announcement announcement;
  ReplicaDigests digests;
  StepBarrier barrier;
  Trace trace;
  StepExtraStates extra;
  StepAnswers answers;
};

}  // namespace forebay::daemon
