// SPDX-License-Identifier: Apache-2.0
// Goal    A refused client gets the reason, and its socket stays open for a while. One user's many refused connections do not
//         close another user's socket. If no descriptor is free, no socket is held open.
// Method  Simulated time, and socket pairs instead of accepted connections.

#include "daemon/control/refused_clients.h"

#include <kj/async.h>
#include <kj/timer.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "daemon/control/client_log.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/daemon_process.h"
#include "tests/support/sanitized.h"

namespace forebay::daemon {
namespace {

using protocol::UniqueFd;

class RefusedClientsTest : public ::testing::Test {
 protected:
  RefusedClientsTest() : wait_scope_(loop_), timer_(kj::origin<kj::TimePoint>()), log_(timer_) {}
  ~RefusedClientsTest() noexcept override = default;

  // The client's end of a refused connection.
  UniqueFd Refuse(uint32_t uid) {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    refused_.Refuse(uid, UniqueFd(ends[0]),
                    protocol::MakeError(protocol::ErrorId::kLimit, "too many", "end some"));
    return UniqueFd(ends[1]);
  }

  static bool IsClosed(const UniqueFd& client) {
    pollfd fd{.fd = client.get(), .events = 0, .revents = 0};
    return ::poll(&fd, 1, 0) == 1 && (fd.revents & POLLHUP) != 0;
  }

  // Waits until another thread has closed the daemon's end.
  static bool Closes(const UniqueFd& client) {
    return testing::Eventually([&] { return IsClosed(client); });
  }

  void Pass(kj::Duration time) {
    timer_.advanceTo(timer_.now() + time);
    wait_scope_.poll();
  }

  kj::EventLoop loop_;
  kj::WaitScope wait_scope_;
  kj::TimerImpl timer_;
  ClientLog log_;
  RefusedClients refused_{timer_, log_};
};

TEST_F(RefusedClientsTest, HearWhyAndAreClosedASecondLater) {
  const UniqueFd client = Refuse(1);
  Pass(999 * kj::MILLISECONDS);
  std::array<char, 512> bytes{};
  const ssize_t got = ::recv(client.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  ASSERT_GT(got, 0);
  EXPECT_THAT(std::string(bytes.data(), static_cast<size_t>(got)),
              ::testing::HasSubstr("error[E_LIMIT]: too many"));
  EXPECT_FALSE(IsClosed(client));
  Pass(1 * kj::MILLISECONDS);
  EXPECT_TRUE(Closes(client));
}

TEST_F(RefusedClientsTest, OfOneUserDoNotCloseAnothersSocket) {
  const UniqueFd other = Refuse(1);
  std::vector<UniqueFd> flood;
  for (size_t i = 0; i < RefusedClients::kHeldMax; ++i) flood.push_back(Refuse(2));
  const size_t closed = flood.size() - RefusedClients::kHeldPerUidMax;
  for (size_t i = 0; i < closed; ++i) ASSERT_TRUE(Closes(flood[i])) << i;
  for (size_t i = closed; i < flood.size(); ++i) EXPECT_FALSE(IsClosed(flood[i])) << i;
  EXPECT_FALSE(IsClosed(other));
}

TEST_F(RefusedClientsTest, OfManyUsersCloseTheOldest) {
  std::vector<UniqueFd> clients;
  for (uint32_t uid = 0; uid <= RefusedClients::kHeldMax; ++uid) clients.push_back(Refuse(uid));
  EXPECT_TRUE(Closes(clients[0]));
  for (size_t i = 1; i < clients.size(); ++i) EXPECT_FALSE(IsClosed(clients[i])) << i;
}

TEST_F(RefusedClientsTest, AreClosedAtOnceWhereNoDescriptorIsLeft) {
  if (testing::kAddressSanitized) GTEST_SKIP() << "the sanitizer looks at objects with descriptors";
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const UniqueFd client(ends[1]);
  const absl::Status why = protocol::MakeError(protocol::ErrorId::kLimit, "too many", "end some");
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {0, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  refused_.Refuse(1, UniqueFd(ends[0]), why);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(Closes(client));
}

}  // namespace
}  // namespace forebay::daemon
