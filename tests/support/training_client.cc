// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training_client.h"

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "protocol/layout.h"
#include "protocol/os/status_macros.h"
#include "tests/support/training.h"

namespace forebay::testing {
namespace {

constexpr auto kTimeout = std::chrono::seconds(60);

}  // namespace

absl::Status WriteInitial(client::Attachment& session, uint64_t seed) {
  for (uint32_t g = 0; g < session.layout().groups().size(); ++g) {
    RETURN_IF_ERROR(session.WriteInitial(g, MakeValues(session.layout(), g, seed), kTimeout));
  }
  return session.InitialDone(kTimeout);
}

absl::Status DeliverGradient(client::Attachment& session, uint32_t group, uint32_t rank,
                             uint64_t t) {
  ASSIGN_OR_RETURN(const std::span<std::byte> slot,
                   session.GradSlot(group, client::GradFill::kZero, kTimeout));
  const std::vector<std::byte> gradient = MakeGradient(session.layout(), group, rank, t);
  std::memcpy(slot.data(), gradient.data(), gradient.size());
  return session.GradReady(group);
}

absl::Status DeliverValue(client::Attachment& session, uint32_t group, float value) {
  ASSIGN_OR_RETURN(const std::span<std::byte> slot,
                   session.GradSlot(group, client::GradFill::kZero, kTimeout));
  std::memcpy(slot.data() + 7 * sizeof(value), &value, sizeof(value));
  return session.GradReady(group);
}

absl::StatusOr<client::StepResult> CallStep(client::Attachment& session,
                                            const TrainStepOptions& options) {
  const std::string extra =
      "rank " + std::to_string(options.rank) + " step " + std::to_string(options.t);
  return session.Step(options.t, MakeHyperParams(), options.max_grad_norm,
                      std::as_bytes(std::span(extra)), kTimeout);
}

absl::StatusOr<client::StepResult> TrainStep(client::Attachment& session,
                                             const TrainStepOptions& options) {
  const auto groups = static_cast<uint32_t>(session.layout().groups().size());
  for (uint32_t g = 0; g < groups; ++g) {
    ASSIGN_OR_RETURN(const client::Lease lease, session.Fetch(g, kTimeout));
    RETURN_IF_ERROR(session.Release(lease));
  }
  for (uint32_t g = groups; g-- > 0;) {
    RETURN_IF_ERROR(DeliverGradient(session, g, options.rank, options.t));
  }
  return CallStep(session, options);
}

absl::Status CheckStates(client::Attachment& session, const ReferenceTrainer& reference) {
  const protocol::LayoutSpec& spec = session.layout().spec();
  const std::vector<std::string> states = protocol::StateNames(spec.optimizer);
  for (uint32_t param = 0; param < spec.params.size(); ++param) {
    for (size_t state = 0; state < states.size(); ++state) {
      const std::string& name = spec.params[param].name;
      const std::vector<float> expected = reference.State(param, state);
      std::vector<float> read(expected.size());
      ASSIGN_OR_RETURN(const uint64_t updates,
                       session.ReadState({.param = name, .state = states[state]}, read, kTimeout));
      if (std::memcmp(read.data(), expected.data(), read.size() * sizeof(float)) != 0 ||
          updates != reference.updates(param)) {
        return absl::DataLossError(
            absl::StrCat(states[state], " of ", name, " differs, or its ", updates, " updates"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace forebay::testing
