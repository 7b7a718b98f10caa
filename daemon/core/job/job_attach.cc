// SPDX-License-Identifier: Apache-2.0
// The part of a job that answers attaches.

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/job/job.h"
#include "protocol/error.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

bool Job::MayAnswerAttach(const Session& session) const {
  if (session.reader) return is_ready();
  const bool is_between_steps = step_.phase() == Step::Phase::kOpen || step_.prepared_step() > 0;
  if (!is_between_steps || pipeline_.running()) return false;
  if (io_.stale_tasks() > 0 || durable_.in_progress()) return false;
  return initial_.ready() || initial_.WaitsForWriter(session.rank);
}

void Job::AnswerAttaches() {
  if (making_tasks_ > 0 || is_restoring_ || ((!has_begun_ || next_plan_) && !failed())) return;
  for (const SessionId id : members_.attaching()) {
    Session& session = *members_.Find(id);
    if (failed()) {
      Evict(session, deleting_ ? failed_ : FailedStatus());
    } else if (members_.HasMemory(session) && MayAnswerAttach(session)) {
      AnswerAttachOk(session);
    }
  }
}

// True if a session whose client is disconnected may continue, with this daemon or the next one.
bool Job::MayComeBack(const Session& session) const {
  return !session.reader && session.is_current() && is_ready() && !failed() && !deleting_;
}

void Job::OnReconnected(const SessionReconnected& event) {
  Session* const session = members_.Find(event.session);
  if (session == nullptr) return;
  if (!MayComeBack(*session)) {
    const absl::Status reason =
        session->close_reason.ok()
            ? MakeError(ErrorId::kRankLost, "the session has ended meanwhile", "attach again")
            : session->close_reason;
    io_.actions().Emit(AnswerAttach{.session = session->id, .status = reason, .trace = {}});
    return;
  }
  session->mapped = false;
  session->is_away = false;
  session->newest_before = event.newest_tag;
  AnswerAttach answer = TermsOf(*session);
  answer.leases = leases_.KeepOnly(session->id, event.held_leases);
  io_.actions().Emit(std::move(answer));
}

void Job::AnswerAttachOk(Session& session) {
  members_.SetAttached(session);
  if (session.reader) {
    const uint64_t arena_bytes = ReaderArenaBytes(session.request.grad_arena_bytes);
    io_.actions().Emit(AnswerAttach{.session = session.id,
                                    .status = absl::OkStatus(),
                                    .job = spec_.id,
                                    .committed_step = step_.committed_step(),
                                    .weights_bytes = spec_.plan.weights_bytes,
                                    .weights_on_swap = spec_.plan.has_weights_on_swap(),
                                    .grad_arena_bytes = arena_bytes,
                                    .step_region_offset = arena_bytes,
                                    .trace = step_.trace()});
    return;
  }
  const uint32_t leases = leases_.GiveTo(session.id, session.rank, session.held_leases);
  const bool writes_initial = !initial_.ready();
  if (writes_initial) initial_.AddWriter(session.id, session.rank);
  AnswerAttach answer = TermsOf(session);
  answer.writes_initial = writes_initial;
  answer.extra_state_bytes = step_.extra().Part(session.rank).bytes;
  answer.extra_state_offset = step_.extra().Part(session.rank).offset_bytes;
  answer.rank0_extra_state_bytes = session.rank == 0 ? 0 : step_.extra().Part(0).bytes;
  answer.rank0_extra_state_offset = step_.extra().Part(0).offset_bytes;
  answer.leases = leases;
  io_.actions().Emit(std::move(answer));
}

// Returns the answer for a rank, without fields that a reconnecting rank knows already.
AnswerAttach Job::TermsOf(const Session& session) const {
  return {.session = session.id,
          .status = absl::OkStatus(),
          .job = spec_.id,
          .committed_step = step_.committed_step(),
          .weights_bytes = spec_.plan.weights_bytes,
          .weights_on_swap = spec_.plan.has_weights_on_swap(),
          .grad_arena_bytes = spec_.plan.session_arena_bytes,
          .step_region_offset = spec_.plan.step_region_offset,
          .step_region_bytes = spec_.plan.step_region_bytes,
          .trace_bytes = spec_.plan.trace_bytes,
          .trace = TraceOf(session.rank),
          .attempt = step_.attempt(),
          .outlives_daemon = spec_.options.keeps_jobs,
          .prepared_step = step_.prepared_step(),
          .durable_step = durable_.durable_step(),
          .durable_before = durable_.durable_before(),
          .summary = step_.LastSummary()};
}

std::vector<uint32_t> Job::TraceOf(uint32_t rank) const {
  std::vector<uint32_t> trace = step_.trace();
  if (spec_.layout->is_shared()) return trace;
  std::erase_if(trace, [&](uint32_t partition) {
    return spec_.layout->partitions()[partition].owner != rank;
  });
  return trace;
}

}  // namespace forebay::daemon
