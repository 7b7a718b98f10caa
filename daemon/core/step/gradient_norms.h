// SPDX-License-Identifier: Apache-2.0
// Computes norms of gathered sums, which ranks ask for before they call step.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory_resource>
#include <vector>

#include "absl/status/status.h"
#include "cpu_adam/square_sum.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/step/gradient_turns.h"
#include "daemon/core/update/sum_pages.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// A norm starts when all contributions to its parameters that have arrived are added. With shared attachment it also waits until
// every rank has ended its delivery. A norm that has started reads its ranges, so that nothing is added to them.
class GradientNorms {
 public:
  // The arguments outlive this object.
  GradientNorms(JobTasks& io, const protocol::Layout& layout, const MemoryPlan& plan,
                const GradientTurns& turns, SumPages& sums);

  void Ask(const CommandId& command, uint32_t rank, uint32_t param);
  // Starts norms and tasks that can start, and answers norms whose tasks have ended.
  void Advance();
  // Handles a task of Advance(). Returns true if it was the last one of its norm.
  bool OnSummed(const TaskDone& done);
  // Starts a task that squares the sums of the range. The page of the range is resident.
  TaskId StartSum(const SumPages::Range& range);

  void RefuseWaiting(const absl::Status& status);  // refuses norms that have not started
  void AnswerAll(const absl::Status& status);      // answers and deletes all norms
  void AnswerSession(SessionId session, const absl::Status& status);

  bool empty() const { return norms_.empty(); }
  bool has_tasks() const;
  bool Reads(const SumPages::Range& range) const;
  uint64_t unanswered(SessionId session) const;

 private:
  using Range = SumPages::Range;
  struct Norm {
    CommandId command;
    std::pmr::vector<Range> boxes;
    std::pmr::vector<Range> ranges;      // parts of the boxes that have a sum
    std::pmr::deque<Range> waiting;      // part of `ranges` whose tasks have not begun
    std::pmr::map<TaskId, Range> tasks;  // running tasks
    cpu_adam::SquareSum squares = {};
    bool started = false;
    bool answered = false;  // the command is answered, because its session has ended

    bool is_read() const { return tasks.empty() && waiting.empty(); }
  };

  void Answer(Norm& norm, const absl::Status& status);
  bool IsSummed(const Range& box) const;
  void AddSummed(const Range& box, std::pmr::vector<Range>& ranges) const;
  void StartTasks(Norm& norm);

  JobTasks& io_;
  const protocol::Layout& layout_;
  const MemoryPlan& plan_;
  const GradientTurns& turns_;
  SumPages& sums_;
  std::vector<Norm> norms_;
};

}  // namespace forebay::daemon
