// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/arena_registry.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <utility>

#include "protocol/os/unique_fd.h"

namespace forebay::daemon {
namespace {

// Returns RssAnon of this process.
uint64_t PrivateBytes() {
  std::array<char, 4096> text{};  // larger than any status file
  const protocol::UniqueFd status(::open("/proc/self/status", O_RDONLY | O_CLOEXEC));
  const ssize_t size = status.valid() ? ::read(status.get(), text.data(), text.size()) : 0;
  constexpr std::string_view kKey = "RssAnon:";
  std::string_view rest(text.data(), static_cast<size_t>(std::max<ssize_t>(size, 0)));
  const size_t at = rest.find(kKey);
  if (at == std::string_view::npos) return 0;
  rest.remove_prefix(std::min(rest.size(), rest.find_first_of("0123456789", at)));
  uint64_t kib = 0;
  (void)std::from_chars(rest.data(), rest.data() + rest.size(), kib);
  return kib * 1024;
}

}  // namespace

const char* Name(ArenaKind kind) {
  switch (kind) {
    case ArenaKind::kWeights:
      return "weights";
    case ArenaKind::kDeletedWeights:
      return "weights of a deleted job";
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

void ArenaRegistry::Register(ArenaOwner owner, const Arena& arena) {
  // Removes destroyed arenas here, because Totals() may never be called. The list holds at most the arenas that were alive at
  // the last call, and the new arena.
  entries_.remove_if([](const Entry& entry) { return entry.arena.expired(); });
  entries_.push_back({.owner = std::move(owner), .arena = arena});
}

void ArenaRegistry::ChangeKind(const Arena& arena, ArenaKind kind) {
  if (arena == nullptr) return;
  for (Entry& entry : entries_) {
    if (entry.arena.lock() == arena) entry.owner.kind = kind;
  }
}

std::vector<ArenaLine> ArenaRegistry::Lines() const {
  std::vector<ArenaLine> lines;
  for (const Entry& entry : entries_) {
    const Arena arena = entry.arena.lock();
    if (arena == nullptr || arena->populated_bytes() == 0) continue;
    lines.push_back({.owner = entry.owner,
                     .size_bytes = arena->populated_bytes(),
                     .allocated_bytes = arena->allocated_bytes(),
                     .huge_bytes = arena->huge_bytes(),
                     .numa_nodes = arena->numa_nodes(),
                     .locked = arena->locked()});
  }
  return lines;
}

uint64_t ArenaRegistry::UsedBytes(uint64_t private_bytes) const {
  uint64_t bytes = private_bytes;
  for (const Entry& entry : entries_) {
    const Arena arena = entry.arena.lock();
    if (arena != nullptr && arena->populated_bytes() > 0) bytes += arena->allocated_bytes();
  }
  return bytes;
}

void ArenaRegistry::UpdatePeak() { peak_bytes_ = std::max(peak_bytes_, UsedBytes(PrivateBytes())); }

MemoryTotals ArenaRegistry::Totals() {
  MemoryTotals totals;
  totals.private_bytes = PrivateBytes();
  totals.used_bytes = UsedBytes(totals.private_bytes);
  for (const ArenaLine& line : Lines()) {
    totals.huge_bytes += line.huge_bytes;
    if (line.locked) totals.locked_bytes += line.size_bytes;
  }
  peak_bytes_ = std::max(peak_bytes_, totals.used_bytes);
  totals.peak_bytes = peak_bytes_;
  return totals;
}

}  // namespace forebay::daemon
