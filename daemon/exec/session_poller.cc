// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/session_poller.h"

#include <utility>

#include "protocol/os/status_macros.h"

namespace forebay::daemon {

SessionPoller::SessionPoller(nvme::IoEngine& engine, Callbacks callbacks)
    : engine_(engine), callbacks_(std::move(callbacks)) {}

absl::Status SessionPoller::Add(SessionId id, protocol::ServerChannel& channel) {
  RETURN_IF_ERROR(engine_.WatchEventFd(channel.wait_fd(), kTokenTag | id));
  sessions_.emplace(id, Session{.channel = &channel});
  return absl::OkStatus();
}

void SessionPoller::Remove(SessionId id) {
  const auto node = sessions_.extract(id);
  if (!node.empty()) engine_.UnwatchEventFd(node.mapped().channel->wait_fd());
}

void SessionPoller::OnCompletion(const nvme::Completion& completion) {
  if ((completion.token & kTokenTag) != kTokenTag) return;  // a token of another queue
  const auto found = sessions_.find(completion.token & ~kTokenTag);
  if (found == sessions_.end()) return;
  if (found->second.asleep) found->second.channel->EndSleep();
  found->second.asleep = false;
}

bool SessionPoller::Poll() {
  polled_.clear();  // a command may remove sessions: by id, not by iterator
  for (const auto& [id, session] : sessions_) {
    if (!session.asleep) polled_.push_back(id);
  }
  bool more = false;
  for (const SessionId id : polled_) more |= PollOne(id);
  return more;
}

bool SessionPoller::PollOne(SessionId id) {
  for (int i = 0; i < kCommandsPerTurn; ++i) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end()) return false;
    Session& session = found->second;
    const auto command = session.channel->Receive();
    if (!command.ok()) {
      callbacks_.broken(id, command.status());
      return false;
    }
    if (!command->has_value()) {
      const auto sleeps = session.channel->PrepareSleep();
      if (!sleeps.ok()) {
        callbacks_.broken(id, sleeps.status());
        return false;
      }
      session.asleep = *sleeps;
      return !*sleeps;
    }
    callbacks_.arrived({.session = id, .command = **command});
  }
  return true;
}

}  // namespace forebay::daemon
