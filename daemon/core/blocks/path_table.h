// SPDX-License-Identifier: Apache-2.0
// The node's swap paths: the rate of each, by its own transfers, and the paths that fail.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/core/base/limits.h"
#include "nvme/path_rates.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

enum class Direction : uint8_t { kRead, kWrite };

// Bytes that a path has read or written. Both times are 0 if they are not known.
struct PathTransfer {
  uint32_t path = 0;
  Direction direction = Direction::kRead;
  uint64_t bytes = 0;
  uint64_t begin_ns = 0;
  uint64_t end_ns = 0;
};

// The node has one PathTable for all jobs. A path's rate in each direction is the bytes of its last transfers divided by the
// time in which the path was busy with these transfers. The time of a transfer begins when the transfer before it on that path
// ended, or when the transfer itself began, if that is later. So the times of both directions together are the path's busy
// time. Before the first transfers, the rate is NodeOptions::swap_rates, or not known.
//
// A path's share of new writes is proportional to its rate for equal numbers of bytes read and written, because a step reads
// and writes states once. A path of unknown rate counts with the mean of the known rates. Shares are computed again as soon as
// one share is off by kDrift.
//
// A path on which the last write failed is suspect: it gets new writes only if no other path has a free slot. After
// kPathErrorsMax failures without a success in one direction the path is marked: it gets new writes only if no other path has
// room, and its blocks move to other paths. kPathErrorsMax successful writes without a failed one remove the mark.
class PathTable {
 public:
  // Number of transfers over which a rate is computed. A measured rate counts as this many transfers.
  static constexpr double kTransfers = 16;
  // Minimum number of transfers from which a rate is computed.
  static constexpr uint32_t kTransfersMin = 8;
  static constexpr double kDrift = 0.01;
  // Minimum share of a path, as a fraction of the largest share. So even a slow path gets transfers, which show its current
  // rate.
  static constexpr double kShareMin = 1.0 / 256;
  static constexpr uint32_t kPathErrorsMax = 8;
  // Maximum number of concurrent reads of one job from one path, even if the measured latency asks for more.
  static constexpr uint32_t kReadsMax = 16;

  // `rates`: measured rates by path. The list may be shorter than the list of paths.
  PathTable(uint32_t paths, const std::vector<std::optional<nvme::PathRates>>& rates);

  void AddTransfer(const PathTransfer& transfer);
  // Records if the transfer has succeeded, and calls AddTransfer() if so.
  void CountTransfer(const PathTransfer& transfer, bool succeeded);
  void OnSucceeded(uint32_t path, Direction direction);
  void OnFailed(uint32_t path, Direction direction);

  uint32_t paths() const { return static_cast<uint32_t>(paths_.size()); }
  // Share of the path in new writes. All shares add up to 1.
  double share(uint32_t path) const { return paths_[path].share; }
  // Rate of the path, in bytes a second. 0 if the rate is not known.
  double rate(uint32_t path, Direction direction) const {
    return RateOf(paths_[path].rates[static_cast<size_t>(direction)]);
  }
  // Like rate(), but 0 if the rate would come from the measured rate, because the path has had too few transfers.
  double current_rate(uint32_t path, Direction direction) const {
    const Rate& rate = paths_[path].rates[static_cast<size_t>(direction)];
    return rate.transfers < kTransfersMin ? 0 : RateOf(rate);
  }
  // Number of reads of `block_bytes` each that keep the path busy while one of them ends: from kReadsPerPath to kReadsMax.
  uint32_t reads_at_once(uint32_t path, uint64_t block_bytes) const;

  bool is_suspect(uint32_t path) const { return paths_[path].is_suspect; }
  bool is_marked(uint32_t path) const { return paths_[path].is_marked; }
  bool works(uint32_t path) const { return !is_suspect(path) && !is_marked(path); }
  bool any_marked() const { return marked_ > 0; }
  // marks() is the number of marks that were ever set. mark_changes() also counts marks that were removed.
  uint64_t marks() const { return marks_; }
  uint64_t mark_changes() const { return mark_changes_; }

  // Allocates a free slot of the node on any path that works, or returns nullopt if no such path has a free slot.
  std::optional<nvme::Slot> AllocateOnWorking(nvme::SlotMap& swap, uint64_t bytes) const;

  // Weights of the paths for nvme::SlotMap. A marked path has the smallest weight.
  std::vector<uint32_t> Weights() const;

 private:
  struct Rate {
    double measured = 0;  // measured rate; 0 if it is not known
    // Bytes and seconds of the last transfers. Older transfers count less.
    double bytes = 0;
    double seconds = 0;
    uint32_t transfers = 0;  // up to kTransfersMin
    uint32_t errors = 0;     // failures since the last success
  };
  struct Path {
    std::array<Rate, 2> rates;
    uint64_t busy_until_ns = 0;
    uint64_t in_flight_bytes = 0;  // measured bytes in flight that keep the path busy, or 0
    double share = 0;
    bool is_suspect = false;
    bool is_marked = false;
    uint32_t successes = 0;  // successful writes since the path was marked or a write failed
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
