// Swap as the state machine's actions see it: extents of jobs, staging slots, one volume below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/events.h"
#include "daemon/exec/arena_registry.h"
#include "nvme/io/io_engine.h"
#include "nvme/volume.h"

namespace forebay::daemon {

struct SwapSpaceOptions {
  std::vector<nvme::PathOptions> paths = {};
  nvme::FileLife life = nvme::FileLife::kKept;
  uint64_t extents_max = 0;
  uint32_t staging_slots = 0;  // >= 3
  uint64_t staging_slot_bytes = 0;
  pinned_mem::LockPolicy lock = pinned_mem::LockPolicy::kRequired;
};

// A transfer that has ended.
struct SwapDone {
  enum class Kind : uint8_t { kMade, kRead, kWritten };

  TaskId task = 0;
  Kind kind = Kind::kMade;
  JobId job = 0;
  uint32_t extent = 0;  // of the job
  uint64_t bytes = 0;
  uint64_t start_ns = 0;
  absl::Status status = {};
};

// Threads  The loop thread, which is the engine's; bytes of a slot go to a worker between the end
//          of a read and the start of a write.
class SwapSpace {
 public:
  // Blocks: reserves the paths and makes the staging arena.
  //
  // Errors  of Volume::Open and PinnedArena::Create.
  static absl::StatusOr<std::unique_ptr<SwapSpace>> Open(const SwapSpaceOptions& options,
                                                         nvme::IoEngine& engine);

  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;
  ~SwapSpace();

  // Bytes of staging that Open() takes, zeros for new extents included.
  static uint64_t StagingBytes(const SwapSpaceOptions& options);

  const ArenaRegistry::Arena& staging() const { return staging_; }
  uint64_t free_bytes() const { return volume_->free_bytes(); }
  std::span<std::byte> Slot(uint32_t slot, uint64_t bytes) const;

  // Each start ends with a SwapDone, or returns the error at once.
  absl::Status StartMake(const CreateJobSwap& action);
  absl::Status StartRead(const ReadBlock& action);
  absl::Status StartWrite(const WriteBlock& action);

  // True where the extent was never written: its content is zeros, and there is nothing to read.
  bool IsFresh(const ReadBlock& action) const;

  // What VerifyBlock() needs for a slot that was read: of the state machine's table, not the
  // volume's.
  std::optional<nvme::ExpectedContent> Expected(JobId job, const BlockPlace& place,
                                                const BlockIdentity& identity,
                                                uint64_t checksum) const;

  uint64_t nonce() const { return nonce_; }  // of this opening, part of every identity

  void FreeJob(JobId job);

  // For completions that Volume::Owns.
  void OnCompletion(const nvme::Completion& completion, std::vector<SwapDone>& done);

  uint32_t in_flight() const { return volume_->requests_in_flight(); }
  nvme::VolumeStats stats() const { return volume_->stats(); }
  const std::vector<nvme::PathOptions>& paths() const { return options_.paths; }

 private:
  SwapSpace(const SwapSpaceOptions& options, nvme::IoEngine& engine);
  nvme::ExtentId ExtentOf(JobId job, uint32_t extent) const;

  SwapSpaceOptions options_;
  nvme::IoEngine& engine_;
  uint64_t nonce_ = 0;
  ArenaRegistry::Arena staging_;
  std::unique_ptr<nvme::Volume> volume_;
  std::map<JobId, std::vector<nvme::ExtentId>> extents_;
  std::map<TaskId, SwapDone> pending_;
};

}  // namespace forebay::daemon
