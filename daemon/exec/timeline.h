// SPDX-License-Identifier: Apache-2.0
// Timed events of the newest published step of a job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "protocol/layout.h"

namespace forebay::daemon {

enum class Lane : uint8_t { kGradient, kSwapRead, kUpdate, kSwapWrite, kStep };

const char* Name(Lane lane);  // "gradient", "swap read", "update", "swap write", "step"

// Subject of an event. TimedEvent::index is its number.
enum class TimedSubject : uint8_t {
  kPartition,
  kBlock,
  kWeightsOfBlock,
  kWeightsPart,
  kGradientPage,
  kStep
};

struct TimedEvent {
  Lane lane = Lane::kStep;
  TimedSubject subject = TimedSubject::kStep;
  uint64_t index = 0;
  uint64_t start_ns = 0;  // CLOCK_MONOTONIC
  uint64_t end_ns = 0;
  uint64_t bytes = 0;
};

// "block 12"; for a partition its name in the layout.
std::string NameOf(const TimedEvent& event, const protocol::Layout& layout);

// An event in the form that people see, of the daemon or of a rank.
struct ShownEvent {
  std::string process;  // "forebayd", "rank 0"
  std::string lane;
  std::string name;
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint64_t bytes = 0;
};

// Threads  The loop thread.
// Limits   At most kEventsMax events for each step; later events are dropped. Allocates no heap memory unless a step has more
//          events than every step before.
class Timeline {
 public:
  static constexpr size_t kEventsMax = 2048;

  void Add(const TimedEvent& event);

  // Call it when all ranks have called step. If it is called several times before a commit, the last call belongs to the
  // committed step.
  void StepCalled(uint64_t now_ns) { step_called_ns_ = now_ns; }
  // Call it when a step is committed. StepCalled() of the next step may come before StepPublished() of this step.
  void StepCommitted(uint64_t now_ns);
  // Publishes the events that were added since the last publication: newest() returns them.
  void StepPublished(uint64_t step, uint64_t now_ns);

  const std::vector<TimedEvent>& newest() const { return newest_; }
  uint64_t newest_step() const { return newest_step_; }  // 0 if no step was published
  // Seconds from the last rank's call of step to the publication, and to the decision.
  double newest_seconds() const { return newest_seconds_; }
  double newest_decision_seconds() const { return newest_decision_seconds_; }

 private:
  std::vector<TimedEvent> current_;
  std::vector<TimedEvent> newest_;
  uint64_t step_called_ns_ = 0;
  uint64_t committed_step_called_ns_ = 0;  // 0: no committed step waits to be published
  double decision_seconds_ = 0;            // decision time of that committed step
  uint64_t newest_step_ = 0;
  double newest_seconds_ = 0;
  double newest_decision_seconds_ = 0;
};

}  // namespace forebay::daemon
