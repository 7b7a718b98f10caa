// SPDX-License-Identifier: Apache-2.0
// Goal    Only the daemon's own user may act on behalf of another user, and then has that user's job names, and no access to
//         other users' jobs. After such a connection is lost, only its rank can resume the session, and only within the agreed
//         time.
// Method  A real daemon, with connections of root and of another uid.

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "client/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/os/status_macros.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::on_behalf_process_test {
namespace {

using protocol::ErrorId;
using testing::DaemonProcess;
using testing::HasError;
using testing::RawSession;

constexpr int64_t kUid = 2001;
constexpr uid_t kNobody = 65534;

class OnBehalf : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can act for another uid";
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket(), {"socket.mode=0666"}));
    ASSERT_EQ(::chmod(dir_.path().c_str(), 0755), 0);
  }
  std::string socket() const { return dir_.path() + "/s"; }

  testing::TempDir dir_;
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(OnBehalf, AJobIsTheUsersForWhomTheConnectionActs) {
  ASSERT_OK_AND_ASSIGN(const auto session, RawSession::Connect(socket()));
  ASSERT_OK(session->HelloOnBehalfOf(kUid));
  ASSERT_OK(session->Attach({}, testing::MakeLayoutSpec({.world_size = 1})));
  ASSERT_OK_AND_ASSIGN(const auto admin, client::AdminClient::Connect({.socket = socket()}));
  ASSERT_OK_AND_ASSIGN(const auto status, admin->Status());
  ASSERT_EQ(status->getJobs().size(), 1u);
  EXPECT_EQ(status->getJobs()[0].getUid(), kUid);
}

TEST_F(OnBehalf, NobodyActsForRootOrTwice) {
  {
    ASSERT_OK_AND_ASSIGN(const auto root, RawSession::Connect(socket()));
    EXPECT_THAT(root->HelloOnBehalfOf(0), HasError(ErrorId::kPermission));
  }
  ASSERT_OK_AND_ASSIGN(const auto twice, RawSession::Connect(socket()));
  ASSERT_OK(twice->HelloOnBehalfOf(kUid));
  EXPECT_THAT(twice->HelloOnBehalfOf(kUid + 1), HasError(ErrorId::kPermission));
}

TEST_F(OnBehalf, AnotherUserActsForNobody) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(dir_.path());  // another user may not walk to it
  ASSERT_EQ(::seteuid(kNobody), 0);
  const auto session = RawSession::Connect("s");
  const absl::Status refused = session.ok() ? (*session)->HelloOnBehalfOf(kUid) : session.status();
  const absl::Status attached =
      session.ok() ? (*session)->Attach({}, testing::MakeLayoutSpec({.world_size = 1}))
                   : session.status();
  ASSERT_EQ(::seteuid(0), 0);
  std::filesystem::current_path(before);
  EXPECT_THAT(refused, HasError(ErrorId::kPermission));
  EXPECT_THAT(attached, HasError(ErrorId::kProtocol));
}

class OnBehalfAway : public OnBehalf {
 protected:
  static constexpr uint32_t kLongMs = 60'000;

  void SetUp() override {
    OnBehalf::SetUp();
    if (!IsSkipped()) rank_ = Attached(kLongMs);
  }

  absl::StatusOr<std::unique_ptr<RawSession>> Connected(int64_t uid, uint32_t wait_ms) {
    ASSIGN_OR_RETURN(auto session, RawSession::Connect(socket()));
    RETURN_IF_ERROR(session->HelloOnBehalfOf(uid, wait_ms));
    return session;
  }

  // Attaches a rank with a new session, and makes its job ready.
  std::unique_ptr<RawSession> Attached(uint32_t wait_ms) {
    auto session = Connected(kUid, wait_ms);
    EXPECT_OK(session.status());
    EXPECT_OK((*session)->Attach({}, layout_));
    EXPECT_OK((*session)->Map());
    if ((*session)->reply().getWritesInitial()) WriteInitial(**session);
    struct stat info {};
    EXPECT_EQ(::fstat((*session)->grad_fd(), &info), 0);
    inode_ = info.st_ino;
    return *std::move(session);
  }

  void WriteInitial(RawSession& session) {
    const auto layout = protocol::Layout::Create(layout_);
    ASSERT_OK(layout.status());
    for (uint32_t i = 0; i < layout->partitions().size(); ++i) {
      protocol::Command write{};
      write.op = static_cast<uint16_t>(protocol::Op::kWriteInitial);
      write.partition = i;
      write.length_bytes = layout->partition_bytes(i);
      ASSERT_OK(session.Ask(write));
    }
    protocol::Command done{};
    done.op = static_cast<uint16_t>(protocol::Op::kInitialDone);
    ASSERT_OK(session.Ask(done));
  }

  // Reattaches, checks the session and disconnects. Returns the first error. Uses a new thread, because a thread has one
  // RawSession.
  absl::Status Back(const testing::RawAttach& attach, int64_t uid = kUid,
                    const std::optional<protocol::LayoutSpec>& layout = {}) {
    absl::Status result;
    std::thread([&] { result = BackHere(attach, uid, layout.value_or(layout_)); }).join();
    return result;
  }
  absl::Status BackHere(const testing::RawAttach& attach, int64_t uid,
                        const protocol::LayoutSpec& layout) {
    ASSIGN_OR_RETURN(const auto session, Connected(uid, kLongMs));
    RETURN_IF_ERROR(session->Attach(attach, layout));
    RETURN_IF_ERROR(session->Map());
    struct stat info {};
    if (::fstat(session->grad_fd(), &info) != 0 || info.st_ino != attach.reattach_to) {
      return absl::InternalError("another gradient arena");
    }
    return session->Ask(Check());
  }
  static protocol::Command Check() {
    protocol::Command check{};
    check.op = static_cast<uint16_t>(protocol::Op::kCheck);
    return check;
  }

  uint32_t Sessions() {
    const auto admin = client::AdminClient::Connect({.socket = socket()});
    EXPECT_OK(admin.status());
    const auto status = (*admin)->Status();
    EXPECT_OK(status.status());
    return (*status)->getJobs().size() == 0 ? 0 : (*status)->getJobs()[0].getSessions();
  }
  bool BecomesEmpty() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (Sessions() > 0 && std::chrono::steady_clock::now() < end) {
      // house: allow sleep: a poll with a deadline
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return Sessions() == 0;
  }

  const protocol::LayoutSpec layout_ = testing::MakeLayoutSpec({.world_size = 1});
  std::unique_ptr<RawSession> rank_;
  uint64_t inode_ = 0;
};

TEST_F(OnBehalfAway, ItsRankGoesOn) {
  rank_.reset();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Sessions(), 1U);
    EXPECT_OK(Back({.reattach_to = inode_}));
  }
}

TEST_F(OnBehalfAway, WhoIsLostOnTheWayBackMayTryAgain) {
  rank_.reset();
  std::thread([this] {
    const auto session = Connected(kUid, kLongMs);
    ASSERT_OK(session.status());
    ASSERT_OK((*session)->Attach({.reattach_to = inode_}, layout_));
  }).join();
  EXPECT_OK(Back({.reattach_to = inode_}));
}

TEST_F(OnBehalfAway, ItsRankGoesOnWhereNobodyHasNoticedYet) {
  EXPECT_OK(Back({.reattach_to = inode_}));
  EXPECT_FALSE(rank_->Call(Check()).ok()) << "of the connection before nothing is taken";
  EXPECT_OK(rank_->End());
  EXPECT_EQ(Sessions(), 1U) << "nor heard";
  EXPECT_OK(Back({.reattach_to = inode_}));
}

TEST_F(OnBehalfAway, NobodyElseTakesItsPlace) {
  rank_.reset();
  EXPECT_THAT(Back({.reattach_to = inode_ + 1}), HasError(ErrorId::kRankLost)) << "another arena";
  rank_ = Attached(kLongMs);
  rank_.reset();
  EXPECT_THAT(Back({.run = "other", .reattach_to = inode_}), HasError(ErrorId::kJobExists));
  EXPECT_FALSE(Back({.reattach_to = inode_}, kUid + 1).ok()) << "another user";
  const protocol::LayoutSpec other = testing::MakeLayoutSpec({.world_size = 1, .groups = 2});
  EXPECT_THAT(Back({.reattach_to = inode_}, kUid, other), HasError(ErrorId::kLayout));
  EXPECT_OK(Back({.reattach_to = inode_})) << "and it is waited for still";
}

TEST_F(OnBehalfAway, ItIsWaitedForAsLongAsWasAgreed) {
  rank_.reset();
  rank_ = Attached(200);
  rank_.reset();
  EXPECT_TRUE(BecomesEmpty());
  EXPECT_THAT(Back({.reattach_to = inode_}), HasError(ErrorId::kRankLost));
}

TEST_F(OnBehalfAway, WhoSaysThatItEndsIsNotWaitedFor) {
  EXPECT_OK(rank_->End());
  EXPECT_TRUE(BecomesEmpty());
}

TEST_F(OnBehalfAway, ADaemonThatStopsWaitsForNobody) {
  rank_.reset();
  EXPECT_EQ(daemon_->Stop().exit_code, 0);
}

}  // namespace
}  // namespace forebay::on_behalf_process_test
