// SPDX-License-Identifier: Apache-2.0
// The job of a kill campaign: two ranks, each in a process, with known bytes at every step. Ranks report their progress in
// memory that survives them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "protocol/durability.h"
#include "protocol/layout.h"
#include "tests/support/training.h"

namespace forebay::testing {

enum class JobKind : uint8_t {
  kSharedInDram,
  kSharedOnSwap,   // states in DRAM and on swap
  kShardedInDram,  // updated under compute
  kShardedOnSwap,  // updated under compute; weights and states on swap
};

inline bool IsSharded(JobKind kind) { return kind >= JobKind::kShardedInDram; }

struct KilledJobOptions {
  std::string socket;
  JobKind kind = JobKind::kSharedInDram;
  protocol::Durability durability = {};
};

inline constexpr uint32_t kKilledRanks = 2;

// Progress of a rank since its start. Only the rank writes it.
struct alignas(64) RankProgress {
  std::atomic<uint64_t> attached{0};  // committed step at attach plus 1; 0: not attached yet
  std::atomic<uint64_t> called{0};    // newest step whose call has begun
  std::atomic<uint64_t> answered{0};  // the newest step that was answered
  std::array<char, 2048> error{};     // the error that ended the rank, zero-terminated
};

// Exit status of a rank that ended because another process had died.
inline constexpr int kEndedByAnothersDeath = 3;

// Memory that the ranks write and that the process that started them reads, also after the death of a rank.
struct KilledJobMemory {
  std::array<RankProgress, kKilledRanks> ranks;
  std::atomic<uint64_t> snapshot_step{0};  // step of the snapshot plus 1; 0: incomplete
  // Written before the snapshot.
  std::atomic<uint64_t> blocks{0};
  std::atomic<uint64_t> resident_blocks{0};
  std::atomic<bool> weights_on_swap{false};
};

// Layout, initial parameters and gradients of one job.
class KilledJob {
 public:
  explicit KilledJob(KilledJobOptions options);
  KilledJob(const KilledJob&) = delete;
  KilledJob& operator=(const KilledJob&) = delete;

  const protocol::Layout& layout() const { return layout_; }
  // Layout of the same parameters with a single owner, for the reference trainer.
  const protocol::Layout& whole_layout() const { return whole_layout_; }
  uint32_t addends() const;  // contributions to each element in a step

  // Weights of all groups, then the states of every parameter in float32.
  uint64_t snapshot_bytes() const;
  uint64_t state_bytes() const;
  std::vector<std::byte> SnapshotOf(const ReferenceTrainer& reference) const;

  // Runs a rank: attaches once a daemon runs, then trains until another process dies. Rank 0 first writes the contents of the
  // job to `snapshot`. Returns the exit status of the process.
  int RunRank(uint32_t rank, KilledJobMemory& memory, std::span<std::byte> snapshot) const;

 private:
  absl::Status Train(uint32_t rank, KilledJobMemory& memory, std::span<std::byte> snapshot) const;
  absl::StatusOr<std::unique_ptr<client::Attachment>> Attach(uint32_t rank) const;
  absl::Status WriteInitial(client::Attachment& session, uint32_t rank) const;
  absl::Status ReadSnapshot(client::Attachment& session, std::span<std::byte> snapshot) const;
  absl::Status ReadTiers(const client::Attachment& session, KilledJobMemory& memory) const;
  absl::Status Deliver(client::Attachment& session, uint32_t rank, uint64_t t) const;
  bool Owns(uint32_t rank, uint32_t partition) const;
  // Calls `copy` for each run of elements in the partition. Arguments, in bytes: the run's offset in the partition, its offset
  // in the group of the whole layout, and its size.
  template <typename Copy>
  void ForEachRun(uint32_t partition, Copy copy) const;

  KilledJobOptions options_;
  protocol::Layout layout_;
  protocol::Layout whole_layout_;
};

// An uninterrupted run, computed by the scalar kernels: the bytes that the job must hold at each of the newest steps.
//
// Ownership  The job must outlive the run.
class UninterruptedRun {
 public:
  static constexpr size_t kStepsKept = 64;

  explicit UninterruptedRun(const KilledJob& job);

  // State of the run at `step`. Returns null if the step is too old.
  const ReferenceTrainer* At(uint64_t step);

 private:
  std::deque<ReferenceTrainer> newest_;  // states after consecutive steps
  uint64_t last_step_ = 0;
};

}  // namespace forebay::testing
