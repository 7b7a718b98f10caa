// SPDX-License-Identifier: Apache-2.0
// The table of activities of a job that exclude each other. It says which activity must not begin while another is under way.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

namespace forebay::daemon {

enum class Activity : uint8_t {
  // Activities that begin and end within one event. They are never under way.
  kDecision,     // decides the next step, or prepares it in a job over several nodes
  kDoubtedMove,  // begins the move of a block out of a slot in doubt, for which the durable step waits
  kWorldChange,  // replaces the step arena for sessions of another world size, or for another plan
  kFloatSums,    // replaces 16-bit gradient sums by float32 sums
  kRecord,       // records the whole job (RecordJob)
  kStop,         // ends the job's changes, because the daemon stops
  // Activities that take time.
  kUpdate,       // blocks change for the committed step, which is not published yet
  kEarlyUpdate,  // a task reads, updates or writes a block for a step that is not decided
  kAccess,       // a client's read or write of states
  kMove,         // a block changes its place between steps (Residency, Relocation)
  kDurableStep,  // a published step is made durable
  kRestore,      // the job is recovered from a disk or from retained memory
  kDigests,      // weights of the published step are read for digests of replicas
  kWeightsLoad,  // weights are read from swap to the cache
  kExtraCopy,    // extra_state of the called step is copied to the step arena
  kMemory,       // memory or swap of the job is created
  kCalledStep,   // all ranks have called the next step, which is not decided
  kPrepared,     // the next step is prepared, and waits for the decision of the nodes
};
inline constexpr auto kLastingActivities = std::to_array<Activity>(
    {Activity::kUpdate, Activity::kEarlyUpdate, Activity::kAccess, Activity::kMove,
     Activity::kDurableStep, Activity::kRestore, Activity::kDigests, Activity::kWeightsLoad,
     Activity::kExtraCopy, Activity::kMemory, Activity::kCalledStep, Activity::kPrepared});

// A set of activities.
class Activities {
 public:
  constexpr Activities() = default;
  constexpr Activities(std::initializer_list<Activity> activities) {
    for (const Activity activity : activities) bits_ |= BitOf(activity);
  }

  constexpr bool has(Activity activity) const { return (bits_ & BitOf(activity)) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr void AddIf(bool is_under_way, Activity activity) {
    if (is_under_way) bits_ |= BitOf(activity);
  }
  constexpr Activities Without(Activity activity) const {
    return Activities(bits_ & ~BitOf(activity));
  }
  constexpr bool Overlaps(Activities other) const { return (bits_ & other.bits_) != 0; }

 private:
  constexpr explicit Activities(uint32_t bits) : bits_(bits) {}
  static constexpr uint32_t BitOf(Activity activity) {
    return uint32_t{1} << static_cast<uint32_t>(activity);
  }

  uint32_t bits_ = 0;
};

// True if `wanted` must not begin while `under_way` is under way.
bool Excludes(Activity wanted, Activity under_way);
// True if `wanted` may begin while the activities of `under_way` are under way. Each activity has more conditions of its own.
bool MayBegin(Activity wanted, Activities under_way);

// True if each of the two lasting activities excludes that the other begins, so that both are never under way.
bool AreNeverTogether(Activity a, Activity b);

// Returns why `wanted` may begin while `under_way` is under way. nullopt if `wanted` must not begin.
std::optional<std::string_view> WhyNotExcluded(Activity wanted, Activity under_way);

}  // namespace forebay::daemon
