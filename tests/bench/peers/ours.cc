// What tests/bench/peers/run calls through ctypes: our fused pass and the limit loops, on the
// buffers that the peers use. No header: kernels.py declares these functions for Python.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu_adam/step_scalars.h"
#include "cpu_adam/targets.h"
#include "cpu_adam/update_kernel.h"
#include "cpu_adam/worker_pool.h"
#include "daemon/exec/block_tasks.h"
#include "tests/bench/peers/limit.h"
#include "tools/forebay/bench_workers.h"

using forebay::cpu_adam::Gradient;
using forebay::cpu_adam::MakeStepScalars;
using forebay::cpu_adam::StatePlanes;
using forebay::cpu_adam::WorkerPool;
using forebay::daemon::kPartElems;
using forebay::protocol::DType;
using forebay::protocol::HyperParams;
using forebay::protocol::Optimizer;
using forebay::protocol::StateFormat;
using forebay::tools::RunOnAll;

namespace {

constexpr size_t kLineElems = 64;  // a whole number of cache lines of every plane

// Names of a case as Python says them.
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

// The planes of n elements. `weights` is float32 (kWorkFp32) or bfloat16; a plane that the work does
// not have is null, or not looked at.
struct PeersPlanes {
  uint64_t n;
  void* weights;
  float* master;
  int16_t* remainder;
  float* m;
  float* v;
  const void* grad;
};

// One parameter.
struct PeersPart {
  size_t n;
  Gradient grad;
  StatePlanes state;
};

// Threads, one bound to each of the CPUs, and the parameters that they update.
struct PeersOurs {
  std::unique_ptr<WorkerPool> pool;
  StateFormat format;
  HyperParams hyper;
  std::vector<PeersPart> parts;
};

// Threads that compute without touching memory, so that nobody else does on their CPUs.
struct PeersHold {
  std::unique_ptr<WorkerPool> pool;
  std::atomic<bool> held = false;
};

// Null, with a line on stderr, where the threads cannot be had.
PeersOurs* PeersMake(int work, const int* cpus, size_t cpu_count, const PeersPlanes* planes,
                     size_t plane_count, double lr, double weight_decay) {
  auto pool = MakePool(cpus, cpu_count);
  if (pool == nullptr) return nullptr;
  auto ours = std::make_unique<PeersOurs>();
  ours->pool = std::move(pool);
  ours->format = FormatOf(work);
  ours->hyper = HyperParams{
      .lr = lr, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = weight_decay};
  const DType grad_type = work == kWorkFp32 ? DType::kFloat32 : DType::kBFloat16;
  for (const PeersPlanes& one : std::vector<PeersPlanes>(planes, planes + plane_count)) {
    const StatePlanes state{.weights = one.weights,
                            .remainder = one.remainder,
                            .moments = {one.m, one.v},
                            .master = one.master};
    ours->parts.push_back({.n = one.n, .grad = {one.grad, grad_type}, .state = state});
  }
  return ours.release();
}

void PeersDrop(PeersOurs* ours) { std::unique_ptr<PeersOurs>(ours).reset(); }

int PeersThreads(const PeersOurs* ours) { return ours->pool->threads(); }

// Step t >= 1 of AdamW over all parameters, cut as the daemon cuts its blocks: whoever is free takes
// the next range. Returns how many masters are not finite.
uint64_t PeersStep(PeersOurs* ours, uint64_t t, float grad_scale) {
  const auto scalars = MakeStepScalars(Optimizer::kAdamW, ours->hyper, t, grad_scale);
  uint64_t ranges = 0;
  for (const PeersPart& part : ours->parts) ranges += (part.n + kPartElems - 1) / kPartElems;
  std::atomic<uint64_t> next = 0, overflows = 0;
  RunOnAll(*ours->pool, [&](int) {
    uint64_t range = 0;  // the first of the current parameter
    auto part = ours->parts.begin();
    for (uint64_t mine = next++; mine < ranges; mine = next++) {
      while (mine >= range + (part->n + kPartElems - 1) / kPartElems) {
        range += (part->n + kPartElems - 1) / kPartElems;
        ++part;
      }
      const size_t begin = (mine - range) * kPartElems;
      const size_t n = std::min<size_t>(kPartElems, part->n - begin);
      const auto* const grad = static_cast<const std::byte*>(part->grad.data);
      const size_t width = forebay::protocol::SizeBytes(part->grad.type);
      overflows += Update(Optimizer::kAdamW, ours->format, scalars, n,
                          {grad + begin * width, part->grad.type},
                          Advance(part->state, ours->format, begin));
    }
  });
  return overflows;
}

// The limit loop of a work over one run of planes, on the threads of `ours`.
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

// The instruction set of the kernels; valid until the next call.
const char* PeersTarget() {
  static std::string target;
  target = forebay::cpu_adam::ChosenTarget();
  return target.c_str();
}

}  // extern "C"
