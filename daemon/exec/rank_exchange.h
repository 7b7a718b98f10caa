// SPDX-License-Identifier: Apache-2.0
// Ranks of a job that wait for each other's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"

namespace forebay::daemon {

// Threads  The loop thread.
class RankExchange {
 public:
  struct Member {
    SessionId session = 0;
    uint64_t call = 0;
    uint64_t number = 0;  // exchanges that were answered to the session before
    JobId job = 0;
    uint32_t rank = 0;
    uint32_t world_size = 0;
    bool is_back = false;  // its session continues one of an earlier connection or daemon
  };
  // Gets the bytes of every rank, in the order of ranks.
  using Answer = absl::AnyInvocable<void(absl::StatusOr<std::vector<std::string>>)>;

  // Answers all ranks of a job once each of them has called Add(). A newer call of a rank replaces its older one, which gets
  // E_LIMIT. If a call was given up after the exchange was answered, and the rank repeats it with its number, it gets the same
  // answer.
  //
  // Errors  E_RANGE  more than kExchangeBytesMax.
  void Add(const Member& member, std::string bytes, Answer answer);

  // Adds the newest answer that a daemon before this one has given to `member`, for the number of `member`. Ranks of the job
  // that have not had the answer get it for the same number: all ranks that continue have made equally many exchanges.
  void SetMade(const Member& member, std::vector<std::string> all);

  // Answers the calls for which `which` is true with `reason` and removes them.
  void Fail(absl::FunctionRef<bool(const Member&)> which, const absl::Status& reason);

  void Forget(SessionId session);  // Call it for a session that is over.
  void ForgetMade(JobId job);      // Call it if a rank begins from scratch: its numbers do so too.

  bool empty() const { return waiting_.empty(); }

 private:
  struct Waiting {
    Member member;
    std::string bytes;
    Answer answer;
  };
  // The newest complete exchange of a job's ranks.
  struct Made {
    std::map<SessionId, uint64_t> numbers;  // `number` by session that is not over
    std::vector<std::string> all;
    std::optional<uint64_t> number_before = {};  // its number if a daemon before this one made it

    // True if the member asks for this exchange, with these bytes.
    bool IsOf(const Member& member, const std::string& bytes) const;
  };
  std::map<JobId, std::map<uint32_t, Waiting>> waiting_;  // by rank
  std::map<JobId, Made> made_;
};

}  // namespace forebay::daemon
