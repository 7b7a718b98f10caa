// SPDX-License-Identifier: Apache-2.0
// The memory limit of this machine for a pass over some streams: the best of four loops and more.
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
inline constexpr size_t kLoopElems = 2048;  // the loops go over whole runs of this

// One array that a pass goes over once.
struct StreamShape {
  enum class Access { kRead, kUpdate, kWrite };
  uint32_t group_bytes;  // in 128 elements: 128, 256, 512, or 4
  Access access;
};

// kUpdate: from == to. kRead: `to` is null. kWrite: `from` is null.
struct BenchStream {
  StreamShape shape;
  std::byte* from;
  std::byte* to;
  uint64_t bytes;
};

// Arrays for a pass. None begin at the same offset in their pages.
struct ArraySet {
  std::vector<StreamShape> shapes;
  uint64_t elems;
};

struct PassBytes {
  uint64_t read = 0;
  uint64_t written = 0;
};
PassBytes BytesOf(const std::vector<StreamShape>& shapes, uint64_t elems);

// Memory on pages of one size, handed out from the front again for every case.
class BenchMemory {
 public:
  enum class Pages { k2MiB, k4KiB };

  // Every page is touched.
  //
  // Errors  E_DRAM_LIMIT  too little memory is free.
  static absl::StatusOr<std::unique_ptr<BenchMemory>> Create(Pages pages, uint64_t bytes);

  BenchMemory(const BenchMemory&) = delete;
  BenchMemory& operator=(const BenchMemory&) = delete;
  ~BenchMemory();

  // Frees all earlier arrays and allocates those of `arrays`, in order. The bytes are left as they are.
  std::vector<BenchStream> Allocate(const ArraySet& arrays);
  static uint64_t BytesFor(const ArraySet& arrays);

  double huge_share() const;  // of the bytes, on 2 MiB pages when made

 private:
  BenchMemory() = default;

  std::unique_ptr<pinned_mem::PinnedArena> arena_;  // k2MiB
  void* mapped_ = nullptr;                          // k4KiB
  std::span<std::byte> bytes_;
};

// Name of the instruction set that the loops run on.
std::string LimitLoopsTarget();

// Four loops over the streams of two memories, on the threads of `pool`: GB/s of the bytes that each
// touches. They leave every byte as it is. `elems` is a multiple of kLoopElems, and at least one of
// these a thread. Where there are one or two streams, two more loops interleave four parts of them: a
// CPU reads few streams slower than many.
std::vector<BenchLoop> LimitLoops(cpu_adam::WorkerPool& pool, uint64_t elems,
                                  const std::vector<BenchStream>& huge,
                                  const std::vector<BenchStream>& small);

// Nanoseconds of a round trip between two threads of a pool that has at least two: near or far
// cores. Gives up, with what it has, when one of them does not get to run.
double PingPongNs(cpu_adam::WorkerPool& pool);

}  // namespace forebay::tools
