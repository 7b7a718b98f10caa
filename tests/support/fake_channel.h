// SPDX-License-Identifier: Apache-2.0
// Two ends of a channel without shared memory: queues behind a lock, with the same limits, sleep
// protocol and doorbells as the ring.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "protocol/channel.h"

namespace forebay::testing {

struct ChannelEnds {
  std::unique_ptr<protocol::ClientChannel> client;
  std::unique_ptr<protocol::ServerChannel> server;
  std::shared_ptr<void> memory;  // memory that both ends use
};

// Threads  Each end is used by one thread.
absl::StatusOr<ChannelEnds> MakeFakeChannel();

// The ends of a real ring channel, in private memory.
absl::StatusOr<ChannelEnds> MakeRingChannel();

}  // namespace forebay::testing
