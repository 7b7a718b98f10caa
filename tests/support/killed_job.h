// SPDX-License-Identifier: Apache-2.0
// The training that a kill campaign kills: a job of two ranks, each a process, whose every byte is known at
// every step, and the memory in which the ranks say how far they are, which outlives them.
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
  kShardedOnSwap,  // the same; weights are on swap too
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
  std::atomic<uint64_t> attached{0};  // 1 more than the committed step that attach gave; 0: not yet
  std::atomic<uint64_t> called{0};    // the newest step whose call was begun
  std::atomic<uint64_t> answered{0};  // the newest step that was answered
  std::array<char, 2048> error{};     // the error that ended the rank, zero-terminated
};

// The exit status of a rank that ended because another process had died.
inline constexpr int kEndedByAnothersDeath = 3;

// Memory that the ranks write and that the process that started them reads, also after the death of a rank.
struct KilledJobMemory {
  std::array<RankProgress, kKilledRanks> ranks;
  std::atomic<uint64_t> snapshot_step{0};  // 1 more than the step of the snapshot; 0: not whole yet
  // Written before the snapshot.
  std::atomic<uint64_t> blocks{0};
  std::atomic<uint64_t> resident_blocks{0};
  std::atomic<bool> weights_on_swap{false};
};

// One job's layout, initial parameters and gradients.
class KilledJob {
 public:
  explicit KilledJob(KilledJobOptions options);
  KilledJob(const KilledJob&) = delete;
  KilledJob& operator=(const KilledJob&) = delete;

  const protocol::Layout& layout() const { return layout_; }
  // Layout of the same parameters with a single owner, for the reference trainer.
  const protocol::Layout& whole_layout() const { return whole_layout_; }
  uint32_t addends() const;  // gradients of each element in a step

  // Weights of all groups, then the states of every parameter in float32.
  uint64_t snapshot_bytes() const;
  uint64_t state_bytes() const;
  std::vector<std::byte> SnapshotOf(const ReferenceTrainer& reference) const;

  // Runs a rank: attaches as soon as there is a daemon, then trains until another process dies. Rank 0 first writes the
  // contents of the job to `snapshot`. Returns the exit status of the process.
  int RunRank(uint32_t rank, KilledJobMemory& memory, std::span<std::byte> snapshot) const;

 private:
  absl::Status Train(uint32_t rank, KilledJobMemory& memory, std::span<std::byte> snapshot) const;
  absl::StatusOr<std::unique_ptr<client::Attachment>> Attach(uint32_t rank) const;
  absl::Status WriteInitial(client::Attachment& session, uint32_t rank) const;
  absl::Status ReadSnapshot(client::Attachment& session, std::span<std::byte> snapshot) const;
  absl::Status ReadTiers(const client::Attachment& session, KilledJobMemory& memory) const;
  absl::Status Deliver(client::Attachment& session, uint32_t rank, uint64_t t) const;
  bool Owns(uint32_t rank, uint32_t partition) const;
  // For each run of elements that the partition holds: calls `copy` with its offset within the partition, its
  // offset within its group as the whole layout has it, and its size, in bytes.
  template <typename Copy>
  void ForEachRun(uint32_t partition, Copy copy) const;

  KilledJobOptions options_;
  protocol::Layout layout_;
  protocol::Layout whole_layout_;
};

// The run that nobody kills, computed by the scalar kernels: what the job must hold at a step, for the newest
// steps that were asked for.
//
// Ownership  The job outlives it.
class UninterruptedRun {
 public:
  static constexpr size_t kStepsKept = 64;

  explicit UninterruptedRun(const KilledJob& job);

  // Null where the step is too old.
  const ReferenceTrainer* At(uint64_t step);

 private:
  std::deque<ReferenceTrainer> newest_;  // of consecutive steps
  uint64_t last_step_ = 0;
};

}  // namespace forebay::testing
