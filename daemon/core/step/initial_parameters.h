// SPDX-License-Identifier: Apache-2.0
// The initial parameters of a new job. With shared attachment rank 0 writes every group, as in DDP. With sharded attachment
// each rank writes its own partitions. A writer writes in ranges, then reports that it is done.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/update/state_access.h"
#include "protocol/wire.h"

namespace forebay::daemon {

class InitialParameters {
 public:
  // The parameters of a recovered job are written already. `spec` and `io` outlive this object.
  InitialParameters(const JobSpec& spec, JobTasks& io);

  bool ready() const { return ready_; }
  bool IsWriter(SessionId session) const { return writers_.contains(session); }
  // True if a session of the rank could become a writer now.
  bool WaitsForWriter(uint32_t rank) const;
  void AddWriter(SessionId session, uint32_t rank);

  // Handles a checked kWriteInitial of a writer. The command is answered when the range has been copied to the weights and
  // found finite.
  //
  // Errors  E_PROTOCOL   an earlier write to the range has not been answered.
  //         E_NONFINITE  the range counts as not written.
  void Write(const CommandId& command, const protocol::Command& words);
  void OnCopied(const TaskDone& done);

  // Checks that all writers write the same kind of values: weights (kWriteInitial) or masters (kWriteState).
  //
  // Errors  E_PROTOCOL  a range of the other kind was written before.
  //         E_RANGE     the range of masters breaks the alignment rule of wire.h: written elements could not be
  //                     tracked.
  absl::Status CheckKind(const protocol::Command& words);
  // Marks the range as not written when StateAccess receives a kWriteState (`written` false), and as written when it has
  // carried the command out.
  void SetMasters(const PartitionRange& range, bool written);
  bool has_masters() const { return has_masters_.value_or(false); }

  // Handles kInitialDone of a writer. The job is ready() when every writer has sent it and all writes are done. Until then the
  // command waits.
  //
  // Errors  E_NOT_READY  names the first partition that the writer has not written.
  void Done(const CommandId& command);
  // Returns the kInitialDone commands that have made the job ready. Each command is returned once.
  std::vector<CommandId> DrainDone();

  // Answers the commands of a writer that has ended. The caller makes running copies stale, and calls Reset().
  void AnswerWriter(SessionId session, const absl::Status& status);
  // Marks all ranges as not written after a writer has ended, so that all parameters are written from scratch. The caller makes
  // running copies stale.
  void Reset(const absl::Status& status);

  uint64_t unanswered(SessionId session) const;

 private:
  struct Writer {
    uint32_t rank = 0;
    std::optional<CommandId> done = {};  // kInitialDone that waits for an answer
    bool complete = false;               // all ranges of the rank are written
  };
  struct Running {
    CommandId command;
    PartitionRange range;
  };

  void TryDone();
  void CheckComplete(Writer& writer);
  bool Writes(uint32_t rank, uint32_t partition) const;
  void SetWritten(const PartitionRange& range, bool written);

  const JobSpec& spec_;
  JobTasks& io_;
  std::map<SessionId, Writer> writers_;
  bool ready_;
  std::optional<bool> has_masters_;         // nullopt: no range was written
  std::vector<std::vector<bool>> written_;  // by partition and unit of kGradUnitElems elements
  std::map<TaskId, Running> running_;
};

}  // namespace forebay::daemon
