// SPDX-License-Identifier: Apache-2.0
// Goal    The limit of a control group is the lowest limit from the group up to the root, for both versions, in and out of
//         containers. The estimate of free memory is plausible.
// Method  Files in a temporary folder in the format of /proc/self/cgroup, /proc/self/mountinfo and the hierarchies; the real
//         files once.

#include "pinned_mem/memory_limit.h"

#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace forebay::pinned_mem {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class CgroupMemoryTest : public ::testing::Test {
 protected:
  CgroupMemoryTest() {
    std::string path = ::testing::TempDir() + "/cgroupXXXXXX";
    folder_ = ::mkdtemp(path.data());
  }
  ~CgroupMemoryTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  // Mounts the part of the hierarchy below `root`.
  void MountVersion2(const std::string& root = "/") {
    Write("mounts", "31 30 0:26 / / rw - ext4 /dev/root rw\n32 31 0:27 " + root + " " +
                        (folder_ / "v2").string() + " rw,nosuid shared:9 - cgroup2 cgroup2 rw\n");
  }
  void MountVersion1(const std::string& root = "/") {
    Write("mounts",
          "40 30 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n41 30 0:31 " + root + " " +
              (folder_ / "v1").string() +
              " rw - cgroup cgroup rw,memory\n42 30 0:32 / /nowhere rw - cgroup2 none rw\n");
  }
  CgroupMemory Read() {
    return ReadCgroupMemory({.membership = folder_ / "membership", .mounts = folder_ / "mounts"});
  }

  std::filesystem::path folder_;
};

TEST_F(CgroupMemoryTest, WithoutAnyFileThereIsNoLimit) {
  EXPECT_EQ(Read().limit_bytes, kNoLimit);
  EXPECT_EQ(Read().available_bytes, kNoLimit);
}

TEST_F(CgroupMemoryTest, TheLowestOfVersion2IsTakenFromTheGroupToTheTop) {
  MountVersion2();
  Write("membership", "0::/a/b\n");
  Write("v2/a/b/memory.max", "max\n");
  EXPECT_EQ(Read().limit_bytes, kNoLimit);
  Write("v2/a/memory.max", std::to_string(300 * kMiB));
  Write("v2/memory.max", std::to_string(500 * kMiB));
  EXPECT_EQ(Read().limit_bytes, 300 * kMiB);
  EXPECT_EQ(Read().limit_file, (folder_ / "v2/a/memory.max").string());
  Write("v2/memory.max", std::to_string(200 * kMiB));
  EXPECT_EQ(Read().limit_bytes, 200 * kMiB)
      << "the top counts too: a container has its limit there";
  Write("v2/a/b/memory.high", std::to_string(100 * kMiB));
  EXPECT_EQ(Read().limit_bytes, 100 * kMiB);
}

TEST_F(CgroupMemoryTest, WhatIsLeftIsTheLeastOfAllGroupsWithoutInactiveCache) {
  MountVersion2();
  Write("membership", "0::/a/b\n");
  Write("v2/a/b/memory.max", std::to_string(300 * kMiB));
  Write("v2/a/b/memory.current", std::to_string(100 * kMiB));
  Write("v2/a/b/memory.stat", "anon 5\ninactive_file " + std::to_string(40 * kMiB) + "\nfile 9\n");
  EXPECT_EQ(Read().available_bytes, 240 * kMiB);
  Write("v2/a/memory.max", std::to_string(400 * kMiB));
  Write("v2/a/memory.current", std::to_string(390 * kMiB));
  EXPECT_EQ(Read().available_bytes, 10 * kMiB);
  Write("v2/a/memory.current", std::to_string(500 * kMiB));
  EXPECT_EQ(Read().available_bytes, 0U);
}

TEST_F(CgroupMemoryTest, Version1IsReadWhereItHasTheMemoryController) {
  MountVersion1();
  Write("membership", "9:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n");
  Write("v1/a/b/memory.limit_in_bytes", "9223372036854771712\n");
  Write("v1/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(Read().limit_bytes, kNoLimit);
  Write("v1/a/memory.limit_in_bytes", std::to_string(300 * kMiB));
  Write("v1/a/memory.usage_in_bytes", std::to_string(100 * kMiB));
  Write("v1/a/memory.stat", "inactive_file 7\ntotal_inactive_file " + std::to_string(kMiB) + "\n");
  EXPECT_EQ(Read().limit_bytes, 300 * kMiB);
  EXPECT_EQ(Read().available_bytes, 201 * kMiB);
}

TEST_F(CgroupMemoryTest, AContainerThatSeesOnlyItsPartOfTheHierarchyIsUnderstood) {
  MountVersion2("/docker/4711");
  Write("membership", "0::/docker/4711/daemon\n");
  Write("v2/daemon/memory.max", std::to_string(300 * kMiB));
  EXPECT_EQ(Read().limit_bytes, 300 * kMiB);
  Write("v2/memory.max", std::to_string(200 * kMiB));
  EXPECT_EQ(Read().limit_bytes, 200 * kMiB);
  // The group is outside the visible part.
  Write("membership", "0::/../other\n");
  EXPECT_EQ(Read().limit_bytes, 200 * kMiB);
  // The group's name begins like the mount's root, but is another.
  Write("membership", "0::/docker/47110\n");
  Write("v20/memory.max", "1");
  EXPECT_EQ(Read().limit_bytes, 200 * kMiB);
  MountVersion1("/docker");
  Write("membership", "4:memory:/docker/a\n");
  Write("v1/a/memory.limit_in_bytes", std::to_string(100 * kMiB));
  EXPECT_EQ(Read().limit_bytes, 100 * kMiB);
}

TEST(MemoryLimit, AvailableIsMoreThanNothingAndLessThanTheMachineHas) {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t total_bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes;
  EXPECT_EQ(MachineBytes(), total_bytes);
  EXPECT_GT(AvailableBytes(), kMiB);
  EXPECT_LE(AvailableBytes(), total_bytes);
}

// Runs in a child without CAP_IPC_LOCK: with it, every lock is allowed.
TEST(MayLock, IsWhetherTheLimitHasRoom) {
  const pid_t child = ::fork();
  if (child == 0) {
    (void)::prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0);
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) ::_exit(10);
    const rlimit limit{.rlim_cur = 8 * kMiB, .rlim_max = 8 * kMiB};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) ::_exit(11);
    if (!MayLock(4 * kMiB)) ::_exit(12);
    ::_exit(MayLock(uint64_t{1} << 40) || MayLock(9 * kMiB) ? 13 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace forebay::pinned_mem
