// SPDX-License-Identifier: Apache-2.0
// Exchange of bytes among the ranks of a job: each rank waits for the bytes of all ranks.
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
    uint64_t number = 0;  // number of exchanges already answered to the session
    JobId job = 0;
    uint32_t rank = 0;
    uint32_t world_size = 0;
    bool is_back = false;  // the session continues one of an earlier connection or daemon
  };
  // Gets the bytes of every rank, in the order of ranks.
  using Answer = absl::AnyInvocable<void(absl::StatusOr<std::vector<std::string>>)>;

  // Answers all ranks of a job once each of them has called Add(). A newer call of a rank replaces its older call, which is
  // answered with E_LIMIT. If a rank repeats a call with the number of the newest answered exchange, the rank gets the same
  // answer again.
  //
  // Errors  E_RANGE  more than kExchangeBytesMax.
  void Add(const Member& member, std::string bytes, Answer answer);

  // Adds the newest answer of an earlier daemon to `member`, under the number of `member`. Ranks of the job that
  // have not received this answer get it if they ask with the same number. All ranks that continue have had equally many
  // exchanges.
  void SetMade(const Member& member, std::vector<std::string> all);

  // Removes the waiting calls for which `which` returns true, and answers them with the error `reason`.
  void Fail(absl::FunctionRef<bool(const Member&)> which, const absl::Status& reason);

  void Forget(SessionId session);  // Call it for a session that is over.
  void ForgetMade(JobId job);      // Call it if a rank starts from scratch, with number 0.

  bool empty() const { return waiting_.empty(); }

 private:
  struct Waiting {
    Member member;
    std::string bytes;
    Answer answer;
  };
  // The newest complete exchange of a job's ranks.
  struct Made {
    // Number of the exchange for each session that is not over.
    std::map<SessionId, uint64_t> numbers;
    std::vector<std::string> all;
    // Number of the exchange, if an earlier daemon completed it.
    std::optional<uint64_t> number_before = {};

    // True if the member asks for this exchange, with these bytes.
    bool IsOf(const Member& member, const std::string& bytes) const;
  };
  std::map<JobId, std::map<uint32_t, Waiting>> waiting_;  // by rank
  std::map<JobId, Made> made_;
};

}  // namespace forebay::daemon
