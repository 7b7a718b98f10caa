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
  explicit State(size_t queue_tasks) : ring(queue_tasks) {}

  void RunTasks();

  protocol::Mutex mutex;
  std::condition_variable_any work;
  std::vector<Task> ring ABSL_GUARDED_BY(mutex);  // `queued` tasks from `head` on
  size_t head ABSL_GUARDED_BY(mutex) = 0;
  size_t queued ABSL_GUARDED_BY(mutex) = 0;
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

// Both are best effort: a thread that the system will not move or lower still does its work.
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

}  // namespace

void WorkerPool::State::RunTasks() {
  while (true) {
    Task task;
    {
      MutexLock lock(mutex);
      while (queued == 0 && !stopping) work.wait(mutex);
      if (queued == 0) return;
      task = std::exchange(ring[head], Task());
      head = (head + 1) % ring.size();
      --queued;
    }
    task();
  }
}

absl::StatusOr<std::unique_ptr<WorkerPool>> WorkerPool::Create(const WorkerPoolOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(internal::CpuSet cpus, internal::FindCpus(options.numa_node, options.cpus));
  const int threads = options.threads == 0 ? cpus.cores : std::min(options.threads, cpus.cores);

  // From here on the destructor joins what runs already.
  auto pool = std::make_unique<WorkerPool>(std::make_unique<State>(options.queue_tasks));
  pool->state_->threads.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    try {
      pool->state_->threads.emplace_back(
          [state = pool->state_.get(), set = cpus.cpus, nice = options.nice] {
            PlaceThisThread(set, nice);
            state->RunTasks();
          });
    } catch (const std::system_error& error) {
      return MakeError(ErrorId::kInternal, absl::StrCat("worker thread ", i, " of ", threads, ": ",
                                                        error.code().message()));
    }
  }
  return pool;
}

WorkerPool::WorkerPool(std::unique_ptr<State> state) : state_(std::move(state)) {}

WorkerPool::~WorkerPool() {
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
  }
  state_->work.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

bool WorkerPool::TryPost(Task&& task) {
  FOREBAY_CHECK(task != nullptr);
  {
    MutexLock lock(state_->mutex);
    if (state_->queued == state_->ring.size()) return false;
    state_->ring[(state_->head + state_->queued) % state_->ring.size()] = std::move(task);
    ++state_->queued;
  }
  state_->work.notify_one();
  return true;
}

int WorkerPool::threads() const { return static_cast<int>(state_->threads.size()); }

}  // namespace forebay::cpu_adam
