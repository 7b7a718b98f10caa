// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/plan/plan_advice.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::Layout;

std::string ExactBytes(uint64_t bytes) {
  return absl::StrCat(bytes, " bytes (", FormatBytes(bytes), ")");
}

// Maximum sizes of a layout for which other formats are tried. Layouts are created on the loop thread, and boxes are compared
// in pairs.
constexpr uint64_t kTriedBoxesMax = uint64_t{1} << 17;
constexpr uint64_t kTriedComparisonsMax = uint64_t{1} << 24;

// True if Layout::Create is fast for this layout. A box of one run is compared with its neighbours, a box of several runs with
// all boxes of its parameter; boxes with different strides are compared run by run.
bool IsMadeQuickly(const Layout& layout) {
  std::map<uint32_t, uint64_t> strides;  // by parameter
  uint64_t strided_boxes = 0;
  for (const protocol::BoxPlace& place : layout.boxes()) {
    if (place.box.runs == 1) continue;
    ++strided_boxes;
    const uint64_t stride = place.box.stride_elems;
    if (strides.try_emplace(place.box.param, stride).first->second != stride) return false;
  }
  const uint64_t boxes = layout.boxes().size();
  return boxes <= kTriedBoxesMax && strided_boxes * boxes <= kTriedComparisonsMax;
}

// Minimum extra_state_bytes of a rank that the advice mentions. The default at attach is 64 KiB.
constexpr uint64_t kExtraStateNamedMin = protocol::kMiB;

// True if only the node's limit bounds a job's DRAM.
bool HasNoShares(const NodeOptions& options) {
  return options.job_percent == 100 && options.uid_dram_bytes == 0;
}

// Returns the text that names the limits which are sufficient with swap, for a node whose daemon has staging slots but no swap
// space.
std::string LimitsWithSwap(const LeastLimits& least) {
  std::string text =
      absl::StrCat("; with room on swap a limit of ", ExactBytes(least.states_on_swap),
                   " does for a job with its states there");
  if (least.weights_on_swap < least.states_on_swap) {
    absl::StrAppend(&text, ", of ", ExactBytes(least.weights_on_swap), " with its weights too");
  }
  if (least.gradients_on_swap < least.weights_on_swap) {
    absl::StrAppend(&text, ", of ", ExactBytes(least.gradients_on_swap), " with its gradients too");
  }
  return text;
}

// Returns the text that names a limit which is sufficient without swap, or limits which are sufficient with swap. "" if no such
// limit is known.
absl::StatusOr<std::string> OtherLimits(ErrorId id, const Layout& layout,
                                        const SessionRequest& request, const NodeOptions& options,
                                        const NodeUse& use) {
  const bool has_swap = options.swap.capacity_bytes() > 0;
  const bool is_durable = request.durability.level != protocol::DurabilityLevel::kMemory;
  if (id == ErrorId::kDramLimit && !has_swap && options.staging_slots == 0) {
    return "; or start the daemon with swap (--swap, swap.paths) for what does not fit";
  }
  if (!HasNoShares(options)) return "";
  if (id == ErrorId::kDramLimit && !has_swap) {
    ASSIGN_OR_RETURN(const LeastLimits least, LeastLimitsOf(layout, request, options, use));
    return LimitsWithSwap(least);
  }
  if (id == ErrorId::kSwapNospc && !is_durable) {
    ASSIGN_OR_RETURN(const uint64_t limit, LimitWithoutSwap(layout, request, options, use));
    return absl::StrCat("; with a limit of ", ExactBytes(limit), " nothing is on swap");
  }
  return "";
}

}  // namespace

absl::Status WithAdvice(const absl::Status& refusal, const Layout& layout,
                        const SessionRequest& request, const NodeOptions& options,
                        const NodeUse& use, FitsFn fits) {
  const ErrorId id = protocol::IdOf(refusal);
  if (id != ErrorId::kDramLimit && id != ErrorId::kSwapNospc) return refusal;
  const bool goes_to_swap = id == ErrorId::kDramLimit && options.swap.capacity_bytes() > 0;
  const auto limit_of = [&](const Layout& of,
                            const SessionRequest& by) -> absl::StatusOr<uint64_t> {
    if (!goes_to_swap) return LimitWithoutSwap(of, by, options, use);
    ASSIGN_OR_RETURN(const LeastLimits least, LeastLimitsOf(of, by, options, use));
    return least.gradients_on_swap;
  };
  const absl::StatusOr<uint64_t> needed = limit_of(layout, request);
  const absl::StatusOr<std::string> other_limits = OtherLimits(id, layout, request, options, use);
  if (!needed.ok() || !other_limits.ok()) return refusal;
  std::vector<std::string> changes;
  const auto consider = [&](const std::string& what, const Layout& other_layout,
                            const SessionRequest& other_request) {
    const absl::StatusOr<uint64_t> other = limit_of(other_layout, other_request);
    if (!other.ok() || *other >= *needed) return;
    changes.push_back(absl::StrCat(
        what, ": ", ExactBytes(*needed - *other), " less, ",
        fits(other_layout, other_request) ? "which fits" : "which alone is not enough"));
  };
  const auto state_bytes = [&](protocol::Format format) {
    return protocol::StateBytes(layout.spec().optimizer, format, layout.spec().dtype,
                                options.block_elems);
  };
  const bool is_made_quickly = IsMadeQuickly(layout);
  for (const protocol::StateFormat& format : protocol::kStateFormats) {
    const bool is_smaller = state_bytes(format.format) < state_bytes(layout.spec().format);
    if (format.weights != layout.spec().dtype || !is_smaller || !is_made_quickly) continue;
    protocol::LayoutSpec spec = layout.spec();
    spec.format = format.format;
    const absl::StatusOr<Layout> other = Layout::Create(std::move(spec));
    if (!other.ok()) continue;
    consider(absl::StrCat("format ", std::string(Name(format.format))), *other, request);
  }
  SessionRequest other = request;
  other.activation_bytes = 0;
  consider("activation_bytes=0", layout, other);
  other = request;
  other.accumulate = false;
  consider("accumulate=1", layout, other);
  if (request.extra_state_bytes >= kExtraStateNamedMin) {
    other = request;
    other.extra_state_bytes = 0;
    consider("no extra_state and no buffers but register_buffer(..., persistent=False)", layout,
             other);
  }
  std::string hint = protocol::HintOf(refusal);
  if (!changes.empty()) {
    absl::StrAppend(&hint, "; or lower what the job takes: ", absl::StrJoin(changes, ", "));
  }
  absl::StrAppend(&hint, *other_limits);
  return protocol::MakeError(id, std::string(refusal.message()), hint);
}

}  // namespace forebay::daemon
