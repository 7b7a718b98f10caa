// The initial parameters of a fresh job: one session writes every group, in ranges, then ends the
// initialisation.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/events.h"
#include "daemon/core/job_tasks.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

class InitialParameters {
 public:
  InitialParameters(JobTasks& io, std::shared_ptr<const protocol::Layout> layout);

  SessionId writer() const { return writer_; }  // 0: nobody
  void set_writer(SessionId session) { writer_ = session; }
  bool ready() const { return ready_; }

  // A checked kWriteInitial of the writer. Answered when the range is in the weights and is finite.
  //
  // Errors  E_PROTOCOL   an earlier write to the range has not been answered.
  //         E_NONFINITE  the range counts as not written.
  void Write(const CommandId& command, const protocol::Command& words);
  void OnCopied(const TaskDone& done);

  // kInitialDone of the writer. When its writes are done, the job is ready(); else it is answered.
  //
  // Errors  E_NOT_READY  names the first group that was not written.
  void Done(const CommandId& command);
  // The kInitialDone that has made the job ready, once.
  std::optional<CommandId> DrainDone() {
    return ready_ ? std::exchange(done_, std::nullopt) : std::nullopt;
  }

  // The writer has ended: the next one begins anew. The caller makes running copies stale.
  void Reset(const absl::Status& status);

  uint64_t unanswered() const { return running_.size() + (done_ ? 1 : 0); }

 private:
  struct Running {
    CommandId command;
    uint32_t group = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };

  void TryDone();
  void SetWritten(const Running& range, bool written);

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  SessionId writer_ = 0;
  bool ready_ = false;
  std::vector<std::vector<bool>> written_;  // by group, by unit of kGradUnitElems
  std::map<TaskId, Running> running_;
  std::optional<CommandId> done_;  // a kInitialDone that waits
};

}  // namespace forebay::daemon
