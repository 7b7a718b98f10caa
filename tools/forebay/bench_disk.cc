// SPDX-License-Identifier: Apache-2.0
// Bench disk: transfers blocks between staging memory and a swap path by the code that the daemon's loop thread runs
// (SwapSpace, Volume, IoEngine). The cases are reads, writes, and a write for each read. Results are compared with a bare
// loop and, if fio is installed, with fio.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/core/base/limits.h"
#include "daemon/exec/clock.h"
#include "daemon/exec/swap_space.h"
#include "nvme/io/engine_factory.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_disk_limit.h"
#include "tools/forebay/bench_fio.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/private_daemon.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::kMiB;
using protocol::MakeError;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kSamples = 7;
constexpr uint64_t kParams = uint64_t{1} << 26;
constexpr uint64_t kStateBytes = 8;  // swapped bytes of a parameter in format fp32
constexpr uint64_t kBlockBytes = kStateBytes << 20;
constexpr uint32_t kStagingSlots = 8;  // the daemon's number with two workers
constexpr uint64_t kLedgerBytes = kMiB;
constexpr std::chrono::seconds kAnswerLimit(60);

enum class Transfers : uint8_t { kReads, kWrites, kMixed };

// Transfers the blocks of one job between their swap slots and staging slots. Each block has two swap slots.
class SwapLoop {
 public:
  static absl::StatusOr<std::unique_ptr<SwapLoop>> Create(const std::string& folder,
                                                          uint64_t blocks) {
    auto loop = std::make_unique<SwapLoop>();
    ASSIGN_OR_RETURN(nvme::ChosenEngine chosen, nvme::CreateIoEngine({}));
    loop->engine_ = std::move(chosen.engine);
    const uint64_t bytes = 2 * blocks * kBlockBytes + 8 * kLedgerBytes;
    ASSIGN_OR_RETURN(loop->space_, daemon::SwapSpace::Open(
                                       {.paths = {{.path = folder, .capacity_bytes = bytes}},
                                        .ledger_bytes_max = kLedgerBytes,
                                        .staging_slots = kStagingSlots,
                                        .staging_slot_bytes = kBlockBytes,
                                        .arenas = {.lock = pinned_mem::LockPolicy::kBestEffort}},
                                       *loop->engine_));
    nvme::SlotMap free = loop->space_->free_slots();
    const auto slots = free.Allocate(2 * blocks, kBlockBytes);
    if (!slots) return MakeError(ErrorId::kInternal, "the bench's blocks have no swap slots");
    loop->current_.assign(slots->begin(), slots->begin() + static_cast<ptrdiff_t>(blocks));
    loop->next_.assign(slots->begin() + static_cast<ptrdiff_t>(blocks), slots->end());
    loop->space_->StartZero({.task = kZeroTask, .slots = *slots}, loop->done_);
    RETURN_IF_ERROR(loop->AwaitDone());
    RETURN_IF_ERROR(std::exchange(loop->done_, {}).front().status);
    return loop;
  }

  // Transfers every block once. The sample's value is GB/s of bytes read and written together.
  absl::StatusOr<Sample> Run(Transfers transfers) {
    transfers_ = transfers;
    next_block_ = 0;
    reads_ = 0;
    written_ = 0;
    free_staging_.clear();
    for (uint32_t slot = 0; slot < kStagingSlots; ++slot) free_staging_.push_back(slot);
    const auto began = Clock::now();
    const double cpu_began = daemon::OwnCpuSeconds();
    Begin();
    while (free_staging_.size() < kStagingSlots) {
      RETURN_IF_ERROR(AwaitDone());
      for (const daemon::SwapDone& one : std::exchange(done_, {})) {
        RETURN_IF_ERROR(one.status);
        End(one);
      }
      Begin();
    }
    const std::chrono::duration<double> took = Clock::now() - began;
    cpu_seconds_ += daemon::OwnCpuSeconds() - cpu_began;
    if (written_ > 0) std::swap(current_, next_);
    const uint64_t all = current_.size() * kBlockBytes;
    const double moved_gb =
        static_cast<double>(all * (transfers == Transfers::kMixed ? 2 : 1)) / protocol::kGb;
    moved_gb_ += moved_gb;
    const Sample sample{.value = moved_gb / took.count(),
                        .bytes_read = transfers == Transfers::kWrites ? 0 : all,
                        .bytes_written = transfers == Transfers::kReads ? 0 : all};
    return sample;
  }

  // The contiguous range of the swap file that holds both slots of every block: 2 * `bytes` bytes.
  DiskLimit::Part part() const {
    const uint64_t begin = std::min(current_[0].offset_bytes, next_[0].offset_bytes);
    return {.path = std::string(space_->path_name(0)),
            .begin_bytes = begin,
            .bytes = current_.size() * kBlockBytes};
  }

  // Returns the CPU seconds of this thread for each GB that was transferred since the last call.
  double DrainCpuSecondsPerGb() {
    return std::exchange(cpu_seconds_, 0) / std::exchange(moved_gb_, 0);
  }

  double huge_share() const {
    return static_cast<double>(space_->staging()->huge_bytes()) /
           static_cast<double>(space_->staging()->bytes().size());
  }

 private:
  static constexpr daemon::TaskId kZeroTask = kStagingSlots;  // ids below are transfers

  // Starts as many transfers as staging slots and the limit on reads allow. At most daemon::kReadsPerPath reads run at once.
  void Begin() {
    while (next_block_ < current_.size() && !free_staging_.empty()) {
      if (transfers_ == Transfers::kWrites) {
        StartWrite(AllocateStaging(), next_block_++);
        continue;
      }
      if (reads_ == daemon::kReadsPerPath) return;
      ++reads_;
      const uint64_t block = next_block_++;
      const uint32_t slot = AllocateStaging();
      space_->StartRead({.task = slot,
                         .block = block,
                         .slot = current_[block],
                         .bytes = space_->Slot(slot, kBlockBytes)},
                        done_);
    }
  }

  void End(const daemon::SwapDone& one) {
    const auto slot = static_cast<uint32_t>(one.task);
    if (one.kind == daemon::SwapDone::Kind::kRead) {
      --reads_;
      if (transfers_ == Transfers::kMixed) return StartWrite(slot, one.block);
    }
    free_staging_.push_back(slot);
  }

  void StartWrite(uint32_t slot, uint64_t block) {
    ++written_;
    space_->StartWrite({.task = slot,
                        .block = block,
                        .slot = next_[block],
                        .bytes = space_->Slot(slot, kBlockBytes)},
                       /*pause=*/false, done_);
  }

  uint32_t AllocateStaging() {
    const uint32_t slot = free_staging_.back();
    free_staging_.pop_back();
    return slot;
  }

  // Waits until at least one transfer has ended.
  absl::Status AwaitDone() {
    std::array<nvme::Completion, 64> completions;
    while (done_.empty()) {
      ASSIGN_OR_RETURN(const size_t count, engine_->Wait(kAnswerLimit, completions));
      if (count == 0) return MakeError(ErrorId::kSwapIo, "the disk has not answered for a minute");
      for (size_t i = 0; i < count; ++i) space_->OnCompletion(completions[i], done_);
    }
    return absl::OkStatus();
  }

  std::unique_ptr<nvme::IoEngine> engine_;
  std::unique_ptr<daemon::SwapSpace> space_;
  std::vector<nvme::Slot> current_;  // by block
  std::vector<nvme::Slot> next_;
  std::vector<daemon::SwapDone> done_;

  Transfers transfers_ = Transfers::kReads;
  uint64_t next_block_ = 0;
  uint32_t reads_ = 0;
  uint64_t written_ = 0;
  std::vector<uint32_t> free_staging_;
  double cpu_seconds_ = 0;
  double moved_gb_ = 0;
};

struct Case {
  const char* name;
  Transfers transfers;
  absl::StatusOr<Sample> (DiskLimit::*bare)();
  absl::StatusOr<Sample> (FioLimit::*fio)();
};

constexpr std::array kCases = {
    Case{"read", Transfers::kReads, &DiskLimit::RunReads, &FioLimit::RunReads},
    Case{"write", Transfers::kWrites, &DiskLimit::RunWrites, &FioLimit::RunWrites},
    Case{"mixed", Transfers::kMixed, &DiskLimit::RunCopies, &FioLimit::RunMixed}};

}  // namespace

absl::Status BenchDisk(const BenchOptions& options, const Report& report) {
  const uint64_t params = options.params == 0 ? kParams : options.params;
  const uint64_t blocks = std::max<uint64_t>(1, params * kStateBytes / kBlockBytes);
  const uint64_t bytes = blocks * kBlockBytes;
  ASSIGN_OR_RETURN(const PrivateFolder folder, PrivateFolder::Create(options.swap_folder));
  ASSIGN_OR_RETURN(const std::unique_ptr<SwapLoop> loop,
                   SwapLoop::Create(folder.path().string(), blocks));
  ASSIGN_OR_RETURN(const std::unique_ptr<DiskLimit> bare, DiskLimit::Over(loop->part()));
  absl::StatusOr<std::unique_ptr<FioLimit>> fio = FioLimit::Create(folder.path(), bytes);
  const bool has_fio = fio.ok();
  if (!has_fio && protocol::IdOf(fio.status()) != ErrorId::kOption) return fio.status();
  for (const Case& one : kCases) {
    std::vector<BenchLoop> loops = {
        {"bare", BenchLoop::Role::kLimit, [&] { return (bare.get()->*one.bare)(); }}};
    if (has_fio) {
      loops.push_back({"fio", BenchLoop::Role::kLimit, [&] { return (fio->get()->*one.fio)(); }});
    }
    ASSIGN_OR_RETURN(BenchResult result,
                     MeasureCase(
                         {.bench = "disk",
                          .name = absl::StrCat("disk/op=", one.name, "/block=8MiB/pages=2MiB"),
                          .unit = "GB/s",
                          .limit_what = has_fio ? "the better of a bare loop and fio"
                                                : "bare loop; fio is not installed",
                          .measure = Measure::kRate},
                         options.samples == 0 ? kSamples : options.samples,
                         [&] { return loop->Run(one.transfers); }, loops));
    result.more["huge_share"] = loop->huge_share();
    result.more["cpu_s_per_gb"] = loop->DrainCpuSecondsPerGb();
    RETURN_IF_ERROR(report(result));
  }
  return absl::OkStatus();
}

}  // namespace forebay::tools
