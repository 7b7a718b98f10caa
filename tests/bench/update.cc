// SPDX-License-Identifier: Apache-2.0
// Bench update: measures a whole step of AdamW. With all states in DRAM the limit is that of memory. A step with a record is
// compared with a step without one. With all, half and a quarter of the states on swap the limit is that of the disk.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_adam/worker_pool.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tests/bench/lab.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_adam_limits.h"
#include "tools/forebay/bench_adam_pass.h"
#include "tools/forebay/bench_disk_limit.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/bench_job.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::Format;
using protocol::kMiB;
using protocol::MakeError;
using protocol::RoundUp;

constexpr uint32_t kSamples = 7;
constexpr uint64_t kParams = uint64_t{1} << 25;
constexpr uint64_t kGroupElems = uint64_t{1} << 20;
constexpr uint64_t kStateBytes = 8;  // swapped bytes of a parameter in format fp32

AdamPass PassOf(Format format) {
  return {.format = {format, format == Format::kFp32 ? protocol::DType::kFloat32
                                                     : protocol::DType::kBFloat16}};
}

uint64_t BytesOfPass(Format format, uint64_t params) {
  const PassBytes bytes = BytesOf(Streams(PassOf(format), params).shapes, params);
  return bytes.read + bytes.written;
}

// The limit of DRAM: the loops of bench adam over arrays of the job's size, on as many threads as the
// daemon has workers.
struct MemoryLimit {
  std::unique_ptr<cpu_adam::WorkerPool> pool;
  std::unique_ptr<BenchMemory> huge;
  std::unique_ptr<BenchMemory> small;
  std::vector<BenchLoop> loops;

  static absl::StatusOr<MemoryLimit> Create(Format format, uint64_t params, uint32_t threads) {
    MemoryLimit limit;
    ASSIGN_OR_RETURN(limit.pool,
                     cpu_adam::WorkerPool::Create({.threads = static_cast<int>(threads)}));
    const auto run_by = static_cast<uint64_t>(limit.pool->threads());
    const ArraySet arrays = Streams(PassOf(format), std::max(params, run_by * kLoopElems));
    const uint64_t bytes = BenchMemory::BytesFor(arrays);
    ASSIGN_OR_RETURN(limit.huge, BenchMemory::Create(BenchMemory::Pages::k2MiB, bytes));
    ASSIGN_OR_RETURN(limit.small, BenchMemory::Create(BenchMemory::Pages::k4KiB, bytes));
    limit.loops = LimitLoops(*limit.pool, arrays.elems, limit.huge->Allocate(arrays),
                             limit.small->Allocate(arrays));
    return limit;
  }
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

// Events that the daemon's loop thread has handled so far, and the CPU seconds that it has used.
struct LoopWork {
  uint64_t events = 0;
  double cpu_seconds = 0;
};

absl::StatusOr<LoopWork> LoopWorkOf(BenchJob& job) {
  ASSIGN_OR_RETURN(const client::NodeStatus status, job.Status());
  return LoopWork{.events = status->getLoopEvents(), .cpu_seconds = status->getLoopCpuSeconds()};
}

// Returns the result of `measure`, with the CPU microseconds that the loop thread has used for an event during the measurement.
absl::StatusOr<BenchResult> WithLoopWork(BenchJob& job,
                                         absl::FunctionRef<absl::StatusOr<BenchResult>()> measure) {
  constexpr double kMicro = 1e6;
  ASSIGN_OR_RETURN(const LoopWork before, LoopWorkOf(job));
  ASSIGN_OR_RETURN(BenchResult result, measure());
  ASSIGN_OR_RETURN(const LoopWork after, LoopWorkOf(job));
  result.more["loop_us_per_event"] = kMicro * (after.cpu_seconds - before.cpu_seconds) /
                                     static_cast<double>(after.events - before.events);
  return result;
}

// Runs one step. The sample's value is GB/s: bytes of the pass if `pass_bytes` is not 0 (all states in DRAM), otherwise bytes
// transferred to or from swap during the call of step. The sample's byte counts are the transfers since `last`. They include
// bytes that were read ahead, which the value does not count.
absl::StatusOr<Sample> TimeStep(BenchJob& job, uint64_t pass_bytes, Traffic& last) {
  RETURN_IF_ERROR(job.DeliverGradients());
  ASSIGN_OR_RETURN(const Traffic before, TrafficOf(job));
  ASSIGN_OR_RETURN(const double seconds, job.TimedStep());
  ASSIGN_OR_RETURN(const Traffic after, TrafficOf(job));
  const uint64_t swap_bytes =
      after.read_bytes - before.read_bytes + after.written_bytes - before.written_bytes;
  const Sample sample{.value = static_cast<double>(pass_bytes != 0 ? pass_bytes : swap_bytes) /
                               seconds / protocol::kGb,
                      .bytes_read = after.read_bytes - last.read_bytes,
                      .bytes_written = after.written_bytes - last.written_bytes};
  last = after;
  return sample;
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
  job.daemon.runtime_folders = options.bench.runtime_folders;
  job.daemon.dram = absl::StrCat(dram_bytes);
  return job;
}

// Measures a job in DRAM. Sets `beside_states` to the bytes of the job's memory other than its states.
absl::StatusOr<BenchResult> InDram(const CaseOptions& options, Format format,
                                   uint64_t& beside_states) {
  // Bytes for weights, gradient sums and states, and enough for the arenas.
  const uint64_t room = options.params * 24 + 512 * kMiB;
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> job,
                   BenchJob::Create(JobOptions(options, format, room)));
  ASSIGN_OR_RETURN(const client::NodeStatus status, job->Status());
  ASSIGN_OR_RETURN(beside_states, job->BytesBesideStates());
  ASSIGN_OR_RETURN(const MemoryLimit limit,
                   MemoryLimit::Create(format, options.params, status->getWorkers()));
  Traffic last;
  return WithLoopWork(*job, [&] {
    return MeasureCase(
        {.bench = "update",
         .name = absl::StrCat("update/opt=adamw/format=", std::string(protocol::Name(format)),
                              "/place=dram"),
         .unit = "GB/s",
         .limit_what = "best of the loops over the pass's streams",
         .measure = Measure::kRate},
        options.samples,
        [&, bytes = BytesOfPass(format, options.params)] { return TimeStep(*job, bytes, last); },
        limit.loops);
  });
}

// Measures the cost of the record that lets another daemon resume in the middle of an update. Compares a daemon that can be
// restarted with a daemon that cannot; both have the same job in DRAM.
absl::StatusOr<BenchResult> Recorded(const CaseOptions& options, Format format) {
  BenchJobOptions plain = JobOptions(options, format, options.params * 24 + 512 * kMiB);
  BenchJobOptions recorded = plain;
  recorded.daemon.can_start_again = true;
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> limit, BenchJob::Create(plain));
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> job, BenchJob::Create(recorded));
  const uint64_t bytes = BytesOfPass(format, options.params);
  Traffic last;
  Traffic limit_last;
  return WithLoopWork(*job, [&] {
    return MeasureCase(
        {.bench = "update",
         .name = absl::StrCat("update/opt=adamw/format=", std::string(protocol::Name(format)),
                              "/place=dram/recorded"),
         .unit = "GB/s",
         .limit_what = "the same where no record is kept",
         .measure = Measure::kRate},
        options.samples, [&] { return TimeStep(*job, bytes, last); },
        [&] { return TimeStep(*limit, bytes, limit_last); });
  });
}

absl::StatusOr<BenchResult> MeasureOnSwap(const CaseOptions& options, BenchJob& job,
                                          const std::string& place) {
  Traffic last;
  if (!options.bench.limit_rates.empty()) {
    return MeasureCase(
        {.bench = "update",
         .name = absl::StrCat("update/opt=adamw/format=fp32/place=", place,
                              "/rate=", options.bench.limit_rate),
         .unit = "GB/s",
         .limit_what = "the rate that the daemon's engine is limited to, of all paths",
         .measure = Measure::kRate},
        options.samples, [&] { return TimeStep(job, 0, last); },
        [&] { return Sample{.value = TotalRate(options.bench) / protocol::kGb}; });
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<DiskLimit> limit,
                   DiskLimit::Create(options.bench.swap_folder, options.params * kStateBytes));
  return MeasureCase(
      {.bench = "update",
       .name = absl::StrCat("update/opt=adamw/format=fp32/place=", place),
       .unit = "GB/s",
       .limit_what = "bare loop of reads and writes, as many each",
       .measure = Measure::kRate},
      options.samples, [&] { return TimeStep(job, 0, last); }, [&] { return limit->RunCopies(); });
}

// Measures steps with the share `in_dram` of the states resident. If the swap rate is the same as with all states on swap, the
// time of a step is linear in the share on swap.
absl::StatusOr<BenchResult> OnSwap(const CaseOptions& options, uint64_t beside_states,
                                   double in_dram) {
  const uint64_t staging = 64 * kMiB;
  const auto states = static_cast<uint64_t>(in_dram * static_cast<double>(options.params) *
                                            static_cast<double>(kStateBytes));
  BenchJobOptions job_options =
      JobOptions(options, Format::kFp32, beside_states + staging + 2 * kMiB + states);
  job_options.daemon.swap_size =
      absl::StrCat(RoundUp(2 * options.params * kStateBytes, 64 * kMiB) + 256 * kMiB);
  job_options.daemon.settings = {absl::StrCat("swap.staging=", staging)};
  UseSwap(options.bench, job_options.daemon);
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> job, BenchJob::Create(job_options));
  ASSIGN_OR_RETURN(const client::NodeStatus status, job->Status());
  const auto view = status->getJobs()[0];
  if (view.getResidentBlocks() == view.getBlocks()) {
    return MakeError(ErrorId::kInternal, "no block of the bench's job is on swap");
  }
  const double share = static_cast<double>(view.getResidentBlocks()) / view.getBlocks();
  const std::string place = in_dram == 0 ? "nvme" : absl::StrFormat("nvme/in_dram=%.2f", share);
  return WithLoopWork(*job, [&] { return MeasureOnSwap(options, *job, place); });
}

}  // namespace

absl::Status BenchUpdate(const BenchOptions& options, const Report& report) {
  const CaseOptions case_options{.bench = options,
                                 .params = options.params == 0 ? kParams : options.params,
                                 .samples = options.samples == 0 ? kSamples : options.samples};
  uint64_t beside_states = 0;
  for (const Format format : {Format::kExact, Format::kFp32}) {
    ASSIGN_OR_RETURN(const BenchResult in_dram, InDram(case_options, format, beside_states));
    RETURN_IF_ERROR(report(in_dram));
  }
  for (const Format format : {Format::kExact, Format::kFp32, Format::kBf16, Format::kInt8}) {
    ASSIGN_OR_RETURN(const BenchResult recorded, Recorded(case_options, format));
    RETURN_IF_ERROR(report(recorded));
  }
  for (const double in_dram : {0.0, 0.5, 0.75}) {
    ASSIGN_OR_RETURN(const BenchResult on_swap, OnSwap(case_options, beside_states, in_dram));
    RETURN_IF_ERROR(report(on_swap));
  }
  return absl::OkStatus();
}

}  // namespace forebay::tools
