// The threads that run the kernels: a bounded queue, parked when idle.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

namespace forebay::cpu_adam {

struct WorkerPoolOptions {
  int threads = 0;     // 0: one per physical core of the set; more are cut to that number
  int numa_node = -1;  // hwloc logical index whose cores are used; -1: all of the machine
  // operating-system indices; not empty: exactly these, numa_node unused
  std::vector<int> cpus = {};
  int nice = 0;               // 0 to 19, best effort; never below the creator's
  size_t queue_tasks = 1024;  // > 0, <= kQueueTasksMax
};

// Runs tasks in the order posted, each on one thread of the pool.
//
// Threads  TryPost() from any thread, tasks included. Every thread may run on any core of the set.
// Limits   No heap allocation after Create() but what a task's own captures need.
class WorkerPool {
 public:
  using Task = absl::AnyInvocable<void()>;
  static constexpr size_t kQueueTasksMax = 1 << 16;

  // Starts the threads; returns without waiting for them.
  //
  // Errors  E_OPTION    an option breaks its rule above, or no such node or CPU; lists what exists.
  //         E_INTERNAL  the system refused a thread; no thread is left behind.
  static absl::StatusOr<std::unique_ptr<WorkerPool>> Create(const WorkerPoolOptions& options);

  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;
  ~WorkerPool();  // runs what is queued, then joins; nobody may post any more

  // Queues the task, or returns false and leaves it untouched where the queue is full. Never waits
  // for a task.
  [[nodiscard]] bool TryPost(Task&& task);

  int threads() const;

 private:
  struct State;

 public:
  explicit WorkerPool(std::unique_ptr<State> state);  // for Create() alone: nobody else has a State

 private:
  std::unique_ptr<State> state_;
};

}  // namespace forebay::cpu_adam
