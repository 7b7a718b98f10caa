// SPDX-License-Identifier: Apache-2.0
// Goal    A daemon that cannot serve does not start serving. It prints an error with id, numbers and hint, exits with 1 and
//         leaves nothing behind. After the fault is fixed, it starts and trains. A service that may not lock its memory refuses
//         jobs whose memory it cannot lock, and serves the others. The service manager gets reports only while the daemon's
//         threads make progress.
// Method  Real runs of forebayd with one thing wrong, then with that thing right.

#include <linux/capability.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/admin.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/old_kernel.h"
#include "tests/support/refused_call.h"
#include "tests/support/status_test.h"
#include "tests/support/test_cgroup.h"

namespace forebay::daemon::startup_process_test {
namespace {

using protocol::ErrorId;
using testing::DaemonProcess;
using ::testing::HasSubstr;
using testing::HealthyJob;
using testing::TempDir;

// A faulty configuration. <DIR> stands for the test's folder, which contains the empty folder <DIR>/swap.
struct BadStart {
  std::string name;
  std::vector<std::string> bad;   // settings
  std::vector<std::string> said;  // Id, numbers and cause in the message.
  std::vector<std::string> good;  // Settings without the fault.
};

void PrintTo(const BadStart& one, std::ostream* out) { *out << one.name; }

const std::vector<std::string> kGoodSwap = {"swap.paths=<DIR>/swap", "swap.capacity=16MiB",
                                            "update.block_elems=4096", "dram.limit=6492KiB"};

class Startup : public ::testing::Test {
 protected:
  std::vector<std::string> Here(std::vector<std::string> texts) const {
    for (std::string& text : texts) {
      for (size_t at; (at = text.find("<DIR>")) != std::string::npos;) {
        text.replace(at, 5, dir_.path());
      }
    }
    return texts;
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
};

class RefusedStart : public Startup, public ::testing::WithParamInterface<BadStart> {};

TEST_P(RefusedStart, SaysWhatIsWrongLeavesNothingAndTrainsOnceItIsFixed) {
  const std::string swap = dir_.Make("swap");
  struct statfs system = {};
  if (GetParam().name == "SwapInMemory" &&
      (::statfs("/dev/shm", &system) != 0 || system.f_type != TMPFS_MAGIC)) {
    GTEST_SKIP() << "/dev/shm is no tmpfs here";
  }
  const auto refused = DaemonProcess::Start(socket_, Here(GetParam().bad));
  ASSERT_FALSE(refused.ok());
  const std::string said(refused.status().message());
  EXPECT_THAT(said, HasSubstr("forebayd ended with 1: error["));
  EXPECT_THAT(said, HasSubstr("\nhint: "));
  for (const std::string& word : Here(GetParam().said)) EXPECT_THAT(said, HasSubstr(word));
  EXPECT_TRUE(std::filesystem::is_empty(swap)) << "left behind";
  EXPECT_FALSE(std::filesystem::exists(socket_));
  EXPECT_FALSE(std::filesystem::exists(socket_ + ".lock"));

  ASSERT_OK_AND_ASSIGN(const auto daemon, DaemonProcess::Start(socket_, Here(GetParam().good)));
  EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_, .shape = {.world_size = 1}}));
}

INSTANTIATE_TEST_SUITE_P(
    Starts, RefusedStart,
    ::testing::Values(
        BadStart{"UnknownKey",
                 {"swap.pathes=<DIR>/swap"},
                 {"[E_CONFIG]", "--set: unknown key swap.pathes", "did you mean swap.paths?"},
                 kGoodSwap},
        BadStart{"BadValue",
                 {"dram.limit=plenty"},
                 {"[E_CONFIG]", "--set: dram.limit", "plenty"},
                 {"dram.limit=64MiB"}},
        BadStart{"SwapMissing",
                 {"swap.paths=<DIR>/none", "swap.capacity=16MiB"},
                 {"[E_SWAP_PATH]", "swap path 0", "<DIR>/none", "missing", "No such file"},
                 kGoodSwap},
        // No user, not even root, can create a file in sysfs.
        BadStart{"SwapReadOnly",
                 {"swap.paths=/sys/kernel", "swap.capacity=16MiB"},
                 {"[E_SWAP_PATH]", "swap path 0", "/sys/kernel", "read-only"},
                 kGoodSwap},
        BadStart{"SwapInMemory",
                 {"swap.paths=/dev/shm", "swap.capacity=16MiB"},
                 {"[E_SWAP_PATH]", "swap path 0", "/dev/shm", "no O_DIRECT"},
                 kGoodSwap},
        BadStart{"SwapTooSmall",
                 {"swap.paths=<DIR>/swap", "swap.capacity=900000GiB"},
                 {"[E_SWAP_NOSPC]", "cannot reserve 878.9 TiB", "swap path 0", "free", "iB)"},
                 kGoodSwap},
        BadStart{"SecondOfTwoSwapPathsMissing",
                 {"swap.paths=[\"<DIR>/swap\", \"<DIR>/none\"]", "swap.capacity=16MiB"},
                 {"[E_SWAP_PATH]", "swap path 1", "<DIR>/none"},
                 kGoodSwap},
        BadStart{"LimitBelowTheStagingArena",
                 {"swap.paths=<DIR>/swap", "swap.capacity=16MiB", "dram.limit=1MiB"},
                 {"[E_DRAM_LIMIT]", "private memory takes", "staging for swap", "limit of 1.0 MiB"},
                 kGoodSwap},
        BadStart{"LimitBelowThePrivateMemory",
                 {"dram.limit=1MiB"},
                 {"[E_DRAM_LIMIT]", "private memory takes", "limit of 1.0 MiB"},
                 {"dram.limit=64MiB"}},
        BadStart{"SocketInNoFolder",
                 {"socket.path=<DIR>/none/s"},
                 {"[E_CONFIG]", "<DIR>/none/s", "No such file"},
                 {"socket.path=<DIR>/s"}}),
    [](const ::testing::TestParamInfo<BadStart>& one) { return one.param.name; });

TEST_F(Startup, WithAnUnknownKeyInAFileNamesFileAndLine) {
  const std::string file = dir_.Write("c.toml", "[dram]\nlimit = \"64MiB\"\nlimitt = 1\n");
  const auto program = testing::RunProgram({FOREBAYD_PATH, "--config", file});
  EXPECT_EQ(program.exit_code, 1);
  EXPECT_THAT(program.errors,
              HasSubstr("error[E_CONFIG]: " + file + ":3: unknown key dram.limitt"));
  EXPECT_THAT(program.errors, HasSubstr("hint: did you mean dram.limit?"));
  dir_.Write("c.toml", "memlock = \"best_effort\"\n[dram]\nlimit = \"64MiB\"\n[socket]\npath = \"" +
                           socket_ + "\"\n");
  const auto fixed =
      testing::RunningProgram::Start({FOREBAYD_PATH, "--config", file}, "forebayd ready");
  EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_, .shape = {.world_size = 1}}));
}

// A job that needs more DRAM than the limit is refused with the terms of the sum. The limit that the hint names is enough.
TEST_F(Startup, WithALimitBelowTheModelsMinimumNamesTheLimitThatIsEnough) {
  const testing::HealthyJobOptions large = {
      .socket = socket_,
      .job = "large",
      .shape = {.world_size = 2, .groups = 4, .group_elems = 100'000}};
  std::string enough;
  {
    ASSERT_OK_AND_ASSIGN(const auto daemon, DaemonProcess::Start(socket_, {"dram.limit=6MiB"}));
    ASSERT_OK_AND_ASSIGN(const auto healthy, HealthyJob::Attach({.socket = socket_}));
    const absl::Status status = HealthyJob::Attach(large).status();
    testing::ExpectRefusal(
        status, ErrorId::kDramLimit,
        {"the job needs", "weights", "gradient sums", "overflow", "extra_state",
         "2 x (gradient arena", "ring", "states", "the limit is 6.0 MiB", "other jobs hold"});
    const std::string hint = protocol::HintOf(status);
    enough = hint.substr(hint.find("at least ") + 9);
    enough = enough.substr(0, enough.find(' '));
    EXPECT_TRUE(daemon->IsAlive());
    EXPECT_OK(healthy->TrainOneMoreStep());
  }
  ASSERT_OK_AND_ASSIGN(const auto daemon, DaemonProcess::Start(socket_, {"dram.limit=" + enough}));
  EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_}));
  EXPECT_OK(testing::TrainsOneMoreStep(large));
}

// Limits locked memory to `bytes`, as for a service of an unprivileged user. Drops CAP_IPC_LOCK because root could lock any
// amount.
testing::Prepare LockAtMost(uint64_t bytes) {
  return [bytes] {
    (void)::prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0);  // Takes effect at exec().
    const rlimit limit = {bytes, bytes};
    (void)::setrlimit(RLIMIT_MEMLOCK, &limit);
  };
}

TEST_F(Startup, OfAServiceThatMayNotLockItsMemoryNamesTheLineToAdd) {
  dir_.Make("swap");
  std::vector<std::string> settings = Here(kGoodSwap);
  settings.push_back("memlock=required");
  const auto refused = DaemonProcess::Start(socket_, settings, LockAtMost(64 << 10));
  const std::string said(refused.status().message());
  for (const char* word : {"forebayd ended with 1: error[E_MEMLOCK]", "cannot lock arena",
                           "RLIMIT_MEMLOCK is 64.0 KiB", "hint: ", "LimitMEMLOCK=infinity"}) {
    EXPECT_THAT(said, HasSubstr(word));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path() + "/swap")) << "left behind";

  // The limit is enough for a small job, and too little for a larger one.
  ASSERT_OK_AND_ASSIGN(const auto daemon,
                       DaemonProcess::Start(socket_, {"memlock=required"}, LockAtMost(4 << 20)));
  ASSERT_OK_AND_ASSIGN(const auto healthy, HealthyJob::Attach({.socket = socket_}));
  testing::ExpectRefusal(
      HealthyJob::Attach({.socket = socket_, .job = "large", .shape = {.group_elems = 1 << 20}})
          .status(),
      ErrorId::kMemlock, {"cannot lock arena", "RLIMIT_MEMLOCK is 4.0 MiB"});
  EXPECT_TRUE(daemon->IsAlive());
  EXPECT_OK(healthy->TrainOneMoreStep());
}

// Without its own check, the daemon would be killed by the kernel's signal without a message.
TEST_F(Startup, WhereFilesMayNotBeSoLargeNamesTheLimit) {
  dir_.Make("swap");
  for (const auto& [bytes, id, what] :
       {std::tuple{uint64_t{64} << 10, "E_DRAM_LIMIT", "arena forebay-staging of "},
        std::tuple{uint64_t{8} << 20, "E_SWAP_NOSPC", "cannot reserve 16.0 MiB"}}) {
    const auto refused = DaemonProcess::Start(socket_, Here(kGoodSwap), [bytes = bytes] {
      const rlimit limit = {bytes, bytes};
      (void)::setrlimit(RLIMIT_FSIZE, &limit);
    });
    const std::string said(refused.status().message());
    EXPECT_THAT(said, HasSubstr(absl::StrCat("forebayd ended with 1: error[", id, "]")));
    for (const char* word : {what, "RLIMIT_FSIZE", "LimitFSIZE=infinity"}) {
      EXPECT_THAT(said, HasSubstr(word));
    }
  }
}

// ------------------------------------------------------------------------------------ old kernels

void OnAnOldKernel() {
  if (!testing::ActAsOldKernel()) ::_exit(1);
}

TEST_F(Startup, OnAKernelThatDoesNotWatchProcessesIsRefused) {
  const auto refused = DaemonProcess::Start(socket_, {}, OnAnOldKernel);
  const std::string said(refused.status().message());
  for (const char* word : {"forebayd ended with 1: error[E_UNSUPPORTED]", "pidfd_open",
                           "Function not implemented", "hint: use Linux 5.3"}) {
    EXPECT_THAT(said, HasSubstr(word));
  }
}

TEST_F(Startup, OnAnOldKernelTrainsWhereThatIsAskedFor) {
  dir_.Make("swap");
  std::vector<std::string> settings = Here(kGoodSwap);
  settings.push_back("pidfd=best_effort");
  ASSERT_OK_AND_ASSIGN(const auto daemon, DaemonProcess::Start(socket_, settings, OnAnOldKernel));
  {
    ASSERT_OK_AND_ASSIGN(const auto healthy, HealthyJob::Attach({.socket = socket_}));
    EXPECT_OK(healthy->TrainOneMoreStep());
    ASSERT_OK_AND_ASSIGN(const auto admin, client::AdminClient::Connect({.socket = socket_}));
    ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
    EXPECT_STREQ(status->getIoEngine().cStr(), "threads");
  }
  // The daemon notices by its socket that the first session has ended.
  ASSERT_OK_AND_ASSIGN(const auto healthy, HealthyJob::Attach({.socket = socket_}));
  EXPECT_OK(healthy->TrainOneMoreStep());
}

// ---------------------------------------------------------------------------------- control groups

class StartupInControlGroup : public Startup {
 protected:
  void SetUp() override {
    auto group = testing::TestCgroup::Create(kLimitBytes);
    if (!group.ok()) GTEST_SKIP() << "no control group: " << group.status();
    group_ = *std::move(group);
  }
  auto Start(const std::vector<std::string>& settings) {
    return DaemonProcess::Start(socket_, settings, [this] { group_->Enter(); });
  }

  static constexpr uint64_t kLimitBytes = uint64_t{512} << 20;
  std::unique_ptr<testing::TestCgroup> group_;
};

TEST_F(StartupInControlGroup, TakesHalfOfWhatTheGroupAllowsByDefault) {
  ASSERT_OK_AND_ASSIGN(const auto daemon, Start({DaemonProcess::kDefaultDramLimit}));
  ASSERT_OK_AND_ASSIGN(const auto admin, client::AdminClient::Connect({.socket = socket_}));
  ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
  EXPECT_EQ(status->getMemory().getLimitBytes(), kLimitBytes / 2);
}

TEST_F(StartupInControlGroup, RefusesALimitAboveThatOfTheGroup) {
  const auto refused = Start({"dram.limit=513MiB"});
  ASSERT_FALSE(refused.ok());
  for (const char* word : {"error[E_CONFIG]", "513.0 MiB", "512.0 MiB", "hint: lower dram.limit",
                           group_->folder().c_str()}) {
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr(word));
  }
  ASSERT_OK_AND_ASSIGN(const auto daemon, Start({"dram.limit=512MiB"}));
}

// ---------------------------------------------------------------------------------------- watchdog

// The service manager's end of NOTIFY_SOCKET, with a watchdog that wants a report every 100 ms.
class StartupWatchdog : public Startup {
 protected:
  void SetUp() override {
    const std::string path = dir_.path() + "/notify";
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    ASSERT_LT(path.size(), sizeof(address.sun_path));
    path.copy(address.sun_path, path.size());
    manager_.Reset(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::bind(manager_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              0);
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_, {"update.workers=1"}, [&] {
                           ::setenv("NOTIFY_SOCKET", path.c_str(), 1);
                           ::setenv("WATCHDOG_USEC", "100000", 1);
                         }));
  }

  // Counts watchdog reports until none arrives within `limit_ms` of the one before, or until `most` have arrived.
  int Reports(int most, int limit_ms) {
    int reports = 0;
    while (reports < most) {
      pollfd fd{.fd = manager_.get(), .events = POLLIN, .revents = 0};
      if (::poll(&fd, 1, limit_ms) != 1) break;
      std::array<char, 512> text{};
      if (::recv(manager_.get(), text.data(), text.size() - 1, 0) <= 0) break;
      if (std::string(text.data()) == "WATCHDOG=1") ++reports;
    }
    return reports;
  }

  // Discards the reports that have arrived.
  void DropReports() {
    char byte = 0;
    while (::recv(manager_.get(), &byte, 1, MSG_DONTWAIT) > 0) {
    }
  }

  protocol::UniqueFd manager_;
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(StartupWatchdog, IsFedWhileBothThreadsWork) { EXPECT_EQ(Reports(3, 30'000), 3); }

// The main thread sends the reports, and the loop and the control thread make the progress that is reported. The worker and the
// thread that makes arenas do not count.
TEST_F(StartupWatchdog, IsNotFedWhileOneOfThemIsStuck) {
  ASSERT_EQ(Reports(1, 30'000), 1);
  int threads_needed = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_->pid(), "/task"))) {
    const pid_t thread = std::stoi(entry.path().filename());
    if (thread == daemon_->pid()) continue;
    if (::ptrace(PTRACE_SEIZE, thread, nullptr, nullptr) != 0) {
      GTEST_SKIP() << "no thread can be stopped here: " << std::strerror(errno);
    }
    ASSERT_EQ(::ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(thread, &status, __WALL), thread);
    ASSERT_TRUE(WIFSTOPPED(status));
    DropReports();
    // Up to a few reports may still come: for a probe answered before the stop, and reports in transit.
    const bool needed = Reports(10, 4'000) < 10;
    threads_needed += needed ? 1 : 0;
    ASSERT_EQ(::ptrace(PTRACE_DETACH, thread, nullptr, nullptr), 0);
    EXPECT_EQ(Reports(3, 30'000), 3) << "it goes on once the thread does";
  }
  EXPECT_EQ(threads_needed, 2) << "the loop and the control thread";
}

}  // namespace
}  // namespace forebay::daemon::startup_process_test
