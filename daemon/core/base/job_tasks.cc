// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/base/job_tasks.h"

#include <utility>

#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {
namespace {

bool IsOfOneEpoch(TaskKind kind) {
  return kind == TaskKind::kCopyInitial || kind == TaskKind::kAddGradients ||
         kind == TaskKind::kMoveGradient || kind == TaskKind::kSumGradient;
}

}  // namespace

void ActionSink::Emit(Action action) { actions_->push_back(std::move(action)); }

JobId ActionSink::FinishTask(TaskId task) {
  const auto it = task_jobs_.find(task);
  if (it == task_jobs_.end()) return 0;
  const JobId job = it->second;
  task_jobs_.erase(it);
  return job;
}

TaskId JobTasks::NewTask(TaskKind kind, std::pmr::vector<SessionId> sessions) {
  const TaskId id = actions_.NewTask(job_);
  for (const SessionId session : sessions) ++sessions_.at(session).tasks;
  tasks_.emplace(id, Task{.kind = kind, .sessions = std::move(sessions), .epoch = epoch_});
  return id;
}

TaskId JobTasks::StartAdd(AddGradients action) {
  std::pmr::vector<SessionId> sessions(memory());
  for (const GradientSource& source : action.sources) {
    if (source.session != 0) sessions.push_back(source.session);
  }
  const TaskId task = NewTask(TaskKind::kAddGradients, std::move(sessions));
  action.task = task;
  action.job = job_;
  actions_.Emit(std::move(action));
  return task;
}

TaskId JobTasks::StartSessionMemory(SessionId session, uint64_t grad_bytes) {
  const TaskId id = NewTask(TaskKind::kSessionMemory, {session});
  actions_.Emit(
      CreateSessionMemory{.task = id, .job = job_, .session = session, .grad_bytes = grad_bytes});
  return id;
}

Task JobTasks::Finish(TaskId id) {
  const auto it = tasks_.find(id);
  FOREBAY_CHECK(it != tasks_.end());
  Task task = std::move(it->second);
  tasks_.erase(it);
  for (const SessionId session : task.sessions) {
    SessionCounters& counters = sessions_.at(session);
    FOREBAY_CHECK(counters.tasks > 0);
    --counters.tasks;
  }
  if (IsOfOneEpoch(task.kind) && task.epoch != epoch_) {
    FOREBAY_CHECK(stale_tasks_ > 0);
    --stale_tasks_;
  }
  return task;
}

void JobTasks::NewEpoch() {
  for (const auto& [id, task] : tasks_) {
    if (IsOfOneEpoch(task.kind) && task.epoch == epoch_) ++stale_tasks_;
  }
  ++epoch_;
}

void JobTasks::Disconnect(SessionId session) {
  SessionCounters& counters = sessions_.at(session);
  counters.unheard = counters.waiting;
}

bool JobTasks::Rejoin(SessionId session, uint64_t tag) {
  Tags& unheard = sessions_.at(session).unheard;
  const auto first = unheard.find(tag);
  if (first == unheard.end()) return false;
  unheard.erase(first);
  return true;
}

void JobTasks::Answer(const CommandId& command, const absl::Status& status) {
  Answer(command, protocol::Completion{}, status);
}

void JobTasks::Answer(const CommandId& command, protocol::Completion completion,
                      const absl::Status& status) {
  const auto it = sessions_.find(command.session);
  if (it == sessions_.end() || it->second.ended) return;
  Tags& waiting = it->second.waiting;
  const auto own = waiting.find(command.tag);
  FOREBAY_CHECK(own != waiting.end());
  waiting.erase(own);
  Tags& unheard = it->second.unheard;
  if (const auto nobodys = unheard.find(command.tag); nobodys != unheard.end()) {
    unheard.erase(nobodys);
    return;
  }
  completion.tag = command.tag;
  completion.op = command.op;
  completion.error = static_cast<uint32_t>(protocol::IdOf(status));
  completion.committed_step = committed_step_;
  // The answer of a fetch has another number as `attempt`: FetchQueue has set it.
  if (command.op != static_cast<uint16_t>(protocol::Op::kFetch)) completion.attempt = attempt_;
  actions_.Emit(
      AnswerCommand{.session = command.session, .completion = completion, .status = status});
}

}  // namespace forebay::daemon
