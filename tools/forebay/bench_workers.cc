// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_workers.h"

#include <algorithm>
#include <atomic>
#include <latch>
#include <utility>

namespace forebay::tools {

void RunOnAll(cpu_adam::WorkerPool& pool, absl::FunctionRef<void(int task)> body) {
  struct Region {
    absl::FunctionRef<void(int task)> body;
    std::latch left;
  } region{body, std::latch(pool.threads())};
  for (int task = 0; task < pool.threads(); ++task) {
    // Two words: a task holds them without allocation.
    cpu_adam::WorkerPool::Task run = [&region, task] {
      region.body(task);
      region.left.count_down();
    };
    // NOLINTNEXTLINE(bugprone-use-after-move): a full pool leaves the task untouched
    if (!pool.TryPost(std::move(run))) run();
  }
  region.left.wait();
}

void RunOnParts(cpu_adam::WorkerPool& pool, uint64_t elems,
                absl::FunctionRef<void(daemon::ElemRange part)> body) {
  std::atomic<uint64_t> next = 0;
  RunOnAll(pool, [&](int) {
    for (uint64_t begin = next.fetch_add(daemon::kPartElems); begin < elems;
         begin = next.fetch_add(daemon::kPartElems)) {
      body({begin, std::min(begin + daemon::kPartElems, elems)});
    }
  });
}

}  // namespace forebay::tools
