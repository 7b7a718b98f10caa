// SPDX-License-Identifier: Apache-2.0
// Runs work on all threads of a pool at once.
#pragma once

#include "absl/functional/function_ref.h"
#include "cpu_adam/worker_pool.h"

namespace forebay::tools {

// Runs body(0) … body(pool.threads() - 1), each as one task; returns when all have returned. A task
// that the queue has no room for is run by the caller.
//
// Threads  Any but the pool's own, which would wait for themselves. A thread of the pool may run
//          several of the tasks.
void RunOnAll(cpu_adam::WorkerPool& pool, absl::FunctionRef<void(int task)> body);

}  // namespace forebay::tools
