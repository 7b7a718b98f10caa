// Goal    Ranks get each other's bytes in the order of ranks, exactly once, whoever comes first; those that
//         wait are answered when one of them cannot come any more.
// Method  The table alone, then with answers that are recorded.

#include "daemon/exec/rank_exchange.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/wire.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
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
                   .world_size = world_size},
                  bytes, [this, session](All all) { answers_[session].push_back(std::move(all)); });
  }
  size_t answered() const {
    return static_cast<size_t>(
        std::ranges::count_if(answers_, [](const auto& one) { return !one.second.empty(); }));
  }
  absl::Status Error(SessionId session) { return answers_[session].back().status(); }

  RankExchange exchange_;
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
  Call(1, 0, "old", 2);  // gives up, and the daemon does not hear of it in time
  Call(1, 1, "b", 2);
  EXPECT_THAT(*answers_[101].back(), ElementsAre("old", "b"));
  CallWithNumber(0, 1, 0, "new", 2);
  ASSERT_EQ(answers_[100].size(), 2U);
  EXPECT_THAT(*answers_[100].back(), ElementsAre("old", "b"));
  // Then both go on.
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

}  // namespace
}  // namespace forebay::daemon
