// Clients' reads of optimizer states, one command at a time, block by block, between steps.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/block_map.h"
#include "daemon/core/events.h"
#include "daemon/core/job_tasks.h"
#include "daemon/core/step_pipeline.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

class StateReads {
 public:
  StateReads(JobTasks& io, std::shared_ptr<const protocol::Layout> layout, StepPipeline& pipeline)
      : io_(io), layout_(std::move(layout)), pipeline_(pipeline) {}

  // A checked kReadState.
  void Add(const CommandId& command, const protocol::Command& words);

  // Goes on with the read in progress, or begins the next; called while no step is applied. A read
  // in progress must end before a step begins to update.
  void Pump();
  void OnRead(const StepPipeline::ReadOutcome& outcome);
  void OnDecoded(const TaskDone& done);

  // Answers the reads of a session (0: of all) with `status`. A task that runs is not interrupted; its
  // result is ignored.
  void Drop(SessionId session, const absl::Status& status);

  bool in_progress() const { return phase_ != Phase::kIdle; }
  uint64_t unanswered(SessionId session) const;

 private:
  struct Request {
    CommandId command;
    bool answered = false;
    uint32_t param = 0;
    uint32_t state = 0;              // index into protocol::StateNames
    uint64_t grad_offset_bytes = 0;  // of the next piece
    std::deque<ElementRun> pieces;   // the first is in progress
  };
  enum class Phase : uint8_t {
    kIdle,         // no read is in progress
    kWaitingSlot,  // for a staging slot, or for a read that was under way
    kReading,      // its own read into a slot
    kDecoding,
  };

  void StartDecode();
  void End(const absl::Status& status);

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  StepPipeline& pipeline_;
  Phase phase_ = Phase::kIdle;
  bool own_slot_ = false;  // the block was read for this alone: its slot is given back at once
  Request current_;
  std::deque<Request> queue_;
};

}  // namespace forebay::daemon
