// Runs work beside the loop thread and brings its outcome back.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "cpu_adam/worker_pool.h"
#include "daemon/exec/loop_queue.h"

namespace forebay::daemon {

enum class PoolId : uint8_t {
  kUpdate,  // arithmetic and copies: the update's workers
  kSetup,   // one thread for what blocks long: making and freeing arenas
};

struct TaskRunnerOptions {
  cpu_adam::WorkerPoolOptions update = {};
};

// Threads  Everything on the loop thread; work runs elsewhere.
// Limits   Post() never blocks; tasks for which the pool's queue has no room wait here, at most as
//          many as the state machine has tasks (bounded by sessions and commands in flight).
class TaskRunner {
 public:
  using Then = absl::AnyInvocable<void()>;                       // runs on the loop thread
  using Work = absl::AnyInvocable<Then()>;                       // runs on a worker
  using PartWork = absl::AnyInvocable<void(size_t part) const>;  // on several workers at once

  static constexpr size_t kFinishedMax = size_t{1} << 20;

  // Errors  of WorkerPool::Create.
  static absl::StatusOr<std::unique_ptr<TaskRunner>> Create(const TaskRunnerOptions& options);

  TaskRunner(const TaskRunner&) = delete;
  TaskRunner& operator=(const TaskRunner&) = delete;
  // Waits for the work in flight; its outcomes are dropped.
  ~TaskRunner();

  // `group`: of the update workers, see WorkerPool.
  void Post(PoolId pool, Work work, int group = cpu_adam::WorkerPool::kAnyGroup);

  // Runs `work` once for each part in [0, parts), on the workers that are free, and `then` when all
  // have ended: it sees what they wrote.
  void PostParts(PoolId pool, size_t parts, PartWork work, Then then,
                 int group = cpu_adam::WorkerPool::kAnyGroup);

  // Runs the outcomes of work that has ended.
  void RunFinished();

  // An eventfd: written when work has ended.
  int wake_fd() const { return finished_->fd(); }
  uint64_t in_flight() const { return in_flight_; }
  uint32_t workers() const;
  const std::vector<cpu_adam::WorkerGroup>& worker_groups() const;

 private:
  TaskRunner() = default;
  cpu_adam::WorkerPool& Pool(PoolId pool);
  void Queue(PoolId pool, int group, cpu_adam::WorkerPool::Task task);
  void PostWaiting();

  struct Outcome {
    // That have ended; 0: the pool's queue has room again.
    uint32_t tasks = 0;
    Then then;
  };
  std::unique_ptr<LoopQueue<Outcome>> finished_;
  struct Waiting {
    PoolId pool;
    int group;
    cpu_adam::WorkerPool::Task task;
  };
  std::deque<Waiting> waiting_;
  // Tasks wait, or are about to.
  std::atomic<bool> starved_ = false;
  uint64_t in_flight_ = 0;
  // Destroyed first: their work pushes into finished_.
  std::unique_ptr<cpu_adam::WorkerPool> update_pool_;
  std::unique_ptr<cpu_adam::WorkerPool> setup_pool_;
};

}  // namespace forebay::daemon
