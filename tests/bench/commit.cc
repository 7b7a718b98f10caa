// SPDX-License-Identifier: Apache-2.0
// Bench commit: measures a step at durability level step. The limit is the same step at level memory, plus the time in which
// a bare loop writes the additional bytes.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "protocol/durability.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tests/bench/lab.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_disk_limit.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/bench_job.h"

namespace forebay::tools {
namespace {

using protocol::kMiB;

constexpr uint32_t kSamples = 7;
constexpr uint64_t kParams = uint64_t{1} << 25;
constexpr uint64_t kGroupElems = uint64_t{1} << 20;
constexpr uint64_t kBytes = 12;  // weights and states of a parameter in format exact
// Swap slots for each block and each part of the weights.
constexpr uint64_t kSlotsAtStep = 3;
constexpr uint64_t kLoopBytes = 256 * kMiB;

constexpr protocol::Durability kStep{.level = protocol::DurabilityLevel::kStep, .steps = 1};

struct Side {
  std::unique_ptr<BenchJob> job;

  absl::StatusOr<uint64_t> WrittenBytes() {
    ASSIGN_OR_RETURN(const client::NodeStatus status, job->Status());
    uint64_t bytes = 0;
    for (const auto path : status->getSwap()) bytes += path.getWrittenBytes();
    return bytes;
  }

  // Runs a step. Returns the seconds from the call to its answer, and the bytes written meanwhile. Without early updates
  // these are all bytes that the step writes.
  absl::StatusOr<Sample> TimeStep() {
    RETURN_IF_ERROR(job->DeliverGradients());
    ASSIGN_OR_RETURN(const uint64_t before, WrittenBytes());
    ASSIGN_OR_RETURN(const double seconds, job->TimedStep());
    ASSIGN_OR_RETURN(const uint64_t after, WrittenBytes());
    return Sample{.value = seconds, .bytes_written = after - before};
  }
};

absl::StatusOr<Side> MakeSide(const BenchOptions& options, const std::string& dram,
                              const protocol::Durability& durability) {
  const uint64_t params = options.params == 0 ? kParams : options.params;
  BenchJobOptions job{.format = protocol::Format::kExact,
                      .params = params,
                      .group_elems = kGroupElems,
                      .durability = durability};
  job.daemon.runtime_folders = options.runtime_folders;
  job.daemon.dram = dram;
  job.daemon.swap_size =
      absl::StrCat(protocol::RoundUp(kSlotsAtStep * params * kBytes, 64 * kMiB) + 512 * kMiB);
  // A durable level needs swap files that persist. The folder is removed with the daemon.
  job.daemon.settings = {absl::StrCat("swap.staging=", 64 * kMiB), "swap.life=kept"};
  UseSwap(options, job.daemon);
  ASSIGN_OR_RETURN(std::unique_ptr<BenchJob> made, BenchJob::Create(job));
  return Side{.job = std::move(made)};
}

absl::StatusOr<BenchResult> TimePlace(const BenchOptions& options, const std::string& place,
                                      const std::string& dram, DiskLimit& disk) {
  ASSIGN_OR_RETURN(Side memory, MakeSide(options, dram, {}));
  ASSIGN_OR_RETURN(Side durable, MakeSide(options, dram, kStep));
  uint64_t more_bytes = 0;  // bytes that the durable step writes
  double memory_s = 0;
  const auto limit = [&]() -> absl::StatusOr<Sample> {
    ASSIGN_OR_RETURN(const Sample step, memory.TimeStep());
    ASSIGN_OR_RETURN(const Sample rate, disk.RunWrites());
    memory_s = step.value;
    const double more_s =
        static_cast<double>(more_bytes - step.bytes_written) / protocol::kGb / rate.value;
    return Sample{.value = step.value + more_s};
  };
  const auto value = [&]() -> absl::StatusOr<Sample> {
    ASSIGN_OR_RETURN(const Sample step, durable.TimeStep());
    more_bytes = step.bytes_written;
    return step;
  };
  const BenchCase what{
      .bench = "commit",
      .name = absl::StrCat("commit/level=step/place=", place),
      .unit = "s",
      .limit_what = "the step at level memory, and a bare loop for what is written more",
      .measure = Measure::kTime};
  ASSIGN_OR_RETURN(
      BenchResult result,
      MeasureCase(what, options.samples == 0 ? kSamples : options.samples, value, limit));
  result.more["memory_s"] = memory_s;
  result.more["written_bytes"] = more_bytes;
  return result;
}

}  // namespace

absl::Status BenchCommit(const BenchOptions& options, const Report& report) {
  const uint64_t params = options.params == 0 ? kParams : options.params;
  ASSIGN_OR_RETURN(const std::unique_ptr<DiskLimit> disk,
                   DiskLimit::Create(options.swap_folder, kLoopBytes));
  const uint64_t room = params * 24 + 512 * kMiB;
  uint64_t beside_states = 0;
  {
    ASSIGN_OR_RETURN(Side in_dram, MakeSide(options, absl::StrCat(room), {}));
    ASSIGN_OR_RETURN(beside_states, in_dram.job->BytesBesideStates());
  }
  ASSIGN_OR_RETURN(const BenchResult in_dram,
                   TimePlace(options, "dram", absl::StrCat(room), *disk));
  RETURN_IF_ERROR(report(in_dram));
  // The tables of a durable job are larger. With the same limit a few blocks may stay resident at level memory.
  const uint64_t small = beside_states + 64 * kMiB + 8 * kMiB;
  ASSIGN_OR_RETURN(const BenchResult on_swap,
                   TimePlace(options, "nvme", absl::StrCat(small), *disk));
  RETURN_IF_ERROR(report(on_swap));
  return absl::OkStatus();
}

}  // namespace forebay::tools
