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
  std::shared_ptr<void> memory;  // what both ends stand on
};

// Threads  Each end on a thread of its own.
absl::StatusOr<ChannelEnds> MakeFakeChannel();

// The real one, on private memory.
absl::StatusOr<ChannelEnds> MakeRingChannel();

}  // namespace forebay::testing
