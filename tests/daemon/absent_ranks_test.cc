// SPDX-License-Identifier: Apache-2.0
// Goal    A rank that has ended while no daemon ran is reported once a rank of its job has attached, and no other rank is. The store
//         has the processes of attached and of absent ranks, and of no others.
// Method  Processes of this test stand for ranks. Look() looks at once on a new object, so that no test waits for its period.

#include "daemon/exec/recovery/absent_ranks.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/os/pidfd.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::absent_ranks_test {
namespace {

using protocol::UniqueFd;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr JobId kJob = 7;

UniqueFd RunningProcess() { return protocol::OpenPidfd(::getpid()); }

UniqueFd EndedProcess() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  UniqueFd process = protocol::OpenPidfd(child);
  pollfd entry{.fd = process.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&entry, 1, /*timeout=*/-1), 1);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  return process;
}

class AbsentRanksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(runner_, TaskRunner::Create({}));
    jobs_ = std::make_unique<JobMemoryTable>(ArenaPolicy{}, registry_, *runner_, [](Event) {});
    JobMemory memory;
    memory.name = kName;
    jobs_->Add(kJob, std::move(memory));
    store_ = std::make_unique<StoredDescriptors>(DescriptorStore{
        .keep =
            [this](const std::string& name, int) {
              stored_.insert(name);
              return absl::OkStatus();
            },
        .drop = [this](const std::string& name) { EXPECT_EQ(stored_.erase(name), 1U); }});
    ranks_ = std::make_unique<AbsentRanks>(*store_, sessions_, *jobs_);
  }

  ClientSession& Attach(uint32_t rank, bool reattach) {
    ClientSession session;
    session.request.rank = rank;
    session.request.reattach = reattach;
    session.job = kName;
    session.job_id = kJob;
    session.number = ++last_session_;
    session.process = RunningProcess();
    ClientSession& added = sessions_.Add(last_session_, std::move(session));
    ranks_->OnAttached(added);
    return added;
  }
  void End(uint32_t rank, bool has_detached, bool is_of_old_generation = false) {
    for (const auto& [id, of] : sessions_.all()) {
      if (!of.IsOf(kName, rank)) continue;
      ClientSession session = sessions_.Remove(id, absl::OkStatus());
      session.has_detached = has_detached;
      return ranks_->OnEnded(session, is_of_old_generation);
    }
  }
  // A rank of the previous daemon, whose process the store has.
  void Leave(uint32_t rank, UniqueFd process, bool has_detached = false) {
    if (process.valid()) stored_.insert(ProcessDescriptor(kJob, rank, has_detached));
    ranks_->Add(kJob, rank, {.process = std::move(process), .has_detached = has_detached});
  }
  std::vector<uint32_t> Ended() const {
    std::vector<uint32_t> ranks;
    for (const RankEnded& one : ranks_->Look().ranks) ranks.push_back(one.rank);
    return ranks;
  }
  static std::string NameOf(uint32_t rank) {
    return ProcessDescriptor(kJob, rank, /*has_detached=*/false);
  }

  const JobName kName{.uid = 1, .name = "job"};
  ArenaRegistry registry_;
  std::unique_ptr<TaskRunner> runner_;
  std::unique_ptr<JobMemoryTable> jobs_;
  SessionTable sessions_;
  SessionId last_session_ = 0;
  std::set<std::string> stored_;
  std::unique_ptr<StoredDescriptors> store_;
  std::unique_ptr<AbsentRanks> ranks_;
};

TEST_F(AbsentRanksTest, ARankThatHasEndedIsReportedOnceAnotherRankIsAttached) {
  Leave(0, RunningProcess());
  Leave(1, EndedProcess());
  Leave(2, RunningProcess());
  Attach(0, /*reattach=*/true);
  EXPECT_THAT(Ended(), ElementsAre(1U));
}

TEST_F(AbsentRanksTest, NobodyIsReportedToAJobWithoutAttachedRanks) {
  Leave(0, EndedProcess());
  EXPECT_THAT(Ended(), IsEmpty());
}

TEST_F(AbsentRanksTest, ARankThatHasDetachedIsReportedWhileItsProcessRuns) {
  Leave(0, RunningProcess());
  Leave(1, RunningProcess(), /*has_detached=*/true);
  Attach(0, /*reattach=*/true);
  EXPECT_TRUE(ranks_->HasDetached(kJob, 1));
  const AbsentRanks::Ended ended = ranks_->Look();
  ASSERT_EQ(ended.ranks.size(), 1U);
  EXPECT_EQ(ended.ranks[0].rank, 1U);
  EXPECT_TRUE(ended.ranks[0].has_detached);
}

TEST_F(AbsentRanksTest, ARankOfAnotherNodeIsWaitedFor) {
  Leave(0, RunningProcess());
  Leave(1, UniqueFd());
  Attach(0, /*reattach=*/true).wait = std::chrono::hours(1);
  const AbsentRanks::Ended ended = ranks_->Look();
  EXPECT_THAT(ended.ranks, IsEmpty());
  EXPECT_LT(ended.next_ns, UINT64_MAX);
}

TEST_F(AbsentRanksTest, ARankWhoseSessionWasWithThisDaemonIsNotReported) {
  Attach(0, /*reattach=*/false);
  Attach(1, /*reattach=*/false);
  End(1, /*has_detached=*/false);
  EXPECT_THAT(stored_, ElementsAre(NameOf(0), NameOf(1)));
  EXPECT_THAT(Ended(), IsEmpty());
}

TEST_F(AbsentRanksTest, TheStoreForgetsRanksThatAttachAgain) {
  Leave(0, EndedProcess());
  Leave(1, RunningProcess());
  Attach(1, /*reattach=*/true);
  EXPECT_THAT(stored_, ElementsAre(NameOf(0), NameOf(1)));
  Attach(1, /*reattach=*/false);  // from scratch: it waits for all ranks
  EXPECT_THAT(stored_, ElementsAre(NameOf(1)));
}

TEST_F(AbsentRanksTest, TheStoreHasTheProcessOfARankThatDetachesUntilTheLastOneDoes) {
  Attach(0, /*reattach=*/false);
  Attach(1, /*reattach=*/false);
  End(0, /*has_detached=*/true);
  EXPECT_THAT(stored_, ElementsAre(ProcessDescriptor(kJob, 0, /*has_detached=*/true), NameOf(1)));
  EXPECT_TRUE(ranks_->HasDetached(kJob, 0));
  End(1, /*has_detached=*/true);
  EXPECT_THAT(stored_, IsEmpty());
  EXPECT_FALSE(ranks_->HasDetached(kJob, 0));
}

TEST_F(AbsentRanksTest, ARankOfAnOldGenerationDoesNotReturn) {
  Attach(0, /*reattach=*/false);
  End(0, /*has_detached=*/false, /*is_of_old_generation=*/true);
  EXPECT_THAT(stored_, IsEmpty());
}

}  // namespace
}  // namespace forebay::daemon::absent_ranks_test
