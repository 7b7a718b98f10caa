// SPDX-License-Identifier: Apache-2.0
// Calls of a well-behaved rank, with the values of training.h.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "tests/support/training.h"

namespace forebay::testing {

// Writes MakeValues(group, seed) to every group, then calls InitialDone.
absl::Status WriteInitial(client::Attachment& session, uint64_t seed);

absl::Status DeliverGradient(client::Attachment& session, uint32_t group, uint32_t rank,
                             uint64_t t);

// Gradient of a float32 job: all zeros, but for one `value`.
absl::Status DeliverValue(client::Attachment& session, uint32_t group, float value);

struct TrainStepOptions {
  uint32_t rank = 0;
  uint64_t t = 1;
  double max_grad_norm = 0;
};

// Calls step only, with MakeHyperParams() and extra_state "rank R step T".
absl::StatusOr<client::StepResult> CallStep(client::Attachment& session,
                                            const TrainStepOptions& options);

// Fetches all groups in order, delivers all gradients in reverse order, then calls CallStep().
absl::StatusOr<client::StepResult> TrainStep(client::Attachment& session,
                                             const TrainStepOptions& options);

// Returns an error unless every state and every count of updates of every parameter equals the reference bit by bit.
absl::Status CheckStates(client::Attachment& session, const ReferenceTrainer& reference);

}  // namespace forebay::testing
