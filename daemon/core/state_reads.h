// Clients' reads of optimizer states, one command at a time, block by block, between steps.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/events.h"
#include "daemon/core/job_io.h"
#include "daemon/core/step_pipeline.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

class StateReads {
 public:
  // Takes a checked kReadState.
  void Add(const CommandId& command, const protocol::Command& words, const protocol::Layout& layout,
           const StepPipeline& pipeline);

  // Goes on with the read in progress, or begins the next; called while no step is applied. A read
  // in progress must end before a step begins to update.
  void Pump(JobIo& io, StepPipeline& pipeline);
  void OnRead(JobIo& io, StepPipeline& pipeline, const StepPipeline::ReadOutcome& outcome);
  void OnCopied(JobIo& io, StepPipeline& pipeline, const TaskDone& done);

  // Answers the reads of a session (0: of all) with `status`; a copy that runs goes on unobserved.
  void Drop(JobIo& io, StepPipeline& pipeline, SessionId session, const absl::Status& status);

  bool in_progress() const { return phase_ != Phase::kIdle; }
  uint64_t unanswered(SessionId session) const;

 private:
  struct Piece {
    uint32_t block = 0;
    uint64_t block_offset_bytes = 0;
    uint64_t bytes = 0;
  };
  struct Request {
    CommandId command;
    bool answered = false;
    uint64_t grad_offset_bytes = 0;  // of the next piece
    std::deque<Piece> pieces;        // the first is in progress
  };
  enum class Phase : uint8_t {
    kIdle,         // no read is in progress
    kWaitingSlot,  // for a staging slot, or for a read that was under way
    kReading,      // its own read into a slot
    kCopying,
  };

  void StartCopy(JobIo& io, StepPipeline& pipeline);
  void End(JobIo& io, const absl::Status& status);

  Phase phase_ = Phase::kIdle;
  bool own_slot_ = false;  // the block was read for this alone: its slot is given back at once
  Request current_;
  std::deque<Request> queue_;
};

}  // namespace forebay::daemon
