#include "cpu_adam/parallel_update.h"

#include <algorithm>
#include <atomic>
#include <latch>

#include "protocol/os/check.h"

namespace forebay::cpu_adam {
namespace {

// Where the run of a share begins and the one before it ends.
struct Cut {
  size_t partition;
  size_t elem;  // within it
};

// `numerator`/`count` of the way through `total` elements, rounded down.
Cut CutAt(std::span<const PartitionUpdate> partitions, size_t total, size_t numerator,
          size_t count) {
  if (numerator == count) return {partitions.size(), 0};
  // total·numerator / count, of factors whose product might not fit
  size_t left = total / count * numerator + total % count * numerator / count;
  for (size_t p = 0; p < partitions.size(); ++p) {
    if (left < partitions[p].n) return {p, left / kCutElems * kCutElems};
    left -= partitions[p].n;
  }
  return {partitions.size(), 0};
}

Gradient Advance(Gradient grad, size_t elems) {
  const size_t elem_bytes = grad.type == DType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
  return {static_cast<const std::byte*>(grad.data) + elems * elem_bytes, grad.type};
}

uint64_t UpdatePiece(Optimizer optimizer, StateFormat format, const PartitionUpdate& partition,
                     size_t begin, size_t end) {
  const StatePlanes from = Advance(partition.from, format, begin);
  const StatePlanes to = Advance(partition.to, format, begin);
  return UpdateTo(optimizer, format, partition.scalars, end - begin, Advance(partition.grad, begin),
                  from, to);
}

}  // namespace

uint64_t UpdateShare(Optimizer optimizer, StateFormat format,
                     std::span<const PartitionUpdate> partitions, Share share) {
  FOREBAY_CHECK(share.index < share.count);
  size_t total = 0;
  for (const PartitionUpdate& partition : partitions) total += partition.n;
  const Cut begin = CutAt(partitions, total, share.index, share.count);
  const Cut end = CutAt(partitions, total, share.index + 1, share.count);
  uint64_t bad = 0;
  for (size_t p = begin.partition; p < partitions.size() && p <= end.partition; ++p) {
    const size_t first = p == begin.partition ? begin.elem : 0;
    const size_t last = p == end.partition ? end.elem : partitions[p].n;
    if (first < last) bad += UpdatePiece(optimizer, format, partitions[p], first, last);
  }
  return bad;
}

uint64_t UpdateAll(WorkerPool& pool, Optimizer optimizer, StateFormat format,
                   std::span<const PartitionUpdate> partitions) {
  const auto shares = static_cast<size_t>(pool.threads());
  std::atomic<uint64_t> bad = 0;
  RunOnAll(pool, [&](int task) {
    bad += UpdateShare(optimizer, format, partitions, {static_cast<size_t>(task), shares});
  });
  return bad;
}

void RunOnAll(WorkerPool& pool, absl::FunctionRef<void(int task)> body) {
  struct Region {
    absl::FunctionRef<void(int task)> body;
    std::latch left;
  } region{body, std::latch(pool.threads())};
  for (int task = 0; task < pool.threads(); ++task) {
    // Two words: a task holds them without allocation.
    WorkerPool::Task run = [&region, task] {
      region.body(task);
      region.left.count_down();
    };
    // NOLINTNEXTLINE(bugprone-use-after-move): a full pool leaves the task untouched
    if (!pool.TryPost(std::move(run))) run();
  }
  region.left.wait();
}

}  // namespace forebay::cpu_adam
