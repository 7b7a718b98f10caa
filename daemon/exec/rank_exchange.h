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
    uint64_t number = 0;  // of exchanges that the session has had the answer of
    JobId job = 0;
    uint32_t rank = 0;
    uint32_t world_size = 0;
    bool is_back = false;  // of a session of before
  };
  // Of every rank, in the order of ranks.
  using Answer = absl::AnyInvocable<void(absl::StatusOr<std::vector<std::string>>)>;

  // Answers all of a job's ranks once each of them is here. A rank's newer call replaces an older one, which
  // gets E_LIMIT. A call that gave up after the others had their answer, and comes again with its number,
  // gets that answer.
  //
  // Errors  E_RANGE  more than kExchangeBytesMax.
  void Add(const Member& member, std::string bytes, Answer answer);

  // A daemon before this one has given `member` this answer, of its number: others of the job, which have not had it, get
  // it for the same number, of which all ranks that go on have made as many.
  void SetMade(const Member& member, std::vector<std::string> all);

  // Those of which `which` is true get `reason` and wait no longer.
  void Fail(absl::FunctionRef<bool(const Member&)> which, const absl::Status& reason);

  void Forget(SessionId session);  // that is over
  void ForgetMade(JobId job);      // a rank begins anew, and its numbers with it

  bool empty() const { return waiting_.empty(); }

 private:
  struct Waiting {
    Member member;
    std::string bytes;
    Answer answer;
  };
  // The newest that a job's ranks have made.
  struct Made {
    std::map<SessionId, uint64_t> numbers;  // of those that are not over
    std::vector<std::string> all;
    std::optional<uint64_t> number_before = {};  // of one that a daemon before this one has made

    // Whether it is what the member asks for, with these bytes.
    bool IsOf(const Member& member, const std::string& bytes) const;
  };
  std::map<JobId, std::map<uint32_t, Waiting>> waiting_;  // by rank
  std::map<JobId, Made> made_;
};

}  // namespace forebay::daemon
