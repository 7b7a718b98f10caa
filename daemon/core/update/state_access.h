// SPDX-License-Identifier: Apache-2.0
// Clients' reads and writes of optimizer states, one command at a time, block by block, between steps.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/weights_cache.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// A write of masters also sets the weights. A write of moments may move the block that holds the weights. A write waits for the
// leases that are granted on its partition. While the write runs, no lease on the partition is granted.
class StateAccess {
 public:
  StateAccess(JobTasks& io, std::shared_ptr<const protocol::Layout> layout, StepPipeline& pipeline,
              WeightsCache& weights, const LeaseTable& leases)
      : io_(io),
        layout_(std::move(layout)),
        pipeline_(pipeline),
        store_(pipeline.store()),
        weights_(weights),
        leases_(leases),
        weights_writes_(layout_->partitions().size(), 0) {}

  // Queue a checked kReadState, or a checked kWriteState, kWriteInitial or kWriteUpdates (which sets no elements).
  //
  // Errors  E_NONFINITE  a value is not finite, rounds to infinity or is a square below 0: a part of the
  //                      range may have been written.
  void AddRead(const CommandId& command, const protocol::Command& words);
  PartitionRange AddWrite(const CommandId& command, const protocol::Command& words);
  // True if a write changes blocks, or will change them as soon as no task reads them. The write no longer waits for a lease.
  bool is_writing() const {
    return in_progress() && current_.write && !leases_.IsLeased(current_.write->partition);
  }

  // Continues the command in progress, or begins the next. Called while no step is applied. A command in progress must end
  // before a step begins to update.
  void Pump();
  void OnRead(const StepPipeline::ReadOutcome& outcome);
  void OnAccessed(const TaskDone& done);  // handles the end of DecodeState or SetState
  void OnWritten(const TaskDone& done);   // handles the end of WriteBlock

  // Answers the commands of a session with `status`. Session 0: the commands of all sessions, because the job has failed. A
  // running task is not interrupted: its result is ignored, but a block whose masters were set is written.
  void Drop(SessionId session, const absl::Status& status);

  // Returns the ranges that were written completely since the last call.
  std::vector<PartitionRange> DrainWritten() { return std::exchange(written_, {}); }

  bool in_progress() const { return phase_ != CommandPhase::kIdle; }
  bool has_requests() const { return in_progress() || !queue_.empty(); }
  // True if the command in progress writes to the partition.
  bool Writes(uint32_t partition) const {
    return in_progress() && current_.write && current_.write->partition == partition;
  }
  uint64_t unanswered(SessionId session) const;
  // Number of ended writes of the partition's weights, complete or partial.
  uint64_t writes(uint32_t partition) const { return weights_writes_[partition]; }

 private:
  struct Request {
    CommandId command;
    bool answered = false;
    uint32_t param = 0;  // parameter that is read, or whose number of updates is set
    uint32_t state = 0;  // index into protocol::StateNames
    std::optional<PartitionRange> write = {};           // range that a write sets
    std::optional<uint64_t> updates = {};               // new number of updates (kWriteUpdates)
    protocol::DType dtype = protocol::DType::kFloat32;  // type of the client's bytes
    uint64_t grad_offset_bytes = 0;      // offset of the next piece in the session's arena
    std::deque<ElementRun> pieces = {};  // remaining pieces; the first is in progress
  };
  enum class CommandPhase : uint8_t {
    kIdle,         // no command is in progress
    kWaitingSlot,  // waits for a staging slot, a running read, or the end of a lease
    kReading,      // the block is read into a staging slot
    kAccessing,    // a worker reads or sets elements
    kWriting,      // the block is written to swap
  };

  void Next();
  void StartAccess();
  void StartDecode(const ElementRun& piece);
  void StartSet(const ElementRun& piece);
  void StartWrite();
  WeightsPlace WeightsOf(const ElementRun& piece) const;
  void EndPiece(const absl::Status& status);
  void End(const absl::Status& status);

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  StepPipeline& pipeline_;
  BlockStore& store_;
  WeightsCache& weights_;
  const LeaseTable& leases_;
  CommandPhase phase_ = CommandPhase::kIdle;
  Request current_;
  std::deque<Request> queue_;
  std::vector<PartitionRange> written_;
  std::vector<uint64_t> weights_writes_;  // by partition
  // Checksum and digests of the block that is being written.
  uint64_t checksum_ = 0;
  WeightsDigests weights_digests_;
  bool abandoned_ = false;  // the job failed
};

}  // namespace forebay::daemon
