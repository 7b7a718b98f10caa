// SPDX-License-Identifier: Apache-2.0
#include "nvme/io/engine_factory.h"

#include <liburing.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nvme/io/thread_engine.h"
#include "nvme/io/uring_engine.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::nvme {

absl::Status ProbeUring() {
  io_uring ring{};
  int rc = io_uring_queue_init(4, &ring, 0);
  if (rc != 0) return absl::UnavailableError(protocol::ErrnoText("io_uring_setup", -rc));
  io_uring_prep_nop(io_uring_get_sqe(&ring));
  io_uring_cqe* cqe = nullptr;
  __kernel_timespec limit{.tv_sec = 5, .tv_nsec = 0};
  rc = io_uring_submit_and_wait_timeout(&ring, &cqe, 1, &limit, nullptr);
  const bool completed = rc >= 0 && cqe != nullptr && cqe->res == 0;
  io_uring_queue_exit(&ring);
  if (completed) return absl::OkStatus();
  return absl::UnavailableError(protocol::ErrnoText("io_uring_enter", rc < 0 ? -rc : EIO));
}

absl::StatusOr<ChosenEngine> CreateIoEngine(const EngineOptions& options) {
  ChosenEngine chosen;
  if (options.choice != EngineChoice::kThreads) {
    absl::Status status = ProbeUring();
    if (status.ok()) {
      absl::StatusOr<std::unique_ptr<UringEngine>> engine = UringEngine::Create(options.depth);
      if (engine.ok()) {
        chosen.engine = *std::move(engine);
        return chosen;
      }
      status = engine.status();
      if (absl::IsInvalidArgument(status)) return status;
    }
    chosen.reason = std::string(status.message());
    if (options.choice == EngineChoice::kUring) {
      return protocol::MakeError(
          protocol::ErrorId::kUnsupported,
          absl::StrCat("io_uring does not work here: ", chosen.reason),
          "allow io_uring (kernel.io_uring_disabled=0, no seccomp filter), or set io.engine to "
          "\"threads\" or \"auto\"");
    }
  }
  absl::StatusOr<std::unique_ptr<ThreadEngine>> engine = ThreadEngine::Create(options.threads);
  if (absl::IsResourceExhausted(engine.status())) {
    return protocol::MakeError(protocol::ErrorId::kLimit, std::string(engine.status().message()),
                               "raise the daemon's limits of open files and threads (LimitNOFILE=, "
                               "TasksMax=)");
  }
  RETURN_IF_ERROR(engine.status());
  chosen.engine = *std::move(engine);
  return chosen;
}

}  // namespace forebay::nvme
