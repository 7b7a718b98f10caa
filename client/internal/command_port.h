// Commands with somebody waiting for their completions: numbering, waiting, the daemon's death.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/internal/deadline.h"
#include "client/internal/idle_core.h"
#include "protocol/channel.h"
#include "protocol/wire.h"

namespace forebay::client::internal {

// Threads  One at a time. Completions are handled on the thread that calls Poll or Wait.
class CommandPort {
 public:
  struct Options {
    std::unique_ptr<protocol::ClientChannel> channel;
    int daemon_pidfd = -1;  // readable once the daemon is dead; -1: unknown
    int gone_fd = -1;       // readable once the connection is lost; -1: unknown
    // Text and hint behind a failed completion, or (tag 0) why the session is over; asks the daemon.
    std::function<absl::Status(const protocol::Completion&)> explain;
  };

  // The completion, and its error as a status.
  using OnDone = std::function<void(const protocol::Completion&, const absl::Status&)>;

  explicit CommandPort(Options options);

  // Writes the command under a tag of its own, waiting while kRingEntries are out. `on_done` is
  // called once, unless the port ends or breaks first.
  absl::Status Send(protocol::Command command, const WaitLimits& limits, OnDone on_done);

  // Handles what has come in. Errors as Wait, but for E_TIMEOUT and E_INTERRUPTED.
  absl::Status Poll();

  // The same for calls that neither send nor wait: E_DAEMON_GONE where the daemon is dead.
  absl::Status PollAlive();

  // Handles completions until `done()` is true. Errors are checked only while it is not.
  //
  // Errors  E_DAEMON_GONE, E_RING, E_FENCED or why else the session is over: for good. E_TIMEOUT, E_INTERRUPTED.
  absl::Status Wait(const std::function<bool()>& done, const WaitLimits& limits);

  uint64_t commands() const { return commands_; }
  uint64_t sleeps() const { return sleeps_; }

 private:
  enum class Pause : uint8_t {
    kWoken,        // something came in, or nobody slept
    kUndisturbed,  // the time was up, or a signal came
  };

  absl::StatusOr<Pause> Sleep(const WaitLimits& limits);
  absl::Status Break(absl::Status status);
  bool DaemonGone() const;

  Options options_;
  IdleCore idle_core_;
  std::unordered_map<uint64_t, OnDone> pending_;  // at most kRingEntries
  uint64_t next_tag_ = 1;
  uint64_t commands_ = 0;
  uint64_t sleeps_ = 0;
  absl::Status broken_;
};

// E_DAEMON_GONE as every call of a session reports it.
absl::Status DaemonGoneError();

}  // namespace forebay::client::internal
