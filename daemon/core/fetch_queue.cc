#include "daemon/core/fetch_queue.h"

#include <algorithm>

#include "absl/status/statusor.h"
#include "daemon/core/placement.h"

namespace forebay::daemon {

void FetchQueue::Handle(const Session& session, const protocol::Command& command) {
  if (!session.reader) step_.RecordFetch(command.partition);
  waiting_.push_back({.command = session.IdOf(command),
                      .rank = session.reader ? std::nullopt : std::optional(session.rank),
                      .partition = command.partition});
  Serve();
}

void FetchQueue::Serve() {
  std::erase_if(waiting_, [this](const Waiting& fetch) {
    if (!step_.MayFetch(fetch.rank, fetch.partition)) return false;
    if (access_.Writes(fetch.partition)) return false;
    absl::StatusOr<uint64_t> lease = leases_.Acquire(fetch.command.session, fetch.partition);
    if (!lease.ok()) {
      io_.Answer(fetch.command, lease.status());
      return true;
    }
    protocol::Completion completion{};
    completion.lease_id = *lease;
    const PartitionLocation weights = spec_.plan.placement.WherePartition(fetch.partition);
    completion.offset_bytes = weights.weights_offset_bytes;
    completion.length_bytes = weights.bytes;
    io_.Answer(fetch.command, completion);
    return true;
  });
}

void FetchQueue::Answer(SessionId session, const absl::Status& status) {
  std::erase_if(waiting_, [&](const Waiting& fetch) {
    if (fetch.command.session != session) return false;
    io_.Answer(fetch.command, status);
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
