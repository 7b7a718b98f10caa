// SPDX-License-Identifier: Apache-2.0
// Chooses the IoEngine of this machine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/io/io_engine.h"

namespace forebay::nvme {

enum class EngineChoice : uint8_t { kAuto, kUring, kThreads };

struct EngineOptions {
  EngineChoice choice = EngineChoice::kAuto;
  uint32_t depth = 128;  // transfers the kernel holds at once, 1 to IoEngine::kBacklogMax
  uint32_t threads = 4;  // threads of the thread engine, 1 to 64
};

struct ChosenEngine {
  std::unique_ptr<IoEngine> engine;
  std::string reason;  // why io_uring is not used; empty if it is used, or if kThreads was chosen
};

// Returns OK if this process can create an io_uring and a no-op through the ring completes.
absl::Status ProbeUring();

// Creates the IoEngine. kAuto uses io_uring if ProbeUring() returns OK, otherwise threads.
//
// Errors  E_UNSUPPORTED  kUring was chosen, but io_uring does not work on this machine; the cause.
absl::StatusOr<ChosenEngine> CreateIoEngine(const EngineOptions& options = {});

}  // namespace forebay::nvme
