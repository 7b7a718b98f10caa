// SPDX-License-Identifier: Apache-2.0
// Timed events of a client's newest step, in memory that the daemon reads when somebody asks.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "protocol/wire.h"

namespace forebay::protocol {

// Kinds of events of a client: its calls, and the work that the calls began on a device.
enum class ClientLane : uint16_t {
  kFetch,     // waited for weights
  kGradient,  // handed gradients over
  kStep,      // waited for a step
  // The lanes from here on are work on a device, from its begin to its end on the device's streams.
  kWeightsToDevice,
  kGradientsFromDevice,
  kAllGather,
  kReduce,
  kActivationsFromDevice,
  kActivationsToDevice,
};
inline constexpr uint16_t kClientLanes = 9;

std::string_view Name(ClientLane lane);  // "fetch", "weights to device"

struct ClientEvent {
  ClientLane lane = ClientLane::kFetch;
  std::string_view name;  // group or step; cut to kTraceNameBytes
  uint64_t start_ns = 0;  // CLOCK_MONOTONIC
  uint64_t end_ns = 0;
  uint64_t bytes = 0;
};

// Writes the client's trace. Events since the last commit belong to the next step. Events beyond kTraceRecords are omitted,
// except the step's own event, whose name tells the number of omitted events.
//
// Threads  One at a time.
class TraceWriter {
 public:
  explicit TraceWriter(TraceMemory& memory) : memory_(memory) {}
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  void Add(const ClientEvent& event);
  void LeaveOut(uint64_t events) { left_out_ += events; }  // events that were not recorded
  void Committed(uint64_t step);

 private:
  TraceMemory& memory_;
  uint64_t commits_ = 0;
  uint64_t records_ = 0;
  uint64_t left_out_ = 0;
};

// Reads, for the daemon, a client's events of its newest step. The client may lie: events with an unknown lane are dropped, and
// bytes of names that are not printable ASCII become '?'.
//
// Returns  Nothing if the trace has no events of `step`, or if the client is beginning to overwrite them.
std::vector<TraceRecord> ReadTrace(const TraceMemory& memory, uint64_t step);

}  // namespace forebay::protocol
