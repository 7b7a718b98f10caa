// SPDX-License-Identifier: Apache-2.0
// Goal    Tests Attach, its waits and its errors, what remains after a detach, and the view of an administrator.
// Method  Daemon and clients are threads of one process.

#include <dirent.h>
#include <signal.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "client/internal/control.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_thread.h"
#include "tests/support/rank_threads.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::client {
namespace {

using protocol::ErrorId;
using testing::HasError;
using ::testing::HasSubstr;

constexpr Timeout kTimeout = std::chrono::seconds(60);
constexpr uint64_t kSeed = 3;

int OpenFds() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

class AttachmentTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(daemon_, testing::StartDaemonThread(socket_)); }

  AttachOptions Options(uint32_t rank, uint32_t world_size = 1) const {
    return {.socket = socket_,
            .job = "job",
            .rank = rank,
            .world_size = world_size,
            .layout = testing::MakeLayoutSpec({}),
            .memory = {.extra_state_bytes = 4096},
            .timeout = kTimeout};
  }

  // Attaches a session that has written the initial parameters.
  std::unique_ptr<Attachment> AttachFirst(uint32_t world_size = 1) {
    absl::StatusOr<std::unique_ptr<Attachment>> first = Attachment::Attach(Options(0, world_size));
    EXPECT_OK(first.status());
    if (!first.ok()) return nullptr;
    EXPECT_TRUE((*first)->writes_initial());
    EXPECT_OK(WriteAll(**first));
    return *std::move(first);
  }
  static absl::Status WriteAll(Attachment& session) {
    for (uint32_t g = 0; g < session.layout().groups().size(); ++g) {
      RETURN_IF_ERROR(
          session.WriteInitial(g, testing::MakeValues(session.layout(), g, kSeed), kTimeout));
    }
    return session.InitialDone(kTimeout);
  }
  static absl::StatusOr<StepResult> DeliverAndStep(Attachment& session, uint32_t rank, uint64_t t,
                                                   std::span<const std::byte> extra = {}) {
    for (uint32_t g = 0; g < session.layout().groups().size(); ++g) {
      ASSIGN_OR_RETURN(const auto slot, session.GradSlot(g, GradFill::kNone, kTimeout));
      const auto gradient = testing::MakeGradient(session.layout(), g, rank, t);
      std::memcpy(slot.data(), gradient.data(), gradient.size());
      RETURN_IF_ERROR(session.GradReady(g));
    }
    return session.Step(t, testing::MakeHyperParams(), 0, extra, kTimeout);
  }

  testing::TempDir dir_;
  std::string socket_ = dir_.path() + "/s";
  std::unique_ptr<daemon::Daemon> daemon_;
};

TEST_F(AttachmentTest, TwoRanksTrainToTheReferencesBits) {
  const std::unique_ptr<Attachment> first = AttachFirst(2);
  ASSERT_NE(first, nullptr);
  ASSERT_OK_AND_ASSIGN(const auto second, Attachment::Attach(Options(1, 2)));
  EXPECT_FALSE(second->writes_initial());
  testing::ReferenceTrainer reference(first->layout(), 2, kSeed);
  const std::vector<uint32_t> all{0, 1, 2};
  for (uint64_t t = 1; t <= 5; ++t) {
    absl::StatusOr<StepResult> other;
    std::thread rank1([&] { other = DeliverAndStep(*second, 1, t); });
    const absl::StatusOr<StepResult> own = DeliverAndStep(*first, 0, t);
    rank1.join();
    ASSERT_OK(own.status());
    ASSERT_OK(other.status());
    EXPECT_EQ(own->committed_step, t);
    reference.Step(t, testing::MakeHyperParams(), 0, all);
    for (const uint32_t g : all) {
      ASSERT_OK_AND_ASSIGN(const Lease lease, second->Fetch(g, kTimeout));
      const auto expected = reference.Weights(g);
      EXPECT_TRUE(
          std::equal(lease.bytes.begin(), lease.bytes.end(), expected.begin(), expected.end()))
          << "group " << g << " after step " << t;
      ASSERT_OK(second->Release(lease));
    }
  }
  EXPECT_OK(testing::CheckStates(*first, reference));
}

TEST_F(AttachmentTest, ASteadyStepMakesNoRpc) {
  const std::unique_ptr<Attachment> session = AttachFirst();
  ASSERT_NE(session, nullptr);
  ASSERT_OK(DeliverAndStep(*session, 0, 1).status());
  const Counters before = session->counters();
  ASSERT_OK(DeliverAndStep(*session, 0, 2).status());
  const Counters after = session->counters();
  EXPECT_EQ(after.rpc_calls, before.rpc_calls);
  EXPECT_EQ(after.commands, before.commands + 4);
  EXPECT_GT(after.wait_ns_step, before.wait_ns_step);
}

TEST_F(AttachmentTest, ARepeatedStepIsANoOp) {
  const std::unique_ptr<Attachment> session = AttachFirst();
  ASSERT_NE(session, nullptr);
  ASSERT_OK(DeliverAndStep(*session, 0, 1).status());
  const std::vector<std::byte> weights(session->weights().begin(), session->weights().end());
  ASSERT_OK_AND_ASSIGN(const StepResult repeated,
                       session->Step(1, testing::MakeHyperParams(), 0, {}, kTimeout));
  EXPECT_TRUE(repeated.repeated);
  EXPECT_TRUE(std::equal(weights.begin(), weights.end(), session->weights().begin()));
  EXPECT_THAT(session->Step(3, testing::MakeHyperParams(), 0, {}, kTimeout),
              HasError(ErrorId::kStep));
  EXPECT_OK(DeliverAndStep(*session, 0, 2).status());
}

TEST_F(AttachmentTest, ErrorsCarryTheDaemonsTextAndTheSessionGoesOn) {
  const std::unique_ptr<Attachment> session = AttachFirst();
  ASSERT_NE(session, nullptr);
  ASSERT_OK(session->Release({.id = 12345}));
  absl::Status reported;
  for (int i = 0; i < 100 && reported.ok(); ++i) {
    const absl::StatusOr<Lease> lease = session->Fetch(0, kTimeout);
    reported = lease.ok() ? session->Release(*lease) : lease.status();
  }
  EXPECT_THAT(reported, HasError(ErrorId::kLease));
  EXPECT_THAT(std::string(reported.message()), HasSubstr("12345"));
  EXPECT_OK(DeliverAndStep(*session, 0, 1).status());
}

TEST_F(AttachmentTest, ANonfiniteGradientIsRefusedByNameAndTheStepCanBeRepeated) {
  const std::unique_ptr<Attachment> session = AttachFirst();
  ASSERT_NE(session, nullptr);
  ASSERT_OK_AND_ASSIGN(const auto slot, session->GradSlot(1, GradFill::kZero, kTimeout));
  const uint32_t infinity = 0x7f800000;
  std::memcpy(slot.data() + 40, &infinity, 4);
  ASSERT_OK(session->GradReady(1));
  const absl::Status refused =
      session->Step(1, testing::MakeHyperParams(), 0, {}, kTimeout).status();
  EXPECT_THAT(refused, HasError(ErrorId::kNonfinite));
  EXPECT_THAT(std::string(refused.message()), HasSubstr(session->layout().spec().group_names[1]));
  EXPECT_EQ(session->committed_step(), 0U);
  EXPECT_OK(DeliverAndStep(*session, 0, 1).status());
}

TEST_F(AttachmentTest, ExtraStateComesBackWithTheStepItBelongsTo) {
  std::vector<std::byte> extra(1000);
  for (size_t i = 0; i < extra.size(); ++i) extra[i] = static_cast<std::byte>(i);
  {
    const std::unique_ptr<Attachment> session = AttachFirst();
    ASSERT_NE(session, nullptr);
    EXPECT_TRUE(session->extra_state().empty());
    ASSERT_OK_AND_ASSIGN(const Lease lease, session->Fetch(2, kTimeout));
    ASSERT_OK(session->Release(lease));
    ASSERT_OK(DeliverAndStep(*session, 0, 1, extra).status());
    ASSERT_OK(session->Detach());
  }
  ASSERT_OK_AND_ASSIGN(const auto session, Attachment::Attach(Options(0)));
  EXPECT_EQ(session->committed_step(), 1U);
  EXPECT_FALSE(session->writes_initial());
  EXPECT_TRUE(std::equal(extra.begin(), extra.end(), session->extra_state().begin(),
                         session->extra_state().end()));
  EXPECT_FALSE(session->trace().empty());
}

TEST_F(AttachmentTest, EveryRankHasItsOwnExtraStateAndRank0s) {
  const std::vector<std::byte> of_rank[] = {std::vector<std::byte>(1000, std::byte{7}),
                                            std::vector<std::byte>(30, std::byte{9})};
  {
    const std::unique_ptr<Attachment> first = AttachFirst(2);
    ASSERT_NE(first, nullptr);
    ASSERT_OK_AND_ASSIGN(const auto second, Attachment::Attach(Options(1, 2)));
    EXPECT_TRUE(second->rank0_extra_state().empty());
    absl::StatusOr<StepResult> other;
    std::thread rank1([&] { other = DeliverAndStep(*second, 1, 1, of_rank[1]); });
    EXPECT_OK(DeliverAndStep(*first, 0, 1, of_rank[0]).status());
    rank1.join();
    ASSERT_OK(other.status());
    ASSERT_OK(first->Detach());
    ASSERT_OK(second->Detach());
  }
  for (const uint32_t rank : {0U, 1U}) {
    ASSERT_OK_AND_ASSIGN(const auto session, Attachment::Attach(Options(rank, 2)));
    const auto own = session->extra_state();
    const auto rank0 = session->rank0_extra_state();
    EXPECT_TRUE(std::equal(own.begin(), own.end(), of_rank[rank].begin(), of_rank[rank].end()));
    EXPECT_TRUE(std::equal(rank0.begin(), rank0.end(), of_rank[0].begin(), of_rank[0].end()));
    ASSERT_OK(session->Detach());
  }
}

TEST_F(AttachmentTest, ASecondRankWaitsForTheParametersAndCanGiveUp) {
  ASSERT_OK_AND_ASSIGN(const auto writer, Attachment::Attach(Options(0, 2)));
  AttachOptions options = Options(1, 2);
  options.timeout = Timeout(50);
  EXPECT_THAT(Attachment::Attach(options), HasError(ErrorId::kTimeout));

  std::atomic<int> asked{0};
  options.timeout = kNoTimeout;
  options.interrupt_check = [&] { return ++asked >= 2; };
  EXPECT_THAT(Attachment::Attach(options), HasError(ErrorId::kInterrupted));

  absl::StatusOr<std::unique_ptr<Attachment>> second;
  std::thread waiting([&] { second = Attachment::Attach(Options(1, 2)); });
  EXPECT_OK(WriteAll(*writer));
  waiting.join();
  ASSERT_OK(second.status());
  EXPECT_FALSE((*second)->writes_initial());
}

TEST_F(AttachmentTest, AStepThatTimedOutGoesOnWithTheOtherRank) {
  const std::unique_ptr<Attachment> first = AttachFirst(2);
  ASSERT_NE(first, nullptr);
  ASSERT_OK_AND_ASSIGN(const auto second, Attachment::Attach(Options(1, 2)));
  const auto hyper = testing::MakeHyperParams();
  EXPECT_THAT(first->Step(1, hyper, 0, {}, Timeout(20)), HasError(ErrorId::kTimeout));
  std::thread other([&] { EXPECT_OK(DeliverAndStep(*second, 1, 1).status()); });
  EXPECT_OK(first->Step(1, hyper, 0, {}, kTimeout).status());
  other.join();
  EXPECT_EQ(first->committed_step(), 1U);
}

TEST_F(AttachmentTest, AfterDetachTheWindowStaysAndCallsAreRefused) {
  const std::unique_ptr<Attachment> session = AttachFirst();
  ASSERT_NE(session, nullptr);
  const std::vector<std::byte> weights(session->weights().begin(), session->weights().end());
  const Counters before = session->counters();
  ASSERT_OK(session->Detach());
  EXPECT_OK(session->Detach());
  EXPECT_TRUE(std::equal(weights.begin(), weights.end(), session->weights().begin()));
  EXPECT_GE(session->counters().rpc_calls, before.rpc_calls);
  std::vector<std::byte> bytes(4);
  EXPECT_THAT(session->Fetch(0, kTimeout), HasError(ErrorId::kFenced));
  EXPECT_THAT(session->Release({}), HasError(ErrorId::kFenced));
  EXPECT_THAT(session->GradSlot(0, GradFill::kZero, kTimeout), HasError(ErrorId::kFenced));
  EXPECT_THAT(session->GradReady(0), HasError(ErrorId::kFenced));
  EXPECT_THAT(session->DropGradients(), HasError(ErrorId::kFenced));
  EXPECT_THAT(session->Step(1, testing::MakeHyperParams(), 0, {}, kTimeout),
              HasError(ErrorId::kFenced));
  EXPECT_THAT(session->ReadState({}, {}, kTimeout), HasError(ErrorId::kFenced));
  EXPECT_EQ(session->grad_owner(0), nullptr);
}

TEST_F(AttachmentTest, AnOwnerOutlivesTheAttachment) {
  std::unique_ptr<Attachment> session = AttachFirst();
  ASSERT_NE(session, nullptr);
  const std::shared_ptr<const void> weights_owner = session->weights_owner();
  const std::span<const std::byte> weights = session->weights();
  ASSERT_OK_AND_ASSIGN(const auto slot, session->GradSlot(0, GradFill::kZero, kTimeout));
  const std::shared_ptr<const void> slot_owner = session->grad_owner(0);
  ASSERT_NE(slot_owner, nullptr);
  session.reset();
  const auto first = testing::MakeValues(
      *protocol::Layout::Create(testing::MakeLayoutSpec({.world_size = 1})), 0, kSeed);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), weights.begin()));
  slot.back() = std::byte{1};
}

TEST_F(AttachmentTest, NothingIsLeftOfManySessions) {
  ASSERT_OK(AttachFirst()->Detach());
  const int before = testing::Quiescent(OpenFds);
  for (int i = 0; i < 10; ++i) {
    ASSERT_OK_AND_ASSIGN(const auto session, Attachment::Attach(Options(0)));
    if (i % 2 == 0) {
      ASSERT_OK(session->Detach());
    }
    EXPECT_OK(AdminClient::Connect({.socket = socket_}).status());
    AttachOptions bad = Options(7);
    EXPECT_THAT(Attachment::Attach(bad), HasError(ErrorId::kRank));
  }
  // The daemon is in this process too. It closes its descriptors after it has seen the connections close.
  EXPECT_TRUE(testing::Eventually([&] { return OpenFds() <= before; })) << OpenFds() << before;
}

TEST_F(AttachmentTest, TheProcessKeepsItsWayWithBrokenPipes) {
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  struct sigaction before {};
  ASSERT_EQ(::sigaction(SIGPIPE, &usual, &before), 0);
  const std::unique_ptr<Attachment> session = AttachFirst();
  struct sigaction now {};
  ASSERT_EQ(::sigaction(SIGPIPE, &before, &now), 0);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
}

TEST_F(AttachmentTest, TheProcessKeepsItsWayWithBrokenPipesWhereThreadsConnectAtOnce) {
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  struct sigaction before {};
  ASSERT_EQ(::sigaction(SIGPIPE, &usual, &before), 0);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back(
          [this] { EXPECT_OK(AdminClient::Connect({.socket = socket_}).status()); });
    }
  }
  struct sigaction now {};
  ASSERT_EQ(::sigaction(SIGPIPE, &before, &now), 0);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
}

TEST_F(AttachmentTest, AnotherLayoutIsRefusedWithBoth) {
  const std::unique_ptr<Attachment> first = AttachFirst();
  ASSERT_NE(first, nullptr);
  ASSERT_OK(first->Detach());
  AttachOptions options = Options(0);
  options.layout.params[1].shape = {17};
  EXPECT_THAT(Attachment::Attach(options), HasError(ErrorId::kLayout));
  options.layout.params[1].name = options.layout.params[0].name;
  EXPECT_THAT(Attachment::Attach(options), HasError(ErrorId::kLayout));
}

TEST_F(AttachmentTest, AnotherProtocolVersionIsRefusedNamingBoth) {
  const internal::WaitLimits limits{.deadline = internal::Deadline::After(kTimeout)};
  const auto refused = internal::Control::Connect(
      {.socket = socket_, .protocol_version = protocol::kProtocolVersion + 41}, limits);
  ASSERT_THAT(refused, HasError(ErrorId::kProtocol));
  EXPECT_THAT(std::string(refused.status().message()),
              ::testing::AllOf(HasSubstr(std::to_string(protocol::kProtocolVersion + 41)),
                               HasSubstr(std::to_string(protocol::kProtocolVersion))));
  EXPECT_OK(AdminClient::Connect({.socket = socket_}).status());
}

TEST_F(AttachmentTest, AnAnswerMayBeLargerThanAnyRequest) {
  constexpr uint32_t kRanks = 16;
  constexpr size_t kRequestBytesMax = 512 << 10;
  constexpr size_t kEventBytes = 96;  // smallest size of an event with its names
  std::vector<std::unique_ptr<Attachment>> ranks;
  ranks.push_back(AttachFirst(kRanks));
  ASSERT_NE(ranks[0], nullptr);
  for (uint32_t rank = 1; rank < kRanks; ++rank) {
    ASSERT_OK_AND_ASSIGN(auto session, Attachment::Attach(Options(rank, kRanks)));
    ranks.push_back(std::move(session));
  }
  const auto train = [&](uint32_t rank) -> absl::Status {
    for (uint64_t i = 0; i < protocol::kTraceRecords; ++i) {
      ASSIGN_OR_RETURN(const Lease lease, ranks[rank]->Fetch(0, kTimeout));
      RETURN_IF_ERROR(ranks[rank]->Release(lease));
    }
    return DeliverAndStep(*ranks[rank], rank, 1).status();
  };
  for (const absl::Status& status : testing::OnRanks(kRanks, train)) EXPECT_OK(status);
  ASSERT_OK_AND_ASSIGN(const auto admin, AdminClient::Connect({.socket = socket_}));
  ASSERT_OK_AND_ASSIGN(const Trace trace, admin->Trace("job"));
  EXPECT_GT(trace->getEvents().size() * kEventBytes, kRequestBytesMax);
  EXPECT_GE(trace->getEvents().size(), kRanks * protocol::kTraceRecords);
  for (const auto& session : ranks) EXPECT_OK(session->Detach());
}

TEST_F(AttachmentTest, AStoppedDaemonEndsABlockedCall) {
  const std::unique_ptr<Attachment> session = AttachFirst(2);
  ASSERT_NE(session, nullptr);
  std::thread stopper([&] { daemon_->Stop(); });
  EXPECT_THAT(session->Step(1, testing::MakeHyperParams(), 0, {}, kNoTimeout),
              HasError(ErrorId::kDaemonGone));
  stopper.join();
  EXPECT_THAT(session->Detach(), HasError(ErrorId::kDaemonGone));
}

TEST_F(AttachmentTest, AnAdministratorSeesAndDeletesAJob) {
  const std::unique_ptr<Attachment> session = AttachFirst();
  ASSERT_NE(session, nullptr);
  ASSERT_OK(DeliverAndStep(*session, 0, 1).status());
  ASSERT_OK_AND_ASSIGN(const auto admin, AdminClient::Connect({.socket = socket_}));
  ASSERT_OK_AND_ASSIGN(const NodeStatus status, admin->Status());
  EXPECT_EQ(status->getInfo().getPid(), static_cast<uint32_t>(::getpid()));
  EXPECT_EQ(status->getSocketPath().cStr(), socket_);
  ASSERT_EQ(status->getJobs().size(), 1U);
  EXPECT_EQ(status->getJobs()[0].getName(), "job");
  EXPECT_EQ(status->getJobs()[0].getCommittedStep(), 1U);
  const std::vector<std::string>& groups = session->layout().spec().group_names;
  ASSERT_EQ(status->getJobs()[0].getGroups().size(), groups.size());
  for (uint32_t g = 0; g < groups.size(); ++g) {
    EXPECT_EQ(status->getJobs()[0].getGroups()[g].cStr(), groups[g]);
  }
  EXPECT_GT(status->getMemory().getUsedBytes(), session->layout().weights_bytes());
  EXPECT_EQ(status->getMemory().getLimitBytes(), uint64_t{512} << 20);
  EXPECT_GT(status->getMemory().getArenas().size(), 0U);
  ASSERT_OK_AND_ASSIGN(const auto events, admin->Trace("job"));
  EXPECT_GT(events->getEvents().size(), 0U);
  EXPECT_THAT(admin->Trace("nobody").status(), ::testing::Not(HasError(ErrorId::kNone)));
  EXPECT_FALSE(admin->DeleteJob("job").ok());
  ASSERT_OK(session->Detach());
  EXPECT_OK(admin->DeleteJob("job"));
  ASSERT_OK_AND_ASSIGN(const NodeStatus after, admin->Status());
  EXPECT_EQ(after->getJobs().size(), 0U);
}

TEST(AttachmentWithoutDaemon, SaysHowToStartOne) {
  const testing::TempDir dir;
  const absl::Status none = AdminClient::Connect({.socket = dir.path() + "/s"}).status();
  EXPECT_THAT(none, HasError(ErrorId::kNoDaemon));
  EXPECT_THAT(protocol::HintOf(none), HasSubstr("forebay run"));
  EXPECT_THAT(AdminClient::Connect({.socket = dir.Write("file", "")}),
              HasError(ErrorId::kNoDaemon));
  EXPECT_THAT(AdminClient::Connect({.socket = std::string(200, 'x')}),
              HasError(ErrorId::kNoDaemon));
}

}  // namespace
}  // namespace forebay::client
