#include "tools/forebay/bench_adam_limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpu_adam/parallel_update.h"
#include "protocol/check.h"
#include "protocol/error.h"
#include "protocol/status_macros.h"
#include "protocol/units.h"
#include "tools/forebay/bench_adam_loops.h"

namespace forebay::tools {
namespace {

using Clock = std::chrono::steady_clock;
using Access = StreamShape::Access;

static_assert(kLoopElems == loops::kChunkElems);

constexpr double kGiga = 1e9;
constexpr uint32_t kPingPongRounds = 1000;
constexpr std::chrono::milliseconds kPingPongMax(20);

volatile uint64_t loop_zero = 0;  // what the compiler must not know
std::atomic<uint64_t> loop_digest = 0;

const loops::Loops& BestLoops() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return loops::kAvx512;
  if (__builtin_cpu_supports("avx2")) return loops::kAvx2;
#endif
  return loops::kBaseline;
}

uint64_t GroupsOf(uint64_t elems) { return (elems + kStreamGroupElems - 1) / kStreamGroupElems; }

// Whole pages, and eleven lines more: ten arrays then lie 128 bytes or more apart in their pages.
uint64_t ArrayBytes(const StreamShape& shape, const Laying& laying) {
  const uint64_t bytes =
      protocol::RoundUp(GroupsOf(laying.elems) * shape.group_bytes, protocol::kPageBytes);
  return laying.offsets == Offsets::kEqual ? bytes : bytes + 11 * loops::kLineBytes;
}

bool HasTwo(const StreamShape& shape, Place place) {
  return place == Place::kOutOfPlace && shape.access == Access::kUpdate;
}

// The streams from element `first` on; whole chunks alone.
std::vector<loops::Stream> StreamsFrom(const std::vector<BenchStream>& streams, uint64_t first) {
  std::vector<loops::Stream> moved;
  for (const BenchStream& stream : streams) {
    const uint64_t offset = first / kStreamGroupElems * stream.shape.group_bytes;
    const auto at = [offset](std::byte* array) {
      return array == nullptr ? nullptr : reinterpret_cast<unsigned char*>(array + offset);
    };
    const uint64_t step_bytes = stream.shape.group_bytes * loops::kStepElems / kStreamGroupElems;
    moved.push_back({at(stream.from), at(stream.to), step_bytes / loops::kLineBytes});
  }
  return moved;
}

double RunLoop(cpu_adam::WorkerTeam& team, loops::LoopFn* loop, uint64_t chunks,
               const std::vector<BenchStream>& streams) {
  const auto threads = static_cast<uint64_t>(team.threads());
  std::vector<std::vector<loops::Stream>> parts;
  for (uint64_t t = 0; t < threads; ++t) {
    parts.push_back(StreamsFrom(streams, chunks * t / threads * loops::kChunkElems));
  }
  const auto began = Clock::now();
  cpu_adam::RunOnAll(team, [&](int task) {
    const auto t = static_cast<uint64_t>(task);
    const uint64_t mine = chunks * (t + 1) / threads - chunks * t / threads;
    const std::vector<loops::Stream>& part = parts[t];
    loop_digest ^= loop(part.data(), part.size(), mine, loop_zero);
  });
  return std::chrono::duration<double>(Clock::now() - began).count();
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

uint64_t BenchMemory::BytesFor(const Laying& laying) {
  uint64_t bytes = 0;
  for (const StreamShape& shape : laying.shapes) {
    bytes += ArrayBytes(shape, laying) * (HasTwo(shape, laying.place) ? 2 : 1);
  }
  return bytes;
}

std::vector<BenchStream> BenchMemory::Lay(const Laying& laying) {
  std::span<std::byte> left = bytes_;
  const auto take = [&](const StreamShape& shape) {
    const uint64_t bytes = ArrayBytes(shape, laying);
    FOREBAY_CHECK(bytes <= left.size());
    std::byte* const array = left.data();
    left = left.subspan(bytes);
    return array;
  };
  std::vector<BenchStream> streams;
  for (const StreamShape& shape : laying.shapes) {
    BenchStream stream{shape, nullptr, nullptr, GroupsOf(laying.elems) * shape.group_bytes};
    if (shape.access != Access::kWrite) stream.from = take(shape);
    if (shape.access == Access::kUpdate) stream.to = stream.from;
    streams.push_back(stream);
  }
  for (BenchStream& stream : streams) {
    const bool written_alone = stream.shape.access == Access::kWrite;
    if (written_alone || HasTwo(stream.shape, laying.place)) stream.to = take(stream.shape);
  }
  return streams;
}

double BenchMemory::huge_share() const {
  if (arena_ == nullptr) return 0;
  return static_cast<double>(arena_->huge_bytes()) / static_cast<double>(arena_->capacity_bytes());
}

std::string LimitLoopsTarget() { return BestLoops().name; }

std::vector<BenchLoop> LimitLoops(cpu_adam::WorkerTeam& team, uint64_t elems,
                                  const std::vector<BenchStream>& huge,
                                  const std::vector<BenchStream>& small) {
  const uint64_t chunks = elems / loops::kChunkElems;
  FOREBAY_CHECK(chunks > 0 && huge.size() <= loops::kStreamsMax);
  std::vector<StreamShape> shapes;
  for (const BenchStream& stream : huge) shapes.push_back(stream.shape);
  const PassBytes bytes = BytesOf(shapes, chunks * loops::kChunkElems);
  const auto all = static_cast<double>(bytes.read + bytes.written);
  const auto sampler = [&team, all, chunks](loops::LoopFn* loop,
                                            const std::vector<BenchStream>& streams) {
    return [&team, all, chunks, loop, streams]() -> absl::StatusOr<Sample> {
      return Sample{.value = all / RunLoop(team, loop, chunks, streams) / kGiga};
    };
  };
  const loops::Loops& best = BestLoops();
  return {{"plain_2mib", BenchLoop::Role::kLimit, sampler(best.plain, huge)},
          {"bypass_2mib", BenchLoop::Role::kLimit, sampler(best.bypass, huge)},
          {"plain_4kib", BenchLoop::Role::kLimit, sampler(best.plain, small)},
          {"bypass_4kib", BenchLoop::Role::kLimit, sampler(best.bypass, small)}};
}

double PingPongNs(cpu_adam::WorkerTeam& team) {
  FOREBAY_CHECK(team.threads() >= 2);
  alignas(64) std::atomic<uint32_t> turn = 0;  // even: thread 0's
  std::atomic<bool> over = false;
  std::atomic<double> round_ns = 0;
  cpu_adam::RunOnAll(team, [&](int task) {
    if (task > 1) return;
    const auto mine = static_cast<uint32_t>(task);
    const auto began = Clock::now();
    auto first = began;  // when the other was there for the first time
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
