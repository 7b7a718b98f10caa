// SPDX-License-Identifier: Apache-2.0
// Goal    Tasks run in order, no task is lost, a full queue refuses at once, and the destructor leaves neither tasks nor
//         threads.
// Method  Hold the workers at a latch to fill the queue; count tasks and the process's threads.
//         Every wait has a deadline.

#include "cpu_adam/worker_pool.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cpu_adam/internal/cpu_topology.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"

namespace forebay::cpu_adam {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kDeadline(20);

std::set<std::string> ThreadsOfThisProcess() {
  std::set<std::string> threads;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    threads.insert(task.path().filename());
  }
  return threads;
}

// Waits until no thread runs but those of `before`: the kernel lists a joined thread for a while. Threads of `before` may end
// too.
bool NoThreadIsLeftBut(const std::set<std::string>& before) {
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (!std::ranges::includes(before, ThreadsOfThisProcess())) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

class WorkerPoolTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::thread([] {}).join();  // a sanitizer starts its thread with our first one
    threads_before_ = ThreadsOfThisProcess();
  }
  void TearDown() override { EXPECT_TRUE(NoThreadIsLeftBut(threads_before_)); }

  std::unique_ptr<WorkerPool> Make(const WorkerPoolOptions& options) {
    absl::StatusOr<std::unique_ptr<WorkerPool>> pool = WorkerPool::Create(options);
    EXPECT_TRUE(pool.ok()) << pool.status();
    return pool.ok() ? *std::move(pool) : nullptr;
  }

  std::set<std::string> threads_before_;
};

TEST_F(WorkerPoolTest, HasOneThreadPerCoreAndNeverMore) {
  const int cores = Make({})->threads();
  EXPECT_GE(cores, 1);
  EXPECT_LE(cores, static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_EQ(Make({.threads = 10000})->threads(), cores);
  EXPECT_EQ(Make({.threads = 1})->threads(), 1);
}

TEST_F(WorkerPoolTest, OneThreadRunsTasksInTheOrderPosted) {
  std::vector<int> order;
  {
    const auto pool = Make({.threads = 1});
    for (int i = 0; i < 500; ++i) {
      ASSERT_TRUE(pool->TryPost([&order, i] { order.push_back(i); }));
    }
  }
  ASSERT_EQ(order.size(), 500u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(WorkerPoolTest, AFullQueueRefusesAndKeepsTheTask) {
  std::promise<void> started, gate;
  std::shared_future<void> open = gate.get_future().share();
  std::atomic<int> ran = 0;
  {
    const auto pool = Make({.threads = 1, .queue_tasks = 3});
    ASSERT_TRUE(pool->TryPost([&started, open] {
      started.set_value();
      open.wait_for(kDeadline);
    }));
    ASSERT_EQ(started.get_future().wait_for(kDeadline), std::future_status::ready);
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(pool->TryPost([&ran] { ++ran; }));
    WorkerPool::Task extra = [&ran] { ran += 100; };
    EXPECT_FALSE(pool->TryPost(std::move(extra)));
    // NOLINTNEXTLINE(bugprone-use-after-move): a pool that is full leaves the task untouched
    ASSERT_TRUE(extra != nullptr) << "a refused task stays with its owner";
    extra();
    gate.set_value();
  }
  EXPECT_EQ(ran, 103);
}

TEST_F(WorkerPoolTest, AThreadRunsTasksOfItsGroupThenThoseForAnyThenOthers) {
  std::promise<void> both_hold, gate, done;
  std::shared_future<void> open = gate.get_future().share();
  std::shared_future<void> end = done.get_future().share();
  std::atomic<int> holding = 0;
  std::vector<int> order;  // tasks of one thread; the other is blocked
  const auto hold = [&](const std::shared_future<void>& until) {
    return [&, until] {
      if (++holding == 2) both_hold.set_value();
      until.wait_for(kDeadline);
    };
  };
  const auto note = [&](int group) {
    return [&, group] {
      order.push_back(group);
      if (order.size() == 3) done.set_value();
    };
  };
  {
    const auto pool = Make({.groups_for_test = {{0}, {0}}});
    ASSERT_EQ(pool->groups().size(), 2U);
    ASSERT_TRUE(pool->TryPost(hold(open)));
    ASSERT_TRUE(pool->TryPost(hold(end)));
    ASSERT_EQ(both_hold.get_future().wait_for(kDeadline), std::future_status::ready);
    ASSERT_TRUE(pool->TryPost(note(1), 1));
    ASSERT_TRUE(pool->TryPost(note(WorkerPool::kAnyGroup)));
    ASSERT_TRUE(pool->TryPost(note(0), 0));
    gate.set_value();
    ASSERT_EQ(end.wait_for(kDeadline), std::future_status::ready);
  }
  using ::testing::ElementsAre;
  EXPECT_THAT(order, ::testing::AnyOf(ElementsAre(0, -1, 1), ElementsAre(1, -1, 0)));
}

TEST_F(WorkerPoolTest, NoThreadIsIdleWhileTasksOfOneGroupWait) {
  std::atomic<int> running = 0;
  std::promise<void> both;
  const auto meet = [&] {
    if (++running == 2) both.set_value();
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (running < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  };
  const auto pool = Make({.groups_for_test = {{0}, {0}}});
  ASSERT_TRUE(pool->TryPost(meet, 1));
  ASSERT_TRUE(pool->TryPost(meet, 1));
  EXPECT_EQ(both.get_future().wait_for(kDeadline), std::future_status::ready);
}

TEST(CpuTopology, SplitsTheCpusByNode) {
  const auto sets = internal::FindCpus(-1, {}, "numa:2 core:3 pu:2");
  ASSERT_TRUE(sets.ok()) << sets.status();
  ASSERT_EQ(sets->size(), 2U);
  EXPECT_THAT((*sets)[1].cpus, ::testing::ElementsAre(6, 7, 8, 9, 10, 11));
  EXPECT_EQ((*sets)[1].cores, 3);
  const auto some = internal::FindCpus(-1, {1, 6, 7}, "numa:2 core:3 pu:2");
  ASSERT_TRUE(some.ok()) << some.status();
  ASSERT_EQ(some->size(), 2U);
  EXPECT_EQ((*some)[1].cores, 1);
  const auto one = internal::FindCpus(1, {}, "numa:2 core:3 pu:2");
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->size(), 1U);
}

TEST(CpuTopology, SharesThreadsInProportionToTheCores) {
  const std::vector<internal::CpuSet> sets = {{{0, 1, 2, 3}, 4}, {{4, 5}, 2}};
  using ::testing::ElementsAre;
  EXPECT_THAT(internal::ShareThreads(0, sets), ElementsAre(4, 2));
  EXPECT_THAT(internal::ShareThreads(100, sets), ElementsAre(4, 2));
  EXPECT_THAT(internal::ShareThreads(3, sets), ElementsAre(2, 1));
  EXPECT_THAT(internal::ShareThreads(2, sets), ElementsAre(1, 1));
  EXPECT_TRUE(internal::ShareThreads(1, sets).empty());
}

TEST_F(WorkerPoolTest, TheDestructorRunsWhatIsQueued) {
  std::atomic<int> ran = 0;
  {
    const auto pool = Make({});
    for (int i = 0; i < 300; ++i) ASSERT_TRUE(pool->TryPost([&ran] { ++ran; }));
  }
  EXPECT_EQ(ran, 300);
}

TEST_F(WorkerPoolTest, ManyThreadsMayPostAndTasksMayPostTasks) {
  std::atomic<int> ran = 0;
  {
    const auto pool = Make({.queue_tasks = 64});
    std::vector<std::thread> posters;
    for (int p = 0; p < 3; ++p) {
      posters.emplace_back([&pool, &ran] {
        for (int i = 0; i < 400; ++i) {
          WorkerPool::Task task = [&pool, &ran] {
            ++ran;
            if (!pool->TryPost([&ran] { ++ran; })) ++ran;  // full queue: count here instead
          };
          // NOLINTNEXTLINE(bugprone-use-after-move): untouched where it was refused
          while (!pool->TryPost(std::move(task))) std::this_thread::yield();
        }
      });
    }
    for (std::thread& poster : posters) poster.join();
  }
  EXPECT_EQ(ran, 2 * 3 * 400);
}

TEST_F(WorkerPoolTest, ThreadsStayInTheirSetAndAreLessUrgent) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  int cpu = 0;
  while (CPU_ISSET(cpu, &allowed) == 0) ++cpu;
  std::promise<std::pair<int, int>> seen;
  const auto pool = Make({.cpus = {cpu}, .nice = 5});
  EXPECT_EQ(pool->threads(), 1);
  const int nice_before = getpriority(PRIO_PROCESS, 0);
  ASSERT_TRUE(pool->TryPost([&seen] {
    seen.set_value({sched_getcpu(), getpriority(PRIO_PROCESS, 0)});
  }));
  auto future = seen.get_future();
  ASSERT_EQ(future.wait_for(kDeadline), std::future_status::ready);
  const auto [ran_on, nice] = future.get();
  EXPECT_EQ(ran_on, cpu);
  EXPECT_EQ(nice, std::max(5, nice_before));
  EXPECT_EQ(getpriority(PRIO_PROCESS, 0), nice_before) << "the caller keeps its own";
}

TEST_F(WorkerPoolTest, ThreadsAreNeverMoreUrgentThanTheirMaker) {
  std::promise<int> seen;
  std::thread maker([&] {  // a thread, to change only its nice value
    ASSERT_EQ(setpriority(PRIO_PROCESS, 0, 17), 0);
    const auto pool = Make({.threads = 1, .nice = 5});
    ASSERT_TRUE(pool->TryPost([&seen] { seen.set_value(getpriority(PRIO_PROCESS, 0)); }));
  });
  maker.join();  // the pool's destructor has run all tasks
  auto future = seen.get_future();
  ASSERT_EQ(future.wait_for(kDeadline), std::future_status::ready);
  EXPECT_EQ(future.get(), 17);
}

TEST_F(WorkerPoolTest, WrongOptionsAreRefusedWithWhatThereIs) {
  const struct {
    WorkerPoolOptions options;
    const char* message;
  } kCases[] = {
      {{.threads = -1}, "-1 is negative"},
      {{.numa_node = 4711}, "NUMA node 4711 does not exist: this machine has "},
      {{.cpus = {100000}}, "CPU 100000 is not one that this process may use: "},
      {{.cpus = {-1}}, "CPU -1 "},
      {{.nice = 20}, "20 is not 0 to 19"},
      {{.queue_tasks = 0}, "0 tasks is not 1 to 65536"},
      {{.queue_tasks = 65537}, "65537 tasks"},
  };
  for (const auto& test : kCases) {
    const absl::Status status = WorkerPool::Create(test.options).status();
    EXPECT_EQ(protocol::IdOf(status), protocol::ErrorId::kOption);
    EXPECT_THAT(std::string(status.message()), HasSubstr(test.message));
  }
}

}  // namespace
}  // namespace forebay::cpu_adam
