// SPDX-License-Identifier: Apache-2.0
// A file system with one file in this process's memory. On command it fails, blocks, delays, loses or misplaces transfers, like
// a failing disk under a daemon that does not know of it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/os/mutex.h"
#include "protocol/os/unique_fd.h"

namespace forebay::testing {

// Fault of the following transfers.
struct DiskFault {
  enum class Kind : uint8_t {
    kNone,
    kFail,   // with `error`
    kHang,   // answered at the next order
    kDelay,  // answered after `delay`
    kRate,   // limited to `bytes_per_second`
    // Half of the transfer, in whole pages; one page is whole. The kernel fails short writes with EIO.
    kShort,
    kLose,       // writes report success but are not carried out
    kMisdirect,  // writes land `shift_bytes` behind their place
    kRot,        // reads return one flipped bit
  };
  enum class Of : uint8_t { kReads, kWrites, kBoth, kFlushes };  // kFlushes: for kFail only

  Kind kind = Kind::kNone;
  Of of = Of::kBoth;
  int error = 0;
  std::chrono::milliseconds delay{0};
  uint64_t bytes_per_second = 0;
  uint64_t shift_bytes = 0;
  // Number of faulty transfers; later ones work.
  uint64_t count = std::numeric_limits<uint64_t>::max();
};

// A write or flush that the disk has carried out.
struct DiskWrite {
  uint64_t offset_bytes = 0;
  std::vector<std::byte> bytes;
  bool is_flush = false;  // flush of all earlier writes
};

// A disk in user space, mounted on a directory in the calling thread's mount namespace, which child processes share. The mount
// disappears with the last process in the namespace, however it ends. Transfers are asynchronous, at most 1 MiB each.
//
// Threads  Mount() runs on the thread that starts the daemon, all other calls on any thread. A server thread answers requests.
// Source   linux/fuse.h; fuse(4).
class FuseDisk {
 public:
  // Errors  kUnavailable  /dev/fuse is missing, or this process may not mount; the message says why.
  static absl::StatusOr<std::unique_ptr<FuseDisk>> Mount(const std::string& folder,
                                                         uint64_t capacity_bytes);

  FuseDisk(const FuseDisk&) = delete;
  FuseDisk& operator=(const FuseDisk&) = delete;
  // Ends hanging transfers with an error.
  ~FuseDisk();

  // Sets the fault of the following transfers. Carries out hanging transfers first.
  void Order(const DiskFault& fault);
  void Work() { Order({}); }

  uint64_t faults() const { return faults_; }  // faulty transfers since the last order
  uint64_t hung() const { return hung_count_; }
  uint64_t transfers() const { return transfers_; }

  // Starts to log writes and flushes.
  void StartLog();
  size_t logged() const;
  std::vector<DiskWrite> DrainLog();

 private:
  struct Request {
    std::vector<std::byte> bytes;  // a request as read from the device
    std::chrono::steady_clock::time_point due = {};
  };

  FuseDisk(std::string folder, uint64_t capacity_bytes)
      : folder_(std::move(folder)), capacity_bytes_(capacity_bytes) {}

  void Serve();
  void Handle(Request request);
  void HandleTransfer(Request request);
  void CarryOut(const Request& request, const DiskFault& fault);
  // Returns 0 or the errno of the failed flush.
  int Flush();
  int AnswerDelayed();
  void Answer(const Request& request, int error, std::span<const std::byte> bytes = {});
  template <typename T>
  void AnswerWith(const Request& request, const T& body);
  void Init(const Request& request);
  void AnswerAttributes(const Request& request);
  void AnswerEntry(const Request& request);

  std::string folder_;
  uint64_t capacity_bytes_;
  protocol::UniqueFd device_;
  protocol::UniqueFd wake_;
  std::thread server_;
  std::atomic<bool> stopping_ = false;
  std::atomic<uint64_t> faults_ = 0;
  std::atomic<uint64_t> hung_count_ = 0;
  std::atomic<uint64_t> transfers_ = 0;

  mutable protocol::Mutex mutex_;
  bool logs_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<DiskWrite> log_ ABSL_GUARDED_BY(mutex_);
  DiskFault fault_ ABSL_GUARDED_BY(mutex_);
  std::vector<Request> hung_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::byte> file_ ABSL_GUARDED_BY(mutex_);

  // Used by the server thread alone.
  bool exists_ = false;
  std::deque<Request> delayed_;
  std::chrono::steady_clock::time_point free_at_ = {};  // of DiskFault::Kind::kRate
};

}  // namespace forebay::testing
