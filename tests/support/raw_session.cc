// SPDX-License-Identifier: Apache-2.0
#include "tests/support/raw_session.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "protocol/descriptor.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/layout_codec.h"
#include "protocol/os/check.h"
#include "protocol/os/memfd.h"
#include "protocol/os/status_macros.h"

namespace forebay::testing {
namespace {

constexpr auto kDeadline = 30 * kj::SECONDS;
constexpr int kDeadlineMs = 30'000;

absl::StatusOr<std::span<std::byte>> MapFd(int fd, uint64_t bytes, int protection) {
  void* at = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return absl::InternalError(protocol::ErrnoText("mmap", errno));
  return std::span(static_cast<std::byte*>(at), bytes);
}

}  // namespace

protocol::UniqueFd MakeMemfd(std::span<const std::byte> bytes) {
  protocol::UniqueFd fd = protocol::MakeSealedMemfd("test", bytes);
  FOREBAY_CHECK(fd.valid());
  return fd;
}

RawSession::RawSession() : io_(kj::setupAsyncIo()) {}

RawSession::~RawSession() {
  if (ring_ != nullptr) ::munmap(ring_, sizeof(protocol::RingMemory));
  if (!grad_.empty()) ::munmap(grad_.data(), grad_.size());
  if (!weights_.empty()) ::munmap(const_cast<std::byte*>(weights_.data()), weights_.size());
}

template <typename T>
absl::StatusOr<capnp::Response<T>> RawSession::Wait(capnp::RemotePromise<T> promise) {
  absl::StatusOr<capnp::Response<T>> result = absl::DeadlineExceededError("30 s");
  auto timer = io_.provider->getTimer().afterDelay(kDeadline).then(
      []() -> capnp::Response<T> { KJ_FAIL_REQUIRE("30 s have passed"); });
  const auto exception = kj::runCatchingExceptions(
      [&] { result = promise.exclusiveJoin(kj::mv(timer)).wait(io_.waitScope); });
  KJ_IF_MAYBE (e, exception) {
    if (e->getType() == kj::Exception::Type::DISCONNECTED) {
      return absl::UnavailableError(e->getDescription().cStr());
    }
    return absl::DeadlineExceededError(e->getDescription().cStr());
  }
  return result;
}

absl::StatusOr<std::unique_ptr<RawSession>> RawSession::Connect(const std::string& socket) {
  std::unique_ptr<RawSession> raw(new RawSession());
  protocol::UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  FOREBAY_CHECK(socket.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, socket.data(), socket.size());
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError(protocol::ErrnoText("connect", errno));
  }
  raw->stream_ = raw->io_.lowLevelProvider->wrapUnixSocketFd(
      fd.Release(),
      kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP | kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC);
  raw->client_ = kj::heap<capnp::TwoPartyClient>(*raw->stream_, 1U);
  raw->node_ = kj::heap<schema::Node::Client>(raw->client_->bootstrap().castAs<schema::Node>());
  return raw;
}

absl::Status RawSession::Hello(uint32_t version) {
  auto request = node_->helloRequest();
  request.setProtocolVersion(version);
  request.setProgram("raw");
  ASSIGN_OR_RETURN(const auto response, Wait(request.send()));
  return protocol::StatusOf(response.getOutcome());
}

absl::Status RawSession::HelloOnBehalfOf(int64_t uid, uint32_t session_wait_ms) {
  auto request = node_->helloRequest();
  request.setProtocolVersion(protocol::kProtocolVersion);
  request.setProgram("raw");
  request.setOnBehalfOf(uid);
  request.setSessionWaitMs(session_wait_ms);
  ASSIGN_OR_RETURN(const auto response, Wait(request.send()));
  return protocol::StatusOf(response.getOutcome());
}

absl::Status RawSession::Attach(const RawAttach& attach) {
  auto call = node_->attachRequest();
  auto request = call.initRequest();
  request.setJob(kj::StringPtr(attach.job.c_str(), attach.job.size()));
  request.setRank(attach.rank);
  request.setWorldSize(attach.world_size);
  request.setRun(kj::StringPtr(attach.run.c_str(), attach.run.size()));
  request.setGradArenaBytes(attach.grad_arena_bytes);
  request.setExtraStateBytes(attach.extra_state_bytes);
  request.setLayoutBytes(attach.layout_bytes);
  request.setDurability(kj::StringPtr(attach.durability.c_str(), attach.durability.size()));
  request.setReattach(attach.reattach_to != 0);
  request.setGradArena(attach.reattach_to);
  if (attach.layout_fd >= 0) {
    call.setLayout(protocol::MakeDescriptor(protocol::DuplicateFd(attach.layout_fd)));
  }
  ASSIGN_OR_RETURN(auto response, Wait(call.send()));
  RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
  session_ = kj::heap<schema::Session::Client>(response.getSession());
  reply_ = kj::heap<capnp::Response<schema::Node::AttachResults>>(kj::mv(response));
  return absl::OkStatus();
}

absl::Status RawSession::Attach(RawAttach attach, const protocol::LayoutSpec& layout) {
  ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, protocol::EncodeLayout(layout));
  const protocol::UniqueFd fd = MakeMemfd(bytes);
  attach.layout_fd = fd.get();
  attach.layout_bytes = bytes.size();
  return Attach(attach);
}

absl::StatusOr<protocol::UniqueFd> RawSession::Descriptor(schema::Session::Kind kind) {
  auto request = session_->descriptorRequest();
  request.setKind(kind);
  ASSIGN_OR_RETURN(const auto response, Wait(request.send()));
  RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
  auto descriptor = response.getDescriptor();
  if (keeps_descriptors_) descriptors_.push_back(schema::Descriptor::Client(descriptor));
  const int fd = descriptor.getFd().wait(io_.waitScope).orDefault(-1);
  if (fd < 0) return absl::InternalError("no descriptor came");
  return protocol::DuplicateFd(fd);
}

absl::Status RawSession::Mapped() {
  ASSIGN_OR_RETURN(const auto response, Wait(session_->mappedRequest().send()));
  return protocol::StatusOf(response.getOutcome());
}

absl::Status RawSession::Explain(uint64_t tag) {
  auto request = session_->explainRequest();
  request.setTag(tag);
  ASSIGN_OR_RETURN(const auto response, Wait(request.send()));
  return protocol::StatusOf(response.getOutcome());
}

absl::Status RawSession::Detach() {
  ASSIGN_OR_RETURN(const auto response, Wait(session_->detachRequest().send()));
  return protocol::StatusOf(response.getOutcome());
}

absl::Status RawSession::End() {
  ASSIGN_OR_RETURN(const auto response, Wait(session_->endRequest().send()));
  return protocol::StatusOf(response.getOutcome());
}

absl::Status RawSession::Map() {
  using Kind = schema::Session::Kind;
  ASSIGN_OR_RETURN(grad_fd_, Descriptor(Kind::GRAD_ARENA));
  ASSIGN_OR_RETURN(ring_fd_, Descriptor(Kind::RING));
  ASSIGN_OR_RETURN(weights_fd_, Descriptor(Kind::WEIGHTS));
  ASSIGN_OR_RETURN(command_doorbell_, Descriptor(Kind::COMMAND_DOORBELL));
  ASSIGN_OR_RETURN(completion_doorbell_, Descriptor(Kind::COMPLETION_DOORBELL));
  constexpr int kReadWrite = PROT_READ | PROT_WRITE;
  ASSIGN_OR_RETURN(grad_, MapFd(grad_fd_.get(), reply().getGradArenaBytes(), kReadWrite));
  ASSIGN_OR_RETURN(weights_, MapFd(weights_fd_.get(), reply().getWeightsBytes(), PROT_READ));
  ASSIGN_OR_RETURN(const auto ring,
                   MapFd(ring_fd_.get(), sizeof(protocol::RingMemory), kReadWrite));
  ring_ = reinterpret_cast<protocol::RingMemory*>(ring.data());
  ASSIGN_OR_RETURN(channel_, protocol::MakeRingClientChannel(
                                 {.ring = ring_,
                                  .command_doorbell_fd = command_doorbell_.get(),
                                  .completion_doorbell_fd = completion_doorbell_.get()}));
  return Mapped();
}

void RawSession::RingDoorbell() { protocol::RingDoorbell(command_doorbell_.get()); }

absl::StatusOr<protocol::Completion> RawSession::Call(protocol::Command command) {
  command.tag = next_tag_++;
  ASSIGN_OR_RETURN(const bool sent, channel_->Send(command));
  FOREBAY_CHECK(sent);
  while (true) {
    ASSIGN_OR_RETURN(const auto completion, channel_->Receive());
    if (completion.has_value()) return *completion;
    ASSIGN_OR_RETURN(const bool sleep, channel_->PrepareSleep());
    if (!sleep) continue;
    pollfd fd{.fd = channel_->wait_fd(), .events = POLLIN, .revents = 0};
    const int ready = ::poll(&fd, 1, kDeadlineMs);
    channel_->EndSleep();
    if (ready == 0) return absl::DeadlineExceededError("no completion within 30 s");
  }
}

absl::Status RawSession::Ask(const protocol::Command& command) {
  ASSIGN_OR_RETURN(const protocol::Completion completion, Call(command));
  if (completion.error == 0) return absl::OkStatus();
  RETURN_IF_ERROR(Explain(completion.tag));
  return absl::InternalError("an error that nobody can explain");
}

}  // namespace forebay::testing
