// SPDX-License-Identifier: Apache-2.0
// Updates of blocks before the decision of a step, with the scalars that its ranks have announced.

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/step/step.h"
#include "protocol/error.h"

namespace forebay::daemon {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;

void Step::HandleAnnouncement(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (HasTaken(session, command)) {
    io_.Answer(id, absl::OkStatus());
    return;
  }
  if (command.step != committed_step_ + 1) {
    io_.Answer(id, StepNumberError(command.step));
    return;
  }
  if (HasCalled(session)) {
    io_.Answer(id, MakeError(ErrorId::kStep,
                             absl::StrCat("rank ", spec_.layout->WorldRank(session.rank),
                                          " has called step ", command.step,
                                          " already, and announces its scalars"),
                             "announce them before the last backward pass"));
    return;
  }
  const absl::Status status = attempts_.Check(session.rank, command);
  if (!status.ok() || command.attempt < attempts_.newest()) {
    io_.Answer(id, status);  // discards an announcement of an older attempt
    return;
  }
  FollowAttempt(session, command);
  CopyRequest(session, command);
}

// Handles an announcement: the rank's later deliveries belong to its last pass. If ranks announce different scalars, no block
// is updated early.
void Step::Announce(uint32_t rank, StepCall call) {
  gradients_.BeginLastPass(rank);
  if (!announcement_.Add(std::move(call))) pipeline_.early().Drop(Transition::kAnnouncementsDiffer);
}

void Step::FollowSums() {
  for (const auto& [range, is_last] : gradients_.DrainSumChanges()) {
    pipeline_.early().CountSums(range.partition, range.begin, range.end, is_last);
  }
}

void Step::UpdateEarly() {
  const bool may = phase_ == Phase::kOpen && announcement_.is_trusted() &&
                   gradients_.fault().ok() && !gradients_.needs_float_sums();
  if (!may) return;
  if (!pipeline_.early().is_on())
    pipeline_.early().Begin(OrderOf(announcement_.call(), ScaleOf(announcement_.call())));
  pipeline_.early().Pump();
}

void Step::DropEarlyUpdates() {
  pipeline_.early().Drop(Transition::kStatesWritten);
  announcement_.Reset();
}

}  // namespace forebay::daemon
