// SPDX-License-Identifier: Apache-2.0
#include "pinned_mem/pinned_arena.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "pinned_mem/internal/memfd.h"
#include "pinned_mem/internal/numa_policy.h"
#include "pinned_mem/internal/segment.h"
#include "pinned_mem/memory_limit.h"
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
  State(const ArenaOptions& arena_options, protocol::UniqueFd memfd,
        internal::Segment whole_segment)
      : options(arena_options),
        fd(std::move(memfd)),
        segment(std::move(whole_segment)),
        huge_pieces(PiecesOf(options.capacity_bytes), 0) {}

  static uint64_t PiecesOf(uint64_t bytes) {
    return (bytes + protocol::kHugePageBytes - 1) / protocol::kHugePageBytes;
  }
  absl::Status Populate(const ArenaPart& part, int threads);
  // Populates a part that has no memory, with the threads of the options.
  absl::Status PopulateNew(const ArenaPart& part);
  // Maps and locks a part that has memory.
  absl::Status Adopt(const ArenaPart& part);
  absl::Status Lock(const ArenaPart& part);
  internal::PopulateOptions HowToPopulate(int threads);
  absl::Status FreePart(const ArenaPart& part);
  void CountHuge();

  ArenaOptions options;
  protocol::UniqueFd fd;
  // Read-only open file description for UseCheck; valid only for kServed.
  protocol::UniqueFd reader;
  internal::Segment segment;
  // 1 for each piece of 2 MiB that is on one huge page. Used only by the worker that populates or frees.
  std::vector<uint8_t> huge_pieces;
  std::atomic<uint64_t> huge_bytes = 0;
  std::atomic<uint64_t> populated_bytes = 0;
  std::vector<int> numa_nodes;
  std::atomic<bool> locked = true;
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

std::vector<ArenaPart> PartsOf(const ArenaOptions& options) {
  if (options.parts) return *options.parts;
  return {{.offset_bytes = 0, .size_bytes = options.capacity_bytes}};
}

absl::Status CheckAvailable(const std::string& name, uint64_t bytes) {
  const uint64_t available = AvailableBytes();
  if (bytes <= available) return absl::OkStatus();
  return MakeError(ErrorId::kDramLimit,
                   absl::StrCat("arena ", name, " needs ", FormatBytes(bytes),
                                " of memory; this node has ", FormatBytes(available), " available"),
                   "end other programs on this node, or lower --dram / dram.limit");
}

absl::Status LockError(const ArenaOptions& options, const ArenaPart& part, int error_number) {
  rlimit limit = {};
  (void)getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string now =
      limit.rlim_cur == RLIM_INFINITY ? "unlimited" : FormatBytes(limit.rlim_cur);
  return MakeError(
      ErrorId::kMemlock,
      absl::StrCat(ErrnoText(absl::StrCat("cannot lock arena ", options.name), error_number),
                   ": needs ", FormatBytes(part.size_bytes), " (", part.size_bytes,
                   " bytes) besides what is locked already, RLIMIT_MEMLOCK is ", now),
      "add the line LimitMEMLOCK=infinity to the [Service] section of the unit, or "
      "\"* - memlock unlimited\" to /etc/security/limits.conf");
}

uint64_t AllocatedBytes(const protocol::UniqueFd& fd) {
  struct stat info = {};
  FOREBAY_CHECK(fstat(fd.get(), &info) == 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;  // stat(2): always units of 512
}

// Checks that all parts of the options have memory. A read of a hole would fill it with zeros.
absl::Status CheckParts(const ArenaOptions& options, const protocol::UniqueFd& fd) {
  const std::vector<ArenaPart> parts = PartsOf(options);
  ASSIGN_OR_RETURN(const std::optional<uint64_t> hole, internal::FindHole(fd, parts));
  if (!hole.has_value()) return absl::OkStatus();
  uint64_t expected_bytes = 0;
  for (const ArenaPart& part : parts) expected_bytes += part.size_bytes;
  return MakeError(
      ErrorId::kCorrupt,
      absl::StrCat("arena ", options.name, " has lost memory at offset ", *hole, ": ",
                   AllocatedBytes(fd), " bytes have some, ", expected_bytes, " should"),
      "attach again, and go on from a checkpoint or a durable step");
}

}  // namespace

absl::StatusOr<std::unique_ptr<PinnedArena>> PinnedArena::Create(const ArenaOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  uint64_t needed_bytes = 0;
  for (const ArenaPart& part : PartsOf(options)) needed_bytes += part.size_bytes;
  RETURN_IF_ERROR(CheckAvailable(options.name, needed_bytes));
  ASSIGN_OR_RETURN(protocol::UniqueFd fd,
                   internal::MakeMemfd(options.name, options.capacity_bytes, options.access));
  return Map(options, std::move(fd), &State::PopulateNew);
}

absl::StatusOr<std::unique_ptr<PinnedArena>> PinnedArena::Adopt(const ArenaOptions& options,
                                                                protocol::UniqueFd fd) {
  RETURN_IF_ERROR(CheckOptions(options));
  RETURN_IF_ERROR(internal::CheckMemfd(fd, options.name, options.capacity_bytes, options.access));
  if (fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0) {
    return MakeError(ErrorId::kInternal,
                     ErrnoText(absl::StrCat("arena ", options.name, ": FD_CLOEXEC"), errno));
  }
  RETURN_IF_ERROR(CheckParts(options, fd));
  return Map(options, std::move(fd), &State::Adopt);
}

absl::StatusOr<std::unique_ptr<PinnedArena>> PinnedArena::Map(
    const ArenaOptions& options, protocol::UniqueFd fd,
    absl::Status (State::*take)(const ArenaPart& part)) {
  protocol::UniqueFd reader;
  if (options.access == Access::kServed) {
    ASSIGN_OR_RETURN(reader, internal::Reopen(fd, O_RDONLY));
  }
  ASSIGN_OR_RETURN(internal::Segment segment,
                   internal::Segment::Map(fd.get(), options.capacity_bytes));
  auto state = std::make_unique<State>(options, std::move(fd), std::move(segment));
  state->reader = std::move(reader);
  std::set<int> nodes;
  for (const ArenaPart& part : PartsOf(options)) {
    RETURN_IF_ERROR((state.get()->*take)(part));
    const auto bytes = state->segment.bytes().subspan(part.offset_bytes, part.size_bytes);
    for (const int node : internal::NodesOfPages(bytes)) nodes.insert(node);
  }
  state->numa_nodes = {nodes.begin(), nodes.end()};
  return std::make_unique<PinnedArena>(std::move(state));
}

internal::PopulateOptions PinnedArena::State::HowToPopulate(int threads) {
  return {.placement = options.placement,
          .threads = threads,
          .populated_bytes = options.populated_bytes.get(),
          .huge_pieces = huge_pieces};
}

absl::Status PinnedArena::State::PopulateNew(const ArenaPart& part) {
  return Populate(part, options.threads);
}

absl::Status PinnedArena::State::Populate(const ArenaPart& part, int threads) {
  absl::Status status = segment.Populate(part, HowToPopulate(threads));
  if (status.ok()) status = Lock(part);
  populated_bytes += part.size_bytes;
  CountHuge();
  if (!status.ok()) (void)FreePart(part);
  return status;
}

absl::Status PinnedArena::State::Adopt(const ArenaPart& part) {
  RETURN_IF_ERROR(segment.MapPages(part, HowToPopulate(options.threads)));
  RETURN_IF_ERROR(Lock(part));
  populated_bytes += part.size_bytes;
  CountHuge();
  return absl::OkStatus();
}

absl::Status PinnedArena::State::Lock(const ArenaPart& part) {
  const int error_number = segment.Lock(part);
  if (error_number == 0) return absl::OkStatus();
  locked = false;
  if (options.lock == LockPolicy::kBestEffort) return absl::OkStatus();
  return LockError(options, part, error_number);
}

absl::Status PinnedArena::State::FreePart(const ArenaPart& part) {
  segment.Unlock(part);
  if (!internal::FreePages(fd.get(), part)) {
    return MakeError(ErrorId::kInternal,
                     ErrnoText(absl::StrCat("arena ", options.name, ": cannot free ",
                                            part.size_bytes, " bytes at ", part.offset_bytes),
                               errno));
  }
  const uint64_t end = part.offset_bytes + part.size_bytes;
  for (uint64_t piece = part.offset_bytes / protocol::kHugePageBytes; piece < PiecesOf(end);
       ++piece) {
    huge_pieces[piece] = 0;
  }
  populated_bytes -= part.size_bytes;
  CountHuge();
  return absl::OkStatus();
}

void PinnedArena::State::CountHuge() {
  huge_bytes =
      protocol::kHugePageBytes * static_cast<uint64_t>(std::ranges::count(huge_pieces, uint8_t{1}));
}

absl::Status PinnedArena::Populate(const ArenaPart& part) {
  RETURN_IF_ERROR(CheckAvailable(state_->options.name, part.size_bytes));
  return state_->Populate(part, /*threads=*/1);
}

absl::Status PinnedArena::FreePart(const ArenaPart& part) { return state_->FreePart(part); }

PinnedArena::PinnedArena(std::unique_ptr<State> state) : state_(std::move(state)) {}

PinnedArena::~PinnedArena() {
  if (state_->options.at_end == AtEnd::kKeepForReaders) return;
  (void)internal::FreePages(state_->fd.get(), {0, capacity_bytes()});
}

std::span<std::byte> PinnedArena::bytes() const { return state_->segment.bytes(); }
uint64_t PinnedArena::capacity_bytes() const { return state_->options.capacity_bytes; }
uint64_t PinnedArena::populated_bytes() const { return state_->populated_bytes; }
uint64_t PinnedArena::huge_bytes() const { return state_->huge_bytes; }
const std::vector<int>& PinnedArena::numa_nodes() const { return state_->numa_nodes; }
bool PinnedArena::locked() const { return state_->locked; }
int PinnedArena::PlacedNode(uint64_t offset_bytes) const {
  return state_->options.placement.NodeAt(offset_bytes);
}
const std::string& PinnedArena::name() const { return state_->options.name; }

uint64_t PinnedArena::allocated_bytes() const { return AllocatedBytes(state_->fd); }

absl::StatusOr<protocol::UniqueFd> PinnedArena::DuplicateFd() const {
  protocol::UniqueFd fd(fcntl(state_->fd.get(), F_DUPFD_CLOEXEC, 0));
  if (fd.valid()) return fd;
  return MakeError(ErrorId::kLimit, ErrnoText(absl::StrCat("arena ", name(), ": dup"), errno),
                   "raise the limit of open files (ulimit -n, LimitNOFILE=)");
}

uint64_t PinnedArena::inode() const {
  struct stat info = {};
  return ::fstat(state_->fd.get(), &info) == 0 ? info.st_ino : 0;
}

void PinnedArena::SetAtEnd(AtEnd at_end) { state_->options.at_end = at_end; }

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

absl::StatusOr<protocol::UniqueFd> PinnedArena::WritableClientFd() const {
  FOREBAY_CHECK(state_->options.access == Access::kServed);
  return internal::ReopenWritable(state_->fd);
}

bool PinnedArena::FreeIfUnused() {
  FOREBAY_CHECK(state_->options.access == Access::kServed);
  const internal::UseCheck check(state_->reader.get());
  if (check.result() == internal::OtherUsers::kSome) return false;
  // A descriptor that is open with O_PATH does not count as a user, but holds the pages.
  (void)internal::FreePages(state_->fd.get(), {0, capacity_bytes()});
  return true;
}

}  // namespace forebay::pinned_mem
