#include "daemon/exec/path_wear.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_format.h"
#include "daemon/exec/path_record.h"

namespace forebay::daemon {
namespace {

constexpr std::string_view kWearName = "wear";

}  // namespace

uint64_t LoadWrittenBytes(const std::string& path, const std::string& state_folder,
                          uint64_t endurance_bytes) {
  const std::optional<RecordPlace> place = RecordPlaceOf(path, state_folder);
  if (!place) return 0;
  const std::optional<toml::table> table = LoadRecord(*place, kWearName);
  if (!table) return 0;
  const auto value = [&](const char* key) {
    return static_cast<uint64_t>(std::max<int64_t>((*table)[key].value_or<int64_t>(0), 0));
  };
  return value("endurance") == endurance_bytes ? value("written") : 0;
}

void SaveWear(const std::vector<PathWear>& paths, const std::string& state_folder) {
  for (const PathWear& wear : paths) {
    const std::optional<RecordPlace> place = RecordPlaceOf(wear.path, state_folder);
    if (!place) continue;
    SaveRecord(*place, kWearName,
               "# What forebayd has written to this swap path, in bytes, since swap.endurance has "
               "this value.\n# Delete it where the drive is another one.\n",
               absl::StrFormat("endurance = %d\nwritten = %d\n", wear.endurance_bytes,
                               wear.written_bytes));
  }
}

}  // namespace forebay::daemon
