// SPDX-License-Identifier: Apache-2.0
// A directory below the working directory of the test (the build tree, where O_DIRECT works).
#pragma once

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "gtest/gtest.h"

namespace forebay::nvme {

// A new directory. The destructor removes the directory and its contents.
class TempDir {
 public:
  TempDir() {
    std::string pattern = std::filesystem::current_path().string() + "/nvme_test_XXXXXX";
    const char* made = mkdtemp(pattern.data());
    EXPECT_NE(made, nullptr);
    path_ = pattern;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }

  // Makes a directory inside this one. Returns its path.
  std::string Make(const std::string& name) const {
    std::filesystem::create_directory(path_ + "/" + name);
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

// Number of open descriptors of this process, without those in /proc and /sys: starting threads read limits from such files at
// any time.
inline size_t OpenDescriptors() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the descriptor was closed since it was listed
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (!gone && !target.starts_with("/proc/") && !target.starts_with("/sys/")) ++count;
  }
  return count;
}

}  // namespace forebay::nvme
