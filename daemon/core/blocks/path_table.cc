// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/path_table.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "daemon/core/base/limits.h"

namespace forebay::daemon {
namespace {

// Weight of the path with the largest share.
constexpr double kWeightMax = 1 << 16;

}  // namespace

PathTable::PathTable(uint32_t paths, const std::vector<std::optional<nvme::PathRates>>& rates)
    : paths_(paths) {
  for (uint32_t i = 0; i < paths && i < rates.size(); ++i) {
    if (!rates[i]) continue;
    const nvme::PathRates& measured = *rates[i];
    // Each direction's fraction of the rate that it has alone, if the path reads and writes at once.
    const double of_alone = measured.mixed * (1 / measured.read + 1 / measured.write) / 2;
    RateIn(paths_[i], Direction::kRead).measured = measured.read * of_alone;
    RateIn(paths_[i], Direction::kWrite).measured = measured.write * of_alone;
    paths_[i].in_flight_bytes = measured.in_flight_bytes();
  }
  UpdateShares(/*drift=*/0);
}

double PathTable::RateOf(const Rate& rate) {
  return rate.transfers < kTransfersMin || rate.seconds <= 0 ? rate.measured
                                                             : rate.bytes / rate.seconds;
}

// Returns the path's rate for equal numbers of bytes read and written, or 0 if the rate is not known.
double PathTable::MixedRate(const Path& path) {
  const auto& [read, write] = path.rates;
  const double reads = RateOf(read);
  const double writes = RateOf(write);
  if (reads == 0 || writes == 0) return std::max(reads, writes);
  return 2 / (1 / reads + 1 / writes);
}

void PathTable::UpdateShares(double drift) {
  double known = 0;
  uint32_t count = 0;
  double largest = 0;
  for (const Path& path : paths_) {
    const double mixed = MixedRate(path);
    known += mixed;
    count += mixed > 0 ? 1 : 0;
    largest = std::max(largest, mixed);
  }
  const double mean = count == 0 ? 1 : known / count;
  const auto weight = [&](const Path& path) {
    const double mixed = MixedRate(path);
    return std::max(mixed > 0 ? mixed : mean, kShareMin * largest);
  };
  double sum = 0;
  for (const Path& path : paths_) sum += weight(path);
  const bool has_drifted = std::ranges::any_of(paths_, [&](const Path& path) {
    return std::abs(weight(path) / sum - path.share) > drift * path.share;
  });
  if (!has_drifted) return;
  for (Path& path : paths_) path.share = weight(path) / sum;
}

void PathTable::AddTransfer(const PathTransfer& transfer) {
  if (transfer.end_ns <= transfer.begin_ns) return;
  Path& path = paths_[transfer.path];
  Rate& rate = RateIn(path, transfer.direction);
  const uint64_t begin_ns = std::max(transfer.begin_ns, path.busy_until_ns);
  path.busy_until_ns = std::max(path.busy_until_ns, transfer.end_ns);
  const uint64_t busy_ns = transfer.end_ns - std::min(begin_ns, transfer.end_ns);
  const auto bytes = static_cast<double>(transfer.bytes);
  if (rate.transfers == 0 && rate.measured > 0) {
    rate.bytes = kTransfers * bytes;
    rate.seconds = rate.bytes / rate.measured;
  }
  const double kept = 1 - 1 / kTransfers;
  rate.bytes = kept * rate.bytes + bytes;
  rate.seconds = kept * rate.seconds + static_cast<double>(busy_ns) * 1e-9;
  rate.transfers = std::min(rate.transfers + 1, kTransfersMin);
  UpdateShares(kDrift);
}

void PathTable::CountTransfer(const PathTransfer& transfer, bool succeeded) {
  if (!succeeded) {
    OnFailed(transfer.path, transfer.direction);
    return;
  }
  OnSucceeded(transfer.path, transfer.direction);
  AddTransfer(transfer);
}

void PathTable::OnSucceeded(uint32_t path, Direction direction) {
  Path& of = paths_[path];
  RateIn(of, direction).errors = 0;
  if (direction == Direction::kRead) return;
  of.is_suspect = false;
  if (!of.is_marked || ++of.successes < kPathErrorsMax) return;
  of.is_marked = false;
  --marked_;
  ++mark_changes_;
}

void PathTable::OnFailed(uint32_t path, Direction direction) {
  Path& of = paths_[path];
  if (direction == Direction::kWrite) {
    of.is_suspect = true;
    of.successes = 0;
  }
  if (++RateIn(of, direction).errors < kPathErrorsMax || of.is_marked) return;
  of.is_marked = true;
  ++marks_;
  of.successes = 0;
  ++marked_;
  ++mark_changes_;
}

uint32_t PathTable::reads_at_once(uint32_t path, uint64_t block_bytes) const {
  const uint64_t bytes = paths_[path].in_flight_bytes;
  const uint64_t reads = block_bytes == 0 ? 0 : 1 + (bytes + block_bytes - 1) / block_bytes;
  return static_cast<uint32_t>(std::clamp<uint64_t>(reads, kReadsPerPath, kReadsMax));
}

std::optional<nvme::Slot> PathTable::AllocateOnWorking(nvme::SlotMap& swap, uint64_t bytes) const {
  for (uint32_t path = 0; path < paths(); ++path) {
    if (!works(path)) continue;
    const std::optional<nvme::Slot> slot = swap.AllocateOn(path, bytes);
    if (slot) return slot;
  }
  return std::nullopt;
}

std::vector<uint32_t> PathTable::Weights() const {
  double largest = 0;
  for (const Path& path : paths_) largest = std::max(largest, path.share);
  std::vector<uint32_t> weights;
  for (const Path& path : paths_) {
    const double weight = path.is_marked ? 0 : path.share / largest * kWeightMax;
    weights.push_back(std::max(static_cast<uint32_t>(std::lround(weight)), 1U));
  }
  return weights;
}

}  // namespace forebay::daemon
