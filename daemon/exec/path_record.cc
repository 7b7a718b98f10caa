#include "daemon/exec/path_record.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kVersion = 1;

}  // namespace

std::string RecordPlace::File(std::string_view name) const {
  return absl::StrCat(prefix, std::string(name), ".toml");
}

std::optional<RecordPlace> RecordPlaceOf(const std::string& path) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) return std::nullopt;
  return RecordPlace{.prefix = path + "/forebay.", .device = static_cast<int64_t>(found.st_dev)};
}

std::optional<toml::table> LoadRecord(const RecordPlace& place, std::string_view name) {
  const std::string file = place.File(name);
  std::error_code error;
  if (!fs::is_regular_file(file, error)) return std::nullopt;
  try {  // toml++ throws
    toml::table table = toml::parse_file(file);
    if (table["version"].value_or<int64_t>(0) != kVersion ||
        table["device"].value_or<int64_t>(0) != place.device) {
      return std::nullopt;
    }
    return table;
  } catch (const toml::parse_error& parse_error) {
    spdlog::warn("{} cannot be read: {}", file, parse_error.description());
    return std::nullopt;
  }
}

void SaveRecord(const RecordPlace& place, std::string_view name, std::string_view comment,
                std::string_view values) {
  const std::string file = place.File(name);
  const std::string made = file + ".new";
  std::ofstream stream(made);
  stream << comment << "version = " << kVersion << "\ndevice = " << place.device << "\n" << values;
  stream.close();
  std::error_code error;
  if (stream) fs::rename(made, file, error);
  if (!stream || error) spdlog::warn("cannot write {}", file);
}

}  // namespace forebay::daemon
