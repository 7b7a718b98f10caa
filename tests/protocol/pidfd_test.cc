// SPDX-License-Identifier: Apache-2.0
// Goal    A peer's descriptor refers to the process that connected, never to another process that received its pid later. A
//         peer that has ended has no descriptor. A descriptor finds the data of its process in /proc.
// Method  A child connects and ends, with the kernel's peer descriptor and with the pid alone. A child is stopped, continued
//         and killed.

#include "protocol/os/pidfd.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <optional>

#include "gtest/gtest.h"

namespace forebay::protocol::pidfd_test {
namespace {

class Peer : public ::testing::TestWithParam<PeerPidfdSource> {};

TEST_P(Peer, ThatLivesHasADescriptorThatIsReadableAfterItsEnd) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const UniqueFd ours(ends[0]);
  const UniqueFd theirs(ends[1]);
  const UniqueFd self = PeerPidfd(ours.get(), ::getpid(), GetParam());
  ASSERT_TRUE(self.valid());
  pollfd fd{.fd = self.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&fd, 1, 0), 0);
}

TEST_P(Peer, ThatHasEndedHasNone) {
  std::array<int, 2> ends{};
  const pid_t child = [&] {
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    return ::fork();
  }();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(0);
  const UniqueFd ours(ends[0]);
  UniqueFd theirs(ends[1]);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  theirs.Reset();
  // Passes the pid of a live process instead of the ended one, as if the pid had been reused.
  if (GetParam() == PeerPidfdSource::kPidOnly) {
    EXPECT_FALSE(PeerPidfd(ours.get(), ::getpid(), GetParam()).valid());
  }
  EXPECT_FALSE(PeerPidfd(ours.get(), child, PeerPidfdSource::kPidOnly).valid());
}

INSTANTIATE_TEST_SUITE_P(Both, Peer,
                         ::testing::Values(PeerPidfdSource::kKernel, PeerPidfdSource::kPidOnly),
                         [](const ::testing::TestParamInfo<PeerPidfdSource>& one) {
                           return one.param == PeerPidfdSource::kKernel ? "Kernel" : "PidOnly";
                         });

// A child that waits for a signal, in a new process group.
class ShownProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    child_ = ::fork();
    ASSERT_GE(child_, 0);
    if (child_ == 0) {
      for (;;) ::pause();
    }
    ASSERT_EQ(::setpgid(child_, child_), 0);
    pidfd_ = OpenPidfd(child_);
    ASSERT_TRUE(pidfd_.valid());
  }
  void TearDown() override {
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }
  // Sends a signal and waits until the kernel reports its effect.
  void Signal(int number, int event) const {
    ASSERT_EQ(::kill(child_, number), 0);
    siginfo_t info{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child_), &info, event | WNOWAIT), 0);
  }

  pid_t child_ = 0;
  UniqueFd pidfd_;
};

TEST_F(ShownProcess, HasItsNumberItsParentAndItsGroup) {
  const std::optional<ProcessInfo> info = ReadProcess(pidfd_.get());
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->pid, child_);
  EXPECT_EQ(info->parent, ::getpid());
  EXPECT_EQ(info->group, child_);
  EXPECT_TRUE(info->is_running);
}

TEST_F(ShownProcess, DoesNotRunWhileItIsStopped) {
  Signal(SIGSTOP, WSTOPPED);
  const std::optional<ProcessInfo> stopped = ReadProcess(pidfd_.get());
  ASSERT_TRUE(stopped.has_value());
  EXPECT_FALSE(stopped->is_running);
  Signal(SIGCONT, WCONTINUED);
  const std::optional<ProcessInfo> again = ReadProcess(pidfd_.get());
  ASSERT_TRUE(again.has_value());
  EXPECT_TRUE(again->is_running);
}

TEST_F(ShownProcess, IsNoneOnceItHasEnded) {
  Signal(SIGKILL, WEXITED);  // the child is not reaped yet
  EXPECT_FALSE(ReadProcess(pidfd_.get()).has_value());
  ASSERT_EQ(::waitpid(child_, nullptr, 0), child_);
  child_ = 0;
  EXPECT_FALSE(ReadProcess(pidfd_.get()).has_value());
}

TEST_F(ShownProcess, IsNotReadByAnotherDescriptor) {
  EXPECT_FALSE(ReadProcess(-1).has_value());
  EXPECT_FALSE(ReadProcess(STDIN_FILENO).has_value());
}

}  // namespace
}  // namespace forebay::protocol::pidfd_test
