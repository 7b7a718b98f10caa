// SPDX-License-Identifier: Apache-2.0
// Goal    io_uring is chosen if it works, else threads, with the reason. A forced choice is used or refused, never replaced.
// Method  A probe of the test's own ring is compared with the choice; then a child process forbids
//         itself io_uring_setup with a seccomp filter and chooses again.

#include "nvme/io/engine_factory.h"

#include <liburing.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/status_test.h"

namespace forebay::nvme {
namespace {

using ::testing::IsEmpty;

bool OwnRingWorks() {
  io_uring ring{};
  if (io_uring_queue_init(2, &ring, 0) != 0) return false;
  io_uring_prep_nop(io_uring_get_sqe(&ring));
  io_uring_cqe* cqe = nullptr;
  const bool works = io_uring_submit_and_wait(&ring, 1) == 1 && io_uring_peek_cqe(&ring, &cqe) == 0;
  io_uring_queue_exit(&ring);
  return works;
}

bool ForbidUring() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {.len = 4, .filter = filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(EngineFactory, ChoosesIoUringWhereAProbesOwnRingWorks) {
  ASSERT_OK_AND_ASSIGN(const ChosenEngine chosen, CreateIoEngine());
  EXPECT_EQ(chosen.engine->name(), OwnRingWorks() ? "io_uring" : "threads") << chosen.reason;
  EXPECT_EQ(ProbeUring().ok(), OwnRingWorks());
  EXPECT_EQ(chosen.reason.empty(), OwnRingWorks());
}

TEST(EngineFactory, KeepsAForcedChoice) {
  ASSERT_OK_AND_ASSIGN(const ChosenEngine threads,
                       CreateIoEngine({.choice = EngineChoice::kThreads}));
  EXPECT_EQ(threads.engine->name(), "threads");
  EXPECT_THAT(threads.reason, IsEmpty());
  const absl::StatusOr<ChosenEngine> uring = CreateIoEngine({.choice = EngineChoice::kUring});
  EXPECT_EQ(uring.ok(), OwnRingWorks());
  if (uring.ok()) {
    EXPECT_EQ(uring->engine->name(), "io_uring");
  }
}

TEST(EngineFactory, RefusesSizesThatMakeNoSense) {
  for (const uint32_t wrong : {0u, 1u << 20}) {
    EXPECT_FALSE(CreateIoEngine({.choice = EngineChoice::kThreads, .threads = wrong}).ok());
    EXPECT_FALSE(CreateIoEngine({.choice = EngineChoice::kUring, .depth = wrong}).ok());
  }
}

TEST(EngineFactory, TakesThreadsWithTheReasonWhereIoUringIsForbidden) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (!ForbidUring()) _exit(77);
    const absl::StatusOr<ChosenEngine> chosen = CreateIoEngine();
    const absl::Status forced = CreateIoEngine({.choice = EngineChoice::kUring}).status();
    const bool right = chosen.ok() && chosen->engine->name() == "threads" &&
                       chosen->reason.find("Operation not permitted") != std::string::npos &&
                       protocol::IdOf(forced) == protocol::ErrorId::kUnsupported &&
                       protocol::HintOf(forced).find("io.engine") != std::string::npos;
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "this machine does not allow seccomp filters";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace forebay::nvme
