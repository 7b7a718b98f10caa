// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/control_plane.h"

#include <capnp/rpc-twoparty.h>
#include <capnp/serialize-async.h>
#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/control/client_log.h"
#include "daemon/control/message_relay.h"
#include "daemon/control/refused_clients.h"
#include "daemon/control/rpc_servers.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/pidfd.h"
#include "protocol/rpc_stream.h"
#include "protocol/wire.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

// kj events in one turn; then sockets are polled, so that no client starves
constexpr uint32_t kEventsPerTurn = 64;
constexpr int kAcceptsPerTurn = 64;
// Number of a peer's groups that are read. A peer with more groups is an operator only by its primary group.
constexpr size_t kGroupsMax = 1024;
// Pause after accept() has failed because the process has too many open descriptors.
constexpr auto kAcceptPause = 100 * kj::MILLISECONDS;
// Time that the end of the control plane waits for relay threads. A relay thread that takes longer ends with the process.
constexpr std::chrono::milliseconds kRelaysEndLimit{1000};

// Everything that dies with a connection, in the order of creation.
struct LiveConnection {
  LiveConnection(kj::Own<kj::AsyncCapabilityStream> socket, kj::UnixEventPort& port,
                 protocol::UniqueFd process, std::shared_ptr<Connection> shared)
      : stream(kj::mv(socket)),
        pidfd(std::move(process)),
        connection(std::move(shared)),
        messages(*stream),
        network(messages, protocol::kFdsPerMessageMax, capnp::rpc::twoparty::Side::SERVER,
                protocol::AnswerLimits()),
        rpc(capnp::makeRpcServer(network, MakeNode(connection))) {
    rpc.setFlowLimit(protocol::kCallWordsMax);
    if (pidfd.valid()) {
      observer = kj::heap<kj::UnixEventPort::FdObserver>(
          port, pidfd.get(), kj::UnixEventPort::FdObserver::OBSERVE_READ);
    }
  }

  ~LiveConnection() noexcept(false) {
    connection->pidfd = -1;
    for (const auto& weak : connection->sessions) {
      if (const auto session = weak.lock()) session->End(EndCause::kDisconnected);
    }
  }

  kj::Promise<void> ProcessGone() {
    if (observer.get() == nullptr) return kj::NEVER_DONE;
    return observer->whenBecomesReadable();
  }

  kj::Own<kj::AsyncCapabilityStream> stream;
  protocol::UniqueFd pidfd;
  std::shared_ptr<Connection> connection;
  protocol::AnswersFirst<capnp::AsyncCapabilityMessageStream> messages;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
  kj::Own<kj::UnixEventPort::FdObserver> observer;
};

// Listening socket and counts of connections. Destroyed last: connections that were not accepted are closed with it.
struct Listener {
  ~Listener() {
    CloseUnread(std::move(fd)).IgnoreError();
    (void)counts->WaitUntilNone(kRelaysEndLimit);
  }

  protocol::UniqueFd fd;
  std::shared_ptr<ConnectionCounts> counts = std::make_shared<ConnectionCounts>();
};

// Accepts connections. Lives on the control thread.
class Acceptor final : private kj::TaskSet::ErrorHandler {
 public:
  Acceptor(kj::AsyncIoContext& io, ControlPlaneOptions& options, LoopInbox& inbox,
           ControlQueue& replies, kj::Own<kj::PromiseFulfiller<void>> stop)
      : port_(io.unixEventPort),
        timer_(io.provider->getTimer()),
        low_level_(*io.lowLevelProvider),
        listener_{.fd = std::move(options.listener)},
        operators_(options.operators),
        connections_per_uid_max_(options.connections_per_uid_max),
        serves_without_pidfds_(options.serves_without_pidfds),
        log_(timer_),
        refused_(timer_, log_),
        closings_(*this),
        context_{.inbox = inbox,
                 .replies = replies,
                 .tasks = closings_,
                 .served_at = options.served_at,
                 .stop = kj::mv(stop),
                 .least_durability = options.least_durability},
        answers_(port_, replies.fd(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
        listening_(port_, listener_.fd.get(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
        connections_(*this) {
    connections_.add(AcceptNext());
    connections_.add(DrainAnswers());
  }

 private:
  // The observer is armed before the queue is emptied: an answer that arrives in between wakes the observer again.
  kj::Promise<void> DrainAnswers() {
    auto next = answers_.whenBecomesReadable();
    protocol::DrainDoorbell(context_.replies.fd());
    context_.replies.DrainAll([this](ControlCall& call) { call(context_); });
    return next.then([this] { return DrainAnswers(); });
  }

  // The observer is armed before the listener is emptied: a client that arrives in between wakes the observer again.
  kj::Promise<void> AcceptNext() {
    auto next = listening_.whenBecomesReadable();
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      protocol::UniqueFd client(
          ::accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (client.valid()) {
        Accepted(std::move(client));
      } else if (errno == EAGAIN) {
        return next.then([this] { return AcceptNext(); });
      } else if (errno != EINTR && errno != ECONNABORTED) {
        spdlog::error("{}", protocol::ErrnoText("accept", errno));
        return timer_.afterDelay(kAcceptPause).then([this] { return AcceptNext(); });
      }
    }
    return kj::evalLater([this] { return AcceptNext(); });
  }

  // Descriptors may have been sent to the socket already: it is never closed here.
  void Accepted(protocol::UniqueFd client) {
    ucred peer{};
    socklen_t length = sizeof(peer);
    ::getsockopt(client.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length);
    protocol::UniqueFd pidfd = protocol::PeerPidfd(client.get(), peer.pid);
    const bool is_unwatched = serves_without_pidfds_ && errno == ENOSYS;
    // pid 0: the peer is in another pid namespace.
    if (!pidfd.valid() && peer.pid != 0 && !is_unwatched) {
      const bool at_limit = errno == EMFILE || errno == ENFILE || errno == ENOMEM;
      // The peer has ended: ESRCH, or EINVAL if the kernel has no pidfd for a reaped process.
      if (!at_limit) return refused_.Close(peer.uid, std::move(client));
      return Refuse(
          std::move(client), peer,
          protocol::MakeError(protocol::ErrorId::kLimit, protocol::ErrnoText("open a pidfd", errno),
                              "raise LimitNOFILE= of the service"));
    }
    const uint32_t max = HasNoLimit(peer) ? UINT32_MAX : connections_per_uid_max_;
    if (!listener_.counts->AddBelow({.uid = peer.uid, .max = max})) {
      return Refuse(
          std::move(client), peer,
          protocol::MakeError(protocol::ErrorId::kLimit,
                              absl::StrCat("user ", peer.uid, " has ", max,
                                           " connections to the daemon (at most ", max, ")"),
                              max < kConnectionsPerUidMax
                                  ? "end ranks, readers or commands of this user, or raise "
                                    "LimitNOFILE= of the service"
                                  : "end ranks, readers or commands of this user, then retry"));
    }
    const OtherUsers others =
        MaySeeOthers(client.get(), peer) ? OtherUsers::kAllowed : OtherUsers::kRefused;
    auto relay = StartRelay(client, peer.uid, listener_.counts);
    if (!relay.ok()) return Refuse(std::move(client), peer, relay.status());
    auto socket = low_level_.wrapUnixSocketFd(relay->Release(),
                                              kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP |
                                                  kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC |
                                                  kj::LowLevelAsyncIoProvider::ALREADY_NONBLOCK);

    auto connection = std::make_shared<Connection>();
    connection->context = &context_;
    connection->viewer = {.uid = peer.uid, .others = others};
    connection->may_act_for_others = HasNoLimit(peer);
    connection->pid = peer.pid;
    connection->pidfd = pidfd.get();
    auto close = kj::newPromiseAndFulfiller<void>();
    connection->close = kj::mv(close.fulfiller);
    auto live = kj::heap<LiveConnection>(kj::mv(socket), port_, std::move(pidfd), connection);
    auto over = live->network.onDisconnect()
                    .exclusiveJoin(live->ProcessGone())
                    .exclusiveJoin(kj::mv(close.promise))
                    .exclusiveJoin(HelloDeadline(connection));
    connections_.add(over.attach(kj::mv(live)));
  }

  void Refuse(protocol::UniqueFd client, const ucred& peer, const absl::Status& why) {
    log_.Warn(peer.uid,
              absl::StrCat("process ", peer.pid, " is refused: ", protocol::FormatError(why)));
    refused_.Refuse(peer.uid, std::move(client), why);
  }

  static bool HasNoLimit(const ucred& peer) { return peer.uid == 0 || peer.uid == ::geteuid(); }

  bool MaySeeOthers(int client, const ucred& peer) const {
    if (HasNoLimit(peer)) return true;
    if (!operators_.has_value()) return false;
    if (peer.gid == *operators_) return true;
    std::array<gid_t, kGroupsMax> groups{};
    socklen_t length = sizeof(groups);
    if (::getsockopt(client, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &length) != 0) return false;
    const auto end = groups.begin() + static_cast<std::ptrdiff_t>(length / sizeof(gid_t));
    return std::find(groups.begin(), end, *operators_) != end;
  }

  kj::Promise<void> HelloDeadline(const std::shared_ptr<Connection>& connection) {
    return timer_.afterDelay(kHelloSeconds * kj::SECONDS)
        .then([this, connection]() -> kj::Promise<void> {
          if (connection->handshake_done) return kj::NEVER_DONE;
          log_.Warn(connection->viewer.uid,
                    absl::StrCat("process ", connection->pid, " did not say hello within ",
                                 kHelloSeconds, " s"));
          return kj::READY_NOW;
        });
  }

  void taskFailed(kj::Exception&& exception) override {
    spdlog::debug("connection: {}", exception.getDescription().cStr());
  }

  kj::UnixEventPort& port_;
  kj::Timer& timer_;
  kj::LowLevelAsyncIoProvider& low_level_;
  Listener listener_;
  const std::optional<gid_t> operators_;
  const uint32_t connections_per_uid_max_;
  const bool serves_without_pidfds_;
  ClientLog log_;
  RefusedClients refused_;
  kj::TaskSet closings_;  // sessions whose end the loop has still to confirm
  ControlContext context_;
  kj::UnixEventPort::FdObserver answers_;
  kj::UnixEventPort::FdObserver listening_;
  kj::TaskSet connections_;  // dies first: ends its sessions
};

}  // namespace

struct ControlPlane::State {
  explicit State(ControlQueue& queue) : replies(queue) {}

  ControlQueue& replies;
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<ControlPlane>> ControlPlane::Create(ControlPlaneOptions options,
                                                                   LoopInbox& inbox,
                                                                   ControlQueue& replies) {
  auto state = std::make_unique<State>(replies);
  std::promise<absl::Status> started;
  std::future<absl::Status> outcome = started.get_future();
  state->thread = std::thread(
      [options = std::move(options), &inbox, &replies, started = std::move(started)]() mutable {
        const auto exception = kj::runCatchingExceptions([&] {
          kj::AsyncIoContext io = kj::setupAsyncIo();
          io.waitScope.setBusyPollInterval(kEventsPerTurn);
          auto stop = kj::newPromiseAndFulfiller<void>();
          Acceptor acceptor(io, options, inbox, replies, kj::mv(stop.fulfiller));
          started.set_value(absl::OkStatus());
          stop.promise.wait(io.waitScope);
        });
        KJ_IF_MAYBE (e, exception) {
          const absl::Status status =
              protocol::MakeError(protocol::ErrorId::kInternal,
                                  absl::StrCat("control thread: ", e->getDescription().cStr()));
          spdlog::error("{}", protocol::FormatError(status));
          try {
            started.set_value(status);
          } catch (const std::future_error&) {
            // The control plane had started already: the daemon runs without new clients until it is stopped.
          }
        }
      });
  const absl::Status status = outcome.get();
  if (!status.ok()) {
    state->thread.join();
    return status;
  }
  return std::unique_ptr<ControlPlane>(new ControlPlane(std::move(state)));
}

ControlPlane::ControlPlane(std::unique_ptr<State> state) : state_(std::move(state)) {}

ControlPlane::~ControlPlane() {
  FOREBAY_CHECK(state_->replies.Push([](ControlContext& context) { context.stop->fulfill(); }));
  state_->thread.join();
}

}  // namespace forebay::daemon
