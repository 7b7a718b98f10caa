// SPDX-License-Identifier: Apache-2.0
// Goal    An arena survives the process that created it. The next process finds every byte, a client that maps the arena sees
//         later writes of the next process, and the pages are freed when that client ends.
// Method  A child makes the arena, sends its descriptors through a socket and ends: by _exit() after the arena's end, or killed
//         before. Another child maps the arena as a client does and reports bytes on request. Every child runs under a
//         deadline.

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/error.h"
#include "tests/pinned_mem/arena_support.h"
#include "tests/pinned_mem/nobody_process.h"
#include "tests/support/pattern.h"

namespace forebay::pinned_mem {
namespace {

using ::forebay::protocol::ErrorId;
using ::forebay::protocol::IdOf;
using ::forebay::protocol::UniqueFd;
using ::forebay::testing::AsNobody;
using ::forebay::testing::BecomeNobody;
using ::forebay::testing::kDeadlineSeconds;
using ::forebay::testing::kMib;
using ::forebay::testing::kPage;
using ::forebay::testing::OptionsFor;
using ::forebay::testing::Pattern;
using ::forebay::testing::WaitFor;

constexpr uint64_t kBytes = 6 * kMib + 3 * kPage;

class AdoptedArenaProcess : public ::forebay::testing::DescriptorsAsBefore {};

enum class Ends { kAfterTheArena, kKilled };

// Two descriptors in one message: the retained one and the client's.
using Pair = std::array<int, 2>;

bool Send(int socket, const Pair& fds) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(Pair))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(Pair));
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof(Pair));
  return ::sendmsg(socket, &message, 0) == 1;
}

// Receives two descriptors. Returns {-1, -1} if the sender has ended without a message.
Pair Receive(int socket) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(Pair))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  Pair fds = {-1, -1};
  if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1) return fds;
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr) std::memcpy(fds.data(), CMSG_DATA(header), sizeof(Pair));
  return fds;
}

// Runs in the first process: makes the arena, writes it, sends its descriptors and ends.
int MakeAndEnd(int socket, const ArenaOptions& options, Ends ends) {
  if (!BecomeNobody()) return 10;
  auto arena = PinnedArena::Create(options);
  if (!arena.ok()) return 11;
  std::ranges::copy(Pattern(options.capacity_bytes, /*seed=*/1), (*arena)->bytes().begin());
  const auto kept = (*arena)->DuplicateFd();
  const auto client = (*arena)->ClientFd();
  if (!kept.ok() || !client.ok()) return 12;
  if (!Send(socket, {kept->get(), client->get()})) return 13;
  if (ends == Ends::kKilled) raise(SIGKILL);
  (*arena)->SetAtEnd(AtEnd::kKeepForReaders);
  arena->reset();
  return 0;
}

struct Kept {
  UniqueFd fd;
  UniqueFd client;
};

// Makes an arena in a child and waits for the child's end. Returns the arena's descriptors.
Kept FromAnEndedProcess(const ArenaOptions& options, Ends ends) {
  std::array<int, 2> sockets{};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()), 0);
  const UniqueFd ours(sockets[0]);
  UniqueFd theirs(sockets[1]);
  const pid_t child = fork();
  if (child == 0) {
    alarm(kDeadlineSeconds);
    _exit(MakeAndEnd(theirs.get(), options, ends));
  }
  theirs.Reset();
  const Pair fds = Receive(ours.get());
  EXPECT_EQ(WaitFor(child), ends == Ends::kKilled ? -SIGKILL : 0);
  return {.fd = UniqueFd(fds[0]), .client = UniqueFd(fds[1])};
}

// A process that maps the arena, holds no descriptor of it, and reports the bytes that it reads.
class Client {
 public:
  explicit Client(const Kept& kept) {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets_), 0);
    child_ = fork();
    if (child_ == 0) _exit(Answer(kept));
    close(sockets_[1]);
    // The child has mapped the arena.
    EXPECT_EQ(ByteAt(0), static_cast<int>(Pattern(1, /*seed=*/1)[0]));
  }
  ~Client() { End(); }

  int ByteAt(uint64_t offset) const {
    unsigned char byte = 0;
    if (write(sockets_[0], &offset, sizeof(offset)) != sizeof(offset)) return -1;
    return read(sockets_[0], &byte, 1) == 1 ? byte : -1;
  }

  void End() {
    if (child_ < 0) return;
    (void)shutdown(sockets_[0], SHUT_RDWR);  // other children hold this descriptor too
    close(sockets_[0]);
    EXPECT_EQ(WaitFor(std::exchange(child_, -1)), 0);
  }

 private:
  int Answer(const Kept& kept) const {
    alarm(kDeadlineSeconds);
    close(sockets_[0]);
    const void* const map = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, kept.client.get(), 0);
    close(kept.client.get());
    close(kept.fd.get());
    if (map == MAP_FAILED) return 20;
    uint64_t offset = 0;
    while (read(sockets_[1], &offset, sizeof(offset)) == sizeof(offset)) {
      if (write(sockets_[1], static_cast<const char*>(map) + offset, 1) != 1) return 21;
    }
    return 0;
  }

  int sockets_[2] = {};
  pid_t child_ = -1;
};

TEST_F(AdoptedArenaProcess, HasEveryByteAndItsClientSeesWhatTheNextProcessWrites) {
  const ArenaOptions options = OptionsFor(kBytes, Access::kServed);
  for (const Ends ends : {Ends::kAfterTheArena, Ends::kKilled}) {
    Kept kept = FromAnEndedProcess(options, ends);
    ASSERT_TRUE(kept.fd.valid() && kept.client.valid());
    Client client(kept);
    kept.client.Reset();
    std::array<int, 2> ended{};
    ASSERT_EQ(pipe(ended.data()), 0);
    std::array<int, 2> written{};
    ASSERT_EQ(pipe(written.data()), 0);

    const pid_t next = fork();
    if (next == 0) {
      _exit([&] {
        alarm(kDeadlineSeconds);
        if (!BecomeNobody()) return 30;
        auto arena = PinnedArena::Adopt(options, std::move(kept.fd));
        if (!arena.ok()) return 31;
        if (!std::ranges::equal((*arena)->bytes(), Pattern(kBytes, /*seed=*/1))) return 32;
        if ((*arena)->FreeIfUnused()) return 33;
        (*arena)->bytes()[kBytes - 1] = std::byte{99};
        char byte = 0;
        if (write(written[1], &byte, 1) != 1) return 34;
        if (read(ended[0], &byte, 1) != 1) return 35;
        if ((*arena)->allocated_bytes() != kBytes) return 36;
        if (!(*arena)->FreeIfUnused()) return 37;
        return (*arena)->allocated_bytes() == 0 ? 0 : 38;
      }());
    }
    kept.fd.Reset();
    char byte = 0;
    close(written[1]);
    EXPECT_EQ(read(written[0], &byte, 1), 1);
    EXPECT_EQ(client.ByteAt(kBytes - 1), 99);
    EXPECT_EQ(client.ByteAt(kBytes - 2), static_cast<int>(Pattern(kBytes, /*seed=*/1)[kBytes - 2]));
    client.End();
    EXPECT_EQ(write(ended[1], &byte, 1), 1);
    EXPECT_EQ(WaitFor(next), 0);
    for (const int fd : {written[0], ended[0], ended[1]}) close(fd);
  }
}

TEST_F(AdoptedArenaProcess, ALowLimitOnLockedMemoryRefusesItAndKeepsItsBytes) {
  const Kept kept = FromAnEndedProcess(OptionsFor(kBytes, Access::kServed), Ends::kAfterTheArena);
  ASSERT_TRUE(kept.fd.valid());
  const int result = AsNobody([&] {
    ArenaOptions options = OptionsFor(kBytes, Access::kServed);
    options.lock = LockPolicy::kRequired;
    const rlimit limit = {kMib, kMib};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 40;
    if (IdOf(PinnedArena::Adopt(options, UniqueFd(dup(kept.fd.get()))).status()) !=
        ErrorId::kMemlock) {
      return 41;
    }
    options.lock = LockPolicy::kBestEffort;
    const auto arena = PinnedArena::Adopt(options, UniqueFd(dup(kept.fd.get())));
    if (!arena.ok()) return 42;
    if ((*arena)->locked()) return 43;
    return std::ranges::equal((*arena)->bytes(), Pattern(kBytes, /*seed=*/1)) ? 0 : 44;
  });
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace forebay::pinned_mem
