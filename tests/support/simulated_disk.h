// SPDX-License-Identifier: Apache-2.0
// Disks in memory for both interfaces of nvme/. They lose data at a power cut as real disks may.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/io/internal/watch_table.h"
#include "nvme/io/io_engine.h"
#include "nvme/swap_files.h"
#include "tests/support/pattern.h"

namespace forebay::testing {

struct SimulatedDiskOptions {
  uint32_t paths = 1;
  uint64_t capacity_bytes = uint64_t{1} << 20;  // capacity of each path
};

// Fate of cached writes and of queued writes at a power cut.
enum class CutFate {
  kLoseAll,     // nothing since the last flush arrived
  kKeepAll,     // everything arrived, also queued writes
  kLoseOldest,  // reordered: the last write of each path arrived alone
  // Each 512-byte sector independently holds the durable bytes or those of any later write.
  kTornSectors,
};

// Order in which one Wait() executes transfers.
enum class ExecutionOrder { kAsSubmitted, kLastFirst };

// Fault of one write that nevertheless reports success.
struct WriteFault {
  enum class Kind { kLost, kTorn, kMisdirected };
  Kind kind = Kind::kLost;
  uint32_t path = 0;  // kMisdirected: place at which the bytes land
  uint64_t offset_bytes = 0;
};

struct OperationRecord {
  nvme::IoKind kind;
  uint32_t path;
  uint64_t offset_bytes;
  size_t size_bytes;
};

// Disks named path_name(i), each with a volatile write cache. The object is both the IoEngine and the file system of a volume,
// and survives volumes. Each transfer, flush and blocking call that touches the medium is one operation. A flush covers exactly
// the writes that the IoEngine contract promises. After a power cut all calls fail with ENODEV until RestorePower().
//
// Threads  One. Only WatchEventFd's descriptors may be written by others.
class SimulatedDisk final : public nvme::IoEngine, public nvme::SwapFileSystem {
 public:
  static constexpr size_t kSectorBytes = 512;

  explicit SimulatedDisk(SimulatedDiskOptions options);
  ~SimulatedDisk() override;

  std::string path_name(uint32_t path) const;

  // Number of operations since creation. Calls after a power cut are not counted.
  uint64_t operations() const { return operations_; }
  const std::vector<OperationRecord>& log() const { return log_; }

  // Cuts the power before operation number `operation`, counted from 0 at this call.
  void CutPowerBefore(uint64_t operation) { cut_at_ = operations_ + operation; }
  void CutPowerNow();
  void set_cut_fate(CutFate fate, uint64_t seed);
  void set_order(ExecutionOrder order) { order_ = order; }
  bool power_was_cut() const { return power_was_cut_; }

  // Turns the power on. Reads see only bytes that had reached the medium. Watches and queued transfers are forgotten.
  void RestorePower();

  // Makes operation number `operation`, counted from 0 at this call, a faulty write. Has no effect if the operation is not a
  // write.
  void FaultWrite(uint64_t operation, WriteFault fault);
  bool fault_fired() const { return fault_fired_; }

  // Makes operation number `operation`, counted from 0 at this call, fail with EIO if it is a flush. As on a real system, the
  // path's cached writes then never become durable, though reads still see them.
  void FailFlush(uint64_t operation) { failed_flush_at_ = operations_ + operation; }

  // Bytes of the path as reads see them. Tests damage them.
  std::span<std::byte> bytes(uint32_t path) { return paths_[path].latest; }

  // Changes the bytes that reads see and those that survive a power cut.
  void Overwrite(uint32_t path, uint64_t offset_bytes, std::span<const std::byte> bytes);

  // nvme::IoEngine.
  std::string_view name() const override { return "simulated"; }
  absl::StatusOr<nvme::FileIndex> RegisterFile(int fd) override;
  void UnregisterFile(nvme::FileIndex file) override;
  bool RegisterBuffer(std::span<std::byte> bytes) override;
  void UnregisterBuffer(std::span<std::byte> bytes) override;
  absl::Status Submit(const nvme::IoRequest& request) override;
  absl::Status WatchEventFd(int fd, uint64_t token) override;
  void UnwatchEventFd(int fd) override;
  absl::StatusOr<size_t> Wait(std::chrono::nanoseconds timeout,
                              std::span<nvme::Completion> out) override;

  // Implements nvme::SwapFileSystem. Fails with E_BUSY while another file of the same path is open.
  absl::StatusOr<std::vector<std::unique_ptr<nvme::SwapFile>>> Open(
      std::span<const nvme::PathOptions> paths, nvme::OpenMode mode, nvme::FileLife life,
      nvme::CheckFirstPage check) override;

 private:
  class File;

  struct CachedWrite {
    uint64_t id;  // counts from 1 in execution order
    uint64_t offset_bytes;
    Bytes bytes;
    bool returned;       // Wait() has returned its completion
    bool never_durable;  // a flush that should have covered it failed
  };
  struct Path {
    Bytes durable;
    Bytes latest;
    std::vector<CachedWrite> cache;  // in execution order
    bool open = false;
  };
  struct Queued {
    nvme::IoRequest request;
    std::vector<uint64_t> covers;  // of a flush: cached writes returned before it
  };

  // Cuts the power if the operation of CutPowerBefore() is reached. Returns true if the power is off.
  bool PowerIsOff();
  void MeetFate(Path& path);
  int64_t Execute(const Queued& queued);
  int64_t DoRead(uint32_t path, uint64_t offset_bytes, std::span<std::byte> bytes);
  int64_t DoWrite(uint32_t path, uint64_t offset_bytes, std::span<const std::byte> bytes);
  int64_t DoFlush(uint32_t path, std::span<const uint64_t> covers);
  std::vector<uint64_t> Returned(uint32_t path) const;
  void Cache(uint32_t path, uint64_t offset_bytes, std::span<const std::byte> bytes);
  size_t ReportEvents(std::chrono::nanoseconds timeout, std::span<nvme::Completion> out);

  std::vector<Path> paths_;
  std::array<uint32_t, kFilesMax> files_{};  // path by FileIndex
  std::vector<Queued> queue_;
  nvme::internal::WatchTable watches_;
  std::vector<std::pair<int, nvme::internal::WatchKey>> watched_;
  std::vector<OperationRecord> log_;

  uint64_t operations_ = 0;
  uint64_t cached_writes_ = 0;
  std::optional<uint64_t> cut_at_;
  std::optional<uint64_t> failed_flush_at_;
  std::optional<uint64_t> fault_at_;
  WriteFault fault_;
  bool fault_fired_ = false;
  CutFate fate_ = CutFate::kLoseAll;
  uint64_t fate_seed_ = 0;
  ExecutionOrder order_ = ExecutionOrder::kAsSubmitted;
  bool power_is_off_ = false;
  bool power_was_cut_ = false;
};

}  // namespace forebay::testing
