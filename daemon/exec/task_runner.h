// Takes work off the loop thread and brings its outcome back.
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
  kSetup,   // one thread for what blocks long: arenas made and unmade
};

struct TaskRunnerOptions {
  cpu_adam::WorkerPoolOptions update = {};
};

// Threads  Everything on the loop thread; work runs elsewhere.
// Limits   Post() never blocks; what the pool's queue has no room for waits here, as many as the
//          state machine has tasks (bounded by sessions and commands in flight).
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
  ~TaskRunner();  // waits for the work in flight; its outcomes are dropped

  void Post(PoolId pool, Work work);

  // Runs `work` once for each part in [0, parts), on the workers that are free, and `then` when all
  // have ended: it sees what they wrote.
  void PostParts(PoolId pool, size_t parts, PartWork work, Then then);

  // Runs the outcomes that are there.
  void RunFinished();

  int wake_fd() const { return finished_->fd(); }  // an eventfd: written when outcomes are there
  uint64_t in_flight() const { return in_flight_; }
  uint32_t workers() const;

 private:
  TaskRunner() = default;
  cpu_adam::WorkerPool& Pool(PoolId pool);
  void Queue(PoolId pool, cpu_adam::WorkerPool::Task task);

  void PostWaiting();

  struct Outcome {
    uint32_t tasks = 0;  // that have ended; 0: the pool's queue has room again
    Then then;
  };
  std::unique_ptr<LoopQueue<Outcome>> finished_;
  struct Waiting {
    PoolId pool;
    cpu_adam::WorkerPool::Task task;
  };
  std::deque<Waiting> waiting_;
  std::atomic<bool> starved_ = false;  // tasks wait, or are about to
  uint64_t in_flight_ = 0;
  std::unique_ptr<cpu_adam::WorkerPool>
      update_pool_;  // die first: their work pushes into finished_
  std::unique_ptr<cpu_adam::WorkerPool> setup_pool_;
};

}  // namespace forebay::daemon
