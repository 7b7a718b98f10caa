// SPDX-License-Identifier: Apache-2.0
// The control plane of one client: connection, hello, and the calls of a session as plain values.
#pragma once

#include <capnp/message.h>
#include <kj/memory.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/internal/control_thread.h"
#include "client/internal/deadline.h"
#include "client/internal/remote_agent.h"
#include "protocol/descriptor.h"
#include "protocol/forebay.capnp.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/wire.h"

namespace forebay::client::internal {

struct ConnectOptions {
  std::string socket;                           // its path, or "ucx://HOST:PORT" of a gateway
  const RemoteArenas* remote_arenas = nullptr;  // set for a rank that attaches again to a gateway
  uint32_t protocol_version = protocol::kProtocolVersion;
};

// A copy of a message that outlives the call that brought it.
template <typename Reader>
std::shared_ptr<const Reader> Clone(const Reader& from) {
  const auto owner = std::make_shared<const kj::Own<Reader>>(capnp::clone(from));
  return {owner, owner->get()};
}

using AttachRequest = std::shared_ptr<const schema::AttachRequest::Reader>;
using AttachReply = std::shared_ptr<const schema::AttachReply::Reader>;

// Threads  Any.
class Control {
 public:
  // Errors  E_NO_DAEMON, E_PERMISSION, E_PROTOCOL, E_LIMIT; of another node also E_CONFIG, E_REMOTE, E_UNSUPPORTED.
  static absl::StatusOr<std::unique_ptr<Control>> Connect(const ConnectOptions& options,
                                                          const WaitLimits& limits);

  // `encoded`: the encoded layout.
  absl::StatusOr<AttachReply> Attach(const AttachRequest& request,
                                     std::span<const std::byte> encoded, const WaitLimits& limits);
  // Errors  E_LIMIT.
  static absl::StatusOr<protocol::UniqueFd> MakeLayoutFd(std::span<const std::byte> encoded);

  // The calls below are those of the attached session.
  absl::StatusOr<protocol::UniqueFd> Descriptor(schema::Session::Kind kind,
                                                const WaitLimits& limits);
  absl::Status Mapped(const WaitLimits& limits);
  absl::Status Detach(const WaitLimits& limits);
  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& bytes, uint64_t number,
                                                    const WaitLimits& limits);

  // Returns the error of a completion, with the daemon's message if the daemon still has it. Tag 0: returns the reason why the
  // session has ended.
  absl::Status Explain(const protocol::Completion& completion, const WaitLimits& limits);

  // Makes a call that returns nothing but its outcome. `request` makes the request.
  template <typename MakeRequest>
  absl::Status CallForOutcome(const std::string& what, const WaitLimits& limits,
                              MakeRequest request) {
    const auto send = [request](Peer& peer) {
      return request(peer).send().then([](auto&& response) -> absl::StatusOr<bool> {
        RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
        return true;
      });
    };
    return thread_->Call<bool>(what, limits, send).status();
  }

  ControlThread& thread() { return *thread_; }
  int daemon_pidfd() const { return pidfd_.get(); }  // -1 if the daemon's pid is unknown

 private:
  Control() = default;
  // Returns why the agent has ended, if `status` is E_DAEMON_GONE and an agent has ended. Otherwise returns `status`.
  absl::Status WhyGone(const absl::Status& status);

  std::unique_ptr<RemoteAgent> agent_;  // null if the daemon is on this node
  protocol::UniqueFd pidfd_;
  std::unique_ptr<ControlThread> thread_;
};

}  // namespace forebay::client::internal
