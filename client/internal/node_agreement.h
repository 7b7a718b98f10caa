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

// Digest of a partition's weights, for a partition that may have a replica on another node.
struct ReplicaDigest {
  uint64_t partition = 0;  // hash of the group and boxes, equal on every node
  uint64_t digest = 0;
  uint32_t group = 0;
  uint32_t reserved = 0;

  bool operator==(const ReplicaDigest&) const = default;
};

// Returns the digests of the partitions in `bytes`, the part of a node's summary behind the header (NodeSummaryBytes). Unknown
// digests are omitted.
std::vector<ReplicaDigest> ReplicaDigestsOf(const protocol::Layout& layout,
                                            std::span<const std::byte> bytes);

// Message of one rank to all ranks, when the call of its step is answered or after attach.
struct NodeMessage {
  enum class Kind : uint8_t {
    kPrepared = 1,  // the sender's node has prepared the step: `summary`
    // the sender's call was refused with `error`; its delivered gradients are retained
    kRefused = 2,
    kLost = 3,      // the sender's call was refused with `error`; its delivered gradients are lost
    kAttached = 4,  // the sender has attached, with its session at `state`
    // The rank's call was refused because of another rank of its node, which sends the reason.
    kWithdrawn = 5,
  };
  struct State {
    uint64_t committed_step = 0;
    uint64_t prepared_step = 0;   // 0 if no step is prepared
    uint64_t durable_step = 0;    // newest durable step, to which the node can go back; 0: none
    uint64_t durable_before = 0;  // an older durable step, likewise; 0: none
    bool is_new = false;          // true if the job's initial parameters are not written
  };

  Kind kind = Kind::kRefused;
  uint32_t first_rank = 0;  // first rank of the sender's node
  State state = {};
  absl::Status error = {};
  std::vector<std::byte> summary = {};  // encoded
  // with a summary from a node's first rank: digests of the node
  std::vector<ReplicaDigest> digests = {};
};

std::string EncodeNodeMessage(const NodeMessage& message);
// Errors  E_PROTOCOL.
absl::StatusOr<NodeMessage> DecodeNodeMessage(std::string_view bytes);

// Outcome of a step, the same on every rank.
struct StepOutcome {
  protocol::StepSummary summary;  // merged summary of the world, with its decision
  absl::Status error;             // error of the step's call if it is not committed
};
// Decides a step from the messages of all ranks, in the order of ranks in the world.
//
// Errors  E_PROTOCOL  bytes are no message, or the message is of another step.
absl::StatusOr<StepOutcome> DecideStep(std::span<const std::string> messages,
                                       const protocol::Layout& layout, uint64_t step);

// Action of the ranks between attach and training.
struct AttachOutcome {
  enum class Todo : uint8_t {
    kNothing,  // all nodes stand at the same step
    kDrop,     // a node has prepared a step, and no node has committed it
    kCommit,   // a node has committed `summary`: other nodes commit too, their ranks attach again
    // A node lacks steps of other nodes: the other nodes return to `step`, and their ranks attach again.
    kGoBack,
  };
  Todo todo = Todo::kNothing;
  uint64_t step = 0;                    // the step to drop, to commit, or that all nodes have
  uint64_t from_step = 0;               // kGoBack: newest step of any node
  std::vector<std::byte> summary = {};  // encoded
};
// Decides how all nodes reach one step, from the messages of all ranks after attach.
//
// Errors  an error that a rank sent; E_STEP: no action brings the nodes to one step.
absl::StatusOr<AttachOutcome> AgreeOnStep(std::span<const std::string> messages,
                                          const std::string& job);

}  // namespace forebay::client::internal
