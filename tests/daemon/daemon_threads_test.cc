// SPDX-License-Identifier: Apache-2.0
// Goal    Ring, leases and steps work if daemon and clients are threads of one process, so that a race detector sees both ends.
// Method  The test starts the daemon in its own process. Two ranks, a status reader and a rank that attaches and detaches
//         repeatedly are one thread each. The result is compared with the scalar reference bit by bit. The workers' place and
//         weight are read from /proc/self/task.

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "daemon/daemon.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::daemon::daemon_threads_test {
namespace {

using client::Attachment;
using protocol::Layout;
using testing::HasError;
using testing::JobShape;

constexpr auto kTimeout = std::chrono::seconds(120);
constexpr uint64_t kSteps = 5;
constexpr uint64_t kSeed = 3;

absl::Status Train(const std::string& socket, const std::string& job, const JobShape& shape,
                   uint32_t rank) {
  ASSIGN_OR_RETURN(auto session, Attachment::Attach({.socket = socket,
                                                     .job = job,
                                                     .rank = rank,
                                                     .world_size = shape.world_size,
                                                     .layout = testing::MakeLayoutSpec(shape),
                                                     .timeout = kTimeout}));
  const auto groups = static_cast<uint32_t>(session->layout().groups().size());
  if (session->writes_initial()) {
    for (uint32_t g = 0; g < groups; ++g) {
      RETURN_IF_ERROR(
          session->WriteInitial(g, testing::MakeValues(session->layout(), g, kSeed), kTimeout));
    }
    RETURN_IF_ERROR(session->InitialDone(kTimeout));
  }
  for (uint64_t t = 1; t <= kSteps; ++t) {
    for (uint32_t g = 0; g < groups; ++g) {
      ASSIGN_OR_RETURN(const client::Lease lease, session->Fetch(g, kTimeout));
      RETURN_IF_ERROR(session->Release(lease));
    }
    for (uint32_t g = groups; g-- > 0;) {
      ASSIGN_OR_RETURN(const auto slot, session->GradSlot(g, client::GradFill::kZero, kTimeout));
      const auto gradient = testing::MakeGradient(session->layout(), g, rank, t);
      std::memcpy(slot.data(), gradient.data(), gradient.size());
      RETURN_IF_ERROR(session->GradReady(g));
    }
    RETURN_IF_ERROR(session->Step(t, testing::MakeHyperParams(), 1.0, {}, kTimeout).status());
  }
  for (uint32_t g = 0; g < groups; ++g) {
    ASSIGN_OR_RETURN(const client::Lease lease, session->Fetch(g, kTimeout));
    RETURN_IF_ERROR(session->Release(lease));
  }
  return session->Detach();
}

// Niceness and allowed CPUs of one thread of this process, from /proc.
struct ThreadFacts {
  int nice = 0;
  std::string cpus;  // "0-1"

  bool operator==(const ThreadFacts&) const = default;
};

std::map<std::string, ThreadFacts> ThreadsOfThisProcess() {
  std::map<std::string, ThreadFacts> threads;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream stat(entry.path() / "stat");
    std::string text((std::istreambuf_iterator<char>(stat)), {});
    const size_t name_end = text.rfind(')');
    if (name_end == std::string::npos) continue;  // The thread has ended meanwhile.
    std::istringstream fields(text.substr(name_end + 1));
    std::string field;
    for (int i = 3; i < 19; ++i) fields >> field;  // proc(5): nice is field 19
    ThreadFacts facts;
    fields >> facts.nice;
    std::ifstream status(entry.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (!line.starts_with("Cpus_allowed_list:")) continue;
      facts.cpus = line.substr(line.find_first_not_of(" \t", line.find(':') + 1));
    }
    threads.emplace(entry.path().filename(), facts);
  }
  return threads;
}

TEST(DaemonThreads, WorkersStandWhereTheConfigurationPutsThem) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  int cpu = CPU_SETSIZE - 1;
  while (!CPU_ISSET(static_cast<size_t>(cpu), &allowed)) --cpu;
  const ThreadFacts own = ThreadsOfThisProcess().at(std::to_string(gettid()));

  const testing::TempDir dir;
  Config config;
  config.socket_path = dir.path() + "/s";
  config.dram_limit_bytes = uint64_t{64} << 20;
  config.lock = pinned_mem::LockPolicy::kBestEffort;
  config.update_cpus = {cpu};
  config.update_nice = std::min(own.nice + 7, 19);
  ASSERT_OK_AND_ASSIGN(const auto daemon, Daemon::Start(config));
  const ThreadFacts worker{.nice = config.update_nice, .cpus = std::to_string(cpu)};

  // A thread places itself when it starts.
  const auto deadline = std::chrono::steady_clock::now() + kTimeout;
  std::vector<ThreadFacts> placed;
  while (placed.empty() && std::chrono::steady_clock::now() < deadline) {
    for (const auto& [id, facts] : ThreadsOfThisProcess()) {
      if (facts == worker) placed.push_back(facts);
    }
    std::this_thread::yield();
  }
  EXPECT_EQ(placed.size(), 1U) << "one worker, for the one core";
  for (const auto& [id, facts] : ThreadsOfThisProcess()) {
    if (facts == worker) continue;
    EXPECT_EQ(facts.nice, own.nice) << "thread " << id;
  }
}

TEST(DaemonThreads, TrainTwoJobsOnSwapWhileOthersComeAndGo) {
  const testing::TempDir dir;
  Config config;
  config.socket_path = dir.path() + "/s";
  config.dram_limit_bytes = uint64_t{9096} << 10;
  config.swap_paths = {dir.Make("swap")};
  config.swap_probe = false;
  config.swap_capacity_bytes = {uint64_t{32} << 20};
  config.block_elems = 2048;
  config.workers = 2;
  config.lock = pinned_mem::LockPolicy::kBestEffort;
  ASSERT_OK_AND_ASSIGN(auto daemon, Daemon::Start(config));

  // The two small jobs take their memory first, so that the large job gets the rest.
  for (const char* job : {"passing", "alone"}) {
    const JobShape small{
        .world_size = 1, .groups = 2, .group_elems = job == std::string("alone") ? 5'000U : 100U};
    ASSERT_OK_AND_ASSIGN(auto first, Attachment::Attach({.socket = config.socket_path,
                                                         .job = job,
                                                         .world_size = small.world_size,
                                                         .layout = testing::MakeLayoutSpec(small),
                                                         .timeout = kTimeout}));
    // A job without its parameters would end with its last session.
    for (uint32_t group = 0; group < small.groups; ++group) {
      ASSERT_OK(
          first->WriteInitial(group, testing::MakeValues(first->layout(), group, kSeed), kTimeout));
    }
    ASSERT_OK(first->InitialDone(kTimeout));
    ASSERT_OK(first->Detach());
  }
  const JobShape shape{.world_size = 2, .groups = 4, .group_elems = 20'000};
  std::atomic<bool> done = false;
  std::vector<absl::Status> outcomes(3);
  {
    std::jthread reader([&] {
      auto admin = client::AdminClient::Connect({.socket = config.socket_path});
      ASSERT_OK(admin);
      while (!done) EXPECT_OK((*admin)->Status());
    });
    std::jthread passer_by([&] {
      while (!done) {
        EXPECT_OK(Attachment::Attach(
            {.socket = config.socket_path,
             .job = "passing",
             .layout = testing::MakeLayoutSpec({.world_size = 1, .groups = 2, .group_elems = 100}),
             .timeout = kTimeout}));
      }
    });
    {
      std::vector<std::jthread> ranks;
      for (uint32_t rank = 0; rank < 2; ++rank) {
        ranks.emplace_back(
            [&, rank] { outcomes[rank] = Train(config.socket_path, "job", shape, rank); });
      }
      ranks.emplace_back([&] {
        outcomes[2] = Train(config.socket_path, "alone",
                            {.world_size = 1, .groups = 2, .group_elems = 5'000}, 0);
      });
    }
    done = true;
  }
  for (const absl::Status& outcome : outcomes) EXPECT_OK(outcome);

  ASSERT_OK_AND_ASSIGN(const Layout layout, Layout::Create(testing::MakeLayoutSpec(shape)));
  testing::ReferenceTrainer reference(layout, shape.world_size, kSeed);
  const std::vector<uint32_t> all = {0, 1, 2, 3};
  for (uint64_t t = 1; t <= kSteps; ++t) {
    reference.Step(t, testing::MakeHyperParams(), 1.0, all);
  }
  ASSERT_OK_AND_ASSIGN(auto session, Attachment::Attach({.socket = config.socket_path,
                                                         .job = "job",
                                                         .world_size = shape.world_size,
                                                         .layout = layout.spec(),
                                                         .timeout = kTimeout}));
  EXPECT_EQ(session->committed_step(), kSteps);
  {
    ASSERT_OK_AND_ASSIGN(auto admin, client::AdminClient::Connect({.socket = config.socket_path}));
    ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
    for (const auto job : status->getJobs()) {
      if (job.getName() != "job") continue;
      EXPECT_GT(job.getResidentBlocks(), 0U);
      EXPECT_GT(job.getBlocks(), job.getResidentBlocks());
    }
  }
  for (const uint32_t g : all) {
    ASSERT_OK_AND_ASSIGN(const client::Lease lease, session->Fetch(g, kTimeout));
    EXPECT_TRUE(std::ranges::equal(lease.bytes, reference.Weights(g))) << "group " << g;
  }
  // The daemon ends while a session is attached.
  daemon->Stop();
  EXPECT_FALSE(session->Fetch(0, kTimeout).ok());
}

TEST(DaemonThreads, ASecondDaemonOfOneProcessIsRefused) {
  const testing::TempDir dir;
  Config config;
  config.socket_path = dir.path() + "/s";
  config.dram_limit_bytes = uint64_t{64} << 20;
  config.lock = pinned_mem::LockPolicy::kBestEffort;
  ASSERT_OK_AND_ASSIGN(auto daemon, Daemon::Start(config));
  EXPECT_THAT(Daemon::Start(config), HasError(protocol::ErrorId::kBusy));
  daemon->Stop();
  ASSERT_OK_AND_ASSIGN(auto again, Daemon::Start(config));
}

}  // namespace
}  // namespace forebay::daemon::daemon_threads_test
