// What tests/bench/peers/run calls through ctypes: our fused pass and the limit loops, on the
// buffers that the peers use. No header: kernels.py declares these functions for Python.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu_adam/optimizer.h"
#include "cpu_adam/parallel_update.h"
#include "cpu_adam/targets.h"
#include "cpu_adam/update_kernel.h"
#include "cpu_adam/worker_pool.h"
#include "tests/bench/peers/limit.h"

using forebay::cpu_adam::GradType;
using forebay::cpu_adam::Hyper;
using forebay::cpu_adam::MakeStepScalars;
using forebay::cpu_adam::PartitionUpdate;
using forebay::cpu_adam::Rule;
using forebay::cpu_adam::StateFormat;
using forebay::cpu_adam::StatePlanes;
using forebay::cpu_adam::WorkerTeam;

namespace {

constexpr size_t kLineElems = 64;  // a whole number of cache lines of every plane

// Names of a case as Python says them.
enum Work : int { kWorkFp32 = 0, kWorkExact = 1, kWorkMaster = 2 };

StateFormat FormatOf(int work) {
  if (work == kWorkExact) return StateFormat::kExact;
  return work == kWorkMaster ? StateFormat::kFp32Bf16 : StateFormat::kFp32;
}

std::unique_ptr<WorkerTeam> MakeTeam(const int* cpus, size_t count) {
  auto team = WorkerTeam::Create(
      {.threads = static_cast<int>(count), .cpus = std::vector<int>(cpus, cpus + count)});
  if (team.ok()) return *std::move(team);
  std::fprintf(stderr, "%s\n", team.status().ToString().c_str());
  return nullptr;
}

}  // namespace

extern "C" {

// The planes of n elements. `image` is float32 (kWorkFp32) or bfloat16; a plane that the work does
// not have is null, or not looked at.
struct PeersPlanes {
  uint64_t n;
  void* image;
  float* master;
  int16_t* remainder;
  float* m;
  float* v;
  const void* grad;
};

// Threads, one bound to each of the processors, and the partitions that they update.
struct PeersOurs {
  std::unique_ptr<WorkerTeam> team;
  StateFormat format;
  Hyper hyper;
  std::vector<PartitionUpdate> partitions;
};

// Threads that compute without touching memory, so that nobody else does on their processors.
struct PeersHold {
  std::unique_ptr<WorkerTeam> team;
  std::atomic<bool> held = false;
};

// Null, with a line on stderr, where the threads cannot be had.
PeersOurs* PeersMake(int work, const int* cpus, size_t cpu_count, const PeersPlanes* planes,
                     size_t plane_count, double lr, double weight_decay) {
  auto team = MakeTeam(cpus, cpu_count);
  if (team == nullptr) return nullptr;
  auto ours = std::make_unique<PeersOurs>();
  ours->team = std::move(team);
  ours->format = FormatOf(work);
  ours->hyper = Hyper{.lr = lr, .weight_decay = weight_decay};
  const GradType grad_type = work == kWorkFp32 ? GradType::kFp32 : GradType::kBf16;
  for (const PeersPlanes& one : std::vector<PeersPlanes>(planes, planes + plane_count)) {
    const StatePlanes state{.image = one.image,
                            .remainder = one.remainder,
                            .moments = {one.m, one.v},
                            .master = one.master};
    ours->partitions.push_back(
        {.scalars = {}, .n = one.n, .grad = {one.grad, grad_type}, .from = state, .to = state});
  }
  return ours.release();
}

void PeersDrop(PeersOurs* ours) { std::unique_ptr<PeersOurs>(ours).reset(); }

int PeersThreads(const PeersOurs* ours) { return ours->team->threads(); }

// Step t >= 1 of AdamW over all partitions. Returns how many masters are not finite.
uint64_t PeersStep(PeersOurs* ours, uint64_t t, float grad_scale) {
  const auto scalars = MakeStepScalars(Rule::kAdamW, ours->hyper, t, grad_scale);
  for (PartitionUpdate& partition : ours->partitions) partition.scalars = scalars;
  return UpdateAll(*ours->team, Rule::kAdamW, ours->format, ours->partitions);
}

// The limit loop of a work over one run of planes, on the threads of `ours`.
void PeersTouch(PeersOurs* ours, int work, const PeersPlanes* planes) {
  const PeersPlanes& all = *planes;
  const auto threads = static_cast<size_t>(ours->team->threads());
  RunOnAll(*ours->team, [&](int task) {
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
                                   static_cast<uint16_t*>(all.image) + begin, all.remainder + begin,
                                   all.m + begin, all.v + begin);
    } else {
      forebay::peers::TouchAsMaster(n, static_cast<const uint16_t*>(all.grad) + begin,
                                    all.master + begin, all.m + begin, all.v + begin,
                                    static_cast<uint16_t*>(all.image) + begin);
    }
  });
}

PeersHold* PeersHoldMake(const int* cpus, size_t cpu_count) {
  auto hold = std::make_unique<PeersHold>();
  hold->team = MakeTeam(cpus, cpu_count);
  return hold->team == nullptr ? nullptr : hold.release();
}

void PeersHoldBegin(PeersHold* hold) {
  hold->held = true;
  for (int i = 0; i < hold->team->threads(); ++i) {
    (void)hold->team->TryPost([hold] {
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
