// SPDX-License-Identifier: Apache-2.0
// Goal    Another user's process cannot open a served segment for writing. A low RLIMIT_MEMLOCK refuses a service and leaves a
//         private daemon unlocked.
// Method  Fork children that become uid and gid 65534 (nobody) if the test runs as root, whose privileges would hide both. A
//         child reports through its exit status and runs under a deadline.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>

#include "pinned_mem/pinned_arena.h"
#include "protocol/error.h"
#include "tests/pinned_mem/arena_support.h"
#include "tests/pinned_mem/nobody_process.h"

namespace forebay::pinned_mem {
namespace {

using ::forebay::testing::AsNobody;
using ::forebay::testing::kDeadlineSeconds;
using ::forebay::testing::kMib;
using ::forebay::testing::kPage;
using ::forebay::testing::MakeArena;
using ::forebay::testing::OptionsFor;
using ::forebay::testing::WaitFor;

class PinnedArenaProcess : public ::forebay::testing::DescriptorsAsBefore {};

// Opens the descriptor again for writing. Returns 0 on success, else the errno.
int ReopenForWriting(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  const int again = open(path.c_str(), O_RDWR | O_CLOEXEC);
  return again >= 0 ? 0 : errno;
}

TEST_F(PinnedArenaProcess, AnotherUserCannotOpenAServedSegmentForWriting) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const auto arena = MakeArena(OptionsFor(4 * kPage, Access::kServed));
  ASSERT_NE(arena, nullptr);
  const auto fd = arena->ClientFd();
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(AsNobody([&] { return ReopenForWriting(fd->get()); }), EACCES);
}

TEST_F(PinnedArenaProcess, WithTheModeSwitchedOffAnotherUserCan) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const auto arena = MakeArena(OptionsFor(4 * kPage, Access::kServed));
  ASSERT_NE(arena, nullptr);
  const auto fd = arena->ClientFd();
  ASSERT_TRUE(fd.ok());
  ASSERT_EQ(fchmod(fd->get(), 0666), 0);  // mode that the kernel gives a memfd
  EXPECT_EQ(AsNobody([&] { return ReopenForWriting(fd->get()); }), 0);
}

TEST_F(PinnedArenaProcess, ALowLimitOnLockedMemoryRefusesAServiceAndNamesTheRemedy) {
  const int result = AsNobody([] {
    const rlimit limit = {kMib, kMib};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 10;
    ArenaOptions options = OptionsFor(4 * kMib, Access::kPrivate);
    options.lock = LockPolicy::kRequired;
    const absl::Status status = PinnedArena::Create(options).status();
    const std::string text = protocol::FormatError(status);
    std::fprintf(stderr, "%s\n", text.c_str());
    if (protocol::IdOf(status) != protocol::ErrorId::kMemlock) return 11;
    if (text.find("RLIMIT_MEMLOCK is 1.0 MiB") == std::string::npos) return 12;
    if (text.find("4194304 bytes") == std::string::npos) return 13;
    if (text.find("LimitMEMLOCK=infinity") == std::string::npos) return 14;
    if (text.find("limits.conf") == std::string::npos) return 15;
    return 0;
  });
  EXPECT_EQ(result, 0);
}

TEST_F(PinnedArenaProcess, ALowLimitOnLockedMemoryLeavesAPrivateDaemonUnlocked) {
  const int result = AsNobody([] {
    const rlimit limit = {kMib, kMib};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 10;
    const auto arena = PinnedArena::Create(OptionsFor(4 * kMib, Access::kShared));
    if (!arena.ok()) return 11;
    if ((*arena)->locked()) return 12;
    if ((*arena)->allocated_bytes() != 4 * kMib) return 13;
    const auto small = PinnedArena::Create(OptionsFor(4 * kPage, Access::kShared));
    return small.ok() && (*small)->locked() ? 0 : 14;
  });
  EXPECT_EQ(result, 0);
}

// Acts like the daemon, which cannot be dumped: its /proc/self/fd belongs to root (prctl(2)).
TEST_F(PinnedArenaProcess, AProcessThatCannotBeDumpedStillMakesReadOnlyDescriptors) {
  const int result = AsNobody([] {
    if (prctl(PR_SET_DUMPABLE, 0) != 0) return 10;
    const auto arena = PinnedArena::Create(OptionsFor(4 * kPage, Access::kServed));
    if (!arena.ok()) return 11;
    return (*arena)->ClientFd().ok() ? 0 : 12;
  });
  EXPECT_EQ(result, 0);
}

// A child that holds the inherited descriptors open until the destructor writes to the pipe.
class HeldChild {
 public:
  HeldChild() {
    EXPECT_EQ(pipe(pipe_), 0);
    child_ = fork();
    if (child_ != 0) return;
    alarm(kDeadlineSeconds);
    char byte = 0;
    _exit(read(pipe_[0], &byte, 1) == 1 ? 0 : 1);
  }
  ~HeldChild() {
    EXPECT_EQ(write(pipe_[1], "x", 1), 1);
    EXPECT_EQ(WaitFor(child_), 0);
    close(pipe_[0]);
    close(pipe_[1]);
  }

 private:
  int pipe_[2] = {-1, -1};
  pid_t child_ = -1;
};

TEST_F(PinnedArenaProcess, AForkedChildThatKeepsTheMappingIsAReader) {
  const auto arena = MakeArena(OptionsFor(4 * kMib, Access::kServed));
  ASSERT_NE(arena, nullptr);
  auto fd = arena->ClientFd();
  ASSERT_TRUE(fd.ok());
  void* const map = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, fd->get(), 0);
  ASSERT_NE(map, MAP_FAILED);
  fd->Reset();
  {
    const HeldChild child;
    munmap(map, kPage);
    EXPECT_FALSE(arena->FreeIfUnused());
    EXPECT_EQ(arena->allocated_bytes(), 4 * kMib);
  }
  EXPECT_TRUE(arena->FreeIfUnused());
  EXPECT_EQ(arena->allocated_bytes(), 0U);
}

}  // namespace
}  // namespace forebay::pinned_mem
