// SPDX-License-Identifier: Apache-2.0
// Whose job a name means: a name belongs to its uid, so that nobody can take it from another.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace forebay::daemon {

struct JobName {
  uint32_t uid = 0;
  std::string name;

  auto operator<=>(const JobName&) const = default;  // NOLINT(modernize-use-nullptr): of clang 14
};

// Which names of others a caller may use.
enum class OtherUsers : uint8_t { kRefused, kAllowed };

// `text` is NAME, a job of `uid` itself, or UID:NAME.
//
// Errors  E_JOB_NAME    NAME is not 1 to kJobNameBytesMax bytes of [A-Za-z0-9._-].
//         E_PERMISSION  UID is another's, and `others` are refused.
absl::StatusOr<JobName> ParseJobName(std::string_view text, uint32_t uid, OtherUsers others);

// As `uid` writes it: NAME for a job of its own, else UID:NAME.
std::string JobNameFor(uint32_t uid, const JobName& job);

}  // namespace forebay::daemon
