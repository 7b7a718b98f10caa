// SPDX-License-Identifier: Apache-2.0
// A client that uses RPC and ring directly, so that a test can send what our own client never sends.
#pragma once

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/channel.h"
#include "protocol/forebay.capnp.h"
#include "protocol/layout.h"
#include "protocol/os/unique_fd.h"
#include "protocol/wire.h"

namespace forebay::testing {

// Makes a sealed memfd with these bytes.
protocol::UniqueFd MakeMemfd(std::span<const std::byte> bytes);

struct RawAttach {
  std::string job = "job";
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t grad_arena_bytes = 1 << 20;
  uint64_t extra_state_bytes = 64 << 10;  // like our own clients
  std::string run = "test";               // the FOREBAY_RUN of DaemonProcess
  std::string durability = {};
  // Inode of the session's earlier gradient arena; 0 for a new attachment.
  uint64_t reattach_to = 0;
  int layout_fd = -1;  // -1: no layout
  uint64_t layout_bytes = 0;
};

// Every call waits at most 30 s; a broken connection is kUnavailable, a call that takes longer
// kDeadlineExceeded.
//
// Threads  One: that of Connect().
class RawSession {
 public:
  static absl::StatusOr<std::unique_ptr<RawSession>> Connect(const std::string& socket);
  RawSession(const RawSession&) = delete;
  RawSession& operator=(const RawSession&) = delete;
  ~RawSession();

  absl::Status Hello(uint32_t version = protocol::kProtocolVersion);
  absl::Status HelloOnBehalfOf(int64_t uid, uint32_t session_wait_ms = 0);
  absl::Status Attach(const RawAttach& attach);

  // Attaches as above, with a valid layout.
  absl::Status Attach(RawAttach attach, const protocol::LayoutSpec& layout);

  absl::StatusOr<protocol::UniqueFd> Descriptor(schema::Session::Kind kind);
  // Holds descriptors' capabilities until the end.
  void KeepDescriptors() { keeps_descriptors_ = true; }
  absl::Status Mapped();
  absl::Status Explain(uint64_t tag);
  absl::Status Detach();
  absl::Status End();

  // Fetches all descriptors, maps ring and arenas, calls mapped().
  absl::Status Map();

  schema::AttachReply::Reader reply() const { return reply_->getReply(); }
  protocol::RingMemory& ring() { return *ring_; }
  std::span<std::byte> grad() { return grad_; }
  std::span<const std::byte> weights() { return weights_; }
  int grad_fd() const { return grad_fd_.get(); }
  int weights_fd() const { return weights_fd_.get(); }
  int command_doorbell_fd() const { return command_doorbell_.get(); }
  void RingDoorbell();

  // Sends a command and waits for its completion.
  absl::StatusOr<protocol::Completion> Call(protocol::Command command);

  // Calls a command. Returns the error of its completion, with the error's text.
  absl::Status Ask(const protocol::Command& command);

 private:
  RawSession();

  template <typename T>
  absl::StatusOr<capnp::Response<T>> Wait(capnp::RemotePromise<T> promise);

  kj::AsyncIoContext io_;
  kj::Own<kj::AsyncCapabilityStream> stream_;
  kj::Own<capnp::TwoPartyClient> client_;
  kj::Own<schema::Node::Client> node_;
  kj::Own<schema::Session::Client> session_;
  kj::Own<capnp::Response<schema::Node::AttachResults>> reply_;
  bool keeps_descriptors_ = false;
  std::vector<schema::Descriptor::Client> descriptors_;
  protocol::UniqueFd grad_fd_;
  protocol::UniqueFd weights_fd_;
  protocol::UniqueFd ring_fd_;
  protocol::UniqueFd command_doorbell_;
  protocol::UniqueFd completion_doorbell_;
  protocol::RingMemory* ring_ = nullptr;
  std::span<std::byte> grad_;
  std::span<const std::byte> weights_;
  std::unique_ptr<protocol::ClientChannel> channel_;
  uint64_t next_tag_ = 1;
};

}  // namespace forebay::testing
