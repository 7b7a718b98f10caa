// SPDX-License-Identifier: Apache-2.0
// Continues the session of a rank whose connection was lost and that attaches again.

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "daemon/exec/clock.h"
#include "daemon/exec/executor.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

SessionId Executor::Resolve(SessionId number) const {
  const auto again = reconnected_.find(number);
  const SessionId id = again == reconnected_.end() ? number : again->second;
  const auto found = sessions_.find(id);
  return found != sessions_.end() && found->second.number == number ? id : 0;
}

bool Executor::MayDisconnect(const Session& session) const {
  const bool has_mapped = session.was_mapped || session.request.reattach;
  return session.wait.count() > 0 && session.job_id != 0 && has_mapped && !session.broken &&
         !session.is_stopped && !session.request.reader;
}

SessionId Executor::SessionToGoOn(const AttachRequested& request, const JobName& job) const {
  if (!request.reattach || request.reader || request.grad_arena_inode == 0) return 0;
  for (const auto& [id, session] : sessions_) {
    const bool is_its = session.IsOf(job, request.rank) && session.request.run == request.run;
    if (!is_its || !MayDisconnect(session)) continue;
    if (session.io->grad()->inode() != request.grad_arena_inode) continue;
    const protocol::LayoutSpec& layout = jobs_.Find(session.job_id)->layout->spec();
    if (protocol::Layout::Difference(layout, request.layout->spec()).empty()) return id;
  }
  return 0;
}

void Executor::Disconnect(SessionId id) {
  Session& session = sessions_.at(id);
  const std::chrono::duration<double> wait = session.wait;
  spdlog::info("session {}, {}: the connection is lost; its rank may come back within {} s", id,
               WhoIs(session.request), absl::StrFormat("%.1f", wait.count()));
  disconnected_[id] = MonotonicNs() + static_cast<uint64_t>(session.wait.count());
  poller_.Remove(id);
  session.io->channel().Close(protocol::ChannelState::kRestarting);
  exchange_.Fail([id](const auto& member) { return member.session == id; },
                 MakeError(ErrorId::kFenced, "the connection is lost"));
  auto closed = std::exchange(session.callbacks.closed, [](const absl::Status&) {});
  if (closed) closed(absl::OkStatus());
  Raise(SessionEnded{.session = id, .cause = EndCause::kDisconnected});
}

void Executor::Reconnect(SessionId id, Session again) {
  disconnected_.erase(id);
  Session& session = sessions_.at(id);
  reconnected_.erase(session.number);
  session.number = again.number;
  reconnected_[session.number] = id;
  session.callbacks = std::move(again.callbacks);
  session.wait = again.wait;
  session.request.protocol_version = again.request.protocol_version;
  const SessionMemoryOptions memory{.job = session.request.job,
                                    .rank = RankOf(session.request),
                                    .grad_bytes = session.io->grad()->capacity_bytes(),
                                    .grad = session.io->grad(),
                                    .arenas = options_.arenas};
  SessionReconnected event{.session = id,
                           .held_leases = std::move(again.request.held_leases),
                           .newest_tag = again.request.newest_tag};
  runner_.Post(PoolId::kSetup,
               [this, event = std::move(event), number = session.number,
                memory]() mutable -> TaskRunner::Then {
                 auto made = MakeSessionMemory(memory);
                 return [this, event = std::move(event), number, made = std::move(made)]() mutable {
                   EndReconnect(std::move(event), number, std::move(made));
                 };
               });
}

void Executor::EndReconnect(SessionReconnected event, SessionId number,
                            absl::StatusOr<SessionMemory> made) {
  const SessionId id = event.session;
  const auto found = sessions_.find(id);
  // False if the session has ended meanwhile, or was reconnected once more.
  const bool is_there = found != sessions_.end() && found->second.number == number;
  if (!is_there || disconnected_.contains(id)) {
    if (made.ok()) Retire(*std::move(made));
    return;
  }
  Session& session = found->second;
  auto io = made.ok() ? SessionIo::Create(*std::move(made), session.request.protocol_version)
                      : made.status();
  if (!io.ok()) {
    if (session.callbacks.answered) {
      AnswerAttach refused{.session = number, .status = io.status(), .trace = {}};
      session.callbacks.answered({.answer = std::move(refused), .fds = {}});
    }
    return Disconnect(id);
  }
  registry_.Register({ArenaKind::kRing, session.job, RankOf(session.request)}, (*io)->ring());
  Retire(std::exchange(session.io, *std::move(io)));
  spdlog::info("session {}, {}: its rank is back", id, WhoIs(session.request));
  Raise(std::move(event));
}

uint64_t Executor::EndDisconnected(uint64_t until_ns) {
  std::vector<SessionId> due;
  uint64_t next = UINT64_MAX;
  for (const auto& [id, ends_ns] : disconnected_) {
    if (ends_ns <= until_ns) {
      due.push_back(id);
    } else {
      next = std::min(next, ends_ns);
    }
  }
  for (const SessionId id : due) {
    disconnected_.erase(id);
    const auto found = sessions_.find(id);
    if (found == sessions_.end()) continue;
    spdlog::warn("session {}, {}: its rank has not come back", id, WhoIs(found->second.request));
    LeaveExchange(id);
    Raise(SessionEnded{.session = id, .cause = EndCause::kLost});
  }
  return next;
}

}  // namespace forebay::daemon
