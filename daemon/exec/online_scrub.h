// SPDX-License-Identifier: Apache-2.0
// Reads and verifies what durable jobs have on swap, while the daemon works.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/blocks/durable_content.h"
#include "daemon/exec/scrub.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"

namespace forebay::daemon {

struct ScrubRequest {
  uint64_t number = 0;       // of the caller's, for Cancel()
  uint64_t bytes_per_s = 0;  // 0: kScrubShare of what the paths were measured with
  // Whose jobs; empty: all.
  std::optional<uint32_t> uid = {};
};

// Both 0: no scrub runs.
struct ScrubProgress {
  uint64_t scrubbed_bytes = 0;
  uint64_t total_bytes = 0;
};

// One job after the other, one piece of a slot at a time, behind the job's other transfers. A slot counts as damaged
// where the newest durable ledger still names it when it was read: a job that goes on meanwhile is read as it is
// then.
//
// Threads  The loop thread; pieces are digested on workers.
// Limits   One scrub at a time; its memory is the swap's.
class OnlineScrub {
 public:
  static constexpr double kScrubShare = 0.1;
  static constexpr uint64_t kUnmeasuredBytesPerS = uint64_t{64} << 20;

  using Answer = absl::AnyInvocable<void(absl::StatusOr<ScrubReport>)>;
  using JobsNow = std::function<std::vector<std::shared_ptr<const DurableJob>>()>;
  using EndTransfers = std::function<void(std::vector<SwapDone>&)>;

  // `swap` may be null. `jobs`: as the newest durable ledger has them.
  OnlineScrub(TaskRunner& runner, SwapSpace* swap, JobsNow jobs, EndTransfers end_transfers)
      : runner_(runner),
        swap_(swap),
        jobs_(std::move(jobs)),
        end_transfers_(std::move(end_transfers)) {}

  // Errors  E_BUSY         a scrub runs.
  //         E_INTERRUPTED  it was cancelled.
  void Start(const ScrubRequest& request, Answer answer);
  // Unknown ones are ignored.
  void Cancel(uint64_t number);

  // False: it is not of a scrub.
  bool OnTransferred(const SwapDone& read);
  // Reads the next piece where its time has come. When to call it again: MonotonicNs, UINT64_MAX: not for a time.
  uint64_t Tick();

  ScrubProgress progress() const;

 private:
  struct Running {
    ScrubRequest request;
    Answer answer;
    uint64_t bytes_per_s = 0;
    std::vector<std::shared_ptr<const DurableJob>> jobs;  // as they were at first
    size_t next_job = 0;
    uint64_t scrubbed_bytes = 0;
    uint64_t total_bytes = 0;
    uint64_t next_ns = 0;
    ScrubReport report;
    // Of the job that is read.
    std::optional<DurableContent> content = {};
    uint64_t job_began_ns = 0;
    uint32_t entry = 0;
    int tries = 0;
    // Of the slot that is read.
    std::optional<DurableContent::Expected> expected = {};
    std::vector<uint64_t> digests = {};
    uint64_t read_bytes = 0;
  };

  std::shared_ptr<const DurableJob> JobNow(JobId id) const;
  uint64_t RateOf(const ScrubRequest& request) const;
  // The next piece is chosen; false: there is none, the scrub has ended.
  bool Choose();
  bool ChooseJob();
  void EndJob();
  void StartRead();
  void OnDigested(const std::vector<uint64_t>& digests, uint64_t bytes);
  void EndSlot(const absl::Status& status);
  void Finish(absl::StatusOr<ScrubReport> report);

  TaskRunner& runner_;
  SwapSpace* swap_;
  JobsNow jobs_;
  EndTransfers end_transfers_;
  std::optional<Running> running_;
  uint64_t scrubs_ = 0;
  // A piece is read or digested; it may be of a scrub that was cancelled.
  TaskId task_ = 0;
  bool is_working_ = false;
  uint64_t last_task_ = 0;
};

}  // namespace forebay::daemon
