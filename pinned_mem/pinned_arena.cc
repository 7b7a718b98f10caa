#include "pinned_mem/pinned_arena.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinned_mem/internal/memfd.h"
#include "pinned_mem/internal/page_nodes.h"
#include "pinned_mem/internal/segment.h"
#include "pinned_mem/memory_limit.h"
#include "pinned_mem/range_allocator.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::pinned_mem {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::kPageBytes;
using protocol::MakeError;

struct PinnedArena::State {
  ArenaOptions options;
  protocol::UniqueFd fd;
  // kServed: a read-only description for UseCheck.
  protocol::UniqueFd reader;
  internal::Segment segment;
  uint64_t huge_bytes;
  std::vector<int> numa_nodes;
  bool locked;
  RangeAllocator ranges;
};

namespace {

constexpr uint64_t kCapacityBytesMax = uint64_t{1} << 46;

absl::Status CheckOptions(const ArenaOptions& options) {
  if (options.name.empty() || options.name.size() > PinnedArena::kNameBytesMax ||
      options.name.find('/') != std::string::npos) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("arena name \"", options.name, "\" is not 1 to ",
                                  PinnedArena::kNameBytesMax, " bytes without '/'"));
  }
  if (options.capacity_bytes == 0 || options.capacity_bytes % kPageBytes != 0 ||
      options.capacity_bytes > kCapacityBytesMax) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("arena ", options.name, ": ", options.capacity_bytes,
                                  " bytes is not a multiple of ", kPageBytes, " above 0 and up to ",
                                  FormatBytes(kCapacityBytesMax)));
  }
  return absl::OkStatus();
}

absl::Status CheckAvailable(const ArenaOptions& options) {
  const uint64_t available = AvailableBytes();
  if (options.capacity_bytes <= available) return absl::OkStatus();
  return MakeError(
      ErrorId::kDramLimit,
      absl::StrCat("arena ", options.name, " needs ", FormatBytes(options.capacity_bytes),
                   " of memory; this node has ", FormatBytes(available), " available"),
      "end other programs on this node, or lower --dram / dram.limit");
}

absl::Status LockError(const ArenaOptions& options, int error_number) {
  rlimit limit = {};
  (void)getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string now =
      limit.rlim_cur == RLIM_INFINITY ? "unlimited" : FormatBytes(limit.rlim_cur);
  return MakeError(
      ErrorId::kMemlock,
      absl::StrCat(ErrnoText(absl::StrCat("cannot lock arena ", options.name), error_number),
                   ": needs ", FormatBytes(options.capacity_bytes), " (", options.capacity_bytes,
                   " bytes) besides what is locked already, RLIMIT_MEMLOCK is ", now),
      "add the line LimitMEMLOCK=infinity to the [Service] section of the unit, or "
      "\"* - memlock unlimited\" to /etc/security/limits.conf");
}

}  // namespace

absl::StatusOr<std::unique_ptr<PinnedArena>> PinnedArena::Create(const ArenaOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  RETURN_IF_ERROR(CheckAvailable(options));
  ASSIGN_OR_RETURN(protocol::UniqueFd fd,
                   internal::MakeMemfd(options.name, options.capacity_bytes, options.access));
  protocol::UniqueFd reader;
  if (options.access == Access::kServed) {
    ASSIGN_OR_RETURN(reader, internal::Reopen(fd, O_RDONLY));
  }
  ASSIGN_OR_RETURN(internal::Segment segment,
                   internal::Segment::Map(fd.get(), options.capacity_bytes));
  ASSIGN_OR_RETURN(const uint64_t huge_bytes,
                   segment.Populate({.placement = options.placement,
                                     .threads = options.threads,
                                     .populated_bytes = options.populated_bytes.get()}));
  std::vector<int> numa_nodes = internal::NodesOfPages(segment.bytes());
  const int lock_error = segment.Lock();
  if (lock_error != 0 && options.lock == LockPolicy::kRequired) {
    return LockError(options, lock_error);
  }
  return std::make_unique<PinnedArena>(std::make_unique<State>(State{
      .options = options,
      .fd = std::move(fd),
      .reader = std::move(reader),
      .segment = std::move(segment),
      .huge_bytes = huge_bytes,
      .numa_nodes = std::move(numa_nodes),
      .locked = lock_error == 0,
      .ranges = RangeAllocator(options.capacity_bytes / kPageBytes, kMaxRanges),
  }));
}

PinnedArena::PinnedArena(std::unique_ptr<State> state) : state_(std::move(state)) {}

PinnedArena::~PinnedArena() {
  FOREBAY_CHECK(state_->ranges.live_ranges() == 0);  // a range would dangle
  if (state_->options.at_end == AtEnd::kKeepForReaders) return;
  (void)internal::FreePages(state_->fd.get(), capacity_bytes());
}

absl::StatusOr<PinnedArena::Range> PinnedArena::Allocate(uint64_t size_bytes) {
  if (size_bytes == 0 || size_bytes > capacity_bytes()) {
    return MakeError(ErrorId::kRange, absl::StrCat("arena ", name(), ": a range of ", size_bytes,
                                                   " bytes does not fit ", capacity_bytes()));
  }
  const uint64_t rounded_bytes = protocol::RoundUp(size_bytes, kRangeAlignment);
  const std::optional<uint64_t> page = state_->ranges.Allocate(rounded_bytes / kPageBytes);
  if (!page.has_value()) {
    return MakeError(
        ErrorId::kLimit,
        absl::StrCat("arena ", name(), ": no free run of ", rounded_bytes, " bytes (free ",
                     free_bytes(), ", longest run ",
                     state_->ranges.largest_free_pages() * kPageBytes, ", live ranges ",
                     state_->ranges.live_ranges(), " of ", kMaxRanges, ")"));
  }
  return Range(*this, *page * kPageBytes, size_bytes);
}

std::span<std::byte> PinnedArena::bytes() const { return state_->segment.bytes(); }
uint64_t PinnedArena::capacity_bytes() const { return state_->options.capacity_bytes; }
uint64_t PinnedArena::huge_bytes() const { return state_->huge_bytes; }
uint64_t PinnedArena::free_bytes() const { return state_->ranges.free_pages() * kPageBytes; }
const std::vector<int>& PinnedArena::numa_nodes() const { return state_->numa_nodes; }
bool PinnedArena::locked() const { return state_->locked; }
int PinnedArena::PlacedNode(uint64_t offset_bytes) const {
  return state_->options.placement.NodeAt(offset_bytes);
}
const std::string& PinnedArena::name() const { return state_->options.name; }

uint64_t PinnedArena::allocated_bytes() const {
  struct stat info = {};
  FOREBAY_CHECK(fstat(state_->fd.get(), &info) == 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;  // stat(2): always units of 512
}

absl::StatusOr<protocol::UniqueFd> PinnedArena::ClientFd() const {
  switch (state_->options.access) {
    case Access::kPrivate:
      break;
    case Access::kServed:
      return internal::Reopen(state_->fd, O_RDONLY);
    case Access::kShared:
      return internal::Reopen(state_->fd, O_RDWR);
  }
  return MakeError(ErrorId::kRange,
                   absl::StrCat("arena ", name(), " is private: no client may open it"));
}

bool PinnedArena::FreeIfUnused() {
  FOREBAY_CHECK(state_->options.access == Access::kServed);
  const internal::UseCheck check(state_->reader.get());
  if (check.result() == internal::OtherUsers::kSome) return false;
  // A descriptor that is open with O_PATH is no user, but would keep the pages.
  (void)internal::FreePages(state_->fd.get(), capacity_bytes());
  return true;
}

PinnedArena::Range::Range(PinnedArena& arena, uint64_t offset_bytes, uint64_t size_bytes)
    : arena_(&arena), offset_bytes_(offset_bytes), size_bytes_(size_bytes) {}

PinnedArena::Range::Range(Range&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      offset_bytes_(other.offset_bytes_),
      size_bytes_(other.size_bytes_) {}

PinnedArena::Range& PinnedArena::Range::operator=(Range&& other) noexcept {
  if (this == &other) return *this;
  Release();
  arena_ = std::exchange(other.arena_, nullptr);
  offset_bytes_ = other.offset_bytes_;
  size_bytes_ = other.size_bytes_;
  return *this;
}

PinnedArena::Range::~Range() { Release(); }

void PinnedArena::Range::Release() {
  if (arena_ == nullptr) return;
  arena_->state_->ranges.Release(offset_bytes_ / kPageBytes);
  arena_ = nullptr;
}

std::span<std::byte> PinnedArena::Range::bytes() const {
  return arena_->bytes().subspan(offset_bytes_, size_bytes_);
}

uint64_t PinnedArena::Range::offset_bytes() const { return offset_bytes_; }

}  // namespace forebay::pinned_mem
