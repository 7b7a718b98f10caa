// SPDX-License-Identifier: Apache-2.0
// The parts of an Attachment: its connection, its windows, its commands in flight.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/internal/command_port.h"
#include "client/internal/connection.h"
#include "client/internal/copy_watch.h"
#include "client/internal/deadline.h"
#include "client/internal/device_trace.h"
#include "client/internal/grad_slots.h"
#include "client/internal/mapping.h"
#include "client/internal/node_agreement.h"
#include "client/internal/session_parts.h"
#include "client/internal/stopwatch.h"
#include "client/internal/waiter.h"
#include "client/window_registry.h"
#include "gpu/device.h"
#include "gpu/pinned_ring.h"
#include "protocol/layout.h"
#include "protocol/os/mutex.h"
#include "protocol/trace.h"
#include "protocol/wire.h"

namespace forebay::client::internal {

// Returns the wire's number of an optimizer state. E_RANGE lists the names of the optimizer's states.
absl::StatusOr<uint16_t> StateNumber(const protocol::Layout& layout, std::string_view state);

}  // namespace forebay::client::internal

namespace forebay::client {

// Threads  One at a time, under `mutex`; `gauge` and what is const from Assemble on: any.
struct Attachment::State {
  // The answer to a command, from the time it is sent.
  struct Answer {
    explicit Answer(State* of) : session(of) {}

    State* const session;
    bool arrived = false;
    // True if the caller of the command gave up.
    bool abandoned = false;
    // Range of the arena that the command uses. Freed when the answer arrives after its caller gave up.
    std::optional<uint64_t> range;
    protocol::Completion completion{};
    absl::Status status;
  };
  struct OpenSlot {
    // Empty if the slot is private memory.
    std::optional<uint64_t> arena_offset;
    std::shared_ptr<internal::Mapping> owner;
    std::span<std::byte> bytes;
    // Event after the last copy from the device into the slot. Null if the device copied nothing into the slot.
    std::shared_ptr<const gpu::Event> copied = {};
  };
  // A range of a partition that AddGradient fills.
  struct OpenPiece {
    uint64_t end = 0;
    OpenSlot slot;
  };
  struct ElemPlace {
    uint32_t partition = 0;
    uint64_t elem = 0;

    // NOLINTNEXTLINE(modernize-use-nullptr): of clang 14
    auto operator<=>(const ElemPlace&) const = default;
  };
  using Pieces = std::pmr::map<ElemPlace, OpenPiece>;  // keyed by the first element
  // Leases whose weights are being copied to the device.
  struct CopiesInFlight {
    std::pmr::vector<uint64_t> leases;
    std::shared_ptr<const gpu::Event> done;
  };
  // A copy of a gradient to a slot.
  struct GradientCopy {
    std::shared_ptr<const gpu::Event> done;
    std::shared_ptr<const void> keep;  // source of the copy
  };
  // A delivered gradient whose command is sent when its copies have ended.
  struct UnsentGradient {
    protocol::Command command;
    internal::BusyRange range;
    std::shared_ptr<const gpu::Event> copied;
  };
  struct StepInFlight {
    uint64_t t = 0;
    std::pmr::vector<std::byte> request;  // request of the step without extra_state
    std::pmr::vector<uint64_t> presence;
    std::shared_ptr<Answer> answer;
    // Over several nodes: the nodes' outcome, this rank's command that tells it to the daemon, and whether the gradients that
    // this rank has delivered are dropped.
    std::optional<internal::StepOutcome> outcome = {};
    std::shared_ptr<Answer> decided = {};
    bool drops = false;
  };

  explicit State(internal::SessionParts session_parts);

  bool InChild() const;
  // Attaches again if the daemon was restarted. The session then continues as if nothing had happened: commands without an
  // answer are sent again.
  //
  // Errors  E_DAEMON_GONE             no daemon grants the session within its time, or not as it was: the
  //                                   session has ended.
  //         E_TIMEOUT, E_INTERRUPTED  a later call tries again.
  absl::Status Reattach(const internal::WaitLimits& limits);
  // Continues the session with the daemon that granted it. `leases`: number of leases that the session asked to retain, if
  // weights are on swap. Errors as Reattach, and those of the connection to the new daemon.
  absl::Status GoOnWith(internal::GrantedSession granted, uint64_t leases,
                        const internal::WaitLimits& limits);
  absl::Status EndSession(absl::Status reason);
  // Calls Reattach if the daemon has announced its restart. For calls that ask the control plane first.
  absl::Status ReattachIfRestarting(const internal::WaitLimits& limits);
  // Returns whether an error of the control plane came from the end of a daemon, or of the way to it, that the session
  // survives. Waits until the data plane has seen that end too.
  bool IsRestartingSoon(const absl::Status& met);
  // Ends the session if its daemon is being restarted, for a caller that is about to end it. Does not wait for the next daemon,
  // which sees that the session does not return. Returns whether the session was ended.
  bool EndIfRestarting();
  // Attaches again, once, before a detach: the daemon then hears of the detach. Waits for no daemon that is not running. If the
  // daemon is on another node, a process is started for the attempt. Returns whether the session is with a daemon.
  bool ReattachOnce(const internal::WaitLimits& limits);
  // Asks the running daemon once to grant the session again. Errors of AttachAgain and GoOnWith.
  absl::Status TryReattach(const internal::WaitLimits& limits);
  void UpdateCalls();

  // Returns the release error once; then the gradient error for as long as it is retained.
  absl::Status KeptErrors(const internal::WaitLimits& limits);
  absl::Status KeptReleaseError();

  // Sends a command whose answer the caller looks at later.
  absl::StatusOr<std::shared_ptr<Answer>> Start(const protocol::Command& command,
                                                const internal::WaitLimits& limits);
  absl::Status WaitFor(const Answer& answer, const internal::WaitLimits& limits);
  // Calls Start, then WaitFor. If the caller gives up, the answer still arrives later, and `range` (if not null) is freed then.
  absl::StatusOr<protocol::Completion> Call(const protocol::Command& command,
                                            internal::BusyRange* range,
                                            const internal::WaitLimits& limits);
  // Sends a command. If the command fails, its error is retained for a later call.
  absl::Status Post(const protocol::Command& command, const internal::WaitLimits& limits);
  internal::CommandPort::OnDone OnPosted();
  void KeepError(const protocol::Completion& completion, const absl::Status& status);
  void Abandon(Answer& answer);
  void OnAnswer(const protocol::Completion& completion, const absl::Status& status, Answer& answer);
  void UpdateCommittedStep(const protocol::Completion& completion);

  absl::StatusOr<internal::BusyRange> WaitForRange(uint64_t size_bytes,
                                                   const internal::WaitLimits& limits);
  // Sends a partition's elements of `width` bytes from `element_offset` on, one command a piece. A piece is a whole
  // number of units, because the daemon records written initial parameters by unit.
  absl::Status SendElements(protocol::Command command, std::span<const std::byte> bytes,
                            uint64_t width, const internal::WaitLimits& limits);
  absl::StatusOr<Lease> LeaseOf(uint32_t partition, const protocol::Completion& completion);
  absl::Status CheckCopies(std::span<const WeightsCopy> copies);
  using Leases = std::pmr::vector<Lease>;  // in ascending order of partition
  // Leases all partitions of `wanted`, and begins to copy on `behind`.
  absl::Status LeaseAndCopy(std::span<const WeightsCopy> wanted, gpu::Stream& behind,
                            const internal::WaitLimits& limits);
  // Takes one lease for each of `partitions`, which may repeat. Takes no lease if one fails.
  absl::StatusOr<Leases> LeaseAll(std::pmr::vector<uint32_t> partitions,
                                  const internal::WaitLimits& limits);
  static const Lease& LeaseIn(const Leases& leases, uint32_t partition);
  // Registers the arenas with the device. If the device cannot reach the weights, creates a ring to copy them through.
  absl::Status RegisterArenas();
  // Checks that the device's streams can copy from or to `bytes`, which are elements of `width` bytes.
  absl::Status CheckReach(std::span<const std::byte> bytes, uint64_t width);
  // Begins to copy on the device's stream; waits while the ring is full.
  absl::Status CopyToDevice(gpu::Stream& to_stream, std::span<std::byte> to,
                            std::span<const std::byte> from, const internal::WaitLimits& limits);
  // Retains an E_DEVICE, which every later call then returns. Returns the status.
  absl::Status KeepDeviceError(absl::Status status);
  // Ends the session. The daemon and the other ranks then continue without the session.
  void EndAfterDeviceError();
  // Returns whether the device does no more work before the event: the work is done, or the device failed.
  bool HasEnded(const gpu::Event& event);
  // Returns whether all copies into a slot have ended.
  bool HasEnded(const std::shared_ptr<const gpu::Event>& copied) {
    return copied == nullptr || HasEnded(*copied);
  }
  bool HasWeightCopies() const { return !copies.empty() || !late_leases.empty(); }
  bool HasCopies() const {
    return HasWeightCopies() || !gradient_copies.empty() || !unsent.empty();
  }
  // Releases late leases. Handles copies that have ended: releases their leases, sends their gradients, drops references to their
  // sources. Errors are retained. Never blocks. Returns HasCopies().
  bool LookAtCopies();
  // Calls LookAtCopies until `ended()` is true. E_TIMEOUT, E_INTERRUPTED.
  absl::Status WaitForCopies(absl::FunctionRef<bool()> ended, const internal::WaitLimits& limits);
  absl::Status EndWeightCopies(const internal::WaitLimits& limits);
  absl::Status CheckReadsInPlace(std::span<const uint32_t> partitions) const;
  void ForgetLocatedAhead();
  // Asks the daemon every second whether the session continues, while a call waits without an answer of the daemon to wait for.
  void AskWhetherItGoesOn();
  absl::StatusOr<OpenSlot> MakeSlot(uint64_t size_bytes, const internal::WaitLimits& limits);
  // Delivers elements [begin, end) of a partition, whose gradient the slot holds.
  absl::Status DeliverSlot(uint32_t partition, uint64_t begin, uint64_t end, const OpenSlot& slot,
                           const internal::WaitLimits& limits);
  // Sends the gradient in `range`. If its copies have not ended, LookAtCopies sends it when they have.
  absl::Status SendGradient(uint32_t partition, uint64_t begin, uint64_t end,
                            internal::BusyRange range, std::shared_ptr<const gpu::Event> copied,
                            const internal::WaitLimits& limits);
  internal::CommandPort::OnDone OnGradientDone(uint64_t arena_offset);
  absl::Status CheckAskedNoNorm(std::string_view what, std::string_view name = {}) const;
  absl::Status CheckGradient(uint32_t param, std::span<const std::byte> bytes,
                             const internal::WaitLimits& limits);
  absl::Status AddGradient(uint32_t param, std::span<const std::byte> bytes,
                           const std::shared_ptr<const void>& keep,
                           const internal::WaitLimits& limits);
  absl::Status CopyBoxToPieces(const protocol::BoxPlace& place, std::span<const std::byte> bytes,
                               const std::shared_ptr<const void>& keep,
                               const internal::WaitLimits& limits);
  absl::StatusOr<Pieces::iterator> PieceAt(uint32_t partition, uint64_t elem,
                                           const internal::WaitLimits& limits);
  absl::Status DeliverPiece(Pieces::iterator piece, const internal::WaitLimits& limits);
  absl::Status FlushPiece(Pieces::iterator piece, const internal::WaitLimits& limits);
  absl::Status KeepPart(uint32_t partition, uint64_t begin, uint64_t end, const OpenSlot& slot,
                        const internal::WaitLimits& limits);
  absl::Status Flush(std::optional<uint32_t> partition, const internal::WaitLimits& limits);
  absl::Status DeliverAllPieces(const internal::WaitLimits& limits);
  void DropPieces();
  bool HasGradient(uint32_t param) const { return protocol::IsPresent(pass_presence, param); }
  void SetGradient(uint32_t param) {
    protocol::SetPresent(presence, param);
    protocol::SetPresent(pass_presence, param);
  }
  // Tells whether any trainable parameter in a range has a gradient (`any`), and whether any lacks one (`missing`).
  struct Coverage {
    bool any = false;
    bool missing = false;
  };
  Coverage CoverageOf(uint32_t partition, uint64_t begin, uint64_t end) const;
  void ZeroAbsent(uint32_t partition, uint64_t begin, uint64_t end,
                  std::span<std::byte> bytes) const;
  // Adds an event to the trace of this rank, with the present time as its end.
  void Note(protocol::ClientEvent event);
  void BeginAttempt(uint64_t number);
  absl::StatusOr<std::pmr::vector<std::byte>> EncodeStep(
      const protocol::StepRequest& scalars, std::span<const protocol::HyperParams> hyper_params,
      uint64_t extra_state_bytes, std::span<const uint64_t> present);
  bool IsInFlight(uint64_t t, std::span<const std::byte> request,
                  const ExtraState& extra_state) const;
  absl::Status BeginStep(uint64_t t, std::pmr::vector<std::byte> request,
                         const ExtraState& extra_state, const internal::WaitLimits& limits);
  absl::StatusOr<StepResult> EndStep();
  // Agrees with the other nodes on the step, once the daemon has answered this rank's call. The outcome becomes the answer of
  // the step.
  absl::Status DecideOverNodes(const internal::WaitLimits& limits);
  absl::Status RefuseOverNodes(uint64_t t, const absl::Status& error,
                               const internal::WaitLimits& limits);
  absl::Status Withdraw(uint64_t t, const internal::WaitLimits& limits);
  absl::StatusOr<internal::NodeMessage> MessageOfStep(const internal::WaitLimits& limits);
  std::span<std::byte> summary_bytes();
  absl::StatusOr<std::shared_ptr<Answer>> SendDecision(const protocol::StepSummary& summary,
                                                       const internal::WaitLimits& limits);
  absl::Status Follow(const internal::AttachOutcome& outcome);
  internal::NodeMessage MessageOfAttach() const;
  void DropOpen();

  const pid_t pid;
  // Pool for records of calls and commands in flight: a steady step allocates no memory from the process. The largest pooled
  // block has room for the request of a step with kParamGroupsMax parameter groups.
  std::pmr::unsynchronized_pool_resource memory{
      {.max_blocks_per_chunk = 0, .largest_required_pool_block = size_t{1} << 20}};
  static_assert(protocol::kParamGroupsMax * sizeof(protocol::HyperParams) <= size_t{1} << 19);
  internal::SessionParts parts;
  internal::SessionGauge& gauge;
  protocol::Mutex mutex;
  std::unique_ptr<WindowRegistration> window;
  std::unique_ptr<gpu::HostRegistration> weights_registration;
  std::shared_ptr<gpu::HostRegistration> grad_registration;
  std::unique_ptr<gpu::PinnedRing> ring;  // null: the device reads the weights by itself
  std::unique_ptr<gpu::Stream> stream;
  absl::Status device_error;
  bool is_ended = false;  // true: the session has ended because of device_error
  internal::CommandPort port;
  internal::Waiter waiter;
  internal::GradSlots slots;
  const uint64_t piece_elems;  // elements of a whole piece, a multiple of kGradUnitElems
  // The boxes of each parameter whose gradients this rank delivers, by parameter; sharded: the boxes that this rank owns.
  const std::vector<std::vector<uint32_t>> own_boxes;
  std::pmr::map<uint32_t, OpenSlot> open{&memory};  // slots of whole partitions
  Pieces pieces{&memory};
  // Ranges that were delivered in this pass: first element to end.
  std::pmr::map<ElemPlace, uint64_t> delivered{&memory};
  bool has_delivered = false;  // true: this attempt has delivered something
  uint32_t pass = 0;           // number of this attempt's pass, from BeginPass
  // True if this rank asked for a norm in this attempt (shared attachment). It then delivers nothing more.
  bool has_asked_norm = false;
  std::vector<uint64_t> pass_presence;  // parameters with a gradient in this pass
  std::vector<uint64_t> presence;       // parameters with a gradient in this attempt; see wire.h
  uint64_t attempt = 0;
  // number of exchanges that have succeeded
  uint64_t exchanges = 0;
  std::vector<std::string> exchanged;                                 // result of the last exchange
  std::pmr::map<uint64_t, std::shared_ptr<Answer>> fetches{&memory};  // keyed by FetchTicket::id
  uint64_t last_ticket = 0;
  std::vector<uint64_t> late_leases;  // leases that nobody reads: their callers gave up
  std::pmr::map<uint32_t, std::shared_ptr<Answer>> located_ahead{
      &memory};                                           // by partition; without leases
  std::pmr::list<CopiesInFlight> copies{&memory};         // copies of weights
  std::pmr::list<GradientCopy> gradient_copies{&memory};  // on `stream`
  std::pmr::list<UnsentGradient> unsent{&memory};
  std::optional<StepInFlight> step;
  // Extra state of the step in flight, or of the newest step before it. Most of it is the same in each step.
  std::vector<std::byte> sent_extra_state;
  std::optional<protocol::TraceWriter> trace;  // nullopt in tests that play the daemon themselves
  const std::shared_ptr<internal::DeviceTrace> device_trace =
      std::make_shared<internal::DeviceTrace>();
  static constexpr std::chrono::seconds kQuestionPeriod{1};
  std::chrono::steady_clock::time_point next_question{};
  bool has_asked = false;  // true: a question is unanswered
  absl::Status over;       // answer to the last question; OK: the session continues
  absl::Status kept_release_error;
  absl::Status kept_grad_error;
  bool detached = false;
  // Set while the daemon is being restarted.
  std::optional<internal::Deadline> restart_deadline;
  std::chrono::steady_clock::time_point restart_begin{};
  uint64_t calls_before = 0;       // calls of all earlier connections
  internal::CopyWatch copy_watch;  // destroyed first
};

// Lock that every call on the session holds. Calls run one at a time, not in a forked child, not after a Detach.
class [[nodiscard]] Attachment::CallLock {
 public:
  enum class Busy : uint8_t { kWait, kGiveUp };  // choice while another call runs

  explicit CallLock(State& state, Busy busy = Busy::kWait);
  ~CallLock();
  CallLock(const CallLock&) = delete;
  CallLock& operator=(const CallLock&) = delete;

  const absl::Status& status() const { return status_; }
  bool gave_up() const { return status_.ok() && !lock_.owns_lock(); }

 private:
  State& state_;
  std::unique_lock<protocol::Mutex> lock_;
  absl::Status status_;
};

}  // namespace forebay::client
