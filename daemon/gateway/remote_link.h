// SPDX-License-Identifier: Apache-2.0
// The connection of one session to its peer. It adds the session's number and secret to each message, receives and reads
// data, and ends if nothing was heard from the peer for the keepalive.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/gateway/data_thread.h"
#include "protocol/remote_wire.h"
#include "protocol/ucx/ucx_worker.h"

namespace forebay::gateway {

// Number of times in a keepalive that a process looks whether its peer was heard. A peer is lost after so many looks without a
// message. So the time in which this process did not run itself does not count.
inline constexpr int kLooksPerKeepalive = 4;

struct RemoteLinkOptions {
  SessionKey key;
  std::vector<std::byte> peer_address;
  std::string peer;  // for messages
  std::chrono::milliseconds keepalive{10000};
  // Called once, on the data thread, when the link has ended.
  std::function<void(const absl::Status&)> on_end;
};

// Threads  The data thread.
class RemoteLink {
 public:
  // Called on the data thread.
  static absl::StatusOr<std::unique_ptr<RemoteLink>> Create(DataThread& thread,
                                                            RemoteLinkOptions options);

  // Sends a message. `on_sent` is called once the message is sent, but not if the link ends first.
  void Send(protocol::RemoteHeader header, std::span<const std::byte> data = {},
            std::shared_ptr<const void> owner = nullptr, std::function<void()> on_sent = nullptr);
  // Receives the message's data into `to`. A message of another size ends the link.
  void Receive(protocol::UcxArrival& arrival, std::span<std::byte> to,
               std::shared_ptr<const void> owner, std::function<void()> on_done);
  void Get(std::span<std::byte> to, uint64_t remote_address, std::shared_ptr<const void> owner,
           std::function<void()> on_done);

  void OnHeard() {
    heard_ = Clock::now();
    silent_ticks_ = 0;
  }
  // Sends a ping. Ends the link if no message arrived during the keepalive, and kLooksPerKeepalive ticks passed.
  void OnTick(Clock::time_point now);

  // Ends the link with a reason. Only the first call has an effect.
  void End(const absl::Status& reason);
  bool has_ended() const { return has_ended_; }
  protocol::UcxEndpoint& endpoint() { return *endpoint_; }

 private:
  explicit RemoteLink(RemoteLinkOptions options)
      : options_(std::move(options)), heard_(Clock::now()) {}
  protocol::UcxDone OnDone(std::function<void()> on_done);

  RemoteLinkOptions options_;
  std::unique_ptr<protocol::UcxEndpoint> endpoint_;
  Clock::time_point heard_;
  int silent_ticks_ = 0;  // number of ticks since `heard_`
  bool has_ended_ = false;
  // True while the link exists: callbacks that outlive the link hold a weak pointer to it.
  std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
};

}  // namespace forebay::gateway
