// Commands and the completions that answer them: tags, the daemon's death. Nothing here waits for an
// answer.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <memory_resource>
#include <unordered_map>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/channel.h"
#include "protocol/wire.h"

namespace forebay::client::internal {

// Threads  One at a time. Completions are handled on the thread that calls Poll.
class CommandPort {
 public:
  struct Options {
    std::unique_ptr<protocol::ClientChannel> channel = {};
    // Readable once the daemon is dead; -1: unknown.
    int daemon_pidfd = -1;
    // Readable once the connection is lost; -1: unknown.
    int gone_fd = -1;
    // Message and hint behind a failed completion, or (tag 0) why the session has ended; asks the daemon.
    std::function<absl::Status(const protocol::Completion&)> explain = {};
  };

  // The completion, and its error as a status.
  using OnDone = absl::AnyInvocable<void(const protocol::Completion&, const absl::Status&)>;

  enum class Pause : uint8_t {
    kWoken,        // something arrived, or there was no need to sleep
    kUndisturbed,  // the time was up, or a signal arrived
  };

  // What it notes of commands is in `memory`, which outlives it.
  CommandPort(Options options, std::pmr::memory_resource* memory);

  // Writes the command under a tag of its own, and takes `on_done`; false, and nothing done, while
  // kRingEntries are in flight. `on_done` is called once, unless the session ends first.
  //
  // Errors  E_DAEMON_GONE, E_RING, E_FENCED or another reason why the session has ended: permanently.
  absl::StatusOr<bool> TrySend(protocol::Command command, OnDone& on_done);

  // Handles the completions that have arrived. Errors as TrySend.
  absl::Status Poll();

  // Poll for calls that neither send nor wait: E_DAEMON_GONE where the daemon is dead. Completions
  // that the daemon wrote before its death are handled first.
  absl::Status PollAlive();

  // Sleeps until something arrives, the daemon dies, a signal comes or `limit` is over.
  absl::StatusOr<Pause> Sleep(std::chrono::milliseconds limit);

  // Every later call returns `reason`; the channel and the descriptors are used no more.
  void Close(const absl::Status& reason);

  uint64_t commands() const { return commands_; }
  uint64_t sleeps() const { return sleeps_; }

 private:
  absl::Status Break(absl::Status status);
  bool DaemonGone() const;

  Options options_;
  std::pmr::unordered_map<uint64_t, OnDone> pending_;  // at most kRingEntries
  uint64_t next_tag_ = 1;
  uint64_t commands_ = 0;
  uint64_t sleeps_ = 0;
  absl::Status broken_;
};

// E_DAEMON_GONE as every call of a session reports it.
absl::Status DaemonGoneError();

}  // namespace forebay::client::internal
