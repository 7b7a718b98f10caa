// SPDX-License-Identifier: Apache-2.0
// Kills a real daemon and its trainers at random moments, round after round, and compares what the job then
// holds with the run that nobody kills.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/durability.h"
#include "tests/support/killed_job.h"

namespace forebay::testing {

struct KillCampaignOptions {
  std::string folder;  // empty, on a disk; for the socket, swap and the daemon's log
  JobKind kind = JobKind::kSharedInDram;
  // At level memory only trainers are killed.
  protocol::Durability durability = {};
  uint32_t kills = 1;  // rounds, each with one kill of one process or of several at once
  uint64_t seed = 1;
};

// Counts of a campaign that lost no step that its durability level guarantees.
struct KillCampaignResult {
  uint32_t kills = 0;
  uint32_t trainer_kills = 0;     // of ranks alone, one or both
  uint32_t daemon_kills = 0;      // of the daemon alone
  uint32_t both_kills = 0;        // of the daemon and its ranks
  uint32_t early_kills = 0;       // kills before a step was answered in the round, of any kind
  uint32_t comparisons = 0;       // of all weights and states with the uninterrupted run's
  uint64_t committed_step = 0;    // in the end
  uint64_t steps_answered = 0;    // in all rounds
  uint64_t steps_undone = 0;      // that had been answered
  uint64_t steps_undone_max = 0;  // by one kill
  double seconds = 0;
};

// All kinds and levels of one kill campaign.
std::vector<KillCampaignOptions> AllKillCampaigns(const std::string& folder, uint32_t kills,
                                                  uint64_t seed);

// "sharded-swap/epoch=3".
std::string NameOf(const KillCampaignOptions& options);

// Threads  One, in a process with no other: it forks.
// Errors   kDataLoss  a step was lost that the level keeps, or the job does not hold the bytes of its step.
//          kInternal  a process ended of itself, or hung. Both with the round and the daemon's log.
absl::StatusOr<KillCampaignResult> RunKillCampaign(const KillCampaignOptions& options);

}  // namespace forebay::testing
