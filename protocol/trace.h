// SPDX-License-Identifier: Apache-2.0
// Timed events of a client's newest step, in memory that the daemon reads when somebody asks.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "protocol/wire.h"

namespace forebay::protocol {

// What a client did: its calls, and the work that they began on a device.
enum class ClientLane : uint16_t {
  kFetch,            // waited for weights
  kGradient,         // handed gradients over
  kStep,             // waited for a step
  kWeightsToDevice,  // of the device: when its streams began and ended
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
  std::string_view name;  // what: group or step; cut to kTraceNameBytes
  uint64_t start_ns = 0;  // CLOCK_MONOTONIC
  uint64_t end_ns = 0;
  uint64_t bytes = 0;
};

// The client's end. What is added since the last commit is the next step's; of more than
// kTraceRecords the last are left out, but for the step's own, whose name tells how many.
//
// Threads  One at a time.
class TraceWriter {
 public:
  explicit TraceWriter(TraceMemory& memory) : memory_(memory) {}
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  void Add(const ClientEvent& event);
  void LeaveOut(uint64_t events) { left_out_ += events; }  // that were never made
  void Committed(uint64_t step);

 private:
  TraceMemory& memory_;
  uint64_t commits_ = 0;
  uint64_t records_ = 0;
  uint64_t left_out_ = 0;
};

// The daemon's end: what a client, which may lie, says of its newest step. Names have printable ASCII
// characters alone; lanes are known ones.
//
// Returns  Nothing where it says nothing of `step`, or is beginning to overwrite it.
std::vector<TraceRecord> ReadTrace(const TraceMemory& memory, uint64_t step);

}  // namespace forebay::protocol
