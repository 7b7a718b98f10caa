// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/sessions/lease_table.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "daemon/core/base/limits.h"
#include "protocol/error.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

LeaseTable::LeaseTable(ActionSink& actions, JobId job, const std::vector<KeptLease>& recorded)
    : actions_(actions),
      job_(job),
      leases_(actions.memory()),
      partition_counts_(actions.memory()),
      recorded_(recorded.size()) {
  if (!recorded.empty()) session_counts_[kNobody] = recorded.size();
  for (const KeptLease& lease : recorded) {
    ++partition_counts_[lease.partition];
    leases_.emplace(lease.lease, Lease{.partition = lease.partition, .recorded = lease});
  }
}

absl::StatusOr<uint64_t> LeaseTable::Acquire(SessionId session, uint32_t partition) {
  uint64_t& count = session_counts_[session];
  if (count >= kLeasesPerSessionMax) {
    return MakeError(
        ErrorId::kLimit,
        absl::StrCat("the session has ", count, " leases (at most ", kLeasesPerSessionMax, ")"),
        "release the leases of weights that are no longer read");
  }
  ++count;
  ++partition_counts_[partition];
  const uint64_t lease = actions_.NewLease();
  leases_.emplace(lease, Lease{.session = session, .partition = partition});
  return lease;
}

absl::Status LeaseTable::Release(SessionId session, uint64_t lease) {
  const auto it = leases_.find(lease);
  if (it == leases_.end() || it->second.session != session) {
    return MakeError(
        ErrorId::kLease,
        absl::StrCat("lease ", lease, " is not a lease of this session, or was released before"));
  }
  Erase(it);
  return absl::OkStatus();
}

LeaseTable::Leases::iterator LeaseTable::Erase(Leases::iterator lease) {
  --session_counts_.at(lease->second.session);
  const auto partition = partition_counts_.find(lease->second.partition);
  if (--partition->second == 0) partition_counts_.erase(partition);
  if (lease->second.recorded) {
    --recorded_;
    actions_.Emit(RecordLeaseEnd{.job = job_, .lease = lease->first});
  }
  return leases_.erase(lease);
}

void LeaseTable::Record(uint64_t lease, uint32_t rank, uint64_t offset_bytes) {
  Lease& of = leases_.at(lease);
  of.recorded = KeptLease{
      .lease = lease, .rank = rank, .partition = of.partition, .offset_bytes = offset_bytes};
  ++recorded_;
  actions_.Emit(RecordLease{.job = job_, .lease = *of.recorded});
}

std::vector<KeptLease> LeaseTable::recorded() const {
  std::vector<KeptLease> all;
  for (const auto& [id, lease] : leases_) {
    if (lease.recorded) all.push_back(*lease.recorded);
  }
  return all;
}

uint32_t LeaseTable::GiveTo(SessionId session, uint32_t rank, std::span<const uint64_t> held) {
  uint32_t given = 0;
  if (count_of_nobody() == 0) return given;
  for (auto it = leases_.begin(); it != leases_.end();) {
    Lease& lease = it->second;
    const bool is_its = lease.session == kNobody && lease.recorded->rank == rank;
    if (is_its && std::ranges::find(held, it->first) == held.end()) {
      it = Erase(it);
      continue;
    }
    if (is_its) {
      Move(lease, session);
      ++given;
    }
    ++it;
  }
  return given;
}

uint32_t LeaseTable::KeepOnly(SessionId session, std::span<const uint64_t> held) {
  for (auto it = leases_.begin(); it != leases_.end();) {
    const bool ends =
        it->second.session == session && std::ranges::find(held, it->first) == held.end();
    it = ends ? Erase(it) : std::next(it);
  }
  return static_cast<uint32_t>(count_of(session));
}

void LeaseTable::DropAll(SessionId session) {
  if (count_of(session) > 0) KeepOnly(session, {});
  session_counts_.erase(session);
}

void LeaseTable::ReturnToNobody(SessionId session) {
  for (auto& [id, lease] : leases_) {
    if (lease.session == session && lease.recorded) Move(lease, kNobody);
  }
}

void LeaseTable::Move(Lease& lease, SessionId to) {
  --session_counts_.at(lease.session);
  ++session_counts_[to];
  lease.session = to;
}

bool LeaseTable::IsLeasedBySession(uint32_t partition) const {
  if (count_of_nobody() == 0) return IsLeased(partition);
  return std::ranges::any_of(leases_, [partition](const auto& entry) {
    return entry.second.partition == partition && entry.second.session != kNobody;
  });
}

std::pmr::vector<uint32_t> LeaseTable::PartitionsOf(SessionId session) const {
  std::pmr::vector<uint32_t> partitions(actions_.memory());
  if (count_of(session) == 0) return partitions;
  for (const auto& [id, lease] : leases_) {
    if (lease.session == session) partitions.push_back(lease.partition);
  }
  std::sort(partitions.begin(), partitions.end());
  partitions.erase(std::unique(partitions.begin(), partitions.end()), partitions.end());
  return partitions;
}

uint64_t LeaseTable::count_of(SessionId session) const {
  const auto it = session_counts_.find(session);
  return it == session_counts_.end() ? 0 : it->second;
}

}  // namespace forebay::daemon
