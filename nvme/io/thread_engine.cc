// SPDX-License-Identifier: Apache-2.0
#include "nvme/io/thread_engine.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "nvme/io/internal/bounded_queue.h"
#include "nvme/io/internal/watch_table.h"
#include "protocol/error.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"

namespace forebay::nvme {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr uint32_t kThreadsMax = 64;
constexpr int kEventsMax = 64;  // per epoll_wait
constexpr uint64_t kDoneKey = std::numeric_limits<uint64_t>::max();

uint64_t EpollKey(internal::WatchKey key) {
  return (static_cast<uint64_t>(key.slot) << 32) | key.generation;
}

struct Job {
  IoRequest request;
  int fd = -1;
};

// Blocks; on one of the engine's threads.
int64_t Execute(const Job& job) {
  const IoRequest& request = job.request;
  const auto offset = static_cast<off_t>(request.offset_bytes);
  ssize_t result = 0;
  switch (request.kind) {
    case IoKind::kRead:
      result = pread(job.fd, request.data, request.size_bytes, offset);
      break;
    case IoKind::kWrite:
      result = pwrite(job.fd, request.data, request.size_bytes, offset);
      break;
    case IoKind::kFlush:
      result = fdatasync(job.fd);
      break;
    case IoKind::kEvent:
      return -EINVAL;
  }
  return result < 0 ? -errno : result;
}

int Milliseconds(nanoseconds timeout) {
  if (timeout == IoEngine::kForever) return -1;
  const auto rounded_up = (timeout.count() + 999'999) / 1'000'000;
  return static_cast<int>(std::clamp<int64_t>(rounded_up, 0, std::numeric_limits<int>::max()));
}

}  // namespace

struct ThreadEngine::State {
  void Work();
  size_t DrainDone(std::span<Completion> out);
  size_t DrainEvents(std::span<const epoll_event> events, std::span<Completion> out);

  protocol::UniqueFd epoll;
  protocol::UniqueFd done_event;  // written by the threads, one of the epoll set
  std::array<int, kFilesMax> files{};
  internal::WatchTable watches;
  uint32_t unfinished = 0;  // submitted and not yet returned by Wait()

  protocol::Mutex mutex;
  std::condition_variable_any work_ready;
  internal::BoundedQueue<Job> queue ABSL_GUARDED_BY(mutex){kBacklogMax};
  internal::BoundedQueue<Completion> done ABSL_GUARDED_BY(mutex){kBacklogMax};
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  std::vector<std::thread> threads;
};

void ThreadEngine::State::Work() {
  while (true) {
    Job job;
    {
      protocol::MutexLock lock(mutex);
      while (queue.empty() && !stopping) work_ready.wait(mutex);
      if (stopping) return;
      job = queue.Pop();
    }
    const Completion completion = {
        .token = job.request.token, .result = Execute(job), .kind = job.request.kind};
    bool first = false;
    {
      protocol::MutexLock lock(mutex);
      first = done.empty();
      done.Push(completion);
    }
    const uint64_t one = 1;
    // Cannot fail: the counter is far from its end, and the descriptor is ours.
    if (first && write(done_event.get(), &one, sizeof(one)) < 0) std::terminate();
  }
}

size_t ThreadEngine::State::DrainDone(std::span<Completion> out) {
  protocol::MutexLock lock(mutex);
  size_t count = 0;
  while (count < out.size() && !done.empty()) out[count++] = done.Pop();
  unfinished -= static_cast<uint32_t>(count);
  return count;
}

size_t ThreadEngine::State::DrainEvents(std::span<const epoll_event> events,
                                        std::span<Completion> out) {
  size_t count = 0;
  for (const epoll_event& event : events) {
    // Events without room in `out` are level-triggered or queued: the next Wait() returns them.
    if (count == out.size()) break;
    if (event.data.u64 == kDoneKey) {
      internal::DrainEventFd(done_event.get());
      count += DrainDone(out.subspan(count));
      continue;
    }
    const internal::Watch* watch =
        watches.Find({.slot = static_cast<uint32_t>(event.data.u64 >> 32),
                      .generation = static_cast<uint32_t>(event.data.u64)});
    if (watch == nullptr) continue;
    const int64_t result = internal::DrainEventFd(watch->fd);
    if (result == -EAGAIN) continue;
    out[count++] = {.token = watch->token, .result = result, .kind = IoKind::kEvent};
  }
  return count;
}

absl::StatusOr<std::unique_ptr<ThreadEngine>> ThreadEngine::Create(uint32_t threads) {
  if (threads == 0 || threads > kThreadsMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d I/O threads: not in [1, %d]", threads, kThreadsMax));
  }
  auto state = std::make_unique<State>();
  state->epoll.Reset(epoll_create1(EPOLL_CLOEXEC));
  if (!state->epoll.valid()) {
    return absl::ResourceExhaustedError(protocol::ErrnoText("epoll_create1", errno));
  }
  state->done_event.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!state->done_event.valid()) {
    return absl::ResourceExhaustedError(protocol::ErrnoText("eventfd", errno));
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kDoneKey;
  if (epoll_ctl(state->epoll.get(), EPOLL_CTL_ADD, state->done_event.get(), &event) != 0) {
    return absl::ResourceExhaustedError(protocol::ErrnoText("epoll_ctl", errno));
  }
  std::unique_ptr<ThreadEngine> engine(new ThreadEngine(std::move(state)));
  try {
    for (uint32_t i = 0; i < threads; ++i) {
      engine->state_->threads.emplace_back([raw = engine->state_.get()] { raw->Work(); });
    }
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        protocol::ErrnoText("start an I/O thread", error.code().value()));
  }
  return engine;
}

ThreadEngine::ThreadEngine(std::unique_ptr<State> state) : state_(std::move(state)) {}

ThreadEngine::~ThreadEngine() {
  {
    protocol::MutexLock lock(state_->mutex);
    state_->stopping = true;
  }
  state_->work_ready.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

absl::StatusOr<FileIndex> ThreadEngine::RegisterFile(int fd) {
  ASSIGN_OR_RETURN(const FileIndex file, AllocateFileIndex());
  state_->files[static_cast<uint32_t>(file)] = fd;
  return file;
}

void ThreadEngine::UnregisterFile(FileIndex file) { ReleaseFileIndex(file); }

bool ThreadEngine::RegisterBuffer(std::span<std::byte> /*bytes*/) { return false; }

void ThreadEngine::UnregisterBuffer(std::span<std::byte> /*bytes*/) {}

absl::Status ThreadEngine::Submit(const IoRequest& request) {
  RETURN_IF_ERROR(Check(request));
  if (state_->unfinished >= kBacklogMax) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d transfers are queued: that is the maximum", kBacklogMax));
  }
  ++state_->unfinished;
  {
    protocol::MutexLock lock(state_->mutex);
    state_->queue.Push(
        {.request = request, .fd = state_->files[static_cast<uint32_t>(request.file)]});
  }
  state_->work_ready.notify_one();
  return absl::OkStatus();
}

absl::Status ThreadEngine::WatchEventFd(int fd, uint64_t token) {
  ASSIGN_OR_RETURN(internal::WatchKey key, state_->watches.Add(fd, token));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = EpollKey(key);
  if (epoll_ctl(state_->epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    const int error = errno;
    state_->watches.Remove(fd, key);
    return absl::ResourceExhaustedError(protocol::ErrnoText("epoll_ctl", error));
  }
  return absl::OkStatus();
}

void ThreadEngine::UnwatchEventFd(int fd) {
  internal::WatchKey key;
  if (!state_->watches.Remove(fd, key)) return;
  epoll_ctl(state_->epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
}

absl::StatusOr<size_t> ThreadEngine::Wait(nanoseconds timeout, std::span<Completion> out) {
  State& state = *state_;
  const bool forever = timeout == kForever;
  const Clock::time_point deadline = forever ? Clock::time_point::max() : Clock::now() + timeout;
  nanoseconds left = timeout;
  while (true) {
    size_t count = state.DrainDone(out);
    if (count == out.size()) return count;
    epoll_event events[kEventsMax];
    const int ready =
        epoll_wait(state.epoll.get(), events, kEventsMax, count > 0 ? 0 : Milliseconds(left));
    if (ready < 0 && errno != EINTR) {
      return absl::InternalError(protocol::ErrnoText("epoll_wait", errno));
    }
    if (ready > 0) {
      count += state.DrainEvents({events, static_cast<size_t>(ready)}, out.subspan(count));
    }
    if (count > 0 || ready < 0 || left <= nanoseconds::zero()) return count;
    if (!forever) left = std::max(deadline - Clock::now(), Clock::duration::zero());
  }
}

}  // namespace forebay::nvme
