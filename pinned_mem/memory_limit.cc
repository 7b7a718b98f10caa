// SPDX-License-Identifier: Apache-2.0
#include "pinned_mem/memory_limit.h"

#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

namespace forebay::pinned_mem {
namespace {

// Limit that version 1 reports if the group has no limit, rounded down to a page.
constexpr uint64_t kVersion1NoLimit = uint64_t{1} << 62;

// Names of the files that a version of the controller has in the folder of a group.
struct FileNames {
  std::string_view limits[2];
  std::string_view usage;
  std::string_view cache_key;  // in memory.stat
};
constexpr FileNames kVersion1 = {
    {"memory.limit_in_bytes", ""}, "memory.usage_in_bytes", "total_inactive_file"};
// memory.high counts as a limit: above it the kernel slows the group down until usage is below it again, and locked memory
// cannot be reclaimed.
constexpr FileNames kVersion2 = {{"memory.max", "memory.high"}, "memory.current", "inactive_file"};

// Folder of a group, and the folder where the hierarchy is mounted, which is above it or equal.
struct Group {
  std::string folder;
  std::string top;
  const FileNames* names = nullptr;
};

std::optional<uint64_t> ReadNumber(const std::string& path) {
  uint64_t number = 0;
  if (!(std::ifstream(path) >> number)) return std::nullopt;  // "max", or no file
  return number;
}

// Returns the number after `key` in lines like "key 123" or "key: 123 kB".
std::optional<uint64_t> ReadNumberAfter(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    uint64_t number = 0;
    if (words >> word && word == key && words >> number) return number;
  }
  return std::nullopt;
}

bool Contains(std::string_view comma_list, std::string_view word) {
  const std::string list = "," + std::string(comma_list) + ",";
  return list.find("," + std::string(word) + ",") != std::string::npos;
}

// Returns the group's path within its hierarchy from a line of /proc/PID/cgroup: "4:memory:/a/b", "0::/a/b".
std::optional<std::string> PathInHierarchy(const std::string& membership, const FileNames& names) {
  std::ifstream file(membership);
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool found =
        &names == &kVersion2 ? line.starts_with("0::") : Contains(controllers, "memory");
    if (found) return line.substr(second + 1);
  }
  return std::nullopt;
}

// Decodes a path of mountinfo, which writes a blank as in "/mnt/a\040b".
std::string Unescaped(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      out.push_back(static_cast<char>(std::stoi(text.substr(i + 1, 3), nullptr, 8)));
      i += 3;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

std::optional<Group> FindGroup(const CgroupFiles& files, const FileNames& names) {
  const std::optional<std::string> path = PathInHierarchy(files.membership, names);
  if (!path.has_value()) return std::nullopt;
  std::ifstream mounts(files.mounts);
  std::string line;
  while (std::getline(mounts, line)) {
    const size_t separator = line.find(" - ");
    if (separator == line.npos) continue;
    std::istringstream left(line.substr(0, separator));
    std::istringstream right(line.substr(separator + 3));
    std::string skipped, root, mount_point, type, options;
    left >> skipped >> skipped >> skipped >> root >> mount_point;
    right >> type >> skipped >> options;
    const bool found =
        &names == &kVersion2 ? type == "cgroup2" : type == "cgroup" && Contains(options, "memory");
    if (!found) continue;
    Group group{.folder = Unescaped(mount_point), .top = Unescaped(mount_point), .names = &names};
    // In a container the mount may show only a part of the hierarchy, from `root` on. A group outside that part ("/..") is not
    // visible: the mount itself stands for it.
    std::string below = *path;
    root = Unescaped(root);
    if (root != "/") {
      const bool inside = (below + "/").starts_with(root + "/");
      below = inside ? below.substr(root.size()) : "";
    }
    if (below.size() > 1 && !below.starts_with("/..")) group.folder += below;
    return group;
  }
  return std::nullopt;
}

void ReadGroup(const std::string& folder, const FileNames& names, CgroupMemory& memory) {
  for (const std::string_view name : names.limits) {
    if (name.empty()) continue;
    const std::string file = folder + "/" + std::string(name);
    const std::optional<uint64_t> limit = ReadNumber(file);
    if (!limit.has_value() || (&names == &kVersion1 && *limit >= kVersion1NoLimit)) continue;
    if (*limit < memory.limit_bytes) {
      memory.limit_bytes = *limit;
      memory.limit_file = file;
    }
    uint64_t used = ReadNumber(folder + "/" + std::string(names.usage)).value_or(0);
    used -= std::min(used, ReadNumberAfter(folder + "/memory.stat", names.cache_key).value_or(0));
    memory.available_bytes = std::min(memory.available_bytes, *limit - std::min(*limit, used));
  }
}

uint64_t MeminfoBytes(std::string_view key) {
  const std::optional<uint64_t> kib = ReadNumberAfter("/proc/meminfo", key);
  return kib.has_value() ? *kib * 1024 : kNoLimit;
}

}  // namespace

CgroupMemory ReadCgroupMemory(const CgroupFiles& files) {
  CgroupMemory memory{.limit_bytes = kNoLimit, .limit_file = {}, .available_bytes = kNoLimit};
  for (const FileNames* names : {&kVersion1, &kVersion2}) {
    const std::optional<Group> group = FindGroup(files, *names);
    if (!group.has_value()) continue;
    std::string folder = group->folder;
    while (true) {
      ReadGroup(folder, *names, memory);
      if (folder.size() <= group->top.size()) break;
      folder.erase(folder.rfind('/'));
    }
  }
  return memory;
}

uint64_t MachineBytes() { return MeminfoBytes("MemTotal:"); }

uint64_t AvailableBytes() {
  return std::min(MeminfoBytes("MemAvailable:"), ReadCgroupMemory().available_bytes);
}

bool MayLock(uint64_t bytes) {
  void* const pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return false;
  const bool may = ::mlock2(pages, bytes, MLOCK_ONFAULT) == 0;
  ::munmap(pages, bytes);
  return may;
}

}  // namespace forebay::pinned_mem
