// The barrier of a step: which ranks have called it, and that they agree.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/job_io.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// One rank's call, checked by itself.
struct StepVote {
  CommandId command;
  protocol::StepRequest request{};
  std::vector<protocol::HyperParams> hyper_params;  // request.param_groups of them
  uint64_t extra_state_offset_bytes = 0;            // in the session's arena
};

class StepVotes {
 public:
  // OK, or E_STEP that names the ranks and both values where `vote` differs from the lowest rank's
  // that has voted. extra_state may differ between ranks.
  absl::Status Compare(uint32_t rank, const StepVote& vote) const;

  void Add(uint32_t rank, StepVote vote) { votes_.emplace(rank, std::move(vote)); }
  bool has(uint32_t rank) const { return votes_.contains(rank); }
  const std::map<uint32_t, StepVote>& by_rank() const { return votes_; }

  // Takes all votes out.
  std::map<uint32_t, StepVote> Take();

 private:
  std::map<uint32_t, StepVote> votes_;
};

}  // namespace forebay::daemon
