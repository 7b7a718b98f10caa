// SPDX-License-Identifier: Apache-2.0
#include "nvme/io/rate_limited_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::nvme {

using std::chrono::nanoseconds;

RateLimitedEngine::RateLimitedEngine(std::unique_ptr<IoEngine> engine,
                                     std::vector<uint64_t> bytes_per_s,
                                     std::function<Clock::time_point()> now)
    : engine_(std::move(engine)),
      bytes_per_s_(std::move(bytes_per_s)),
      now_(now ? std::move(now) : [] { return Clock::now(); }),
      transfers_(kBacklogMax) {
  FOREBAY_CHECK(!bytes_per_s_.empty() && !std::ranges::count(bytes_per_s_, uint64_t{0}));
  free_transfers_.reserve(kBacklogMax);
  for (uint32_t i = kBacklogMax; i > 0; --i) free_transfers_.push_back(i - 1);
  held_.reserve(kBacklogMax);
}

RateLimitedEngine::Clock::time_point RateLimitedEngine::Due(const IoRequest& request) {
  const auto file = static_cast<size_t>(request.file);
  const Clock::time_point now = now_();
  if (request.kind == IoKind::kFlush || file >= free_at_.size()) return now;
  const uint64_t rate = bytes_per_s_[std::min(file, bytes_per_s_.size() - 1)];
  const double seconds = static_cast<double>(request.size_bytes) / static_cast<double>(rate);
  return std::max(now, free_at_[file]) + nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

absl::Status RateLimitedEngine::Submit(const IoRequest& request) {
  if (free_transfers_.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d transfers are queued: that is the maximum", kBacklogMax));
  }
  const uint32_t number = free_transfers_.back();
  const Clock::time_point due = Due(request);
  IoRequest below = request;
  below.token = number;
  RETURN_IF_ERROR(engine_->Submit(below));
  free_transfers_.pop_back();
  transfers_[number] = {.token = request.token, .due = due};
  if (request.kind != IoKind::kFlush) free_at_[static_cast<size_t>(request.file)] = due;
  return absl::OkStatus();
}

// Moves held completions that are due to `out`. Returns their number.
size_t RateLimitedEngine::DrainDue(std::span<Completion> out) {
  if (held_.empty()) return 0;
  const Clock::time_point now = now_();
  size_t count = 0;
  while (count < out.size() && !held_.empty() && held_.front().due <= now) {
    out[count++] = held_.front().completion;
    free_transfers_.push_back(held_.front().number);
    std::ranges::pop_heap(held_, std::greater());
    held_.pop_back();
  }
  return count;
}

// Moves events and due completions to the front, with the caller's tokens, and holds the other completions until they are due.
// Returns the number of entries at the front.
size_t RateLimitedEngine::HoldEarly(std::span<Completion> ended) {
  const Clock::time_point now = now_();
  size_t count = 0;
  for (Completion completion : ended) {
    if (completion.kind == IoKind::kEvent) {
      ended[count++] = completion;
      continue;
    }
    const auto number = static_cast<uint32_t>(completion.token);
    const Transfer transfer = transfers_[number];
    completion.token = transfer.token;
    if (transfer.due <= now) {
      ended[count++] = completion;
      free_transfers_.push_back(number);
      continue;
    }
    held_.push_back(
        {.due = transfer.due, .order = ended_++, .number = number, .completion = completion});
    std::ranges::push_heap(held_, std::greater());
  }
  return count;
}

absl::StatusOr<size_t> RateLimitedEngine::Wait(nanoseconds timeout, std::span<Completion> out) {
  const bool forever = timeout == kForever;
  const Clock::time_point end = forever ? Clock::time_point::max() : now_() + timeout;
  while (true) {
    size_t count = DrainDue(out);
    if (count == out.size()) return count;
    const Clock::time_point wake = held_.empty() ? end : std::min(end, held_.front().due);
    const nanoseconds left = count > 0 ? nanoseconds(0) : std::max(wake - now_(), nanoseconds(0));
    const bool sleeps_on = wake == Clock::time_point::max() && count == 0;
    ASSIGN_OR_RETURN(const size_t ended,
                     engine_->Wait(sleeps_on ? kForever : left, out.subspan(count)));
    count += HoldEarly(out.subspan(count, ended));
    if (count > 0) return count;
    // Nothing came: the time is over, or a signal has.
    const Clock::time_point now = now_();
    if (now >= end || (ended == 0 && now < wake)) return 0;
  }
}

}  // namespace forebay::nvme
