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
  // The call was refused somewhere: every rank calls the step again, with the gradients that it has delivered.
  kRepeat = 2,
  kDrop = 3,      // gradients were lost somewhere: every rank begins the step anew
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
  // Hash of what an update takes beside the gradients: scale, bounds, max_grad_norm, hyper-parameters. The same on all
  // nodes.
  uint64_t scalars = 0;
  uint64_t overflowed = 0;  // masters in the step before that are not reported yet
  SquareDigits squares = {};
};
static_assert(sizeof(StepSummaryHead) == 32 + 8 * kSquareDigits);

struct StepSummary {
  StepSummaryHead head;
  // Bit i % 64 of word i / 64 is parameter i: a rank of the node has a gradient of it; one of its ranks holds a part of
  // it and has none. PresenceWords(params) words each.
  std::vector<uint64_t> present;
  std::vector<uint64_t> lacking;

  // Adds another node's summary. The result has the same bits in any order of nodes. Both summaries are of one step, with the
  // same scalars and parameters.
  void Merge(const StepSummary& other);
  // The first parameter that some rank has a gradient of and another one lacks; params: none.
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
// Offset in the arena of the summary of a step over several nodes. The daemon writes its node's summary there, and the client
// writes the world's.
uint64_t StepSummaryOffset(const StepRegion& region, const Layout& layout);
// Bytes at the end of the step region, behind the request: the client's mark and, for a job over several nodes, a summary.
uint64_t StepRegionTailBytes(const Layout& layout, bool is_over_nodes);

// Encodes a summary in StepSummaryBytes(head.params) bytes.
void EncodeStepSummary(const StepSummary& summary, std::span<std::byte> to);
std::vector<std::byte> EncodeStepSummary(const StepSummary& summary);
// Errors  E_PROTOCOL  not the size of a summary of `params` parameters, an unknown decision, bits or digits that no
//                     summary has.
absl::StatusOr<StepSummary> DecodeStepSummary(std::span<const std::byte> bytes, uint64_t params);

}  // namespace forebay::protocol
