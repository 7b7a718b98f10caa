// What one attached session does through its ring: leases, gradients, the step. Knows no process,
// no connection and no lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/internal/command_port.h"
#include "client/internal/deadline.h"
#include "client/internal/grad_slots.h"
#include "client/internal/mapping.h"
#include "gpu/device.h"
#include "protocol/layout.h"

namespace forebay::client::internal {

// Numbers that any thread may read while a call waits.
struct SessionGauge {
  std::atomic<uint64_t> committed_step{0};
  std::atomic<uint64_t> rpc_calls{0};
  std::atomic<uint64_t> commands{0};
  std::atomic<uint64_t> sleeps{0};
  std::atomic<uint64_t> wait_ns_fetch{0};
  std::atomic<uint64_t> wait_ns_grad{0};
  std::atomic<uint64_t> wait_ns_step{0};
  std::atomic<uint64_t> wait_ns_other{0};
  std::atomic<uint64_t> fetched_bytes{0};
  std::atomic<uint64_t> grad_bytes{0};
  std::atomic<uint64_t> private_slots{0};

  Counters Snapshot() const;
};

// Threads  One at a time.
class Session {
 public:
  struct Options {
    std::shared_ptr<const protocol::Layout> layout;
    CommandPort::Options port;
    std::shared_ptr<Mapping> weights;
    std::shared_ptr<Mapping> grad;  // gradients, then the step region
    uint64_t step_region_offset = 0;
    uint64_t step_region_bytes = 0;
    uint64_t grad_bytes_max = UINT64_MAX;  // what was asked for; the region may be larger
    uint64_t extra_state_bytes = 0;
    std::shared_ptr<SessionGauge> gauge;  // committed_step is set
    Timeout timeout{};                    // of calls without their own
    InterruptCheck interrupt_check;
    std::shared_ptr<gpu::Device> device;
  };

  static absl::StatusOr<std::unique_ptr<Session>> Create(Options options);

  // As in Attachment.
  absl::Status WriteInitial(uint32_t group, std::span<const std::byte> bytes, Timeout timeout);
  absl::Status InitialDone(Timeout timeout);
  absl::StatusOr<Lease> Fetch(uint32_t group, Timeout timeout);
  absl::Status Release(const Lease& lease);
  absl::StatusOr<std::span<std::byte>> GradSlot(uint32_t group, GradFill fill, Timeout timeout);
  std::shared_ptr<const void> grad_owner(uint32_t group) const;
  absl::Status GradReady(uint32_t group);
  absl::Status DropGradients();
  absl::StatusOr<StepResult> Step(uint64_t t, std::span<const protocol::HyperParams> hyper_params,
                                  double max_grad_norm, std::span<const std::byte> extra_state,
                                  Timeout timeout);
  absl::Status ReadState(const StateRange& range, std::span<std::byte> out, Timeout timeout);

 private:
  // A command that somebody waits for, or waited for.
  struct Answer {
    bool arrived = false;
    bool abandoned = false;         // the caller gave up
    std::optional<uint64_t> range;  // of the arena, free once this has arrived after all
    protocol::Completion completion{};
    absl::Status status;
  };
  struct OpenSlot {
    std::optional<uint64_t> arena_offset;  // else private
    std::shared_ptr<Mapping> owner;
    std::span<std::byte> bytes;
  };
  struct StepInFlight {
    uint64_t t = 0;
    std::vector<std::byte> request;
    std::shared_ptr<Answer> answer;
  };
  explicit Session(Options options);

  WaitLimits Limits(Timeout timeout) const;
  uint64_t committed_step() const { return gauge_.committed_step; }
  absl::Status CheckGroup(uint32_t group) const;
  absl::Status
  DrainKeptErrors();  // the release error, once; the gradient error for as long as it is kept
  absl::Status DrainKeptReleaseError();

  // Sends, waits, returns the completion. On giving up it leaves the answer to arrive later, and
  // `range`, where there is one, to be freed then.
  absl::StatusOr<protocol::Completion> Ask(const protocol::Command& command, BusyRange* range,
                                           const WaitLimits& limits);
  absl::StatusOr<std::shared_ptr<Answer>> Begin(const protocol::Command& command,
                                                const WaitLimits& limits);
  // Sends a command whose error, should it fail, is kept.
  absl::Status Post(const protocol::Command& command, const WaitLimits& limits);
  void Keep(const protocol::Completion& completion, const absl::Status& status);
  absl::StatusOr<BusyRange> WaitForRange(uint64_t size_bytes, const WaitLimits& limits);
  absl::StatusOr<OpenSlot> MakeSlot(uint32_t group, const WaitLimits& limits);
  absl::Status SendGradient(uint32_t group, BusyRange range, const WaitLimits& limits);
  void OnAnswer(const protocol::Completion& completion, const absl::Status& status, Answer& answer);
  void Learn(const protocol::Completion& completion);
  absl::Status ReleaseOrphans(const WaitLimits& limits);

  absl::StatusOr<std::vector<std::byte>> EncodeStep(
      uint64_t t, std::span<const protocol::HyperParams> hyper_params, double max_grad_norm,
      std::span<const std::byte> extra_state) const;
  absl::Status BeginStep(uint64_t t, std::vector<std::byte> request, const WaitLimits& limits);
  absl::StatusOr<StepResult> EndStep();
  absl::Status CopyIn(uint64_t arena_offset, std::span<const std::byte> bytes);

  Options options_;
  SessionGauge& gauge_;
  std::unique_ptr<gpu::HostRegistration> weights_registration_;
  std::unique_ptr<gpu::HostRegistration> grad_registration_;
  std::unique_ptr<gpu::Stream> stream_;
  CommandPort port_;
  GradSlots slots_;
  std::map<uint32_t, OpenSlot> open_;
  std::optional<StepInFlight> step_;
  std::vector<uint64_t> orphan_leases_;  // of fetches whose callers gave up
  absl::Status kept_release_error_;
  absl::Status kept_grad_error_;
};

}  // namespace forebay::client::internal
