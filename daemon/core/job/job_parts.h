// SPDX-License-Identifier: Apache-2.0
// The parts of one training job: its sessions, its step, its accesses of states and its blocks.
#pragma once

#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/sessions/membership.h"
#include "daemon/core/step/fetch_queue.h"
#include "daemon/core/step/initial_parameters.h"
#include "daemon/core/step/step.h"
#include "daemon/core/update/durable_steps.h"
#include "daemon/core/update/residency.h"
#include "daemon/core/update/state_access.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/weights_cache.h"

namespace forebay::daemon {

// Each part may refer to the parts that are declared above it.
struct JobParts {
  // Adopts the leases and the staging slots of a recovered job. `actions`, `pool`, `swap` and `path_table` outlive the parts.
  JobParts(JobSpec job_spec, ActionSink& actions, StagingPool& pool, nvme::SlotMap& swap,
           PathTable& path_table);

  bool failed() const { return step.phase() == Step::Phase::kFailed; }
  // True if the initial parameters and their masters are set: ranks may train, and clients may read states.
  bool is_ready() const { return initial.ready() && step.phase() != Step::Phase::kMasters; }

  JobSpec spec;
  JobTasks io;
  Membership members;
  InitialParameters initial;
  LeaseTable leases;
  StepPipeline pipeline;
  WeightsCache weights;
  StateAccess access;
  Residency residency;
  DurableSteps durable;
  Step step;
  FetchQueue fetches;
};

}  // namespace forebay::daemon
