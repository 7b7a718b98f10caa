// SPDX-License-Identifier: Apache-2.0
// Disks in memory behind both seams of nvme/: as careful as real ones, and as careless when the
// power fails.
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
  uint64_t capacity_bytes = uint64_t{1} << 20;  // of each path
};

// Fate of cached writes and of queued writes at a power cut.
enum class CutFate {
  kLoseAll,      // nothing since the last flush arrived
  kKeepAll,      // everything arrived, also queued writes
  kLoseOldest,   // reordered: the last write of each path arrived alone
  kTornSectors,  // each 512-byte sector on its own: the durable bytes or those of any later write
};

// In which order the transfers of one Wait() are carried out.
enum class ExecutionOrder { kAsSubmitted, kLastFirst };

// Fault of one write that nevertheless reports success.
struct WriteFault {
  enum class Kind { kLost, kTorn, kMisdirected };
  Kind kind = Kind::kLost;
  uint32_t path = 0;  // kMisdirected: `path` and `offset_bytes` are the place that the bytes go to
  uint64_t offset_bytes = 0;
};

struct OperationRecord {
  nvme::IoKind kind;
  uint32_t path;
  uint64_t offset_bytes;
  size_t size_bytes;
};

// Some paths, named path_name(i), with a volatile write cache each. Both the IoEngine and the file
// system of a volume; it outlives volumes, as a disk does. Each transfer, flush and blocking call
// that touches the medium is one operation. A flush covers what the IoEngine contract promises, and
// nothing more. After a power cut everything fails with ENODEV until RestorePower().
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

  // Cuts the power before the operation that is `operation` (from 0) after this call.
  void CutPowerBefore(uint64_t operation) { cut_at_ = operations_ + operation; }
  void CutPowerNow();
  void set_cut_fate(CutFate fate, uint64_t seed);
  void set_order(ExecutionOrder order) { order_ = order; }
  bool power_was_cut() const { return power_was_cut_; }

  // Turns the power on. Reads see only bytes that had reached the medium. Watches and queued transfers are forgotten.
  void RestorePower();

  // Faults the write that is `operation` (from 0) after this call; nothing where it is no write.
  void FaultWrite(uint64_t operation, WriteFault fault);
  bool fault_fired() const { return fault_fired_; }

  // Fails the flush that is `operation` (from 0) after this call with EIO. As on a real system the
  // cached writes of that path are then never made durable, though reads still see them.
  void FailFlush(uint64_t operation) { failed_flush_at_ = operations_ + operation; }

  // The bytes as reads see them, for tests that damage them.
  std::span<std::byte> bytes(uint32_t path) { return paths_[path].latest; }

  // Changes both what reads see and what survives a power cut.
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

  // nvme::SwapFileSystem. E_BUSY while another file of the same path lives.
  absl::StatusOr<std::vector<std::unique_ptr<nvme::SwapFile>>> Open(
      std::span<const nvme::PathOptions> paths, nvme::OpenMode mode, nvme::FileLife life,
      nvme::CheckFirstPage check) override;

 private:
  class File;

  struct CachedWrite {
    uint64_t id;  // from 1, in the order of execution
    uint64_t offset_bytes;
    Bytes bytes;
    bool returned;       // Wait() has returned its completion
    bool never_durable;  // a flush that should have covered it failed
  };
  struct Path {
    Bytes durable;
    Bytes latest;
    std::vector<CachedWrite> cache;  // in the order of execution
    bool open = false;
  };
  struct Queued {
    nvme::IoRequest request;
    std::vector<uint64_t> covers;  // flush: the cached writes that were returned when it came
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
