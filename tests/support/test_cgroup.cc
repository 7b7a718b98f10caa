// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_cgroup.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace forebay::testing {
namespace {

// Path of this process in the hierarchy that /proc/self/cgroup names with `controllers`.
std::string OwnPath(const std::string& controllers) {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t at = line.find(":" + controllers + ":");
    if (at != std::string::npos) return line.substr(at + controllers.size() + 2);
  }
  return "";
}

uint64_t NumberAfter(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  uint64_t number = 0;
  while (file >> word >> number) {
    if (word == key) return number;
  }
  return 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TestCgroup>> TestCgroup::Create(uint64_t limit_bytes) {
  std::unique_ptr<TestCgroup> group(new TestCgroup());
  group->version2_ = !std::filesystem::exists("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  const std::string folder =
      absl::StrCat(group->version2_ ? "/sys/fs/cgroup" + OwnPath("")
                                    : "/sys/fs/cgroup/memory" + OwnPath("memory"),
                   "/forebay-test-", ::getpid());
  std::error_code error;
  if (!std::filesystem::create_directory(folder, error)) {
    return absl::UnavailableError(absl::StrCat(folder, ": ", error.message()));
  }
  group->folder_ = folder;
  group->members_ = folder + "/cgroup.procs";
  std::ofstream limit(folder + (group->version2_ ? "/memory.max" : "/memory.limit_in_bytes"));
  limit << limit_bytes << std::flush;
  if (!limit) return absl::UnavailableError(folder + ": its memory cannot be limited");
  return group;
}

TestCgroup::~TestCgroup() {
  if (!folder_.empty()) ::rmdir(folder_.c_str());
}

void TestCgroup::Enter() const {
  const int fd = ::open(members_.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0 || ::write(fd, "0", 1) != 1) ::_exit(99);
  ::close(fd);
}

uint64_t TestCgroup::usage_bytes() const {
  uint64_t used = 0;
  std::ifstream(folder_ + (version2_ ? "/memory.current" : "/memory.usage_in_bytes")) >> used;
  const std::string stat = folder_ + "/memory.stat";
  const uint64_t files = version2_ ? NumberAfter(stat, "file") - NumberAfter(stat, "shmem")
                                   : NumberAfter(stat, "cache") - NumberAfter(stat, "shmem");
  return used - std::min(used, files);
}

}  // namespace forebay::testing
