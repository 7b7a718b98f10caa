// SPDX-License-Identifier: Apache-2.0
// The node's swap paths: what each of them gives, by its own transfers, and which of them fail.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "nvme/path_rates.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

enum class Direction : uint8_t { kRead, kWrite };

// Bytes that a path has read or written. Both times 0: it is not known when.
struct PathTransfer {
  uint32_t path = 0;
  Direction direction = Direction::kRead;
  uint64_t bytes = 0;
  uint64_t begin_ns = 0;
  uint64_t end_ns = 0;
};

// One table for all jobs. A path's rate in each direction is that of its last transfers: their bytes over
// the time in which the path was busy with them. A transfer has the time since the one before it ended on
// that path, or since it began where that is later, so that the times of both directions together are the
// path's busy time. Before that a rate is the measured one of NodeOptions, or not known.
//
// A path's share of new writes is its rate for as many bytes read as written: states are read and written
// once a step. A path of unknown rate counts as the mean of the known ones. Shares follow the rates as soon
// as one of them is off by kDrift.
//
// A path on which the last write failed is suspect: it gets new writes where no other has a free slot. After
// kPathErrorsMax failures without a success in one direction it is marked: it gets new writes where no
// other path has room, and its blocks move away. As many writes that succeed take the mark away.
class PathTable {
 public:
  // Transfers over which a rate is taken; a measured one counts as so many.
  static constexpr double kTransfers = 16;
  // Fewer give no rate.
  static constexpr uint32_t kTransfersMin = 8;
  static constexpr double kDrift = 0.01;
  // The least share, of the largest: what the path gives now is noticed.
  static constexpr double kShareMin = 1.0 / 256;
  static constexpr uint32_t kPathErrorsMax = 8;
  // Reads of one job that are under way at once, however many the measured latency asks for.
  static constexpr uint32_t kReadsMax = 16;

  // `rates`: by path; may be shorter.
  PathTable(uint32_t paths, const std::vector<std::optional<nvme::PathRates>>& rates);

  void AddTransfer(const PathTransfer& transfer);
  // The same where it has succeeded, and whether it has.
  void CountTransfer(const PathTransfer& transfer, bool succeeded);
  void OnSucceeded(uint32_t path, Direction direction);
  void OnFailed(uint32_t path, Direction direction);

  uint32_t paths() const { return static_cast<uint32_t>(paths_.size()); }
  // Of all; they add up to 1.
  double share(uint32_t path) const { return paths_[path].share; }
  // Bytes a second; 0: not known.
  double rate(uint32_t path, Direction direction) const {
    return RateOf(paths_[path].rates[static_cast<size_t>(direction)]);
  }
  // The same, where the path has had enough transfers of its own; else 0.
  double current_rate(uint32_t path, Direction direction) const {
    const Rate& rate = paths_[path].rates[static_cast<size_t>(direction)];
    return rate.transfers < kTransfersMin ? 0 : RateOf(rate);
  }
  // Of blocks of so many bytes: reads that keep the path busy while one of them ends, kReadsPerPath at least.
  uint32_t reads_at_once(uint32_t path, uint64_t block_bytes) const;

  bool is_suspect(uint32_t path) const { return paths_[path].is_suspect; }
  bool is_marked(uint32_t path) const { return paths_[path].is_marked; }
  bool works(uint32_t path) const { return !is_suspect(path) && !is_marked(path); }
  bool any_marked() const { return marked_ > 0; }
  // That were ever set, and how often one was set or taken away.
  uint64_t marks() const { return marks_; }
  uint64_t mark_changes() const { return mark_changes_; }

  // A free slot of the node on any path that works.
  std::optional<nvme::Slot> AllocateOnWorking(nvme::SlotMap& swap, uint64_t bytes) const;

  // Of the paths for nvme::SlotMap; a marked one has the least.
  std::vector<uint32_t> Weights() const;

 private:
  struct Rate {
    double measured = 0;  // before the first transfer; 0: not known
    // Of the last transfers, older ones less.
    double bytes = 0;
    double seconds = 0;
    uint32_t transfers = 0;  // up to kTransfersMin
    uint32_t errors = 0;     // since the last success
  };
  struct Path {
    std::array<Rate, 2> rates;
    uint64_t busy_until_ns = 0;
    uint64_t in_flight_bytes = 0;  // that keep it busy, as measured; 0: not known
    double share = 0;
    bool is_suspect = false;
    bool is_marked = false;
    uint32_t successes = 0;  // of writes, since it was marked or a write failed
  };

  static Rate& RateIn(Path& path, Direction direction) {
    return path.rates[static_cast<size_t>(direction)];
  }
  static double RateOf(const Rate& rate);
  static double MixedRate(const Path& path);
  void UpdateShares(double drift);

  std::vector<Path> paths_;
  uint32_t marked_ = 0;
  uint64_t marks_ = 0;
  uint64_t mark_changes_ = 0;
};

}  // namespace forebay::daemon
