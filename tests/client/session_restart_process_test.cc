// SPDX-License-Identifier: Apache-2.0
// Goal    A session whose daemon announces its restart asks the next daemon on the socket for the same job and memory. The
//         session ends if that daemon does not have them, or if no daemon starts in time.
// Method  A real forebayd. The test writes the announcement of a restart into the ring and kills the daemon. The next daemon
//         does not know the job, so the session must end.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/wire.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::client {
namespace {

using protocol::ErrorId;
using testing::DaemonProcess;
using testing::HasError;
using ::testing::HasSubstr;

constexpr Timeout kTimeout = std::chrono::seconds(60);

// Finds the ring of this process's only session: the mapping that begins with the ring's magic number.
protocol::RingMemory* FindRing() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") == std::string::npos || line.find(" rw-s ") == std::string::npos) {
      continue;
    }
    auto* const memory =
        reinterpret_cast<protocol::RingMemory*>(std::stoull(line, nullptr, /*base=*/16));
    if (memory->header.magic == protocol::kRingMagic) return memory;
  }
  return nullptr;
}

class SessionRestartProcess : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_)); }

  absl::StatusOr<std::unique_ptr<Attachment>> Attach(std::optional<Timeout> daemon_wait) {
    return Attachment::Attach({.socket = socket_,
                               .job = "job",
                               .durability = {.daemon_wait = daemon_wait},
                               .layout = testing::MakeLayoutSpec({.world_size = 1}),
                               .timeout = kTimeout});
  }
  void AttachAndTrain(std::optional<Timeout> daemon_wait) {
    ASSERT_OK_AND_ASSIGN(session_, Attach(daemon_wait));
    for (uint32_t g = 0; g < session_->layout().groups().size(); ++g) {
      ASSERT_OK(session_->WriteInitial(g, testing::MakeValues(session_->layout(), g, 1), kTimeout));
    }
    ASSERT_OK(session_->InitialDone(kTimeout));
  }
  void EndDaemonToRestartIt() {
    protocol::RingMemory* const ring = FindRing();
    ASSERT_NE(ring, nullptr);
    std::atomic_ref<uint32_t>(ring->completion_tail.closed)
        .store(static_cast<uint32_t>(protocol::ChannelState::kRestarting));
    daemon_->Kill();
  }

  testing::TempDir dir_;
  std::string socket_ = dir_.path() + "/s";
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Attachment> session_;
};

TEST_F(SessionRestartProcess, ADaemonThatKnowsNothingOfTheJobEndsTheSession) {
  AttachAndTrain(kTimeout);
  const uint64_t calls = session_->counters().rpc_calls;
  EndDaemonToRestartIt();
  ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_));
  const absl::Status gone = session_->Fetch(0, kTimeout).status();
  EXPECT_THAT(gone, HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(std::string(gone.message()), HasSubstr("the daemon was restarted"));
  EXPECT_THAT(session_->Exchange("x", kTimeout), HasError(ErrorId::kDaemonGone));
  EXPECT_GE(session_->counters().rpc_calls, calls);
  EXPECT_FALSE(session_->weights().empty()) << "still mapped";
}

TEST_F(SessionRestartProcess, NoDaemonWithinTheTimeEndsTheSession) {
  ::setenv("FOREBAY_DAEMON_WAIT", "0.2", 1);
  AttachAndTrain(std::nullopt);
  EndDaemonToRestartIt();
  const absl::Status gone = session_->Step(1, testing::MakeHyperParams(), 0, {}, kTimeout).status();
  EXPECT_THAT(gone, HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(std::string(gone.message()), HasSubstr("within 0.2"));
  ::unsetenv("FOREBAY_DAEMON_WAIT");
}

TEST_F(SessionRestartProcess, AWaitThatIsNoNumberIsRefused) {
  for (const char* const wrong : {"soon", "-1", "nan", "60s"}) {
    ::setenv("FOREBAY_DAEMON_WAIT", wrong, 1);
    EXPECT_THAT(Attach(std::nullopt), HasError(ErrorId::kOption)) << wrong;
  }
  ::setenv("FOREBAY_DAEMON_WAIT", "inf", 1);
  EXPECT_OK(Attach(std::nullopt).status());
  ::unsetenv("FOREBAY_DAEMON_WAIT");
}

TEST_F(SessionRestartProcess, ADetachDoesNotWaitForADaemon) {
  AttachAndTrain(kTimeout);
  EndDaemonToRestartIt();
  EXPECT_OK(session_->Detach());
}

}  // namespace
}  // namespace forebay::client
