// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/daemon_link.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/gateway/rpc_values.h"
#include "protocol/descriptor.h"
#include "protocol/error.h"
#include "protocol/os/memfd.h"
#include "protocol/os/status_macros.h"
#include "protocol/rpc_stream.h"
#include "protocol/wire.h"

namespace forebay::gateway {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

}  // namespace

absl::StatusOr<kj::Own<DaemonLink>> DaemonLink::Connect(kj::LowLevelAsyncIoProvider& provider,
                                                        const std::string& socket) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket.size() >= sizeof(address.sun_path)) {
    return MakeError(ErrorId::kNoDaemon, absl::StrCat("socket path ", socket, " is too long"));
  }
  std::memcpy(address.sun_path, socket.data(), socket.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() ||
      ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return MakeError(
        ErrorId::kNoDaemon,
        ErrnoText(absl::StrCat("no daemon answers on the gateway's node: connect to ", socket),
                  errno),
        "start forebayd there: systemctl start forebayd");
  }
  return kj::heap<DaemonLink>(provider.wrapUnixSocketFd(
      fd.Release(),
      kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP | kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC));
}

DaemonLink::DaemonLink(kj::Own<kj::AsyncCapabilityStream> stream)
    : stream_(kj::mv(stream)),
      network_(*stream_, protocol::kFdsPerMessageMax, capnp::rpc::twoparty::Side::CLIENT,
               protocol::AnswerLimits()),
      rpc_(capnp::makeRpcClient(network_)),
      node_(protocol::BootstrapOf<schema::Node>(rpc_)) {}

kj::Promise<absl::Status> DaemonLink::Hello(uint32_t uid, std::chrono::milliseconds session_wait) {
  auto request = node_.helloRequest();
  request.setProtocolVersion(protocol::kProtocolVersion);
  request.setProgram("forebay-gateway");
  request.setOnBehalfOf(uid);
  request.setSessionWaitMs(static_cast<uint32_t>(session_wait.count()));
  return request.send().then(
      [](auto&& response) { return protocol::StatusOf(response.getOutcome()); });
}

kj::Promise<void> DaemonLink::AskForDescriptor(kj::Own<DaemonSession>& into,
                                               schema::Session::Kind kind, UniqueFd* fd) {
  auto request = KJ_ASSERT_NONNULL(into->session).descriptorRequest();
  request.setKind(kind);
  return request.send().then([session = into.get(), fd](auto&& response) -> kj::Promise<void> {
    session->status.Update(protocol::StatusOf(response.getOutcome()));
    auto descriptor = response.getDescriptor();
    auto arrival = descriptor.getFd();
    return arrival.then([descriptor = kj::mv(descriptor), fd](kj::Maybe<int> found) {
      KJ_IF_MAYBE (number, found) {
        *fd = protocol::DuplicateFd(*number);
      }
    });
  });
}

kj::Promise<kj::Own<DaemonSession>> DaemonLink::Attach(schema::AttachRequest::Reader request,
                                                       std::vector<std::byte> layout) {
  using Kind = schema::Session::Kind;
  auto attached = kj::heap<DaemonSession>();
  UniqueFd layout_fd = protocol::MakeSealedMemfd("forebay-layout", layout);
  if (!layout_fd.valid()) {
    attached->status = MakeError(ErrorId::kLimit, ErrnoText("make a memfd for the layout", errno));
    return kj::mv(attached);
  }
  auto rpc = node_.attachRequest();
  rpc.setRequest(request);
  rpc.getRequest().setLayoutBytes(layout.size());
  rpc.getRequest().setWritableWeights(false);
  rpc.setLayout(protocol::MakeDescriptor(std::move(layout_fd)));
  return rpc.send().then([this, attached = kj::mv(attached)](
                             auto&& response) mutable -> kj::Promise<kj::Own<DaemonSession>> {
    attached->status = protocol::StatusOf(response.getOutcome());
    if (!attached->status.ok()) return kj::mv(attached);
    attached->session = response.getSession();
    attached->reply = capnp::clone(response.getReply());
    kj::Vector<kj::Promise<void>> asked;
    asked.add(AskForDescriptor(attached, Kind::WEIGHTS, &attached->weights));
    asked.add(AskForDescriptor(attached, Kind::GRAD_ARENA, &attached->grad_arena));
    asked.add(AskForDescriptor(attached, Kind::RING, &attached->ring));
    asked.add(AskForDescriptor(attached, Kind::COMMAND_DOORBELL, &attached->command_doorbell));
    asked.add(
        AskForDescriptor(attached, Kind::COMPLETION_DOORBELL, &attached->completion_doorbell));
    const uint64_t extra_bytes =
        attached->reply->getExtraStateBytes() + attached->reply->getRank0ExtraStateBytes();
    auto extra = kj::heap<UniqueFd>();
    if (extra_bytes > 0) {
      asked.add(AskForDescriptor(attached, Kind::EXTRA_STATE, extra.get()));
    }
    return kj::joinPromises(asked.releaseAsArray())
        .then([attached = kj::mv(attached), extra = kj::mv(extra), extra_bytes]() mutable {
          attached->extra_state.resize(extra_bytes);
          const int64_t got =
              extra_bytes == 0 ? 0 : protocol::ReadFromStart(extra->get(), attached->extra_state);
          const bool has_all = attached->weights.valid() && attached->grad_arena.valid() &&
                               attached->ring.valid() && attached->command_doorbell.valid() &&
                               attached->completion_doorbell.valid() &&
                               got == static_cast<int64_t>(extra_bytes);
          if (attached->status.ok() && !has_all) {
            attached->status =
                MakeError(ErrorId::kLimit, "a file descriptor of the session did not arrive",
                          "raise LimitNOFILE= of forebay-gateway and of forebayd");
          }
          return kj::mv(attached);
        });
  });
}

}  // namespace forebay::gateway
