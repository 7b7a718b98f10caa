// SPDX-License-Identifier: Apache-2.0
// The threads that run the kernels: a bounded queue, parked when idle.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

namespace forebay::cpu_adam {

struct WorkerPoolOptions {
  // 0: one per physical core of the CPUs; more are cut to that number.
  int threads = 0;
  // hwloc logical index of the node whose cores are used; -1: all of the machine.
  int numa_node = -1;
  // The operating system's indices; not empty: exactly these, numa_node unused.
  std::vector<int> cpus = {};
  // 0 to 19, best effort; a higher value of the calling thread stays.
  int nice = 0;
  // Most tasks that can wait in each queue: one queue for each group, one for any group; > 0, <= kQueueTasksMax.
  size_t queue_tasks = 1024;
  // Tests alone: CPUs of each group, on a machine that has fewer NUMA nodes.
  std::vector<std::vector<int>> groups_for_test = {};
};

// Threads that run on the CPUs of one NUMA node.
struct WorkerGroup {
  std::vector<int> cpus;
  int threads = 0;
};

// Runs tasks in the order posted, each on one thread of the pool. The pool has a group of threads for each NUMA node; with
// fewer threads than nodes, one group for all. A thread runs tasks of its own group first, then those for any group, then those
// of other groups: no thread is idle while a task waits.
//
// Threads  TryPost() from any thread, tasks included. A thread may run on any core of its group.
// Limits   No heap allocation after Create() but what a task's own captures need.
class WorkerPool {
 public:
  using Task = absl::AnyInvocable<void()>;
  static constexpr size_t kQueueTasksMax = 1 << 16;
  static constexpr int kAnyGroup = -1;

  // Starts the threads, and does not wait for them.
  //
  // Errors  E_OPTION    an option breaks its rule above, or no such node or CPU; lists what exists.
  //         E_INTERNAL  the system refused a thread; no thread is left behind.
  static absl::StatusOr<std::unique_ptr<WorkerPool>> Create(const WorkerPoolOptions& options);

  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;
  // Runs all queued tasks, then joins the threads. No thread may post a task any more.
  ~WorkerPool();

  // Queues the task for a group (an index into groups()), or returns false and leaves it untouched
  // if the group's queue is full. Never waits for a task.
  [[nodiscard]] bool TryPost(Task&& task, int group = kAnyGroup);

  int threads() const;
  const std::vector<WorkerGroup>& groups() const;

 private:
  struct State;

 public:
  // Constructor for Create() alone, because State is private.
  explicit WorkerPool(std::unique_ptr<State> state);

 private:
  std::unique_ptr<State> state_;
};

}  // namespace forebay::cpu_adam
