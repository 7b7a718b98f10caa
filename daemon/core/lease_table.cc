#include "daemon/core/lease_table.h"

#include "absl/strings/str_cat.h"
#include "daemon/core/limits.h"
#include "protocol/error.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

absl::StatusOr<uint64_t> LeaseTable::Acquire(SessionId session, uint32_t group) {
  uint64_t& count = counts_[session];
  if (count >= kLeasesPerSessionMax) {
    return MakeError(
        ErrorId::kLimit,
        absl::StrCat("the session has ", count, " leases (at most ", kLeasesPerSessionMax, ")"),
        "release what is not read any more");
  }
  ++count;
  const uint64_t lease = actions_.NewLease();
  leases_.emplace(lease, Lease{.session = session, .group = group});
  return lease;
}

absl::Status LeaseTable::Release(SessionId session, uint64_t lease) {
  const auto it = leases_.find(lease);
  if (it == leases_.end() || it->second.session != session) {
    return MakeError(
        ErrorId::kLease,
        absl::StrCat("lease ", lease, " is not a lease of this session, or was released before"));
  }
  leases_.erase(it);
  --counts_[session];
  return absl::OkStatus();
}

void LeaseTable::DropAll(SessionId session) {
  std::erase_if(leases_, [session](const auto& entry) { return entry.second.session == session; });
  counts_.erase(session);
}

uint64_t LeaseTable::count_of(SessionId session) const {
  const auto it = counts_.find(session);
  return it == counts_.end() ? 0 : it->second;
}

}  // namespace forebay::daemon
