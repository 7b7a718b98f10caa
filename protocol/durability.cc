// SPDX-License-Identifier: Apache-2.0
#include "protocol/durability.h"

#include <cstddef>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::protocol {
namespace {

constexpr std::string_view kEpochPrefix = "epoch=";
constexpr size_t kShownBytesMax = 40;

// Quotes text for a message. The text may come from a client: it is cut to kShownBytesMax bytes, and each byte that is not
// printable becomes '?'.
std::string Quoted(std::string_view text) {
  std::string shown(text.substr(0, kShownBytesMax));
  for (char& one : shown) {
    const bool is_printable = one >= ' ' && one <= '~';
    if (!is_printable) one = '?';
  }
  return absl::StrCat("\"", shown, text.size() > shown.size() ? "..." : "", "\"");
}

}  // namespace

std::string FormatDurability(const Durability& durability) {
  switch (durability.level) {
    case DurabilityLevel::kMemory:
      return "memory";
    case DurabilityLevel::kEpoch:
      return absl::StrCat("epoch=", durability.steps);
    case DurabilityLevel::kStep:
      return "step";
  }
  return "";
}

absl::StatusOr<Durability> ParseDurability(std::string_view text) {
  if (text == "memory") return Durability{};
  if (text == "step") return Durability{.level = DurabilityLevel::kStep, .steps = 1};
  uint32_t steps = 0;
  const bool is_epoch =
      text.starts_with(kEpochPrefix) &&
      text.substr(kEpochPrefix.size()).find_first_not_of("0123456789") == std::string_view::npos &&
      absl::SimpleAtoi(std::string(text.substr(kEpochPrefix.size())), &steps) && steps >= 1 &&
      steps <= Durability::kStepsMax;
  if (is_epoch) return Durability{.level = DurabilityLevel::kEpoch, .steps = steps};
  return MakeError(ErrorId::kOption, absl::StrCat(Quoted(text), " is no level of durability"),
                   absl::StrCat("use memory, step, or epoch=N: every N steps (1 to ",
                                Durability::kStepsMax, ") one is made durable"));
}

}  // namespace forebay::protocol
