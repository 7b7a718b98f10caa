// SPDX-License-Identifier: Apache-2.0
#include "client/internal/control.h"

#include <kj/debug.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/descriptor.h"
#include "protocol/error.h"
#include "protocol/os/memfd.h"
#include "protocol/os/pidfd.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::StatusOf;
using protocol::UniqueFd;

constexpr char kProgram[] = "forebay client";
constexpr char kStartHint[] =
    "start one with `forebay run -- COMMAND`, or `systemctl start forebayd`; FOREBAY_SOCKET names "
    "another socket";

absl::StatusOr<UniqueFd> ConnectSocket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return MakeError(ErrorId::kNoDaemon,
                     absl::StrCat("socket path ", path, " has ", path.size(), " bytes (at most ",
                                  sizeof(address.sun_path) - 1, ")"),
                     "give the daemon a shorter socket.path, and name it in FOREBAY_SOCKET");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) {
    return MakeError(ErrorId::kLimit, ErrnoText("socket", errno),
                     "raise the limit of open files (ulimit -n)");
  }
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return fd;
  }
  const int error_number = errno;
  const std::string text = ErrnoText(absl::StrCat("connect to ", path), error_number);
  if (error_number == EACCES || error_number == EPERM) {
    return MakeError(ErrorId::kPermission, text, "join the group that owns the socket");
  }
  return MakeError(ErrorId::kNoDaemon, absl::StrCat("no daemon answers: ", text), kStartHint);
}

// The daemon by its pid, where the kernel and the daemon agree on it (they need not across
// containers or with a socket that another process bound).
UniqueFd DaemonPidfd(pid_t peer_pid, uint32_t reported_pid) {
  if (peer_pid <= 0 || static_cast<uint32_t>(peer_pid) != reported_pid) return UniqueFd();
  return protocol::OpenPidfd(peer_pid);
}

// The daemon's pid as it tells it.
absl::StatusOr<uint32_t> Hello(ControlThread& thread, uint32_t version, const WaitLimits& limits) {
  return thread.Call<uint32_t>(
      "hello", limits, [version](Peer& peer) -> kj::Promise<absl::StatusOr<uint32_t>> {
        auto request = peer.node.helloRequest();
        request.setProtocolVersion(version);
        request.setProgram(kProgram);
        return request.send().then([](auto&& response) -> absl::StatusOr<uint32_t> {
          RETURN_IF_ERROR(StatusOf(response.getOutcome()));
          return response.getInfo().getPid();
        });
      });
}

// The session of this connection; asking for one before attach is a bug of ours.
schema::Session::Client& SessionOf(Peer& peer) { return KJ_ASSERT_NONNULL(peer.session); }

// Copies the descriptor that came with the answer, if one came.
template <typename Response>
kj::Promise<absl::StatusOr<bool>> ReceiveDescriptor(Response& response,
                                                    std::shared_ptr<UniqueFd> fd) {
  absl::Status status = StatusOf(response.getOutcome());
  auto descriptor = response.getDescriptor();
  auto arrival = descriptor.getFd();
  return arrival.then([status = std::move(status), descriptor = kj::mv(descriptor),
                       fd = std::move(fd)](kj::Maybe<int> found) -> absl::StatusOr<bool> {
    RETURN_IF_ERROR(status);
    KJ_IF_MAYBE (number, found) {
      *fd = protocol::DuplicateFd(*number);
    }
    return true;
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Control>> Control::Connect(const ConnectOptions& options,
                                                          const WaitLimits& limits) {
  std::unique_ptr<Control> control(new Control());
  UniqueFd socket;
  if (const auto address = RemoteAddress(options.socket)) {
    ASSIGN_OR_RETURN(control->agent_, RemoteAgent::Start(*address, options.remote_arenas));
    socket = control->agent_->ReleaseSocket();
  } else {
    ASSIGN_OR_RETURN(socket, ConnectSocket(options.socket));
  }
  ucred peer{};
  socklen_t peer_bytes = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes) != 0) peer.pid = 0;
  ASSIGN_OR_RETURN(control->thread_, ControlThread::Start(std::move(socket)));
  const absl::StatusOr<uint32_t> pid = Hello(*control->thread_, options.protocol_version, limits);
  RETURN_IF_ERROR(control->WhyGone(pid.status()));
  control->pidfd_ = DaemonPidfd(peer.pid, *pid);
  return control;
}

absl::StatusOr<UniqueFd> Control::MakeLayoutFd(std::span<const std::byte> encoded) {
  UniqueFd layout = protocol::MakeSealedMemfd("forebay-layout", encoded);
  if (layout.valid()) return layout;
  return MakeError(ErrorId::kLimit, ErrnoText("make a memfd for the layout", errno));
}

absl::StatusOr<AttachReply> Control::Attach(const AttachRequest& request,
                                            std::span<const std::byte> encoded,
                                            const WaitLimits& limits) {
  ASSIGN_OR_RETURN(UniqueFd layout, MakeLayoutFd(encoded));
  auto shared_layout = std::make_shared<UniqueFd>(std::move(layout));
  absl::StatusOr<AttachReply> reply = thread_->Call<AttachReply>(
      "attach", limits,
      [request, layout_bytes = encoded.size(),
       shared_layout](Peer& peer) -> kj::Promise<absl::StatusOr<AttachReply>> {
        auto rpc = peer.node.attachRequest();
        rpc.setRequest(*request);
        rpc.getRequest().setLayoutBytes(layout_bytes);
        rpc.setLayout(protocol::MakeDescriptor(std::move(*shared_layout)));
        return rpc.send().then([&peer](auto&& response) -> absl::StatusOr<AttachReply> {
          RETURN_IF_ERROR(StatusOf(response.getOutcome()));
          peer.session = response.getSession();
          return Clone(response.getReply());
        });
      });
  RETURN_IF_ERROR(WhyGone(reply.status()));
  return reply;
}

absl::Status Control::WhyGone(const absl::Status& status) {
  if (agent_ == nullptr || protocol::IdOf(status) != ErrorId::kDaemonGone) return status;
  return agent_->WhyItEnded(status);
}

absl::StatusOr<UniqueFd> Control::Descriptor(schema::Session::Kind kind, const WaitLimits& limits) {
  auto fd = std::make_shared<UniqueFd>();  // shared: a call that is cancelled may still end
  RETURN_IF_ERROR(thread_
                      ->Call<bool>("descriptor", limits,
                                   [kind, fd](Peer& peer) {
                                     auto request = SessionOf(peer).descriptorRequest();
                                     request.setKind(kind);
                                     return request.send().then([fd](auto&& response) {
                                       return ReceiveDescriptor(response, fd);
                                     });
                                   })
                      .status());
  if (!fd->valid()) {
    return MakeError(ErrorId::kLimit, "a file descriptor of the session did not arrive",
                     "raise the limit of open files (ulimit -n)");
  }
  return std::move(*fd);
}

absl::Status Control::Mapped(const WaitLimits& limits) {
  return CallForOutcome("mapped", limits,
                        [](Peer& peer) { return SessionOf(peer).mappedRequest(); });
}

absl::Status Control::Detach(const WaitLimits& limits) {
  return CallForOutcome("detach", limits,
                        [](Peer& peer) { return SessionOf(peer).detachRequest(); });
}

absl::StatusOr<std::vector<std::string>> Control::Exchange(const std::string& bytes,
                                                           uint64_t number,
                                                           const WaitLimits& limits) {
  using All = std::vector<std::string>;
  return thread_->Call<All>(
      "exchange", limits, [bytes, number](Peer& peer) -> kj::Promise<absl::StatusOr<All>> {
        auto request = SessionOf(peer).exchangeRequest();
        request.setBytes({reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()});
        request.setNumber(number);
        return request.send().then([](auto&& response) -> absl::StatusOr<All> {
          RETURN_IF_ERROR(StatusOf(response.getOutcome()));
          All all;
          for (const auto one : response.getAll()) all.emplace_back(one.begin(), one.end());
          return all;
        });
      });
}

absl::Status Control::Explain(const protocol::Completion& completion, const WaitLimits& limits) {
  const ErrorId id = protocol::Info(static_cast<ErrorId>(completion.error)).id;
  const absl::Status answer = CallForOutcome("explain", limits, [tag = completion.tag](Peer& peer) {
    auto request = SessionOf(peer).explainRequest();
    request.setTag(tag);
    return request;
  });
  if (protocol::IdOf(answer) == id) return answer;
  if (completion.tag != 0) {
    return MakeError(id, "the daemon refused a command; it no longer has the message");
  }
  // The session has ended: its reason may have another id, but is never that the call took too long.
  if (!answer.ok() && protocol::IdOf(answer) != ErrorId::kTimeout) return answer;
  return MakeError(id, "the daemon has ended this session; it has not said why", "attach again");
}

}  // namespace forebay::client::internal
