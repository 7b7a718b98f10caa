// SPDX-License-Identifier: Apache-2.0
// Prints the share of two swap paths' rates that a step uses. The paths have different rates. Each rate in turn is halved and
// restored. Run by hand: needs /dev/fuse.
//
// usage: halved_path     in the working directory

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "client/admin.h"
#include "client/client.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "tests/support/daemon_process.h"
#include "tests/support/fuse_disk.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::testing {
namespace {

using protocol::kMiB;

constexpr std::array<uint64_t, 2> kRates = {40 * kMiB, 20 * kMiB};
constexpr uint64_t kDiskBytes = 192 * kMiB;
constexpr auto kTimeout = std::chrono::seconds(120);
constexpr int kSteps = 4;

class Job {
 public:
  static absl::StatusOr<std::unique_ptr<Job>> Start() {
    auto job = std::make_unique<Job>();
    for (size_t path = 0; path < kRates.size(); ++path) {
      const std::string folder = job->folder_.path() + "/" + std::to_string(path);
      std::filesystem::create_directory(folder);
      ASSIGN_OR_RETURN(job->disks_[path], FuseDisk::Mount(folder, kDiskBytes));
    }
    const std::string folder = job->folder_.path();
    const std::string socket = folder + "/s";
    ASSIGN_OR_RETURN(job->daemon_,
                     DaemonProcess::Start(socket, {"swap.paths=" + folder + "/0," + folder + "/1",
                                                   "swap.capacity=160MiB", "swap.staging=16MiB",
                                                   "swap.probe=never", "update.block_elems=16384",
                                                   "dram.limit=112MiB", "jobs.durability=memory"}));
    ASSIGN_OR_RETURN(job->admin_, client::AdminClient::Connect({.socket = socket}));
    const JobShape shape = {.world_size = 1, .groups = 6, .group_elems = 1'000'000};
    ASSIGN_OR_RETURN(job->session_, client::Attachment::Attach({.socket = socket,
                                                                .job = "job",
                                                                .layout = MakeLayoutSpec(shape),
                                                                .timeout = kTimeout}));
    RETURN_IF_ERROR(WriteInitial(*job->session_, 1));
    for (size_t path = 0; path < kRates.size(); ++path) job->SetRate(path, kRates[path]);
    return job;
  }

  void SetRate(size_t path, uint64_t bytes_per_second) {
    disks_[path]->Order({.kind = DiskFault::Kind::kRate, .bytes_per_second = bytes_per_second});
    rates_[path] = bytes_per_second;
  }

  // Prints for each step the bytes that swap moved since the end of the previous step, divided by the bytes that the paths
  // could have moved in that time.
  absl::Status PrintSteps(const char* what) {
    for (int step = 1; step <= kSteps; ++step) {
      ASSIGN_OR_RETURN(const double before, MovedBytes());
      const auto begin = std::chrono::steady_clock::now();
      RETURN_IF_ERROR(TrainStep(*session_, {.t = ++step_}).status());
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      ASSIGN_OR_RETURN(const double after, MovedBytes());
      const double ideal = static_cast<double>(rates_[0] + rates_[1]) * took.count();
      std::printf("%-28s step %d: %.2f s, %.2f of the paths' rates\n", what, step, took.count(),
                  (after - before) / ideal);
      std::fflush(stdout);
    }
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<double> MovedBytes() {
    ASSIGN_OR_RETURN(const client::NodeStatus status, admin_->Status());
    const auto job = status->getJobs()[0];
    return static_cast<double>(job.getStateReadBytes() + job.getStateWrittenBytes());
  }

  TempDir folder_;
  std::array<std::unique_ptr<FuseDisk>, kRates.size()> disks_;
  std::array<uint64_t, kRates.size()> rates_ = kRates;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<client::AdminClient> admin_;
  std::unique_ptr<client::Attachment> session_;
  uint64_t step_ = 0;
};

absl::Status Run() {
  ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Start());
  RETURN_IF_ERROR(job->PrintSteps("40 and 20 MiB/s, not measured"));
  RETURN_IF_ERROR(job->PrintSteps("40 and 20 MiB/s"));
  for (const size_t path : {size_t{0}, size_t{1}}) {
    job->SetRate(path, kRates[path] / 2);
    RETURN_IF_ERROR(job->PrintSteps(path == 0 ? "the faster one halves" : "the slower one halves"));
    job->SetRate(path, kRates[path]);
    RETURN_IF_ERROR(job->PrintSteps("it is as before"));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace forebay::testing

int main() {
  const absl::Status status = forebay::testing::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
