// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/remote_link.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::gateway {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::RemoteHeader;
using protocol::RemoteKind;

absl::StatusOr<std::unique_ptr<RemoteLink>> RemoteLink::Create(DataThread& thread,
                                                               RemoteLinkOptions options) {
  std::unique_ptr<RemoteLink> link(new RemoteLink(std::move(options)));
  auto on_error = [raw = link.get()](const absl::Status& status) {
    raw->End(MakeError(ErrorId::kRemote,
                       absl::StrCat(raw->options_.peer, ": ", std::string(status.message()))));
  };
  ASSIGN_OR_RETURN(link->endpoint_, thread.worker().Connect(link->options_.peer_address, on_error));
  return link;
}

protocol::UcxDone RemoteLink::OnDone(std::function<void()> on_done) {
  return [this, alive = std::weak_ptr(alive_),
          on_done = std::move(on_done)](const absl::Status& status) {
    if (alive.expired() || has_ended_) return;
    if (!status.ok()) {
      End(MakeError(ErrorId::kRemote,
                    absl::StrCat(options_.peer, ": ", std::string(status.message()))));
    } else if (on_done) {
      on_done();
    }
  };
}

void RemoteLink::Send(RemoteHeader header, std::span<const std::byte> data,
                      std::shared_ptr<const void> owner, std::function<void()> on_sent) {
  if (has_ended_) return;
  header.session = options_.key.number;
  header.secret = options_.key.secret;
  endpoint_->Send(std::as_bytes(std::span(&header, 1)), data, std::move(owner),
                  OnDone(std::move(on_sent)));
}

void RemoteLink::Receive(protocol::UcxArrival& arrival, std::span<std::byte> to,
                         std::shared_ptr<const void> owner, std::function<void()> on_done) {
  if (arrival.size_bytes() != to.size()) {
    End(MakeError(ErrorId::kProtocol, absl::StrCat(options_.peer, " sent ", arrival.size_bytes(),
                                                   " bytes and named ", to.size())));
    return;
  }
  if (to.empty()) {
    on_done();
    return;
  }
  arrival.Receive(to, std::move(owner), OnDone(std::move(on_done)));
}

void RemoteLink::Get(std::span<std::byte> to, uint64_t remote_address,
                     std::shared_ptr<const void> owner, std::function<void()> on_done) {
  if (has_ended_) return;
  endpoint_->Get(to, remote_address, std::move(owner), OnDone(std::move(on_done)));
}

void RemoteLink::OnTick(Clock::time_point now) {
  if (has_ended_) return;
  ++silent_ticks_;
  if (now - heard_ > options_.keepalive && silent_ticks_ >= kLooksPerKeepalive) {
    const std::chrono::duration<double> silent = now - heard_;
    End(MakeError(ErrorId::kRemote,
                  absl::StrCat("nothing came from ", options_.peer, " over UCX for ",
                               absl::StrFormat("%.1f", silent.count()), " s")));
    return;
  }
  RemoteHeader ping;
  ping.kind = static_cast<uint16_t>(RemoteKind::kPing);
  Send(ping);
}

void RemoteLink::End(const absl::Status& reason) {
  if (std::exchange(has_ended_, true)) return;
  options_.on_end(reason);
}

}  // namespace forebay::gateway
