// SPDX-License-Identifier: Apache-2.0
// A control group of the kernel with a limit of memory, for one test.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace forebay::testing {

class TestCgroup {
 public:
  // Creates a group below the group of this process, in the cgroup version that has the memory controller.
  //
  // Errors  kUnavailable  this machine or user cannot make one; the message says why.
  static absl::StatusOr<std::unique_ptr<TestCgroup>> Create(uint64_t limit_bytes);
  TestCgroup(const TestCgroup&) = delete;
  TestCgroup& operator=(const TestCgroup&) = delete;
  // Removes the group. No process may be in the group any more.
  ~TestCgroup();

  // Moves the calling process into the group. System calls only: for use between fork and exec.
  void Enter() const;
  const std::string& folder() const { return folder_; }
  // Bytes that the kernel counts for the group, without the page cache of files on disks.
  uint64_t usage_bytes() const;

 private:
  TestCgroup() = default;

  std::string folder_;
  std::string members_;  // its cgroup.procs
  bool version2_ = false;
};

}  // namespace forebay::testing
