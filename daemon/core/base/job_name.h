// SPDX-License-Identifier: Apache-2.0
// Names of jobs. A name belongs to a uid, so that no other user can take it.
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

// Says if a caller may name jobs of other users.
enum class OtherUsers : uint8_t { kRefused, kAllowed };

// Parses `text`: NAME for a job of `uid` itself, or UID:NAME.
//
// Errors  E_JOB_NAME    NAME is not 1 to kJobNameBytesMax bytes of [A-Za-z0-9._-].
//         E_PERMISSION  UID is another user's, and `others` is kRefused.
absl::StatusOr<JobName> ParseJobName(std::string_view text, uint32_t uid, OtherUsers others);

// Returns the name in the form in which `uid` writes it: NAME for a job of `uid` itself, UID:NAME for a job of another user.
std::string JobNameFor(uint32_t uid, const JobName& job);

}  // namespace forebay::daemon
