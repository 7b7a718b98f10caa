// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/base/activity.h"

#include <algorithm>
#include <array>
#include <span>

#include "protocol/os/check.h"

namespace forebay::daemon {
namespace {

using enum Activity;

// An activity that may be under way, and why it does no harm.
struct Allowed {
  Activity under_way;
  std::string_view why;
};

// One row of the table. Each activity that takes time is in one of the two lists.
struct Row {
  Activity wanted;
  Activities excludes;
  std::span<const Allowed> allows;
};

constexpr std::string_view kNotReady = "a job that is not ready accepts no such command";
constexpr std::string_view kOwnPlace = "new arenas and sums are not in use yet";
constexpr std::string_view kOtherSlot = "the copy goes to the slot of the next step's extra_state";
constexpr std::string_view kOneAtATime = "its owner begins the next one when this one has ended";
constexpr std::string_view kNoRanks =
    "no session of the old world uses it, and states stay where they are";
constexpr std::string_view kDurableFirst =
    "no step is called or prepared while the durable step is awaited";

constexpr std::array kDecisionAllows = std::to_array<Allowed>({
    {kEarlyUpdate, "the decision accepts the early update or drops it"},
    {kMemory, "float32 sums that are not in use are not part of the step"},
    {kCalledStep, "the decision is of this step"},
    {kPrepared, "the decision is of this step"},
});
constexpr std::array kAccessAllows = std::to_array<Allowed>({
    {kAccess, kOneAtATime},
    {kRestore, kNotReady},
    {kWeightsLoad, "a write waits for the loads; a read changes no slot"},
    {kExtraCopy, kOtherSlot},
    {kMemory, kOwnPlace},
});
constexpr std::array kMoveAllows = std::to_array<Allowed>({
    {kMove, kOneAtATime},
    {kWeightsLoad, "the old slot of a moved block with weights is freed after the loads"},
    {kExtraCopy, kOtherSlot},
    {kMemory, kOwnPlace},
});
constexpr std::array kDoubtedMoveAllows = std::to_array<Allowed>({
    {kMove, kOneAtATime},
    {kDurableStep, "the durable step waits for this move"},
    {kDigests,
     "the move copies a block on swap, and digests read the weights arena and current slots"},
    {kWeightsLoad, "the old slot of a moved block with weights is freed after the loads"},
    {kExtraCopy, kOtherSlot},
    {kMemory, kOwnPlace},
    {kCalledStep, "the decision waits for the durable step, and that step for the move"},
    {kPrepared, kDurableFirst},
});
constexpr std::array kEarlyUpdateAllows = std::to_array<Allowed>({
    {kEarlyUpdate, "each block is updated by itself"},
    {kRestore, kNotReady},
    {kDigests, "an early update changes no current version"},
    {kWeightsLoad, "an early update changes no current version"},
    {kExtraCopy, "the copies begin when all ranks have called"},
    {kMemory, "a step that waits for float32 sums begins no early update"},
});
constexpr std::array kWorldChangeAllows = std::to_array<Allowed>({
    {kAccess, kNoRanks},
    {kMove, kNoRanks},
    {kDigests, kNoRanks},
    {kWeightsLoad, kNoRanks},
    {kExtraCopy, "the copies end before the decision of their step"},
});
constexpr std::array kFloatSumsAllows = std::to_array<Allowed>({
    {kAccess, "states are not in the memory of sums"},
    {kMove, "states are not in the memory of sums"},
    {kDurableStep, "a durable step has no sums"},
    {kRestore, kNotReady},
    {kDigests, "weights are not in the memory of sums"},
    {kWeightsLoad, "weights are not in the memory of sums"},
    {kExtraCopy, kOtherSlot},
    {kMemory, "the float32 sums are created before this"},
    {kCalledStep, "gradients of a called step wait for these sums"},
});
constexpr std::array kRecordAllows = std::to_array<Allowed>({
    {kEarlyUpdate, "an early update changes no current version"},
    {kDurableStep, "the record names current slots, and the ledger names the durable ones"},
    {kDigests, "digests change nothing"},
    {kWeightsLoad, "the next daemon begins with an empty cache, but for leased copies"},
    {kExtraCopy, kOtherSlot},
    {kCalledStep, "the decision is recorded when it is taken"},
});

constexpr std::array kTable = std::to_array<Row>({
    {kDecision,
     {kUpdate, kAccess, kMove, kDurableStep, kRestore, kDigests, kWeightsLoad, kExtraCopy},
     kDecisionAllows},
    {kAccess,
     {kUpdate, kEarlyUpdate, kMove, kDurableStep, kDigests, kCalledStep, kPrepared},
     kAccessAllows},
    {kMove,
     {kUpdate, kEarlyUpdate, kAccess, kDurableStep, kRestore, kDigests, kCalledStep, kPrepared},
     kMoveAllows},
    {kDoubtedMove, {kUpdate, kEarlyUpdate, kAccess, kRestore}, kDoubtedMoveAllows},
    {kEarlyUpdate,
     {kUpdate, kAccess, kMove, kDurableStep, kCalledStep, kPrepared},
     kEarlyUpdateAllows},
    {kWorldChange,
     {kUpdate, kEarlyUpdate, kDurableStep, kRestore, kMemory, kCalledStep, kPrepared},
     kWorldChangeAllows},
    {kFloatSums, {kUpdate, kEarlyUpdate, kPrepared}, kFloatSumsAllows},
    {kRecord, {kUpdate, kAccess, kMove, kRestore, kMemory, kPrepared}, kRecordAllows},
    {kStop,
     {kUpdate, kEarlyUpdate, kAccess, kMove, kDurableStep, kRestore, kDigests, kWeightsLoad,
      kExtraCopy, kMemory, kCalledStep, kPrepared},
     {}},
});

// True if each activity that takes time is in exactly one list of each row.
constexpr bool IsComplete() {
  for (const Row& row : kTable) {
    for (const Activity activity : kLastingActivities) {
      int lists = row.excludes.has(activity) ? 1 : 0;
      for (const Allowed& allowed : row.allows) lists += allowed.under_way == activity ? 1 : 0;
      if (lists != 1) return false;
    }
  }
  return true;
}
static_assert(IsComplete());

const Row& RowOf(Activity wanted) {
  for (const Row& row : kTable) {
    if (row.wanted == wanted) return row;
  }
  FOREBAY_CHECK(false);  // only activities with a row begin through the table
}

}  // namespace

bool Excludes(Activity wanted, Activity under_way) { return RowOf(wanted).excludes.has(under_way); }

bool MayBegin(Activity wanted, Activities under_way) {
  return !RowOf(wanted).excludes.Overlaps(under_way);
}

bool AreNeverTogether(Activity a, Activity b) {
  // An update begins with a decision. Other activities without a row begin at any time.
  const auto excludes = [](Activity begins, Activity under_way) {
    if (begins == kUpdate) begins = kDecision;
    return std::ranges::any_of(kTable, [&](const Row& row) {
      return row.wanted == begins && row.excludes.has(under_way);
    });
  };
  return excludes(a, b) && excludes(b, a);
}

std::optional<std::string_view> WhyNotExcluded(Activity wanted, Activity under_way) {
  for (const Allowed& allowed : RowOf(wanted).allows) {
    if (allowed.under_way == under_way) return allowed.why;
  }
  return std::nullopt;
}

}  // namespace forebay::daemon
