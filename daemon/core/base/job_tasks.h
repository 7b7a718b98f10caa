// SPDX-License-Identifier: Apache-2.0
// Tracks the tasks and commands of a job that are in flight: starts the tasks and answers the commands. A session or a job may
// be closed as soon as none of its tasks and commands is in flight.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// The node's sink of actions: the list that actions go to, the counters of task and lease ids, and the memory resource for
// objects of one step (nodes of maps and sets, lists in actions).
class ActionSink {
 public:
  // `memory` outlives the sink, and every action.
  explicit ActionSink(std::pmr::memory_resource* memory) : memory_(memory), task_jobs_(memory) {}

  std::pmr::memory_resource* memory() const { return memory_; }
  // Sets the list to which Emit() appends actions, until the next call of Bind().
  void Bind(std::vector<Action>* actions) { actions_ = actions; }
  void Emit(Action action);

  TaskId NewTask(JobId job) {
    task_jobs_.emplace(++last_task_, job);
    return last_task_;
  }
  // Removes a task. Returns the job that started the task, or 0 if the id names no running task.
  JobId FinishTask(TaskId task);
  uint64_t NewLease() { return ++last_lease_; }
  void set_last_lease(uint64_t lease) { last_lease_ = lease; }

 private:
  std::pmr::memory_resource* memory_;
  std::vector<Action>* actions_ = nullptr;
  std::pmr::map<TaskId, JobId> task_jobs_;
  TaskId last_task_ = 0;
  uint64_t last_lease_ = 0;
};

// A command that has not been answered.
struct CommandId {
  SessionId session = 0;
  uint64_t tag = 0;
  uint16_t op = 0;
};

enum class TaskKind : uint8_t {
  kJobMemory,
  kJobSwap,
  kStepArena,
  kFloatSums,
  kSessionMemory,
  kCopyInitial,  // tasks from kCopyInitial to kSumGradient belong to an epoch (NewEpoch)
  kAddGradients,
  kMoveGradient,
  kSumGradient,
  kCopyExtraState,
  kReadBlock,
  kUpdateBlock,
  kInstallWeights,
  kWriteBlock,
  kMoveBlock,
  kAccessState,
  kWriteState,
  kLoadWeights,
  kSpillSums,
  kLoadSums,
  kSavePart,
  kKeepExtraStates,
  kRestore,
  kRestoreExtraStates,
  kDigestWeights,
};

struct Task {
  TaskKind kind = TaskKind::kJobMemory;
  std::pmr::vector<SessionId> sessions = {};  // sessions whose arenas the task uses
  uint64_t epoch = 0;
};

class JobTasks {
 public:
  JobTasks(ActionSink& actions, JobId job)
      : actions_(actions), job_(job), tasks_(actions.memory()) {}

  JobId job() const { return job_; }
  ActionSink& actions() { return actions_; }
  std::pmr::memory_resource* memory() const { return actions_.memory(); }
  // Set the committed step and the attempt that every answer carries. The answer to a fetch carries another number as
  // `attempt`.
  void set_committed_step(uint64_t step) { committed_step_ = step; }
  void set_attempt(uint64_t attempt) { attempt_ = attempt; }

  // Starts an action that has `task` and `job` fields. The task uses the arena of `session` (0: none) until it has ended.
  template <typename TaskAction>
  TaskId Start(TaskKind kind, SessionId session, TaskAction action) {
    std::pmr::vector<SessionId> sessions(memory());
    if (session != 0) sessions.push_back(session);
    const TaskId task = NewTask(kind, std::move(sessions));
    action.task = task;
    action.job = job_;
    actions_.Emit(std::move(action));
    return task;
  }
  TaskId StartAdd(AddGradients action);
  TaskId StartSessionMemory(SessionId session, uint64_t grad_bytes);
  Task Finish(TaskId id);  // CHECKs that the task belongs to this job
  bool idle() const { return tasks_.empty(); }

  // Discards the gradients and initial parameters being gathered. Their running tasks become stale. No new task may touch
  // the same bytes until stale_tasks() is 0.
  void NewEpoch();
  uint64_t epoch() const { return epoch_; }
  uint64_t stale_tasks() const { return stale_tasks_; }

  void Open(SessionId session) {
    sessions_.emplace(session,
                      SessionCounters{.waiting = Tags(memory()), .unheard = Tags(memory())});
  }
  void Arrived(SessionId session, uint64_t tag) { sessions_.at(session).waiting.insert(tag); }
  // Answers a command. Nothing is emitted if the session has ended.
  void Answer(const CommandId& command, const absl::Status& status);
  void Answer(const CommandId& command, protocol::Completion completion,
              const absl::Status& status = {});
  // The session's client is disconnected. Commands that are waiting now get no answer, unless the client sends them again
  // (Rejoin).
  void Disconnect(SessionId session);
  // True if a command with this tag arrived before Disconnect() and still waits. The client gets the answer to that command,
  // and the repeated command is not run. False if the command is new.
  bool Rejoin(SessionId session, uint64_t tag);
  void End(SessionId session) { sessions_.at(session).ended = true; }
  void Close(SessionId session) { sessions_.erase(session); }

  uint64_t tasks_of(SessionId session) const { return sessions_.at(session).tasks; }
  uint64_t commands_of(SessionId session) const { return sessions_.at(session).waiting.size(); }

 private:
  using Tags = std::pmr::multiset<uint64_t>;  // a client may use a tag twice
  struct SessionCounters {
    uint64_t tasks = 0;  // running tasks that use the session's arena
    Tags waiting;        // commands that arrived and are not answered
    Tags unheard;        // subset of `waiting`: sent before the client was disconnected
    bool ended = false;
  };

  TaskId NewTask(TaskKind kind, std::pmr::vector<SessionId> sessions);

  ActionSink& actions_;
  JobId job_;
  uint64_t committed_step_ = 0;
  uint64_t attempt_ = 0;
  uint64_t epoch_ = 0;
  uint64_t stale_tasks_ = 0;
  std::pmr::map<TaskId, Task> tasks_;
  std::map<SessionId, SessionCounters> sessions_;
};

}  // namespace forebay::daemon
