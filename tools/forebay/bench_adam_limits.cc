// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_adam_limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tools/forebay/bench_adam_loops.h"
#include "tools/forebay/bench_workers.h"

namespace forebay::tools {
namespace {

using Clock = std::chrono::steady_clock;
using Access = StreamShape::Access;

static_assert(kLoopElems == loops::kChunkElems);

constexpr uint64_t kInterleave = 4;
constexpr size_t kFewStreams = 8;
constexpr uint32_t kPingPongRounds = 1000;
constexpr std::chrono::milliseconds kPingPongMax(20);

volatile uint64_t loop_zero = 0;  // zero that the compiler cannot assume
std::atomic<uint64_t> loop_digest = 0;

const loops::Loops& BestLoops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return loops::kAvx512;
  if (__builtin_cpu_supports("avx2")) return loops::kAvx2;
#endif
  return loops::kBaseline;
}

uint64_t GroupsOf(uint64_t elems) { return (elems + kStreamGroupElems - 1) / kStreamGroupElems; }

// Bytes to allocate for an array: whole pages plus eleven cache lines. The starts of ten arrays then lie at least 128 bytes
// apart within their pages.
uint64_t ArrayBytes(const StreamShape& shape, uint64_t elems) {
  return protocol::RoundUp(GroupsOf(elems) * shape.group_bytes, protocol::kPageBytes) +
         11 * loops::kLineBytes;
}

// A pass of one loop over arrays of `chunks` chunks. Each thread gets an equal share of the chunks and goes over `interleave`
// parts of its share at once.
struct LoopPass {
  loops::LoopFn* loop;
  uint64_t chunks;
  uint64_t interleave;
};

// Appends to `moved` the rest of each array from chunk `first` on.
void AddStreams(const std::vector<BenchStream>& streams, uint64_t first,
                std::vector<loops::Stream>& moved) {
  for (const BenchStream& stream : streams) {
    const uint64_t offset =
        first * loops::kChunkElems / kStreamGroupElems * stream.shape.group_bytes;
    const auto at = [offset](std::byte* array) {
      return array == nullptr ? nullptr : reinterpret_cast<unsigned char*>(array + offset);
    };
    const uint64_t step_bytes = stream.shape.group_bytes * loops::kStepElems / kStreamGroupElems;
    moved.push_back({at(stream.from), at(stream.to), step_bytes / loops::kLineBytes});
  }
}

// Runs a loop over the arrays on all threads and returns the seconds. Chunks that cannot be divided evenly among the
// interleaved parts of all threads are left out.
double RunPass(cpu_adam::WorkerPool& pool, const LoopPass& pass,
               const std::vector<BenchStream>& streams) {
  const auto threads = static_cast<uint64_t>(pool.threads());
  const uint64_t run = pass.chunks / threads / pass.interleave;
  std::vector<std::vector<loops::Stream>> parts(threads);
  for (uint64_t t = 0; t < threads; ++t) {
    for (uint64_t p = 0; p < pass.interleave; ++p) {
      AddStreams(streams, (t * pass.interleave + p) * run, parts[t]);
    }
  }
  const auto began = Clock::now();
  RunOnAll(pool, [&](int task) {
    const std::vector<loops::Stream>& part = parts[static_cast<size_t>(task)];
    loop_digest ^= pass.loop(part.data(), part.size(), run, loop_zero);
  });
  return std::chrono::duration<double>(Clock::now() - began).count();
}

absl::StatusOr<Sample> GigabytesPerSecond(cpu_adam::WorkerPool& pool, const LoopPass& pass,
                                          const std::vector<BenchStream>& streams) {
  const uint64_t runs = static_cast<uint64_t>(pool.threads()) * pass.interleave;
  FOREBAY_CHECK(pass.chunks >= runs);
  std::vector<StreamShape> shapes;
  for (const BenchStream& stream : streams) shapes.push_back(stream.shape);
  const PassBytes bytes = BytesOf(shapes, pass.chunks / runs * runs * loops::kChunkElems);
  const double seconds = RunPass(pool, pass, streams);
  return Sample{.value = static_cast<double>(bytes.read + bytes.written) / seconds / protocol::kGb};
}

}  // namespace

PassBytes BytesOf(const std::vector<StreamShape>& shapes, uint64_t elems) {
  PassBytes bytes;
  for (const StreamShape& shape : shapes) {
    const uint64_t all = elems * shape.group_bytes / kStreamGroupElems;
    if (shape.access != Access::kWrite) bytes.read += all;
    if (shape.access != Access::kRead) bytes.written += all;
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<BenchMemory>> BenchMemory::Create(Pages pages, uint64_t bytes) {
  auto memory = std::unique_ptr<BenchMemory>(new BenchMemory());
  const uint64_t whole = protocol::RoundUp(bytes, protocol::kHugePageBytes);
  if (pages == Pages::k2MiB) {
    ASSIGN_OR_RETURN(memory->arena_, pinned_mem::PinnedArena::Create(
                                         {.name = "bench-adam",
                                          .capacity_bytes = whole,
                                          .lock = pinned_mem::LockPolicy::kBestEffort}));
    memory->bytes_ = memory->arena_->bytes();
    return memory;
  }
  void* const mapped =
      ::mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return protocol::MakeError(
        protocol::ErrorId::kDramLimit,
        protocol::ErrnoText(absl::StrCat("map ", protocol::FormatBytes(whole)), errno));
  }
  memory->mapped_ = mapped;
  memory->bytes_ = {static_cast<std::byte*>(mapped), whole};
  (void)::madvise(mapped, whole, MADV_NOHUGEPAGE);
  std::memset(mapped, 0, whole);
  return memory;
}

BenchMemory::~BenchMemory() {
  if (mapped_ != nullptr) ::munmap(mapped_, bytes_.size());
}

uint64_t BenchMemory::BytesFor(const ArraySet& arrays) {
  uint64_t bytes = 0;
  for (const StreamShape& shape : arrays.shapes) bytes += ArrayBytes(shape, arrays.elems);
  return bytes;
}

std::vector<BenchStream> BenchMemory::Allocate(const ArraySet& arrays) {
  std::span<std::byte> left = bytes_;
  std::vector<BenchStream> streams;
  for (const StreamShape& shape : arrays.shapes) {
    const uint64_t bytes = ArrayBytes(shape, arrays.elems);
    FOREBAY_CHECK(bytes <= left.size());
    BenchStream stream{shape, nullptr, nullptr, GroupsOf(arrays.elems) * shape.group_bytes};
    if (shape.access != Access::kWrite) stream.from = left.data();
    if (shape.access != Access::kRead) stream.to = left.data();
    streams.push_back(stream);
    left = left.subspan(bytes);
  }
  return streams;
}

double BenchMemory::huge_share() const {
  if (arena_ == nullptr) return 0;
  return static_cast<double>(arena_->huge_bytes()) / static_cast<double>(arena_->capacity_bytes());
}

std::string LimitLoopsTarget() { return BestLoops().name; }

std::vector<BenchLoop> LimitLoops(cpu_adam::WorkerPool& pool, uint64_t elems,
                                  const std::vector<BenchStream>& huge,
                                  const std::vector<BenchStream>& small) {
  const loops::Loops& best = BestLoops();
  const auto loop = [&](const char* name, loops::LoopFn* fn,
                        const std::vector<BenchStream>& streams, uint64_t interleave) {
    const LoopPass pass{.loop = fn, .chunks = elems / loops::kChunkElems, .interleave = interleave};
    return BenchLoop{name, BenchLoop::Role::kLimit,
                     [&pool, pass, streams] { return GigabytesPerSecond(pool, pass, streams); }};
  };
  std::vector<BenchLoop> all = {loop("plain_2mib", best.plain, huge, 1),
                                loop("non_temporal_2mib", best.non_temporal, huge, 1),
                                loop("plain_4kib", best.plain, small, 1),
                                loop("non_temporal_4kib", best.non_temporal, small, 1)};
  const auto runs = static_cast<uint64_t>(pool.threads()) * kInterleave;
  if (huge.size() * kInterleave > kFewStreams || elems / loops::kChunkElems < runs) return all;
  all.push_back(loop("plain_2mib_interleaved", best.plain, huge, kInterleave));
  all.push_back(loop("non_temporal_2mib_interleaved", best.non_temporal, huge, kInterleave));
  return all;
}

double PingPongNs(cpu_adam::WorkerPool& pool) {
  FOREBAY_CHECK(pool.threads() >= 2);
  alignas(64) std::atomic<uint32_t> turn = 0;  // even: thread 0's turn
  std::atomic<bool> over = false;
  std::atomic<double> round_ns = 0;
  RunOnAll(pool, [&](int task) {
    if (task > 1) return;
    const auto mine = static_cast<uint32_t>(task);
    const auto began = Clock::now();
    auto first = began;  // time at which this thread's second turn ended
    for (uint32_t i = 0; i < kPingPongRounds && !over; ++i) {
      const uint32_t expected = 2 * i + mine;
      for (uint32_t spins = 1; turn.load(std::memory_order_acquire) != expected; ++spins) {
        if (spins % 1024 == 0 && Clock::now() - began > kPingPongMax) over = true;
        if (over) break;
      }
      if (over) break;
      turn.store(expected + 1, std::memory_order_release);
      if (i == 1) first = Clock::now();
      if (mine == 0 && i > 1) {
        round_ns = std::chrono::duration<double, std::nano>(Clock::now() - first).count() / (i - 1);
      }
    }
  });
  return round_ns;
}

}  // namespace forebay::tools
