// SPDX-License-Identifier: Apache-2.0
// Tracks which gradients each rank has delivered to a step, and whose turn it is in each range of a partition.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
#include <memory_resource>
#include <utility>
#include <vector>

#include "cpu_adam/square_sum.h"
#include "daemon/core/update/sum_pages.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Backward pass and rank of a contribution. Turns compare in the order of addition.
struct Turn {
  uint32_t pass = 0;
  uint32_t rank = 0;

  auto operator<=>(const Turn&) const = default;  // NOLINT(modernize-use-nullptr): of clang 14
};

using ContributionId = uint64_t;  // ascending in the order of arrival

// Ranks may cut a partition differently: ranges are split where contributions begin and end. A cell is a range that each
// contribution either covers completely or does not touch. A cell lies on one page of sums.
//
// Invariants
//   1. The cells of a partition do not overlap.
//   2. unsummed() is the number of cells in the states kGathering and kAdding.
//   3. No contribution waits in a cell in the states kSummed and kFinal, and the cell's next turn begins a pass.
//   4. The turn of a contribution that waits in a cell is not before the cell's next turn. Its pass is neither after the cell's
//      newest pass nor after its rank's pass.
class GradientTurns {
 public:
  using Range = SumPages::Range;

  enum class Phase : uint8_t {
    kGathering,  // contributions are missing, or wait for their turn
    kAdding,     // a task adds contributions, or squares the sum
    kSummed,     // the sum and its squares include all ranks
    kFinal,      // summed, and the newest contribution is of its rank's last pass
  };
  enum class Sum : uint8_t {
    kNone,    // no contribution is added yet
    kNarrow,  // the sum is in the old 16-bit accumulator
    kWhole,   // the sum is in the accumulator
  };
  struct Cell {
    uint64_t end = 0;
    Turn next = {};            // earlier turns are added, are being added, or count as zero
    uint32_t newest_pass = 0;  // newest pass of all contributions
    Phase phase = Phase::kGathering;
    Sum sum = Sum::kNone;
    bool is_last_pass = false;  // the newest contribution is of its rank's last pass
    cpu_adam::SquareSum squares = {};
    std::pmr::map<Turn, ContributionId> waiting;

    bool is_summed() const { return phase >= Phase::kSummed; }
  };
  using Cells = std::pmr::map<uint64_t, Cell>;  // cells of a partition, by first element
  using Entry = Cells::value_type;
  template <typename Iterator>
  struct CellRange {  // like std::ranges::subrange, which clang 14 cannot compile
    Iterator first;
    Iterator last;

    Iterator begin() const { return first; }
    Iterator end() const { return last; }
  };

  struct Place {
    uint32_t partition = 0;
    uint64_t begin = 0;

    auto operator<=>(const Place&) const = default;  // NOLINT(modernize-use-nullptr): of clang 14
  };
  struct Rank {
    uint32_t pass = 0;  // newest backward pass
    bool is_in_last_pass = false;
    bool has_called = false;  // the rank has called step
    bool has_asked = false;   // the rank has asked for a norm of the job's gradient
    // Ends of the delivered ranges of all passes. Adjacent ranges are merged.
    std::pmr::map<Place, uint64_t> delivered;

    bool is_closed() const { return has_called || has_asked; }
  };

  // A range that has become kFinal (`is_last`), or is no longer kFinal.
  struct SumChange {
    Range range;
    bool is_last = false;
  };

  // The arguments outlive this object.
  GradientTurns(std::pmr::memory_resource* memory, const protocol::Layout& layout,
                const SumPages& sums);

  void Reset(uint32_t world_size);  // deletes all cells and deliveries

  std::vector<Rank>& ranks() { return ranks_; }
  const std::vector<Rank>& ranks() const { return ranks_; }
  bool AreAllClosed() const { return std::ranges::all_of(ranks_, &Rank::is_closed); }
  bool empty() const { return deliveries_ == 0; }
  bool has_delivered(uint32_t rank) const { return !ranks_[rank].delivered.empty(); }
  // Returns the number of elements of the range that the rank has delivered.
  uint64_t Delivered(uint32_t rank, const Range& range) const;

  // Splits and adds cells so that whole cells cover exactly the range.
  void Cut(const Range& range);
  // Adds a contribution to cells of Cut(). Returns true if it begins a pass of its rank.
  bool Add(const Range& range, const Turn& turn, ContributionId id);
  // Removes a contribution that waits in all its cells.
  void Remove(const Range& range, const Turn& turn);
  // True if a contribution of the turn to some of the range is added, is being added, counts as zero, or waits.
  bool HasTurn(const Range& range, const Turn& turn) const;
  // Returns the first turn that may still arrive for a cell, or a turn after all others if no turn is missing.
  Turn FirstMissing(uint32_t partition, const Cell& cell) const;
  // Returns the first rank that contributes to the partition.
  uint32_t FirstRank(uint32_t partition) const {
    return layout_.is_shared() ? 0 : layout_.partitions()[partition].owner;
  }

  uint32_t partitions() const { return static_cast<uint32_t>(partitions_.size()); }
  // Returns the cells that begin in the range, ascending.
  CellRange<Cells::iterator> CellsIn(const Range& range) {
    Cells& cells = partitions_[range.partition];
    return {cells.lower_bound(range.begin), cells.lower_bound(range.end)};
  }
  CellRange<Cells::const_iterator> CellsIn(const Range& range) const {
    const Cells& cells = partitions_[range.partition];
    return {cells.lower_bound(range.begin), cells.lower_bound(range.end)};
  }
  // Returns the cells that have elements of the range, ascending.
  CellRange<Cells::const_iterator> CellsOver(const Range& range) const;
  void SetSummed(uint32_t partition, Entry& entry);
  void ClearSummed(uint32_t partition, Entry& entry);
  uint64_t unsummed() const { return unsummed_; }
  std::pmr::vector<SumChange> DrainSumChanges() { return std::exchange(sum_changes_, {}); }
  // Exact sum of the squares of all gradients. Replicas count once.
  cpu_adam::SquareSum Squares() const;
  void CheckInvariants() const;

 private:
  void SplitAt(uint32_t partition, uint64_t elem);

  std::pmr::memory_resource* memory_;
  const protocol::Layout& layout_;
  const SumPages& sums_;
  std::vector<Rank> ranks_;
  uint64_t deliveries_ = 0;
  std::vector<Cells> partitions_;
  uint64_t unsummed_ = 0;
  std::pmr::vector<SumChange> sum_changes_;
};

}  // namespace forebay::daemon
