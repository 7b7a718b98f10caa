// SPDX-License-Identifier: Apache-2.0
#include "daemon/swap_settings.h"

#include <linux/magic.h>
#include <sys/statfs.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/node/node_ledger.h"
#include "daemon/exec/block_tasks.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr uint32_t kStagingSlotsMin = 3;  // one block each is read, updated and written

// Bytes for a block of AdamW in the default formats. Other jobs get blocks that fit (memory_plan.h).
uint64_t StagingSlotBytes(uint64_t block_elems) {
  uint64_t slot_bytes = 0;
  for (const auto& [format, dtype] :
       {std::pair(protocol::Format::kFp32, protocol::DType::kFloat32),
        std::pair(protocol::Format::kExact, protocol::DType::kBFloat16)}) {
    slot_bytes = std::max(
        slot_bytes,
        BlockBytes(protocol::StatePlanes(protocol::Optimizer::kAdamW, format, dtype), block_elems));
  }
  return slot_bytes;
}

// Returns the size for a path out of one size for all paths, or one for each path; 0: no size is set.
uint64_t SizeOfPath(const std::vector<uint64_t>& sizes, size_t path) {
  if (sizes.size() == 1) return sizes.front();
  return path < sizes.size() ? sizes[path] : 0;
}

uint64_t LedgerBytes(const Config& config, const SwapSpaceOptions& options) {
  if (config.swap_ledger_bytes > 0) return config.swap_ledger_bytes;
  uint64_t capacity_bytes = 0;
  for (const nvme::PathOptions& path : options.paths) capacity_bytes += path.capacity_bytes;
  return UsualLedgerBytes(capacity_bytes, options.staging_slot_bytes,
                          config.swap_life == nvme::FileLife::kKept);
}

bool IsInMemory(const std::string& path) {
  struct statfs system {};
  return ::statfs(path.c_str(), &system) == 0 &&
         (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
}

}  // namespace

std::vector<nvme::PathOptions> SwapPathsOf(const Config& config) {
  std::vector<nvme::PathOptions> paths;
  for (size_t i = 0; i < config.swap_paths.size(); ++i) {
    paths.push_back({.path = config.swap_paths[i],
                     .capacity_bytes = SizeOfPath(config.swap_capacity_bytes, i)});
  }
  return paths;
}

absl::StatusOr<SwapSpaceOptions> SwapOptions(const Config& config, const ArenaPolicy& arenas,
                                             uint32_t workers) {
  SwapSpaceOptions options{
      .paths = SwapPathsOf(config),
      .state_folder = config.state_folder,
      .life = config.swap_life,
      .mode = config.swap_mode,
      .machine = ThisMachine(),
      .other_place = config.swap_other_place,
      .deadline_ns = static_cast<uint64_t>(std::chrono::nanoseconds(config.swap_deadline).count()),
      .staging_slot_bytes = StagingSlotBytes(config.block_elems),
      .arenas = arenas};
  options.ledger_bytes_max = LedgerBytes(config, options);
  const uint64_t slots = config.swap_staging_bytes == 0
                             ? 2 * workers + 4
                             : config.swap_staging_bytes / options.staging_slot_bytes;
  if (slots < kStagingSlotsMin) {
    return MakeError(
        ErrorId::kConfig,
        absl::StrCat("swap.staging of ", protocol::FormatBytes(config.swap_staging_bytes),
                     " holds ", slots, " blocks of ",
                     protocol::FormatBytes(options.staging_slot_bytes), " (at least ",
                     kStagingSlotsMin, ")"),
        absl::StrCat("raise it to ",
                     protocol::FormatBytes(kStagingSlotsMin * options.staging_slot_bytes),
                     ", or lower update.block_elems"));
  }
  options.staging_slots = static_cast<uint32_t>(std::min<uint64_t>(slots, 1 << 16));
  return options;
}

absl::Status WhyNotDurable(const Config& config) {
  const auto because = [](std::string_view why, std::string_view hint) {
    return MakeError(ErrorId::kUnsupported,
                     absl::StrCat("no job of this daemon can be durable: ", std::string(why)),
                     hint);
  };
  if (config.swap_paths.empty()) {
    return because("it has no swap", "set swap.paths and swap.capacity, or use durability memory");
  }
  if (config.swap_life == nvme::FileLife::kUnlinked) {
    return because("its swap files are unlinked, so that nothing of them outlives it",
                   "set swap.life = \"kept\", or use durability memory");
  }
  for (size_t i = 0; i < config.swap_paths.size(); ++i) {
    if (!IsInMemory(config.swap_paths[i])) continue;
    return because(absl::StrCat("swap path ", i, " (", config.swap_paths[i],
                                ") is a file system in memory, which a power cut empties"),
                   "give a directory on a disk in swap.paths, or use durability memory");
  }
  return absl::OkStatus();
}

}  // namespace forebay::daemon
