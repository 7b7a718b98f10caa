// SPDX-License-Identifier: Apache-2.0
// Swap as the state machine's actions see it: slots of jobs, staging slots, one volume below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/limits.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/arena_registry.h"
#include "daemon/exec/path_wear.h"
#include "daemon/exec/transfer_queue.h"
#include "daemon/exec/volume_place.h"
#include "nvme/io/io_engine.h"
#include "nvme/path_probe.h"
#include "nvme/verify.h"
#include "nvme/volume.h"

namespace forebay::daemon {

// Longer than the kernel waits for an NVMe drive before it resets the drive and gives up.
inline constexpr uint64_t kSwapDeadlineNs = 60'000'000'000;

// A daemon that is killed forgets the bytes written since the newest record, which is at most so old.
inline constexpr uint64_t kKeepWearNs = 60'000'000'000;

struct SwapSpaceOptions {
  std::vector<nvme::PathOptions> paths = {};
  // Where records of block devices are; empty: nowhere.
  std::string state_folder = {};
  // By path: what was written to its drive before, as kept; empty: nothing.
  std::vector<uint64_t> written_before = {};
  // By path, as measured; empty: none is known.
  std::vector<std::optional<nvme::PathRates>> rates = {};
  nvme::FileLife life = nvme::FileLife::kKept;
  // kRecover: a volume with a durable ledger comes back with its jobs; one without is made anew.
  nvme::OpenMode mode = nvme::OpenMode::kReclaim;
  // The daemon before has handed jobs over, whose slots the volume holds: it is recovered without a durable job too.
  bool keeps_slots = false;
  // Where this is not known, or was not when the volume was last used, only its paths tell whose it is.
  MachineId machine = {};
  // kAdopted: durable jobs of a volume that was last used elsewhere come back, and from then on it belongs here.
  OtherPlace other_place = OtherPlace::kRefused;
  // Of a volume that is made anew.
  uint64_t ledger_bytes_max = uint64_t{1} << 20;
  // How long the disk may take for a transfer before nobody waits for it any longer.
  uint64_t deadline_ns = kSwapDeadlineNs;
  // How long after a transfer what was written is to be kept (DueWear).
  uint64_t keep_wear_ns = kKeepWearNs;
  // >= 3.
  uint32_t staging_slots = 0;
  uint64_t staging_slot_bytes = 0;
  ArenaPolicy arenas = {};
};

// Between a slot of a job and memory that lives until it has ended.
struct SwapTransfer {
  TaskId task = 0;
  JobId job = 0;
  uint64_t block = 0;
  BlockPart part = BlockPart::kStates;
  nvme::Slot slot;
  std::span<std::byte> bytes;
  uint64_t slot_offset_bytes = 0;  // of a read: where it begins
  TransferQueue::Order order = TransferQueue::Order::kNormal;
};

// A transfer that has ended, or was given up (E_SWAP_TIMEOUT).
struct SwapDone {
  enum class Kind : uint8_t {
    kZeroed,
    kRead,
    kWritten,
    kReturned,   // a read that was given up has ended
    kCommitted,  // a ledger, of no job
  };

  TaskId task = 0;
  Kind kind = Kind::kZeroed;
  JobId job = 0;
  uint64_t block = 0;
  BlockPart part = BlockPart::kStates;
  uint64_t bytes = 0;
  uint64_t start_ns = 0;
  absl::Status status = {};
  // Of a read that was given up, and of kReturned: the disk may write to it until kReturned.
  std::optional<uint32_t> staging_slot = {};
};

struct ZeroingProgress {
  uint64_t zeroed_bytes = 0;
  uint64_t total_bytes = 0;
};

// Requests of one path that the disk has not answered in time.
struct LatePath {
  uint32_t requests = 0;
  uint64_t oldest_ns = 0;
};

// Each path has a queue of its own (TransferQueue), from which jobs start transfers in turns, as many at once as
// keep the path busy: what waits for one path delays no other. Writes that pause wait beside it; zeroing does
// not wait. A request that is in flight for longer than kLateNs is late: it is counted, shown and logged,
// and goes on. After the deadline it is given up: it fails with E_SWAP_TIMEOUT, and the staging slot of a read is
// kept until the disk has ended it after all. A read into other memory (of a block that moves to DRAM, of
// gradients) is waited for.
//
// Threads  The loop thread, which is the engine's; bytes of a slot go to a worker between the end
//          of a read and the start of a write.
class SwapSpace {
 public:
  static constexpr uint64_t kLateNs = 10'000'000'000;
  // How long a write pauses after one on the same path has failed.
  static constexpr uint64_t kPauseNs = 1'000'000'000;
  static constexpr uint64_t kScrubBytes = uint64_t{256} << 10;

  // Blocks: reserves the paths, or recovers them, and makes the staging arena. What was recovered is committed to
  // both places: then no other ledger is on the disk that names slots which free_slots() gives. A volume that is
  // adopted is this one from that commit on; a death before leaves it where it was.
  //
  // Errors  of Volume::Open, FindVolume, DecodeLedger and PinnedArena::Create.
  //         E_SWAP_PATH  kUnlinked paths hold a durable ledger; durable jobs are on a volume that was last used on
  //                      another machine or on other paths. Nothing is written.
  static absl::StatusOr<std::unique_ptr<SwapSpace>> Open(const SwapSpaceOptions& options,
                                                         nvme::IoEngine& engine);
  // Opens a volume to read it: nothing is written, and there is no staging. Null: the paths hold no volume. Blocks.
  //
  // Errors  of InspectVolume and DecodeLedger.
  static absl::StatusOr<std::unique_ptr<SwapSpace>> Inspect(
      const std::vector<nvme::PathOptions>& paths, nvme::IoEngine& engine);

  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;
  ~SwapSpace();

  // Bytes of staging that Open() allocates, zeros for new slots included.
  static uint64_t StagingBytes(const SwapSpaceOptions& options);

  const ArenaRegistry::Arena& staging() const { return staging_; }
  uint32_t staging_slots() const { return options_.staging_slots; }
  uint64_t staging_slot_bytes() const { return options_.staging_slot_bytes; }
  const nvme::SlotMap& free_slots() const { return volume_->free_slots(); }
  std::span<std::byte> Slot(uint32_t slot, uint64_t bytes) const;
  // kScrubBytes for each of a scrub's reads, whose number is the same in each call; part of the daemon's private memory from
  // the first call on.
  std::span<std::byte> scrub_memory(uint32_t reads);

  // Each ends with a SwapDone: of this call where it is refused, of an OnCompletion() or a Tick().
  void StartZero(const CreateJobSwap& action, std::vector<SwapDone>& done);
  void StartRead(const SwapTransfer& transfer, std::vector<SwapDone>& done);
  // `pause`: kPauseNs from now.
  void StartWrite(const SwapTransfer& transfer, bool pause, std::vector<SwapDone>& done);

  // Volume::CommitLedger; one at a time.
  void CommitLedger(TaskId task, std::span<const std::byte> ledger,
                    std::span<const nvme::Slot> slots, std::vector<SwapDone>& done);

  // What VerifyBlock() needs for a slot that was read; nothing for zeros that were never written.
  std::optional<nvme::ExpectedContent> Expected(const BlockPlace& place,
                                                const BlockIdentity& identity,
                                                uint64_t checksum) const;

  // Of the volume since it was made anew, part of every identity. A copy that is adopted keeps it: its slots are
  // verified with it. That mixes nothing. The two have no file in common, and a checksum covers the bytes too: a file
  // of one among those of the other holds either what the ledger names or is E_CORRUPT.
  uint64_t nonce() const { return nonce_; }
  // Part of every ledger; nothing where the paths are unlinked.
  const VolumePlace& place() const { return place_; }
  // What is different from where the volume was last used; empty: nothing was adopted.
  const std::string& adopted() const { return adopted_; }
  // What the ledger said that was found; nothing where there was none.
  const DurableNode& recovered() const { return recovered_; }
  // Room for the jobs of a ledger and 24 bytes for each slot that it names.
  uint64_t ledger_bytes_max() const;

  // Of the durable ledger that Open() found; 0: there was none.
  uint64_t found_sequence() const { return found_sequence_; }
  // Of the last durable ledger; 0: there is none.
  uint64_t durable_sequence() const { return volume_->durable_sequence(); }
  // Returns the findings of Open() or Inspect().
  const nvme::RecoveryReport& recovery() const { return volume_->recovery(); }
  // Volume::Doubted().
  std::vector<nvme::Slot> Doubted() const { return volume_->Doubted(); }

  std::string_view path_name(uint32_t path) const { return volume_->path_name(path); }

  // For completions that Volume::Owns.
  void OnCompletion(const nvme::Completion& completion, std::vector<SwapDone>& done);

  // Starts what has paused long enough, looks for late requests, logs progress. To be called at
  // next_tick_ns() at the latest.
  void Tick(std::vector<SwapDone>& done);
  // UINT64_MAX: nothing waits for time.
  uint64_t next_tick_ns() const;

  // In flight at the volume; what waits or pauses here is not counted.
  uint32_t in_flight() const { return volume_->requests_in_flight(); }
  nvme::VolumeStats stats() const { return volume_->stats(); }
  // By path.
  std::vector<PathWear> wear() const;
  const std::string& state_folder() const { return options_.state_folder; }
  // It outlives the daemon, as the files do.
  bool keeps_wear() const { return options_.life == nvme::FileLife::kKept; }
  // What is to be kept now; nothing, but for once every keep_wear_ns while there are transfers.
  std::vector<PathWear> DueWear();
  std::optional<nvme::PathRates> rates(size_t path) const {
    return options_.rates.empty() ? std::nullopt : options_.rates[path];
  }
  // Of the job's slots, while they are zero-written.
  std::optional<ZeroingProgress> Zeroing(JobId job) const;
  const std::vector<nvme::PathOptions>& paths() const { return options_.paths; }
  // By path; as of the last Tick().
  const std::vector<LatePath>& late() const { return late_; }

 private:
  struct Pending {
    SwapDone done;
    SwapTransfer transfer = {};  // not of zeroing, nor of a commit
  };
  struct Paused {
    TaskId task = 0;
    uint64_t due_ns = 0;
  };

  SwapSpace(const SwapSpaceOptions& options, nvme::IoEngine& engine);
  absl::Status OpenVolume();
  absl::Status CommitAgain(const nvme::VolumeOptions& options);
  absl::Status CheckPlace(const VolumePlace& before, const DurableNode& node);
  absl::Status ReadLedger();
  void Add(SwapDone::Kind kind, const SwapTransfer& transfer);
  void Push(const SwapTransfer& transfer);
  absl::Status StartAtVolume(const Pending& pending);
  void StartWaiting(std::vector<SwapDone>& done);
  void OnStarted(SwapDone& started, uint64_t now_ns);
  void End(TaskId task, absl::Status status, std::vector<SwapDone>& done);
  void GiveUpLate(std::vector<SwapDone>& done);
  void Finish(std::vector<nvme::Finished>& finished, std::vector<SwapDone>& done);
  std::optional<uint32_t> StagingSlotOf(std::span<const std::byte> bytes) const;
  void CheckDeadlines(uint64_t now_ns);
  void LogProgress(uint64_t now_ns);

  SwapSpaceOptions options_;
  nvme::IoEngine& engine_;
  uint64_t nonce_ = 0;
  uint64_t found_sequence_ = 0;
  DurableNode recovered_;
  VolumePlace place_;
  std::string adopted_;
  ArenaRegistry::Arena staging_;
  struct FreeMemory {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, FreeMemory> scrub_memory_;
  std::unique_ptr<nvme::Volume> volume_;
  std::pmr::unsynchronized_pool_resource memory_{
      kStepMemoryOptions};  // for nodes that come and go within a step
  // By task; what the volume works on, and what waits here.
  std::pmr::map<TaskId, Pending> pending_;
  std::vector<nvme::Finished> finished_;  // by the completion that is handled
  std::map<TaskId, uint32_t> kept_;       // staging slots of reads that were given up
  std::vector<TransferQueue> queues_;     // by path
  std::vector<Paused> paused_;            // by due time
  std::vector<LatePath> late_;
  std::vector<LatePath> late_now_;  // room for the next check
  uint64_t next_check_ns_ = UINT64_MAX;
  uint64_t next_progress_ns_ = 0;
  uint64_t keep_wear_ns_ = UINT64_MAX;
  // When a path's late requests are logged again.
  std::vector<uint64_t> next_warning_ns_;
};

// What a ledger on these paths says; nothing where there is none. Blocks; changes nothing.
//
// Errors  of FindVolume, Volume::Open and DecodeLedger.
absl::StatusOr<DurableNode> FindDurableJobs(const std::vector<nvme::PathOptions>& paths);

}  // namespace forebay::daemon
