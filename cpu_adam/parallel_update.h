// One parallel region over any number of partitions: what a tensor costs is its elements alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "cpu_adam/update_kernel.h"
#include "cpu_adam/worker_pool.h"

namespace forebay::cpu_adam {

// A part of a state with its own scalars: a parameter, or what one parameter group has of a block.
struct PartitionUpdate {
  StepScalars scalars;
  size_t n;  // elements; may be 0
  Gradient grad;
  StatePlanes from;
  StatePlanes to;  // to.weights == from.weights: in place
};

// Cuts within a partition lie on multiples of this, so that a piece keeps the alignment of its
// partition, whole cache lines of every plane and whole groups of quantized moments.
inline constexpr size_t kCutElems = 4096;

// One of equal shares of the elements of all partitions.
struct Share {
  size_t index;  // < count
  size_t count;  // > 0
};

// Updates the elements of one share: a contiguous run of the partitions one behind the other, whose
// ends are rounded down to kCutElems. The shares 0 … count - 1 together update each element once.
// Returns the count of bad masters (update_kernel.h).
//
// Shapes   As Update() for each partition.
// Memory   No two partitions overlap; else as Update().
// Threads  Pure. All shares may run at once; their number changes no bit of the result.
// Limits   No allocation. Looks at each partition once; below kCutElems · count elements in all,
//          shares may be empty.
uint64_t UpdateShare(Optimizer optimizer, StateFormat format,
                     std::span<const PartitionUpdate> partitions, Share share);

// Runs the fused pass over all partitions, one share for each thread of the pool; returns when all
// is done, and the count of bad masters.
//
// Memory   As UpdateShare(); `partitions` and all it points to stay until the return. What was
//          written is visible to the caller.
// Threads  Any but the pool's own, which would wait for themselves. Other tasks may be in the queue
//          and run first.
// Limits   One task a thread and one wait, whatever the number of partitions; no allocation.
uint64_t UpdateAll(WorkerPool& pool, Optimizer optimizer, StateFormat format,
                   std::span<const PartitionUpdate> partitions);

// Runs body(0) … body(pool.threads() - 1), each as one task; returns when all have returned. A task
// that the queue has no room for is run by the caller.
//
// Threads  As UpdateAll(). A thread of the pool may run several of the tasks.
// Limits   No allocation.
void RunOnAll(WorkerPool& pool, absl::FunctionRef<void(int task)> body);

}  // namespace forebay::cpu_adam
