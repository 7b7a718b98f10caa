// Bench update: a whole step of AdamW, all in DRAM beside the memory limit and all on swap beside
// the disk limit.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nvme/io/engine_factory.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/units.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/bench_job.h"

namespace forebay::tools {
namespace {

using pinned_mem::PinnedArena;
using protocol::ErrorId;
using protocol::Format;
using protocol::kMiB;
using protocol::MakeError;
using protocol::RoundUp;
using protocol::UniqueFd;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kSamples = 7;
constexpr uint64_t kParams = uint64_t{1} << 25;
constexpr uint64_t kGroupElems = uint64_t{1} << 20;
constexpr uint64_t kMomentBytes = 8;  // m and v
constexpr uint64_t kMasterBytes = 4;  // w; exact: weights and remainder
constexpr uint64_t kStateBytes = 8;   // fp32: what goes to swap
constexpr double kGiga = 1e9;

double SecondsSince(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

absl::StatusOr<std::unique_ptr<PinnedArena>> MakeArena(const std::string& name, uint64_t bytes) {
  return PinnedArena::Create({.name = name,
                              .capacity_bytes = RoundUp(bytes, protocol::kHugePageBytes),
                              .lock = pinned_mem::LockPolicy::kBestEffort});
}

// By the compiler's own vectors: as wide as every processor has.
using Lane [[gnu::vector_size(16)]] = uint32_t;

// The memory accesses of the pass with next to no arithmetic: reads the gradient g, reads and
// writes the master w (exact: its two halves), the moments m and v. Ranges are of elements.
struct Planes {
  std::byte* g;
  std::byte* w;
  std::byte* remainder;  // exact
  std::byte* m;
  std::byte* v;
};

void TouchAsThePassDoes(Format format, const Planes& planes, size_t first, size_t end) {
  const auto lanes = [](std::byte* plane, size_t elem, size_t width) {
    return reinterpret_cast<Lane*>(plane + elem * width);
  };
  constexpr size_t kStep = 8;  // elements a turn: a lane of 16 bits, two of 32
  for (size_t i = first; i + kStep <= end; i += kStep) {
    Lane* m = lanes(planes.m, i, 4);
    Lane* v = lanes(planes.v, i, 4);
    if (format == Format::kExact) {
      const Lane gradient = *lanes(planes.g, i, 2);
      *lanes(planes.w, i, 2) += gradient;
      *lanes(planes.remainder, i, 2) += gradient;
      m[0] += gradient;
      m[1] += gradient;
      v[0] += gradient;
      v[1] += gradient;
    } else {
      for (size_t lane = 0; lane < 2; ++lane) {
        const Lane gradient = lanes(planes.g, i, 4)[lane];
        lanes(planes.w, i, 4)[lane] += gradient;
        m[lane] += gradient;
        v[lane] += gradient;
      }
    }
  }
}

uint64_t GradBytes(Format format) { return format == Format::kExact ? 2 : 4; }
// Read once, and all but the gradient written once.
uint64_t PassBytes(Format format) { return GradBytes(format) + 2 * (kMasterBytes + kMomentBytes); }

// The limit of DRAM: that loop over arrays of the job's size, on as many threads as the daemon has
// workers.
class MemoryLimit {
 public:
  static absl::StatusOr<std::unique_ptr<MemoryLimit>> Create(Format format, uint64_t params,
                                                             uint32_t threads) {
    auto limit = std::make_unique<MemoryLimit>();
    limit->format_ = format;
    limit->params_ = params;
    limit->threads_ = threads;
    const uint64_t half = GradBytes(format);  // exact: the master's halves are as wide
    const std::array<uint64_t, 5> widths = {half, half, format == Format::kExact ? half : 0, 4, 4};
    for (size_t i = 0; i < widths.size(); ++i) {
      if (widths[i] == 0) continue;
      ASSIGN_OR_RETURN(limit->planes_[i], MakeArena("bench-plane", params * widths[i]));
    }
    return limit;
  }

  absl::StatusOr<Sample> Run() {
    const Planes planes{Plane(0), Plane(1), Plane(2), Plane(3), Plane(4)};
    const auto began = Clock::now();
    {
      std::vector<std::jthread> pool;
      for (uint32_t i = 0; i < threads_; ++i) {
        const auto share = [&](uint32_t part) { return params_ * part / threads_ / 64 * 64; };
        pool.emplace_back(
            [this, &planes, first = share(i), end = i + 1 == threads_ ? params_ : share(i + 1)] {
              TouchAsThePassDoes(format_, planes, first, end);
            });
      }
    }
    return Sample{.value = static_cast<double>(params_ * PassBytes(format_)) / SecondsSince(began) /
                           kGiga};
  }

 private:
  std::byte* Plane(size_t i) {
    return planes_[i] == nullptr ? nullptr : planes_[i]->bytes().data();
  }

  std::array<std::unique_ptr<PinnedArena>, 5> planes_;
  Format format_ = Format::kFp32;
  uint64_t params_ = 0;
  uint32_t threads_ = 1;
};

// The limit of the disk: reads of one half of a file and writes of the other, piece by piece, as
// many each.
class DiskLimit {
 public:
  static absl::StatusOr<std::unique_ptr<DiskLimit>> Create(const std::string& folder,
                                                           uint64_t bytes) {
    auto limit = std::make_unique<DiskLimit>();
    limit->pieces_ = std::max<uint64_t>(1, bytes / kPieceBytes);
    std::string path = (std::filesystem::path(folder) / "forebay-bench-XXXXXX").string();
    limit->file_.Reset(::mkostemp(path.data(), O_DIRECT | O_CLOEXEC));
    const int error = errno;
    ::unlink(path.c_str());
    if (!limit->file_.valid()) {
      return MakeError(ErrorId::kSwapPath, protocol::ErrnoText(absl::StrCat("make ", path), error));
    }
    if (::posix_fallocate(limit->file_.get(), 0,
                          static_cast<off_t>(2 * limit->pieces_ * kPieceBytes)) != 0) {
      return MakeError(
          ErrorId::kSwapNospc,
          absl::StrCat("no room for ", protocol::FormatBytes(2 * limit->pieces_ * kPieceBytes),
                       " in ", folder));
    }
    ASSIGN_OR_RETURN(limit->buffer_, MakeArena("bench-disk", kDepth * kPieceBytes));
    ASSIGN_OR_RETURN(nvme::ChosenEngine chosen, nvme::CreateIoEngine({}));
    limit->engine_ = std::move(chosen.engine);
    limit->engine_->RegisterBuffer(limit->buffer_->bytes());
    ASSIGN_OR_RETURN(limit->index_, limit->engine_->RegisterFile(limit->file_.get()));
    RETURN_IF_ERROR(limit->Run().status());  // gives every piece its place on the disk
    std::swap(limit->read_half_, limit->write_half_);
    RETURN_IF_ERROR(limit->Run().status());
    return limit;
  }

  DiskLimit() = default;
  DiskLimit(const DiskLimit&) = delete;
  DiskLimit& operator=(const DiskLimit&) = delete;

  // Each of kDepth slots reads a piece, then writes it to the other half, then takes the next.
  absl::StatusOr<Sample> Run() {
    std::array<nvme::Completion, kDepth> done;
    const auto began = Clock::now();
    uint64_t next = 0;
    uint64_t written = 0;
    std::array<uint64_t, kDepth> piece_of{};
    for (uint32_t slot = 0; slot < kDepth && next < pieces_; ++slot) {
      RETURN_IF_ERROR(Submit(nvme::IoKind::kRead, slot, piece_of[slot] = next++));
    }
    while (written < pieces_) {
      ASSIGN_OR_RETURN(const size_t count, engine_->Wait(nvme::IoEngine::kForever, done));
      for (size_t i = 0; i < count; ++i) {
        if (done[i].result != static_cast<int64_t>(kPieceBytes)) {
          return MakeError(ErrorId::kSwapIo, absl::StrCat("the bare disk loop got ", done[i].result,
                                                          " of ", kPieceBytes, " bytes"));
        }
        const auto slot = static_cast<uint32_t>(done[i].token);
        if (done[i].kind == nvme::IoKind::kRead) {
          RETURN_IF_ERROR(Submit(nvme::IoKind::kWrite, slot, piece_of[slot]));
        } else {
          ++written;
          if (next < pieces_)
            RETURN_IF_ERROR(Submit(nvme::IoKind::kRead, slot, piece_of[slot] = next++));
        }
      }
    }
    const double bytes = 2.0 * static_cast<double>(pieces_ * kPieceBytes);
    return Sample{.value = bytes / SecondsSince(began) / kGiga};
  }

 private:
  static constexpr uint64_t kPieceBytes = kMiB;
  static constexpr uint32_t kDepth = 16;

  // Between the slot's memory and a piece of the half that is read or written.
  absl::Status Submit(nvme::IoKind kind, uint32_t slot, uint64_t piece) {
    const uint64_t half = kind == nvme::IoKind::kRead ? read_half_ : write_half_;
    return engine_->Submit({.kind = kind,
                            .file = index_,
                            .offset_bytes = (half * pieces_ + piece) * kPieceBytes,
                            .data = buffer_->bytes().data() + slot * kPieceBytes,
                            .size_bytes = kPieceBytes,
                            .token = slot});
  }

  UniqueFd file_;
  std::unique_ptr<PinnedArena> buffer_;
  std::unique_ptr<nvme::IoEngine> engine_;
  nvme::FileIndex index_{};
  uint64_t pieces_ = 1;
  uint64_t read_half_ = 0;
  uint64_t write_half_ = 1;
};

// Swap traffic of the job's updates so far.
struct Traffic {
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
};

absl::StatusOr<Traffic> TrafficOf(BenchJob& job) {
  ASSIGN_OR_RETURN(const client::NodeStatus status, job.Status());
  const schema::JobStatus::Reader one = status->getJobs()[0];
  return Traffic{.read_bytes = one.getStateReadBytes(),
                 .written_bytes = one.getStateWrittenBytes()};
}

// One step; the result is bytes of the pass (all in DRAM), or bytes that crossed to or from swap
// while the step was applied, per second. What was read ahead counts in the sample's bytes alone,
// which are those since `last`.
absl::StatusOr<Sample> TimeStep(BenchJob& job, uint64_t pass_bytes, Traffic& last) {
  RETURN_IF_ERROR(job.DeliverGradients());
  ASSIGN_OR_RETURN(const Traffic before, TrafficOf(job));
  ASSIGN_OR_RETURN(const double seconds, job.TimedStep());
  ASSIGN_OR_RETURN(const Traffic after, TrafficOf(job));
  const uint64_t swap_bytes =
      after.read_bytes - before.read_bytes + after.written_bytes - before.written_bytes;
  const Sample sample{
      .value = static_cast<double>(pass_bytes != 0 ? pass_bytes : swap_bytes) / seconds / kGiga,
      .bytes_read = after.read_bytes - last.read_bytes,
      .bytes_written = after.written_bytes - last.written_bytes};
  last = after;
  return sample;
}

// What the job holds beside its states: with no more than this, all of them go to swap.
uint64_t BytesBesideStates(const client::NodeStatus& status) {
  uint64_t bytes = 0;
  for (const auto arena : status->getMemory().getArenas()) {
    if (arena.getKind() != "state" && arena.getKind() != "staging") bytes += arena.getSizeBytes();
  }
  return bytes;
}

struct CaseOptions {
  const BenchOptions& bench;
  uint64_t params;
  uint32_t samples;
};

BenchJobOptions JobOptions(const CaseOptions& options, Format format, uint64_t dram_bytes) {
  BenchJobOptions job{.format = format,
                      .params = options.params,
                      .group_elems = std::min(kGroupElems, (options.params + 3) / 4)};
  job.daemon.runtime_folder = options.bench.runtime_folder;
  job.daemon.dram = absl::StrCat(dram_bytes);
  return job;
}

// Leaves the job's memory beside its states in `beside_states`.
absl::StatusOr<BenchResult> InDram(const CaseOptions& options, Format format,
                                   uint64_t& beside_states) {
  // weights, sums, states, and ample arenas
  const uint64_t room = options.params * 24 + 512 * kMiB;
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> job,
                   BenchJob::Create(JobOptions(options, format, room)));
  ASSIGN_OR_RETURN(const client::NodeStatus status, job->Status());
  beside_states = BytesBesideStates(status);
  ASSIGN_OR_RETURN(const std::unique_ptr<MemoryLimit> limit,
                   MemoryLimit::Create(format, options.params, status->getWorkers()));
  Traffic last;
  return MeasureCase(
      {.bench = "update",
       .name = absl::StrCat("update/opt=adamw/format=", std::string(protocol::Name(format)),
                            "/place=dram"),
       .unit = "GB/s",
       .limit_what = "loop with the pass's memory accesses",
       .measure = Measure::kRate},
      options.samples, [&] { return TimeStep(*job, options.params * PassBytes(format), last); },
      [&] { return limit->Run(); });
}

absl::StatusOr<BenchResult> OnSwap(const CaseOptions& options, uint64_t beside_states) {
  const uint64_t staging = 64 * kMiB;
  BenchJobOptions job_options =
      JobOptions(options, Format::kFp32, beside_states + staging + 2 * kMiB);
  job_options.daemon.swap = {options.bench.swap_folder};
  job_options.daemon.swap_size =
      absl::StrCat(RoundUp(2 * options.params * kStateBytes, 64 * kMiB) + 256 * kMiB);
  job_options.daemon.settings = {absl::StrCat("swap.staging=", staging)};
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> job, BenchJob::Create(job_options));
  ASSIGN_OR_RETURN(const client::NodeStatus status, job->Status());
  if (status->getJobs()[0].getResidentBlocks() == status->getJobs()[0].getBlocks()) {
    return MakeError(ErrorId::kInternal, "no block of the bench's job is on swap");
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<DiskLimit> limit,
                   DiskLimit::Create(options.bench.swap_folder, options.params * kStateBytes));
  Traffic last;
  return MeasureCase(
      {.bench = "update",
       .name = "update/opt=adamw/format=fp32/place=nvme",
       .unit = "GB/s",
       .limit_what = "bare loop of reads and writes, as many each",
       .measure = Measure::kRate},
      options.samples, [&] { return TimeStep(*job, 0, last); }, [&] { return limit->Run(); });
}

}  // namespace

absl::Status BenchUpdate(const BenchOptions& options, const Report& report) {
  const CaseOptions case_options{.bench = options,
                                 .params = options.params == 0 ? kParams : options.params,
                                 .samples = options.samples == 0 ? kSamples : options.samples};
  uint64_t beside_states = 0;
  for (const Format format : {Format::kExact, Format::kFp32}) {
    ASSIGN_OR_RETURN(const BenchResult in_dram, InDram(case_options, format, beside_states));
    report(in_dram);
  }
  ASSIGN_OR_RETURN(const BenchResult on_swap, OnSwap(case_options, beside_states));
  report(on_swap);
  return absl::OkStatus();
}

}  // namespace forebay::tools
