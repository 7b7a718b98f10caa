// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/scrub.h"

#include <algorithm>
#include <cstddef>
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

// First task of a scrub. Tasks of the state machine count from 1 and stay below it.
constexpr TaskId kFirstTask = TaskId{1} << 48;
// Most reads of a slot whose content changes while it is read.
constexpr int kTriesMax = 3;

}  // namespace

bool ScrubReport::is_clean() const {
  return !recovery.fell_back &&
         std::ranges::all_of(jobs, [](const ScrubbedJob& job) { return job.damaged.empty(); });
}

Scrubber::Scrubber(ScrubberOptions options)
    : options_(std::move(options)), reads_(options_.reads) {}

uint64_t Scrubber::RateOf(const ScrubRequest& request) const {
  if (request.bytes_per_s > 0) return request.bytes_per_s;
  double rate = 0;
  for (size_t path = 0; path < options_.swap->paths().size(); ++path) {
    const auto measured = options_.swap->rates(path);
    if (!measured) return kUnmeasuredBytesPerS;
    rate += measured->read;
  }
  return std::max(uint64_t{1}, static_cast<uint64_t>(kScrubShare * rate));
}

std::shared_ptr<const DurableJob> Scrubber::JobNow(JobId id) const {
  for (std::shared_ptr<const DurableJob>& job : options_.jobs()) {
    if (job->id == id) return std::move(job);
  }
  return nullptr;
}

void Scrubber::Start(const ScrubRequest& request, Answer answer) {
  if (options_.swap == nullptr) return answer(ScrubReport{});
  if (running_ || is_working()) {
    return answer(MakeError(ErrorId::kBusy, "a scrub runs already",
                            "wait until it has ended; forebay status shows how far it is"));
  }
  std::ranges::fill(reads_, Read{});
  running_.emplace(Running{.request = request,
                           .answer = std::move(answer),
                           .bytes_per_s = RateOf(request),
                           .jobs = {},
                           .next_ns = MonotonicNs(),
                           .report = {}});
  for (std::shared_ptr<const DurableJob>& job : options_.jobs()) {
    if (request.uid && job->uid != *request.uid) continue;
    running_->total_bytes += job->slots() * job->slot_bytes;
    running_->jobs.push_back(std::move(job));
  }
  running_->report.recovery.sequence = options_.swap->durable_sequence();
  if (!request.is_logged) return;
  spdlog::info("scrub: {} durable jobs, {} of slots, at {} a second", running_->jobs.size(),
               protocol::FormatBytes(running_->total_bytes),
               protocol::FormatBytes(running_->bytes_per_s));
}

void Scrubber::Cancel(uint64_t number) {
  if (!running_ || running_->request.number != number) return;
  Finish(MakeError(ErrorId::kInterrupted, "the client has given the scrub up"));
}

ScrubProgress Scrubber::progress() const {
  if (!running_) return {};
  return {.scrubbed_bytes = std::min(running_->scrubbed_bytes, running_->total_bytes),
          .total_bytes = running_->total_bytes};
}

void Scrubber::Finish(absl::StatusOr<ScrubReport> report) {
  Answer answer = std::move(running_->answer);
  running_.reset();
  answer(std::move(report));
}

bool Scrubber::is_working() const {
  return std::ranges::any_of(reads_, [](const Read& read) { return read.task != 0; });
}

Scrubber::Read* Scrubber::FindIdle() {
  Read* idle = nullptr;
  for (Read& read : reads_) {
    if (read.task != 0) continue;
    if (read.entry) return &read;
    if (idle == nullptr) idle = &read;
  }
  return idle;
}

uint64_t Scrubber::Tick() {
  while (running_) {
    Read* const read = FindIdle();
    if (read == nullptr) break;
    if (MonotonicNs() < running_->next_ns) return running_->next_ns;
    if (!Choose(*read)) break;
    StartRead(*read);
  }
  return UINT64_MAX;
}

bool Scrubber::Choose(Read& read) {
  Running& run = *running_;
  while (true) {
    if (!run.content && !ChooseJob()) {
      Finish(std::move(run.report));
      return false;
    }
    std::shared_ptr<const DurableJob> now = JobNow(run.content->job()->id);
    if (now == nullptr || (!read.entry && run.next_entry == run.content->entries())) {
      if (is_working()) return false;
      EndJob();
      continue;
    }
    run.content->Replace(std::move(now));
    if (!read.entry) read = {.entry = run.next_entry++};
    const std::optional<DurableContent::Expected> expected = run.content->At(*read.entry);
    // The slot is unchanged: continue with its next piece.
    if (expected && expected == read.expected) return true;
    read.expected = expected;
    read.digests.clear();
    read.read_bytes = 0;
    if (read.expected) return true;
    read.entry.reset();
  }
}

bool Scrubber::ChooseJob() {
  Running& run = *running_;
  if (run.next_job == run.jobs.size()) return false;
  std::shared_ptr<const DurableJob> job = run.jobs[run.next_job++];
  run.report.jobs.push_back(ScrubbedJob{.job = job, .damaged = {}});
  run.content.emplace(std::move(job));
  run.next_entry = 0;
  run.job_began_ns = MonotonicNs();
  return true;
}

// Ends the scrub of the current job. Call it while no read is in flight. Reads that have not finished their slot (of a deleted
// job) are dropped.
void Scrubber::EndJob() {
  ScrubbedJob& ended = running_->report.jobs.back();
  ended.job = running_->content->job();
  ended.seconds = static_cast<double>(MonotonicNs() - running_->job_began_ns) * 1e-9;
  std::ranges::sort(ended.damaged, {}, &DamagedSlot::slot);
  running_->content.reset();
  std::ranges::fill(reads_, Read{});
}

std::span<std::byte> Scrubber::MemoryOf(const Read& read) const {
  const auto number = static_cast<size_t>(&read - reads_.data());
  return options_.swap->scrub_memory(options_.reads)
      .subspan(number * SwapSpace::kScrubBytes, SwapSpace::kScrubBytes);
}

void Scrubber::StartRead(Read& read) {
  const uint64_t bytes = std::min(SwapSpace::kScrubBytes, read.expected->bytes - read.read_bytes);
  running_->next_ns =
      MonotonicNs() + static_cast<uint64_t>(1e9 * static_cast<double>(bytes) /
                                            static_cast<double>(running_->bytes_per_s));
  read.task = kFirstTask + ++last_task_;
  std::vector<SwapDone> done;
  options_.swap->StartRead({.task = read.task,
                            .job = read.expected->identity.job,
                            .block = read.expected->identity.block,
                            .part = read.expected->identity.part,
                            .slot = read.expected->slot,
                            .bytes = MemoryOf(read).first(bytes),
                            .slot_offset_bytes = read.read_bytes,
                            .order = TransferQueue::Order::kBackground},
                           done);
  options_.end_transfers(done);
}

bool Scrubber::OnTransferred(const SwapDone& done) {
  if (done.task < kFirstTask) return false;
  Read& read = *std::ranges::find(reads_, done.task, &Read::task);
  if (!done.status.ok()) {
    read.task = 0;
    if (running_) EndSlot(read, done.status);
    return true;
  }
  auto digest = [this, &read, bytes = MemoryOf(read).first(done.bytes)]() -> TaskRunner::Then {
    nvme::PageDigests digests(bytes);
    digests.Add(0, digests.pages());
    const std::span<const uint64_t> made = digests.digests();
    return [this, &read, size = bytes.size(),
            digests = std::vector<uint64_t>(made.begin(), made.end())] {
      read.task = 0;
      if (running_) OnDigested(read, digests, size);
    };
  };
  if (options_.runner != nullptr) {
    options_.runner->Post(PoolId::kUpdate, std::move(digest));
  } else {
    digest()();
  }
  return true;
}

void Scrubber::OnDigested(Read& read, const std::vector<uint64_t>& digests, uint64_t bytes) {
  read.digests.insert(read.digests.end(), digests.begin(), digests.end());
  read.read_bytes += bytes;
  if (read.read_bytes < read.expected->bytes) return;
  const DurableContent::Expected& expected = *read.expected;
  EndSlot(read,
          nvme::VerifyDigests({.slot = expected.slot,
                               .path = options_.swap->path_name(expected.slot.path),
                               .identity = MakeIdentity(expected.identity, options_.swap->nonce()),
                               .checksum = expected.checksum},
                              read.digests));
}

void Scrubber::EndSlot(Read& read, const absl::Status& status) {
  Running& run = *running_;
  const DurableContent::Expected expected = *std::exchange(read.expected, std::nullopt);
  ScrubbedJob& job = run.report.jobs.back();
  if (!status.ok()) {
    std::shared_ptr<const DurableJob> now = JobNow(expected.identity.job);
    if (now == nullptr) return;
    run.content->Replace(std::move(now));
    const bool is_named = run.content->At(*read.entry) == expected;
    if (!is_named && ++read.tries < kTriesMax) return;
    if (is_named && run.request.is_logged) {
      spdlog::error("scrub: job {}, {}: {}", job.job->name, run.content->Name(*read.entry),
                    protocol::FormatError(status));
    }
    if (is_named) {
      job.damaged.push_back({.what = run.content->Name(*read.entry),
                             .slot = expected.slot,
                             .path = std::string(options_.swap->path_name(expected.slot.path)),
                             .params = run.content->Params(*read.entry),
                             .status = status});
    }
  }
  ++job.slots;
  job.bytes += expected.bytes;
  run.scrubbed_bytes += expected.slot.size_bytes;
  read.entry.reset();
}

}  // namespace forebay::daemon
