// SPDX-License-Identifier: Apache-2.0
// A connection to the daemon of this node, on behalf of one principal. Lives on the control thread.
#pragma once

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/gateway/shared_memory.h"
#include "protocol/forebay.capnp.h"
#include "protocol/os/unique_fd.h"

namespace forebay::gateway {

// Answer of the daemon to an attach.
struct DaemonSession {
  absl::Status status;
  kj::Maybe<schema::Session::Client> session;
  kj::Own<schema::AttachReply::Reader> reply;
  protocol::UniqueFd weights;
  protocol::UniqueFd grad_arena;
  protocol::UniqueFd ring;
  protocol::UniqueFd command_doorbell;
  protocol::UniqueFd completion_doorbell;
  std::vector<std::byte> extra_state;  // extra_state of this rank, then of rank 0
};

class DaemonLink {
 public:
  // Errors  E_NO_DAEMON, E_PERMISSION.
  static absl::StatusOr<kj::Own<DaemonLink>> Connect(kj::LowLevelAsyncIoProvider& provider,
                                                     const std::string& socket);

  DaemonLink(kj::Own<kj::AsyncCapabilityStream> stream);

  // `session_wait`: Node.hello, sessionWaitMs.
  kj::Promise<absl::Status> Hello(uint32_t uid, std::chrono::milliseconds session_wait);
  // Attaches, and asks for the descriptors of the session.
  kj::Promise<kj::Own<DaemonSession>> Attach(schema::AttachRequest::Reader request,
                                             std::vector<std::byte> layout);
  schema::Node::Client& node() { return node_; }
  kj::Promise<void> OnDisconnect() { return network_.onDisconnect(); }

 private:
  kj::Promise<void> AskForDescriptor(kj::Own<DaemonSession>& into, schema::Session::Kind kind,
                                     protocol::UniqueFd* fd);

  kj::Own<kj::AsyncCapabilityStream> stream_;
  capnp::TwoPartyVatNetwork network_;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc_;
  schema::Node::Client node_;
};

}  // namespace forebay::gateway
