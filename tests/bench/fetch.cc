// SPDX-License-Identifier: Apache-2.0
// Bench fetch: measures the time from the request for a resident group to its lease, compared with a bare eventfd round trip.
// Also measures the rate at which groups on swap are fetched one after the other, compared with a bare loop of reads, and
// the rate of several ranks at once, compared with one rank.

#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/daemon.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/units.h"
#include "tests/bench/lab.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_disk_limit.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/bench_job.h"

namespace forebay::tools {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kSamples = 15;
constexpr uint32_t kTripsPerSample = 500;
constexpr uint64_t kParams = uint64_t{1} << 20;
constexpr uint32_t kSwapSamples = 7;
constexpr uint64_t kSwappedParams = uint64_t{1} << 27;
constexpr uint32_t kRanks = 4;  // ranks whose sessions share the disk
constexpr uint64_t kSwappedGroupElems = uint64_t{1} << 22;
constexpr uint64_t kBlockBytesPerElem = 13;  // format exact with weights, plus rounding
constexpr uint64_t kStagingBytes = 96 * protocol::kMiB;
constexpr client::Timeout kLimit = std::chrono::seconds(30);

double Microseconds(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

bool Send(const UniqueFd& fd) {
  const uint64_t one = 1;
  return ::write(fd.get(), &one, sizeof(one)) == sizeof(one);
}

bool Receive(const UniqueFd& fd) {
  uint64_t count = 0;
  return ::read(fd.get(), &count, sizeof(count)) == sizeof(count);
}

// A child process that answers each write to one eventfd with a write to another.
class EventFdEcho {
 public:
  static absl::StatusOr<std::unique_ptr<EventFdEcho>> Create() {
    auto echo = std::make_unique<EventFdEcho>();
    echo->there_.Reset(::eventfd(0, EFD_CLOEXEC));
    echo->back_.Reset(::eventfd(0, EFD_CLOEXEC));
    if (!echo->there_.valid() || !echo->back_.valid()) {
      return MakeError(ErrorId::kLimit, protocol::ErrnoText("eventfd", errno));
    }
    echo->pid_ = ::fork();
    if (echo->pid_ < 0) return MakeError(ErrorId::kLimit, protocol::ErrnoText("fork", errno));
    if (echo->pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      while (Receive(echo->there_) && Send(echo->back_)) {
      }
      ::_exit(0);
    }
    return echo;
  }

  EventFdEcho() = default;
  EventFdEcho(const EventFdEcho&) = delete;
  EventFdEcho& operator=(const EventFdEcho&) = delete;
  ~EventFdEcho() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  bool RoundTrip() { return Send(there_) && Receive(back_); }

 private:
  UniqueFd there_;
  UniqueFd back_;
  pid_t pid_ = -1;
};

// Collects the times of round trips.
class Trips {
 public:
  void Add(Clock::duration time) { microseconds_.push_back(Microseconds(time)); }

  // Returns the median of the newest kTripsPerSample times.
  Sample NewestSample() const {
    return {.value = QuantileOf({microseconds_.end() - kTripsPerSample, microseconds_.end()}, 0.5)};
  }
  double P99() const { return QuantileOf(microseconds_, 0.99); }

 private:
  static double QuantileOf(std::vector<double> trips, double q) {
    std::ranges::sort(trips);
    return Quantile(trips, q);
  }

  std::vector<double> microseconds_;
};

absl::StatusOr<Sample> TimeFetches(BenchJob& job, Trips& trips) {
  for (uint32_t i = 0; i < kTripsPerSample; ++i) {
    const auto began = Clock::now();
    ASSIGN_OR_RETURN(const client::Lease lease, job.attachment().Fetch(i % job.groups(), kLimit));
    trips.Add(Clock::now() - began);
    RETURN_IF_ERROR(job.attachment().Release(lease));
  }
  return trips.NewestSample();
}

absl::StatusOr<uint64_t> WeightsRead(BenchJob& job) {
  ASSIGN_OR_RETURN(const client::NodeStatus status, job.Status());
  return status->getJobs()[0].getWeightReadBytes();
}

// Fetches each partition and releases its lease.
absl::Status FetchAll(client::Attachment& attachment, std::span<const uint32_t> partitions) {
  for (const uint32_t partition : partitions) {
    ASSIGN_OR_RETURN(const client::Lease lease, attachment.Fetch(partition, kLimit));
    RETURN_IF_ERROR(attachment.Release(lease));
  }
  return absl::OkStatus();
}

// Runs a forward on all ranks: each rank fetches its partitions in the order of the previous step. No weights are resident
// before. Returns the bytes of weights per second. Then runs a step, which is not timed.
absl::StatusOr<Sample> TimeForward(BenchJob& job) {
  ASSIGN_OR_RETURN(const uint64_t before, WeightsRead(job));
  const auto began = Clock::now();
  RETURN_IF_ERROR(job.OnEachRank(FetchAll));
  const std::chrono::duration<double> took = Clock::now() - began;
  ASSIGN_OR_RETURN(const uint64_t after, WeightsRead(job));
  const auto weights = static_cast<double>(job.attachment().layout().weights_bytes());
  RETURN_IF_ERROR(job.DeliverGradients());
  RETURN_IF_ERROR(job.TimedStep().status());
  return Sample{.value = weights / took.count() / protocol::kGb, .bytes_read = after - before};
}

uint64_t ParamsOnSwap(const BenchOptions& options) {
  return options.params == 0 ? kSwappedParams : options.params;
}

// Creates the job with the smallest DRAM limit that it fits in.
absl::StatusOr<std::unique_ptr<BenchJob>> JobOnSwap(const BenchOptions& options, uint32_t ranks) {
  const uint64_t params = ParamsOnSwap(options);
  BenchJobOptions job_options{.format = protocol::Format::kExact,
                              .params = params,
                              .group_elems = std::min(kSwappedGroupElems, (params + 7) / 8),
                              .is_sharded = true,
                              .ranks = ranks};
  job_options.daemon.runtime_folders = options.runtime_folders;
  uint64_t dram_bytes = protocol::kGiB + 24 * params;
  {
    job_options.daemon.dram = absl::StrCat(dram_bytes);
    ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> in_dram, BenchJob::Create(job_options));
    ASSIGN_OR_RETURN(const client::NodeStatus status, in_dram->Status());
    ASSIGN_OR_RETURN(const client::JobPlan plan, in_dram->Plan(dram_bytes));
    const uint64_t digest_bytes = plan->getWeights() / protocol::kPageBytes * 2 * sizeof(uint64_t);
    const uint64_t cache_bytes = 2 * sizeof(uint16_t) * job_options.group_elems;
    dram_bytes = daemon::PrivateBytes(status->getWorkers()) + kStagingBytes + plan->getSums() +
                 plan->getExtraState() + plan->getSessions() + plan->getTables() + digest_bytes +
                 cache_bytes + 64 * protocol::kKiB;
  }
  job_options.daemon.dram = absl::StrCat(dram_bytes);
  job_options.daemon.swap = {options.swap_folder};
  job_options.daemon.swap_size = absl::StrCat(
      protocol::RoundUp(2 * params * kBlockBytesPerElem, protocol::kMiB) + 256 * protocol::kMiB);
  job_options.daemon.settings = {absl::StrCat("swap.staging=", kStagingBytes)};
  ASSIGN_OR_RETURN(std::unique_ptr<BenchJob> job, BenchJob::Create(job_options));
  ASSIGN_OR_RETURN(const client::NodeStatus status, job->Status());
  if (status->getJobs()[0].getWeightsOnSwapBytes() > 0) return job;
  return MakeError(ErrorId::kInternal, "no weights of the bench's job are on swap");
}

absl::Status OnSwap(const BenchOptions& options, const Report& report) {
  const uint32_t samples = options.samples == 0 ? kSwapSamples : options.samples;
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> job, JobOnSwap(options, 1));
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> of_ranks, JobOnSwap(options, kRanks));
  const auto forward = [&] { return TimeForward(*job); };
  {
    ASSIGN_OR_RETURN(
        const std::unique_ptr<DiskLimit> limit,
        DiskLimit::Create(options.swap_folder, ParamsOnSwap(options) * sizeof(uint16_t)));
    ASSIGN_OR_RETURN(const BenchResult result,
                     MeasureCase({.bench = "fetch",
                                  .name = "fetch/place=nvme/ranks=1",
                                  .unit = "GB/s",
                                  .limit_what = "bare loop of reads of 1 MiB",
                                  .measure = Measure::kRate},
                                 samples, forward, [&] { return limit->RunReads(); }));
    RETURN_IF_ERROR(report(result));
  }
  ASSIGN_OR_RETURN(const BenchResult result,
                   MeasureCase(
                       {.bench = "fetch",
                        .name = absl::StrCat("fetch/place=nvme/ranks=", kRanks),
                        .unit = "GB/s",
                        .limit_what = "the same with one rank",
                        .measure = Measure::kRate},
                       samples, [&] { return TimeForward(*of_ranks); }, forward));
  RETURN_IF_ERROR(report(result));
  return absl::OkStatus();
}

absl::StatusOr<Sample> TimeEchoes(EventFdEcho& echo, Trips& trips) {
  for (uint32_t i = 0; i < kTripsPerSample; ++i) {
    const auto began = Clock::now();
    if (!echo.RoundTrip()) return MakeError(ErrorId::kInternal, "the echo process is gone");
    trips.Add(Clock::now() - began);
  }
  return trips.NewestSample();
}

}  // namespace

absl::Status BenchFetch(const BenchOptions& options, const Report& report) {
  ASSIGN_OR_RETURN(const std::unique_ptr<EventFdEcho> echo, EventFdEcho::Create());
  const uint64_t params = options.params == 0 ? kParams : options.params;
  BenchJobOptions job_options{.params = params, .group_elems = (params + 3) / 4};
  job_options.daemon.runtime_folders = options.runtime_folders;
  job_options.daemon.dram = "1GiB";
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> job, BenchJob::Create(job_options));
  Trips fetches;
  Trips echoes;
  ASSIGN_OR_RETURN(
      BenchResult result,
      MeasureCase(
          {.bench = "fetch",
           .name = "fetch/place=dram/ranks=1",
           .unit = "us",
           .limit_what = "bare eventfd round trip between two processes",
           .measure = Measure::kTime},
          options.samples == 0 ? kSamples : options.samples,
          [&] { return TimeFetches(*job, fetches); }, [&] { return TimeEchoes(*echo, echoes); }));
  result.more["p99"] = fetches.P99();
  result.more["limit_p99"] = echoes.P99();
  RETURN_IF_ERROR(report(result));
  return OnSwap(options, report);
}

}  // namespace forebay::tools
