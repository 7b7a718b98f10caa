// SPDX-License-Identifier: Apache-2.0
#include "cpu_adam/worker_pool.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <condition_variable>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_adam/internal/cpu_topology.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"

namespace forebay::cpu_adam {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::MutexLock;

struct WorkerPool::State {
  struct Queue {
    std::vector<Task> ring;  // `queued` tasks from `head` on
    size_t head = 0;
    size_t queued = 0;

    bool Push(Task&& task) {
      if (queued == ring.size()) return false;
      ring[(head + queued) % ring.size()] = std::move(task);
      ++queued;
      return true;
    }
    Task Pop() {
      Task task = std::exchange(ring[head], Task());
      head = (head + 1) % ring.size();
      --queued;
      return task;
    }
  };

  // Threads of a group that wait for a task, and those of them that were woken.
  struct Waiters {
    std::condition_variable_any woken;
    int idle = 0;
    int wakeups = 0;
  };

  State(std::vector<WorkerGroup> pool_groups, size_t queue_tasks)
      : groups(std::move(pool_groups)), queues(groups.size() + 1), waiters(groups.size()) {
    for (Queue& queue : queues) queue.ring.resize(queue_tasks);
  }

  void RunTasks(size_t group);
  Task NextTask(size_t group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void WakeOne(size_t queue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  const std::vector<WorkerGroup> groups;
  protocol::Mutex mutex;
  // one queue for each group, then one for any group
  std::vector<Queue> queues ABSL_GUARDED_BY(mutex);
  std::vector<Waiters> waiters ABSL_GUARDED_BY(mutex);
  bool stopping ABSL_GUARDED_BY(mutex) = false;

  std::vector<std::thread> threads;  // written by Create() and the destructor alone
};

namespace {

absl::Status CheckOptions(const WorkerPoolOptions& options) {
  if (options.threads < 0) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("worker threads: ", options.threads, " is negative"));
  }
  if (options.nice < 0 || options.nice > 19) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("nice value of the workers: ", options.nice, " is not 0 to 19"));
  }
  if (options.queue_tasks == 0 || options.queue_tasks > WorkerPool::kQueueTasksMax) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("worker queue: ", options.queue_tasks, " tasks is not 1 to ",
                                  WorkerPool::kQueueTasksMax));
  }
  return absl::OkStatus();
}

// Moves this thread to `cpus` and raises its nice value. Both are best effort: if the system refuses, the thread still does its
// work.
void PlaceThisThread(const std::vector<int>& cpus, int nice) {
  cpu_set_t* set = CPU_ALLOC(cpus.back() + 1);
  const size_t set_bytes = CPU_ALLOC_SIZE(cpus.back() + 1);
  CPU_ZERO_S(set_bytes, set);
  for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), set_bytes, set);
  (void)sched_setaffinity(0, set_bytes, set);
  CPU_FREE(set);
  // On Linux the nice value belongs to the thread: setpriority(2), "C library/kernel differences".
  if (nice > getpriority(PRIO_PROCESS, 0)) (void)setpriority(PRIO_PROCESS, 0, nice);
}

absl::StatusOr<std::vector<WorkerGroup>> MakeGroups(const WorkerPoolOptions& options) {
  std::vector<WorkerGroup> groups;
  for (const std::vector<int>& cpus : options.groups_for_test) groups.push_back({cpus, 1});
  if (!groups.empty()) return groups;
  ASSIGN_OR_RETURN(const std::vector<internal::CpuSet> sets,
                   internal::FindCpus(options.numa_node, options.cpus));
  const std::vector<int> shares = internal::ShareThreads(options.threads, sets);
  if (!shares.empty()) {
    for (size_t i = 0; i < sets.size(); ++i) groups.push_back({sets[i].cpus, shares[i]});
    return groups;
  }
  WorkerGroup& all = groups.emplace_back();
  all.threads = options.threads;
  for (const internal::CpuSet& set : sets) {
    all.cpus.insert(all.cpus.end(), set.cpus.begin(), set.cpus.end());
  }
  std::ranges::sort(all.cpus);
  return groups;
}

}  // namespace

// Null: no task is queued.
WorkerPool::Task WorkerPool::State::NextTask(size_t group) {
  if (queues[group].queued > 0) return queues[group].Pop();
  if (queues.back().queued > 0) return queues.back().Pop();
  for (Queue& queue : queues) {
    if (queue.queued > 0) return queue.Pop();
  }
  return nullptr;
}

// An idle thread of the queue's group, else of any.
void WorkerPool::State::WakeOne(size_t queue) {
  Waiters* found = queue < waiters.size() && waiters[queue].idle > 0 ? &waiters[queue] : nullptr;
  for (size_t i = 0; found == nullptr && i < waiters.size(); ++i) {
    if (waiters[i].idle > 0) found = &waiters[i];
  }
  if (found == nullptr) return;
  --found->idle;
  ++found->wakeups;
  found->woken.notify_one();
}

void WorkerPool::State::RunTasks(size_t group) {
  while (true) {
    Task task;
    {
      MutexLock lock(mutex);
      task = NextTask(group);
      while (task == nullptr) {
        if (stopping) return;
        Waiters& own = waiters[group];
        ++own.idle;
        while (own.wakeups == 0 && !stopping) own.woken.wait(mutex);
        if (own.wakeups > 0) {
          --own.wakeups;
        } else {
          --own.idle;
        }
        task = NextTask(group);
      }
    }
    task();
  }
}

absl::StatusOr<std::unique_ptr<WorkerPool>> WorkerPool::Create(const WorkerPoolOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(std::vector<WorkerGroup> groups, MakeGroups(options));

  // If a later statement fails, the destructor joins the threads that run already.
  auto pool =
      std::make_unique<WorkerPool>(std::make_unique<State>(std::move(groups), options.queue_tasks));
  State* const state = pool->state_.get();
  for (size_t group = 0; group < state->groups.size(); ++group) {
    for (int i = 0; i < state->groups[group].threads; ++i) {
      try {
        state->threads.emplace_back([state, group, nice = options.nice] {
          PlaceThisThread(state->groups[group].cpus, nice);
          state->RunTasks(group);
        });
      } catch (const std::system_error& error) {
        return MakeError(ErrorId::kInternal, absl::StrCat("worker thread ", state->threads.size(),
                                                          ": ", error.code().message()));
      }
    }
  }
  return pool;
}

WorkerPool::WorkerPool(std::unique_ptr<State> state) : state_(std::move(state)) {}

WorkerPool::~WorkerPool() {
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    for (State::Waiters& waiters : state_->waiters) waiters.woken.notify_all();
  }
  for (std::thread& thread : state_->threads) thread.join();
}

bool WorkerPool::TryPost(Task&& task, int group) {
  FOREBAY_CHECK(task != nullptr && group < static_cast<int>(state_->groups.size()));
  const size_t queue = group == kAnyGroup ? state_->groups.size() : static_cast<size_t>(group);
  MutexLock lock(state_->mutex);
  if (!state_->queues[queue].Push(std::move(task))) return false;
  state_->WakeOne(queue);
  return true;
}

const std::vector<WorkerGroup>& WorkerPool::groups() const { return state_->groups; }

int WorkerPool::threads() const { return static_cast<int>(state_->threads.size()); }

}  // namespace forebay::cpu_adam
