// SPDX-License-Identifier: Apache-2.0
// A session's reads and writes of parameters, masters and moments.
#pragma once

#include <span>
#include <string_view>

#include "client/internal/weights_reader.h"

namespace forebay::client::internal {

// Moves elements between the caller's memory and the daemon, a range of the gradient arena at a time. Has no state.
//
// Threads  One at a time, under Attachment's mutex; CheckStateRange: any.
// Errors   As the methods of Attachment of the same names.
class StateCaller {
 public:
  StateCaller(const SessionParts& parts, SessionLink& link, WeightsReader& weights)
      : parts_(parts), link_(link), weights_(weights) {}

  absl::Status WriteInitial(uint32_t partition, std::span<const std::byte> bytes,
                            const WaitLimits& limits);
  absl::Status InitialDone(const WaitLimits& limits);
  absl::Status CheckStateRange(const StateRange& range, uint64_t elems) const;
  absl::StatusOr<uint64_t> ReadState(const StateRange& range, std::span<float> out,
                                     const WaitLimits& limits);
  absl::Status WriteState(uint32_t partition, uint64_t first_elem, std::string_view state,
                          std::span<const float> values, const WaitLimits& limits);
  absl::Status WriteUpdates(uint32_t param, uint64_t updates, const WaitLimits& limits);

 private:
  // Sends a partition's elements of `width` bytes from `element_offset` on, one command a piece. A piece is a whole
  // number of units, because the daemon records written initial parameters by unit.
  absl::Status SendElements(protocol::Command command, std::span<const std::byte> bytes,
                            uint64_t width, const WaitLimits& limits);

  const SessionParts& parts_;
  SessionLink& link_;
  WeightsReader& weights_;
};

}  // namespace forebay::client::internal
