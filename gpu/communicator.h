// SPDX-License-Identifier: Apache-2.0
// Collectives between the ranks of a job. Each rank has one device.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device.h"
#include "protocol/dtype.h"

namespace forebay::gpu {

enum class Reduction : uint8_t { kSum, kMean };

// Gives every rank the bytes of all, by rank; all ranks call it equally often. What ranks need before they
// can talk to each other: client::Attachment::Exchange.
using Exchange = std::function<absl::StatusOr<std::vector<std::string>>(const std::string& bytes)>;

// All ranks call the same collectives in the same order, with the same number of bytes. Work runs in the order of the given
// stream. A collective has ended for a rank when later work on the rank's stream runs.
//
// Errors   E_DEVICE     the library or the device failed.
//          E_RANK_LOST  a rank did not come within the time limit, or has aborted.
//          E_RANGE      spans of the wrong lengths: nothing has begun, and the next call works; the others
//                       wait until then, or until Abort. Or another rank is at another collective.
//          After one of those, but for spans, every later call says the same.
// Threads  One at a time; Abort any.
class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  virtual std::string_view name() const = 0;    // "host", "nccl"
  virtual std::string_view device() const = 0;  // name of the one whose streams and memory it takes
  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;  // ranks

  // `to` gets rank r's `from` as its r-th part; `from` may be this rank's part of `to`.
  virtual absl::Status AllGather(Stream& stream, std::span<std::byte> to,
                                 std::span<const std::byte> from) = 0;

  // `to` gets this rank's part of the sum, or of the mean, of all ranks' `from`. float32, float16 and
  // bfloat16.
  virtual absl::Status ReduceScatter(Stream& stream, std::span<std::byte> to,
                                     std::span<const std::byte> from, protocol::DType dtype,
                                     Reduction reduction) = 0;

  // In place.
  virtual absl::Status AllReduce(Stream& stream, std::span<std::byte> bytes, protocol::DType dtype,
                                 Reduction reduction) = 0;

  // The collectives that `calls` calls may run as one.
  virtual absl::Status Group(const std::function<absl::Status()>& calls) = 0;

  // Returns the first error so far, including errors of collectives in flight. Never blocks.
  virtual absl::Status Check() = 0;

  // Ends what is under way, on this rank at once, on the others within the time limit.
  virtual void Abort() = 0;

  // Calls `check` every second while a collective waits, to learn whether the other ranks still live. An error of `check` ends
  // the collective as Abort does. `check` runs on any thread, one call at a time, and not after the end of this communicator or
  // another WatchWith.
  virtual void WatchWith(std::function<absl::Status()> check) = 0;
};

inline constexpr std::chrono::seconds kWatchPeriod{1};

// Errors  E_RANGE  names what does not fit: a length, or the type's width.
absl::Status CheckAllGather(uint32_t size, size_t to_bytes, size_t from_bytes);
absl::Status CheckReduceScatter(uint32_t size, size_t to_bytes, size_t from_bytes,
                                protocol::DType dtype);
absl::Status CheckReduction(size_t size_bytes, protocol::DType dtype);

}  // namespace forebay::gpu
