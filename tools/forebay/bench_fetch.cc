// Bench fetch: from the request for a resident group to its lease, beside a bare eventfd round
// trip.

#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>

#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "tools/forebay/bench.h"
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

// Another process that answers each eventfd write with one of its own.
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

absl::StatusOr<Sample> TimeFetches(BenchJob& job) {
  Clock::duration time{};
  for (uint32_t i = 0; i < kTripsPerSample; ++i) {
    const auto began = Clock::now();
    ASSIGN_OR_RETURN(const client::Lease lease, job.attachment().Fetch(i % job.groups(), kLimit));
    time += Clock::now() - began;
    RETURN_IF_ERROR(job.attachment().Release(lease));
  }
  return Sample{.value = Microseconds(time) / kTripsPerSample};
}

absl::StatusOr<Sample> TimeEchoes(EventFdEcho& echo) {
  const auto began = Clock::now();
  for (uint32_t i = 0; i < kTripsPerSample; ++i) {
    if (!echo.RoundTrip()) return MakeError(ErrorId::kInternal, "the echo process is gone");
  }
  return Sample{.value = Microseconds(Clock::now() - began) / kTripsPerSample};
}

}  // namespace

absl::Status BenchFetch(const BenchOptions& options, const Report& report) {
  ASSIGN_OR_RETURN(const std::unique_ptr<EventFdEcho> echo, EventFdEcho::Create());
  const uint64_t params = options.params == 0 ? kParams : options.params;
  BenchJobOptions job_options{.params = params, .group_elems = (params + 3) / 4};
  job_options.daemon.runtime_folder = options.runtime_folder;
  job_options.daemon.dram = "1GiB";
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchJob> job, BenchJob::Create(job_options));
  ASSIGN_OR_RETURN(const BenchResult result,
                   MeasureCase(
                       {.bench = "fetch",
                        .name = "fetch/place=dram/ranks=1",
                        .unit = "us",
                        .limit_what = "bare eventfd round trip between two processes",
                        .measure = Measure::kTime},
                       options.samples == 0 ? kSamples : options.samples,
                       [&] { return TimeFetches(*job); }, [&] { return TimeEchoes(*echo); }));
  report(result);
  return absl::OkStatus();
}

}  // namespace forebay::tools
