// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/fetch_queue.h"

#include <algorithm>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "daemon/core/blocks/placement.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {

void FetchQueue::Handle(const Session& session, const protocol::Command& command) {
  const bool leases = command.kind == static_cast<uint16_t>(protocol::FetchKind::kLease);
  if (!leases && (session.reader || weights_.Holds(command.partition))) {
    step_.io.Answer(
        session.IdOf(command),
        protocol::MakeError(protocol::ErrorId::kUnsupported,
                            session.reader ? "a reader asks where weights are without a lease"
                                           : "weights on swap have no place that lasts",
                            "fetch them with a lease"));
    return;
  }
  // Fetches after the calls of all ranks count for the next step.
  if (!session.reader) step_.trace.Record(command.partition, step_.phase != StepPhase::kOpen);
  const auto rank = session.reader ? std::nullopt : std::optional(session.rank);
  if (weights_.Holds(command.partition)) {
    const bool has_called = rank && (step_.phase != StepPhase::kOpen || step_.barrier.has(*rank));
    weights_.OnFetch(rank, command.partition,
                     has_called ? step_.next_step() : step_.committed_step);
  }
  waiting_.push_back({.command = session.IdOf(command),
                      .rank = rank,
                      .partition = command.partition,
                      .leases = leases});
  Serve();
}

// A rank's fetch waits between the rank's step call and the decision, and until the partition's blocks are updated. A reader's
// fetch waits between the decision and the publication.
bool FetchQueue::MayFetch(const Waiting& fetch) const {
  if (step_.phase == StepPhase::kMasters) return true;
  if (!fetch.rank) return step_.is_published();
  if (step_.phase == StepPhase::kReducing || step_.prepared_step() > 0) return false;
  return !step_.barrier.has(*fetch.rank) && step_.pipeline.queue().IsPartitionDone(fetch.partition);
}

std::optional<absl::StatusOr<uint64_t>> FetchQueue::OffsetOf(const Waiting& fetch) {
  if (!MayFetch(fetch)) return std::nullopt;
  if (access_.Writes(fetch.partition)) return std::nullopt;
  if (!weights_.Holds(fetch.partition)) {
    return step_.spec.plan.placement.WherePartition(fetch.partition).weights_offset_bytes;
  }
  const absl::StatusOr<std::optional<uint64_t>> offset = weights_.Find(fetch.partition);
  if (!offset.ok()) return offset.status();
  if (offset->has_value()) return **offset;
  const std::pmr::vector<uint32_t> held = leases_.PartitionsOf(fetch.command.session);
  if (weights_.HasRoomBeside(held, fetch.partition)) return std::nullopt;
  return protocol::MakeError(
      protocol::ErrorId::kLimit,
      absl::StrCat("this session holds leases on weights of ", held.size(),
                   " partitions that are on swap: the cache of ",
                   step_.spec.plan.weights_cache_bytes, " bytes has no room for ",
                   step_.spec.layout->DescribePartition(fetch.partition), " beside them"),
      "release leases as soon as the bytes are copied, or raise dram.limit");
}

absl::StatusOr<uint64_t> FetchQueue::Lease(const Waiting& fetch, uint64_t offset_bytes) {
  const bool outlives =
      fetch.rank && step_.spec.options.keeps_jobs && step_.spec.plan.has_weights_on_swap();
  const uint64_t max = LeasesRecordedMax(*step_.spec.layout, step_.spec.world_size());
  if (outlives && leases_.count_recorded() >= max) {
    return protocol::MakeError(
        protocol::ErrorId::kLimit,
        absl::StrCat("the ranks of job ", step_.spec.name, " have ", leases_.count_recorded(),
                     " leases (at most ", max, " where weights are on swap)"),
        "release the leases of weights that are no longer read");
  }
  ASSIGN_OR_RETURN(const uint64_t lease, leases_.Acquire(fetch.command.session, fetch.partition));
  if (outlives) leases_.Record(lease, *fetch.rank, offset_bytes);
  return lease;
}

void FetchQueue::Serve() {
  weights_.BeginRound();
  std::erase_if(waiting_, [this](const Waiting& fetch) {
    const std::optional<absl::StatusOr<uint64_t>> offset = OffsetOf(fetch);
    if (!offset) return false;
    absl::StatusOr<uint64_t> lease = 0;
    if (!offset->ok()) {
      lease = offset->status();
    } else if (fetch.leases) {
      lease = Lease(fetch, **offset);
    }
    protocol::Completion completion{};
    if (lease.ok()) {
      completion.lease_id = *lease;
      completion.offset_bytes = **offset;
      completion.attempt = access_.writes(fetch.partition);
      completion.length_bytes = step_.spec.plan.placement.WherePartition(fetch.partition).bytes;
    }
    step_.io.Answer(fetch.command, completion, lease.status());
    return true;
  });
  // Begins no read while a decision or a write of masters waits for running reads to end.
  weights_.EndRound(/*begins=*/step_.phase != StepPhase::kReducing && !access_.is_writing());
  if (!weights_.lacks_room() || leases_.count_of_nobody() == 0 || waits_for_nobody_) return;
  waits_for_nobody_ = true;
  step_.io.actions().Emit(StartLeaseTimer{.job = step_.spec.id, .step = 0});
}

void FetchQueue::OnLeaseTimeExpired() {
  waits_for_nobody_ = false;
  if (weights_.lacks_room()) leases_.DropOfNobody();
}

void FetchQueue::Answer(SessionId session, const absl::Status& status) {
  std::erase_if(waiting_, [&](const Waiting& fetch) {
    if (fetch.command.session != session) return false;
    step_.io.Answer(fetch.command, status);
    return true;
  });
}

uint64_t FetchQueue::unanswered(SessionId session) const {
  const auto count = std::count_if(waiting_.begin(), waiting_.end(), [&](const Waiting& fetch) {
    return fetch.command.session == session;
  });
  return static_cast<uint64_t>(count);
}

}  // namespace forebay::daemon
