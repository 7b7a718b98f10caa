// Goal    The descriptor of a peer stands for the process that connected, never for another that got
//         its number: where that process has ended there is none.
// Method  A child connects and ends, with the kernel's own descriptor and with the number alone.

#include "protocol/os/pidfd.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "gtest/gtest.h"

namespace forebay::protocol {
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
  // The number of a live process in place of the dead one's: as where it was given out again.
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

}  // namespace
}  // namespace forebay::protocol
