// SPDX-License-Identifier: Apache-2.0
#include "gpu/host_communicator.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/float16.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/units.h"

namespace forebay::gpu {
namespace {

using protocol::Deadline;
using protocol::DType;
using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

constexpr std::chrono::milliseconds kLook{50};  // period of the look for an abort

enum class Kind : uint8_t { kAllGather = 1, kReduceScatter, kAllReduce };

// The operation and the number of bytes with which a rank has reached a barrier.
struct Arrival {
  std::atomic<uint64_t> what{0};  // Operation::what()
  std::atomic<uint64_t> bytes{0};
};

// Written by one rank. Other ranks may still read one arrival while the rank writes the next.
struct alignas(64) RankState {
  std::atomic<uint64_t> barriers{0};  // number of barriers that the rank has reached
  std::array<Arrival, 2> arrivals;
};

void Wake(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Sleep(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec limit{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(kLook).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

float Widen(DType dtype, const std::byte* at) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  if (dtype == DType::kFloat16) return protocol::WidenFp16(bits);
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

// Rounds to nearest, ties to even.
void Narrow(DType dtype, float value, std::byte* to) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  const auto wide = std::bit_cast<uint32_t>(value);
  uint16_t bits = 0;
  if (dtype == DType::kFloat16) {
    bits = protocol::RoundToFp16(wide);
  } else if ((wide & 0x7FFFFFFFu) > 0x7F800000u) {
    bits = static_cast<uint16_t>((wide >> 16) | 0x40u);  // a NaN stays one
  } else {
    bits = static_cast<uint16_t>((wide + 0x7FFFu + ((wide >> 16) & 1)) >> 16);
  }
  std::memcpy(to, &bits, sizeof(bits));
}

// The sum of the ranks' elements, in their order.
void Reduce(std::span<std::byte> to, std::span<const std::byte* const> from, DType dtype,
            Reduction reduction) {
  const uint64_t width = SizeBytes(dtype);
  const auto ranks = static_cast<float>(from.size());
  for (uint64_t at = 0; at < to.size(); at += width) {
    float sum = Widen(dtype, from[0] + at);
    for (size_t rank = 1; rank < from.size(); ++rank) sum += Widen(dtype, from[rank] + at);
    if (reduction == Reduction::kMean) sum /= ranks;
    Narrow(dtype, sum, to.data() + at);
  }
}

}  // namespace

// A collective as all ranks have to call it.
struct HostCommunicator::Operation {
  Kind kind = Kind::kAllGather;
  uint64_t bytes = 0;
  DType dtype = DType::kInt8;
  Reduction reduction = Reduction::kSum;

  uint64_t what() const {
    return static_cast<uint64_t>(kind) | static_cast<uint64_t>(dtype) << 8 |
           static_cast<uint64_t>(reduction) << 16;
  }
  static std::string Describe(uint64_t what, uint64_t bytes) {
    const auto kind = static_cast<Kind>(what & 0xFF);
    const std::string size = absl::StrCat(bytes, " bytes");
    if (kind == Kind::kAllGather) return "an all-gather of " + size;
    const auto reduction = static_cast<Reduction>(what >> 16 & 0xFF);
    return absl::StrCat(kind == Kind::kAllReduce ? "an all-reduce" : "a reduce-scatter", " (",
                        reduction == Reduction::kSum ? "sum" : "mean", ") of ", size, " of type ",
                        what >> 8 & 0xFF);
  }
};

struct HostCommunicator::Shared {
  std::atomic<uint32_t> aborted{0};
  alignas(64) std::atomic<uint32_t> arrivals{0};  // a futex: changes with each
  std::array<RankState, kRanksMax> ranks;
  // Two slots of each rank follow this struct.
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

namespace {

constexpr uint64_t kHeaderBytes = protocol::RoundUp(sizeof(RankState) * 68, protocol::kPageBytes);

absl::StatusOr<UniqueFd> MakeMemory(uint64_t size_bytes) {
  UniqueFd fd(::memfd_create("forebay-collectives", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return MakeError(ErrorId::kLimit, ErrnoText("memfd_create", errno));
  constexpr mode_t kOfOneUser = 0600;
  if (::fchmod(fd.get(), kOfOneUser) != 0 ||
      ::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return MakeError(ErrorId::kLimit, ErrnoText(absl::StrCat("a memfd of ", size_bytes), errno));
  }
  return fd;
}

absl::StatusOr<UniqueFd> OpenMemory(const std::string& path, uint64_t size_bytes) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  struct stat info = {};
  if (!fd.valid() || ::fstat(fd.get(), &info) != 0) {
    return MakeError(ErrorId::kUnsupported,
                     ErrnoText(absl::StrCat("rank 0's memory, ", path), errno),
                     "run the ranks of a node as one user, in one PID namespace");
  }
  if (static_cast<uint64_t>(info.st_size) != size_bytes) {
    return MakeError(ErrorId::kUnsupported,
                     absl::StrCat(path, " has ", info.st_size, " bytes, not ", size_bytes),
                     "use one build of Forebay for all ranks");
  }
  return fd;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostCommunicator>> HostCommunicator::Create(
    const Options& options, const Exchange& exchange) {
  static_assert(sizeof(Shared) <= kHeaderBytes);
  if (options.size == 0 || options.rank >= options.size) {
    return MakeError(ErrorId::kRank,
                     absl::StrCat("rank ", options.rank, " of ", options.size, " ranks"));
  }
  if (options.size > kRanksMax) {
    return MakeError(
        ErrorId::kLimit,
        absl::StrCat(options.size, " ranks; collectives of the host are for at most ", kRanksMax),
        "use fewer ranks on the processor");
  }
  const uint64_t size_bytes = kHeaderBytes + uint64_t{2} * options.size * kSlotBytes;
  // Whatever a rank meets, all hear of it, and none waits.
  absl::StatusOr<UniqueFd> own = UniqueFd();
  if (options.rank == 0) own = MakeMemory(size_bytes);
  std::string first;
  if (options.rank == 0 && own.ok()) {
    first = absl::StrCat("/proc/", ::getpid(), "/fd/", own->get());
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> paths, exchange(first));
  absl::Status status = own.status();
  if (status.ok() && paths.size() != options.size) {
    status = MakeError(ErrorId::kRange,
                       absl::StrCat("an exchange of ", paths.size(), " ranks for ", options.size));
  }
  if (status.ok() && paths[0].empty()) {
    status = MakeError(ErrorId::kLimit, "rank 0 has no memory for collectives");
  }
  if (status.ok() && options.rank != 0) {
    own = OpenMemory(paths[0], size_bytes);
    status = own.status();
  }
  void* mapped = MAP_FAILED;
  if (status.ok()) {
    mapped = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, own->get(), 0);
    if (mapped == MAP_FAILED) {
      status = MakeError(ErrorId::kLimit, ErrnoText("mmap for collectives", errno));
    }
  }
  // Initializes the shared memory once, before any rank passes the exchange that follows.
  if (status.ok() && options.rank == 0) std::construct_at(static_cast<Shared*>(mapped));
  std::unique_ptr<HostCommunicator> made;
  if (status.ok()) {
    made = std::unique_ptr<HostCommunicator>(
        new HostCommunicator(options, static_cast<Shared*>(mapped), size_bytes));
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> outcomes,
                   exchange(status.ok() ? "" : std::string(status.message())));
  RETURN_IF_ERROR(status);
  for (uint32_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].empty()) continue;
    return MakeError(ErrorId::kUnsupported, absl::StrCat("rank ", rank, ": ", outcomes[rank]));
  }
  return made;
}

HostCommunicator::~HostCommunicator() { ::munmap(shared_, mapped_bytes_); }

std::span<std::byte> HostCommunicator::Slot(uint32_t rank) const {
  // A rank that fills a slot for this barrier has passed the barrier before, so no rank still reads this slot.
  const uint64_t index = 2 * uint64_t{rank} + barriers_ % 2;
  return {reinterpret_cast<std::byte*>(shared_) + kHeaderBytes + index * kSlotBytes, kSlotBytes};
}

absl::Status HostCommunicator::Fail(absl::Status status) {
  if (failed_.ok()) failed_ = std::move(status);
  Abort();
  return failed_;
}

void HostCommunicator::Abort() {
  shared_->aborted = 1;
  ++shared_->arrivals;
  Wake(shared_->arrivals);
}

absl::Status HostCommunicator::Check() {
  if (failed_.ok() && shared_->aborted != 0) {
    failed_ = MakeError(ErrorId::kRankLost, "a rank has aborted its collectives");
  }
  return failed_;
}

absl::Status HostCommunicator::CheckOthers(const Operation& operation) {
  for (uint32_t rank = 0; rank < options_.size; ++rank) {
    const Arrival& other = shared_->ranks[rank].arrivals[barriers_ % 2];
    const auto theirs = other.what.load(std::memory_order_relaxed);
    const auto their_bytes = other.bytes.load(std::memory_order_relaxed);
    if (theirs == operation.what() && their_bytes == operation.bytes) continue;
    return Fail(MakeError(
        ErrorId::kRange,
        absl::StrCat("rank ", rank, " is at ", Operation::Describe(theirs, their_bytes), ", rank ",
                     options_.rank, " at ", Operation::Describe(operation.what(), operation.bytes)),
        "call the same collectives, with as many bytes, on every rank"));
  }
  return absl::OkStatus();
}

// Waits until the rank has reached `barriers` barriers.
absl::Status HostCommunicator::WaitFor(uint32_t rank, uint64_t barriers, const Deadline& deadline) {
  Deadline next_check = Deadline::After(kWatchPeriod);
  while (true) {
    const uint32_t seen = shared_->arrivals;
    // Later ones are from a rank that has read what is here, and waits for this rank's next.
    if (shared_->ranks[rank].barriers.load(std::memory_order_acquire) >= barriers) break;
    RETURN_IF_ERROR(Check());
    if (deadline.Expired()) {
      return Fail(MakeError(ErrorId::kRankLost,
                            absl::StrCat("rank ", rank, " has not come to a collective within ",
                                         options_.time_limit.count(), " ms"),
                            "see what that rank printed; start the job again"));
    }
    if (check_ && next_check.Expired()) {
      const absl::Status checked = check_();
      if (!checked.ok()) return Fail(checked);
      next_check = Deadline::After(kWatchPeriod);
    }
    Sleep(shared_->arrivals, seen);
  }
  return absl::OkStatus();
}

absl::Status HostCommunicator::Barrier(const Operation& operation) {
  RETURN_IF_ERROR(Check());
  RankState& own = shared_->ranks[options_.rank];
  Arrival& arrival = own.arrivals[barriers_ % 2];
  arrival.what.store(operation.what(), std::memory_order_relaxed);
  arrival.bytes.store(operation.bytes, std::memory_order_relaxed);
  const uint64_t number = barriers_ + 1;
  own.barriers.store(number, std::memory_order_release);
  ++shared_->arrivals;
  Wake(shared_->arrivals);
  const Deadline deadline = Deadline::After(options_.time_limit);
  for (uint32_t rank = 0; rank < options_.size; ++rank) {
    RETURN_IF_ERROR(WaitFor(rank, number, deadline));
  }
  return CheckOthers(operation);
}

absl::Status HostCommunicator::AllGather(Stream&, std::span<std::byte> to,
                                         std::span<const std::byte> from) {
  RETURN_IF_ERROR(CheckAllGather(options_.size, to.size(), from.size()));
  for (size_t at = 0; at < from.size(); at += kSlotBytes) {
    const size_t bytes = std::min(kSlotBytes, from.size() - at);
    std::ranges::copy(from.subspan(at, bytes), Slot(options_.rank).begin());
    RETURN_IF_ERROR(Barrier({.kind = Kind::kAllGather, .bytes = from.size()}));
    for (uint32_t rank = 0; rank < options_.size; ++rank) {
      std::ranges::copy(Slot(rank).first(bytes),
                        to.begin() + static_cast<ptrdiff_t>(rank * from.size() + at));
    }
    ++barriers_;
  }
  return Check();
}

absl::Status HostCommunicator::ReduceScatter(Stream&, std::span<std::byte> to,
                                             std::span<const std::byte> from, DType dtype,
                                             Reduction reduction) {
  RETURN_IF_ERROR(CheckReduceScatter(options_.size, to.size(), from.size(), dtype));
  const size_t part_bytes = kSlotBytes / options_.size / sizeof(float) * sizeof(float);
  for (size_t at = 0; at < to.size(); at += part_bytes) {
    const size_t bytes = std::min(part_bytes, to.size() - at);
    for (uint32_t rank = 0; rank < options_.size; ++rank) {
      std::ranges::copy(from.subspan(rank * to.size() + at, bytes),
                        Slot(options_.rank).begin() + static_cast<ptrdiff_t>(rank * part_bytes));
    }
    RETURN_IF_ERROR(Barrier({.kind = Kind::kReduceScatter,
                             .bytes = from.size(),
                             .dtype = dtype,
                             .reduction = reduction}));
    std::array<const std::byte*, kRanksMax> parts{};
    for (uint32_t rank = 0; rank < options_.size; ++rank) {
      parts[rank] = Slot(rank).data() + options_.rank * part_bytes;
    }
    Reduce(to.subspan(at, bytes), std::span(parts).first(options_.size), dtype, reduction);
    ++barriers_;
  }
  return Check();
}

absl::Status HostCommunicator::AllReduce(Stream&, std::span<std::byte> bytes, DType dtype,
                                         Reduction reduction) {
  RETURN_IF_ERROR(CheckReduction(bytes.size(), dtype));
  for (size_t at = 0; at < bytes.size(); at += kSlotBytes) {
    const std::span<std::byte> piece = bytes.subspan(at, std::min(kSlotBytes, bytes.size() - at));
    std::ranges::copy(piece, Slot(options_.rank).begin());
    RETURN_IF_ERROR(Barrier(
        {.kind = Kind::kAllReduce, .bytes = bytes.size(), .dtype = dtype, .reduction = reduction}));
    std::array<const std::byte*, kRanksMax> parts{};
    for (uint32_t rank = 0; rank < options_.size; ++rank) parts[rank] = Slot(rank).data();
    Reduce(piece, std::span(parts).first(options_.size), dtype, reduction);
    ++barriers_;
  }
  return Check();
}

}  // namespace forebay::gpu
