// Goal    The daemon's own user, and nobody else, acts for another user: that one's names, and no other's jobs.
// Method  A real daemon; connections of root and of another uid.

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "client/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay {
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

}  // namespace
}  // namespace forebay
