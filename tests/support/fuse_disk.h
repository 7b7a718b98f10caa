// SPDX-License-Identifier: Apache-2.0
// A file system of one file, in this process's memory, that errs, hangs, delays, loses and moves what it is
// asked for on command: a disk that fails as the kernel shows it, beneath a daemon that knows nothing of it.
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

// The fault that the following transfers have.
struct DiskFault {
  enum class Kind : uint8_t {
    kNone,
    kFail,   // with `error`
    kHang,   // no answer before the next order
    kDelay,  // an answer after `delay`
    kRate,   // so many bytes a second
    kShort,  // half of it, in whole pages; one page is whole. The kernel makes EIO of short writes
    kLose,   // writes report success, and are not carried out
    kMisdirect,  // writes go `shift_bytes` behind their place
    kRot,        // reads return one flipped bit
  };
  enum class Of : uint8_t { kReads, kWrites, kBoth, kFlushes };  // kFlushes: kFail alone

  Kind kind = Kind::kNone;
  Of of = Of::kBoth;
  int error = 0;
  std::chrono::milliseconds delay{0};
  uint64_t bytes_per_second = 0;
  uint64_t shift_bytes = 0;
  uint64_t count = std::numeric_limits<uint64_t>::max();  // faulty transfers; later ones work
};

// One write or flush that the disk has carried out.
struct DiskWrite {
  uint64_t offset_bytes = 0;
  std::vector<std::byte> bytes;
  bool is_flush = false;  // of all before it
};

// Mounted on a directory in a mount namespace of the calling thread's own, which its children share: nothing
// is left behind, however the process ends. Transfers are asynchronous and of at most 1 MiB each.
//
// Threads  Mount() on the thread that starts the daemon, everything else on any. One of its own answers.
// Source   linux/fuse.h; fuse(4).
class FuseDisk {
 public:
  // Errors  kUnavailable  no /dev/fuse, or this process may not mount: why.
  static absl::StatusOr<std::unique_ptr<FuseDisk>> Mount(const std::string& folder,
                                                         uint64_t capacity_bytes);

  FuseDisk(const FuseDisk&) = delete;
  FuseDisk& operator=(const FuseDisk&) = delete;
  // Ends hanging transfers with an error.
  ~FuseDisk();

  // Sets the fault of the following transfers. Carries out hanging transfers first.
  void Order(const DiskFault& fault);
  void Work() { Order({}); }

  uint64_t faults() const { return faults_; }  // since the last order
  uint64_t hung() const { return hung_count_; }
  uint64_t transfers() const { return transfers_; }

  // Starts to log writes and flushes.
  void StartLog();
  size_t logged() const;
  std::vector<DiskWrite> DrainLog();

 private:
  struct Request {
    std::vector<std::byte> bytes;  // as read from the device
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
