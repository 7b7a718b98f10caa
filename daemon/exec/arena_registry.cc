#include "daemon/exec/arena_registry.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <utility>

namespace forebay::daemon {
namespace {

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

MemoryTotals ArenaRegistry::Totals() {
  entries_.remove_if([](const Entry& entry) { return entry.arena.expired(); });
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
