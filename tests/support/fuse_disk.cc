// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fuse_disk.h"

#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kRootNode = FUSE_ROOT_ID;
constexpr uint64_t kFileNode = 2;
constexpr std::string_view kFileName = "forebay.swap";
constexpr uint32_t kTransferBytesMax = 1 << 20;
constexpr uint64_t kPageBytes = 4096;
constexpr uint32_t kBackgroundMax = 1024;  // a hanging request must not block other requests

const fuse_in_header& HeaderOf(std::span<const std::byte> request) {
  return *reinterpret_cast<const fuse_in_header*>(request.data());
}

template <typename T>
const T& BodyOf(std::span<const std::byte> request) {
  return *reinterpret_cast<const T*>(request.data() + sizeof(fuse_in_header));
}

// Returns the name that follows a body of type T in a request that ends with a name.
template <typename T>
std::string_view NameBehind(std::span<const std::byte> request) {
  return reinterpret_cast<const char*>(request.data() + sizeof(fuse_in_header) + sizeof(T));
}

struct Nothing {};  // stands for an empty body; its size is 1
template <>
std::string_view NameBehind<Nothing>(std::span<const std::byte> request) {
  return reinterpret_cast<const char*>(request.data() + sizeof(fuse_in_header));
}

// Enters a mount namespace once per process: only this thread and its children see later mounts.
int EnterMountNamespace() {
  static const int error = [] {
    if (::unshare(CLONE_NEWNS) != 0) return errno;
    return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 ? 0 : errno;
  }();
  return error;
}

bool Concerns(DiskFault::Of of, uint32_t opcode) {
  switch (of) {
    case DiskFault::Of::kReads:
      return opcode == FUSE_READ;
    case DiskFault::Of::kWrites:
      return opcode == FUSE_WRITE;
    case DiskFault::Of::kBoth:
      return true;
    case DiskFault::Of::kFlushes:
      return false;
  }
  return false;
}

bool IsOfWritesAlone(DiskFault::Kind kind) {
  return kind == DiskFault::Kind::kLose || kind == DiskFault::Kind::kMisdirect;
}

}  // namespace

absl::StatusOr<std::unique_ptr<FuseDisk>> FuseDisk::Mount(const std::string& folder,
                                                          uint64_t capacity_bytes) {
  std::unique_ptr<FuseDisk> disk(new FuseDisk(folder, capacity_bytes));
  disk->device_.Reset(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
  if (!disk->device_.valid()) {
    return absl::UnavailableError(protocol::ErrnoText("open /dev/fuse", errno));
  }
  if (const int error = EnterMountNamespace(); error != 0) {
    return absl::UnavailableError(protocol::ErrnoText("make a mount namespace", error));
  }
  const std::string options =
      absl::StrCat("fd=", disk->device_.get(), ",rootmode=40000,user_id=0,group_id=0,allow_other");
  if (::mount("forebay-test", folder.c_str(), "fuse", MS_NOSUID | MS_NODEV, options.c_str()) != 0) {
    const absl::Status status =
        absl::UnavailableError(protocol::ErrnoText(absl::StrCat("mount ", folder), errno));
    disk->folder_.clear();
    return status;
  }
  disk->wake_.Reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  FOREBAY_CHECK(disk->wake_.valid());
  disk->server_ = std::thread([served = disk.get()] { served->Serve(); });
  return disk;
}

FuseDisk::~FuseDisk() {
  if (!folder_.empty()) (void)::umount2(folder_.c_str(), MNT_FORCE | MNT_DETACH);
  if (!server_.joinable()) return;
  stopping_ = true;
  (void)::eventfd_write(wake_.get(), 1);
  server_.join();
}

void FuseDisk::Order(const DiskFault& fault) {
  std::vector<Request> ended;
  {
    const protocol::MutexLock lock(mutex_);
    fault_ = fault;
    ended = std::exchange(hung_, {});
  }
  faults_ = 0;
  hung_count_ = 0;
  for (const Request& request : ended) CarryOut(request, {});
}

void FuseDisk::StartLog() {
  const protocol::MutexLock lock(mutex_);
  logs_ = true;
}

size_t FuseDisk::logged() const {
  const protocol::MutexLock lock(mutex_);
  return log_.size();
}

std::vector<DiskWrite> FuseDisk::DrainLog() {
  const protocol::MutexLock lock(mutex_);
  return std::exchange(log_, {});
}

int FuseDisk::Flush() {
  const protocol::MutexLock lock(mutex_);
  if (fault_.of == DiskFault::Of::kFlushes && fault_.count > 0) {
    --fault_.count;
    ++faults_;
    return fault_.error;
  }
  if (logs_) log_.push_back({.offset_bytes = 0, .bytes = {}, .is_flush = true});
  return 0;
}

void FuseDisk::Serve() {
  std::vector<std::byte> room(kTransferBytesMax + kPageBytes);
  while (!stopping_) {
    std::array<pollfd, 2> waits = {{{.fd = device_.get(), .events = POLLIN, .revents = 0},
                                    {.fd = wake_.get(), .events = POLLIN, .revents = 0}}};
    if (::poll(waits.data(), waits.size(), AnswerDelayed()) <= 0) continue;
    if ((waits[0].revents & (POLLIN | POLLERR)) == 0) continue;
    const ssize_t size = ::read(device_.get(), room.data(), room.size());
    if (size < 0 && errno == ENODEV) return;  // unmounted
    if (size < static_cast<ssize_t>(sizeof(fuse_in_header))) continue;
    Handle({.bytes = std::vector<std::byte>(room.begin(), room.begin() + size)});
  }
}

// Answers delayed requests that are due. Returns the milliseconds until the next one is due, -1 if none is delayed.
int FuseDisk::AnswerDelayed() {
  while (!delayed_.empty() && delayed_.front().due <= Clock::now()) {
    CarryOut(delayed_.front(), {});
    delayed_.pop_front();
  }
  if (delayed_.empty()) return -1;
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(delayed_.front().due - Clock::now());
  return static_cast<int>(std::max<int64_t>(0, left.count()));
}

// Writes the answer to the kernel. The write fails if the request was aborted meanwhile; the failure is ignored.
void FuseDisk::Answer(const Request& request, int error, std::span<const std::byte> bytes) {
  fuse_out_header header = {.len = static_cast<uint32_t>(sizeof(header) + bytes.size()),
                            .error = -error,
                            .unique = HeaderOf(request.bytes).unique};
  std::array<iovec, 2> parts = {
      {{.iov_base = &header, .iov_len = sizeof(header)},
       {.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = bytes.size()}}};
  (void)!::writev(device_.get(), parts.data(), bytes.empty() ? 1 : 2);
}

template <typename T>
void FuseDisk::AnswerWith(const Request& request, const T& body) {
  Answer(request, 0, std::as_bytes(std::span(&body, 1)));
}

void FuseDisk::Init(const Request& request) {
  const auto& asked = BodyOf<fuse_init_in>(request.bytes);
  fuse_init_out out = {};
  out.major = FUSE_KERNEL_VERSION;
  out.minor = std::min<uint32_t>(asked.minor, 31);
  out.max_readahead = 0;
  out.flags = asked.flags & (FUSE_ASYNC_READ | FUSE_ASYNC_DIO | FUSE_BIG_WRITES | FUSE_MAX_PAGES);
  out.max_background = kBackgroundMax;
  out.congestion_threshold = kBackgroundMax;
  out.max_write = kTransferBytesMax;
  out.time_gran = 1;
  out.max_pages = kTransferBytesMax / kPageBytes;
  AnswerWith(request, out);
}

static fuse_attr AttributesOf(uint64_t node, uint64_t size_bytes) {
  fuse_attr attributes = {};
  attributes.ino = node;
  attributes.size = size_bytes;
  attributes.blocks = size_bytes / 512;
  attributes.mode = node == kRootNode ? S_IFDIR | 0755 : S_IFREG | 0600;
  attributes.nlink = 1;
  attributes.blksize = kPageBytes;
  return attributes;
}

void FuseDisk::AnswerAttributes(const Request& request) {
  const uint64_t node = HeaderOf(request.bytes).nodeid;
  fuse_attr_out out = {};
  out.attr_valid = 3600;
  const protocol::MutexLock lock(mutex_);
  out.attr = AttributesOf(node, node == kFileNode ? file_.size() : 0);
  AnswerWith(request, out);
}

void FuseDisk::AnswerEntry(const Request& request) {
  struct {
    fuse_entry_out entry = {};
    fuse_open_out open = {};
  } out;
  out.entry.nodeid = kFileNode;
  out.entry.attr_valid = 3600;
  {
    const protocol::MutexLock lock(mutex_);
    out.entry.attr = AttributesOf(kFileNode, file_.size());
  }
  if (HeaderOf(request.bytes).opcode == FUSE_CREATE) return AnswerWith(request, out);
  AnswerWith(request, out.entry);
}

void FuseDisk::Handle(Request request) {
  switch (HeaderOf(request.bytes).opcode) {
    case FUSE_INIT:
      return Init(request);
    case FUSE_LOOKUP:
      if (!exists_ || NameBehind<Nothing>(request.bytes) != kFileName) {
        return Answer(request, ENOENT);
      }
      return AnswerEntry(request);
    case FUSE_CREATE:
      if (NameBehind<fuse_create_in>(request.bytes) != kFileName) return Answer(request, EPERM);
      exists_ = true;
      return AnswerEntry(request);
    case FUSE_GETATTR:
      return AnswerAttributes(request);
    case FUSE_SETATTR: {
      const auto& wanted = BodyOf<fuse_setattr_in>(request.bytes);
      if ((wanted.valid & FATTR_SIZE) != 0) {
        const protocol::MutexLock lock(mutex_);
        file_.resize(wanted.size);
      }
      return AnswerAttributes(request);
    }
    case FUSE_FALLOCATE: {
      const auto& wanted = BodyOf<fuse_fallocate_in>(request.bytes);
      if (wanted.offset + wanted.length > capacity_bytes_) return Answer(request, ENOSPC);
      {
        const protocol::MutexLock lock(mutex_);
        file_.resize(std::max<uint64_t>(file_.size(), wanted.offset + wanted.length));
      }
      return Answer(request, 0);
    }
    case FUSE_STATFS: {
      fuse_statfs_out out = {};
      out.st.blocks = out.st.bfree = out.st.bavail = capacity_bytes_ / kPageBytes;
      out.st.bsize = out.st.frsize = kPageBytes;
      out.st.namelen = 255;
      return AnswerWith(request, out);
    }
    case FUSE_OPEN:
    case FUSE_OPENDIR:
      return AnswerWith(request, fuse_open_out{});
    case FUSE_READ:
    case FUSE_WRITE:
      return HandleTransfer(std::move(request));
    case FUSE_UNLINK:
      exists_ = false;
      return Answer(request, 0);
    case FUSE_FSYNC:
      return Answer(request, Flush());
    case FUSE_FSYNCDIR:
    case FUSE_FLUSH:
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
    case FUSE_READDIR:
      return Answer(request, 0);
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
      return;  // these requests get no answer
    default:
      return Answer(request, ENOSYS);
  }
}

void FuseDisk::HandleTransfer(Request request) {
  ++transfers_;
  const uint32_t opcode = HeaderOf(request.bytes).opcode;
  DiskFault fault;
  {
    const protocol::MutexLock lock(mutex_);
    const bool is_write = opcode == FUSE_WRITE;
    const bool fires =
        fault_.kind != DiskFault::Kind::kNone && fault_.count > 0 && Concerns(fault_.of, opcode) &&
        (is_write ? fault_.kind != DiskFault::Kind::kRot : !IsOfWritesAlone(fault_.kind));
    if (fires) {
      --fault_.count;
      ++faults_;
      fault = fault_;
    }
    if (fault.kind == DiskFault::Kind::kHang) {
      hung_.push_back(std::move(request));
      ++hung_count_;
      return;
    }
  }
  if (fault.kind == DiskFault::Kind::kDelay) {
    request.due = Clock::now() + fault.delay;
    delayed_.push_back(std::move(request));
    return;
  }
  if (fault.kind == DiskFault::Kind::kRate) {
    // fuse_read_in and fuse_write_in have the size at the same offset.
    const uint64_t bytes = BodyOf<fuse_read_in>(request.bytes).size;
    const auto begin = delayed_.empty() ? std::max(Clock::now(), free_at_) : free_at_;
    free_at_ = begin + std::chrono::nanoseconds(bytes * 1'000'000'000 / fault.bytes_per_second);
    request.due = free_at_;
    delayed_.push_back(std::move(request));
    return;
  }
  CarryOut(request, fault);
}

void FuseDisk::CarryOut(const Request& request, const DiskFault& fault) {
  if (fault.kind == DiskFault::Kind::kFail) return Answer(request, fault.error);
  const auto part = [&fault](uint64_t size) {
    if (fault.kind != DiskFault::Kind::kShort || size <= kPageBytes) return size;
    return size / 2 / kPageBytes * kPageBytes;
  };
  const protocol::MutexLock lock(mutex_);
  if (HeaderOf(request.bytes).opcode == FUSE_READ) {
    const auto& wanted = BodyOf<fuse_read_in>(request.bytes);
    const uint64_t begin = std::min<uint64_t>(wanted.offset, file_.size());
    const uint64_t size = part(std::min<uint64_t>(wanted.size, file_.size() - begin));
    std::vector<std::byte> bytes(file_.begin() + static_cast<ptrdiff_t>(begin),
                                 file_.begin() + static_cast<ptrdiff_t>(begin + size));
    if (fault.kind == DiskFault::Kind::kRot && !bytes.empty()) bytes[size / 2] ^= std::byte{4};
    return Answer(request, 0, bytes);
  }
  const auto& wanted = BodyOf<fuse_write_in>(request.bytes);
  const std::span<const std::byte> bytes =
      std::span(request.bytes).subspan(sizeof(fuse_in_header) + sizeof(fuse_write_in));
  const uint64_t size = part(std::min<uint64_t>(wanted.size, bytes.size()));
  uint64_t offset = wanted.offset;
  if (fault.kind == DiskFault::Kind::kMisdirect) {
    offset = (offset + fault.shift_bytes) % (file_.size() - size);
  }
  if (offset + size > file_.size()) file_.resize(offset + size);
  if (logs_) {
    log_.push_back({.offset_bytes = offset,
                    .bytes = {bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size)}});
  }
  if (fault.kind != DiskFault::Kind::kLose) {
    std::copy_n(bytes.begin(), size, file_.begin() + static_cast<ptrdiff_t>(offset));
  }
  fuse_write_out out = {};
  out.size = static_cast<uint32_t>(size);
  AnswerWith(request, out);
}

}  // namespace forebay::testing
