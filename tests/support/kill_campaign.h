// SPDX-License-Identifier: Apache-2.0
// Kills a real daemon and its trainers at random moments, in rounds. After each kill compares the job's contents with an
// uninterrupted run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/durability.h"
#include "tests/support/killed_job.h"

namespace forebay::testing {

struct KillCampaignOptions {
  std::string folder;  // an empty folder on a disk, for the socket, swap and log
  JobKind kind = JobKind::kSharedInDram;
  // At level `memory` only trainers are killed.
  protocol::Durability durability = {};
  uint32_t kills = 1;  // rounds, each with one kill of one process or of several at once
  uint64_t seed = 1;
};

// Counts of a campaign that lost no step that its durability level guarantees.
struct KillCampaignResult {
  uint32_t kills = 0;
  uint32_t trainer_kills = 0;     // kills of one or both ranks only
  uint32_t daemon_kills = 0;      // kills of the daemon only
  uint32_t both_kills = 0;        // kills of the daemon and its ranks
  uint32_t early_kills = 0;       // kills before a step was answered in the round, of any kind
  uint32_t comparisons = 0;       // comparisons of all weights and states
  uint64_t committed_step = 0;    // committed step that the last round found
  uint64_t steps_answered = 0;    // steps answered in all rounds
  uint64_t steps_undone = 0;      // answered steps that kills undid
  uint64_t steps_undone_max = 0;  // most answered steps that one kill undid
  double seconds = 0;
};

// Options of every job kind and durability level, for one campaign each.
std::vector<KillCampaignOptions> AllKillCampaigns(const std::string& folder, uint32_t kills,
                                                  uint64_t seed);

// "sharded-swap/epoch=3".
std::string NameOf(const KillCampaignOptions& options);

// Threads  One, in a process without other threads: the call forks.
// Errors   kDataLoss  a step was lost that the level guarantees, or the job does not hold the bytes of its step.
//          kInternal  a process ended by itself, or hung. Both messages contain the round and the daemon's log.
absl::StatusOr<KillCampaignResult> RunKillCampaign(const KillCampaignOptions& options);

}  // namespace forebay::testing
