// SPDX-License-Identifier: Apache-2.0
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/internal/copy_watch.h"
#include "client/internal/deadline.h"
#include "client/internal/device_copies.h"
#include "client/internal/gradient_sender.h"
#include "client/internal/mapping.h"
#include "client/internal/node_agreement.h"
#include "client/internal/session_link.h"
#include "client/internal/session_parts.h"
#include "client/internal/session_trace.h"
#include "client/internal/state_caller.h"
#include "client/internal/step_caller.h"
#include "client/internal/stopwatch.h"
#include "client/internal/weights_reader.h"
#include "client/internal/written_pages.h"
#include "client/window_registry.h"
#include "protocol/error.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"
#include "protocol/wire.h"

namespace forebay::client {

using internal::AttachOutcome;
using internal::Deadline;
using internal::GradientSender;
using internal::NodeMessage;
using internal::SessionGauge;
using internal::SessionLink;
using internal::SessionParts;
using internal::StateCaller;
using internal::StepCaller;
using internal::WaitLimits;
using internal::WeightsReader;
using protocol::ErrorId;
using protocol::MakeError;

namespace {

constexpr Timeout kLastCopiesTimeout = std::chrono::seconds(10);
constexpr Timeout kAttachTimeout = Timeout::min();  // stands for AttachOptions::timeout
using Counter = std::atomic<uint64_t> SessionGauge::*;
constexpr Counter kFetch = &SessionGauge::wait_ns_fetch;
constexpr Counter kGrad = &SessionGauge::wait_ns_grad;
constexpr Counter kOther = &SessionGauge::wait_ns_other;
constexpr int kAttachRoundsMax = 5;  // one more round than the nodes need to agree on a step

}  // namespace

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

// The parts of a session. Each refers to parts that stand before it. Only the hooks of `link` call later parts.
//
// Locks  `mutex` protects all parts. A call holds it until it returns (CallLock), the thread of CopyWatch while it looks. No
//        lock is needed for the gauge, for what is const from Assemble on, and for the trace of the device.
struct Attachment::State {
  explicit State(SessionParts session_parts);

  bool InChild() const { return ::getpid() != pid; }
  // Handles copies that have ended. Errors are stored. Never blocks. Returns true if copies are in flight.
  bool LookAtCopies();
  // Runs a method of a part under the lock, with `args` and the limits of the call. Adds the time that the method takes to a
  // counter of the gauge (null: to none).
  template <typename Part, typename Result, typename... Params, typename... Args>
  Result Run(Counter counter, Timeout timeout, Result (Part::*method)(Params...), Args&&... args) {
    const CallLock lock(*this);
    RETURN_IF_ERROR(lock.status());
    std::optional<internal::Stopwatch> stopwatch;
    if (counter != nullptr) stopwatch.emplace((*parts.gauge).*counter);
    Part& part = std::get<Part&>(std::tie(link, weights, gradients, steps, states));
    return (part.*method)(std::forward<Args>(args)...,
                          parts.Limits(timeout == kAttachTimeout ? parts.timeout : timeout));
  }

  const pid_t pid = ::getpid();
  protocol::Mutex mutex;
  // Pool for records of calls and commands in flight: a steady step allocates no memory from the process. The largest pooled
  // block has room for the request of a step with kParamGroupsMax parameter groups.
  std::pmr::unsynchronized_pool_resource memory{
      {.max_blocks_per_chunk = 0, .largest_required_pool_block = size_t{1} << 20}};
  static_assert(protocol::kParamGroupsMax * sizeof(protocol::HyperParams) <= size_t{1} << 19);
  SessionParts parts;
  std::unique_ptr<WindowRegistration> window;
  internal::SessionTrace trace;
  SessionLink link;
  internal::DeviceCopies device;
  WeightsReader weights;
  GradientSender gradients;
  StepCaller steps;
  StateCaller states;
  internal::CopyWatch copy_watch;  // destroyed first
};

Attachment::State::State(SessionParts session_parts)
    : parts(std::move(session_parts)),
      link(parts,
           {.look = [this] { return LookAtCopies(); },
            .on_committed = [this] { gradients.BeginAttempt(0); },
            .on_late_lease = [this](uint64_t lease) { weights.AddLateLease(lease); }},
           &memory),
      device(parts, link),
      weights(parts, link, device, trace),
      gradients(parts, link, device, trace),
      steps(parts, link, trace, weights, gradients),
      states(parts, link, weights),
      copy_watch(mutex, [this] { return !link.is_detached() && LookAtCopies(); }) {}

bool Attachment::State::LookAtCopies() {
  const bool has_gradients = gradients.LookAtCopies();
  return weights.LookAtCopies() || has_gradients;  // sending gradients may bring late leases
}

Attachment::CallLock::CallLock(State& state, Busy busy) : state_(state) {
  if (state.InChild()) {
    status_ = MakeError(
        ErrorId::kForked,
        absl::StrCat("job ", state.parts.job, ": this attachment belongs to process ", state.pid),
        "attach in the process that trains; a forked child may only read the weights");
    return;
  }
  if (busy == Busy::kGiveUp) {
    lock_ = std::unique_lock<protocol::Mutex>(state.mutex, std::try_to_lock);
    if (!lock_.owns_lock()) return;
  } else {
    lock_ = std::unique_lock<protocol::Mutex>(state.mutex);
  }
  status_ = state.link.BeginCall();
}

Attachment::CallLock::~CallLock() {
  if (!lock_.owns_lock()) return;
  if (state_.LookAtCopies()) state_.copy_watch.Begin();
  state_.link.EndCall();
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::Attach(AttachOptions options) {
  const Nodes& nodes = options.nodes;
  if (nodes.world_ranks == 0) return AttachHere(std::move(options));
  if (nodes.all_gather) return AttachOverNodes(options);
  return MakeError(
      ErrorId::kRank,
      absl::StrCat("a job of ", nodes.world_ranks, " ranks, of which ", options.world_size,
                   " are on this node, without an all_gather between its nodes"),
      "give AttachOptions::nodes.all_gather, over the ranks' process group (MPI, "
      "gloo), or start all ranks on one node");
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::AttachHere(AttachOptions options) {
  ASSIGN_OR_RETURN(SessionParts parts, SessionParts::Create(std::move(options)));
  return Assemble(std::move(parts));
}

// Attaches again after the job went back to a durable step. Tries until the daemon no longer refuses with E_BUSY.
absl::StatusOr<std::unique_ptr<Attachment>> Attachment::AttachWhenBack(
    const AttachOptions& options) {
  constexpr std::chrono::milliseconds kPause(20);
  for (const Deadline until = Deadline::After(options.timeout);;) {
    absl::StatusOr<std::unique_ptr<Attachment>> attached = AttachHere(options);
    if (protocol::IdOf(attached.status()) != ErrorId::kBusy || until.Expired()) return attached;
    if (options.interrupt_check && options.interrupt_check()) {
      return MakeError(ErrorId::kInterrupted, "attach was interrupted while the job went back");
    }
    std::this_thread::sleep_for(kPause);
  }
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::AttachOverNodes(
    const AttachOptions& options) {
  absl::StatusOr<std::unique_ptr<Attachment>> attached = AttachHere(options);
  uint64_t went_back_from = 0;
  for (int round = 0; round < kAttachRoundsMax; ++round) {
    NodeMessage message{.kind = NodeMessage::Kind::kRefused,
                        .first_rank = options.layout.first_rank,
                        .error = attached.status()};
    if (attached.ok()) message = (*attached)->state_->steps.MessageOfAttach();
    ASSIGN_OR_RETURN(const std::vector<std::string> all, GatherFrom(options.nodes, message));
    if (!attached.ok()) return attached;
    absl::StatusOr<AttachOutcome> outcome = internal::AgreeOnStep(all, options.job);
    if (!outcome.ok()) {
      (*attached)->Detach().IgnoreError();
      return outcome.status();
    }
    State& state = *(*attached)->state_;
    if (outcome->todo == AttachOutcome::Todo::kNothing) {
      state.parts.went_back_from = went_back_from;
      return attached;
    }
    const bool goes_back = outcome->todo == AttachOutcome::Todo::kGoBack;
    if (goes_back) went_back_from = outcome->from_step;
    const bool is_elsewhere =
        state.parts.committed_step() != outcome->step || state.parts.prepared_step > 0;
    if (goes_back && !is_elsewhere) continue;
    const absl::Status followed = state.steps.Follow(*outcome);
    if (!followed.ok()) {
      (*attached)->Detach().IgnoreError();
      attached = followed;
    } else if (goes_back) {
      (*attached)->Detach().IgnoreError();
      attached->reset();
      attached = AttachWhenBack(options);
    } else if (outcome->todo == AttachOutcome::Todo::kCommit && is_elsewhere) {
      // A new session brings the weights and extra state that the ranks have committed with the step.
      (*attached)->Detach().IgnoreError();
      attached = AttachHere(options);
    }
  }
  return MakeError(ErrorId::kStep,
                   absl::StrCat("the nodes of job ", options.job, " come to no common step"),
                   "end all its processes, on every node, and start them again");
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::Assemble(SessionParts parts) {
  RETURN_IF_ERROR(parts.CheckArenas());
  auto state = std::make_unique<State>(std::move(parts));
  const SessionParts& own = state->parts;
  if (own.trace_bytes > 0) state->trace.Open(own.grad->bytes().last(own.trace_bytes));
  RETURN_IF_ERROR(state->device.Register());
  state->window = RegisterWindow(own.weights->bytes(), own.job, WindowParts(*own.layout));
  return std::unique_ptr<Attachment>(new Attachment(std::move(state)));
}

Attachment::Attachment(std::unique_ptr<State> state) : state_(std::move(state)) {}

Attachment::~Attachment() {
  // In a forked child the threads do not exist and locks may be held, so the destructor destroys nothing.
  if (state_->InChild()) {
    state_.release();
    return;
  }
  state_->copy_watch.Stop();
  state_->link.EndIfRestarting();
  // The device reads and writes this memory until its copies have ended.
  const WaitLimits limits{.deadline = Deadline::After(kLastCopiesTimeout)};
  const auto ended = [this] { return !state_->LookAtCopies(); };
  if (!state_->link.WaitForCopies(ended, limits).ok()) {
    state_.release();  // copies still use the state: leak it
  }
}

absl::Status Attachment::Detach() {
  State& s = *state_;
  const CallLock lock(s);
  if (s.link.is_detached() && protocol::IdOf(lock.status()) != ErrorId::kForked) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(lock.status());
  const absl::Status status = s.link.Detach();
  if (!s.link.is_detached()) return status;
  s.gradients.Close();
  s.weights.Close();
  s.trace.Close();
  s.device.Close();
  s.parts.grad.reset();
  return status;
}

absl::StatusOr<std::vector<std::string>> Attachment::Exchange(const std::string& bytes,
                                                              Timeout timeout) {
  return state_->Run(kOther, timeout, &SessionLink::Exchange, bytes);
}

absl::Status Attachment::CheckSession(Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s, CallLock::Busy::kGiveUp);
  RETURN_IF_ERROR(lock.status());
  if (lock.gave_up()) return absl::OkStatus();  // the call that runs returns the error
  const internal::Stopwatch stopwatch(s.parts.gauge->wait_ns_other);
  RETURN_IF_ERROR(s.link.errors().device);
  return s.link.Call(internal::MakeCommand(protocol::Op::kCheck), nullptr, s.parts.Limits(timeout))
      .status();
}

uint32_t Attachment::rank() const { return state_->parts.rank; }
std::string_view Attachment::device_name() const { return state_->parts.device->name(); }
uint64_t Attachment::gradient_room_bytes() const { return state_->link.slots().capacity_bytes(); }
bool Attachment::weights_on_swap() const { return state_->parts.weights_on_swap; }
bool Attachment::writes_initial() const { return state_->parts.writes_initial; }
uint64_t Attachment::went_back_from() const { return state_->parts.went_back_from; }
uint64_t Attachment::committed_step() const { return state_->parts.committed_step(); }
std::span<const std::byte> Attachment::extra_state() const { return state_->parts.extra_state; }
std::span<const std::byte> Attachment::rank0_extra_state() const {
  return state_->parts.rank0_extra_state;
}
std::span<const uint32_t> Attachment::trace() const { return state_->parts.trace; }
const protocol::Layout& Attachment::layout() const { return *state_->parts.layout; }
absl::Status Attachment::CheckPartition(uint32_t partition) const {
  return state_->parts.CheckPartition(partition);
}
std::span<const std::byte> Attachment::weights() const { return state_->parts.weights->bytes(); }

std::span<const std::byte> Attachment::weights(uint32_t group) const {
  return weights().subspan(layout().groups()[group].weights_offset_bytes,
                           layout().partition_bytes(group));
}

std::shared_ptr<const void> Attachment::weights_owner() const { return state_->parts.weights; }

std::span<std::byte> Attachment::activation_room() const {
  const SessionParts& parts = state_->parts;
  if (parts.grad == nullptr) return {};
  return parts.grad->bytes().subspan(parts.step_region_offset + parts.step_region_bytes,
                                     parts.activation_bytes);
}
std::shared_ptr<const void> Attachment::activation_owner() const {
  struct Owner {
    std::shared_ptr<internal::Mapping> mapping;
    std::shared_ptr<gpu::HostRegistration> registration;  // dies first
  };
  return std::make_shared<Owner>(Owner{state_->parts.grad, state_->device.registration()});
}

std::atomic<uint64_t>* Attachment::activation_mark() const {
  const SessionParts& parts = state_->parts;
  if (parts.grad == nullptr || parts.activation_bytes == 0) return nullptr;
  const uint64_t end = parts.step_region_offset + parts.step_region_bytes;
  std::byte* const mark = parts.grad->bytes().subspan(end - protocol::kSessionMarkBytes).data();
  return reinterpret_cast<std::atomic<uint64_t>*>(mark);
}
std::shared_ptr<internal::DeviceTrace> Attachment::device_trace() const {
  return state_->trace.device();
}
std::string Attachment::device_access() const { return state_->device.description(); }
Counters Attachment::counters() const { return state_->parts.gauge->Snapshot(); }

absl::Status Attachment::WriteInitial(uint32_t partition, std::span<const std::byte> bytes,
                                      Timeout timeout) {
  return state_->Run(kOther, timeout, &StateCaller::WriteInitial, partition, bytes);
}
absl::Status Attachment::InitialDone(Timeout timeout) {
  return state_->Run(kOther, timeout, &StateCaller::InitialDone);
}

absl::Status Attachment::CheckStateRange(const StateRange& range, uint64_t elems) const {
  return state_->states.CheckStateRange(range, elems);
}

absl::StatusOr<uint64_t> Attachment::ReadState(const StateRange& range, std::span<float> out,
                                               Timeout timeout) {
  return state_->Run(kOther, timeout, &StateCaller::ReadState, range, out);
}
absl::Status Attachment::WriteState(uint32_t partition, uint64_t first_elem, std::string_view state,
                                    std::span<const float> values, Timeout timeout) {
  return state_->Run(kOther, timeout, &StateCaller::WriteState, partition, first_elem, state,
                     values);
}
absl::Status Attachment::WriteUpdates(uint32_t param, uint64_t updates, Timeout timeout) {
  return state_->Run(kOther, timeout, &StateCaller::WriteUpdates, param, updates);
}
absl::StatusOr<FetchTicket> Attachment::StartFetch(uint32_t partition) {
  return state_->Run(kFetch, kAttachTimeout, &WeightsReader::StartFetch, partition);
}
absl::StatusOr<bool> Attachment::IsFetchDone(const FetchTicket& ticket) {
  return state_->Run(nullptr, kAttachTimeout, &WeightsReader::IsFetchDone, ticket);
}
absl::StatusOr<Lease> Attachment::FinishFetch(const FetchTicket& ticket, Timeout timeout) {
  return state_->Run(kFetch, timeout, &WeightsReader::FinishFetch, ticket);
}
absl::Status Attachment::CancelFetch(const FetchTicket& ticket) {
  return state_->Run(nullptr, kAttachTimeout, &WeightsReader::CancelFetch, ticket);
}

absl::StatusOr<Lease> Attachment::Fetch(uint32_t partition, Timeout timeout) {
  ASSIGN_OR_RETURN(const FetchTicket ticket, StartFetch(partition));
  absl::StatusOr<Lease> lease = FinishFetch(ticket, timeout);
  const ErrorId id = protocol::IdOf(lease.status());
  // CancelFetch releases the lease if the answer arrives later.
  if (id == ErrorId::kTimeout || id == ErrorId::kInterrupted) CancelFetch(ticket).IgnoreError();
  return lease;
}

absl::Status Attachment::Release(const Lease& lease) {
  return state_->Run(kOther, kAttachTimeout, &WeightsReader::Release, lease);
}
absl::Status Attachment::CopyWeights(std::span<const WeightsCopy> copies, gpu::Stream& stream,
                                     Timeout timeout) {
  return state_->Run(kFetch, timeout, &WeightsReader::CopyWeights, copies, stream);
}
absl::StatusOr<size_t> Attachment::GiveBackCopied() {
  return state_->Run(nullptr, kAttachTimeout, &WeightsReader::GiveBackCopied);
}
absl::Status Attachment::LocateAhead(std::span<const uint32_t> partitions, Timeout timeout) {
  return state_->Run(kFetch, timeout, &WeightsReader::LocateAhead, partitions);
}
absl::StatusOr<std::vector<std::span<const std::byte>>> Attachment::Locate(
    std::span<const uint32_t> partitions, Timeout timeout) {
  return state_->Run(kFetch, timeout, &WeightsReader::Locate, partitions);
}

absl::Status Attachment::AllowWeightWrites() {
  State& s = *state_;
  if (!s.parts.weights_file.valid()) {
    return MakeError(ErrorId::kUnsupported, "writes into weights that are no views of this rank's",
                     "WriteState");
  }
  if (s.window->written() != nullptr) return absl::OkStatus();
  if (s.window->AllowWrites(s.parts.weights_file.get())) return absl::OkStatus();
  return MakeError(ErrorId::kLimit, absl::StrCat("this process has ", kWindowsMax, " attachments"),
                   "detach those that are not needed");
}

bool Attachment::has_written_weights() const {
  const internal::WrittenPages* const written = state_->window->written();
  return written != nullptr && !written->empty();
}

std::vector<WeightsRange> Attachment::WrittenWeights() const {
  std::vector<WeightsRange> ranges;
  if (!has_written_weights()) return ranges;
  for (const internal::WindowRange& range : state_->window->written()->Ranges()) {
    ranges.push_back({.begin_bytes = range.begin_bytes,
                      .end_bytes = std::min<uint64_t>(range.end_bytes, weights().size())});
  }
  return ranges;
}

absl::StatusOr<std::shared_ptr<const std::byte>> Attachment::DaemonWeights() const {
  ASSIGN_OR_RETURN(const std::shared_ptr<internal::Mapping> mapping,
                   internal::Mapping::MapFile(state_->parts.weights_file.get(), weights().size(),
                                              internal::MapAccess::kRead));
  return std::shared_ptr<const std::byte>(mapping, mapping->bytes().data());
}

void Attachment::DropWrittenWeights() {
  if (has_written_weights()) state_->window->written()->GiveBack();
}

absl::StatusOr<std::span<std::byte>> Attachment::GradSlot(uint32_t partition, GradFill fill,
                                                          Timeout timeout) {
  return state_->Run(kGrad, timeout, &GradientSender::GradSlot, partition, fill);
}

std::shared_ptr<const void> Attachment::grad_owner(uint32_t partition) {
  const CallLock lock(*state_);
  return lock.status().ok() ? state_->gradients.grad_owner(partition) : nullptr;
}

absl::Status Attachment::GradReady(uint32_t partition) {
  return state_->Run(kGrad, kAttachTimeout, &GradientSender::GradReady, partition);
}
absl::Status Attachment::AddGradient(uint32_t param, std::span<const std::byte> bytes,
                                     Timeout timeout) {
  return state_->Run(kGrad, timeout, &GradientSender::AddGradient, param, bytes);
}
absl::Status Attachment::AddGradient(uint32_t param, std::span<const std::byte> bytes,
                                     gpu::Stream& ready, const std::shared_ptr<const void>& keep,
                                     Timeout timeout) {
  return state_->Run(kGrad, timeout, &GradientSender::AddGradientAfter, param, bytes, ready, keep);
}
absl::Status Attachment::FlushGradients(std::optional<uint32_t> partition) {
  return state_->Run(kGrad, kAttachTimeout, &GradientSender::FlushGradients, partition);
}
absl::Status Attachment::BeginPass() {
  return state_->Run(kGrad, kAttachTimeout, &GradientSender::BeginPass);
}
absl::StatusOr<double> Attachment::GradNorm(std::optional<uint32_t> param, Timeout timeout) {
  return state_->Run(kGrad, timeout, &GradientSender::GradNorm, param);
}
absl::Status Attachment::DropGradients() {
  return state_->Run(nullptr, kAttachTimeout, &GradientSender::DropGradients);
}
absl::Status Attachment::AnnounceStep(uint64_t t,
                                      std::span<const protocol::HyperParams> hyper_params,
                                      Timeout timeout, const GradientEdit& edit) {
  return state_->Run(nullptr, timeout, &StepCaller::Announce, internal::ScalarsOf(t, 0, edit),
                     hyper_params);
}
absl::StatusOr<StepResult> Attachment::Step(uint64_t t,
                                            std::span<const protocol::HyperParams> hyper_params,
                                            double max_grad_norm, const ExtraState& extra_state,
                                            Timeout timeout, const GradientEdit& edit) {
  return state_->Run(&SessionGauge::wait_ns_step, timeout, &StepCaller::Step,
                     internal::ScalarsOf(t, max_grad_norm, edit), hyper_params, extra_state);
}

}  // namespace forebay::client
