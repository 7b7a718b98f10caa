#include "pinned_mem/internal/available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace forebay::pinned_mem::internal {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// The number behind `key` in lines like "key 123 kB" or "key: 123"; the unit is the caller's.
std::optional<uint64_t> NumberBehind(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  uint64_t number = 0;
  std::string rest;
  while (file >> word) {
    if (word == key && file >> number) return number;
    file.clear();
    std::getline(file, rest);
  }
  return std::nullopt;
}

uint64_t LeftInGroup(const std::string& directory) {
  uint64_t limit = 0;
  uint64_t used = 0;
  if (!(std::ifstream(directory + "/memory.max") >> limit)) return kUnlimited;  // "max", or no file
  if (!(std::ifstream(directory + "/memory.current") >> used)) return kUnlimited;
  const uint64_t cache = NumberBehind(directory + "/memory.stat", "inactive_file").value_or(0);
  used -= std::min(used, cache);
  return limit - std::min(limit, used);
}

// The limit of every control group from the process's own up to the root binds.
uint64_t LeftInGroups() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  uint64_t left = kUnlimited;
  while (std::getline(file, line)) {
    if (!line.starts_with("0::/")) continue;
    std::string path = line.substr(3);
    while (path.size() > 1) {
      left = std::min(left, LeftInGroup("/sys/fs/cgroup" + path));
      path.erase(path.rfind('/'));
    }
  }
  return left;
}

}  // namespace

uint64_t AvailableBytes() {
  const std::optional<uint64_t> machine_kib = NumberBehind("/proc/meminfo", "MemAvailable:");
  const uint64_t machine = machine_kib.has_value() ? *machine_kib * 1024 : kUnlimited;
  return std::min(machine, LeftInGroups());
}

}  // namespace forebay::pinned_mem::internal
