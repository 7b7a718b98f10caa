#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/environment.h"
#include "client/internal/control.h"
#include "client/internal/deadline.h"
#include "client/internal/mapping.h"
#include "client/internal/session.h"
#include "client/window_registry.h"
#include "gpu/host_device.h"
#include "protocol/channel.h"
#include "protocol/error.h"
#include "protocol/layout_codec.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {
namespace {

using internal::Control;
using internal::Deadline;
using internal::MapAccess;
using internal::Mapping;
using internal::Session;
using internal::WaitLimits;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

constexpr Timeout kExplainTimeout = std::chrono::seconds(1);
constexpr uint64_t kGroupsInGradArena = 3;

absl::StatusOr<std::vector<std::byte>> ReadAll(int fd, uint64_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t got =
        ::pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return MakeError(ErrorId::kProtocol, absl::StrCat("extra_state ends after ", done, " of ",
                                                        bytes.size(), " bytes"));
    }
    done += static_cast<size_t>(got);
  }
  return bytes;
}

}  // namespace

// Members die in reverse order: the session first, then what its channel uses, then the connection.
class Attachment::Impl {
 public:
  static absl::StatusOr<std::unique_ptr<Impl>> Create(AttachOptions options);

  bool InChild() const { return ::getpid() != pid_; }

  // Runs a call on the session: not in a forked child, not after Detach, one at a time.
  template <typename Call>
  auto Run(Call call) -> decltype(call(std::declval<Session&>())) {
    if (InChild()) return ForkedError();
    const protocol::MutexLock lock(mutex_);
    if (session_ == nullptr) {
      return MakeError(ErrorId::kFenced, absl::StrCat("job ", job_, ": this session was detached"),
                       "attach again");
    }
    auto result = call(*session_);
    gauge_->rpc_calls = control_->thread().calls();
    return result;
  }

  absl::Status Detach();
  std::shared_ptr<const void> grad_owner(uint32_t group);

  const internal::SessionGauge& gauge() const { return *gauge_; }
  const protocol::Layout& layout() const { return *layout_; }
  const std::shared_ptr<Mapping>& weights() const { return weights_; }
  bool writes_initial() const { return writes_initial_; }
  std::span<const std::byte> extra_state() const { return extra_state_; }
  std::span<const uint32_t> trace() const { return trace_; }

 private:
  Impl() = default;

  absl::Status ForkedError() const {
    return MakeError(ErrorId::kForked,
                     absl::StrCat("job ", job_, ": this attachment belongs to process ", pid_),
                     "attach in the process that trains; a forked child may only read the weights");
  }
  absl::Status MapAndOpen(const AttachOptions& options, const internal::AttachAnswer& answer,
                          const WaitLimits& limits);

  pid_t pid_ = ::getpid();
  std::string job_;
  Timeout timeout_{};
  std::shared_ptr<const protocol::Layout> layout_;
  bool writes_initial_ = false;
  std::vector<std::byte> extra_state_;
  std::vector<uint32_t> trace_;
  std::shared_ptr<internal::SessionGauge> gauge_ = std::make_shared<internal::SessionGauge>();
  std::shared_ptr<Mapping> weights_;
  std::unique_ptr<WindowRegistration> window_;
  protocol::Mutex mutex_;
  std::unique_ptr<Control> control_;
  UniqueFd command_doorbell_;
  UniqueFd completion_doorbell_;
  std::shared_ptr<Mapping> ring_;
  std::unique_ptr<Session> session_;
};

absl::StatusOr<std::unique_ptr<Attachment::Impl>> Attachment::Impl::Create(AttachOptions options) {
  const WaitLimits limits{.deadline = Deadline::After(options.timeout),
                          .interrupt_check = &options.interrupt_check};
  std::unique_ptr<Impl> impl(new Impl());
  impl->job_ = options.job;
  impl->timeout_ = options.timeout;
  ASSIGN_OR_RETURN(protocol::Layout layout, protocol::Layout::Create(options.layout));
  impl->layout_ = std::make_shared<const protocol::Layout>(std::move(layout));
  ASSIGN_OR_RETURN(const std::vector<std::byte> encoded,
                   protocol::EncodeLayout(impl->layout_->spec()));
  ASSIGN_OR_RETURN(impl->control_,
                   Control::Connect({.socket = SocketPath(options.socket)}, limits));
  if (options.grad_arena_bytes == 0) {
    options.grad_arena_bytes = kGroupsInGradArena * impl->layout_->largest_group_bytes();
  }
  ASSIGN_OR_RETURN(const internal::AttachAnswer answer,
                   impl->control_->Attach({.job = options.job,
                                           .rank = options.rank,
                                           .world_size = options.layout.world_size,
                                           .grad_arena_bytes = options.grad_arena_bytes,
                                           .extra_state_bytes = options.extra_state_bytes,
                                           .layout = encoded},
                                          limits));
  impl->writes_initial_ = answer.writes_initial;
  impl->trace_ = answer.trace;
  impl->gauge_->committed_step = answer.committed_step;
  RETURN_IF_ERROR(impl->MapAndOpen(options, answer, limits));
  impl->window_ = RegisterWindow(impl->weights_->bytes(), impl->job_, WindowParts(*impl->layout_));
  return impl;
}

absl::Status Attachment::Impl::MapAndOpen(const AttachOptions& options,
                                          const internal::AttachAnswer& answer,
                                          const WaitLimits& limits) {
  using Kind = schema::Session::Kind;
  ASSIGN_OR_RETURN(const UniqueFd weights_fd, control_->Descriptor(Kind::WEIGHTS, limits));
  ASSIGN_OR_RETURN(const UniqueFd grad_fd, control_->Descriptor(Kind::GRAD_ARENA, limits));
  ASSIGN_OR_RETURN(const UniqueFd ring_fd, control_->Descriptor(Kind::RING, limits));
  ASSIGN_OR_RETURN(command_doorbell_, control_->Descriptor(Kind::COMMAND_DOORBELL, limits));
  ASSIGN_OR_RETURN(completion_doorbell_, control_->Descriptor(Kind::COMPLETION_DOORBELL, limits));
  if (answer.extra_state_bytes > protocol::kExtraStateBytesMax) {
    return MakeError(ErrorId::kProtocol, absl::StrCat("the daemon has ", answer.extra_state_bytes,
                                                      " bytes of extra_state for this rank"));
  }
  if (answer.extra_state_bytes > 0) {
    ASSIGN_OR_RETURN(const UniqueFd extra_fd, control_->Descriptor(Kind::EXTRA_STATE, limits));
    ASSIGN_OR_RETURN(extra_state_, ReadAll(extra_fd.get(), answer.extra_state_bytes));
  }
  ASSIGN_OR_RETURN(weights_,
                   Mapping::MapFile(weights_fd.get(), answer.weights_bytes, MapAccess::kRead));
  ASSIGN_OR_RETURN(std::shared_ptr<Mapping> grad,
                   Mapping::MapFile(grad_fd.get(), answer.grad_arena_bytes, MapAccess::kReadWrite));
  ASSIGN_OR_RETURN(
      ring_, Mapping::MapFile(ring_fd.get(), sizeof(protocol::RingMemory), MapAccess::kReadWrite));
  ASSIGN_OR_RETURN(std::unique_ptr<protocol::ClientChannel> channel,
                   protocol::MakeRingClientChannel(
                       {.ring = reinterpret_cast<protocol::RingMemory*>(ring_->bytes().data()),
                        .command_doorbell_fd = command_doorbell_.get(),
                        .completion_doorbell_fd = completion_doorbell_.get()}));
  RETURN_IF_ERROR(control_->Mapped(limits));
  const auto explain = [control = control_.get()](const protocol::Completion& completion) {
    return control->Explain(completion, {.deadline = Deadline::After(kExplainTimeout)});
  };
  ASSIGN_OR_RETURN(
      session_,
      Session::Create({.layout = layout_,
                       .port = {.channel = std::move(channel),
                                .daemon_pidfd = control_->daemon_pidfd(),
                                .gone_fd = control_->thread().gone_fd(),
                                .explain = explain},
                       .weights = weights_,
                       .grad = std::move(grad),
                       .step_region_offset = answer.step_region_offset,
                       .step_region_bytes = answer.step_region_bytes,
                       .grad_bytes_max = options.grad_arena_bytes,
                       .extra_state_bytes = options.extra_state_bytes,
                       .gauge = gauge_,
                       .timeout = timeout_,
                       .interrupt_check = options.interrupt_check,
                       .device = options.device != nullptr ? options.device
                                                           : std::make_shared<gpu::HostDevice>()}));
  gauge_->rpc_calls = control_->thread().calls();
  return absl::OkStatus();
}

absl::Status Attachment::Impl::Detach() {
  if (InChild()) return ForkedError();
  const protocol::MutexLock lock(mutex_);
  if (session_ == nullptr) return absl::OkStatus();
  const absl::Status status = control_->Detach({.deadline = Deadline::After(timeout_)});
  gauge_->rpc_calls = control_->thread().calls();
  session_.reset();
  ring_.reset();
  command_doorbell_.Reset();
  completion_doorbell_.Reset();
  control_.reset();
  return status;
}

std::shared_ptr<const void> Attachment::Impl::grad_owner(uint32_t group) {
  if (InChild()) return nullptr;
  const protocol::MutexLock lock(mutex_);
  return session_ == nullptr ? nullptr : session_->grad_owner(group);
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::Attach(AttachOptions options) {
  ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl, Impl::Create(std::move(options)));
  return std::unique_ptr<Attachment>(new Attachment(std::move(impl)));
}

Attachment::Attachment(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Attachment::~Attachment() {
  // In a forked child the control thread does not exist and the locks may be held: all of it is
  // left to the end of the process.
  if (impl_->InChild()) impl_.release();
}

bool Attachment::writes_initial() const { return impl_->writes_initial(); }
uint64_t Attachment::committed_step() const { return impl_->gauge().committed_step; }
std::span<const std::byte> Attachment::extra_state() const { return impl_->extra_state(); }
std::span<const uint32_t> Attachment::trace() const { return impl_->trace(); }
const protocol::Layout& Attachment::layout() const { return impl_->layout(); }
std::span<const std::byte> Attachment::weights() const { return impl_->weights()->bytes(); }

std::span<const std::byte> Attachment::weights(uint32_t group) const {
  const protocol::Layout& layout = impl_->layout();
  return weights().subspan(layout.groups()[group].weights_offset_bytes, layout.group_bytes(group));
}

std::shared_ptr<const void> Attachment::weights_owner() const { return impl_->weights(); }

absl::Status Attachment::WriteInitial(uint32_t group, std::span<const std::byte> bytes,
                                      Timeout timeout) {
  return impl_->Run([&](Session& session) { return session.WriteInitial(group, bytes, timeout); });
}

absl::Status Attachment::InitialDone(Timeout timeout) {
  return impl_->Run([&](Session& session) { return session.InitialDone(timeout); });
}

absl::StatusOr<Lease> Attachment::Fetch(uint32_t group, Timeout timeout) {
  return impl_->Run([&](Session& session) { return session.Fetch(group, timeout); });
}

absl::Status Attachment::Release(const Lease& lease) {
  return impl_->Run([&](Session& session) { return session.Release(lease); });
}

absl::StatusOr<std::span<std::byte>> Attachment::GradSlot(uint32_t group, GradFill fill,
                                                          Timeout timeout) {
  return impl_->Run([&](Session& session) { return session.GradSlot(group, fill, timeout); });
}

std::shared_ptr<const void> Attachment::grad_owner(uint32_t group) {
  return impl_->grad_owner(group);
}

absl::Status Attachment::GradReady(uint32_t group) {
  return impl_->Run([&](Session& session) { return session.GradReady(group); });
}

absl::Status Attachment::DropGradients() {
  return impl_->Run([](Session& session) { return session.DropGradients(); });
}

absl::StatusOr<StepResult> Attachment::Step(uint64_t t,
                                            std::span<const protocol::HyperParams> hyper_params,
                                            double max_grad_norm,
                                            std::span<const std::byte> extra_state,
                                            Timeout timeout) {
  return impl_->Run([&](Session& session) {
    return session.Step(t, hyper_params, max_grad_norm, extra_state, timeout);
  });
}

absl::Status Attachment::ReadState(const StateRange& range, std::span<std::byte> out,
                                   Timeout timeout) {
  return impl_->Run([&](Session& session) { return session.ReadState(range, out, timeout); });
}

absl::Status Attachment::Detach() { return impl_->Detach(); }

Counters Attachment::counters() const { return impl_->gauge().Snapshot(); }

}  // namespace forebay::client
