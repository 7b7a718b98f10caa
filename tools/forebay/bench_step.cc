// SPDX-License-Identifier: Apache-2.0
// Bench step: measures forward, backward and update of a job whose states are on swap. Forward and backward sleep in place of
// computing, like a CPU that waits for a GPU. Forward takes a third of the compute time and backward two thirds, evenly over
// the groups.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/bench_job.h"

namespace forebay::tools {
namespace {

using protocol::kMiB;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr uint32_t kSamples = 7;
constexpr uint64_t kParams = uint64_t{1} << 25;
constexpr uint64_t kGroups = 32;
constexpr uint64_t kStateBytes = 8;    // swapped bytes of a parameter in format fp32
constexpr uint64_t kWeightsBytes = 4;  // bytes of a parameter's new weight for early updates
constexpr uint32_t kStepsPerSample = 2;
constexpr client::Timeout kLimit = std::chrono::seconds(120);

// When blocks are updated.
struct When {
  bool early = false;  // updates start when gradients arrive; false: after the step's decision
  bool drain = false;  // updates end during the next forward; false: the step call waits for them
};

// A training loop. It sleeps for a given time in place of computing with the weights of each group.
class Trainer {
 public:
  Trainer(BenchJob& job, double compute_s, bool early)
      : job_(job), compute_s_(compute_s), early_(early) {}

  // Runs consecutive steps and returns the average seconds of a step.
  absl::StatusOr<Sample> TimeSteps() {
    RETURN_IF_ERROR(Step());  // its update overlaps the first timed step
    const Clock::time_point began = Clock::now();
    for (uint32_t i = 0; i < kStepsPerSample; ++i) RETURN_IF_ERROR(Step());
    const double seconds = Seconds(Clock::now() - began).count() / kStepsPerSample;
    RETURN_IF_ERROR(WaitForPublication().status());
    return Sample{.value = seconds};
  }

  // Runs one step without computing and returns the seconds of its update.
  absl::StatusOr<double> TimeUpdate() {
    RETURN_IF_ERROR(job_.DeliverGradients());
    RETURN_IF_ERROR(job_.TimedStep().status());
    return WaitForPublication();
  }

 private:
  // Runs one step. The weights of each group are fetched while the previous group computes.
  absl::Status Step() {
    const uint32_t groups = job_.groups();
    const Seconds forward(compute_s_ / 3 / groups);
    RETURN_IF_ERROR(Ask(0));
    for (uint32_t i = 0; i < 2 * groups; ++i) {
      const bool is_backward = i >= groups;
      const uint32_t group = GroupOf(i);
      if (early_ && i == groups) RETURN_IF_ERROR(job_.AnnounceStep());
      ASSIGN_OR_RETURN(const client::Lease lease, job_.attachment().FinishFetch(ticket_, kLimit));
      if (i + 1 < 2 * groups) RETURN_IF_ERROR(Ask(GroupOf(i + 1)));
      std::this_thread::sleep_for(is_backward ? 2 * forward : forward);
      RETURN_IF_ERROR(job_.attachment().Release(lease));
      if (is_backward) RETURN_IF_ERROR(job_.DeliverGradient(group));
    }
    return job_.TimedStep().status();
  }

  // The group of the i-th lease of a step. Forward takes the groups in ascending order, backward in descending order.
  uint32_t GroupOf(uint32_t i) const { return i < job_.groups() ? i : 2 * job_.groups() - 1 - i; }

  absl::Status Ask(uint32_t group) {
    ASSIGN_OR_RETURN(ticket_, job_.attachment().StartFetch(group));
    return absl::OkStatus();
  }

  // Seconds from the call of the newest step to the end of its update.
  absl::StatusOr<double> WaitForPublication() {
    while (true) {
      ASSIGN_OR_RETURN(const client::NodeStatus status, job_.Status());
      const schema::JobStatus::Reader job = status->getJobs()[0];
      if (job.getPublishedStep() == job.getCommittedStep()) return job.getLastStepSeconds();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  BenchJob& job_;
  double compute_s_;
  bool early_;
  client::FetchTicket ticket_;
};

BenchJobOptions JobOptions(const BenchOptions& options, uint64_t dram_bytes) {
  const uint64_t params = options.params == 0 ? kParams : options.params;
  BenchJobOptions job{
      .params = params, .group_elems = (params + kGroups - 1) / kGroups, .is_sharded = true};
  job.daemon.runtime_folders = options.runtime_folders;
  job.daemon.dram = absl::StrCat(dram_bytes);
  return job;
}

// Creates a job whose states are all on swap.
absl::StatusOr<std::unique_ptr<BenchJob>> MakeJob(const BenchOptions& options,
                                                  uint64_t beside_states, const When& when) {
  const uint64_t staging = 64 * kMiB;
  BenchJobOptions job_options = JobOptions(options, 0);
  const uint64_t new_weights = when.early ? job_options.params * kWeightsBytes : 0;
  // A resident block needs DRAM for its states, but none for new weights: spare DRAM for the difference would be enough for
  // it. With early updates no DRAM is spare, so that no block becomes resident.
  const uint64_t spare = when.early ? 0 : 2 * kMiB;
  job_options.daemon.dram = absl::StrCat(beside_states + staging + new_weights + spare);
  job_options.drain = when.drain;
  job_options.early_updates = when.early;
  job_options.daemon.swap_size =
      absl::StrCat(protocol::RoundUp(2 * job_options.params * kStateBytes, 64 * kMiB) + 256 * kMiB);
  job_options.daemon.settings = {absl::StrCat("swap.staging=", staging)};
  UseSwap(options, job_options.daemon);
  ASSIGN_OR_RETURN(std::unique_ptr<BenchJob> job, BenchJob::Create(job_options));
  ASSIGN_OR_RETURN(const client::NodeStatus status, job->Status());
  if (status->getJobs()[0].getResidentBlocks() > 0) {
    return protocol::MakeError(protocol::ErrorId::kInternal, "a block of the job is in DRAM");
  }
  return job;
}

// Seconds to read and write the job's states once at --limit-rate. Returns 0 if there is no limit.
double SecondsAtLimit(const BenchOptions& options) {
  if (options.limit_rates.empty()) return 0;
  const uint64_t bytes = 2 * JobOptions(options, 0).params * kStateBytes;
  return static_cast<double>(bytes) / TotalRate(options);
}

absl::StatusOr<BenchResult> TimeJob(const BenchOptions& options, uint64_t beside_states,
                                    const When& when) {
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> job, MakeJob(options, beside_states, when));
  Trainer idle(*job, 0, /*early=*/false);
  RETURN_IF_ERROR(idle.TimeUpdate().status());  // writes all slots for the first time
  ASSIGN_OR_RETURN(const double alone_s, idle.TimeUpdate());
  const double limited_s = SecondsAtLimit(options);
  const double disk_s = std::max(alone_s, limited_s);
  const double compute_s = options.compute_ms == 0 ? disk_s : options.compute_ms * 1e-3;
  Trainer trainer(*job, compute_s, when.early);
  double update_s = 0;
  const auto limit = [&]() -> absl::StatusOr<Sample> {
    ASSIGN_OR_RETURN(update_s, trainer.TimeUpdate());
    if (limited_s > 0) update_s = limited_s;  // counts all blocks, also those read ahead
    return Sample{.value = std::max(update_s, compute_s)};
  };
  const std::string rate = options.limit_rate.empty() ? "" : "/rate=" + options.limit_rate;
  const BenchCase what{.bench = "step",
                       .name = absl::StrCat("step/place=nvme/early=", when.early ? "yes" : "no",
                                            "/drain=", when.drain ? "yes" : "no", rate),
                       .unit = "s",
                       .limit_what = limited_s > 0
                                         ? "the longer of compute and swap's bytes at the rate"
                                         : "the longer of compute and update",
                       .measure = Measure::kTime};
  ASSIGN_OR_RETURN(BenchResult result, MeasureCase(
                                           what, options.samples == 0 ? kSamples : options.samples,
                                           [&] { return trainer.TimeSteps(); }, limit));
  result.more["compute_s"] = compute_s;
  result.more["update_s"] = update_s;
  return result;
}

}  // namespace

absl::Status BenchStep(const BenchOptions& options, const Report& report) {
  uint64_t beside_states = 0;
  {
    const uint64_t room = JobOptions(options, 0).params * 24 + 512 * kMiB;
    ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> in_dram,
                     BenchJob::Create(JobOptions(options, room)));
    ASSIGN_OR_RETURN(beside_states, in_dram->BytesBesideStates());
  }
  for (const bool early : {true, false}) {
    for (const bool drain : {true, false}) {
      ASSIGN_OR_RETURN(const BenchResult result,
                       TimeJob(options, beside_states, {.early = early, .drain = drain}));
      RETURN_IF_ERROR(report(result));
    }
  }
  return absl::OkStatus();
}

}  // namespace forebay::tools
