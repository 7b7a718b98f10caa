// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/gradient_turns.h"

#include <iterator>

#include "protocol/os/check.h"

namespace forebay::daemon {

GradientTurns::GradientTurns(std::pmr::memory_resource* memory, const protocol::Layout& layout,
                             const SumPages& sums)
    : memory_(memory), layout_(layout), sums_(sums), sum_changes_(memory) {
  while (partitions_.size() < layout_.partitions().size()) partitions_.emplace_back(memory_);
}

void GradientTurns::Reset(uint32_t world_size) {
  ranks_.clear();
  while (ranks_.size() < world_size) {
    ranks_.push_back({.delivered = decltype(Rank::delivered)(memory_)});
  }
  deliveries_ = 0;
  for (Cells& cells : partitions_) cells.clear();
  unsummed_ = 0;
  sum_changes_.clear();
}

// ------------------------------------------------------------------------------------------- ranks

uint64_t GradientTurns::Delivered(uint32_t rank, const Range& range) const {
  const auto& ranges = ranks_[rank].delivered;
  uint64_t elems = 0;
  auto it = ranges.upper_bound({range.partition, range.begin});
  if (it != ranges.begin()) --it;
  for (; it != ranges.end() && it->first < Place{range.partition, range.end}; ++it) {
    if (it->first.partition != range.partition) continue;
    const uint64_t first = std::max(range.begin, it->first.begin);
    const uint64_t last = std::min(range.end, it->second);
    if (first < last) elems += last - first;
  }
  return elems;
}

bool GradientTurns::Add(const Range& range, const Turn& turn, ContributionId id) {
  Rank& rank = ranks_[turn.rank];
  for (Entry& entry : CellsIn(range)) {
    Cell& cell = entry.second;
    cell.waiting.emplace(turn, id);
    cell.newest_pass = std::max(cell.newest_pass, turn.pass);
    cell.is_last_pass = rank.is_in_last_pass;
    ClearSummed(range.partition, entry);
  }
  ++deliveries_;
  Place place{range.partition, range.begin};
  uint64_t end = range.end;
  auto it = rank.delivered.upper_bound(place);
  if (it != rank.delivered.begin()) {
    const auto before = std::prev(it);
    if (before->first.partition == place.partition && before->second >= place.begin) it = before;
  }
  while (it != rank.delivered.end() && it->first.partition == place.partition &&
         it->first.begin <= end) {
    place.begin = std::min(place.begin, it->first.begin);
    end = std::max(end, it->second);
    it = rank.delivered.erase(it);
  }
  rank.delivered.emplace(place, end);
  return std::exchange(rank.pass, turn.pass) < turn.pass;
}

void GradientTurns::Remove(const Range& range, const Turn& turn) {
  for (Entry& entry : CellsIn(range)) entry.second.waiting.erase(turn);
  --deliveries_;
  auto& ranges = ranks_[turn.rank].delivered;
  const auto merged = std::prev(ranges.upper_bound({range.partition, range.begin}));
  const uint64_t end = std::exchange(merged->second, range.begin);
  if (merged->first.begin == range.begin) ranges.erase(merged);
  if (range.end < end) ranges.emplace(Place{range.partition, range.end}, end);
}

bool GradientTurns::HasTurn(const Range& range, const Turn& turn) const {
  return std::ranges::any_of(CellsIn(range), [&turn](const Entry& entry) {
    return turn < entry.second.next || entry.second.waiting.contains(turn);
  });
}

Turn GradientTurns::FirstMissing(uint32_t partition, const Cell& cell) const {
  const uint32_t begin = FirstRank(partition);
  const auto end = layout_.is_shared() ? static_cast<uint32_t>(ranks_.size()) : begin + 1;
  Turn first{.pass = UINT32_MAX, .rank = UINT32_MAX};
  for (uint32_t rank = begin; rank < end; ++rank) {
    if (ranks_[rank].is_closed()) continue;
    Turn turn{.pass = ranks_[rank].pass, .rank = rank};
    if (turn < cell.next) turn.pass = cell.next.pass + (rank < cell.next.rank ? 1 : 0);
    if (cell.waiting.contains(turn)) ++turn.pass;
    first = std::min(first, turn);
  }
  return first;
}

// ------------------------------------------------------------------------------------------- cells

void GradientTurns::SetSummed(uint32_t partition, Entry& entry) {
  auto& [begin, cell] = entry;
  --unsummed_;
  cell.phase = cell.is_last_pass && cell.sum != Sum::kNone ? Phase::kFinal : Phase::kSummed;
  if (cell.phase == Phase::kFinal) sum_changes_.push_back({{partition, begin, cell.end}, true});
}

void GradientTurns::ClearSummed(uint32_t partition, Entry& entry) {
  auto& [begin, cell] = entry;
  if (!cell.is_summed()) return;
  ++unsummed_;
  const Phase before = std::exchange(cell.phase, Phase::kGathering);
  if (before == Phase::kFinal) sum_changes_.push_back({{partition, begin, cell.end}, false});
}

void GradientTurns::SplitAt(uint32_t partition, uint64_t elem) {
  Cells& cells = partitions_[partition];
  const auto after = cells.upper_bound(elem);
  if (after == cells.begin()) return;
  Entry& left = *std::prev(after);
  if (left.first == elem || left.second.end <= elem) return;
  ClearSummed(partition, left);  // each part needs its own sum of squares
  left.second.squares = {};
  Cell right{.waiting = decltype(Cell::waiting)(memory_)};
  right = left.second;
  cells.emplace(elem, std::move(right));
  left.second.end = elem;
  ++unsummed_;
}

void GradientTurns::Cut(const Range& range) {
  Cells& cells = partitions_[range.partition];
  SplitAt(range.partition, range.begin);
  SplitAt(range.partition, range.end);
  for (uint64_t at = range.begin; at < range.end;) {
    const auto next = cells.lower_bound(at);
    if (next != cells.end() && next->first == at) {
      at = next->second.end;
      continue;
    }
    uint64_t gap_end = next == cells.end() ? range.end : std::min(range.end, next->first);
    gap_end = std::min(gap_end, sums_.EndOnPage(range.partition, at));
    cells.emplace(at, Cell{.end = gap_end,
                           .next = {.rank = FirstRank(range.partition)},
                           .waiting = decltype(Cell::waiting)(memory_)});
    ++unsummed_;
    at = gap_end;
  }
}

GradientTurns::CellRange<GradientTurns::Cells::const_iterator> GradientTurns::CellsOver(
    const Range& range) const {
  const auto cells = CellsIn(range);
  const bool is_first = cells.begin() == partitions_[range.partition].begin();
  if (is_first || std::prev(cells.begin())->second.end <= range.begin) return cells;
  return {std::prev(cells.begin()), cells.end()};
}

cpu_adam::SquareSum GradientTurns::Squares() const {
  cpu_adam::SquareSum squares;
  for (size_t i = 0; i < partitions_.size(); ++i) {
    if (layout_.partitions()[i].replica != 0) continue;
    for (const auto& [elem, cell] : partitions_[i]) squares.Merge(cell.squares);
  }
  return squares;
}

void GradientTurns::CheckInvariants() const {
  uint64_t unsummed = 0;
  for (uint32_t partition = 0; partition < partitions_.size(); ++partition) {
    uint64_t last_end = 0;
    for (const auto& [begin, cell] : partitions_[partition]) {
      FOREBAY_CHECK(begin >= last_end && begin < cell.end);
      last_end = cell.end;
      if (!cell.is_summed()) ++unsummed;
      FOREBAY_CHECK(!cell.is_summed() ||
                    (cell.waiting.empty() && cell.next.rank == FirstRank(partition)));
      for (const auto& [turn, id] : cell.waiting) {
        FOREBAY_CHECK(turn >= cell.next);
        FOREBAY_CHECK(turn.pass <= std::min(cell.newest_pass, ranks_[turn.rank].pass));
      }
    }
  }
  FOREBAY_CHECK(unsummed == unsummed_);
}

}  // namespace forebay::daemon
