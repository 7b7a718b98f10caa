// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/path_wear.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_format.h"
#include "daemon/exec/path_record.h"

namespace forebay::daemon {
namespace {

constexpr std::string_view kWearName = "wear";

}  // namespace

uint64_t LoadWrittenBytes(const std::string& path, const std::string& state_folder) {
  const std::optional<RecordPlace> place = RecordPlaceOf(path, state_folder);
  if (!place) return 0;
  const std::optional<toml::table> table = LoadRecord(*place, kWearName);
  if (!table) return 0;
  return static_cast<uint64_t>(std::max<int64_t>((*table)["written"].value_or<int64_t>(0), 0));
}

void SaveWear(const std::vector<PathWear>& paths, const std::string& state_folder) {
  for (const PathWear& wear : paths) {
    const std::optional<RecordPlace> place = RecordPlaceOf(wear.path, state_folder);
    if (!place) continue;
    SaveRecord(*place, kWearName,
               "# The bytes that forebayd has written to this swap path.\n"
               "# Delete this file if the drive is another one.\n",
               absl::StrFormat("written = %d\n", wear.written_bytes));
  }
}

}  // namespace forebay::daemon
