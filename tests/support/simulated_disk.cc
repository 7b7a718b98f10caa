// SPDX-License-Identifier: Apache-2.0
#include "tests/support/simulated_disk.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::testing {
namespace {

using nvme::Completion;
using nvme::IoKind;
using nvme::IoRequest;

constexpr int kFirstFd = 100000;  // path i is "descriptor" kFirstFd + i

uint64_t Mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

void Copy(std::span<const std::byte> from, Bytes& to, uint64_t offset_bytes) {
  std::copy(from.begin(), from.end(), to.begin() + static_cast<ptrdiff_t>(offset_bytes));
}

}  // namespace

// Blocking calls count as operations too. Their writes count as returned at once.
class SimulatedDisk::File final : public nvme::SwapFile {
 public:
  File(SimulatedDisk& disk, uint32_t path) : disk_(disk), path_(path), name_(disk.path_name(path)) {
    disk_.paths_[path_].open = true;
  }
  ~File() override { disk_.paths_[path_].open = false; }

  int fd() const override { return kFirstFd + static_cast<int>(path_); }
  std::string_view name() const override { return name_; }

  absl::Status Read(uint64_t offset_bytes, std::span<std::byte> bytes) override {
    return ToStatus(disk_.DoRead(path_, offset_bytes, bytes));
  }
  absl::Status Write(uint64_t offset_bytes, std::span<const std::byte> bytes) override {
    const int64_t result = disk_.DoWrite(path_, offset_bytes, bytes);
    for (CachedWrite& write : disk_.paths_[path_].cache) write.returned = true;
    return ToStatus(result);
  }
  absl::Status Sync() override { return ToStatus(disk_.DoFlush(path_, disk_.Returned(path_))); }
  void Unlock() override {}

 private:
  absl::Status ToStatus(int64_t result) const {
    if (result >= 0) return absl::OkStatus();
    return protocol::MakeError(protocol::ErrorId::kSwapIo,
                               protocol::ErrnoText(name_, static_cast<int>(-result)));
  }

  SimulatedDisk& disk_;
  uint32_t path_;
  std::string name_;
};

SimulatedDisk::SimulatedDisk(SimulatedDiskOptions options) : paths_(options.paths) {
  for (Path& path : paths_) {
    path.durable.resize(options.capacity_bytes);
    path.latest.resize(options.capacity_bytes);
  }
}

SimulatedDisk::~SimulatedDisk() = default;

std::string SimulatedDisk::path_name(uint32_t path) const {
  return absl::StrCat("/simulated/", path);
}

void SimulatedDisk::set_cut_fate(CutFate fate, uint64_t seed) {
  fate_ = fate;
  fate_seed_ = seed;
}

void SimulatedDisk::FaultWrite(uint64_t operation, WriteFault fault) {
  fault_at_ = operations_ + operation;
  fault_ = fault;
  fault_fired_ = false;
}

void SimulatedDisk::Overwrite(uint32_t path, uint64_t offset_bytes,
                              std::span<const std::byte> bytes) {
  Copy(bytes, paths_[path].latest, offset_bytes);
  Copy(bytes, paths_[path].durable, offset_bytes);
}

void SimulatedDisk::RestorePower() {
  for (Path& path : paths_) {
    path.latest = path.durable;
    path.cache.clear();
  }
  queue_.clear();
  watches_ = {};
  watched_.clear();
  cut_at_.reset();
  failed_flush_at_.reset();
  fault_at_.reset();
  power_is_off_ = false;
}

bool SimulatedDisk::PowerIsOff() {
  if (!power_is_off_ && cut_at_.has_value() && operations_ == *cut_at_) CutPowerNow();
  return power_is_off_;
}

void SimulatedDisk::CutPowerNow() {
  // Queued writes may reach the medium like cached writes.
  for (const Queued& queued : queue_) {
    const IoRequest& request = queued.request;
    if (request.kind != IoKind::kWrite) continue;
    const uint32_t path = files_[static_cast<uint32_t>(request.file)];
    Cache(path, request.offset_bytes, {request.data, request.size_bytes});
  }
  for (Path& path : paths_) MeetFate(path);
  power_is_off_ = true;
  power_was_cut_ = true;
}

void SimulatedDisk::MeetFate(Path& path) {
  const auto apply = [&path](const CachedWrite& write, size_t begin, size_t end) {
    if (write.never_durable) return;
    Copy(std::span<const std::byte>(write.bytes).subspan(begin, end - begin), path.durable,
         write.offset_bytes + begin);
  };
  switch (fate_) {
    case CutFate::kLoseAll:
      break;
    case CutFate::kKeepAll:
      for (const CachedWrite& write : path.cache) apply(write, 0, write.bytes.size());
      break;
    case CutFate::kLoseOldest:
      if (!path.cache.empty()) apply(path.cache.back(), 0, path.cache.back().bytes.size());
      break;
    case CutFate::kTornSectors:
      // Each random choice keeps or replaces one sector, so that any version of a sector may be the last.
      for (const CachedWrite& write : path.cache) {
        for (size_t begin = 0; begin < write.bytes.size(); begin += kSectorBytes) {
          fate_seed_ = Mix(fate_seed_);
          if ((fate_seed_ & 1) != 0) apply(write, begin, begin + kSectorBytes);
        }
      }
      break;
  }
  path.cache.clear();
}

void SimulatedDisk::Cache(uint32_t path, uint64_t offset_bytes, std::span<const std::byte> bytes) {
  Path& target = paths_[path];
  const size_t room = static_cast<size_t>(target.latest.size() -
                                          std::min<uint64_t>(offset_bytes, target.latest.size()));
  const auto fitting = bytes.first(std::min(bytes.size(), room));
  if (fitting.empty()) return;
  Copy(fitting, target.latest, offset_bytes);
  target.cache.push_back({.id = ++cached_writes_,
                          .offset_bytes = offset_bytes,
                          .bytes = Bytes(fitting.begin(), fitting.end()),
                          .returned = false,
                          .never_durable = false});
}

int64_t SimulatedDisk::DoRead(uint32_t path, uint64_t offset_bytes, std::span<std::byte> bytes) {
  if (PowerIsOff()) return -ENODEV;
  ++operations_;
  log_.push_back({IoKind::kRead, path, offset_bytes, bytes.size()});
  const Bytes& latest = paths_[path].latest;
  if (offset_bytes >= latest.size()) return 0;
  const size_t size = std::min<size_t>(bytes.size(), latest.size() - offset_bytes);
  std::memcpy(bytes.data(), latest.data() + offset_bytes, size);
  return static_cast<int64_t>(size);
}

int64_t SimulatedDisk::DoWrite(uint32_t path, uint64_t offset_bytes,
                               std::span<const std::byte> bytes) {
  if (PowerIsOff()) return -ENODEV;
  const uint64_t operation = operations_++;
  log_.push_back({IoKind::kWrite, path, offset_bytes, bytes.size()});
  if (offset_bytes + bytes.size() > paths_[path].latest.size()) return -ENOSPC;
  const auto size = static_cast<int64_t>(bytes.size());
  if (fault_at_ != operation) {
    Cache(path, offset_bytes, bytes);
    return size;
  }
  fault_fired_ = true;
  switch (fault_.kind) {
    case WriteFault::Kind::kLost:
      break;
    case WriteFault::Kind::kTorn: {
      const size_t sectors = bytes.size() / kSectorBytes;
      Cache(path, offset_bytes, bytes.first(sectors / 2 * kSectorBytes));
      break;
    }
    case WriteFault::Kind::kMisdirected:
      Cache(fault_.path, fault_.offset_bytes, bytes);
      break;
  }
  return size;
}

std::vector<uint64_t> SimulatedDisk::Returned(uint32_t path) const {
  std::vector<uint64_t> ids;
  for (const CachedWrite& write : paths_[path].cache) {
    if (write.returned) ids.push_back(write.id);
  }
  return ids;
}

int64_t SimulatedDisk::DoFlush(uint32_t path, std::span<const uint64_t> covers) {
  if (PowerIsOff()) return -ENODEV;
  const uint64_t operation = operations_++;
  log_.push_back({IoKind::kFlush, path, 0, 0});
  Path& target = paths_[path];
  if (failed_flush_at_ == operation) {
    for (CachedWrite& write : target.cache) write.never_durable = true;
    return -EIO;
  }
  std::vector<CachedWrite> left;
  for (CachedWrite& write : target.cache) {
    if (std::find(covers.begin(), covers.end(), write.id) == covers.end()) {
      left.push_back(std::move(write));
    } else if (!write.never_durable) {
      Copy(write.bytes, target.durable, write.offset_bytes);
    }
  }
  target.cache = std::move(left);
  return 0;
}

int64_t SimulatedDisk::Execute(const Queued& queued) {
  const IoRequest& request = queued.request;
  const uint32_t path = files_[static_cast<uint32_t>(request.file)];
  switch (request.kind) {
    case IoKind::kRead:
      return DoRead(path, request.offset_bytes, {request.data, request.size_bytes});
    case IoKind::kWrite:
      return DoWrite(path, request.offset_bytes, {request.data, request.size_bytes});
    case IoKind::kFlush:
      return DoFlush(path, queued.covers);
    case IoKind::kEvent:
      break;
  }
  return -EINVAL;
}

absl::StatusOr<nvme::FileIndex> SimulatedDisk::RegisterFile(int fd) {
  const int path = fd - kFirstFd;
  if (path < 0 || path >= static_cast<int>(paths_.size())) {
    return absl::InvalidArgumentError(absl::StrFormat("descriptor %d is not of this disk", fd));
  }
  ASSIGN_OR_RETURN(const nvme::FileIndex file, AllocateFileIndex());
  files_[static_cast<uint32_t>(file)] = static_cast<uint32_t>(path);
  return file;
}

void SimulatedDisk::UnregisterFile(nvme::FileIndex file) { ReleaseFileIndex(file); }

bool SimulatedDisk::RegisterBuffer(std::span<std::byte> /*bytes*/) { return false; }

void SimulatedDisk::UnregisterBuffer(std::span<std::byte> /*bytes*/) {}

absl::Status SimulatedDisk::Submit(const IoRequest& request) {
  RETURN_IF_ERROR(Check(request));
  if (queue_.size() >= kBacklogMax) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d transfers are queued: that is the maximum", kBacklogMax));
  }
  queue_.push_back({.request = request, .covers = {}});
  if (request.kind == IoKind::kFlush) {
    queue_.back().covers = Returned(files_[static_cast<uint32_t>(request.file)]);
  }
  return absl::OkStatus();
}

absl::Status SimulatedDisk::WatchEventFd(int fd, uint64_t token) {
  ASSIGN_OR_RETURN(const nvme::internal::WatchKey key, watches_.Add(fd, token));
  watched_.emplace_back(fd, key);
  return absl::OkStatus();
}

void SimulatedDisk::UnwatchEventFd(int fd) {
  nvme::internal::WatchKey key;
  if (!watches_.Remove(fd, key)) return;
  std::erase_if(watched_, [fd](const auto& entry) { return entry.first == fd; });
}

size_t SimulatedDisk::ReportEvents(std::chrono::nanoseconds timeout, std::span<Completion> out) {
  std::vector<pollfd> polled;
  for (const auto& [fd, key] : watched_)
    polled.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  timespec sleep{.tv_sec = timeout.count() / 1'000'000'000,
                 .tv_nsec = timeout.count() % 1'000'000'000};
  ppoll(polled.data(), polled.size(), timeout == kForever ? nullptr : &sleep, nullptr);
  size_t count = 0;
  for (size_t i = 0; i < polled.size() && count < out.size(); ++i) {
    if (polled[i].revents == 0) continue;
    const nvme::internal::Watch* watch = watches_.Find(watched_[i].second);
    const int64_t result = nvme::internal::DrainEventFd(watch->fd);
    if (result == -EAGAIN) continue;
    out[count++] = {.token = watch->token, .result = result, .kind = IoKind::kEvent};
  }
  return count;
}

absl::StatusOr<size_t> SimulatedDisk::Wait(std::chrono::nanoseconds timeout,
                                           std::span<Completion> out) {
  size_t count = 0;
  while (count < out.size() && !queue_.empty()) {
    const bool last = order_ == ExecutionOrder::kLastFirst;
    const auto next = last ? queue_.end() - 1 : queue_.begin();
    const Queued queued = *next;  // stays queued while it executes: a power cut finds it in flight
    const uint64_t before = cached_writes_;
    const int64_t result = Execute(queued);
    queue_.erase(last ? queue_.end() - 1 : queue_.begin());
    for (Path& path : paths_) {
      for (CachedWrite& write : path.cache) write.returned |= write.id > before;
    }
    out[count++] = {.token = queued.request.token, .result = result, .kind = queued.request.kind};
  }
  if (count == out.size()) return count;
  return count +
         ReportEvents(count > 0 ? std::chrono::nanoseconds(0) : timeout, out.subspan(count));
}

absl::StatusOr<std::vector<std::unique_ptr<nvme::SwapFile>>> SimulatedDisk::Open(
    std::span<const nvme::PathOptions> paths, nvme::OpenMode /*mode*/, nvme::FileLife /*life*/,
    nvme::CheckFirstPage check) {
  std::vector<std::unique_ptr<nvme::SwapFile>> files;
  for (size_t i = 0; i < paths.size(); ++i) {
    uint32_t path = 0;
    while (path < paths_.size() && path_name(path) != paths[i].path) ++path;
    if (path == paths_.size()) {
      return protocol::MakeError(
          protocol::ErrorId::kSwapPath,
          absl::StrFormat("swap path %d (%s): no such path", i, paths[i].path));
    }
    if (paths_[path].open) {
      return protocol::MakeError(protocol::ErrorId::kBusy,
                                 absl::StrFormat("swap path %d is in use", i));
    }
    if (paths[i].capacity_bytes > paths_[path].latest.size()) {
      return protocol::MakeError(
          protocol::ErrorId::kSwapNospc,
          absl::StrFormat("cannot reserve %s on swap path %d (free %s)",
                          protocol::FormatBytes(paths[i].capacity_bytes), i,
                          protocol::FormatBytes(paths_[path].latest.size())));
    }
    RETURN_IF_ERROR(check(path_name(path), std::span(paths_[path].latest).first(4096)));
    files.push_back(std::make_unique<File>(*this, path));
  }
  return files;
}

}  // namespace forebay::testing
