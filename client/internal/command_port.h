// SPDX-License-Identifier: Apache-2.0
// Commands and the completions that answer them: tags, the daemon's death and restart. Nothing here waits
// for an answer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <memory_resource>
#include <set>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/channel.h"
#include "protocol/wire.h"

namespace forebay::client::internal {

// Returns a command with zeros in its other fields.
inline protocol::Command MakeCommand(protocol::Op op, uint32_t partition = 0) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(op);
  command.partition = partition;
  return command;
}

// Sends commands to the daemon and handles their completions.
//
// Restart  After the daemon has ended the channel for its restart, or has died and its job has not, commands are
//          retained, and none of these calls fails, until Resume() sends the commands or Close() drops them.
// Threads  One at a time. Completions are handled on the thread that calls Poll.
class CommandPort {
 public:
  struct Options {
    std::unique_ptr<protocol::ClientChannel> channel = {};
    // Readable once the daemon is dead; -1: unknown.
    int daemon_pidfd = -1;
    // Readable once the connection is lost; -1: unknown.
    int gone_fd = -1;
    // True if the job outlives its daemon: after the daemon's death the session attaches again to the next daemon.
    bool outlives_daemon = false;
    // Asks the daemon for the message and hint of a failed completion, or (tag 0) for the reason why the session has ended.
    std::function<absl::Status(const protocol::Completion&)> explain = {};
  };

  // Receives the completion of a command, and its error as a status.
  using OnDone = absl::AnyInvocable<void(const protocol::Completion&, const absl::Status&)>;

  enum class Pause : uint8_t {
    kWoken,        // something arrived, or no sleep was needed
    kUndisturbed,  // nothing arrived until the time was up or a signal came
  };

  // Counters to which the port adds. They outlive the port.
  struct Counts {
    std::atomic<uint64_t>& commands;
    std::atomic<uint64_t>& sleeps;
  };

  // Allocates the records of commands from `memory`, which must outlive the port.
  CommandPort(Options options, const Counts& counts, std::pmr::memory_resource* memory);

  // Sends the command under a new tag, and moves from `on_done`, which is called once unless the session ends first. While the
  // daemon is restarted, the command is retained for Resume(). Returns false, and does nothing, while kRingEntries commands are
  // in flight. If the command releases a lease that an earlier daemon granted and this one does not know, it is not sent, and
  // `on_done` is called at once.
  //
  // Errors  E_DAEMON_GONE, E_RING, E_FENCED or another reason why the session has ended: permanently.
  absl::StatusOr<bool> TrySend(protocol::Command command, OnDone& on_done);

  // Handles the completions that have arrived. Errors as TrySend.
  absl::Status Poll();

  // Polls, for calls that neither send nor wait. Completions that the daemon wrote before its death are handled first. Then
  // returns E_DAEMON_GONE if the daemon is dead.
  absl::Status PollAlive();

  // Sleeps until something arrives, the daemon dies, a signal comes or `limit` is over.
  absl::StatusOr<Pause> Sleep(std::chrono::milliseconds limit);

  // True if the daemon is being restarted and all completions that it sent were handled. The channel is used no more.
  bool is_restarting() const { return is_restarting_ && broken_.ok(); }
  // Returns whether a command of this kind was sent and not answered.
  bool IsPending(protocol::Op op) const;
  // Continues with the next daemon's channel: sends the commands without an answer again, in order, under the same tags.
  // Completes releases of leases that the new daemon does not know. kGoOn: the new daemon has all of leases_held(); kEnd: it
  // has none. Errors as TrySend.
  enum class Leases : uint8_t { kGoOn, kEnd };
  absl::Status Resume(Options options, Leases leases);
  // Leases that were held, and not being released, when the newest restart was noticed.
  const std::vector<uint64_t>& leases_held() const { return held_then_; }

  // Makes every later call return `reason`. Drops the commands in flight, the channel and the descriptors.
  void Close(const absl::Status& reason);

  uint64_t newest_tag() const { return next_tag_ - 1; }

 private:
  struct Pending {
    protocol::Command command;
    OnDone on_done;
  };

  void SetRestarting();
  absl::Status Break(absl::Status status);
  bool DaemonGone() const;
  bool DaemonDied() const;
  absl::StatusOr<bool> SendOrKeep(const protocol::Command& command);
  void Handle(const protocol::Completion& completion, const absl::Status& status, OnDone& on_done);
  // True if the command releases a lease that this daemon does not know: an earlier daemon granted it and it was not retained,
  // or it is kAheadLease, which is no lease. Ids of leases rise across a restart.
  bool IsStaleRelease(const protocol::Command& command) const;
  void GiveBackStale(const protocol::Command& command, OnDone& on_done);

  Options options_;
  const Counts counts_;
  std::pmr::map<uint64_t, Pending> pending_;  // keyed by tag; at most kRingEntries
  bool is_restarting_ = false;
  uint64_t newest_lease_ = 0;
  uint64_t newest_stale_lease_ = 0;
  std::pmr::set<uint64_t> held_;     // leases
  std::vector<uint64_t> held_then_;  // value of held_ when the newest restart was noticed
  uint64_t next_tag_ = 1;
  absl::Status broken_;
};

// E_DAEMON_GONE as every call of a session reports it.
absl::Status DaemonGoneError();

}  // namespace forebay::client::internal
