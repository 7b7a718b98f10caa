// SPDX-License-Identifier: Apache-2.0
// Summaries of a step of a job over several nodes. Each node summarises its part; merged, the summaries describe the world and
// decide on the step. The ranks carry the summaries: daemons never talk to each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::protocol {

enum class StepDecision : uint32_t {
  kNone = 0,    // a node's own summary
  kCommit = 1,  // every node has prepared the step
  // A call was refused on some node: every rank calls the step again, with the gradients that it has delivered.
  kRepeat = 2,
  kDrop = 3,      // some gradients were lost: every rank restarts the step from scratch
  kWithdraw = 4,  // sent by a rank: it does not call the step now
};

// The exact sum of squares of a gradient (cpu_adam/square_sum.h): digit d counts units of 2^(32 d - 320), and has
// less than 2^32 units before summaries are merged.
inline constexpr size_t kSquareDigits = 20;
using SquareDigits = std::array<uint64_t, kSquareDigits>;

struct StepSummaryHead {
  uint64_t step = 0;
  StepDecision decision = StepDecision::kNone;
  uint32_t params = 0;  // number of parameters of the layout
  // Hash of all inputs of an update except gradients: scale, bounds, max_grad_norm, hyper-parameters. The same on all nodes.
  uint64_t scalars = 0;
  uint64_t overflowed = 0;  // masters that overflowed in the step before and are not reported yet
  SquareDigits squares = {};
};
static_assert(sizeof(StepSummaryHead) == 32 + 8 * kSquareDigits);

struct StepSummary {
  StepSummaryHead head;
  // Two bit sets of PresenceWords(params) words each. Bit i % 64 of word i / 64 stands for parameter i. In the first set: some
  // rank of the node has a gradient of the parameter. In the second set: some rank of the node holds a part of the parameter
  // and has no gradient of it.
  std::vector<uint64_t> present;
  std::vector<uint64_t> lacking;

  // Adds another node's summary. The result has the same bits in any order of nodes. Both summaries are of one step, with the
  // same scalars and parameters.
  void Merge(const StepSummary& other);
  // Returns the first parameter that has a gradient on some rank and lacks one on another rank. Returns `params` if no such
  // parameter exists.
  uint32_t FirstPartial() const;
};

constexpr uint64_t StepSummaryBytes(uint64_t params) {
  return sizeof(StepSummaryHead) + 2 * PresenceBytes(params);
}

// Bytes of a node's summary and, if the layout has replicas, of the digests behind it: one digest of each partition's weights
// after the step before (8 bytes each, in order; 0: not known).
uint64_t NodeSummaryBytes(const Layout& layout);

// Offset and size of a session's step region, in bytes of its arena.
struct StepRegion {
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
};
// Offset in the arena of the summary of a step over several nodes. The daemon writes its node's summary at this offset, and the
// client writes the world's summary.
uint64_t StepSummaryOffset(const StepRegion& region, const Layout& layout);
// Bytes at the end of the step region, behind the request: the client's mark and, for a job over several nodes, a summary.
uint64_t StepRegionTailBytes(const Layout& layout, bool is_over_nodes);

// Encodes a summary in StepSummaryBytes(head.params) bytes.
void EncodeStepSummary(const StepSummary& summary, std::span<std::byte> to);
std::vector<std::byte> EncodeStepSummary(const StepSummary& summary);
// Decodes a summary.
//
// Errors  E_PROTOCOL  not the size of a summary of `params` parameters, an unknown decision, or bits or digits that no
//                     summary has.
absl::StatusOr<StepSummary> DecodeStepSummary(std::span<const std::byte> bytes, uint64_t params);

}  // namespace forebay::protocol
