// SPDX-License-Identifier: Apache-2.0
#include "nvme/io/uring_engine.h"

#include <liburing.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "nvme/io/internal/bounded_queue.h"
#include "nvme/io/internal/watch_table.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::nvme {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

// Kind of a queue entry, in the top byte of user_data. The other bytes are the key of the entry.
enum class Tag : uint8_t { kTransfer = 1, kWatch = 2, kIgnored = 3 };

constexpr uint64_t kTransferWaitSecondsMax = 60;  // longest wait of the destructor for transfers
// Longest sleep of Wait() while the kernel takes no new entries.
constexpr nanoseconds kUnsentSleepMax(10'000'000);

uint64_t UserData(Tag tag, uint64_t key) { return (static_cast<uint64_t>(tag) << 56) | key; }

uint64_t WatchUserData(internal::WatchKey key) {
  return UserData(Tag::kWatch, (static_cast<uint64_t>(key.slot) << 32) | key.generation);
}

internal::WatchKey WatchKeyOf(uint64_t user_data) {
  return {.slot = static_cast<uint32_t>((user_data >> 32) & 0xFFFFFF),
          .generation = static_cast<uint32_t>(user_data)};
}

struct BufferPiece {
  std::byte* begin = nullptr;  // null: the index is free
  size_t size_bytes = 0;
  const std::byte* owner = nullptr;  // start of the registered span it belongs to
};

struct Transfer {
  uint64_t token = 0;
  IoKind kind = IoKind::kFlush;
};

// A poll that the kernel does not know about yet.
struct PollChange {
  internal::WatchKey key;
  int fd = -1;  // -1: ends the poll
};

}  // namespace

struct UringEngine::State {
  explicit State(uint32_t queue_depth)
      : depth(queue_depth), backlog(kBacklogMax), transfers(queue_depth) {
    free_transfers.reserve(depth);
    for (uint32_t i = depth; i > 0; --i) free_transfers.push_back(i - 1);
  }

  uint32_t in_flight() const { return depth - static_cast<uint32_t>(free_transfers.size()); }

  void EnableOnFirstUse();
  io_uring_sqe* NextEntry();
  void Start(io_uring_sqe* sqe, const IoRequest& request);
  void StartQueued();
  void ArmWatch(internal::WatchKey key, int fd);
  size_t Reap(std::span<Completion> out);
  bool ReportWatch(const io_uring_cqe& cqe, Completion& out);
  bool HasUnsent() const {
    return !poll_changes.empty() || (!backlog.empty() && !free_transfers.empty());
  }
  int FixedBufferOf(const IoRequest& request) const;

  io_uring ring{};
  bool enabled = false;
  bool buffers_usable = false;
  uint32_t depth;
  internal::BoundedQueue<IoRequest> backlog;
  std::vector<Transfer> transfers;
  std::vector<uint32_t> free_transfers;
  internal::WatchTable watches;
  // Changes to submit, oldest first; empty unless the kernel takes no entries.
  std::deque<PollChange> poll_changes;
  std::vector<BufferPiece> pieces;  // registered memory, by buffer index
};

void UringEngine::State::EnableOnFirstUse() {
  if (enabled) return;
  // Enabling makes the calling thread the owner of the ring. Uses the system call, because liburing 2.3 declares
  // io_uring_enable_rings() but does not export it.
  FOREBAY_CHECK(
      syscall(__NR_io_uring_register, ring.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0) == 0);
  enabled = true;
}

// Returns a submission entry. Returns null if the queue is full and the kernel takes no entries now: memory is short, or
// completions must be reaped first. Wait() tries again.
io_uring_sqe* UringEngine::State::NextEntry() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring);
  if (sqe != nullptr) return sqe;
  (void)io_uring_submit(&ring);
  return io_uring_get_sqe(&ring);
}

int UringEngine::State::FixedBufferOf(const IoRequest& request) const {
  for (size_t i = 0; i < pieces.size(); ++i) {
    const BufferPiece& piece = pieces[i];
    if (piece.begin != nullptr && request.data >= piece.begin &&
        request.data + request.size_bytes <= piece.begin + piece.size_bytes) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void UringEngine::State::Start(io_uring_sqe* sqe, const IoRequest& request) {
  const uint32_t slot = free_transfers.back();
  free_transfers.pop_back();
  transfers[slot] = {.token = request.token, .kind = request.kind};

  const int file = static_cast<int>(request.file);
  if (request.kind == IoKind::kFlush) {
    io_uring_prep_fsync(sqe, file, IORING_FSYNC_DATASYNC);
  } else {
    const int buffer = FixedBufferOf(request);
    // Most bytes of a kernel call. A larger request ends as a short transfer.
    const auto size =
        static_cast<unsigned>(std::min<uint64_t>(request.size_bytes, kBufferPieceBytesMax));
    if (request.kind == IoKind::kRead) {
      if (buffer >= 0) {
        io_uring_prep_read_fixed(sqe, file, request.data, size, request.offset_bytes, buffer);
      } else {
        io_uring_prep_read(sqe, file, request.data, size, request.offset_bytes);
      }
    } else {
      if (buffer >= 0) {
        io_uring_prep_write_fixed(sqe, file, request.data, size, request.offset_bytes, buffer);
      } else {
        io_uring_prep_write(sqe, file, request.data, size, request.offset_bytes);
      }
    }
  }
  sqe->flags |= IOSQE_FIXED_FILE;
  io_uring_sqe_set_data64(sqe, UserData(Tag::kTransfer, slot));
}

void UringEngine::State::StartQueued() {
  while (!poll_changes.empty()) {
    io_uring_sqe* sqe = NextEntry();
    if (sqe == nullptr) return;
    const PollChange change = poll_changes.front();
    poll_changes.pop_front();
    if (change.fd >= 0) {
      io_uring_prep_poll_multishot(sqe, change.fd, POLLIN);
      io_uring_sqe_set_data64(sqe, WatchUserData(change.key));
    } else {
      io_uring_prep_poll_remove(sqe, WatchUserData(change.key));
      io_uring_sqe_set_data64(sqe, UserData(Tag::kIgnored, 0));
    }
  }
  while (!backlog.empty() && !free_transfers.empty()) {
    io_uring_sqe* sqe = NextEntry();
    if (sqe == nullptr) return;
    Start(sqe, backlog.Pop());
  }
}

void UringEngine::State::ArmWatch(internal::WatchKey key, int fd) {
  poll_changes.push_back({.key = key, .fd = fd});
  StartQueued();
}

// Fills `out` with the event of a watch. Returns false if the watch was removed, or if its counter was read already.
bool UringEngine::State::ReportWatch(const io_uring_cqe& cqe, Completion& out) {
  const internal::WatchKey key = WatchKeyOf(cqe.user_data);
  const internal::Watch* watch = watches.Find(key);
  if (watch == nullptr) return false;
  const int64_t result = cqe.res >= 0 ? internal::DrainEventFd(watch->fd) : cqe.res;
  // The kernel may end a multishot poll: completions overflowed, memory was short, or the poll was
  // cancelled. Only a closed descriptor cannot be polled again.
  if ((cqe.flags & IORING_CQE_F_MORE) == 0 && cqe.res != -EBADF) ArmWatch(key, watch->fd);
  if (result == -EAGAIN) return false;
  out = {.token = watch->token, .result = result, .kind = IoKind::kEvent};
  return true;
}

size_t UringEngine::State::Reap(std::span<Completion> out) {
  size_t count = 0;
  io_uring_cqe* cqe = nullptr;
  while (count < out.size() && io_uring_peek_cqe(&ring, &cqe) == 0) {
    const io_uring_cqe copy = *cqe;
    io_uring_cqe_seen(&ring, cqe);
    switch (static_cast<Tag>(copy.user_data >> 56)) {
      case Tag::kTransfer: {
        const auto slot = static_cast<uint32_t>(copy.user_data);
        const Transfer& transfer = transfers[slot];
        out[count++] = {.token = transfer.token, .result = copy.res, .kind = transfer.kind};
        free_transfers.push_back(slot);
        break;
      }
      case Tag::kWatch:
        if (ReportWatch(copy, out[count])) ++count;
        break;
      case Tag::kIgnored:
        break;
    }
  }
  return count;
}

absl::StatusOr<std::unique_ptr<UringEngine>> UringEngine::Create(uint32_t depth) {
  if (depth == 0 || depth > kBacklogMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("io_uring depth %d is not in [1, %d]", depth, kBacklogMax));
  }
  auto state = std::make_unique<State>(depth);
  constexpr unsigned kCommon = IORING_SETUP_R_DISABLED | IORING_SETUP_CLAMP | IORING_SETUP_CQSIZE;
  int rc = -EINVAL;
  for (const unsigned flags : {kCommon | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
                               kCommon | IORING_SETUP_COOP_TASKRUN, kCommon}) {
    io_uring_params params{};
    params.flags = flags;
    params.cq_entries = std::max(4 * depth, 1024u);
    rc = io_uring_queue_init_params(std::max(depth, 64u), &state->ring, &params);
    if (rc == 0 && (params.features & IORING_FEAT_EXT_ARG) != 0 &&
        (params.features & IORING_FEAT_NODROP) != 0) {
      break;
    }
    if (rc == 0) {
      io_uring_queue_exit(&state->ring);
      rc = -EOPNOTSUPP;
    }
    if (rc != -EINVAL) break;
  }
  if (rc != 0) return absl::UnavailableError(protocol::ErrnoText("io_uring_setup", -rc));
  rc = io_uring_register_files_sparse(&state->ring, kFilesMax);
  if (rc != 0) {
    io_uring_queue_exit(&state->ring);
    return absl::UnavailableError(protocol::ErrnoText("io_uring: register files", -rc));
  }
  state->buffers_usable = io_uring_register_buffers_sparse(&state->ring, kBufferPiecesMax) == 0;
  return std::unique_ptr<UringEngine>(new UringEngine(std::move(state)));
}

UringEngine::UringEngine(std::unique_ptr<State> state) : state_(std::move(state)) {}

UringEngine::~UringEngine() {
  // Memory of a transfer in flight may be freed after this; so the kernel must be done with it.
  const auto deadline = Clock::now() + std::chrono::seconds(kTransferWaitSecondsMax);
  Completion ignored[16];
  while (state_->enabled && state_->in_flight() > 0 && Clock::now() < deadline) {
    __kernel_timespec second{.tv_sec = 1, .tv_nsec = 0};
    io_uring_cqe* cqe = nullptr;
    const int rc = io_uring_submit_and_wait_timeout(&state_->ring, &cqe, 1, &second, nullptr);
    if (rc < 0 && rc != -ETIME && rc != -EINTR) break;
    while (state_->Reap(ignored) > 0) {
    }
  }
  io_uring_queue_exit(&state_->ring);
}

absl::StatusOr<FileIndex> UringEngine::RegisterFile(int fd) {
  ASSIGN_OR_RETURN(const FileIndex file, AllocateFileIndex());
  const int rc = io_uring_register_files_update(&state_->ring, static_cast<unsigned>(file), &fd, 1);
  if (rc == 1) return file;
  ReleaseFileIndex(file);
  return absl::ResourceExhaustedError(
      protocol::ErrnoText(absl::StrFormat("io_uring: register file %d", fd), rc < 0 ? -rc : EIO));
}

void UringEngine::UnregisterFile(FileIndex file) {
  if (!ReleaseFileIndex(file)) return;
  const int none = -1;
  io_uring_register_files_update(&state_->ring, static_cast<unsigned>(file), &none, 1);
}

bool UringEngine::RegisterBuffer(std::span<std::byte> bytes) {
  if (!state_->buffers_usable || bytes.empty()) return false;
  std::vector<BufferPiece>& pieces = state_->pieces;
  for (size_t done = 0; done < bytes.size();) {
    const size_t size = std::min<uint64_t>(bytes.size() - done, kBufferPieceBytesMax);
    const auto free = std::find_if(pieces.begin(), pieces.end(),
                                   [](const BufferPiece& piece) { return piece.begin == nullptr; });
    const auto index = static_cast<unsigned>(free - pieces.begin());
    const iovec piece = {.iov_base = bytes.data() + done, .iov_len = size};
    const __u64 tag = 0;
    if (index >= kBufferPiecesMax ||
        io_uring_register_buffers_update_tag(&state_->ring, index, &piece, &tag, 1) != 1) {
      UnregisterBuffer(bytes);
      return false;
    }
    if (index == pieces.size()) pieces.emplace_back();
    pieces[index] = {.begin = bytes.data() + done, .size_bytes = size, .owner = bytes.data()};
    done += size;
  }
  return true;
}

void UringEngine::UnregisterBuffer(std::span<std::byte> bytes) {
  for (size_t i = 0; i < state_->pieces.size(); ++i) {
    BufferPiece& piece = state_->pieces[i];
    if (piece.begin == nullptr || piece.owner != bytes.data()) continue;
    const iovec none{};
    const __u64 tag = 0;
    io_uring_register_buffers_update_tag(&state_->ring, static_cast<unsigned>(i), &none, &tag, 1);
    piece = {};
  }
}

absl::Status UringEngine::Submit(const IoRequest& request) {
  RETURN_IF_ERROR(Check(request));
  if (state_->backlog.size() + state_->in_flight() >= kBacklogMax) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d transfers are queued: that is the maximum", kBacklogMax));
  }
  state_->EnableOnFirstUse();
  state_->backlog.Push(request);
  state_->StartQueued();
  return absl::OkStatus();
}

absl::Status UringEngine::WatchEventFd(int fd, uint64_t token) {
  ASSIGN_OR_RETURN(const internal::WatchKey key, state_->watches.Add(fd, token));
  state_->EnableOnFirstUse();
  state_->ArmWatch(key, fd);
  return absl::OkStatus();
}

void UringEngine::UnwatchEventFd(int fd) {
  internal::WatchKey key;
  if (!state_->watches.Remove(fd, key)) return;
  // The caller closes the descriptor, and its number may soon name another file. Drops a poll that was not submitted, and ends
  // a submitted poll at once.
  std::deque<PollChange>& changes = state_->poll_changes;
  if (std::erase_if(changes, [fd](const PollChange& change) { return change.fd == fd; }) > 0) {
    return;
  }
  changes.push_back({.key = key});
  state_->StartQueued();
  (void)io_uring_submit(&state_->ring);
}

absl::StatusOr<size_t> UringEngine::Wait(nanoseconds timeout, std::span<Completion> out) {
  State& state = *state_;
  state.EnableOnFirstUse();
  const bool forever = timeout == kForever;
  const Clock::time_point deadline = forever ? Clock::time_point::max() : Clock::now() + timeout;
  nanoseconds left = timeout;
  while (true) {
    state.StartQueued();
    size_t count = state.Reap(out);
    int rc = 0;
    if (count > 0) {
      state.StartQueued();
      if (io_uring_sq_ready(&state.ring) > 0) rc = io_uring_submit(&state.ring);
    } else if (left <= nanoseconds::zero()) {
      rc = io_uring_submit_and_get_events(&state.ring);
      count = state.Reap(out);
    } else {
      const nanoseconds longest = state.HasUnsent() ? std::min(left, kUnsentSleepMax) : left;
      __kernel_timespec sleep{.tv_sec = longest.count() / 1'000'000'000,
                              .tv_nsec = longest.count() % 1'000'000'000};
      io_uring_cqe* cqe = nullptr;
      rc = io_uring_submit_and_wait_timeout(&state.ring, &cqe, 1,
                                            longest == kForever ? nullptr : &sleep, nullptr);
      count = state.Reap(out);
    }
    // EAGAIN and EBUSY: the kernel is short of memory or completions overflowed; reaping helps.
    if (rc < 0 && rc != -ETIME && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) {
      return absl::InternalError(protocol::ErrnoText("io_uring_enter", -rc));
    }
    if (count > 0 || rc == -EINTR || left <= nanoseconds::zero()) return count;
    // Only internal entries completed: sleeps for the rest of the time.
    if (!forever) left = std::max(deadline - Clock::now(), Clock::duration::zero());
  }
}

}  // namespace forebay::nvme
