// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/absent_ranks.h"

#include <poll.h>

#include <algorithm>

#include "daemon/exec/clock.h"
#include "protocol/error.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

// Time between two checks whether absent ranks have ended.
constexpr uint64_t kLookPeriodNs = 200'000'000;

}  // namespace

void AbsentRanks::Add(JobId job, uint32_t rank, AbsentRank absent) {
  if (absent.process.valid()) store_.List(ProcessDescriptor(job, rank, absent.has_detached));
  absent_[{job, rank}] = std::move(absent);
}

void AbsentRanks::StoreProcess(const ClientSession& session) {
  if (!session.process.valid()) return;
  const absl::Status stored =
      store_.Put(ProcessDescriptor(session.job_id, session.request.rank, session.has_detached),
                 session.process.get());
  if (!stored.ok()) spdlog::warn("{}", protocol::FormatError(stored));
}

void AbsentRanks::OnAttached(const ClientSession& session) {
  // A rank that attaches from scratch waits for all ranks, including those that were lost before.
  Drop(session.job_id,
       session.request.reattach ? std::optional(session.request.rank) : std::nullopt);
  StoreProcess(session);
}

void AbsentRanks::OnEnded(ClientSession& session, bool is_of_old_generation) {
  if (!store_.is_available() || !session.process.valid()) return;
  const std::pair of(session.job_id, session.request.rank);
  const auto may_come_back = [&](const auto& other) {
    return other.first.first == of.first && !other.second.has_detached;
  };
  const bool is_last = session.has_detached && !sessions_.HasRanks(of.first) &&
                       std::ranges::none_of(absent_, may_come_back);
  if (is_last) Drop(of.first);  // no rank waits for the absent ranks any more
  if (session.has_detached || is_of_old_generation) {
    store_.Drop(ProcessDescriptor(of.first, of.second, /*has_detached=*/false));
  }
  if (is_last || is_of_old_generation) return;
  if (session.has_detached) StoreProcess(session);
  absent_[of] = {.process = std::move(session.process),
                 .has_detached = session.has_detached,
                 .is_of_before = false};
}

void AbsentRanks::Drop(JobId job, std::optional<uint32_t> rank) {
  std::erase_if(absent_, [&](const auto& entry) {
    const auto& [of, absent] = entry;
    const bool is_meant = of.first == job && of.second == rank.value_or(of.second);
    if (is_meant) store_.Drop(ProcessDescriptor(of.first, of.second, absent.has_detached));
    return is_meant;
  });
}

bool AbsentRanks::HasDetached(JobId job, uint32_t rank) const {
  const auto found = absent_.find({job, rank});
  return found != absent_.end() && found->second.has_detached;
}

AbsentRanks::Ended AbsentRanks::Look() {
  if (absent_.empty()) return {};
  const uint64_t now = MonotonicNs();
  if (now < next_look_ns_) return {.next_ns = next_look_ns_};
  next_look_ns_ = now + kLookPeriodNs;
  Ended ended;
  for (auto& [of, absent] : absent_) {
    const auto& [job, rank] = of;
    const uint64_t wait_ns = absent.process.valid() ? 0 : sessions_.RankWaitNs(job);
    if (wait_ns == 0) absent.ends_ns = 0;
    // Skips ranks whose session was with this daemon: the state machine knows of their end.
    if (!absent.is_of_before || !sessions_.HasRanks(job)) continue;
    if (sessions_.OfRank(jobs_.Find(job)->name, rank) != nullptr) continue;
    ended.next_ns = next_look_ns_;
    pollfd entry{.fd = absent.process.get(), .events = POLLIN, .revents = 0};
    bool is_over = absent.has_detached || ::poll(&entry, 1, /*timeout=*/0) > 0;
    if (wait_ns > 0 && absent.ends_ns == 0) absent.ends_ns = now + wait_ns;
    is_over = is_over || (wait_ns > 0 && now >= absent.ends_ns);
    if (is_over) {
      ended.ranks.push_back({.job = job, .rank = rank, .has_detached = absent.has_detached});
    }
  }
  return ended;
}

}  // namespace forebay::daemon
