// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/reconnects.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_format.h"
#include "daemon/exec/clock.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

bool Reconnects::MayDisconnect(const ClientSession& session) {
  const bool has_mapped = session.was_mapped || session.request.reattach;
  return session.wait.count() > 0 && session.job_id != 0 && has_mapped && !session.broken &&
         !session.is_stopped && !session.request.reader;
}

SessionId Reconnects::SessionOf(const AttachRequested& request, const JobName& job) const {
  if (!request.reattach || request.reader || request.grad_arena_inode == 0) return 0;
  for (const auto& [id, session] : parts_.sessions.all()) {
    const bool is_its = session.IsOf(job, request.rank) && session.request.run == request.run;
    if (!is_its || !MayDisconnect(session)) continue;
    if (session.io->grad()->inode() != request.grad_arena_inode) continue;
    const protocol::LayoutSpec& layout = parts_.jobs.Find(session.job_id)->layout->spec();
    if (protocol::Layout::Difference(layout, request.layout->spec()).empty()) return id;
  }
  return 0;
}

void Reconnects::Disconnect(SessionId id) {
  ClientSession& session = parts_.sessions.at(id);
  const std::chrono::duration<double> wait = session.wait;
  spdlog::info("session {}, {}: the connection is lost; its rank may come back within {} s", id,
               session.Who(), absl::StrFormat("%.1f", wait.count()));
  session.ends_ns = MonotonicNs() + static_cast<uint64_t>(session.wait.count());
  parts_.poller.Remove(id);
  session.io->channel().Close(protocol::ChannelState::kRestarting);
  parts_.exchange.Fail([id](const auto& member) { return member.session == id; },
                       MakeError(ErrorId::kFenced, "the connection is lost"));
  auto closed = std::exchange(session.callbacks.closed, [](const absl::Status&) {});
  if (closed) closed(absl::OkStatus());
  raise_(SessionEnded{.session = id, .cause = EndCause::kDisconnected});
}

void Reconnects::Begin(SessionId id, ClientSession again) {
  ClientSession& session = parts_.sessions.at(id);
  session.ends_ns = 0;
  session.number = again.number;
  session.callbacks = std::move(again.callbacks);
  session.wait = again.wait;
  session.request.protocol_version = again.request.protocol_version;
  const SessionMemoryOptions memory{.job = session.request.job,
                                    .rank = session.rank(),
                                    .grad_bytes = session.io->grad()->capacity_bytes(),
                                    .grad = session.io->grad(),
                                    .arenas = parts_.arenas};
  SessionReconnected event{.session = id,
                           .held_leases = std::move(again.request.held_leases),
                           .newest_tag = again.request.newest_tag};
  parts_.runner.Post(PoolId::kSetup,
                     [this, event = std::move(event), number = session.number,
                      memory]() mutable -> TaskRunner::Then {
                       auto made = MakeSessionMemory(memory);
                       return [this, event = std::move(event), number,
                               made = std::move(made)]() mutable {
                         End(std::move(event), number, std::move(made));
                       };
                     });
}

void Reconnects::End(SessionReconnected event, SessionId number,
                     absl::StatusOr<SessionMemory> made) {
  const SessionId id = event.session;
  ClientSession* const session = parts_.sessions.Find(id);
  if (session == nullptr || session->number != number || session->ends_ns != 0) {
    if (made.ok()) parts_.runner.Retire(*std::move(made));
    return;
  }
  auto io = made.ok() ? SessionIo::Create(*std::move(made), session->request.protocol_version)
                      : made.status();
  if (!io.ok()) {
    if (session->callbacks.answered) {
      AnswerAttach refused{.session = number, .status = io.status(), .trace = {}};
      session->callbacks.answered({.answer = std::move(refused), .fds = {}});
    }
    return Disconnect(id);
  }
  parts_.registry.Register({ArenaKind::kRing, session->job, session->rank()}, (*io)->ring());
  parts_.runner.Retire(std::exchange(session->io, *std::move(io)));
  spdlog::info("session {}, {}: its rank is back", id, session->Who());
  raise_(std::move(event));
}

Reconnects::Due Reconnects::DrainDue(uint64_t until_ns) {
  Due due;
  for (const auto& [id, session] : parts_.sessions.all()) {
    if (session.ends_ns > until_ns) due.next_ns = std::min(due.next_ns, session.ends_ns);
    if (session.ends_ns != 0 && session.ends_ns <= until_ns) due.sessions.push_back(id);
  }
  for (const SessionId id : due.sessions) {
    ClientSession& session = parts_.sessions.at(id);
    session.ends_ns = 0;
    spdlog::warn("session {}, {}: its rank has not come back", id, session.Who());
  }
  return due;
}

}  // namespace forebay::daemon
