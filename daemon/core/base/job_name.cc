// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/base/job_name.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/core/base/limits.h"
#include "protocol/error.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == '-';
}

}  // namespace

absl::StatusOr<JobName> ParseJobName(std::string_view text, uint32_t uid, OtherUsers others) {
  JobName job{.uid = uid, .name = std::string(text)};
  const size_t colon = text.find(':');
  const bool is_uid = colon != std::string_view::npos && colon > 0 &&
                      std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(colon),
                                  [](char c) { return c >= '0' && c <= '9'; });
  if (is_uid && absl::SimpleAtoi(std::string(text.substr(0, colon)), &job.uid)) {
    job.name = text.substr(colon + 1);
  }
  if (job.name.empty() || job.name.size() > kJobNameBytesMax ||
      !std::all_of(job.name.begin(), job.name.end(), IsNameByte)) {
    return MakeError(ErrorId::kJobName,
                     absl::StrCat("a job name has 1 to ", kJobNameBytesMax,
                                  " bytes of [A-Za-z0-9._-]; this one has ", job.name.size(),
                                  " bytes, or others"),
                     "choose another job name");
  }
  if (job.uid != uid && others == OtherUsers::kRefused) {
    return MakeError(
        ErrorId::kPermission,
        absl::StrCat("job ", job.name, " belongs to uid ", job.uid, "; this process has uid ", uid),
        "a job of your own is named without a uid; only root may use another user's");
  }
  return job;
}

std::string JobNameFor(uint32_t uid, const JobName& job) {
  return uid == job.uid ? job.name : absl::StrCat(job.uid, ":", job.name);
}

}  // namespace forebay::daemon
