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
  uint32_t threads = 4;  // of the thread engine, 1 to 64
};

struct ChosenEngine {
  std::unique_ptr<IoEngine> engine;
  std::string reason;  // why not io_uring; empty where it is, or where threads were asked for
};

// OK where this process may make an io_uring and a no-op through it completes.
absl::Status ProbeUring();

// kAuto: io_uring wherever ProbeUring() is OK, else threads with the reason.
//
// Errors  E_UNSUPPORTED  kUring was asked for and does not work here; the cause.
absl::StatusOr<ChosenEngine> CreateIoEngine(const EngineOptions& options = {});

}  // namespace forebay::nvme
