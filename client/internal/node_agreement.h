// SPDX-License-Identifier: Apache-2.0
// The messages that ranks of a job over several nodes exchange, and the decision computed from them. Equal messages give
// equal decisions on every rank. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/layout.h"
#include "protocol/step_summary.h"

namespace forebay::client::internal {

// The weights of a partition of which another node may have a replica.
struct ReplicaDigest {
  uint64_t partition = 0;  // the same number on every node: of its group and boxes
  uint64_t digest = 0;
  uint32_t group = 0;
  uint32_t reserved = 0;

  bool operator==(const ReplicaDigest&) const = default;
};

// `bytes`: what is behind the summary (NodeSummaryBytes). Those that are not known are left out.
std::vector<ReplicaDigest> ReplicaDigestsOf(const protocol::Layout& layout,
                                            std::span<const std::byte> bytes);

// Message of one rank to all ranks, when the call of its step is answered or after attach.
struct NodeMessage {
  enum class Kind : uint8_t {
    kPrepared = 1,  // its node has prepared the step: `summary`
    kRefused = 2,   // its call was refused with `error`; what it has delivered is kept
    kLost = 3,      // and is lost
    kAttached = 4,  // its session stands at `state`
    // The rank's call was refused because of another rank of its node, which sends the reason.
    kWithdrawn = 5,
  };
  struct State {
    uint64_t committed_step = 0;
    uint64_t prepared_step = 0;   // 0: none
    uint64_t durable_step = 0;    // newest durable step
    uint64_t durable_before = 0;  // an older durable step; 0: none
    bool is_new = false;          // its initial parameters are not written
  };

  Kind kind = Kind::kRefused;
  uint32_t first_rank = 0;  // first rank of the sender's node
  State state = {};
  absl::Status error = {};
  std::vector<std::byte> summary = {};      // encoded
  std::vector<ReplicaDigest> digests = {};  // with a summary: of the node, by its first rank
};

std::string EncodeNodeMessage(const NodeMessage& message);
// Errors  E_PROTOCOL.
absl::StatusOr<NodeMessage> DecodeNodeMessage(std::string_view bytes);

// Outcome of a step, the same on every rank.
struct StepOutcome {
  protocol::StepSummary summary;  // merged summary of the world, with its decision
  absl::Status error;             // error of the step's call if it is not committed
};
// `messages` by rank in the world.
//
// Errors  E_PROTOCOL  a message is none, or of another step.
absl::StatusOr<StepOutcome> DecideStep(std::span<const std::string> messages,
                                       const protocol::Layout& layout, uint64_t step);

// Action of the ranks between attach and training.
struct AttachOutcome {
  enum class Todo : uint8_t {
    kNothing,  // all nodes stand at one step
    kDrop,     // a node has prepared a step, and no node has committed it
    kCommit,   // a node has, by `summary`: the others follow, and their ranks attach again
    kGoBack,  // a node lacks what the others have: they go back to `step`, and their ranks attach again
  };
  Todo todo = Todo::kNothing;
  uint64_t step = 0;                    // the step to drop, to commit, or that all nodes have
  uint64_t from_step = 0;               // kGoBack: the newest one of any node
  std::vector<std::byte> summary = {};  // encoded
};
// Errors  what a rank met; E_STEP: the nodes stand at steps that none of these brings together.
absl::StatusOr<AttachOutcome> AgreeOnStep(std::span<const std::string> messages,
                                          const std::string& job);

}  // namespace forebay::client::internal
