// SPDX-License-Identifier: Apache-2.0
// Levels of durability: the part of a job's training that a power cut, or the death of the daemon, can undo.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace forebay::protocol {

enum class DurabilityLevel : uint8_t {
  kMemory,  // all training; a trainer's death undoes nothing at any level
  kEpoch,   // at most Durability::steps steps
  kStep,    // no step that was answered
};

struct Durability {
  static constexpr uint32_t kStepsMax = 1'000'000;

  DurabilityLevel level = DurabilityLevel::kMemory;
  // Number of steps from one durable step to the next, 1 to kStepsMax. 1 at kStep, 0 at kMemory.
  uint32_t steps = 0;

  bool operator==(const Durability&) const = default;
};

// "memory", "epoch=10", "step".
std::string FormatDurability(const Durability& durability);

// Errors  E_OPTION  none of these; the message repeats the text, a long one's beginning.
absl::StatusOr<Durability> ParseDurability(std::string_view text);

}  // namespace forebay::protocol
