// SPDX-License-Identifier: Apache-2.0
// Goal    Each rank gets the bytes of all ranks in rank order and exactly once, regardless of the order of the calls. Waiting
//         ranks are answered with an error if one of the ranks can no longer call.
// Method  The exchange table with recorded answers.

#include "daemon/exec/rank_exchange.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/wire.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::rank_exchange_test {
namespace {

using protocol::ErrorId;
using ::testing::ElementsAre;
using testing::HasError;

class RankExchangeTest : public ::testing::Test {
 protected:
  using All = absl::StatusOr<std::vector<std::string>>;

  void Call(JobId job, uint32_t rank, const std::string& bytes, uint32_t world_size = 3) {
    const SessionId session = 100 * job + rank;
    const uint64_t number = static_cast<uint64_t>(
        std::ranges::count_if(answers_[session], [](const All& all) { return all.ok(); }));
    CallWithNumber(number, job, rank, bytes, world_size);
  }
  void CallWithNumber(uint64_t number, JobId job, uint32_t rank, const std::string& bytes,
                      uint32_t world_size) {
    const SessionId session = 100 * job + rank;
    exchange_.Add({.session = session,
                   .call = 1,
                   .number = number,
                   .job = job,
                   .rank = rank,
                   .world_size = world_size,
                   .is_back = is_back_},
                  bytes, [this, session](All all) { answers_[session].push_back(std::move(all)); });
  }
  size_t answered() const {
    return static_cast<size_t>(
        std::ranges::count_if(answers_, [](const auto& one) { return !one.second.empty(); }));
  }
  absl::Status Error(SessionId session) { return answers_[session].back().status(); }

  RankExchange exchange_;
  bool is_back_ = false;  // Whether the calling sessions have reattached.
  std::map<SessionId, std::vector<All>> answers_;
};

TEST_F(RankExchangeTest, AnswersAllInTheOrderOfRanksOnceTheLastIsThere) {
  Call(1, 2, "c");
  Call(1, 0, "a");
  EXPECT_EQ(answered(), 0U);
  Call(1, 1, "");
  ASSERT_EQ(answers_.size(), 3U);
  for (const auto& [session, given] : answers_) {
    ASSERT_EQ(given.size(), 1U);
    EXPECT_THAT(*given[0], ElementsAre("a", "", "c"));
  }
  EXPECT_TRUE(exchange_.empty());
}

TEST_F(RankExchangeTest, BeginsAnewBehindEachAnswer) {
  for (const std::string round : {"x", "y"}) {
    Call(1, 0, round + "0", 2);
    Call(1, 1, round + "1", 2);
    EXPECT_THAT(*answers_[101].back(), ElementsAre(round + "0", round + "1"));
  }
}

TEST_F(RankExchangeTest, JobsDoNotMeet) {
  Call(1, 0, "a", 2);
  Call(2, 1, "b", 2);
  EXPECT_EQ(answered(), 0U);
}

TEST_F(RankExchangeTest, ANewerCallOfARankStands) {
  Call(1, 0, "old", 2);
  Call(1, 0, "new", 2);
  EXPECT_THAT(Error(100), HasError(ErrorId::kLimit));
  Call(1, 1, "b", 2);
  EXPECT_THAT(*answers_[100].back(), ElementsAre("new", "b"));
}

TEST_F(RankExchangeTest, ARepeatedCallGetsWhatTheOthersHad) {
  Call(1, 0, "old", 2);  // Rank 0 gives up, and the daemon learns of it too late.
  Call(1, 1, "b", 2);
  EXPECT_THAT(*answers_[101].back(), ElementsAre("old", "b"));
  CallWithNumber(0, 1, 0, "new", 2);
  ASSERT_EQ(answers_[100].size(), 2U);
  EXPECT_THAT(*answers_[100].back(), ElementsAre("old", "b"));
  // The next exchange of both ranks succeeds.
  CallWithNumber(1, 1, 0, "c", 2);
  CallWithNumber(1, 1, 1, "d", 2);
  EXPECT_THAT(*answers_[100].back(), ElementsAre("c", "d"));
  exchange_.Forget(100);
  CallWithNumber(1, 1, 0, "e", 2);
  EXPECT_EQ(answers_[100].size(), 3U) << "a new session waits";
}

TEST_F(RankExchangeTest, TooManyBytesAreRefusedAndNobodyElseNotices) {
  Call(1, 0, std::string(protocol::kExchangeBytesMax + 1, 'x'), 2);
  EXPECT_THAT(Error(100), HasError(ErrorId::kRange));
  Call(1, 1, "b", 2);
  Call(1, 0, std::string(protocol::kExchangeBytesMax, 'x'), 2);
  EXPECT_OK(Error(100));
}

TEST_F(RankExchangeTest, WhoWaitsInVainIsAnswered) {
  Call(1, 0, "a");
  Call(1, 1, "b");
  Call(2, 0, "a");
  exchange_.Fail([](const auto& member) { return member.job == 1; },
                 protocol::MakeError(ErrorId::kRankLost, "rank 2 has ended"));
  EXPECT_THAT(Error(100), HasError(ErrorId::kRankLost));
  EXPECT_THAT(Error(101), HasError(ErrorId::kRankLost));
  EXPECT_TRUE(answers_[200].empty());
  Call(1, 2, "c");
  EXPECT_TRUE(answers_[102].empty()) << "the others have to call again";
}

TEST_F(RankExchangeTest, WhatADaemonBeforeHasMadeIsTheAnswerOfThoseThatHaveNotHadIt) {
  is_back_ = true;
  const RankExchange::Member had{.session = 101, .number = 4, .job = 1, .rank = 1, .world_size = 3};
  CallWithNumber(4, 1, 0, "a", 3);  // Rank 0 reconnects first.
  exchange_.SetMade(had, {"a", "b", "c"});
  EXPECT_THAT(*answers_[100].back(), ElementsAre("a", "b", "c"));
  CallWithNumber(4, 1, 2, "c", 3);
  EXPECT_THAT(*answers_[102].back(), ElementsAre("a", "b", "c"));
  EXPECT_TRUE(exchange_.empty());
  for (const uint32_t rank : {0U, 1U, 2U}) CallWithNumber(5, 1, rank, std::to_string(rank), 3);
  for (const SessionId session : {100U, 101U, 102U}) {
    EXPECT_THAT(*answers_[session].back(), ElementsAre("0", "1", "2"));
  }
}

TEST_F(RankExchangeTest, WhatWasMadeBeforeIsNoAnswerOfARankThatBeginsAnew) {
  exchange_.SetMade({.session = 101, .number = 0, .job = 1, .rank = 1, .world_size = 2},
                    {"0", "0"});
  CallWithNumber(0, 1, 0, "0", 2);
  EXPECT_EQ(answered(), 0U);
  exchange_.ForgetMade(1);
  is_back_ = true;
  CallWithNumber(0, 1, 0, "0", 2);
  EXPECT_THAT(Error(100), HasError(ErrorId::kLimit)) << "of the call before";
  CallWithNumber(0, 1, 1, "0", 2);
  EXPECT_THAT(*answers_[100].back(), ElementsAre("0", "0"));
}

TEST_F(RankExchangeTest, WhatWasMadeBeforeIsNoAnswerOfAnotherExchange) {
  is_back_ = true;
  exchange_.SetMade({.session = 101, .number = 4, .job = 1, .rank = 1, .world_size = 2},
                    {"a", "b"});
  CallWithNumber(5, 1, 0, "a", 2);
  CallWithNumber(4, 2, 0, "a", 2);
  EXPECT_EQ(answered(), 0U);
  CallWithNumber(4, 1, 0, "other", 2);  // The result of exchange 4 does not contain these bytes.
  EXPECT_THAT(Error(100), HasError(ErrorId::kLimit));
  CallWithNumber(5, 1, 1, "b", 2);
  EXPECT_THAT(*answers_[100].back(), ElementsAre("other", "b"));
}

TEST_F(RankExchangeTest, TheNewestOfBeforeStandsUntilThisDaemonHasMadeOne) {
  is_back_ = true;
  const auto came = [&](SessionId session, uint64_t number, const std::string& bytes) {
    exchange_.SetMade({.session = session,
                       .number = number,
                       .job = 1,
                       .rank = static_cast<uint32_t>(session - 100),
                       .world_size = 3},
                      {bytes, bytes, bytes});
  };
  came(100, 3, "old");
  came(101, 4, "new");
  came(100, 3, "old");
  CallWithNumber(4, 1, 2, "new", 3);
  EXPECT_THAT(*answers_[102].back(), ElementsAre("new", "new", "new"));
  for (const uint32_t rank : {0U, 1U, 2U}) CallWithNumber(5, 1, rank, "here", 3);
  came(101, 4, "new");
  CallWithNumber(5, 1, 2, "here", 3);
  EXPECT_THAT(*answers_[102].back(), ElementsAre("here", "here", "here"));
}

}  // namespace
}  // namespace forebay::daemon::rank_exchange_test
