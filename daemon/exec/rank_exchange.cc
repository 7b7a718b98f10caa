// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/rank_exchange.h"

#include <cstdint>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/wire.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

bool RankExchange::Made::IsOf(const Member& member, const std::string& bytes) const {
  const auto number = numbers.find(member.session);
  if (number != numbers.end()) return number->second == member.number;
  return member.is_back && number_before == member.number && member.rank < all.size() &&
         all[member.rank] == bytes;
}

void RankExchange::Add(const Member& member, std::string bytes, Answer answer) {
  if (bytes.size() > protocol::kExchangeBytesMax) {
    answer(MakeError(ErrorId::kRange,
                     absl::StrCat("an exchange of ", bytes.size(), " bytes a rank; at most ",
                                  protocol::kExchangeBytesMax)));
    return;
  }
  if (const auto made = made_.find(member.job); made != made_.end()) {
    if (made->second.IsOf(member, bytes)) return answer(made->second.all);
  }
  std::map<uint32_t, Waiting>& ranks = waiting_[member.job];
  // The newer call replaces an older one, which its client may have cancelled.
  auto older = ranks.extract(member.rank);
  ranks[member.rank] = {.member = member, .bytes = std::move(bytes), .answer = std::move(answer)};
  if (!older.empty()) {
    older.mapped().answer(MakeError(
        ErrorId::kLimit, absl::StrCat("rank ", member.rank, " has begun another exchange")));
  }
  if (ranks.size() < member.world_size) return;
  const auto complete = waiting_.extract(member.job);
  Made& made = made_[member.job] = {};
  for (auto& [rank, waiting] : complete.mapped()) {
    made.numbers[waiting.member.session] = waiting.member.number;
    made.all.push_back(std::move(waiting.bytes));
  }
  for (auto& [rank, waiting] : complete.mapped()) waiting.answer(made.all);
}

void RankExchange::SetMade(const Member& member, std::vector<std::string> all) {
  Made& made = made_[member.job];
  if (!made.all.empty() && made.number_before.value_or(UINT64_MAX) >= member.number) return;
  made = {.numbers = {{member.session, member.number}},
          .all = std::move(all),
          .number_before = member.number};
  const auto waiting = waiting_.find(member.job);
  if (waiting == waiting_.end()) return;
  std::vector<Answer> answered;
  for (auto rank = waiting->second.begin(); rank != waiting->second.end();) {
    const bool is_its = made.IsOf(rank->second.member, rank->second.bytes);
    if (is_its) answered.push_back(std::move(rank->second.answer));
    rank = is_its ? waiting->second.erase(rank) : std::next(rank);
  }
  if (waiting->second.empty()) waiting_.erase(waiting);
  for (Answer& answer : answered) answer(made.all);
}

void RankExchange::Forget(SessionId session) {
  for (auto& [job, made] : made_) made.numbers.erase(session);
  std::erase_if(made_, [](const auto& job) { return job.second.numbers.empty(); });
}

void RankExchange::ForgetMade(JobId job) { made_.erase(job); }

void RankExchange::Fail(absl::FunctionRef<bool(const Member&)> which, const absl::Status& reason) {
  std::vector<Answer> failed;
  for (auto job = waiting_.begin(); job != waiting_.end();) {
    for (auto rank = job->second.begin(); rank != job->second.end();) {
      const bool is_failed = which(rank->second.member);
      if (is_failed) failed.push_back(std::move(rank->second.answer));
      rank = is_failed ? job->second.erase(rank) : std::next(rank);
    }
    job = job->second.empty() ? waiting_.erase(job) : std::next(job);
  }
  for (Answer& answer : failed) answer(reason);
}

}  // namespace forebay::daemon
