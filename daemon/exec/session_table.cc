// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/session_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

std::string ClientSession::Who() const {
  return absl::StrCat(request.reader ? "a reader" : absl::StrCat("rank ", request.rank), " of job ",
                      request.job);
}

absl::Status SessionOver() {
  return protocol::MakeError(protocol::ErrorId::kFenced, "the session is over", "attach again");
}

ClientSession& SessionTable::Add(SessionId id, ClientSession session) {
  const auto [added, is_new] = sessions_.emplace(id, std::move(session));
  FOREBAY_CHECK(is_new);
  return added->second;
}

ClientSession SessionTable::Remove(SessionId id, const absl::Status& reason) {
  auto node = sessions_.extract(id);
  FOREBAY_CHECK(!node.empty());
  if (!reason.ok()) {
    if (evicted_.size() == kEvictedKeptMax) evicted_.pop_front();
    evicted_.emplace_back(node.mapped().number, reason);
  }
  return std::move(node.mapped());
}

ClientSession* SessionTable::Find(SessionId id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : &found->second;
}

SessionIo& SessionTable::io(SessionId id) {
  const ClientSession* const session = Find(id);
  FOREBAY_CHECK(session != nullptr && session->io != nullptr);
  return *session->io;
}

SessionId SessionTable::Resolve(SessionId number) const {
  const auto found = std::ranges::find_if(
      sessions_, [number](const auto& entry) { return entry.second.number == number; });
  return found == sessions_.end() ? 0 : found->first;
}

absl::Status SessionTable::Explain(SessionId number, uint64_t tag) const {
  const auto found = sessions_.find(Resolve(number));
  if (found != sessions_.end() && found->second.io != nullptr) {
    return found->second.io->Explain(tag);
  }
  const auto evicted =
      std::ranges::find(evicted_, number, [](const auto& entry) { return entry.first; });
  return evicted == evicted_.end() ? SessionOver() : evicted->second;
}

const ClientSession* SessionTable::OfRank(const JobName& job, uint32_t rank) const {
  const ClientSession* newest = nullptr;
  for (const auto& [id, session] : sessions_) {
    if (session.IsOf(job, rank)) newest = &session;
  }
  return newest;
}

bool SessionTable::HasRanks(JobId job) const {
  return std::ranges::any_of(sessions_, [job](const auto& entry) {
    return entry.second.job_id == job && !entry.second.request.reader;
  });
}

uint64_t SessionTable::RankWaitNs(JobId job) const {
  std::chrono::nanoseconds longest{0};
  for (const auto& [id, session] : sessions_) {
    if (session.job_id == job && !session.request.reader) longest = std::max(longest, session.wait);
  }
  return static_cast<uint64_t>(longest.count());
}

// At most one session of a rank has memory. A session that is being reconnected may not be marked as mapped yet, but has mapped
// its gradients in an earlier daemon.
std::vector<SessionId> SessionTable::WithMemory(const JobName& job) const {
  std::vector<SessionId> ranks;
  for (const auto& [id, session] : sessions_) {
    const bool has_memory = session.io != nullptr && session.io->grad() != nullptr;
    if (has_memory && !session.request.reader && session.job == job) ranks.push_back(id);
  }
  return ranks;
}

}  // namespace forebay::daemon
