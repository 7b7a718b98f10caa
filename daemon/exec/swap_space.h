// SPDX-License-Identifier: Apache-2.0
// Swap for the actions of the state machine: slots of jobs and staging slots on one volume.
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

// Interval at which written bytes are recorded. A killed daemon loses the count of bytes that were written since the last
// record.
inline constexpr uint64_t kKeepWearNs = 60'000'000'000;

struct SwapSpaceOptions {
  std::vector<nvme::PathOptions> paths = {};
  // Folder with the records of block devices. Empty: block devices have no records.
  std::string state_folder = {};
  // Recorded number of bytes written before this start, by path. Empty: no records.
  std::vector<uint64_t> written_before = {};
  // Measured rates, by path. Empty: no rate is known.
  std::vector<std::optional<nvme::PathRates>> rates = {};
  nvme::FileLife life = nvme::FileLife::kKept;
  // kRecover: a volume with a durable ledger is recovered with its jobs; a volume without one is created.
  nvme::OpenMode mode = nvme::OpenMode::kReclaim;
  // True if jobs of an earlier daemon are retained in memory, and the volume holds their slots. The volume is then recovered even
  // without a durable job.
  bool keeps_slots = false;
  // Identity of this machine. If it is unknown now, or was unknown when the volume was last used, only the paths tell whose
  // volume it is.
  MachineId machine = {};
  // kAdopted: durable jobs of a volume that was last used elsewhere are recovered, and the volume belongs to this place from
  // then on.
  OtherPlace other_place = OtherPlace::kRefused;
  // Bytes of the ledger of a volume that is created. A recovered volume retains its own.
  uint64_t ledger_bytes_max = uint64_t{1} << 20;
  // Time that the disk may take for a transfer before the transfer is given up.
  uint64_t deadline_ns = kSwapDeadlineNs;
  // Time after a transfer at which the written bytes are due to be recorded (DueWear).
  uint64_t keep_wear_ns = kKeepWearNs;
  // Number of staging slots; at least 3.
  uint32_t staging_slots = 0;
  uint64_t staging_slot_bytes = 0;
  ArenaPolicy arenas = {};
};

// Transfer between a slot of a job and memory that lives until the transfer has ended.
struct SwapTransfer {
  TaskId task = 0;
  JobId job = 0;
  uint64_t block = 0;
  BlockPart part = BlockPart::kStates;
  nvme::Slot slot;
  std::span<std::byte> bytes;
  uint64_t slot_offset_bytes = 0;  // offset at which a read begins
  TransferQueue::Order order = TransferQueue::Order::kNormal;
};

// A transfer that has ended, or was given up (E_SWAP_TIMEOUT).
struct SwapDone {
  enum class Kind : uint8_t {
    kZeroed,
    kRead,
    kWritten,
    kReturned,   // the disk has ended a read that was given up
    kCommitted,  // a ledger was committed; `job` is unused
  };

  TaskId task = 0;
  Kind kind = Kind::kZeroed;
  JobId job = 0;
  uint64_t block = 0;
  BlockPart part = BlockPart::kStates;
  uint64_t bytes = 0;
  uint64_t start_ns = 0;
  absl::Status status = {};
  // Staging slot of a read that was given up: the disk may write to the slot until the kReturned of the same slot.
  std::optional<uint32_t> staging_slot = {};
};

struct ZeroingProgress {
  uint64_t zeroed_bytes = 0;
  uint64_t total_bytes = 0;
};

// Requests of one path that the disk has not answered for kLateNs, or for the deadline if that is shorter.
struct LatePath {
  uint32_t requests = 0;
  uint64_t oldest_ns = 0;
};

// Transfers between swap slots and memory. Each path has a queue (TransferQueue) from which jobs start transfers in turns, as
// many at once as keep the path busy. Transfers of one path do not delay transfers of another path. Writes that pause wait
// outside the queue. Zeroing does not wait in the queue. A request in flight for longer than kLateNs is late: it is counted,
// shown and logged. After the deadline a request is given up with E_SWAP_TIMEOUT. The staging slot of a read that was given up
// is not used again until the disk has ended the read. A read into other memory (of a block that moves to DRAM, of gradients)
// is not given up.
//
// Threads  The loop thread, which is the engine's; bytes of a slot go to a worker between the end
//          of a read and the start of a write.
class SwapSpace {
 public:
  static constexpr uint64_t kLateNs = 10'000'000'000;
  // Time that a write pauses after a write on the same path has failed.
  static constexpr uint64_t kPauseNs = 1'000'000'000;
  static constexpr uint64_t kScrubBytes = uint64_t{256} << 10;

  // Reserves the paths, or recovers their volume, and allocates the staging arena. Blocks. Commits a recovered ledger to both
  // copies on disk, so that no older ledger names slots that free_slots() contains. An adopted volume belongs to this place
  // from that commit on. If the daemon dies before the commit, the volume stays with its former place.
  //
  // Errors  of Volume::Open, FindVolume, DecodeLedger and PinnedArena::Create.
  //         E_SWAP_PATH  kUnlinked paths hold a durable ledger; durable jobs are on a volume that was last used on
  //                      another machine or on other paths. Nothing is written.
  static absl::StatusOr<std::unique_ptr<SwapSpace>> Open(const SwapSpaceOptions& options,
                                                         nvme::IoEngine& engine);
  // Opens a volume for reads alone: writes nothing, and allocates no staging. Returns null if the paths hold no volume. Blocks.
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

  // Start a transfer. Each transfer ends with a SwapDone: from this call if the transfer is refused, otherwise from a later
  // OnCompletion() or Tick().
  void StartZero(const CreateJobSwap& action, std::vector<SwapDone>& done);
  void StartRead(const SwapTransfer& transfer, std::vector<SwapDone>& done);
  // `pause`: starts the write kPauseNs from now.
  void StartWrite(const SwapTransfer& transfer, bool pause, std::vector<SwapDone>& done);

  // Calls Volume::CommitLedger. At most one commit may be in flight.
  void CommitLedger(TaskId task, std::span<const std::byte> ledger,
                    std::span<const nvme::Slot> slots, std::vector<SwapDone>& done);

  // Returns the slot, identity and checksum with which VerifyBlock() compares bytes that were read. Returns nullopt if the
  // place has no slot: then the bytes are zeros that were never written.
  std::optional<nvme::ExpectedContent> Expected(const BlockPlace& place,
                                                const BlockIdentity& identity,
                                                uint64_t checksum) const;

  // Nonce of the volume, drawn when the volume was created; part of every identity. An adopted copy of a volume has the nonce
  // of the original, because its slots are verified with it. That mixes nothing: the two volumes have no file in common, and a
  // checksum covers the bytes too. A file of one among files of the other holds either the bytes that the ledger names or is
  // E_CORRUPT.
  uint64_t nonce() const { return nonce_; }
  // Place of the volume, part of every ledger. Empty if the paths are unlinked, or if a full ledger of an older program has no
  // room for it.
  const VolumePlace& place() const { return place_; }
  // Differences from the place where the volume was last used; empty if nothing was adopted.
  const std::string& adopted() const { return adopted_; }
  // Contents of the ledger that Open() or Inspect() found. No jobs if the volume had no ledger.
  const DurableNode& recovered() const { return recovered_; }
  // Bytes that a ledger may have for its jobs and 24 bytes for each slot that it names.
  uint64_t ledger_bytes_max() const;

  // Sequence of the last durable ledger. 0 if the volume has no ledger.
  uint64_t durable_sequence() const { return volume_->durable_sequence(); }
  // Returns the findings of Open() or Inspect().
  const nvme::RecoveryReport& recovery() const { return volume_->recovery(); }
  // Volume::Doubted().
  std::vector<nvme::Slot> Doubted() const { return volume_->Doubted(); }

  std::string_view path_name(uint32_t path) const { return volume_->path_name(path); }

  // Handles a completion for which Volume::Owns() is true. Appends the transfers that have ended to `done`.
  void OnCompletion(const nvme::Completion& completion, std::vector<SwapDone>& done);

  // Starts writes that have paused long enough, looks for late requests, logs progress. Call it at next_tick_ns() at the
  // latest.
  void Tick(std::vector<SwapDone>& done);
  // MonotonicNs of the next Tick(). UINT64_MAX: nothing waits for time.
  uint64_t next_tick_ns() const;

  // Number of requests in flight at the volume. Transfers that wait or pause in this object do not count.
  uint32_t in_flight() const { return volume_->requests_in_flight(); }
  nvme::VolumeStats stats() const { return volume_->stats(); }
  // Returns the bytes written to each path over all starts of the daemon.
  std::vector<PathWear> wear() const;
  const std::string& state_folder() const { return options_.state_folder; }
  // True if the record of written bytes outlives the daemon, as the files of the paths do.
  bool keeps_wear() const { return options_.life == nvme::FileLife::kKept; }
  // Returns the written bytes of each path if they are due to be recorded, otherwise an empty list. They are due at most once
  // every keep_wear_ns, and only after transfers.
  std::vector<PathWear> DueWear();
  std::optional<nvme::PathRates> rates(size_t path) const {
    return options_.rates.empty() ? std::nullopt : options_.rates[path];
  }
  // Progress of zeroing the job's slots; nothing if they are not being zeroed.
  std::optional<ZeroingProgress> Zeroing(JobId job) const;
  const std::vector<nvme::PathOptions>& paths() const { return options_.paths; }
  // Late requests, by path, as of the last Tick().
  const std::vector<LatePath>& late() const { return late_; }

 private:
  struct Pending {
    SwapDone done;
    SwapTransfer transfer = {};  // empty for zeroing and commits
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
      kStepMemoryOptions};  // memory for nodes that live within a step
  // Transfers in flight at the volume, and transfers that wait in this object, by task.
  std::pmr::map<TaskId, Pending> pending_;
  std::vector<nvme::Finished> finished_;  // requests that the current completion has ended
  std::map<TaskId, uint32_t> kept_;       // staging slots of reads that were given up
  std::vector<TransferQueue> queues_;     // by path
  std::vector<Paused> paused_;            // writes that pause, sorted by due time
  std::vector<LatePath> late_;
  std::vector<LatePath> late_now_;  // buffer for the next check
  uint64_t next_check_ns_ = UINT64_MAX;
  uint64_t next_progress_ns_ = 0;
  uint64_t keep_wear_ns_ = UINT64_MAX;
  // MonotonicNs of the next warning about late requests, by path.
  std::vector<uint64_t> next_warning_ns_;
};

// Returns the contents of the ledger on these paths. Returns no jobs if the paths hold no ledger. Blocks; changes nothing on
// the paths.
//
// Errors  of FindVolume, Volume::Open and DecodeLedger.
absl::StatusOr<DurableNode> FindDurableJobs(const std::vector<nvme::PathOptions>& paths);

}  // namespace forebay::daemon
