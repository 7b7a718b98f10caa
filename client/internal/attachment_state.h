// SPDX-License-Identifier: Apache-2.0
// What an Attachment is made of: its connection, its windows, the commands that it has in flight.
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
  std::atomic<uint64_t> copied_bytes{0};
  std::atomic<uint64_t> grad_bytes{0};
  std::atomic<uint64_t> private_slots{0};
  std::atomic<uint64_t> reattaches{0};

  Counters Snapshot() const;
};

// A session that the daemon has granted.
struct SessionParts {
  std::string job = {};
  std::shared_ptr<const protocol::Layout> layout = {};
  bool reader = false;
  uint32_t rank = 0;
  bool writes_initial = false;
  Nodes nodes = {};
  // As AttachReply has them.
  uint64_t prepared_step = 0;
  uint64_t durable_step = 0;
  uint64_t durable_before = 0;
  uint64_t went_back_from = 0;  // see Attachment
  std::vector<std::byte> summary = {};
  std::vector<std::byte> extra_state = {};
  std::vector<std::byte> rank0_extra_state = {};
  std::vector<uint32_t> trace = {};
  uint64_t attempt = 0;
  // Empty in tests that play the daemon themselves.
  std::unique_ptr<Connection> connection = {};
  CommandPort::Options port = {};
  // As they were granted.
  SessionTerms terms = {};
  // Empty: the session ends where its daemon is restarted, as a reader's does.
  AttachAgain attach_again = {};
  // The longest pause between two of its tries.
  std::chrono::milliseconds attach_pause_max = kInterruptPeriod;
  // For a daemon that is restarted, until one grants the session again.
  Timeout daemon_wait{};
  std::shared_ptr<Mapping> weights = {};
  // The memory that `weights` maps, if this is a rank with shared attachment.
  protocol::UniqueFd weights_file = {};
  // Of some partitions: then the arena is a cache.
  bool weights_on_swap = false;
  protocol::StepAnswer step_answered_when = protocol::StepAnswer::kPublished;
  // Writable until the device knows them.
  MapAccess weights_access = MapAccess::kRead;
  // Gradients, the step region, activations, the trace.
  std::shared_ptr<Mapping> grad = {};
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  // What was asked for; the region may be larger.
  uint64_t grad_bytes_max = UINT64_MAX;
  uint64_t extra_state_bytes = 0;
  uint64_t activation_bytes = 0;
  uint64_t trace_bytes = 0;
  // Its committed_step is set.
  std::shared_ptr<SessionGauge> gauge = {};
  // Of calls without a time limit of their own.
  Timeout timeout{};
  InterruptCheck interrupt_check;
  std::shared_ptr<gpu::Device> device;
};

// Bytes of the largest range of a partition that travels at once.
uint64_t PieceBytes(const protocol::Layout& layout);

// As the wire numbers the optimizer's states. Errors: E_RANGE with the names that there are.
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
    // Its caller gave up.
    bool abandoned = false;
    // Of the arena; free once an abandoned answer has arrived.
    std::optional<uint64_t> range;
    protocol::Completion completion{};
    absl::Status status;
  };
  struct OpenSlot {
    // Else private memory.
    std::optional<uint64_t> arena_offset;
    std::shared_ptr<internal::Mapping> owner;
    std::span<std::byte> bytes;
    // After the last copy from the device into it; null where there was none.
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
  using Pieces = std::pmr::map<ElemPlace, OpenPiece>;  // by first element
  // Leases whose weights are being copied to the device.
  struct CopiesInFlight {
    std::pmr::vector<uint64_t> leases;
    std::shared_ptr<const gpu::Event> done;
  };
  // A copy of a gradient to a slot.
  struct GradientCopy {
    std::shared_ptr<const gpu::Event> done;
    std::shared_ptr<const void> keep;  // what is copied from
  };
  // Delivered, but for copies that have not ended.
  struct UnsentGradient {
    protocol::Command command;
    internal::BusyRange range;
    std::shared_ptr<const gpu::Event> copied;
  };
  struct StepInFlight {
    uint64_t t = 0;
    std::pmr::vector<std::byte> request;  // without extra_state
    std::pmr::vector<uint64_t> presence;
    std::shared_ptr<Answer> answer;
    // Over several nodes: what they have concluded, this rank's command that says so, and whether what it has delivered
    // is of no use.
    std::optional<internal::StepOutcome> outcome = {};
    std::shared_ptr<Answer> decided = {};
    bool drops = false;
  };

  explicit State(internal::SessionParts session_parts);

  bool InChild() const;
  // Attaches again where the daemon was restarted: the session then goes on as if nothing had happened, and
  // what was not answered is sent again.
  //
  // Errors  E_DAEMON_GONE             no daemon grants the session within its time, or not as it was: the
  //                                   session has ended.
  //         E_TIMEOUT, E_INTERRUPTED  a later call tries again.
  absl::Status Reattach(const internal::WaitLimits& limits);
  // Errors as Reattach, and those of the connection to the new daemon.
  // `leases`: that it goes on with, of a job with weights on swap.
  absl::Status GoOnWith(internal::GrantedSession granted, uint64_t leases,
                        const internal::WaitLimits& limits);
  absl::Status EndSession(absl::Status reason);
  // Reattach, where the daemon has said so. For calls that ask the control plane first.
  absl::Status ReattachIfRestarting(const internal::WaitLimits& limits);
  // Whether a call of the control plane met the end of a daemon, or of the way to it, from which the session goes on.
  // Waits until the data plane has seen it too.
  bool IsRestartingSoon(const absl::Status& met);
  // Of who is about to end the session: it does not wait for the next daemon, which sees that the session does
  // not come back. Returns whether it was so.
  bool EndIfRestarting();
  // For a detach: a daemon that is there hears of it, and none is waited for. Whether the session is with one.
  bool ReattachOnce();
  // Asks whichever daemon is there, once. Errors of AttachAgain and GoOnWith.
  absl::Status TryReattach(const internal::WaitLimits& limits);
  void UpdateCalls();
  uint64_t committed_step() const { return gauge.committed_step; }
  internal::WaitLimits Limits(Timeout timeout) const;
  absl::Status CheckPartition(uint32_t partition) const;
  absl::Status CheckOwn(uint32_t partition) const;  // E_RANGE, E_RANK for another rank's
  absl::Status CheckHasRank() const;                // E_RANK for a reader

  // The release error, once; then the gradient error, for as long as it is kept.
  absl::Status KeptErrors(const internal::WaitLimits& limits);
  absl::Status KeptReleaseError();

  // Sends a command whose answer the caller looks at later.
  absl::StatusOr<std::shared_ptr<Answer>> Start(const protocol::Command& command,
                                                const internal::WaitLimits& limits);
  absl::Status WaitFor(const Answer& answer, const internal::WaitLimits& limits);
  // Start, then WaitFor. A caller that gives up leaves the answer to arrive later, and `range`,
  // where there is one, to be freed then.
  absl::StatusOr<protocol::Completion> Call(const protocol::Command& command,
                                            internal::BusyRange* range,
                                            const internal::WaitLimits& limits);
  // Sends a command whose error, should it fail, is kept for a later call.
  absl::Status Post(const protocol::Command& command, const internal::WaitLimits& limits);
  internal::CommandPort::OnDone OnPosted();
  void KeepError(const protocol::Completion& completion, const absl::Status& status);
  void Abandon(Answer& answer);
  absl::Status ReleaseOrphans(const internal::WaitLimits& limits);
  void OnAnswer(const protocol::Completion& completion, const absl::Status& status, Answer& answer);
  void UpdateCommittedStep(const protocol::Completion& completion);

  absl::StatusOr<internal::BusyRange> WaitForRange(uint64_t size_bytes,
                                                   const internal::WaitLimits& limits);
  void CopyToArena(uint64_t arena_offset, std::span<const std::byte> bytes);
  // Sends a partition's elements of `width` bytes from `element_offset` on, one command a piece. A piece is a whole
  // number of units, because the daemon records written initial parameters by unit.
  absl::Status SendElements(protocol::Command command, std::span<const std::byte> bytes,
                            uint64_t width, const internal::WaitLimits& limits);
  absl::StatusOr<Lease> LeaseOf(uint32_t partition, const protocol::Completion& completion);
  absl::Status CheckCopies(std::span<const WeightsCopy> copies);
  using Leases = std::pmr::vector<Lease>;  // by ascending partition
  // One lease for each of the partitions, of which some may be the same; none where one fails.
  absl::Status LeaseAndCopy(std::span<const WeightsCopy> wanted, gpu::Stream& behind,
                            const internal::WaitLimits& limits);
  absl::StatusOr<Leases> LeaseAll(std::pmr::vector<uint32_t> partitions,
                                  const internal::WaitLimits& limits);
  static const Lease& LeaseIn(const Leases& leases, uint32_t partition);
  absl::Status GiveBack(uint64_t lease, const internal::WaitLimits& limits);
  // Makes the arenas known to the device; where it cannot reach the weights, through a ring.
  absl::Status RegisterArenas();
  // Whether the device's streams may copy from or to elements of `width` bytes that are there.
  absl::Status CheckReach(std::span<const std::byte> bytes, uint64_t width);
  // Begins to copy on the device's stream; waits while the ring is full.
  absl::Status CopyToDevice(gpu::Stream& to_stream, std::span<std::byte> to,
                            std::span<const std::byte> from, const internal::WaitLimits& limits);
  // Keeps an E_DEVICE, with which every later call fails. Returns the status.
  absl::Status KeepDeviceError(absl::Status status);
  // Ends the session, so that the daemon and the other ranks go on without it.
  void EndAfterDeviceError();
  // Whether the device does nothing more of what is before the event: it is done, or the device failed.
  bool HasEnded(const gpu::Event& event);
  // Whether all copies into a slot have ended.
  bool HasEnded(const std::shared_ptr<const gpu::Event>& copied) {
    return copied == nullptr || HasEnded(*copied);
  }
  bool HasCopies() const { return !copies.empty() || !gradient_copies.empty() || !unsent.empty(); }
  // Does what waited for copies that have ended: gives leases back, sends gradients, gives up what
  // was copied from. Errors are kept. Never blocks. Returns HasCopies().
  bool LookAtCopies();
  // Looks until `ended()`. E_TIMEOUT, E_INTERRUPTED.
  absl::Status WaitForCopies(absl::FunctionRef<bool()> ended, const internal::WaitLimits& limits);
  absl::Status EndWeightCopies(const internal::WaitLimits& limits);
  absl::Status CheckReadsInPlace(std::span<const uint32_t> partitions) const;
  void ForgetLocatedAhead();
  // While a call waits for no answer of the daemon's: asks every second whether the session goes on.
  void AskWhetherItGoesOn();
  absl::StatusOr<OpenSlot> MakeSlot(uint64_t size_bytes, const internal::WaitLimits& limits);
  // Delivers elements [begin, end) of a partition, whose bytes are the slot's.
  absl::Status DeliverSlot(uint32_t partition, uint64_t begin, uint64_t end, const OpenSlot& slot,
                           const internal::WaitLimits& limits);
  // Where the copies have not ended: they are waited for, and the gradient sent, by LookAtCopies.
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
  // What of [begin, end) has a gradient, and whether a parameter in it has none.
  struct Coverage {
    bool any = false;
    bool missing = false;
  };
  Coverage CoverageOf(uint32_t partition, uint64_t begin, uint64_t end) const;
  void ZeroAbsent(uint32_t partition, uint64_t begin, uint64_t end,
                  std::span<std::byte> bytes) const;
  // An event that has ended now, for who asks for the newest step's.
  void Note(protocol::ClientEvent event);
  std::string_view GroupName(uint32_t partition) const {
    return parts.layout->spec().group_names[parts.layout->partitions()[partition].group];
  }
  std::string_view ParamName(uint32_t param) const {
    return parts.layout->spec().params[param].name;
  }
  uint64_t grad_width() const { return SizeBytes(parts.layout->grad_dtype()); }
  void BeginAttempt(uint64_t number);
  absl::StatusOr<std::pmr::vector<std::byte>> EncodeStep(
      const protocol::StepRequest& scalars, std::span<const protocol::HyperParams> hyper_params,
      uint64_t extra_state_bytes, std::span<const uint64_t> present);
  bool IsInFlight(uint64_t t, std::span<const std::byte> request,
                  const ExtraState& extra_state) const;
  absl::Status BeginStep(uint64_t t, std::pmr::vector<std::byte> request,
                         const ExtraState& extra_state, const internal::WaitLimits& limits);
  absl::StatusOr<StepResult> EndStep();
  // Of a job over several nodes, where the step's call is answered: what comes of it becomes its answer.
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
  // What calls note of what is under way: a steady step takes no memory of the process's.
  // Its largest block has room for the request of a step with kParamGroupsMax parameter groups.
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
  bool is_ended = false;  // because of it
  internal::CommandPort port;
  internal::Waiter waiter;
  internal::GradSlots slots;
  const uint64_t piece_elems;  // of a whole piece, a multiple of kGradUnitElems
  // By parameter: the layout's boxes that this rank delivers gradients of; sharded, its own.
  const std::vector<std::vector<uint32_t>> own_boxes;
  std::pmr::map<uint32_t, OpenSlot> open{&memory};  // of whole partitions
  Pieces pieces{&memory};
  // Of this pass: first elements, to their ends.
  std::pmr::map<ElemPlace, uint64_t> delivered{&memory};
  bool has_delivered = false;  // in this attempt
  uint32_t pass = 0;           // of this attempt, from BeginPass
  // In this attempt, with shared attachment: nothing is delivered any more.
  bool has_asked_norm = false;
  std::vector<uint64_t> pass_presence;  // of this pass
  std::vector<uint64_t> presence;       // of this attempt; see wire.h
  uint64_t attempt = 0;
  uint64_t exchanges = 0;                                             // that have ended well
  std::vector<std::string> exchanged;                                 // what the last of them gave
  std::pmr::map<uint64_t, std::shared_ptr<Answer>> fetches{&memory};  // by FetchTicket::id
  uint64_t last_ticket = 0;
  std::vector<uint64_t> orphan_leases;  // of fetches whose callers gave up
  std::pmr::map<uint32_t, std::shared_ptr<Answer>> located_ahead{
      &memory};                                           // by partition: no leases
  std::pmr::list<CopiesInFlight> copies{&memory};         // of weights
  std::pmr::list<GradientCopy> gradient_copies{&memory};  // on `stream`
  std::pmr::list<UnsentGradient> unsent{&memory};
  std::optional<StepInFlight> step;
  // Sent with the step in flight, or with the newest before: most of it is the same in each step.
  std::vector<std::byte> sent_extra_state;
  std::optional<protocol::TraceWriter> trace;  // none in tests that play the daemon themselves
  const std::shared_ptr<internal::DeviceTrace> device_trace =
      std::make_shared<internal::DeviceTrace>();
  static constexpr std::chrono::seconds kQuestionPeriod{1};
  std::chrono::steady_clock::time_point next_question{};
  bool has_asked = false;  // and has no answer
  absl::Status over;       // what the answer was; OK: it goes on
  absl::Status kept_release_error;
  absl::Status kept_grad_error;
  bool detached = false;
  // While its daemon is being restarted.
  std::optional<internal::Deadline> restart_deadline;
  std::chrono::steady_clock::time_point restart_begin{};
  uint64_t calls_before = 0;       // of the connections before this one
  internal::CopyWatch copy_watch;  // dies first
};

// Every call on the session holds one: calls run one at a time, not in a forked child, not after a
// Detach.
class [[nodiscard]] Attachment::CallLock {
 public:
  enum class Busy : uint8_t { kWait, kGiveUp };  // while another call runs

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
