// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/task_runner.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <utility>

#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {

absl::StatusOr<std::unique_ptr<TaskRunner>> TaskRunner::Create(const TaskRunnerOptions& options) {
  std::unique_ptr<TaskRunner> runner(new TaskRunner());
  ASSIGN_OR_RETURN(runner->finished_, LoopQueue<Task*>::Create(kFinishedMax));
  ASSIGN_OR_RETURN(runner->update_pool_, cpu_adam::WorkerPool::Create(options.update));
  ASSIGN_OR_RETURN(runner->setup_pool_, cpu_adam::WorkerPool::Create({.threads = 1}));
  return runner;
}

TaskRunner::~TaskRunner() {
  setup_pool_.reset();
  update_pool_.reset();
}

uint32_t TaskRunner::workers() const { return static_cast<uint32_t>(update_pool_->threads()); }

TaskRunner::Task& TaskRunner::AllocateTask() {
  for (size_t i = free_.size(); i-- > 0;) {
    if (free_[i]->runs.load(std::memory_order_acquire) > 0) continue;
    Task& task = *std::exchange(free_[i], free_.back());
    free_.pop_back();
    return task;
  }
  free_.reserve(std::bit_ceil(tasks_.size() + 1));  // every task returns to the free list
  return tasks_.emplace_back();
}

void TaskRunner::Start(PoolId pool, size_t parts, int group, Task& task) {
  FOREBAY_CHECK(parts > 0);
  ++in_flight_;
  task.parts = parts;
  task.next_part = 0;
  task.parts_left = parts;
  const int near =
      group < 0 ? Pool(pool).threads() : Pool(pool).groups()[static_cast<size_t>(group)].threads;
  const size_t runs = std::min(parts, static_cast<size_t>(near));
  task.runs = runs;
  for (size_t i = 0; i < runs; ++i) Queue(pool, group, [this, &task] { RunParts(task); });
}

void TaskRunner::RunParts(Task& task) {
  while (true) {
    const size_t part = task.next_part.fetch_add(1, std::memory_order_relaxed);
    if (part >= task.parts) break;
    task.work(part, task.then);
    if (task.parts_left.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
    FOREBAY_CHECK(finished_->Push(&task));
    task.runs.fetch_sub(1, std::memory_order_release);
    return;
  }
  task.runs.fetch_sub(1, std::memory_order_release);
  // The null entry wakes the loop when the pool's queue has room again.
  if (starved_.load()) FOREBAY_CHECK(finished_->Push(nullptr));
}

void TaskRunner::Queue(PoolId pool, int group, cpu_adam::WorkerPool::Task run) {
  if (waiting_.empty() && Pool(pool).TryPost(std::move(run), group)) return;
  // NOLINTNEXTLINE(bugprone-use-after-move): a pool that is full leaves the task untouched
  waiting_.push_back({pool, group, std::move(run)});
  PostWaiting();
}

// Posts tasks that wait while the pools have room. A task is refused because the pool's queue is full. The tasks in that queue
// end after starved_ was set; the one that ends next wakes the loop, which calls PostWaiting() again.
void TaskRunner::PostWaiting() {
  starved_.store(true);
  while (!waiting_.empty() &&
         Pool(waiting_.front().pool)
             .TryPost(std::move(waiting_.front().run), waiting_.front().group)) {
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
  finished_->DrainAll([this](Task* task) {
    if (task == nullptr) return;
    --in_flight_;
    // Objects that the work owned are destroyed before its outcome runs.
    task->work = nullptr;
    if (task->then != nullptr) task->then();
    task->then = nullptr;
    free_.push_back(task);
  });
  if (!waiting_.empty()) PostWaiting();
}

}  // namespace forebay::daemon
