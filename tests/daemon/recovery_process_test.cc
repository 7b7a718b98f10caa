// SPDX-License-Identifier: Apache-2.0
// Goal    A daemon recovers the durable jobs of its swap, however the previous daemon ended, and prints their names. It gives
//         up the jobs only if an operator says so.
// Method  Real runs of forebayd on a volume with generated jobs, with a terminal for the daemon's question.

#include <linux/magic.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "daemon/exec/recovery/ledger_codec.h"
#include "daemon/exec/swap_space.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/io/engine_factory.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/daemon_process.h"
#include "tests/support/durable_jobs.h"
#include "tests/support/healthy_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::recovery_process_test {
namespace {

using testing::Ended;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::RunningProgram;
using testing::RunProgram;
using testing::TempDir;

constexpr char kJobs[] =
    "4 jobs: 1000:gpt at step 41, gpt at step 43, 5:sharded at step 44, 5:big at step 49";
constexpr uint64_t kPathBytes = uint64_t{300} << 20;  // enough to be measured

class RecoveryProcess : public ::testing::Test {
 protected:
  std::vector<std::string> Arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = {FOREBAYD_PATH};
    for (const std::string& setting :
         {"socket.path=" + socket_, std::string("memlock=best_effort"),
          "swap.paths=" + a_ + "," + b_, std::string("swap.capacity=300MiB"),
          std::string("update.block_elems=4096"), std::string("dram.limit=64MiB")}) {
      all.insert(all.end(), {"--set", setting});
    }
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  // Number of durable jobs on swap. Call it only while no daemon runs.
  std::string Jobs() const {
    const auto node = FindDurableJobs(Paths());
    EXPECT_OK(node);
    return node.ok() ? std::to_string(node->jobs.size()) : "";
  }
  std::vector<nvme::PathOptions> Paths() const {
    return {{.path = a_, .capacity_bytes = kPathBytes}, {.path = b_, .capacity_bytes = kPathBytes}};
  }
  void MakeJobs() const {
    ASSERT_OK_AND_ASSIGN(const nvme::ChosenEngine chosen, nvme::CreateIoEngine());
    ASSERT_OK_AND_ASSIGN(const auto swap,
                         SwapSpace::Open({.paths = Paths(),
                                          .staging_slots = 3,
                                          .staging_slot_bytes = 64 << 10,
                                          .arenas = {.lock = pinned_mem::LockPolicy::kBestEffort}},
                                         *chosen.engine));
    const DurableNode node = testing::MakeDurableNode(/*begin_bytes=*/8 << 20);
    ASSERT_OK_AND_ASSIGN(const auto ledger, EncodeLedger(node, swap->nonce()));
    std::vector<SwapDone> done;
    swap->CommitLedger(/*task=*/1, ledger, SlotsOf(node), done);
    while (done.empty()) {
      std::array<nvme::Completion, 8> completions;
      ASSERT_OK_AND_ASSIGN(const size_t count,
                           chosen.engine->Wait(std::chrono::seconds(60), completions));
      ASSERT_GT(count, 0U);
      for (size_t i = 0; i < count; ++i) swap->OnCompletion(completions[i], done);
    }
    ASSERT_OK(done[0].status);
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const std::string a_ = dir_.Make("a");
  const std::string b_ = dir_.Make("b");
};

TEST_F(RecoveryProcess, JobsComeBackHoweverTheDaemonEnded) {
  MakeJobs();
  for (int start = 0; start < 2; ++start) {
    auto daemon = RunningProgram::Start(Arguments(), "forebayd ready");
    EXPECT_THAT(daemon->errors(), HasSubstr(std::string("swap: recovered ") + kJobs));
    EXPECT_THAT(daemon->errors(), HasSubstr("not measured: it may have durable jobs"));
    daemon->Kill();
  }
  EXPECT_EQ(Jobs(), "4");
}

TEST_F(RecoveryProcess, SwapWithoutJobsIsMadeAnewWithoutAWord) {
  for (int start = 0; start < 2; ++start) {
    auto daemon = RunningProgram::Start(Arguments({"--set", "swap.probe=never"}), "forebayd ready");
    EXPECT_THAT(daemon->errors(), Not(HasSubstr("recovered")));
    EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_, .shape = {.world_size = 1}}));
    daemon->Kill();
  }
}

TEST_F(RecoveryProcess, SettingsThatWouldLoseThemAreRefused) {
  MakeJobs();
  for (const std::string setting : {"swap.capacity=301MiB", "swap.life=unlinked"}) {
    const Ended ended = RunProgram(Arguments({"--set", setting}));
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_THAT(ended.errors, HasSubstr("error[E_SWAP_PATH]"));
    EXPECT_THAT(ended.errors, HasSubstr("--reclaim gives up its jobs"));
  }
  std::filesystem::rename(b_ + "/forebay.swap", b_ + "/kept");
  EXPECT_THAT(RunProgram(Arguments()).errors, HasSubstr("swap path 1 (" + b_));
  std::filesystem::rename(b_ + "/kept", b_ + "/forebay.swap");
  EXPECT_EQ(Jobs(), "4");
}

TEST_F(RecoveryProcess, WithoutATerminalReclaimIsEnough) {
  MakeJobs();
  auto daemon = RunningProgram::Start(Arguments({"--reclaim", "--set", "swap.probe=never"}),
                                      "forebayd ready");
  EXPECT_THAT(daemon->errors(), HasSubstr(std::string("--reclaim gives up ") + kJobs));
  EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_, .shape = {.world_size = 1}}));
  daemon->Kill();
  EXPECT_EQ(Jobs(), "0");
}

// Runs the program on a terminal and types `answer` when it asks. `output` is its output until it ends, or until it is ready
// and is killed.
struct OnTerminal {
  std::string output;
  int exit_code = -1;  // -1 if the program was killed.
};
OnTerminal RunOnTerminal(const std::vector<std::string>& arguments, const std::string& answer) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  const protocol::UniqueFd closes(terminal);
  OnTerminal result;
  bool answered = false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < end) {
    pollfd ready{.fd = terminal, .events = POLLIN, .revents = 0};
    if (::poll(&ready, 1, 1000) <= 0) continue;
    std::array<char, 4096> bytes{};
    const ssize_t size = ::read(terminal, bytes.data(), bytes.size());
    if (size <= 0) break;  // EIO: the program has ended
    result.output.append(bytes.data(), static_cast<size_t>(size));
    if (result.output.find("forebayd ready") != std::string::npos) break;
    if (answered || result.output.find("[y/N] ") == std::string::npos) continue;
    answered = true;
    EXPECT_EQ(::write(terminal, answer.data(), answer.size()), static_cast<ssize_t>(answer.size()));
  }
  const bool is_ready = result.output.find("forebayd ready") != std::string::npos;
  if (is_ready) ::kill(child, SIGKILL);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  return result;
}

TEST_F(RecoveryProcess, OnATerminalReclaimAsks) {
  MakeJobs();
  const std::vector<std::string> arguments = Arguments({"--reclaim", "--set", "swap.probe=never"});
  for (const char* no : {"n\n", "\n", "no\n", "\x04"}) {
    const OnTerminal refused = RunOnTerminal(arguments, no);
    EXPECT_EQ(refused.exit_code, 1) << refused.output;
    EXPECT_THAT(refused.output, HasSubstr(std::string("--reclaim gives up ") + kJobs));
    EXPECT_THAT(refused.output, HasSubstr("nothing was changed"));
    EXPECT_EQ(Jobs(), "4");
  }
  const OnTerminal agreed = RunOnTerminal(arguments, "y\n");
  EXPECT_THAT(agreed.output, HasSubstr("forebayd ready"));
  EXPECT_EQ(Jobs(), "0");
  EXPECT_THAT(RunOnTerminal(arguments, "").output, Not(HasSubstr("Go on?"))) << "nothing to lose";
}

// ------------------------------------------------------------------------------------------- levels

TEST_F(RecoveryProcess, ADurableLevelNeedsSwapThatOutlivesTheDaemon) {
  const auto expect = [&](const std::vector<std::string>& settings, const std::string& why) {
    std::vector<std::string> all = {FOREBAYD_PATH,         "--check", "--set",
                                    "memlock=best_effort", "--set",   "dram.limit=1GiB"};
    for (const std::string& setting : settings) all.insert(all.end(), {"--set", setting});
    const Ended durable = RunProgram(all);
    EXPECT_EQ(durable.exit_code, why.empty() ? 0 : 1) << durable.errors;
    EXPECT_THAT(durable.errors, HasSubstr(why));
  };
  const std::string paths = "swap.paths=" + a_;
  expect({"jobs.durability=step"},
         "error[E_UNSUPPORTED]: no job of this daemon can be durable: it "
         "has no swap");
  expect({"jobs.durability=epoch=5", paths, "swap.capacity=16MiB", "swap.life=unlinked"},
         "its swap files are unlinked");
  struct statfs system {};
  if (::statfs("/dev/shm", &system) == 0 && system.f_type == TMPFS_MAGIC) {
    expect({"jobs.durability=step", "swap.paths=/dev/shm", "swap.capacity=16MiB"},
           "swap path 0 (/dev/shm) is a file system in memory");
  }
  expect({"jobs.durability=step", paths, "swap.capacity=16MiB"}, "");
  expect({"jobs.durability=memory"}, "");
}

}  // namespace
}  // namespace forebay::daemon::recovery_process_test
