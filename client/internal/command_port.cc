// SPDX-License-Identifier: Apache-2.0
#include "client/internal/command_port.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

constexpr std::chrono::milliseconds kDeathLimit{2000};

bool Readable(int fd) {
  pollfd entry{.fd = fd, .events = POLLIN, .revents = 0};
  return fd >= 0 && ::poll(&entry, 1, 0) > 0;
}

}  // namespace

absl::Status DaemonGoneError() {
  return MakeError(ErrorId::kDaemonGone, "the daemon died or closed the connection");
}

CommandPort::CommandPort(Options options, const Counts& counts, std::pmr::memory_resource* memory)
    : options_(std::move(options)), counts_(counts), pending_(memory), held_(memory) {}

bool CommandPort::IsStaleRelease(const protocol::Command& command) const {
  if (command.op != static_cast<uint16_t>(Op::kRelease) || command.lease_id == 0) return false;
  if (command.lease_id == protocol::kAheadLease) return true;
  return command.lease_id <= newest_stale_lease_ &&
         !std::ranges::binary_search(held_then_, command.lease_id);
}

void CommandPort::GiveBackStale(const protocol::Command& command, OnDone& on_done) {
  protocol::Completion completion{};
  completion.tag = command.tag;
  completion.op = command.op;
  on_done(completion, absl::OkStatus());
}

absl::StatusOr<bool> CommandPort::SendOrKeep(const protocol::Command& command) {
  if (is_restarting()) return pending_.size() < protocol::kRingEntries;
  const absl::StatusOr<bool> sent = options_.channel->Send(command);
  if (!sent.ok()) {
    broken_ = sent.status();
    return broken_;
  }
  if (*sent) ++counts_.commands;
  return sent;
}

absl::StatusOr<bool> CommandPort::TrySend(protocol::Command command, OnDone& on_done) {
  RETURN_IF_ERROR(PollAlive());
  if (IsStaleRelease(command)) {
    GiveBackStale(command, on_done);
    return true;
  }
  command.tag = next_tag_;
  ASSIGN_OR_RETURN(const bool sent, SendOrKeep(command));
  if (!sent) return false;
  if (command.op == static_cast<uint16_t>(Op::kRelease)) held_.erase(command.lease_id);
  pending_.emplace(next_tag_, Pending{.command = command, .on_done = std::move(on_done)});
  ++next_tag_;
  return true;
}

absl::Status CommandPort::Poll() {
  RETURN_IF_ERROR(broken_);
  while (!is_restarting_) {
    absl::StatusOr<std::optional<protocol::Completion>> received = options_.channel->Receive();
    if (!received.ok()) return Break(received.status());
    if (!received->has_value()) break;
    const protocol::Completion& completion = **received;
    auto pending = pending_.extract(completion.tag);
    if (pending.empty()) {
      broken_ =
          MakeError(ErrorId::kProtocol, absl::StrCat("a completion with tag ", completion.tag,
                                                     " answers none of this session's commands"));
      return broken_;
    }
    const absl::Status status =
        completion.error == 0 ? absl::OkStatus() : options_.explain(completion);
    Handle(completion, status, pending.mapped().on_done);
  }
  return absl::OkStatus();
}

void CommandPort::Handle(const protocol::Completion& completion, const absl::Status& status,
                         OnDone& on_done) {
  const bool is_fetch = completion.op == static_cast<uint16_t>(Op::kFetch);
  const bool is_held = completion.lease_id != 0 && completion.lease_id != protocol::kAheadLease;
  if (status.ok() && is_fetch && is_held) {
    newest_lease_ = std::max(newest_lease_, completion.lease_id);
    held_.insert(completion.lease_id);
  }
  on_done(completion, status);
}

absl::Status CommandPort::PollAlive() {
  if (is_restarting()) return absl::OkStatus();
  // Looks for the daemon's death before the ring is read: answers from before its death still count.
  const bool gone = DaemonGone();
  RETURN_IF_ERROR(Poll());
  if (!gone || is_restarting_) return broken_;
  if (options_.outlives_daemon && DaemonDied()) {
    RETURN_IF_ERROR(Poll());  // the daemon may have ended the session before its death
    SetRestarting();
  } else {
    broken_ = DaemonGoneError();
  }
  return broken_;
}

void CommandPort::SetRestarting() {
  is_restarting_ = true;
  held_then_.assign(held_.begin(), held_.end());
}

absl::StatusOr<CommandPort::Pause> CommandPort::Sleep(std::chrono::milliseconds limit) {
  if (is_restarting()) return Pause::kWoken;
  absl::StatusOr<bool> may_sleep = options_.channel->PrepareSleep();
  if (!may_sleep.ok()) {
    RETURN_IF_ERROR(Break(may_sleep.status()));
    return Pause::kWoken;
  }
  if (!*may_sleep) return Pause::kWoken;
  std::array<pollfd, 3> entries{
      pollfd{.fd = options_.channel->wait_fd(), .events = POLLIN, .revents = 0},
      pollfd{.fd = options_.daemon_pidfd, .events = POLLIN, .revents = 0},
      pollfd{.fd = options_.gone_fd, .events = POLLIN, .revents = 0}};
  const auto bounded = std::min(limit, std::chrono::milliseconds(INT_MAX));
  const int woken = ::poll(entries.data(), entries.size(), static_cast<int>(bounded.count()));
  ++counts_.sleeps;
  options_.channel->EndSleep();
  return woken > 0 ? Pause::kWoken : Pause::kUndisturbed;
}

// The channel knows that the session has ended; the daemon knows why. OK where it is being restarted.
absl::Status CommandPort::Break(absl::Status status) {
  if (protocol::IdOf(status) == ErrorId::kFenced &&
      options_.channel->state() == protocol::ChannelState::kRestarting) {
    SetRestarting();
    return absl::OkStatus();
  }
  broken_ = std::move(status);
  if (protocol::IdOf(broken_) == ErrorId::kFenced) {
    protocol::Completion over{};  // tag 0: no command has it
    over.error = static_cast<uint16_t>(ErrorId::kFenced);
    broken_ = options_.explain(over);
  }
  return broken_;
}

absl::Status CommandPort::Resume(Options options, Leases leases) {
  options_ = std::move(options);
  is_restarting_ = false;
  newest_stale_lease_ = newest_lease_;
  if (leases == Leases::kEnd) {
    held_.clear();
    held_then_.clear();
  }
  for (auto next = pending_.begin(); next != pending_.end();) {
    const auto it = next++;
    if (!IsStaleRelease(it->second.command)) {
      ASSIGN_OR_RETURN(const bool sent, SendOrKeep(it->second.command));
      FOREBAY_CHECK(sent);  // a new ring has room for all of them
      continue;
    }
    auto given_back = pending_.extract(it);
    GiveBackStale(given_back.mapped().command, given_back.mapped().on_done);
  }
  return absl::OkStatus();
}

void CommandPort::Close(const absl::Status& reason) {
  broken_ = reason;
  pending_.clear();
  options_ = {};
}

bool CommandPort::IsPending(Op op) const {
  return std::ranges::any_of(pending_, [op](const auto& pending) {
    return pending.second.command.op == static_cast<uint16_t>(op);
  });
}

// A process that dies closes its connections a moment before it counts as dead; one that lives has ended this session.
bool CommandPort::DaemonDied() const {
  if (options_.daemon_pidfd < 0) return true;
  pollfd entry{.fd = options_.daemon_pidfd, .events = POLLIN, .revents = 0};
  return ::poll(&entry, 1, static_cast<int>(kDeathLimit.count())) > 0;
}

bool CommandPort::DaemonGone() const {
  return Readable(options_.daemon_pidfd) || Readable(options_.gone_fd);
}

}  // namespace forebay::client::internal
