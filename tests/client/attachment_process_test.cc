// SPDX-License-Identifier: Apache-2.0
// Goal    If the daemon is killed, every blocked call returns E_DAEMON_GONE. A forked child is refused, does not hang and harms
//         nothing. A write into the weights is explained.
// Method  A real forebayd is killed with SIGKILL while threads wait in each call that can wait. Forks are real.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "client/window_registry.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::client {
namespace {

using protocol::ErrorId;
using testing::DaemonProcess;
using testing::HasError;

constexpr Timeout kTimeout = std::chrono::seconds(60);

class AttachmentProcess : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_)); }

  absl::StatusOr<std::unique_ptr<Attachment>> Attach(const std::string& job, uint32_t rank,
                                                     uint32_t world_size) {
    return Attachment::Attach({.socket = socket_,
                               .job = job,
                               .rank = rank,
                               .world_size = world_size,
                               .layout = testing::MakeLayoutSpec({}),
                               .timeout = kTimeout});
  }
  std::unique_ptr<Attachment> AttachFirst(const std::string& job, uint32_t world_size) {
    auto session = Attach(job, 0, world_size).value();
    for (uint32_t g = 0; g < session->layout().groups().size(); ++g) {
      EXPECT_OK(session->WriteInitial(g, testing::MakeValues(session->layout(), g, 1), kTimeout));
    }
    EXPECT_OK(session->InitialDone(kTimeout));
    return session;
  }

  testing::TempDir dir_;
  std::string socket_ = dir_.path() + "/s";
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(AttachmentProcess, AnotherRunIsRefusedBeforeItTouchesTheJob) {
  const auto attach = [&](const std::string& run, bool resume) {
    return Attachment::Attach({.socket = socket_,
                               .job = "job",
                               .run = run,
                               .resume = resume,
                               .layout = testing::MakeLayoutSpec({.world_size = 1}),
                               .timeout = kTimeout});
  };
  std::unique_ptr<Attachment> trained = AttachFirst("job", 1);  // of run "test"
  EXPECT_THAT(attach("other", true), HasError(ErrorId::kBusy));
  EXPECT_OK(trained->Fetch(0, kTimeout).status());
  ASSERT_OK(trained->Detach());
  EXPECT_THAT(attach("other", false), HasError(ErrorId::kJobExists));
  EXPECT_THAT(attach("two words", false), HasError(ErrorId::kOption));
  ASSERT_OK_AND_ASSIGN(const auto resumed, attach("other", true));
  EXPECT_FALSE(resumed->writes_initial());
}

TEST_F(AttachmentProcess, AKilledDaemonEndsEveryBlockedCall) {
  std::atomic<int> begun{0};
  const auto stepper = AttachFirst("step", 2);
  const auto writer = Attach("attach", 0, 2).value();
  const auto rank0 = AttachFirst("grad", 2);
  const auto rank1 = Attach("grad", 1, 2).value();
  const auto hyper = testing::MakeHyperParams();

  std::vector<std::thread> blocked;
  blocked.emplace_back([&] {
    ++begun;
    EXPECT_THAT(stepper->Step(1, hyper, 0, {}, kNoTimeout), HasError(ErrorId::kDaemonGone));
  });
  blocked.emplace_back([&] {
    ++begun;
    EXPECT_THAT(Attach("attach", 1, 2), HasError(ErrorId::kDaemonGone));
  });
  blocked.emplace_back([&] {
    // Rank 0 delivers nothing: what rank 1 delivers is held until rank 1 has no free room.
    absl::Status status;
    for (uint32_t g = 0; g < 3 && status.ok(); ++g) {
      status = rank1->GradSlot(g, GradFill::kZero, kTimeout).status();
      if (status.ok()) status = rank1->GradReady(g);
    }
    ++begun;
    if (status.ok()) status = rank1->Step(1, hyper, 0, {}, kNoTimeout).status();
    EXPECT_THAT(status, HasError(ErrorId::kDaemonGone));
  });
  EXPECT_TRUE(testing::Eventually([&] { return begun == 3; }));
  // Waits until Attach has a connection. Without a connection Attach would return another error.
  ASSERT_OK_AND_ASSIGN(const auto admin, AdminClient::Connect({.socket = socket_}));
  EXPECT_TRUE(testing::Eventually([&] {
    const auto status = admin->Status();
    if (!status.ok()) return false;
    bool found = false;
    for (const auto job : (*status)->getJobs()) {
      found = found || (job.getName() == "attach" && job.getSessions() == 2);
    }
    return found;
  }));
  daemon_->Kill();
  for (std::thread& thread : blocked) thread.join();
  EXPECT_THAT(rank0->Fetch(0, kTimeout), HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(rank0->Detach(), HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(writer->InitialDone(kTimeout), HasError(ErrorId::kDaemonGone));
  const auto values = testing::MakeValues(rank0->layout(), 0, 1);
  EXPECT_TRUE(std::equal(values.begin(), values.end(), rank0->weights().begin()));
}

// Runs every check of a forked child. Returns the number of the first check that fails, or 0 if none fails.
int ChecksInChild(Attachment& session, std::span<const std::byte> expected_weights) {
  std::vector<std::byte> bytes(16);
  const auto hyper = testing::MakeHyperParams();
  const std::vector<absl::Status> results{session.WriteInitial(0, bytes, kNoTimeout),
                                          session.InitialDone(kNoTimeout),
                                          session.Fetch(0, kNoTimeout).status(),
                                          session.Release({}),
                                          session.GradSlot(0, GradFill::kZero, kNoTimeout).status(),
                                          session.GradReady(0),
                                          session.DropGradients(),
                                          session.Step(1, hyper, 0, {}, kNoTimeout).status(),
                                          session.ReadState({}, {}, kNoTimeout).status(),
                                          session.Detach()};
  for (size_t i = 0; i < results.size(); ++i) {
    if (protocol::IdOf(results[i]) != ErrorId::kForked) return static_cast<int>(i) + 1;
  }
  if (session.grad_owner(0) != nullptr) return 50;
  const bool same = std::equal(expected_weights.begin(), expected_weights.end(),
                               session.weights().begin(), session.weights().end());
  return same ? 0 : 51;
}

TEST_F(AttachmentProcess, AForkedChildIsRefusedAndHarmsNothing) {
  std::unique_ptr<Attachment> session = AttachFirst("job", 1);
  const std::vector<std::byte> weights(session->weights().begin(), session->weights().end());
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const int failed = ChecksInChild(*session, weights);
    session.reset();  // the child's end must not hang or end the parent's session
    ::_exit(failed);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  ASSERT_OK_AND_ASSIGN(const Lease lease, session->Fetch(0, kTimeout));
  EXPECT_OK(session->Release(lease));
  EXPECT_OK(session->Step(1, testing::MakeHyperParams(), 0, {}, kTimeout).status());
}

TEST_F(AttachmentProcess, AForkWhileAnotherThreadWaitsDoesNotHangTheChild) {
  std::unique_ptr<Attachment> session = AttachFirst("job", 2);
  const std::vector<std::byte> weights(session->weights().begin(), session->weights().end());
  const auto second = Attach("job", 1, 2).value();
  std::thread waiting(
      [&] { EXPECT_OK(session->Step(1, testing::MakeHyperParams(), 0, {}, kTimeout).status()); });
  EXPECT_TRUE(testing::Eventually([&] { return session->counters().commands >= 5; }));
  const pid_t child = ::fork();
  if (child == 0) {
    const int failed = ChecksInChild(*session, weights);
    session.reset();
    ::_exit(failed);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_OK(second->Step(1, testing::MakeHyperParams(), 0, {}, kTimeout).status());
  waiting.join();
}

using AttachmentProcessDeathTest = AttachmentProcess;

TEST_F(AttachmentProcessDeathTest, AWriteIntoTheWeightsIsExplained) {
  EXPECT_DEATH(
      {
        const auto session = AttachFirst("job", 1);
        InstallSegvHandler();
        auto* weights =
            reinterpret_cast<volatile char*>(const_cast<std::byte*>(session->weights().data()));
        *weights = 1;
      },
      "read-only weights of job job: parameter .*, element 0 .group 0");
}

}  // namespace
}  // namespace forebay::client
