// SPDX-License-Identifier: Apache-2.0
#include "protocol/step_summary.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/units.h"

namespace forebay::protocol {
namespace {

constexpr uint64_t kDigitMax = uint64_t{1} << 48;  // limit of a digit merged over 2^16 nodes

absl::Status BadSummary(const std::string& what) {
  return MakeError(ErrorId::kProtocol, absl::StrCat("the summary of a step ", what));
}

bool EndsWell(std::span<const uint64_t> bits, uint64_t params) {
  return params % 64 == 0 || bits.empty() || (bits.back() >> (params % 64)) == 0;
}

void Or(std::vector<uint64_t>& to, const std::vector<uint64_t>& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] |= from[i];
}

}  // namespace

void StepSummary::Merge(const StepSummary& other) {
  head.overflowed += other.head.overflowed;
  for (size_t digit = 0; digit < kSquareDigits; ++digit) {
    head.squares[digit] += other.head.squares[digit];
  }
  Or(present, other.present);
  Or(lacking, other.lacking);
}

uint32_t StepSummary::FirstPartial() const {
  for (uint32_t param = 0; param < head.params; ++param) {
    if (IsPresent(present, param) && IsPresent(lacking, param)) return param;
  }
  return head.params;
}

uint64_t NodeSummaryBytes(const Layout& layout) {
  const uint64_t digests = layout.spec().has_replicas ? layout.partitions().size() : 0;
  return StepSummaryBytes(layout.params().size()) + digests * sizeof(uint64_t);
}

uint64_t StepSummaryOffset(const StepRegion& region, const Layout& layout) {
  return region.offset_bytes + region.size_bytes - StepRegionTailBytes(layout, true);
}

uint64_t StepRegionTailBytes(const Layout& layout, bool is_over_nodes) {
  if (!is_over_nodes) return kSessionMarkBytes;
  return kSessionMarkBytes + RoundUp(NodeSummaryBytes(layout), kSessionMarkBytes);
}

void EncodeStepSummary(const StepSummary& summary, std::span<std::byte> to) {
  const auto append = [&to](std::span<const std::byte> bytes) {
    std::memcpy(to.data(), bytes.data(), bytes.size());
    to = to.subspan(bytes.size());
  };
  append(std::as_bytes(std::span(&summary.head, 1)));
  append(std::as_bytes(std::span(summary.present)));
  append(std::as_bytes(std::span(summary.lacking)));
}

std::vector<std::byte> EncodeStepSummary(const StepSummary& summary) {
  std::vector<std::byte> bytes(StepSummaryBytes(summary.head.params));
  EncodeStepSummary(summary, bytes);
  return bytes;
}

absl::StatusOr<StepSummary> DecodeStepSummary(std::span<const std::byte> bytes, uint64_t params) {
  StepSummary summary;
  if (bytes.size() != StepSummaryBytes(params)) {
    return BadSummary(absl::StrCat("has ", bytes.size(), " bytes, not ", StepSummaryBytes(params)));
  }
  std::memcpy(&summary.head, bytes.data(), sizeof(summary.head));
  bytes = bytes.subspan(sizeof(summary.head));
  if (summary.head.params != params || summary.head.decision > StepDecision::kWithdraw) {
    return BadSummary(absl::StrCat("is of ", summary.head.params, " parameters, not ", params,
                                   ", or has the unknown decision ",
                                   static_cast<uint32_t>(summary.head.decision)));
  }
  for (std::vector<uint64_t>* bits : {&summary.present, &summary.lacking}) {
    bits->resize(PresenceWords(params));
    if (params > 0) std::memcpy(bits->data(), bytes.data(), PresenceBytes(params));
    bytes = bytes.subspan(PresenceBytes(params));
    if (!EndsWell(*bits, params)) return BadSummary("has bits beyond its parameters");
  }
  for (const uint64_t digit : summary.head.squares) {
    if (digit >= kDigitMax) return BadSummary("has a sum of squares that no nodes make");
  }
  return summary;
}

}  // namespace forebay::protocol
