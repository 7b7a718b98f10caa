// SPDX-License-Identifier: Apache-2.0
// Reads and verifies what durable jobs have on swap: in a daemon at work, or on a volume that was opened to be read.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/blocks/durable_content.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"
#include "nvme/slot_map.h"
#include "nvme/volume.h"

namespace forebay::daemon {

// A slot that the ledger names and that cannot be read, or does not hold what was written to it.
struct DamagedSlot {
  std::string what;  // DurableContent::Name
  nvme::Slot slot;
  std::string path;                 // name of the slot's file or device
  std::vector<std::string> params;  // parameters with elements in the slot
  absl::Status status;
};

struct ScrubbedJob {
  std::shared_ptr<const DurableJob> job;
  uint64_t slots = 0;
  uint64_t bytes = 0;
  double seconds = 0;
  std::vector<DamagedSlot> damaged;
};

struct ScrubReport {
  // Findings about the ledger that was read; its sequence is 0 if nothing was ever committed.
  nvme::RecoveryReport recovery;
  std::vector<ScrubbedJob> jobs;

  // True if every job can be recovered at its newest durable step. A damaged copy does not count if another copy is
  // whole.
  bool is_clean() const;
};

struct ScrubRequest {
  uint64_t number = 0;       // chosen by the caller, for Cancel()
  uint64_t bytes_per_s = 0;  // 0: kScrubShare of the measured rate of the paths
  // The owner of the jobs; empty: the jobs of all users.
  std::optional<uint32_t> uid = {};
  // True if the scrub logs its progress and each damaged slot.
  bool is_logged = true;
};

// Progress of the scrub. Both fields are 0 if no scrub runs.
struct ScrubProgress {
  uint64_t scrubbed_bytes = 0;
  uint64_t total_bytes = 0;
};

struct ScrubberOptions {
  // Swap space to scrub. Null: the daemon has no swap, so there is nothing to read.
  SwapSpace* swap = nullptr;
  // Digests pieces on the runner's workers. Null: the loop thread digests them.
  TaskRunner* runner = nullptr;
  // Returns the jobs of the newest durable ledger.
  std::function<std::vector<std::shared_ptr<const DurableJob>>()> jobs;
  // Takes transfers that ended at once; passes them to OnTransferred().
  std::function<void(std::vector<SwapDone>&)> end_transfers;
  // Number of slots that are read at once.
  uint32_t reads = 1;
};

// Reads one job after the other, each slot in pieces of kScrubBytes, after the job's other transfers. Reads only slots that the
// newest durable ledger names. If a job continues to train during the scrub, its present slots are read. A slot counts as
// damaged only if the newest durable ledger still names the slot after the read.
//
// Threads  The loop thread; pieces are digested on workers.
// Limits   One scrub at a time; its memory is the swap's.
class Scrubber {
 public:
  static constexpr double kScrubShare = 0.1;
  static constexpr uint64_t kUnmeasuredBytesPerS = uint64_t{64} << 20;

  using Answer = absl::AnyInvocable<void(absl::StatusOr<ScrubReport>)>;

  explicit Scrubber(ScrubberOptions options);

  // Errors  E_BUSY         a scrub runs.
  //         E_INTERRUPTED  the scrub was cancelled.
  void Start(const ScrubRequest& request, Answer answer);
  // Cancels the scrub with this number. Ignores unknown numbers.
  void Cancel(uint64_t number);

  // Handles the end of a transfer. Returns false if the transfer does not belong to a scrub.
  bool OnTransferred(const SwapDone& read);
  // Starts to read the next pieces that are due. Returns the MonotonicNs of the next call; UINT64_MAX: no piece waits for time.
  uint64_t Tick();

  ScrubProgress progress() const;

 private:
  // A slot that is being read, piece by piece.
  struct Read {
    // The task that reads or digests a piece, perhaps for a cancelled scrub; 0: none.
    TaskId task = 0;
    // The entry of the job's content; empty: the read may take the next one.
    std::optional<uint32_t> entry = {};
    int tries = 0;
    std::optional<DurableContent::Expected> expected = {};
    std::vector<uint64_t> digests = {};
    uint64_t read_bytes = 0;
  };
  struct Running {
    ScrubRequest request;
    Answer answer;
    uint64_t bytes_per_s = 0;
    std::vector<std::shared_ptr<const DurableJob>> jobs;  // the jobs as of the start of the scrub
    size_t next_job = 0;
    uint64_t scrubbed_bytes = 0;
    uint64_t total_bytes = 0;
    uint64_t next_ns = 0;
    ScrubReport report;
    // The content of the job that is read.
    std::optional<DurableContent> content = {};
    uint64_t job_began_ns = 0;
    uint32_t next_entry = 0;
  };

  std::shared_ptr<const DurableJob> JobNow(JobId id) const;
  uint64_t RateOf(const ScrubRequest& request) const;
  // Returns an idle read, preferably one that has begun a slot. Returns null if all reads are in progress.
  Read* FindIdle();
  bool is_working() const;
  // Chooses the next piece for `read`. Returns false if no piece is available: the scrub has ended, or waits for other slots of
  // the job.
  bool Choose(Read& read);
  bool ChooseJob();
  void EndJob();
  void StartRead(Read& read);
  std::span<std::byte> MemoryOf(const Read& read) const;
  void OnDigested(Read& read, const std::vector<uint64_t>& digests, uint64_t bytes);
  void EndSlot(Read& read, const absl::Status& status);
  void Finish(absl::StatusOr<ScrubReport> report);

  ScrubberOptions options_;
  std::vector<Read> reads_;
  std::optional<Running> running_;
  uint64_t last_task_ = 0;
};

}  // namespace forebay::daemon
