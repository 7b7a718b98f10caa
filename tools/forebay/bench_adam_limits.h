// SPDX-License-Identifier: Apache-2.0
// Measures the speed at which this machine can read and write a set of arrays: the limit for an optimizer pass. The fastest
// of several bare loops sets the limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_adam/worker_pool.h"
#include "pinned_mem/pinned_arena.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {

inline constexpr size_t kStreamGroupElems = 128;
inline constexpr size_t kLoopElems = 2048;  // the loops go over multiples of this number

// An array that a pass reads, updates or writes once.
struct StreamShape {
  enum class Access { kRead, kUpdate, kWrite };
  uint32_t group_bytes;  // bytes of 128 elements: 128, 256, 512 or 4
  Access access;
};

// An allocated array. For kUpdate `from` equals `to`. For kRead `to` is null. For kWrite `from` is null.
struct BenchStream {
  StreamShape shape;
  std::byte* from;
  std::byte* to;
  uint64_t bytes;
};

// The arrays of a pass. Their starts have different offsets within a page.
struct ArraySet {
  std::vector<StreamShape> shapes;
  uint64_t elems;
};

struct PassBytes {
  uint64_t read = 0;
  uint64_t written = 0;
};
PassBytes BytesOf(const std::vector<StreamShape>& shapes, uint64_t elems);

// Memory on pages of one size. All cases use the same memory, one after the other.
class BenchMemory {
 public:
  enum class Pages { k2MiB, k4KiB };

  // Allocates the memory and touches each page.
  //
  // Errors  E_DRAM_LIMIT  too little memory is free.
  static absl::StatusOr<std::unique_ptr<BenchMemory>> Create(Pages pages, uint64_t bytes);

  BenchMemory(const BenchMemory&) = delete;
  BenchMemory& operator=(const BenchMemory&) = delete;
  ~BenchMemory();

  // Frees all earlier arrays and allocates those of `arrays`, in order. Does not initialize the bytes.
  std::vector<BenchStream> Allocate(const ArraySet& arrays);
  static uint64_t BytesFor(const ArraySet& arrays);

  // Share of the bytes that lay on 2 MiB pages at the allocation.
  double huge_share() const;

 private:
  BenchMemory() = default;

  std::unique_ptr<pinned_mem::PinnedArena> arena_;  // k2MiB
  void* mapped_ = nullptr;                          // k4KiB
  std::span<std::byte> bytes_;
};

// Name of the instruction set that the loops run on.
std::string LimitLoopsTarget();

// Returns four loops that run on the threads of `pool` over the arrays in `huge` and in `small`. Each loop measures the GB/s
// of the bytes that it touches, and changes no byte. `elems` is a multiple of kLoopElems, at least kLoopElems a thread. For
// one or two arrays, two more loops interleave four parts of each array: a CPU reads few streams slower than many.
std::vector<BenchLoop> LimitLoops(cpu_adam::WorkerPool& pool, uint64_t elems,
                                  const std::vector<BenchStream>& huge,
                                  const std::vector<BenchStream>& small);

// Returns the nanoseconds of a round trip between two threads of the pool, which depend on the distance of their cores. The
// pool has at least two threads. Ends early with the rounds so far if one of the threads does not run.
double PingPongNs(cpu_adam::WorkerPool& pool);

}  // namespace forebay::tools
