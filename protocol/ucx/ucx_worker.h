// SPDX-License-Identifier: Apache-2.0
// UCX for one thread: a context, its worker, endpoints to other workers, active messages and remote reads. The only
// files that name UCX.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::protocol {

// major.minor, as in 1.13
struct UcxVersion {
  unsigned major = 0;
  unsigned minor = 0;
};
inline constexpr UcxVersion kUcxVersionMin{.major = 1, .minor = 13};

struct UcxOptions {
  std::string tls = {};          // transports, as in UCX_TLS; empty: UCX chooses
  std::string net_devices = {};  // as in UCX_NET_DEVICES
  std::chrono::milliseconds keepalive{10000};
  // Whether memory is read remotely. Where no hardware does that, UCX's own handler does, for any address of this
  // process and without asking for a key: for peers that may see all that this process has.
  bool has_remote_reads = false;
};

class UcxWorker;
struct UcxEndpointState;
struct UcxWorkerState;

// Called once with the result of an operation: from Progress(), or from the call that began the operation if it ended at once.
using UcxDone = absl::AnyInvocable<void(const absl::Status&)>;

// A message that has arrived. Valid while the handler runs.
class UcxArrival {
 public:
  std::span<const std::byte> header() const { return header_; }
  uint64_t size_bytes() const { return size_bytes_; }

  // Receives all data of the message into `to`, of size_bytes(). At most once; without this call the data is dropped. `owner`
  // holds the memory until the data has arrived or failed.
  void Receive(std::span<std::byte> to, std::shared_ptr<const void> owner, UcxDone on_done);

 private:
  friend class UcxWorker;

  UcxWorkerState* worker_ = nullptr;
  std::span<const std::byte> header_;
  const std::byte* data_ = nullptr;
  uint64_t size_bytes_ = 0;
  bool is_descriptor_ = false;
  bool was_received_ = false;
};

// Memory that peers with its key may read. After the destructor no peer can read it.
//
// Ownership  Borrows the worker and the memory.
class UcxMemory {
 public:
  ~UcxMemory();
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;

  std::span<const std::byte> key() const { return key_; }  // for UcxEndpoint::SetRemoteMemory

 private:
  friend class UcxWorker;
  UcxMemory() = default;

  UcxWorkerState* worker_ = nullptr;
  void* handle_ = nullptr;
  std::vector<std::byte> key_;
};

// A connection to another worker. The destructor closes it by force: operations in flight end with an error.
//
// Threads  The worker's.
class UcxEndpoint {
 public:
  ~UcxEndpoint();
  UcxEndpoint(const UcxEndpoint&) = delete;
  UcxEndpoint& operator=(const UcxEndpoint&) = delete;

  // Sends header and data as one message. The header is copied. `owner` holds the data until `on_done`.
  void Send(std::span<const std::byte> header, std::span<const std::byte> data,
            std::shared_ptr<const void> owner, UcxDone on_done);

  // Sets the key of the peer's memory (UcxMemory::key), which Get reads.
  absl::Status SetRemoteMemory(std::span<const std::byte> key);
  // Reads the peer's memory, whose key was set.
  void Get(std::span<std::byte> to, uint64_t remote_address, std::shared_ptr<const void> owner,
           UcxDone on_done);

  // Returns whether a transport of this endpoint reads remote memory in hardware: InfiniBand, RoCE.
  bool reads_in_hardware() const;

  uint64_t in_flight() const;

 private:
  friend class UcxWorker;
  explicit UcxEndpoint(std::shared_ptr<UcxEndpointState> state) : state_(std::move(state)) {}

  std::shared_ptr<UcxEndpointState> state_;
};

// Threads  One at a time.
class UcxWorker {
 public:
  using OnArrival = absl::AnyInvocable<void(UcxArrival&)>;

  // Errors  E_UNSUPPORTED  the library is older than kUcxVersionMin, or has no such transport or device.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(const UcxOptions& options);
  static UcxVersion version();  // version of the library

  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;
  ~UcxWorker();  // to be called after the destructors of its endpoints and memory

  std::span<const std::byte> address() const;
  void SetHandler(OnArrival on_arrival);

  // Connects to the worker at `address`. `on_error` is called from Progress(), at most once, if the peer has closed the
  // connection or died.
  absl::StatusOr<std::unique_ptr<UcxEndpoint>> Connect(std::span<const std::byte> address,
                                                       UcxDone on_error);
  absl::StatusOr<std::unique_ptr<UcxMemory>> Map(std::span<const std::byte> memory);

  bool Progress();  // true: something was done
  // Returns true if the worker has no work until fd() is readable.
  bool PrepareSleep();
  int fd() const;

 private:
  explicit UcxWorker(std::unique_ptr<UcxWorkerState> state);

  std::unique_ptr<UcxWorkerState> state_;
};

}  // namespace forebay::protocol
