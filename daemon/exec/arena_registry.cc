#include "daemon/exec/arena_registry.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <utility>

#include "protocol/os/status_macros.h"

namespace forebay::daemon {
namespace {

constexpr uint64_t kStatBlockBytes = 512;  // unit of st_blocks, stat(2)

uint64_t PrivateBytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    uint64_t kib = 0;
    if (word == "RssAnon:" && status >> kib) return kib * 1024;
    status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

}  // namespace

const char* Name(ArenaKind kind) {
  switch (kind) {
    case ArenaKind::kWeights:
      return "weights";
    case ArenaKind::kState:
      return "state";
    case ArenaKind::kStep:
      return "step";
    case ArenaKind::kStaging:
      return "staging";
    case ArenaKind::kGrad:
      return "grad";
    case ArenaKind::kRing:
      return "ring";
    case ArenaKind::kExtraState:
      return "extra_state";
  }
  return "unknown";
}

absl::StatusOr<std::unique_ptr<pinned_mem::PinnedArena>> MakeArena(
    const pinned_mem::ArenaOptions& options) {
  ASSIGN_OR_RETURN(auto arena, pinned_mem::PinnedArena::Create(options));
  // Best effort: a dump with the weights in it is large, not wrong.
  (void)::madvise(arena->bytes().data(), arena->bytes().size(), MADV_DONTDUMP);
  return arena;
}

void ArenaRegistry::Register(ArenaOwner owner, const Arena& arena) {
  entries_.push_back({.owner = std::move(owner), .arena = arena});
}

void ArenaRegistry::RegisterFd(ArenaOwner owner, int fd) {
  entries_.push_back({.owner = std::move(owner), .arena = {}, .fd = fd});
}

void ArenaRegistry::UnregisterFd(int fd) {
  entries_.remove_if([&](const Entry& entry) { return entry.fd == fd; });
}

std::vector<ArenaLine> ArenaRegistry::Lines() const {
  std::vector<ArenaLine> lines;
  for (const Entry& entry : entries_) {
    ArenaLine line{.owner = entry.owner};
    if (entry.fd >= 0) {
      struct stat info = {};
      if (::fstat(entry.fd, &info) != 0) continue;
      line.size_bytes = static_cast<uint64_t>(info.st_size);
      line.allocated_bytes = static_cast<uint64_t>(info.st_blocks) * kStatBlockBytes;
    } else {
      const Arena arena = entry.arena.lock();
      if (arena == nullptr) continue;
      line.size_bytes = arena->capacity_bytes();
      line.allocated_bytes = arena->allocated_bytes();
      line.huge_bytes = arena->huge_bytes();
      line.locked = arena->locked();
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

MemoryTotals ArenaRegistry::Totals() {
  entries_.remove_if([](const Entry& entry) { return entry.fd < 0 && entry.arena.expired(); });
  MemoryTotals totals;
  totals.private_bytes = PrivateBytes();
  totals.used_bytes = totals.private_bytes;
  for (const ArenaLine& line : Lines()) {
    totals.used_bytes += line.allocated_bytes;
    totals.huge_bytes += line.huge_bytes;
    if (line.locked) totals.locked_bytes += line.size_bytes;
  }
  peak_bytes_ = std::max(peak_bytes_, totals.used_bytes);
  totals.peak_bytes = peak_bytes_;
  return totals;
}

}  // namespace forebay::daemon
