// SPDX-License-Identifier: Apache-2.0
// The whole daemon as an object, used by `forebayd` and by tests.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/config.h"
#include "daemon/exec/recovery/left_jobs.h"
#include "daemon/exec/scrub.h"

namespace forebay::daemon {

// Private memory that the daemon counts for itself in dram.limit: heap and stacks. Tables of jobs are not part of it, because
// admission counts them job by job. Memory of connections (control_plane.h) is not counted at all. Measured: 1.3 MiB after the
// start, 2.5 MiB at work; 12 KiB for each worker that waits. A scrub takes 256 KiB.
constexpr uint64_t PrivateBytes(uint64_t workers) {
  return (uint64_t{4} << 20) + workers * (uint64_t{64} << 10);
}

// Threads  Start() and the destructor on one thread.
class Daemon {
 public:
  // Starts a daemon. Returns once clients can connect.
  //
  // Errors  E_CONFIG, E_OPTION  a setting is not possible; or jobs in `left` are of a newer daemon, or on another volume.
  //         E_BUSY              another daemon uses the socket or a swap path; its process id.
  //         E_SWAP_PATH, E_SWAP_NOSPC, E_UNSUPPORTED  those of nvme.
  //         E_SWAP_PATH, E_CORRUPT                    durable jobs that cannot be recovered, or are of another place.
  //         E_UNSUPPORTED                             jobs.durability without swap files that outlive the daemon.
  //         E_DRAM_LIMIT, E_MEMLOCK                   private memory and staging are above a limit.
  //
  // `left`: retained descriptors of the previous daemon, whose jobs continue. If a job cannot continue, the log says why, and
  // the job is recovered from the disk if it is durable. `forget` is called before a byte of the arenas changes, so that no
  // other daemon finds them again, except those whose names it gets; its error is returned. `store` gets the descriptors from which jobs continue if this daemon is killed. Without `store` the jobs end with
  // the daemon.
  using Forget = absl::AnyInvocable<absl::Status(const std::set<std::string>& kept)>;
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const Config& config,
                                                       DescriptorsByName left = {},
                                                       Forget forget = {},
                                                       DescriptorStore store = {});

  // Makes the checks of Start() that come before the socket and the swap paths are touched.
  static absl::Status Check(const Config& config);

  // Returns a text about the durable jobs that the swap paths hold and that OpenMode::kReclaim would give up: "2 jobs: gpt at
  // step 41, ...". Returns an empty text if the paths hold no durable jobs. Changes nothing.
  //
  // Errors  of FindDurableJobs: the paths may hold durable jobs.
  static absl::StatusOr<std::string> DurableJobs(const Config& config);

  // Reads and verifies all slots of durable jobs on the swap paths. Reads each path no faster than its swap.limit_rate. Ignores
  // all settings other than swap.paths, swap.limit_rate and io.engine: sizes come from the labels on the paths. Changes
  // nothing. Blocks.
  //
  // Errors  Those of ScrubPaths and nvme::CreateIoEngine. E_CONFIG: `config` has no swap paths.
  static absl::StatusOr<ScrubReport> Scrub(const Config& config);

  // Returns the durable jobs and their steps as a ScrubReport. Reads no slot.
  //
  // Errors  of WithSizes and FindDurableJobs. E_CONFIG: `config` has no swap paths.
  static absl::StatusOr<ScrubReport> ListJobs(const Config& config);

  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;
  ~Daemon();  // calls Stop()

  // Makes the jobs quiescent before Stop(). `flush` is called on the loop thread when the jobs are recorded for the next daemon,
  // and ranks are then notified to attach again. A job in the middle of a step is waited for up to `limit`; after that the
  // status is E_TIMEOUT. The next daemon continues such a job from its record if this process then ends at once, without
  // Stop(). The same holds for all jobs if `flush` fails. If `flush` is null, nothing is retained in memory, and the jobs become
  // quiescent only if the newest step of a job at a durable level is not durable yet. `on_wait` is called about once a second
  // during the wait; if it returns false, the wait ends. For the thread of Start().
  absl::Status StopJobs(FlushStore flush, std::chrono::seconds limit,
                        absl::AnyInvocable<bool()> on_wait);

  // Ends all sessions, waits for work in flight, removes the socket. A repeat does nothing.
  void Stop();

  // An eventfd that becomes readable if the daemon cannot continue by itself (its log says why).
  int failure_fd() const;

  // True if the loop thread and the control thread have both answered the probe of the previous call. Sends the next probe.
  // True at the first call. For the thread of Start().
  bool MadeProgress();

  const Config& config() const;  // the settings of Start(), with defaults filled in

 private:
  struct State;
  explicit Daemon(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::daemon
