#include "daemon/task_runner.h"

#include <atomic>
#include <utility>

#include "protocol/check.h"
#include "protocol/status_macros.h"

namespace forebay::daemon {

absl::StatusOr<std::unique_ptr<TaskRunner>> TaskRunner::Create(const TaskRunnerOptions& options) {
  std::unique_ptr<TaskRunner> runner(new TaskRunner());
  ASSIGN_OR_RETURN(runner->finished_, LoopQueue<Then>::Create(kFinishedMax));
  ASSIGN_OR_RETURN(runner->update_team_, cpu_adam::WorkerTeam::Create(options.update));
  ASSIGN_OR_RETURN(runner->making_team_, cpu_adam::WorkerTeam::Create({.threads = 1}));
  return runner;
}

TaskRunner::~TaskRunner() {
  making_team_.reset();
  update_team_.reset();
}

uint32_t TaskRunner::workers() const { return static_cast<uint32_t>(update_team_->threads()); }

void TaskRunner::Post(Crew crew, Work work) {
  ++in_flight_;
  Queue(crew, [finished = finished_.get(), run = std::move(work)]() mutable {
    Then then = run();
    run = nullptr;  // what the work held is let go before its outcome is known
    FOREBAY_CHECK(finished->Push(std::move(then)));
  });
}

void TaskRunner::PostParts(Crew crew, size_t parts, PartWork work, Then then) {
  FOREBAY_CHECK(parts > 0);
  struct Shared {
    std::atomic<size_t> left;
    PartWork work;
    Then then;
  };
  ++in_flight_;
  const auto shared = std::make_shared<Shared>(parts, std::move(work), std::move(then));
  for (size_t part = 0; part < parts; ++part) {
    Queue(crew, [finished = finished_.get(), shared, part] {
      shared->work(part);
      if (shared->left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
      shared->work = nullptr;  // as above
      FOREBAY_CHECK(finished->Push(std::move(shared->then)));
    });
  }
}

void TaskRunner::Queue(Crew crew, cpu_adam::WorkerTeam::Task task) {
  if (!waiting_.empty() || !Team(crew).TryPost(std::move(task))) {
    // NOLINTNEXTLINE(bugprone-use-after-move): a team that is full leaves the task untouched
    waiting_.push_back({crew, std::move(task)});
  }
}

cpu_adam::WorkerTeam& TaskRunner::Team(Crew crew) {
  return crew == Crew::kUpdate ? *update_team_ : *making_team_;
}

void TaskRunner::RunFinished() {
  for (Then& then : finished_->TakeAll()) {
    --in_flight_;
    then();
  }
  while (!waiting_.empty() &&
         Team(waiting_.front().crew).TryPost(std::move(waiting_.front().task))) {
    waiting_.pop_front();
  }
}

}  // namespace forebay::daemon
