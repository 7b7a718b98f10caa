// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/refused_clients.h"

#include <capnp/message.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "daemon/control/message_relay.h"
#include "protocol/error.h"

namespace forebay::daemon {
namespace {

constexpr auto kHeldAtLeast = 1 * kj::SECONDS;

// True if the process can open two more descriptors, as many as a relay takes.
bool DescriptorsAreLeft() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) return false;
  for (const int end : ends) ::close(end);
  return true;
}

}  // namespace

RefusedClients::~RefusedClients() noexcept(false) {
  while (!held_.empty()) CloseHeld(held_.begin());
}

void RefusedClients::Refuse(uint32_t uid, protocol::UniqueFd client, const absl::Status& why) {
  capnp::MallocMessageBuilder message;
  auto abort = message.initRoot<capnp::rpc::Message>().initAbort();
  abort.setReason(protocol::FormatError(why).c_str());
  abort.setType(capnp::rpc::Exception::Type::OVERLOADED);
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  (void)!::send(client.get(), bytes.begin(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (!DescriptorsAreLeft()) return Close(uid, std::move(client));
  if (held_.empty()) closing_.add(CloseLater());
  if (std::ranges::count(held_, uid, &Held::uid) == kHeldPerUidMax) {
    CloseHeld(std::ranges::find(held_, uid, &Held::uid));
  } else if (held_.size() == kHeldMax) {
    CloseHeld(held_.begin());
  }
  held_.push_back({.since = timer_.now(), .uid = uid, .client = std::move(client)});
}

void RefusedClients::Close(uint32_t uid, protocol::UniqueFd client) {
  const absl::Status status = CloseUnread(std::move(client));
  if (!status.ok()) log_.Warn(uid, protocol::FormatError(status));
}

kj::Promise<void> RefusedClients::CloseLater() {
  return timer_.afterDelay(kHeldAtLeast).then([this]() -> kj::Promise<void> {
    while (!held_.empty() && timer_.now() - held_.front().since >= kHeldAtLeast) {
      CloseHeld(held_.begin());
    }
    if (held_.empty()) return kj::READY_NOW;
    return CloseLater();
  });
}

void RefusedClients::CloseHeld(const std::deque<Held>::iterator& one) {
  Close(one->uid, std::move(one->client));
  held_.erase(one);
}

}  // namespace forebay::daemon
