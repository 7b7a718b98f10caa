// SPDX-License-Identifier: Apache-2.0
// Goal    A client cannot block the daemon with a descriptor: not with a full doorbell, not with a descriptor whose close
//         blocks, and not with one that the daemon never receives. A user with too many connections gets an error about the
//         limit; no other user does, and the log does not fill up.
// Method  A raw client attacks a real daemon. After each attack a healthy job of the same daemon trains.

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/admin.h"
#include "daemon/control/control_plane.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/ring.h"
#include "tests/support/attacked_daemon.h"
#include "tests/support/raw_session.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::daemon::hostile_descriptors_process_test {
namespace {

using protocol::Command;
using protocol::Op;
using protocol::UniqueFd;
using testing::RawSession;

class HostileDescriptors : public testing::AttackedDaemon {
 protected:
  using AttackedDaemon::AttackedDaemon;

  // Stops the daemon, so that a descriptor sent to it can lose its last other holder before the daemon receives it.
  void StopDaemon() { ASSERT_EQ(::kill(daemon_->pid(), SIGSTOP), 0); }
  void ContinueDaemon() { ASSERT_EQ(::kill(daemon_->pid(), SIGCONT), 0); }
};

// Makes every later write to the doorbell block, as far as the client can.
void Fill(int doorbell) {
  ASSERT_EQ(::fcntl(doorbell, F_SETFL, O_NONBLOCK), 0);
  const uint64_t most = ~uint64_t{0} - 1;
  while (::write(doorbell, &most, sizeof(most)) > 0) {
  }
  ASSERT_EQ(::fcntl(doorbell, F_SETFL, 0), 0);
}

TEST_F(HostileDescriptors, AFullBlockingDoorbellDoesNotBlockTheLoop) {
  constexpr uint64_t kCommands = 2 * protocol::kRingEntries;
  ASSERT_OK_AND_ASSIGN(auto raw, RawSession::Connect(socket_));
  ASSERT_OK(raw->Hello());
  ASSERT_OK(raw->Attach({.job = "attacker"}, testing::MakeLayoutSpec({.world_size = 1})));
  ASSERT_OK(raw->Map());
  for (const auto kind :
       {schema::Session::Kind::COMPLETION_DOORBELL, schema::Session::Kind::COMMAND_DOORBELL}) {
    ASSERT_OK_AND_ASSIGN(const UniqueFd doorbell, raw->Descriptor(kind));
    Fill(doorbell.get());
  }
  // The client claims to sleep, and never reads its doorbell.
  protocol::RingMemory& ring = raw->ring();
  uint64_t head = 0;
  for (uint64_t sent = 0; sent < kCommands; ++sent) {
    protocol::internal::StoreWord<uint32_t>(ring.completion_head.sleeping, 1,
                                            std::memory_order_seq_cst);
    Command command{};
    command.op = static_cast<uint16_t>(Op::kFetch);
    protocol::internal::StoreEntry(ring.commands[sent % protocol::kRingEntries], command);
    protocol::internal::StoreWord(ring.command_tail.index, sent + 1, std::memory_order_seq_cst);
    Fill(raw->command_doorbell_fd());
    ASSERT_TRUE(testing::Eventually([&] {
      head = protocol::internal::LoadWord(ring.completion_tail.index, std::memory_order_seq_cst);
      return head == sent + 1;
    })) << "after "
        << sent << " commands";
    protocol::internal::StoreWord(ring.completion_head.index, head, std::memory_order_seq_cst);
  }
}

constexpr int kLingerSeconds = 120;  // longer than any call of this test may take

// A TCP connection whose other end never reads: its close waits for kLingerSeconds.
class LingeringSocket {
 public:
  LingeringSocket() {
    const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    socklen_t length = sizeof(address);
    EXPECT_EQ(::bind(listener.get(), generic, length), 0);
    EXPECT_EQ(::listen(listener.get(), 1), 0);
    EXPECT_EQ(::getsockname(listener.get(), generic, &length), 0);
    ours_.Reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    (void)::connect(ours_.get(), generic, length);
    silent_.Reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::vector<char> bytes(1 << 20);
    while (::send(ours_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) {
    }
    const linger wait{.l_onoff = 1, .l_linger = kLingerSeconds};
    EXPECT_EQ(::setsockopt(ours_.get(), SOL_SOCKET, SO_LINGER, &wait, sizeof(wait)), 0);
    EXPECT_EQ(::fcntl(ours_.get(), F_SETFL, 0), 0);
  }

  int fd() const { return ours_.get(); }
  // Closes this process's descriptor. The next holder to close the socket is the last one, and its close blocks.
  void LeaveToOthers() { ours_.Reset(); }

 private:
  UniqueFd ours_;
  UniqueFd silent_;
};

UniqueFd ConnectTo(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    fd.Reset();
  }
  return fd;
}

// Sends `bytes`, with `copies` duplicates of a descriptor at the first byte.
void SendWith(int socket, const std::string& bytes, int fd, int copies) {
  iovec piece{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  std::vector<char> control(CMSG_SPACE(static_cast<size_t>(copies) * sizeof(int)));
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* one = CMSG_FIRSTHDR(&message);
  one->cmsg_level = SOL_SOCKET;
  one->cmsg_type = SCM_RIGHTS;
  one->cmsg_len = CMSG_LEN(static_cast<size_t>(copies) * sizeof(int));
  for (int i = 0; i < copies; ++i) {
    std::memcpy(CMSG_DATA(one) + static_cast<size_t>(i) * sizeof(int), &fd, sizeof(int));
  }
  // The daemon may already have closed refused connections.
  (void)::sendmsg(socket, &message, MSG_NOSIGNAL);
}

// Header of a message with one segment of four words. The words are never sent.
const std::string kHeader("\0\0\0\0\4\0\0\0", 8);
const std::string kImpossibleHeader(8, '\xFF');

enum class Sent { kWithTheFirstByte, kManyAtOnce, kWithALaterByte, kNeverReceived };

class BlockingClose : public HostileDescriptors, public ::testing::WithParamInterface<Sent> {};

TEST_P(BlockingClose, OfADescriptorBeforeHelloLeavesOthersServed) {
  LingeringSocket lingering;
  StopDaemon();
  {
    const UniqueFd connection = ConnectTo(socket_);
    ASSERT_TRUE(connection.valid());
    switch (GetParam()) {
      case Sent::kWithTheFirstByte:
        SendWith(connection.get(), kHeader, lingering.fd(), 1);
        break;
      case Sent::kManyAtOnce:
        SendWith(connection.get(), kHeader, lingering.fd(), 50);
        break;
      case Sent::kWithALaterByte:
        ASSERT_EQ(::send(connection.get(), kHeader.data(), 8, 0), 8);
        SendWith(connection.get(), "x", lingering.fd(), 1);
        break;
      case Sent::kNeverReceived:
        ASSERT_EQ(::send(connection.get(), kImpossibleHeader.data(), 8, 0), 8);
        SendWith(connection.get(), "x", lingering.fd(), 1);
        break;
    }
    lingering.LeaveToOthers();
    ContinueDaemon();
    ASSERT_OK_AND_ASSIGN(auto beside, RawSession::Connect(socket_));
    EXPECT_OK(beside->Hello());
  }
  ASSERT_OK_AND_ASSIGN(auto after, RawSession::Connect(socket_));
  EXPECT_OK(after->Hello());
}

INSTANTIATE_TEST_SUITE_P(Ways, BlockingClose,
                         ::testing::Values(Sent::kWithTheFirstByte, Sent::kManyAtOnce,
                                           Sent::kWithALaterByte, Sent::kNeverReceived));

// The daemon has few descriptors. The clients are another user.
class ConnectionLimit : public HostileDescriptors {
 protected:
  static constexpr uint64_t kDescriptorsMax = 1024;
  static constexpr uid_t kNobody = 65534;
  // Path of the socket, relative to the working directory.
  static constexpr const char* kSocketHere = "s";
  const std::filesystem::path before_ = std::filesystem::current_path();

  ConnectionLimit()
      : HostileDescriptors([] {
          const rlimit limit = {kDescriptorsMax, kDescriptorsMax};
          (void)::setrlimit(RLIMIT_NOFILE, &limit);
        }) {}

  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can act for another uid";
    HostileDescriptors::SetUp();
    ASSERT_EQ(::chmod(socket_.c_str(), 0666), 0);
    ASSERT_EQ(::chmod(dir_.path().c_str(), 0755), 0);
    std::filesystem::current_path(dir_.path());  // another user may not walk to it
  }

  void TearDown() override {
    if (IsSkipped()) return;
    std::filesystem::current_path(before_);
    HostileDescriptors::TearDown();
    const std::string refused = "uid 65534: process ";
    const size_t line = log_.find(refused);
    EXPECT_NE(line, std::string::npos);
    EXPECT_EQ(log_.find(refused, line + 1), std::string::npos) << "others are counted alone";
  }

  static constexpr uint32_t kMax = ConnectionsPerUidMax(kDescriptorsMax);
  static_assert(kMax < kConnectionsPerUidMax);
};

// Changes the effective uid to `uid` for the lifetime of the object.
class AsUser {
 public:
  explicit AsUser(uid_t uid) { EXPECT_EQ(::seteuid(uid), 0); }
  AsUser(const AsUser&) = delete;
  AsUser& operator=(const AsUser&) = delete;
  ~AsUser() { EXPECT_EQ(::seteuid(0), 0); }
};

TEST_F(ConnectionLimit, IsNamedToTheUserWhoMeetsItAndLoggedOnce) {
  std::vector<std::unique_ptr<client::AdminClient>> theirs;
  std::vector<std::unique_ptr<client::AdminClient>> ours;
  const auto connect = [&](auto& clients) -> absl::Status {
    ASSIGN_OR_RETURN(auto client, client::AdminClient::Connect({.socket = kSocketHere}));
    clients.push_back(std::move(client));
    return absl::OkStatus();
  };
  {
    const AsUser nobody(kNobody);
    for (uint32_t i = 0; i < kMax; ++i) ASSERT_OK(connect(theirs));
    const std::string numbers =
        absl::StrCat("user 65534 has ", kMax, " connections to the daemon (at most ", kMax, ")");
    for (int i = 0; i < 100; ++i) {
      const absl::Status refused = connect(theirs);
      ASSERT_THAT(refused, testing::HasError(protocol::ErrorId::kLimit));
      EXPECT_EQ(refused.message(), numbers);
      EXPECT_THAT(protocol::HintOf(refused), ::testing::HasSubstr("raise LimitNOFILE="));
    }
    logged_ = {"error[E_LIMIT]: " + numbers + "\nhint: "};
  }
  for (uint32_t i = 0; i < kMax + 1; ++i) ASSERT_OK(connect(ours)) << "root, after " << i;
  theirs.clear();
  const AsUser nobody(kNobody);
  EXPECT_TRUE(testing::Eventually([&] { return connect(theirs).ok(); })) << "they have none now";
}

// Every connection that the uid may have is blocked by a lingering descriptor, and the uid connects again.
TEST_F(ConnectionLimit, CountsConnectionsWhoseDescriptorsDoNotClose) {
  std::array<int, 2> done{};
  ASSERT_EQ(::pipe2(done.data(), O_CLOEXEC), 0);
  const UniqueFd reader(done[0]);
  UniqueFd writer(done[1]);
  std::vector<LingeringSocket> lingering(kMax + 8);
  StopDaemon();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (::setuid(kNobody) != 0) ::_exit(1);
    for (const LingeringSocket& one : lingering) {
      const UniqueFd connection = ConnectTo(kSocketHere);
      if (!connection.valid()) ::_exit(2);
      (void)!::send(connection.get(), kImpossibleHeader.data(), 8, MSG_NOSIGNAL);
      SendWith(connection.get(), "x", one.fd(), 1);
    }
    for (LingeringSocket& one : lingering) one.LeaveToOthers();
    (void)!::write(done[1], "d", 1);
    ::pause();
    ::_exit(0);
  }
  for (LingeringSocket& one : lingering) one.LeaveToOthers();
  writer.Reset();
  char byte = 0;
  ASSERT_EQ(::read(done[0], &byte, 1), 1);
  ContinueDaemon();
  logged_ = {absl::StrCat("user 65534 has ", kMax, " connections")};
  ASSERT_OK_AND_ASSIGN(auto beside, RawSession::Connect(socket_));
  EXPECT_OK(beside->Hello());
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace forebay::daemon::hostile_descriptors_process_test
