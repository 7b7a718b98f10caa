#include "client/internal/command_port.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

bool Readable(int fd) {
  pollfd entry{.fd = fd, .events = POLLIN, .revents = 0};
  return fd >= 0 && ::poll(&entry, 1, 0) > 0;
}

}  // namespace

absl::Status DaemonGoneError() {
  return MakeError(ErrorId::kDaemonGone, "the daemon died or closed the connection");
}

CommandPort::CommandPort(Options options, std::pmr::memory_resource* memory)
    : options_(std::move(options)), pending_(memory) {}

absl::StatusOr<bool> CommandPort::TrySend(protocol::Command command, OnDone& on_done) {
  RETURN_IF_ERROR(PollAlive());
  command.tag = next_tag_;
  const absl::StatusOr<bool> sent = options_.channel->Send(command);
  if (!sent.ok()) {
    broken_ = sent.status();
    return broken_;
  }
  if (!*sent) return false;
  pending_.emplace(next_tag_, std::move(on_done));
  ++next_tag_;
  ++commands_;
  return true;
}

absl::Status CommandPort::Poll() {
  RETURN_IF_ERROR(broken_);
  while (true) {
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
    pending.mapped()(completion, status);
  }
  return absl::OkStatus();
}

absl::Status CommandPort::PollAlive() {
  // Before the ring is read: what the daemon answered before its death still counts.
  const bool gone = DaemonGone();
  RETURN_IF_ERROR(Poll());
  if (gone) broken_ = DaemonGoneError();
  return broken_;
}

absl::StatusOr<CommandPort::Pause> CommandPort::Sleep(std::chrono::milliseconds limit) {
  absl::StatusOr<bool> may_sleep = options_.channel->PrepareSleep();
  if (!may_sleep.ok()) return Break(may_sleep.status());
  if (!*may_sleep) return Pause::kWoken;
  std::array<pollfd, 3> entries{
      pollfd{.fd = options_.channel->wait_fd(), .events = POLLIN, .revents = 0},
      pollfd{.fd = options_.daemon_pidfd, .events = POLLIN, .revents = 0},
      pollfd{.fd = options_.gone_fd, .events = POLLIN, .revents = 0}};
  const auto bounded = std::min(limit, std::chrono::milliseconds(INT_MAX));
  const int woken = ::poll(entries.data(), entries.size(), static_cast<int>(bounded.count()));
  ++sleeps_;
  options_.channel->EndSleep();
  return woken > 0 ? Pause::kWoken : Pause::kUndisturbed;
}

// The channel knows that the session has ended; the daemon knows why.
absl::Status CommandPort::Break(absl::Status status) {
  broken_ = std::move(status);
  if (protocol::IdOf(broken_) == ErrorId::kFenced) {
    protocol::Completion over{};  // tag 0: no command has it
    over.error = static_cast<uint16_t>(ErrorId::kFenced);
    broken_ = options_.explain(over);
  }
  return broken_;
}

void CommandPort::Close(const absl::Status& reason) {
  broken_ = reason;
  pending_.clear();
  options_ = {};
}

bool CommandPort::DaemonGone() const {
  return Readable(options_.daemon_pidfd) || Readable(options_.gone_fd);
}

}  // namespace forebay::client::internal
