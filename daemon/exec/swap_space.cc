// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/swap_space.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "daemon/exec/block_tasks.h"
#include "daemon/exec/clock.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "nvme/find_volume.h"
#include "nvme/io/engine_factory.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

constexpr uint64_t kZerosBytes = protocol::kMiB;  // size of a write that zeroes new slots
constexpr uint64_t kSecondNs = 1'000'000'000;
constexpr uint64_t kCheckNs = kSecondNs;
constexpr uint64_t kProgressNs = 10 * kSecondNs;
// Time between two warnings about late requests of a path.
constexpr uint64_t kWarningNs = 30 * kSecondNs;
// Blocks that may be in flight on a path that was not measured; a measured path may have more.
constexpr uint64_t kWindowBlocks = 4;
// bytes that the volume needs for each slot that the ledger names
constexpr uint64_t kSlotEntryBytes = 24;

// Returns twice the bytes that keep the path busy, so that the next transfer is in flight when one ends.
TransferWindow WindowOf(const SwapSpaceOptions& options, size_t path) {
  TransferWindow window{
      .bytes = kWindowBlocks * options.staging_slot_bytes,
      .transfers = static_cast<uint32_t>(nvme::Volume::kRequestsMax / options.paths.size())};
  if (path < options.rates.size() && options.rates[path]) {
    window.bytes = std::max(window.bytes, 2 * options.rates[path]->in_flight_bytes());
  }
  return window;
}

TransferQueue::Entry EntryOf(const SwapTransfer& transfer) {
  return {.task = transfer.task,
          .job = transfer.job,
          .bytes = transfer.bytes.size(),
          .order = transfer.order};
}

void LogDamage(const nvme::Volume& volume) {
  const nvme::RecoveryReport& report = volume.recovery();
  if (report.damaged_records == 0 && report.damaged_ledgers == 0) return;
  spdlog::warn(
      "swap path 0 ({}): of its ledgers {} records and {} copies are damaged, as a power cut "
      "leaves them{}",
      volume.path_name(0), report.damaged_records, report.damaged_ledgers,
      report.fell_back ? ": the newest one may be lost, the one before it is used" : "");
}

constexpr nvme::EngineOptions kThreadOnce{.choice = nvme::EngineChoice::kThreads, .threads = 1};

// Commits the ledger and waits for the end of the commit.
absl::Status CommitAndWait(nvme::Volume& volume, nvme::IoEngine& engine,
                           std::span<const std::byte> ledger, std::span<const nvme::Slot> slots) {
  RETURN_IF_ERROR(volume.CommitLedger(ledger, slots, /*token=*/1));
  std::array<nvme::Completion, 16> completions;
  std::vector<nvme::Finished> finished;
  while (finished.empty()) {
    ASSIGN_OR_RETURN(const size_t count, engine.Wait(nvme::IoEngine::kForever, completions));
    for (size_t i = 0; i < count; ++i) volume.OnCompletion(completions[i], finished);
  }
  return finished.front().status;
}

}  // namespace

uint64_t SwapSpace::StagingBytes(const SwapSpaceOptions& options) {
  return options.staging_slots * options.staging_slot_bytes + kZerosBytes;
}

SwapSpace::SwapSpace(const SwapSpaceOptions& options, nvme::IoEngine& engine)
    : options_(options),
      engine_(engine),
      pending_(&memory_),
      late_(options.paths.size()),
      next_warning_ns_(options.paths.size(), 0) {
  queues_.reserve(options.paths.size());
  for (size_t path = 0; path < options.paths.size(); ++path) {
    queues_.emplace_back(WindowOf(options, path), options.staging_slot_bytes, &memory_);
  }
}

SwapSpace::~SwapSpace() {
  volume_.reset();
  if (staging_ != nullptr) engine_.UnregisterBuffer(staging_->bytes());
}

absl::StatusOr<std::unique_ptr<SwapSpace>> SwapSpace::Open(const SwapSpaceOptions& options,
                                                           nvme::IoEngine& engine) {
  std::unique_ptr<SwapSpace> space(new SwapSpace(options, engine));
  // Allocates memory before it reserves space on a disk: if memory is short, no space is reserved.
  ASSIGN_OR_RETURN(space->staging_,
                   pinned_mem::PinnedArena::Create(options.arenas.ByStripe(
                       "forebay-staging", StagingBytes(options), options.staging_slot_bytes)));
  RETURN_IF_ERROR(space->OpenVolume());
  // Registration only makes transfers faster.
  (void)engine.RegisterBuffer(space->staging_->bytes());
  return space;
}

absl::StatusOr<std::unique_ptr<SwapSpace>> SwapSpace::Inspect(
    const std::vector<nvme::PathOptions>& paths, nvme::IoEngine& engine) {
  std::unique_ptr<SwapSpace> space(
      new SwapSpace({.paths = paths, .staging_slot_bytes = kScrubBytes}, engine));
  ASSIGN_OR_RETURN(space->volume_, nvme::InspectVolume(paths, engine));
  if (space->volume_ == nullptr) return nullptr;
  if (space->durable_sequence() > 0) RETURN_IF_ERROR(space->ReadLedger());
  return space;
}

absl::Status SwapSpace::OpenVolume() {
  nvme::VolumeOptions volume{.paths = options_.paths, .life = options_.life};
  if (options_.mode == nvme::OpenMode::kRecover) {
    ASSIGN_OR_RETURN(std::optional<nvme::FoundVolume> found, nvme::FindVolume(options_.paths));
    if (found && found->slots == 0 && !options_.keeps_slots) {
      ASSIGN_OR_RETURN(const DurableNode node, FindDurableJobs(options_.paths));
      if (node.jobs.empty()) found.reset();
    }
    if (found && options_.life == nvme::FileLife::kUnlinked) {
      return protocol::MakeError(
          protocol::ErrorId::kSwapPath,
          absl::StrCat("swap path 0 (", options_.paths[0].path,
                       ") holds durable jobs, which an unlinked swap file would lose"),
          "use another path, or swap.life = \"kept\"; forebayd --reclaim gives up its jobs");
    }
    if (found) {
      volume.mode = nvme::OpenMode::kRecover;
      options_.ledger_bytes_max = found->ledger_bytes_max;
      ASSIGN_OR_RETURN(place_, PlaceOf(options_.paths, options_.machine));
    }
  }
  volume.ledger_bytes_max = options_.ledger_bytes_max;
  if (volume.mode == nvme::OpenMode::kRecover) RETURN_IF_ERROR(CommitAgain(volume));
  ASSIGN_OR_RETURN(volume_, nvme::Volume::Open(volume, engine_));
  if (volume_->durable_sequence() > 0) return ReadLedger();
  if (options_.life == nvme::FileLife::kKept) {
    ASSIGN_OR_RETURN(place_, PlaceOf(options_.paths, options_.machine));
  }
  if (::getrandom(&nonce_, sizeof(nonce_), 0) != sizeof(nonce_)) {
    return protocol::MakeError(protocol::ErrorId::kInternal,
                               protocol::ErrnoText("getrandom", errno));
  }
  return absl::OkStatus();
}

// Commits the ledger that recovery finds twice, so that no other ledger pins slots, and no copy of it is damaged. If the daemon
// died between the copies of a commit, the other copy is still an older one: the second commit writes to its place. The engine
// is not the daemon's, which belongs to the loop thread.
absl::Status SwapSpace::CommitAgain(const nvme::VolumeOptions& options) {
  ASSIGN_OR_RETURN(const nvme::ChosenEngine chosen, nvme::CreateIoEngine(kThreadOnce));
  ASSIGN_OR_RETURN(const std::unique_ptr<nvme::Volume> volume,
                   nvme::Volume::Open(options, *chosen.engine));
  LogDamage(*volume);
  if (volume->durable_sequence() == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const DecodedLedger found, DecodeLedgerOf(*volume));
  RETURN_IF_ERROR(CheckPlace(found.place, found.node));
  const std::vector<nvme::Slot> slots(volume->ledger_slots().begin(), volume->ledger_slots().end());
  std::vector<std::byte> ledger(volume->ledger().begin(), volume->ledger().end());
  if (found.place != place_) {
    ASSIGN_OR_RETURN(std::vector<std::byte> placed, EncodeLedger(found.node, found.nonce, place_));
    const uint64_t room = options_.ledger_bytes_max;
    if (found.place.paths.empty() && placed.size() + slots.size() * kSlotEntryBytes > room) {
      place_ = {};  // a full ledger of an older program has no room for the place
    } else {
      ledger = std::move(placed);
    }
  }
  for (int copy = 0; copy < 2; ++copy) {
    RETURN_IF_ERROR(CommitAndWait(*volume, *chosen.engine, ledger, slots));
  }
  return absl::OkStatus();
}

// Checks that the volume was last used in this place, or adopts it. A volume without jobs may be used in any place, because no
// job can be lost.
absl::Status SwapSpace::CheckPlace(const VolumePlace& before, const DurableNode& node) {
  std::string move = DescribeMove(before, place_);
  if (move.empty()) {
    // A start without a machine-id does not release the volume from its machine.
    if (place_.machine == MachineId{}) place_.machine = before.machine;
    return absl::OkStatus();
  }
  if (node.jobs.empty()) return absl::OkStatus();
  if (options_.other_place == OtherPlace::kRefused) {
    return protocol::MakeError(
        protocol::ErrorId::kSwapPath, absl::StrCat(move, "; durable on it: ", DescribeJobs(node)),
        "forebayd --adopt takes the volume over with its jobs: from then on it belongs here; "
        "forebayd --reclaim gives up its jobs");
  }
  adopted_ = std::move(move);
  return absl::OkStatus();
}

uint64_t SwapSpace::ledger_bytes_max() const {
  const uint64_t place_bytes = LedgerBytes(place_);
  return options_.ledger_bytes_max > place_bytes ? options_.ledger_bytes_max - place_bytes : 1;
}

absl::Status SwapSpace::ReadLedger() {
  ASSIGN_OR_RETURN(DecodedLedger decoded, DecodeLedgerOf(*volume_));
  nonce_ = decoded.nonce;
  recovered_ = std::move(decoded.node);
  return absl::OkStatus();
}

absl::StatusOr<DurableNode> FindDurableJobs(const std::vector<nvme::PathOptions>& paths) {
  ASSIGN_OR_RETURN(const nvme::ChosenEngine chosen, nvme::CreateIoEngine(kThreadOnce));
  ASSIGN_OR_RETURN(const std::unique_ptr<SwapSpace> space,
                   SwapSpace::Inspect(paths, *chosen.engine));
  return space == nullptr ? DurableNode{} : space->recovered();
}

std::span<std::byte> SwapSpace::Slot(uint32_t slot, uint64_t bytes) const {
  FOREBAY_CHECK(slot < options_.staging_slots && bytes <= options_.staging_slot_bytes);
  return staging_->bytes().subspan(slot * options_.staging_slot_bytes, bytes);
}

std::span<std::byte> SwapSpace::scrub_memory(uint32_t reads) {
  const uint64_t bytes = reads * kScrubBytes;
  if (scrub_memory_ == nullptr) {
    scrub_memory_.reset(static_cast<std::byte*>(std::aligned_alloc(nvme::kIoAlignment, bytes)));
    FOREBAY_CHECK(scrub_memory_ != nullptr);
  }
  return {scrub_memory_.get(), bytes};
}

// ----------------------------------------------------------------------------------------- transfers

void SwapSpace::StartZero(const CreateJobSwap& action, std::vector<SwapDone>& done) {
  uint64_t bytes = 0;
  for (const nvme::Slot& slot : action.slots) bytes += slot.size_bytes;
  Pending& pending = pending_[action.task];
  pending.done = {
      .task = action.task, .kind = SwapDone::Kind::kZeroed, .job = action.job, .bytes = bytes};
  absl::Status status =
      volume_->Zero(action.slots, staging_->bytes().last(kZerosBytes), action.task);
  if (!status.ok()) return End(action.task, std::move(status), done);
  OnStarted(pending.done, MonotonicNs());
}

void SwapSpace::CommitLedger(TaskId task, std::span<const std::byte> ledger,
                             std::span<const nvme::Slot> slots, std::vector<SwapDone>& done) {
  Pending& pending = pending_[task];
  pending.done = {.task = task, .kind = SwapDone::Kind::kCommitted, .bytes = ledger.size()};
  absl::Status status = volume_->CommitLedger(ledger, slots, task);
  if (!status.ok()) return End(task, std::move(status), done);
  OnStarted(pending.done, MonotonicNs());
}

void SwapSpace::Add(SwapDone::Kind kind, const SwapTransfer& transfer) {
  pending_.emplace(
      transfer.task,
      Pending{.done = {.task = transfer.task,
                       .kind = kind,
                       .job = transfer.job,
                       .block = transfer.block,
                       .part = transfer.part,
                       .bytes = transfer.bytes.size(),
                       .staging_slot = kind == SwapDone::Kind::kRead ? StagingSlotOf(transfer.bytes)
                                                                     : std::nullopt},
              .transfer = transfer});
}

void SwapSpace::Push(const SwapTransfer& transfer) {
  queues_.at(transfer.slot.path).Push(EntryOf(transfer));
}

void SwapSpace::StartRead(const SwapTransfer& transfer, std::vector<SwapDone>& done) {
  Add(SwapDone::Kind::kRead, transfer);
  Push(transfer);
  StartWaiting(done);
}

void SwapSpace::StartWrite(const SwapTransfer& transfer, bool pause, std::vector<SwapDone>& done) {
  Add(SwapDone::Kind::kWritten, transfer);
  if (pause) {
    paused_.push_back({.task = transfer.task, .due_ns = MonotonicNs() + kPauseNs});
    return;
  }
  Push(transfer);
  StartWaiting(done);
}

absl::Status SwapSpace::StartAtVolume(const Pending& pending) {
  const SwapTransfer& transfer = pending.transfer;
  if (pending.done.kind == SwapDone::Kind::kWritten) {
    return volume_->Write(transfer.slot, transfer.bytes, transfer.task);
  }
  return volume_->Read(transfer.slot, transfer.slot_offset_bytes, transfer.bytes, transfer.task);
}

// Queues the transfers whose pause has ended. Then starts as many transfers on each path as its window has room for.
void SwapSpace::StartWaiting(std::vector<SwapDone>& done) {
  const uint64_t now = MonotonicNs();
  while (!paused_.empty() && paused_.front().due_ns <= now) {
    Push(pending_.at(paused_.front().task).transfer);
    paused_.erase(paused_.begin());
  }
  for (TransferQueue& queue : queues_) {
    while (const std::optional<TaskId> task = queue.Next()) {
      Pending& pending = pending_.at(*task);
      absl::Status status = StartAtVolume(pending);
      if (absl::IsResourceExhausted(status)) {  // continues at the next completion
        queue.PutBack(EntryOf(pending.transfer));
        break;
      }
      if (status.ok()) {
        OnStarted(pending.done, now);
      } else {
        End(*task, std::move(status), done);
      }
    }
  }
}

void SwapSpace::OnStarted(SwapDone& started, uint64_t now_ns) {
  started.start_ns = now_ns;
  if (next_check_ns_ == UINT64_MAX) next_check_ns_ = now_ns + kCheckNs;
  if (keep_wear_ns_ == UINT64_MAX) keep_wear_ns_ = now_ns + options_.keep_wear_ns;
}

void SwapSpace::End(TaskId task, absl::Status status, std::vector<SwapDone>& done) {
  auto node = pending_.extract(task);
  FOREBAY_CHECK(!node.empty());
  Pending& pending = node.mapped();
  if (pending.done.kind == SwapDone::Kind::kRead || pending.done.kind == SwapDone::Kind::kWritten) {
    queues_.at(pending.transfer.slot.path).End(pending.done.bytes);
  }
  done.push_back(std::move(pending.done));
  done.back().status = std::move(status);
  done.back().staging_slot.reset();
}

std::optional<uint32_t> SwapSpace::StagingSlotOf(std::span<const std::byte> bytes) const {
  if (staging_ == nullptr) return std::nullopt;
  const std::span<const std::byte> slots =
      staging_->bytes().first(options_.staging_slots * options_.staging_slot_bytes);
  if (bytes.data() < slots.data() || bytes.data() >= slots.data() + slots.size()) {
    return std::nullopt;
  }
  const auto offset = static_cast<uint64_t>(bytes.data() - slots.data());
  return static_cast<uint32_t>(offset / options_.staging_slot_bytes);
}

std::optional<nvme::ExpectedContent> SwapSpace::Expected(const BlockPlace& place,
                                                         const BlockIdentity& identity,
                                                         uint64_t checksum) const {
  if (!place.slot) return std::nullopt;
  return nvme::ExpectedContent{.slot = *place.slot,
                               .path = volume_->path_name(place.slot->path),
                               .identity = MakeIdentity(identity, nonce_),
                               .checksum = checksum};
}

void SwapSpace::OnCompletion(const nvme::Completion& completion, std::vector<SwapDone>& done) {
  finished_.clear();
  volume_->OnCompletion(completion, finished_);
  if (finished_.empty()) return;
  Finish(finished_, done);
  StartWaiting(done);
}

void SwapSpace::Finish(std::vector<nvme::Finished>& finished, std::vector<SwapDone>& done) {
  for (nvme::Finished& one : finished) {
    if (one.kind == nvme::Finished::Kind::kReleased) {
      if (const auto kept = kept_.extract(one.token); !kept.empty()) {
        done.push_back(
            {.task = one.token, .kind = SwapDone::Kind::kReturned, .staging_slot = kept.mapped()});
      }
      continue;
    }
    const std::optional<uint32_t> slot = pending_.at(one.token).done.staging_slot;
    End(one.token, std::move(one.status), done);
    if (one.kind != nvme::Finished::Kind::kGivenUp || !slot) continue;
    kept_.emplace(one.token, *slot);
    done.back().staging_slot = slot;
  }
}

// Gives up requests that are older than the deadline, but for reads into memory other than staging slots.
void SwapSpace::GiveUpLate(std::vector<SwapDone>& done) {
  std::vector<nvme::Finished> finished;
  volume_->GiveUp(
      options_.deadline_ns,
      [this](TaskId task) {
        const auto pending = pending_.find(task);
        return pending == pending_.end() || pending->second.done.kind != SwapDone::Kind::kRead ||
               pending->second.done.staging_slot.has_value();
      },
      finished);
  Finish(finished, done);
}

// ---------------------------------------------------------------------------------------------- time

uint64_t SwapSpace::next_tick_ns() const {
  uint64_t next = std::min(next_check_ns_, keep_wear_ns_);
  if (!paused_.empty()) next = std::min(next, paused_.front().due_ns);
  return next;
}

void SwapSpace::Tick(std::vector<SwapDone>& done) {
  const uint64_t now = MonotonicNs();
  if (now < next_tick_ns()) return;
  StartWaiting(done);
  if (now < next_check_ns_) return;
  GiveUpLate(done);
  StartWaiting(done);
  CheckDeadlines(now);
  LogProgress(now);
  next_check_ns_ = in_flight() > 0 ? now + kCheckNs : UINT64_MAX;
}

void SwapSpace::CheckDeadlines(uint64_t now_ns) {
  std::vector<LatePath>& late = late_now_;
  late.assign(late_.size(), {});
  const uint64_t late_ns = std::min(kLateNs, options_.deadline_ns);
  for (const nvme::LateRequests& path : volume_->CheckDeadlines(late_ns)) {
    late[path.path] = {.requests = path.requests, .oldest_ns = path.oldest_ns};
  }
  for (uint32_t path = 0; path < late.size(); ++path) {
    if (late[path].requests > 0 && now_ns >= next_warning_ns_[path]) {
      next_warning_ns_[path] = now_ns + kWarningNs;
      spdlog::warn(
          "swap path {} ({}): {} requests have waited for more than {} s, the longest {} s: the "
          "device does not answer; look at the kernel's log (dmesg)",
          path, volume_->path_name(path), late[path].requests, late_ns / kSecondNs,
          late[path].oldest_ns / kSecondNs);
    }
    if (late[path].requests == 0 && late_[path].requests > 0) {
      next_warning_ns_[path] = 0;
      spdlog::info("swap path {} ({}) answers again", path, volume_->path_name(path));
    }
  }
  late_.swap(late);
}

std::vector<PathWear> SwapSpace::wear() const {
  const nvme::VolumeStats counted = stats();
  std::vector<PathWear> wear;
  for (size_t path = 0; path < counted.paths.size(); ++path) {
    const uint64_t before = options_.written_before.empty() ? 0 : options_.written_before[path];
    wear.push_back({.path = options_.paths[path].path,
                    .written_bytes = before + counted.paths[path].written_bytes});
  }
  return wear;
}

std::vector<PathWear> SwapSpace::DueWear() {
  if (MonotonicNs() < keep_wear_ns_) return {};
  keep_wear_ns_ = UINT64_MAX;
  return keeps_wear() ? wear() : std::vector<PathWear>();
}

std::optional<ZeroingProgress> SwapSpace::Zeroing(JobId job) const {
  for (const auto& [task, pending] : pending_) {
    if (pending.done.job != job || pending.done.kind != SwapDone::Kind::kZeroed) continue;
    return ZeroingProgress{.zeroed_bytes = volume_->zeroed_bytes(task),
                           .total_bytes = pending.done.bytes};
  }
  return std::nullopt;
}

void SwapSpace::LogProgress(uint64_t now_ns) {
  if (now_ns < next_progress_ns_) return;
  next_progress_ns_ = now_ns + kProgressNs;
  for (const auto& [task, pending] : pending_) {
    if (pending.done.kind != SwapDone::Kind::kZeroed) continue;
    spdlog::info("job {}: {} of {} of its swap space are zero-written", pending.done.job,
                 protocol::FormatBytes(volume_->zeroed_bytes(task)),
                 protocol::FormatBytes(pending.done.bytes));
  }
}

}  // namespace forebay::daemon
