// SPDX-License-Identifier: Apache-2.0
// Functions that tests/bench/peers/run calls through ctypes: the daemon's update of its blocks, and the limit loops on the
// buffers that the peers use. They have no header: peer_kernels.py declares them for Python.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpu_adam/targets.h"
#include "cpu_adam/worker_pool.h"
#include "daemon/exec/block_tasks.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/dtype.h"
#include "protocol/os/check.h"
#include "protocol/units.h"
#include "tests/bench/peers/limit.h"
#include "tools/forebay/bench_adam_blocks.h"
#include "tools/forebay/bench_workers.h"

using forebay::cpu_adam::WorkerPool;
using forebay::pinned_mem::PinnedArena;
using forebay::protocol::DType;
using forebay::protocol::kPageBytes;
using forebay::protocol::RoundUp;
using forebay::protocol::StateFormat;
using forebay::tools::AdamBlocks;
using forebay::tools::AdamPass;
using forebay::tools::RunOnAll;
using forebay::tools::RunOnParts;

namespace {

constexpr size_t kLineElems = 64;  // takes whole cache lines in each plane

// Numbers of the cases, the same as WORKS in ours.py.
enum Work : int { kWorkFp32 = 0, kWorkExact = 1, kWorkMaster = 2 };

StateFormat FormatOf(int work) {
  if (work == kWorkExact) return StateFormat::kExact;
  return work == kWorkMaster ? StateFormat::kFp32Bf16 : StateFormat::kFp32;
}

std::unique_ptr<WorkerPool> MakePool(const int* cpus, size_t count) {
  auto pool = WorkerPool::Create(
      {.threads = static_cast<int>(count), .cpus = std::vector<int>(cpus, cpus + count)});
  if (pool.ok()) return *std::move(pool);
  std::fprintf(stderr, "%s\n", pool.status().ToString().c_str());
  return nullptr;
}

}  // namespace

extern "C" {

// The planes of n elements. `weights` is float32 (kWorkFp32) or bfloat16. A plane that the work does not have is null or
// ignored.
struct PeersPlanes {
  uint64_t n;
  void* weights;
  float* master;
  int16_t* remainder;
  float* m;
  float* v;
  const void* grad;
};

// Worker threads, one bound to each CPU, and the blocks that the threads update.
struct PeersOurs {
  std::unique_ptr<WorkerPool> pool;
  std::unique_ptr<PinnedArena> memory;
  std::optional<AdamBlocks> blocks;
  DType type = DType::kFloat32;          // type of the gradients
  std::span<std::byte> gradients;        // one rank's, as the blocks read them
  std::span<const std::byte> delivered;  // the same gradients, where the rank has put them
};

// Threads that compute without touching memory. They keep other processes off their CPUs.
struct PeersHold {
  std::unique_ptr<WorkerPool> pool;
  std::atomic<bool> held = false;
};

// Creates the threads. Returns null and prints a line to stderr if the threads cannot be created.
PeersOurs* PeersMake(const int* cpus, size_t cpu_count) {
  auto ours = std::make_unique<PeersOurs>();
  ours->pool = MakePool(cpus, cpu_count);
  return ours->pool == nullptr ? nullptr : ours.release();
}

// Creates resident blocks of `n` elements in `parameters` parameters, in the daemon's layout. Returns false and prints a line
// to stderr if their memory cannot be allocated.
bool PeersMakeBlocks(PeersOurs* ours, int work, uint64_t n, uint64_t parameters) {
  const AdamPass pass{
      .format = FormatOf(work), .threads = ours->pool->threads(), .parameters = parameters};
  const uint64_t weights_bytes =
      RoundUp(ElemsOf(pass, n) * forebay::protocol::SizeBytes(pass.format.weights), kPageBytes);
  auto memory = PinnedArena::Create({.name = "peers",
                                     .capacity_bytes = 3 * weights_bytes + StateBytesOf(pass, n),
                                     .lock = forebay::pinned_mem::LockPolicy::kBestEffort});
  if (!memory.ok()) {
    std::fprintf(stderr, "%s\n", memory.status().ToString().c_str());
    return false;
  }
  ours->memory = *std::move(memory);
  const auto bytes = ours->memory->bytes();
  const auto states = bytes.subspan(3 * weights_bytes);
  ours->type = pass.format.weights;
  ours->gradients = bytes.first(weights_bytes);
  ours->blocks.emplace(
      pass, n, *ours->pool,
      forebay::tools::AdamMemory{.gradient = ours->gradients,
                                 .weights = bytes.subspan(weights_bytes, weights_bytes),
                                 .states = states});
  const auto delivered = bytes.subspan(2 * weights_bytes, weights_bytes);
  std::ranges::copy(ours->gradients, delivered.begin());
  ours->delivered = delivered;
  return true;
}

void PeersDrop(PeersOurs* ours) { std::unique_ptr<PeersOurs>(ours).reset(); }

int PeersThreads(const PeersOurs* ours) { return ours->pool->threads(); }

// Runs one step of AdamW over all blocks.
void PeersStep(PeersOurs* ours) { ours->blocks->Run(AdamPass::Hash::kOff); }

// Checks the gradients of one rank, sums their squares and makes them the sums that a step reads, as at their delivery.
void PeersAddGradients(PeersOurs* ours) {
  const forebay::daemon::AddGradients action{
      .dtype = ours->type, .sum_dtype = ours->type, .assign = true};
  const uint64_t elems = ours->gradients.size() / forebay::protocol::SizeBytes(ours->type);
  RunOnParts(*ours->pool, elems, [&](forebay::daemon::ElemRange part) {
    FOREBAY_CHECK(
        forebay::daemon::RunAddGradients(action, part, {&ours->delivered, 1}, ours->gradients)
            .culprit == 0);
  });
}

// Runs the limit loop for `work` once over `planes`, on the threads of `ours`.
void PeersTouch(PeersOurs* ours, int work, const PeersPlanes* planes) {
  const PeersPlanes& all = *planes;
  const auto threads = static_cast<size_t>(ours->pool->threads());
  RunOnAll(*ours->pool, [&](int task) {
    const size_t lines = all.n / kLineElems;
    const size_t begin = lines * static_cast<size_t>(task) / threads * kLineElems;
    const size_t end = static_cast<size_t>(task) + 1 == threads
                           ? all.n
                           : lines * (static_cast<size_t>(task) + 1) / threads * kLineElems;
    const size_t n = end - begin;
    if (work == kWorkFp32) {
      forebay::peers::TouchAsFp32(n, static_cast<const float*>(all.grad) + begin,
                                  all.master + begin, all.m + begin, all.v + begin);
    } else if (work == kWorkExact) {
      forebay::peers::TouchAsExact(n, static_cast<const uint16_t*>(all.grad) + begin,
                                   static_cast<uint16_t*>(all.weights) + begin,
                                   all.remainder + begin, all.m + begin, all.v + begin);
    } else {
      forebay::peers::TouchAsMaster(n, static_cast<const uint16_t*>(all.grad) + begin,
                                    all.master + begin, all.m + begin, all.v + begin,
                                    static_cast<uint16_t*>(all.weights) + begin);
    }
  });
}

PeersHold* PeersHoldMake(const int* cpus, size_t cpu_count) {
  auto hold = std::make_unique<PeersHold>();
  hold->pool = MakePool(cpus, cpu_count);
  return hold->pool == nullptr ? nullptr : hold.release();
}

void PeersHoldBegin(PeersHold* hold) {
  hold->held = true;
  for (int i = 0; i < hold->pool->threads(); ++i) {
    (void)hold->pool->TryPost([hold] {
      while (hold->held) {
      }
    });
  }
}

void PeersHoldEnd(PeersHold* hold) { hold->held = false; }

// Returns the name of the kernels' instruction set. The text is valid until the next call.
const char* PeersTarget() {
  static std::string target;
  target = forebay::cpu_adam::ChosenTarget();
  return target.c_str();
}

}  // extern "C"
