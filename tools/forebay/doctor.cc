// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/doctor.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_adam/targets.h"
#include "nvme/io/engine_factory.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/error.h"
#include "protocol/os/pidfd.h"
#include "protocol/os/unique_fd.h"
#include "protocol/units.h"
#include "tools/forebay/table.h"

namespace forebay::tools {
namespace {

using protocol::ErrnoText;
using protocol::FormatBytes;
using protocol::kGiB;
using protocol::kHugePageBytes;
using protocol::kPageBytes;

constexpr uint64_t kLockProbeBytes = 64 * protocol::kMiB;  // the usual lock limit is 8 MiB
constexpr uint64_t kHugeProbeBytes = 4 * kHugePageBytes;
constexpr uint64_t kDiskComfortBytes = 4 * kGiB;

std::string_view Name(CheckResult result) {
  switch (result) {
    case CheckResult::kPass:
      return "PASS";
    case CheckResult::kWarn:
      return "WARN";
    case CheckResult::kFail:
      return "FAIL";
  }
  return "FAIL";
}

Finding ExamineMemlock() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string seen = limit.rlim_cur == RLIM_INFINITY
                               ? "RLIMIT_MEMLOCK unlimited"
                               : absl::StrCat("RLIMIT_MEMLOCK ", FormatBytes(limit.rlim_cur));
  void* probe =
      ::mmap(nullptr, kLockProbeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool locked = probe != MAP_FAILED && ::mlock(probe, kLockProbeBytes) == 0;
  if (probe != MAP_FAILED) ::munmap(probe, kLockProbeBytes);
  if (locked) {
    return {"memlock", CheckResult::kPass, absl::StrCat(seen, "; 64.0 MiB could be locked"), ""};
  }
  return {"memlock", CheckResult::kWarn,
          absl::StrCat(seen,
                       "; 64.0 MiB could not be locked: a private daemon goes on unlocked, "
                       "the service refuses to start with swap, and to attach jobs without it"),
          "add `* - memlock unlimited` to /etc/security/limits.conf, or LimitMEMLOCK=infinity to "
          "the unit"};
}

Finding ExamineUring() {
  const absl::Status probe = nvme::ProbeUring();
  if (probe.ok()) return {"io_uring", CheckResult::kPass, "a ring of our own works", ""};
  return {"io_uring", CheckResult::kWarn,
          absl::StrCat(std::string(probe.message()), "; threads are used instead"),
          "sysctl -w kernel.io_uring_disabled=0, or allow io_uring in the container's profile"};
}

Finding ExaminePidfd() {
  if (protocol::OpenPidfd(::getpid()).valid()) {
    return {"pidfd", CheckResult::kPass, "the kernel tells when a client's process ends", ""};
  }
  return {"pidfd", CheckResult::kFail, ErrnoText("pidfd_open", errno),
          "use Linux 5.3 or newer, or allow pidfd_open in the container's profile"};
}

Finding ExamineDirect(const std::string& folder) {
  const std::string what = absl::StrCat("O_DIRECT ", folder);
  const std::string advice = "name a directory on a local disk file system (ext4, xfs)";
  std::string path = (std::filesystem::path(folder) / "forebay-doctor-XXXXXX").string();
  const protocol::UniqueFd made(::mkostemp(path.data(), O_CLOEXEC));
  if (!made.valid()) return {what, CheckResult::kFail, ErrnoText("make a file", errno), advice};
  const protocol::UniqueFd direct(::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
  const int open_error = errno;
  ::unlink(path.c_str());
  if (!direct.valid()) return {what, CheckResult::kFail, ErrnoText("open", open_error), advice};
  const std::unique_ptr<void, void (*)(void*)> page(::aligned_alloc(kPageBytes, kPageBytes),
                                                    std::free);
  const bool written =
      ::pwrite(direct.get(), page.get(), kPageBytes, 0) == static_cast<ssize_t>(kPageBytes) &&
      ::pread(direct.get(), page.get(), kPageBytes, 0) == static_cast<ssize_t>(kPageBytes);
  if (!written) return {what, CheckResult::kFail, ErrnoText("direct transfer", errno), advice};
  return {what, CheckResult::kPass, "4096 bytes written and read directly", ""};
}

Finding ExamineDisk(const std::string& folder) {
  const std::string what = absl::StrCat("disk ", folder);
  struct statvfs room {};
  if (::statvfs(folder.c_str(), &room) != 0) {
    return {what, CheckResult::kFail, ErrnoText("statvfs", errno), "name a directory that exists"};
  }
  const uint64_t free_bytes = uint64_t{room.f_bavail} * room.f_frsize;
  if (free_bytes >= kDiskComfortBytes) {
    return {what, CheckResult::kPass, absl::StrCat(FormatBytes(free_bytes), " free"), ""};
  }
  return {what, CheckResult::kWarn, absl::StrCat(FormatBytes(free_bytes), " free"),
          "`forebay run` takes 4 GiB a path unless --swap-size says less"};
}

Finding ExamineHugePages() {
  const auto arena = pinned_mem::PinnedArena::Create({.name = "forebay-doctor",
                                                      .capacity_bytes = kHugeProbeBytes,
                                                      .lock = pinned_mem::LockPolicy::kBestEffort});
  if (!arena.ok()) {
    return {"huge pages", CheckResult::kFail, std::string(arena.status().message()), "free memory"};
  }
  const uint64_t huge_bytes = (*arena)->huge_bytes();
  const std::string seen = absl::StrCat("MADV_COLLAPSE gave ", huge_bytes / kHugePageBytes, " of ",
                                        kHugeProbeBytes / kHugePageBytes, " pages of 2 MiB");
  if (huge_bytes == kHugeProbeBytes) return {"huge pages", CheckResult::kPass, seen, ""};
  return {"huge pages", CheckResult::kWarn, absl::StrCat(seen, "; 4 KiB pages are slower to swap"),
          "use Linux 6.1 or newer; if memory is fragmented: sysctl -w vm.compact_memory=1"};
}

Finding ExamineCpu() {
  const std::vector<std::string> targets = cpu_adam::SupportedTargets();
  const std::string seen =
      absl::StrCat(cpu_adam::ChosenTarget(), " of ", absl::StrJoin(targets, ", "));
  if (targets.size() > 1) return {"CPU target", CheckResult::kPass, seen, ""};
  return {"CPU target", CheckResult::kWarn, seen,
          "use a processor with AVX2 and FMA, or with NEON: scalar code is several times slower"};
}

}  // namespace

absl::Status ForceCpuTarget(const std::string& name) { return cpu_adam::ForceTarget(name); }

std::vector<Finding> Examine(const std::vector<std::string>& folders) {
  std::vector<Finding> findings = {ExamineMemlock(), ExamineUring(), ExaminePidfd(),
                                   ExamineHugePages(), ExamineCpu()};
  for (const std::string& folder : folders) {
    findings.push_back(ExamineDirect(folder));
    findings.push_back(ExamineDisk(folder));
  }
  return findings;
}

std::string FindingsText(const std::vector<Finding>& findings) {
  Table table({"RESULT", "CHECK", "FOUND"});
  std::string fixes;
  for (const Finding& finding : findings) {
    table.Add({std::string(Name(finding.result)), finding.what, finding.seen});
    if (!finding.fix.empty())
      absl::StrAppend(&fixes, "fix ", finding.what, ": ", finding.fix, "\n");
  }
  return absl::StrCat(table.Text(), fixes.empty() ? "" : "\n", fixes);
}

nlohmann::json FindingsJson(const std::vector<Finding>& findings) {
  nlohmann::json all = nlohmann::json::array();
  for (const Finding& finding : findings) {
    all.push_back({{"what", finding.what},
                   {"result", Name(finding.result)},
                   {"seen", finding.seen},
                   {"fix", finding.fix}});
  }
  return all;
}

}  // namespace forebay::tools
