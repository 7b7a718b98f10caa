// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/volume_place.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// Files below a block device's folder in /sys that may identify the disk; the first that is not empty counts.
constexpr std::array kDiskNames{"wwid", "device/wwid", "serial", "dm/uuid", "md/uuid"};

std::string FirstLine(const std::string& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  absl::StripAsciiWhitespace(&line);
  return line;
}

// Returns the identity of a device, for example "nvme.1234-5678 partition 2". Returns an empty text if the device states no
// identity.
std::string DiskOf(dev_t device) {
  const std::string folder = absl::StrFormat("/sys/dev/block/%d:%d", major(device), minor(device));
  const std::string partition = FirstLine(folder + "/partition");
  for (const char* name : kDiskNames) {
    const std::string disk =
        FirstLine(absl::StrCat(folder, partition.empty() ? "/" : "/../", name));
    if (!disk.empty()) {
      return partition.empty() ? disk : absl::StrCat(disk, " partition ", partition);
    }
  }
  return {};
}

absl::StatusOr<PathPlace> PlaceOfPath(size_t index, const nvme::PathOptions& path) {
  std::string name = path.path;
  struct stat status {};
  int failed = ::stat(name.c_str(), &status);
  if (failed == 0 && S_ISDIR(status.st_mode)) {
    absl::StrAppend(&name, "/", nvme::kSwapFileName);
    failed = ::stat(name.c_str(), &status);
  }
  std::array<char, PATH_MAX> canonical{};
  if (failed != 0 || ::realpath(name.c_str(), canonical.data()) == nullptr) {
    return MakeError(
        ErrorId::kSwapPath,
        protocol::ErrnoText(absl::StrFormat("swap path %d (%s): missing", index, name), errno),
        "correct the path");
  }
  if (S_ISBLK(status.st_mode))
    return PathPlace{.name = canonical.data(), .disk = DiskOf(status.st_rdev)};
  return PathPlace{.name = canonical.data(), .inode = status.st_ino};
}

// Returns the text that follows "swap path 0 (NAME)" in DescribeMove(). Returns an empty text if the path has not moved.
std::string DescribeMoveOfPath(const PathPlace& before, const PathPlace& now) {
  if (!before.disk.empty() && !now.disk.empty()) {
    if (before.disk == now.disk) return {};
    return absl::StrCat(" is the disk ", now.disk, "; last used was ",
                        absl::Utf8SafeCHexEscape(before.disk));
  }
  if (before.name != now.name) {
    return absl::StrCat(" was last used as ", absl::Utf8SafeCHexEscape(before.name));
  }
  if (before.inode != now.inode) return " is another file than was last used there, as a copy is";
  return {};
}

}  // namespace

absl::StatusOr<VolumePlace> PlaceOf(std::span<const nvme::PathOptions> paths,
                                    const MachineId& machine) {
  VolumePlace place{.machine = machine};
  for (size_t i = 0; i < paths.size(); ++i) {
    ASSIGN_OR_RETURN(PathPlace path, PlaceOfPath(i, paths[i]));
    place.paths.push_back(std::move(path));
  }
  return place;
}

std::string DescribeMove(const VolumePlace& before, const VolumePlace& now) {
  if (before.paths.empty()) return {};
  std::vector<std::string> moves;
  const MachineId unknown{};
  if (before.machine != unknown && now.machine != unknown && before.machine != now.machine) {
    moves.emplace_back("the volume was last used on another machine");
  }
  if (before.paths.size() != now.paths.size()) {
    moves.push_back(absl::StrCat("the volume was last used on ", before.paths.size(), " paths"));
  }
  for (size_t i = 0; i < std::min(before.paths.size(), now.paths.size()); ++i) {
    const std::string move = DescribeMoveOfPath(before.paths[i], now.paths[i]);
    if (move.empty()) continue;
    moves.push_back(absl::StrFormat("swap path %d (%s)%s", i, now.paths[i].name, move));
  }
  return absl::StrJoin(moves, "; ");
}

uint64_t LedgerBytes(const VolumePlace& place) {
  constexpr uint64_t kWord = sizeof(uint64_t);
  // Bytes of the struct in the message, and of the ends of its two texts.
  constexpr uint64_t kPathBytes = 3 * kWord + 2 * kWord;
  uint64_t bytes = sizeof(MachineId) + kWord;
  for (const PathPlace& path : place.paths) {
    bytes += kPathBytes + protocol::RoundUp(path.name.size(), kWord) +
             protocol::RoundUp(path.disk.size(), kWord);
  }
  return bytes;
}

}  // namespace forebay::daemon
