// SPDX-License-Identifier: Apache-2.0
// Goal    Ranks of a job get each other's bytes through the daemon. If a rank ends, the other ranks get an error instead of
//         waiting, and the next exchange works.
// Method  Daemon and clients are threads of one process.

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_thread.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::client {
namespace {

using protocol::ErrorId;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using testing::HasError;

constexpr Timeout kTimeout = std::chrono::seconds(60);
constexpr uint32_t kRanks = 3;

class ExchangeTest : public ::testing::Test {
 protected:
  using All = absl::StatusOr<std::vector<std::string>>;

  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, testing::StartDaemonThread(dir_.path() + "/s"));
    AttachAll();
  }

  void AttachAll() {
    ranks_.clear();
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      ASSERT_OK_AND_ASSIGN(auto session, Attachment::Attach(Options(rank)));
      ranks_.push_back(std::move(session));
      if (ranks_.back()->writes_initial()) {
        ASSERT_OK(WriteAll(*ranks_.back()));
      }
    }
  }
  AttachOptions Options(uint32_t rank) const {
    return {.socket = dir_.path() + "/s",
            .job = "job",
            .rank = rank,
            .world_size = kRanks,
            .run = "run",
            .layout = testing::MakeLayoutSpec({}),
            .timeout = kTimeout};
  }
  static absl::Status WriteAll(Attachment& session) {
    for (uint32_t g = 0; g < session.layout().groups().size(); ++g) {
      RETURN_IF_ERROR(
          session.WriteInitial(g, testing::MakeValues(session.layout(), g, 3), kTimeout));
    }
    return session.InitialDone(kTimeout);
  }

  // Calls Exchange() on every rank except the last one, each in a separate thread. Calls `last` in place of the last rank's
  // call. Returns the results of the other ranks.
  template <typename Last>
  std::vector<All> WaitingFor(Last last) {
    std::vector<All> all(kRanks - 1, All(absl::UnknownError("not answered")));
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank + 1 < kRanks; ++rank) {
      threads.emplace_back([this, rank, &all] {
        all[rank] = ranks_[rank]->Exchange("of " + std::to_string(rank), kTimeout);
      });
    }
    last();
    for (std::thread& thread : threads) thread.join();
    return all;
  }

  testing::TempDir dir_;
  std::unique_ptr<daemon::Daemon> daemon_;
  std::vector<std::unique_ptr<Attachment>> ranks_;
};

TEST_F(ExchangeTest, BringsTheBytesOfAll) {
  for (int round = 0; round < 3; ++round) {
    All own = absl::UnknownError("not answered");
    const auto all = WaitingFor([&] { own = ranks_[2]->Exchange("of 2", kTimeout); });
    for (const All& one : all) EXPECT_THAT(*one, ElementsAre("of 0", "of 1", "of 2"));
    EXPECT_THAT(*own, ElementsAre("of 0", "of 1", "of 2"));
  }
}

TEST_F(ExchangeTest, ARankThatEndsIsAnErrorOfTheOthers) {
  // In the first round the rank detaches. In the second round the rank only disconnects, like a process that dies.
  for (const bool in_good_order : {true, false}) {
    const auto all = WaitingFor([&] {
      if (in_good_order) {
        EXPECT_OK(ranks_[2]->Detach());
      }
      ranks_[2].reset();
    });
    for (const All& one : all) EXPECT_THAT(one, HasError(ErrorId::kRankLost));
    AttachAll();
    const auto again = WaitingFor([&] { EXPECT_OK(ranks_[2]->Exchange("of 2", kTimeout)); });
    for (const All& one : again) EXPECT_OK(one);
  }
}

TEST_F(ExchangeTest, ACallThatGivesUpCanBeRepeated) {
  EXPECT_THAT(ranks_[0]->Exchange("old", std::chrono::milliseconds(50)),
              HasError(ErrorId::kTimeout));
  for (int round = 0; round < 2; ++round) {
    All own = absl::UnknownError("not answered");
    const auto all = WaitingFor([&] { own = ranks_[2]->Exchange("of 2", kTimeout); });
    // In round 0 the daemon may receive the exchanges of ranks 1 and 2 before it learns that rank 0's call has timed out.
    ASSERT_OK(own);
    EXPECT_THAT((*own)[0], AnyOf("of 0", round == 0 ? "old" : "of 0"));
    for (const All& one : all) EXPECT_THAT(*one, ElementsAreArray(*own));
  }
}

TEST_F(ExchangeTest, WhoHasNoRankAndTooManyBytesAreRefused) {
  AttachOptions options = Options(0);
  options.reader = true;
  ASSERT_OK_AND_ASSIGN(const auto reader, Attachment::Attach(options));
  EXPECT_THAT(reader->Exchange("", kTimeout), HasError(ErrorId::kRank));
  EXPECT_THAT(ranks_[0]->Exchange(std::string(5000, 'x'), kTimeout), HasError(ErrorId::kRange));
}

}  // namespace
}  // namespace forebay::client
