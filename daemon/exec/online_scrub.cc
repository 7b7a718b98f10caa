// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/online_scrub.h"

#include <algorithm>
#include <span>
#include <utility>

#include "daemon/exec/block_tasks.h"
#include "daemon/exec/clock.h"
#include "nvme/checksum.h"
#include "nvme/verify.h"
#include "protocol/error.h"
#include "protocol/units.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// The state machine counts its tasks from 1.
constexpr TaskId kFirstTask = TaskId{1} << 48;
// Of a slot that was written again while it was read.
constexpr int kTriesMax = 3;

}  // namespace

uint64_t OnlineScrub::RateOf(const ScrubRequest& request) const {
  if (request.bytes_per_s > 0) return request.bytes_per_s;
  double rate = 0;
  for (size_t path = 0; path < swap_->paths().size(); ++path) {
    const auto measured = swap_->rates(path);
    if (!measured) return kUnmeasuredBytesPerS;
    rate += measured->read;
  }
  return std::max(uint64_t{1}, static_cast<uint64_t>(kScrubShare * rate));
}

std::shared_ptr<const DurableJob> OnlineScrub::JobNow(JobId id) const {
  for (std::shared_ptr<const DurableJob>& job : jobs_()) {
    if (job->id == id) return std::move(job);
  }
  return nullptr;
}

void OnlineScrub::Start(const ScrubRequest& request, Answer answer) {
  if (swap_ == nullptr) return answer(ScrubReport{});
  if (running_ || is_working_) {
    return answer(MakeError(ErrorId::kBusy, "a scrub runs already",
                            "wait until it has ended; forebay status shows how far it is"));
  }
  ++scrubs_;
  running_.emplace(Running{.request = request,
                           .answer = std::move(answer),
                           .bytes_per_s = RateOf(request),
                           .jobs = {},
                           .next_ns = MonotonicNs(),
                           .report = {}});
  for (std::shared_ptr<const DurableJob>& job : jobs_()) {
    if (request.uid && job->uid != *request.uid) continue;
    running_->total_bytes += job->slots() * job->slot_bytes;
    running_->jobs.push_back(std::move(job));
  }
  running_->report.recovery.sequence = swap_->durable_sequence();
  spdlog::info("scrub: {} durable jobs, {} of slots, at {} a second", running_->jobs.size(),
               protocol::FormatBytes(running_->total_bytes),
               protocol::FormatBytes(running_->bytes_per_s));
}

void OnlineScrub::Cancel(uint64_t number) {
  if (!running_ || running_->request.number != number) return;
  Finish(MakeError(ErrorId::kInterrupted, "the client has given the scrub up"));
}

ScrubProgress OnlineScrub::progress() const {
  if (!running_) return {};
  return {.scrubbed_bytes = std::min(running_->scrubbed_bytes, running_->total_bytes),
          .total_bytes = running_->total_bytes};
}

void OnlineScrub::Finish(absl::StatusOr<ScrubReport> report) {
  Answer answer = std::move(running_->answer);
  running_.reset();
  answer(std::move(report));
}

uint64_t OnlineScrub::Tick() {
  if (!running_ || is_working_) return UINT64_MAX;
  if (MonotonicNs() < running_->next_ns) return running_->next_ns;
  if (!Choose()) return UINT64_MAX;
  StartRead();
  return running_ && !is_working_ ? running_->next_ns : UINT64_MAX;
}

bool OnlineScrub::Choose() {
  Running& run = *running_;
  while (true) {
    if (!run.content && !ChooseJob()) {
      Finish(std::move(run.report));
      return false;
    }
    std::shared_ptr<const DurableJob> now = JobNow(run.content->job()->id);
    if (now == nullptr || run.entry == run.content->entries()) {
      EndJob();
      continue;
    }
    run.content->Replace(std::move(now));
    std::optional<DurableContent::Expected> expected = run.content->At(run.entry);
    if (expected && expected == run.expected) return true;  // its next piece
    run.expected = std::move(expected);
    run.digests.clear();
    run.read_bytes = 0;
    if (run.expected) return true;
    ++run.entry;
  }
}

bool OnlineScrub::ChooseJob() {
  Running& run = *running_;
  if (run.next_job == run.jobs.size()) return false;
  std::shared_ptr<const DurableJob> job = run.jobs[run.next_job++];
  run.report.jobs.push_back(ScrubbedJob{.job = job, .damaged = {}});
  run.content.emplace(std::move(job));
  run.entry = 0;
  run.job_began_ns = MonotonicNs();
  return true;
}

void OnlineScrub::EndJob() {
  ScrubbedJob& ended = running_->report.jobs.back();
  ended.job = running_->content->job();
  ended.seconds = static_cast<double>(MonotonicNs() - running_->job_began_ns) * 1e-9;
  running_->content.reset();
}

void OnlineScrub::StartRead() {
  Running& run = *running_;
  const uint64_t bytes = std::min(SwapSpace::kScrubBytes, run.expected->bytes - run.read_bytes);
  const uint64_t now = MonotonicNs();
  run.next_ns = now + static_cast<uint64_t>(1e9 * static_cast<double>(bytes) /
                                            static_cast<double>(run.bytes_per_s));
  task_ = kFirstTask + ++last_task_;
  is_working_ = true;
  std::vector<SwapDone> done;
  swap_->StartRead({.task = task_,
                    .job = run.expected->identity.job,
                    .block = run.expected->identity.block,
                    .part = run.expected->identity.part,
                    .slot = run.expected->slot,
                    .bytes = swap_->scrub_memory().first(bytes),
                    .slot_offset_bytes = run.read_bytes,
                    .order = TransferQueue::Order::kBackground},
                   done);
  end_transfers_(done);
}

bool OnlineScrub::OnTransferred(const SwapDone& read) {
  if (read.task < kFirstTask) return false;
  task_ = 0;
  if (!read.status.ok()) {
    is_working_ = false;
    if (running_) EndSlot(read.status);
    return true;
  }
  runner_.Post(PoolId::kUpdate,
               [this, scrub = scrubs_,
                bytes = swap_->scrub_memory().first(read.bytes)]() -> TaskRunner::Then {
                 nvme::PageDigests digests(bytes);
                 digests.Add(0, digests.pages());
                 const std::span<const uint64_t> made = digests.digests();
                 return [this, scrub, size = bytes.size(),
                         digests = std::vector<uint64_t>(made.begin(), made.end())] {
                   is_working_ = false;
                   if (running_ && scrub == scrubs_) OnDigested(digests, size);
                 };
               });
  return true;
}

void OnlineScrub::OnDigested(const std::vector<uint64_t>& digests, uint64_t bytes) {
  Running& run = *running_;
  run.digests.insert(run.digests.end(), digests.begin(), digests.end());
  run.read_bytes += bytes;
  if (run.read_bytes < run.expected->bytes) return;
  EndSlot(nvme::VerifyDigests({.slot = run.expected->slot,
                               .path = swap_->path_name(run.expected->slot.path),
                               .identity = MakeIdentity(run.expected->identity, swap_->nonce()),
                               .checksum = run.expected->checksum},
                              run.digests));
}

void OnlineScrub::EndSlot(const absl::Status& status) {
  Running& run = *running_;
  const DurableContent::Expected expected = *std::exchange(run.expected, std::nullopt);
  ScrubbedJob& job = run.report.jobs.back();
  if (!status.ok()) {
    std::shared_ptr<const DurableJob> now = JobNow(expected.identity.job);
    if (now == nullptr) return;
    run.content->Replace(std::move(now));
    const bool is_named = run.content->At(run.entry) == expected;
    if (!is_named && ++run.tries < kTriesMax) return;
    if (is_named) {
      spdlog::error("scrub: job {}, {}: {}", job.job->name, run.content->Name(run.entry),
                    protocol::FormatError(status));
      job.damaged.push_back({.what = run.content->Name(run.entry),
                             .slot = expected.slot,
                             .path = std::string(swap_->path_name(expected.slot.path)),
                             .params = run.content->Params(run.entry),
                             .status = status});
    }
  }
  ++job.slots;
  job.bytes += expected.bytes;
  run.scrubbed_bytes += expected.slot.size_bytes;
  ++run.entry;
  run.tries = 0;
}

}  // namespace forebay::daemon
