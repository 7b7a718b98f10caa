// SPDX-License-Identifier: Apache-2.0
// Runs work on worker threads, and the outcome of the work on the loop thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_adam/worker_pool.h"
#include "daemon/exec/inplace_function.h"
#include "daemon/exec/loop_queue.h"

namespace forebay::daemon {

enum class PoolId : uint8_t {
  kUpdate,  // arithmetic and copies: the update's workers
  kSetup,   // a single thread for work that blocks for long
};

struct TaskRunnerOptions {
  cpu_adam::WorkerPoolOptions update = {};
};

// Stores work, outcomes and their captures in a table of tasks, and destroys them on the loop thread.
//
// Threads  Everything on the loop thread; work runs elsewhere.
// Limits   Post() never blocks. Tasks that the pool's queue cannot take wait in this object, at most as many as the state
//          machine has tasks (bounded by sessions and commands in flight). Allocates no heap memory unless more tasks are in
//          progress than ever before.
class TaskRunner {
 public:
  // Most bytes of captures: kWorkBytes for work, kThenBytes for its outcome on the loop thread.
  static constexpr size_t kWorkBytes = 768;
  static constexpr size_t kThenBytes = 512;
  using Then = InplaceFunction<void(), kThenBytes>;

  static constexpr size_t kFinishedMax = size_t{1} << 20;

  // Errors  of WorkerPool::Create.
  static absl::StatusOr<std::unique_ptr<TaskRunner>> Create(const TaskRunnerOptions& options);

  TaskRunner(const TaskRunner&) = delete;
  TaskRunner& operator=(const TaskRunner&) = delete;
  // Waits for the work in flight; its outcomes are dropped.
  ~TaskRunner();

  // Runs `work`, a function without arguments, on a worker, and the Then that it returns on the loop thread. `group`: group of
  // the update workers, see WorkerPool.
  template <typename Work>
  void Post(PoolId pool, Work work, int group = cpu_adam::WorkerPool::kAnyGroup) {
    Task& task = AllocateTask();
    task.work = [run = std::move(work)](size_t, Then& then) mutable { then = run(); };
    Start(pool, /*parts=*/1, group, task);
  }

  // Runs `work(part)` once for each part in [0, parts), several at once on the workers that are free. Runs `then` when all
  // parts have ended: it sees what they wrote.
  template <typename PartWork>
  void PostParts(PoolId pool, size_t parts, PartWork work, Then then,
                 int group = cpu_adam::WorkerPool::kAnyGroup) {
    Task& task = AllocateTask();
    task.work = [run = std::move(work)](size_t part, Then&) { run(part); };
    task.then = std::move(then);
    Start(pool, parts, group, task);
  }

  // Destroys `resource` on the pool that may block.
  template <typename Resource>
  void Retire(Resource resource) {
    Post(PoolId::kSetup, [resource = std::move(resource)]() mutable -> Then {
      { const Resource dead = std::move(resource); }
      return [] {};
    });
  }

  // Runs the outcomes of work that has ended.
  void RunFinished();

  // Returns an eventfd that is written when work has ended.
  int wake_fd() const { return finished_->fd(); }
  uint64_t in_flight() const { return in_flight_; }
  uint32_t workers() const;
  const std::vector<cpu_adam::WorkerGroup>& worker_groups() const;

 private:
  // State of one call of Post() or PostParts().
  struct Task {
    InplaceFunction<void(size_t part, Then& then), kWorkBytes> work;
    Then then;
    size_t parts = 0;
    std::atomic<size_t> next_part = 0;
    std::atomic<size_t> parts_left = 0;
    // Entries in the pool's queue that have not ended. The last entries may find no remaining part.
    std::atomic<size_t> runs = 0;
  };
  struct Waiting {
    PoolId pool;
    int group;
    cpu_adam::WorkerPool::Task run;
  };

  TaskRunner() = default;
  cpu_adam::WorkerPool& Pool(PoolId pool);
  Task& AllocateTask();
  void Start(PoolId pool, size_t parts, int group, Task& task);
  void RunParts(Task& task);
  void Queue(PoolId pool, int group, cpu_adam::WorkerPool::Task run);
  void PostWaiting();

  // Queue of tasks that have ended. A null item: the pool's queue has room again.
  std::unique_ptr<LoopQueue<Task*>> finished_;
  std::deque<Task> tasks_;
  std::vector<Task*> free_;  // tasks to use again, once their runs have ended
  std::deque<Waiting> waiting_;
  // True if tasks wait for room in a pool's queue, or are about to wait.
  std::atomic<bool> starved_ = false;
  uint64_t in_flight_ = 0;
  // The pools are destroyed first, because their work pushes into finished_.
  std::unique_ptr<cpu_adam::WorkerPool> update_pool_;
  std::unique_ptr<cpu_adam::WorkerPool> setup_pool_;
};

}  // namespace forebay::daemon
