#include "daemon/exec/task_runner.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {

absl::StatusOr<std::unique_ptr<TaskRunner>> TaskRunner::Create(const TaskRunnerOptions& options) {
  std::unique_ptr<TaskRunner> runner(new TaskRunner());
  ASSIGN_OR_RETURN(runner->finished_, LoopQueue<Outcome>::Create(kFinishedMax));
  ASSIGN_OR_RETURN(runner->update_pool_, cpu_adam::WorkerPool::Create(options.update));
  ASSIGN_OR_RETURN(runner->setup_pool_, cpu_adam::WorkerPool::Create({.threads = 1}));
  return runner;
}

TaskRunner::~TaskRunner() {
  setup_pool_.reset();
  update_pool_.reset();
}

uint32_t TaskRunner::workers() const { return static_cast<uint32_t>(update_pool_->threads()); }

void TaskRunner::Post(PoolId pool, Work work, int group) {
  ++in_flight_;
  Queue(pool, group, [finished = finished_.get(), run = std::move(work)]() mutable {
    Then then = run();
    run = nullptr;  // what the work owned is destroyed before its outcome is known
    FOREBAY_CHECK(finished->Push({.tasks = 1, .then = std::move(then)}));
  });
}

void TaskRunner::PostParts(PoolId pool, size_t parts, PartWork work, Then then, int group) {
  FOREBAY_CHECK(parts > 0);
  struct Shared {
    Shared(size_t count, PartWork part_work, Then outcome)
        : left(count), work(std::move(part_work)), then(std::move(outcome)) {}

    std::atomic<size_t> next = 0;
    std::atomic<size_t> left;
    PartWork work;
    Then then;
  };
  ++in_flight_;
  const auto shared = std::make_shared<Shared>(parts, std::move(work), std::move(then));
  const int near =
      group < 0 ? Pool(pool).threads() : Pool(pool).groups()[static_cast<size_t>(group)].threads;
  const auto threads = static_cast<size_t>(near);
  for (size_t i = 0; i < std::min(parts, threads); ++i) {
    Queue(pool, group, [this, shared, parts] {
      while (true) {
        const size_t part = shared->next.fetch_add(1, std::memory_order_relaxed);
        if (part >= parts) break;
        shared->work(part);
        if (shared->left.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
        shared->work = nullptr;  // as above
        FOREBAY_CHECK(finished_->Push({.tasks = 1, .then = std::move(shared->then)}));
        return;
      }
      // Else nothing would wake the loop when the pool's queue has room again.
      if (starved_.load()) FOREBAY_CHECK(finished_->Push({}));
    });
  }
}

void TaskRunner::Queue(PoolId pool, int group, cpu_adam::WorkerPool::Task task) {
  if (waiting_.empty() && Pool(pool).TryPost(std::move(task), group)) return;
  // NOLINTNEXTLINE(bugprone-use-after-move): a pool that is full leaves the task untouched
  waiting_.push_back({pool, group, std::move(task)});
  PostWaiting();
}

// A refused task finds a full queue; its tasks end after starved_ was set, and whichever ends next
// wakes the loop, which calls this again.
void TaskRunner::PostWaiting() {
  starved_.store(true);
  while (!waiting_.empty() &&
         Pool(waiting_.front().pool)
             .TryPost(std::move(waiting_.front().task), waiting_.front().group)) {
    waiting_.pop_front();
  }
  starved_.store(!waiting_.empty());
}

const std::vector<cpu_adam::WorkerGroup>& TaskRunner::worker_groups() const {
  return update_pool_->groups();
}

cpu_adam::WorkerPool& TaskRunner::Pool(PoolId pool) {
  return pool == PoolId::kUpdate ? *update_pool_ : *setup_pool_;
}

void TaskRunner::RunFinished() {
  finished_->DrainAll([this](Outcome& outcome) {
    in_flight_ -= outcome.tasks;
    if (outcome.then != nullptr) outcome.then();
  });
  if (!waiting_.empty()) PostWaiting();
}

}  // namespace forebay::daemon
