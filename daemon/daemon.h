// SPDX-License-Identifier: Apache-2.0
// The whole daemon as an object: `forebayd` holds one, and so does a test.
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
#include "daemon/exec/recovery/hand_over.h"
#include "daemon/exec/scrub.h"

namespace forebay::daemon {

// What the daemon counts for itself in dram.limit: heap and stacks, without the tables of jobs, which
// admission counts job by job, and without what a connection takes (control_plane.h), which nothing
// counts. Measured: 1.3 MiB after the start, 2.5 MiB at work; 12 KiB for each worker that waits. A scrub takes 256 KiB.
constexpr uint64_t PrivateBytes(uint64_t workers) {
  return (uint64_t{4} << 20) + workers * (uint64_t{64} << 10);
}

// Threads  Start() and the destructor on one thread.
class Daemon {
 public:
  // Returns when clients can connect.
  //
  // Errors  E_CONFIG, E_OPTION  a setting that cannot be.
  //         E_BUSY              another daemon on the socket or a swap path; its process id.
  //         E_SWAP_PATH, E_SWAP_NOSPC, E_UNSUPPORTED  as of nvme.
  //         E_SWAP_PATH, E_CORRUPT                    durable jobs that cannot be recovered, or are of another place.
  //         E_UNSUPPORTED                             jobs.durability without swap that is kept.
  //         E_DRAM_LIMIT, E_MEMLOCK                   private memory and staging are above a limit.
  //
  // `left`: what the daemon before this one has handed over, or had when it was killed; its jobs go on. Where something
  // of it cannot be used, the log says why, and those jobs come back from the disk if they are there. `forget` is called
  // before a byte of it changes, so that nobody finds it again but those of these names; its error is this call's.
  // `store`: while the daemon runs, all that its jobs go on from where it is killed. Without it they end with it.
  using Forget = absl::AnyInvocable<absl::Status(const std::set<std::string>& kept)>;
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const Config& config,
                                                       DescriptorsByName left = {},
                                                       Forget forget = {},
                                                       DescriptorStore store = {});

  // What Start() refuses before it touches the socket and the swap paths.
  static absl::Status Check(const Config& config);

  // The durable jobs that the swap paths hold, which Config::swap_mode kReclaim gives up: "2 jobs: gpt at step 41, ...";
  // empty where there are none. Nothing is changed.
  //
  // Errors  of FindDurableJobs: there may be some.
  static absl::StatusOr<std::string> DurableJobs(const Config& config);

  // Reads and verifies everything that durable jobs have on the swap paths. Each path is read no faster than its
  // swap.limit_rate. Of the other settings only swap.paths and io.engine count: sizes come from the labels on the paths.
  // Changes nothing. Blocks.
  //
  // Errors  Those of ScrubPaths and nvme::CreateIoEngine. E_CONFIG: there are no swap paths.
  static absl::StatusOr<ScrubReport> Scrub(const Config& config);

  // The jobs of such a report with their durable steps; no slot is read.
  //
  // Errors  of WithSizes and FindDurableJobs. E_CONFIG: there are no swap paths.
  static absl::StatusOr<ScrubReport> ListJobs(const Config& config);

  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;
  ~Daemon();  // Stop()

  // Before Stop(): jobs come to rest, `keep` is called on the loop thread with the descriptors by which the next daemon
  // finds them, and their ranks hear that they are to attach again. A job in the middle of a step, which goes on, is waited for
  // up to `limit`; after it the status is E_TIMEOUT: from its record the next daemon goes on with it where this process ends
  // at once, without Stop(). So with all where `keep` fails. Where `keep` is null nothing is kept, and jobs come to rest only
  // where the newest step of one at a durable level is not durable yet. `on_wait` is called about once a second
  // meanwhile; where it returns false, nothing is waited for. Of the thread of Start().
  absl::Status HandOver(KeepDescriptors keep, std::chrono::seconds limit,
                        absl::AnyInvocable<bool()> on_wait);

  // Ends all sessions, waits for work in flight, removes the socket. A repeat does nothing.
  void Stop();

  // An eventfd that becomes readable where the daemon cannot go on by itself (its log says why).
  int failure_fd() const;

  // Whether loop and control thread have both answered the probe of the call before; sends the next
  // one. True at the first call. For the thread of Start().
  bool MadeProgress();

  const Config& config() const;  // as it runs: defaults filled in

 private:
  struct State;
  explicit Daemon(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::daemon
