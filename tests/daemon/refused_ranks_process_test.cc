// SPDX-License-Identifier: Apache-2.0
// Goal    Ranks that disagree get an error that names the difference, and so does a rank that sends a non-finite value. No rank
//         loses data. A rank that attaches again fences its older session. Another user gets nothing.
// Method  Two ranks of one job in a real daemon, and a process that becomes another user. After each error, weights and states
//         are compared with the reference, before one more step and after it.

#include <grp.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/admin.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/refused_call.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon::refused_ranks_process_test {
namespace {

using protocol::ErrorId;
using ::testing::AllOf;
using testing::ExpectRefusal;
using ::testing::HasSubstr;
using testing::HealthyJob;
using ::testing::Not;
using testing::RefusedCall;

constexpr auto kTimeout = std::chrono::seconds(60);

class RefusedRanks : public RefusedCall {
 protected:
  void Start(const testing::JobShape& shape, uint64_t grad_arena_bytes = 0) {
    job_ = Trained({.socket = socket_, .shape = shape, .grad_arena_bytes = grad_arena_bytes});
    ASSERT_NE(job_, nullptr);
  }

  void DeliverAll(uint64_t t) {
    for (const uint32_t rank : {0U, 1U}) {
      for (const uint32_t group : {0U, 1U}) {
        ASSERT_OK(testing::DeliverGradient(job_->rank(rank), group, rank, t));
      }
    }
  }

  // Calls step 2 on both ranks and returns the status of each call.
  std::vector<absl::Status> BothStep(double lr_of_rank_1) {
    std::vector<absl::Status> ended(2);
    const auto step = [&](uint32_t rank, double lr) {
      ended[rank] =
          job_->rank(rank).Step(2, testing::MakeHyperParams(lr), 0, {}, kTimeout).status();
    };
    std::jthread other([&] { step(1, lr_of_rank_1); });
    step(0, 1e-2);
    other.join();
    return ended;
  }

  static constexpr testing::JobShape kTwoRanks = {
      .world_size = 2, .groups = 2, .group_elems = 1000};
  std::unique_ptr<HealthyJob> job_;
};

TEST_F(RefusedRanks, WithOtherScalarsBothGetAnErrorAndKeepTheirGradients) {
  Start(kTwoRanks);
  DeliverAll(2);
  for (const absl::Status& status : BothStep(/*lr_of_rank_1=*/2e-2)) {
    ExpectRefusal(status, ErrorId::kStep,
                  {"ranks ", "step 2", "lr of parameter group 0", "0.01", "0.02"});
  }
  EXPECT_OK(job_->HoldsItsBytes());
  EXPECT_OK(job_->StepAsDelivered());
  ExpectGoesOn(*job_);
}

TEST_F(RefusedRanks, WithAnotherStepNumberGetAnErrorAndTheOtherWaits) {
  Start(kTwoRanks);
  DeliverAll(2);
  std::jthread waiting([&] { EXPECT_OK(testing::CallStep(job_->rank(0), {.rank = 0, .t = 2})); });
  ExpectRefusal(testing::CallStep(job_->rank(1), {.rank = 1, .t = 3}).status(), ErrorId::kStep,
                {"step 3", "next one 2"});
  EXPECT_OK(testing::CallStep(job_->rank(1), {.rank = 1, .t = 2}));
  waiting.join();
  // The step that both ranks called in the end has used the delivered gradients.
  job_.reset();
  EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_, .shape = kTwoRanks}));
}

TEST_F(RefusedRanks, CannotReleaseALeaseOfEachOther) {
  Start(kTwoRanks);
  ASSERT_OK_AND_ASSIGN(const client::Lease lease, job_->rank(0).Fetch(0, kTimeout));
  // The next fetch, or the release of its lease, reports the error.
  EXPECT_OK(job_->rank(1).Release(lease));
  auto own = job_->rank(1).Fetch(0, kTimeout);
  const absl::Status reported = own.ok() ? job_->rank(1).Release(*own) : own.status();
  ExpectRefusal(reported, ErrorId::kLease,
                {"lease " + std::to_string(lease.id), "not a lease of this session"});
  EXPECT_OK(job_->rank(0).Release(lease));
  ASSERT_OK_AND_ASSIGN(const client::Lease again, job_->rank(0).Fetch(0, kTimeout));
  EXPECT_OK(job_->rank(0).Release(again));
  ExpectGoesOn(*job_);
}

TEST_F(RefusedRanks, WhoseGradientIsNotFiniteBothGetRankAndGroup) {
  const float largest = std::numeric_limits<float>::max();
  const struct {
    std::vector<float> of_rank;
    std::vector<std::string> words;
  } cases[] = {
      {{1.0F, std::nanf("")}, {"rank 1", "group 1 (layer1)"}},
      {{std::numeric_limits<float>::infinity(), 1.0F}, {"rank 0", "group 1 (layer1)"}},
      {{largest, largest}, {"sum of the ranks' gradients", "group 1 (layer1)"}},
  };
  Start(kTwoRanks);
  for (const auto& one : cases) {
    SCOPED_TRACE(one.words[0]);
    for (const uint32_t rank : {0U, 1U}) {
      ASSERT_OK(testing::DeliverValue(job_->rank(rank), 1, one.of_rank[rank]));
    }
    for (const absl::Status& status : BothStep(1e-2)) {
      ExpectRefusal(status, ErrorId::kNonfinite, one.words);
    }
    EXPECT_OK(job_->HoldsItsBytes());
  }
  ExpectGoesOn(*job_);
}

TEST_F(RefusedRanks, InOppositeOrdersHaveTheSameBitsWithTheSmallestArenas) {
  constexpr uint32_t kGroups = 10;
  constexpr uint64_t kGroupBytes = 1024 * sizeof(float);
  Start({.world_size = 2, .groups = kGroups, .group_elems = 1000}, 2 * kGroupBytes);
  const auto deliver = [&](uint32_t rank, uint32_t group, uint64_t t) {
    return testing::DeliverGradient(job_->rank(rank), group, rank, t);
  };
  // In step 2 each of rank 1's groups is early by at most two deliveries.
  for (uint32_t first = 0; first < kGroups; first += 2) {
    for (const auto& [rank, group] : {std::pair{1U, first + 1}, std::pair{0U, first},
                                      std::pair{1U, first}, std::pair{0U, first + 1}}) {
      ASSERT_OK(deliver(rank, group, 2));
    }
  }
  ASSERT_OK(job_->StepAsDelivered());

  // In step 3 the ranks deliver in opposite orders. Rank 1 waits for free pieces, which rank 0's deliveries provide.
  {
    std::jthread other([&] {
      for (uint32_t group = kGroups; group-- > 0;) EXPECT_OK(deliver(1, group, 3));
    });
    for (uint32_t group = 0; group < kGroups; ++group) EXPECT_OK(deliver(0, group, 3));
  }
  EXPECT_OK(job_->StepAsDelivered());
  ExpectGoesOn(*job_);
}

TEST_F(RefusedRanks, OfASessionWhoseRankAttachedAgainIsFencedAndTheNewOneHasItsExtraState) {
  const auto old_job = Trained({.socket = socket_});
  ASSERT_NE(old_job, nullptr);
  EXPECT_TRUE(old_job->rank(0).extra_state().empty());
  // These gradients are discarded with the session.
  ASSERT_OK(testing::DeliverGradient(old_job->rank(0), 1, 0, 2));

  ASSERT_OK_AND_ASSIGN(const auto job, HealthyJob::Attach({.socket = socket_}));
  const auto extra = job->rank(0).extra_state();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(extra.data()), extra.size()),
            "rank 0 step 1");
  const absl::Status fenced = old_job->rank(0).Fetch(0, kTimeout).status();
  ExpectRefusal(fenced, ErrorId::kFenced, {"newer session of rank 0", "job healthy"});
  EXPECT_THAT(testing::CallStep(old_job->rank(0), {.rank = 0, .t = 2}),
              testing::HasError(ErrorId::kFenced));
  ExpectGoesOn(*job);
}

// --------------------------------------------------------------------------------- another user

class RefusedUser : public RefusedCall {
 protected:
  static constexpr char kUid[] = "65534";

  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
    ASSERT_EQ(::chmod(dir_.path().c_str(), 0711), 0);
    settings_.push_back("socket.mode=\"0666\"");
    RefusedCall::SetUp();
  }

  // Another user's client. Its attach is refused, and it ends.
  testing::Ended Other(const std::string& job) {
    return testing::RunProgram({HELD_CLIENT_PATH, socket_, "0", "1", "hold", kUid, job});
  }

  // Returns whether the status that another user reads contains the text.
  bool OtherReads(const std::string& text) {
    const pid_t child = ::fork();
    if (child == 0) {
      const bool other = ::chdir(dir_.path().c_str()) == 0 && ::setgroups(0, nullptr) == 0 &&
                         ::setgid(65534) == 0 && ::setuid(65534) == 0;
      const auto admin = client::AdminClient::Connect({.socket = "s"});
      const std::string status = other && admin.ok() ? Status(**admin) : "";
      ::_exit(status.empty() ? 2 : status.find(text) == std::string::npos ? 1 : 0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_NE(WEXITSTATUS(status), 2);
    return WEXITSTATUS(status) == 0;
  }

  // Returns the names of jobs and arenas in the status, as one text.
  static std::string Status(client::AdminClient& admin) {
    const auto status = admin.Status();
    if (!status.ok()) return "";
    std::string text = "names:";
    for (const auto job : (*status)->getJobs()) absl::StrAppend(&text, " ", job.getName().cStr());
    for (const auto arena : (*status)->getMemory().getArenas()) {
      absl::StrAppend(&text, " ", arena.getJob().cStr());
    }
    return text;
  }
};

TEST_F(RefusedUser, MayNotAttachToTheJobOfAnother) {
  const auto job = Trained({.socket = socket_, .job = "job", .shape = {.world_size = 1}});
  ASSERT_NE(job, nullptr);
  const testing::Ended other = Other("0:job");
  EXPECT_EQ(other.exit_code, 1);
  for (const char* word :
       {"error[E_PERMISSION]", "job job belongs to uid 0", "has uid 65534", "hint: "}) {
    EXPECT_THAT(other.errors, HasSubstr(word));
  }
  ExpectGoesOn(*job);
}

TEST_F(RefusedUser, SeesItsOwnJobsAloneAndRootSeesAll) {
  const auto job = Trained({.socket = socket_, .job = "secret", .shape = {.world_size = 1}});
  ASSERT_NE(job, nullptr);
  const auto other = testing::RunningProgram::Start(
      {HELD_CLIENT_PATH, socket_, "0", "1", "hold", kUid, "secret"}, "held");
  EXPECT_THAT(other->errors(), HasSubstr("held"));
  EXPECT_TRUE(OtherReads(" secret"));
  EXPECT_FALSE(OtherReads("0:secret"));
  EXPECT_TRUE(OtherReads("(another user)"));
  ASSERT_OK_AND_ASSIGN(const auto admin, client::AdminClient::Connect({.socket = socket_}));
  EXPECT_THAT(Status(*admin), AllOf(HasSubstr(" secret"), HasSubstr(" 65534:secret"),
                                    Not(HasSubstr("(another user)"))));
  ExpectGoesOn(*job);
}

class Operator : public RefusedUser {
 protected:
  void SetUp() override {
    settings_ = {"socket.operators=\"65534\""};
    RefusedUser::SetUp();
  }
};

TEST_F(Operator, SeesJobsOfAllUsersAndMayNotAttachToThem) {
  const auto job = Trained({.socket = socket_, .job = "secret", .shape = {.world_size = 1}});
  ASSERT_NE(job, nullptr);
  EXPECT_TRUE(OtherReads("0:secret"));
  EXPECT_FALSE(OtherReads("(another user)"));
  EXPECT_THAT(Other("0:secret").errors, HasSubstr("error[E_PERMISSION]"));
  ExpectGoesOn(*job);
}

TEST_F(RefusedUser, MayNotConnectToASocketOfAnotherGroup) {
  const auto job = Trained({.socket = socket_, .job = "job", .shape = {.world_size = 1}});
  ASSERT_NE(job, nullptr);
  ASSERT_EQ(::chmod(socket_.c_str(), 0660), 0);
  const testing::Ended other = Other("job");
  EXPECT_EQ(other.exit_code, 1);
  for (const char* word : {"error[E_PERMISSION]", "Permission denied", "hint: "}) {
    EXPECT_THAT(other.errors, HasSubstr(word));
  }
  ExpectGoesOn(*job);
}

}  // namespace
}  // namespace forebay::daemon::refused_ranks_process_test
