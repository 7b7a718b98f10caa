// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/path_record.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "daemon/exec/volume_place.h"
#include "nvme/swap_files.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kVersion = 1;
constexpr size_t kNameBytesMax = 150;

// Returns an identity such as "nvme.1234-5678 partition 2" in a form that is valid in file names.
std::string FileNameOf(std::string identity) {
  for (char& character : identity) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(character)) && character != '-') {
      character = '_';
    }
  }
  return identity.substr(0, kNameBytesMax);
}

// Returns the size of a block device in sectors; 0 if unknown.
int64_t SectorsOf(dev_t device) {
  std::ifstream file(absl::StrFormat("/sys/dev/block/%d:%d/size", major(device), minor(device)));
  int64_t sectors = 0;
  file >> sectors;
  return sectors;
}

}  // namespace

std::string RecordPlace::File(std::string_view name) const {
  return absl::StrCat(prefix, std::string(name), ".toml");
}

std::optional<RecordPlace> RecordPlaceOf(const std::string& path, const std::string& state_folder) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) return std::nullopt;
  if (S_ISDIR(found.st_mode)) {
    return RecordPlace{.prefix = path + "/forebay.", .device = static_cast<int64_t>(found.st_dev)};
  }
  if (!S_ISBLK(found.st_mode) || state_folder.empty()) return std::nullopt;
  const nvme::PathOptions device{.path = path};
  const auto place = PlaceOf({&device, 1}, {});
  if (!place.ok()) return std::nullopt;
  const PathPlace& of = place->paths.front();
  const std::string name = FileNameOf(of.disk.empty() ? of.name : of.disk);
  return RecordPlace{.prefix = absl::StrCat(state_folder, "/forebay.", name, "."),
                     .device = SectorsOf(found.st_rdev)};
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
