// SPDX-License-Identifier: Apache-2.0
// Runs work on all threads of a pool at once.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "cpu_adam/worker_pool.h"
#include "daemon/exec/block_tasks.h"

namespace forebay::tools {

// Runs body(0) … body(pool.threads() - 1), each as one task; returns when all have returned. A task
// that the queue has no room for is run by the caller.
//
// Threads  Any but the pool's own, which would wait for themselves. A thread of the pool may run
//          several of the tasks.
void RunOnAll(cpu_adam::WorkerPool& pool, absl::FunctionRef<void(int task)> body);

// Runs body on parts of kPartElems elements, as the daemon's workers do: a free thread takes the next part.
void RunOnParts(cpu_adam::WorkerPool& pool, uint64_t elems,
                absl::FunctionRef<void(daemon::ElemRange part)> body);

}  // namespace forebay::tools
