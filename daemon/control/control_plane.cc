#include "daemon/control/control_plane.h"

#include <capnp/rpc-twoparty.h>
#include <capnp/serialize-async.h>
#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <future>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/control/rpc_servers.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

constexpr unsigned kFdsPerMessageMax = 1;
constexpr uint64_t kMessageWordsMax = 64 << 10;  // 512 KiB; a client of ours stays below half of it
constexpr size_t kCallWordsMax = 4096;           // of calls not yet answered, then no more are read
constexpr uint32_t kEventsPerTurn = 64;  // of kj, then the sockets are looked at: nobody starves
constexpr auto kAcceptPause =
    100 * kj::MILLISECONDS;  // after a failed accept (descriptors used up)

protocol::UniqueFd OpenPidfd(int32_t pid) {
  return protocol::UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// Reads no further while an answer is being written: a client that asks and takes no answers waits
// for itself. The library would keep every answer, and free the chain of them recursively.
class AnswersFirst final : public capnp::MessageStream {
 public:
  explicit AnswersFirst(kj::AsyncCapabilityStream& stream) : stream_(stream) {}

  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> tryReadMessage(
      kj::ArrayPtr<kj::AutoCloseFd> fds, capnp::ReaderOptions options,
      kj::ArrayPtr<capnp::word> scratch) override {
    if (writes_ == 0) return stream_.tryReadMessage(fds, options, scratch);
    auto written = kj::newPromiseAndFulfiller<void>();
    written_ = kj::mv(written.fulfiller);
    return written.promise.then(
        [this, fds, options, scratch] { return stream_.tryReadMessage(fds, options, scratch); });
  }

  kj::Promise<void> writeMessage(
      kj::ArrayPtr<const int> fds,
      kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) override {
    return Counted([&] { return stream_.writeMessage(fds, segments); });
  }

  kj::Promise<void> writeMessages(
      kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) override {
    return Counted([&] { return stream_.writeMessages(messages); });
  }

  kj::Maybe<int> getSendBufferSize() override { return stream_.getSendBufferSize(); }
  kj::Promise<void> end() override { return stream_.end(); }

 private:
  template <typename Write>
  kj::Promise<void> Counted(Write write) {
    ++writes_;
    auto over = kj::defer([this] {
      if (--writes_ == 0 && written_.get() != nullptr) written_->fulfill();
    });
    return write().attach(kj::mv(over));
  }

  capnp::AsyncCapabilityMessageStream stream_;
  int writes_ = 0;
  kj::Own<kj::PromiseFulfiller<void>> written_;  // of the read that waits
};

// Everything that dies with a connection, in the order in which it was made.
struct LiveConnection {
  LiveConnection(kj::Own<kj::AsyncCapabilityStream> socket, kj::UnixEventPort& port,
                 protocol::UniqueFd process, std::shared_ptr<Connection> shared)
      : stream(kj::mv(socket)),
        pidfd(std::move(process)),
        connection(std::move(shared)),
        messages(*stream),
        network(messages, kFdsPerMessageMax, capnp::rpc::twoparty::Side::SERVER, Limits()),
        rpc(capnp::makeRpcServer(network, MakeNode(connection))) {
    rpc.setFlowLimit(kCallWordsMax);
    if (pidfd.valid()) {
      observer = kj::heap<kj::UnixEventPort::FdObserver>(
          port, pidfd.get(), kj::UnixEventPort::FdObserver::OBSERVE_READ);
    }
  }

  ~LiveConnection() noexcept(false) {
    for (const auto& weak : connection->sessions) {
      if (const auto session = weak.lock()) session->End(EndCause::kLost);
    }
    uint32_t& count = connection->context->connections[connection->uid];
    if (--count == 0) connection->context->connections.erase(connection->uid);
  }

  static capnp::ReaderOptions Limits() {
    capnp::ReaderOptions options;
    options.traversalLimitInWords = kMessageWordsMax;
    return options;
  }

  kj::Promise<void> ProcessGone() {
    if (observer.get() == nullptr) return kj::NEVER_DONE;
    return observer->whenBecomesReadable();
  }

  kj::Own<kj::AsyncCapabilityStream> stream;
  protocol::UniqueFd pidfd;
  std::shared_ptr<Connection> connection;
  AnswersFirst messages;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
  kj::Own<kj::UnixEventPort::FdObserver> observer;
};

// Lives on the control thread.
class Acceptor final : private kj::TaskSet::ErrorHandler {
 public:
  Acceptor(kj::AsyncIoContext& io, ControlPlaneOptions& options, LoopInbox& inbox,
           ControlQueue& replies, kj::Own<kj::PromiseFulfiller<void>> stop)
      : port_(io.unixEventPort),
        timer_(io.provider->getTimer()),
        listener_(io.lowLevelProvider->wrapListenSocketFd(
            options.listener.Release(), kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP)),
        closings_(*this),
        context_{.inbox = inbox,
                 .replies = replies,
                 .tasks = closings_,
                 .socket_path = options.socket_path,
                 .stop = kj::mv(stop)},
        answers_(port_, replies.fd(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
        connections_(*this) {
    connections_.add(AcceptNext());
    connections_.add(DrainAnswers());
  }

 private:
  // The observer is armed before the queue is emptied: what comes in between wakes it again.
  kj::Promise<void> DrainAnswers() {
    auto next = answers_.whenBecomesReadable();
    protocol::DrainDoorbell(context_.replies.fd());
    for (ControlCall& call : context_.replies.DrainAll()) call(context_);
    return next.then([this] { return DrainAnswers(); });
  }

  kj::Promise<void> AcceptNext() {
    return listener_->accept()
        .then([this](kj::Own<kj::AsyncIoStream>&& stream) -> kj::Promise<void> {
          Accepted(kj::mv(stream));
          return kj::READY_NOW;
        })
        .catch_([this](kj::Exception&& exception) -> kj::Promise<void> {
          spdlog::error("accept: {}", exception.getDescription().cStr());
          return timer_.afterDelay(kAcceptPause);
        })
        .then([this] { return AcceptNext(); });
  }

  void Accepted(kj::Own<kj::AsyncIoStream> stream) {
    auto socket = stream.downcast<kj::AsyncCapabilityStream>();
    ucred peer{};
    kj::uint length = sizeof(peer);
    socket->getsockopt(SOL_SOCKET, SO_PEERCRED, &peer, &length);
    protocol::UniqueFd pidfd = OpenPidfd(peer.pid);
    if (!pidfd.valid() && peer.pid != 0) {  // it is dead already; 0: of another pid namespace
      if (errno != ESRCH) spdlog::error("{}", protocol::ErrnoText("pidfd_open", errno));
      return;
    }
    uint32_t& count = context_.connections[peer.uid];
    if (count >= kConnectionsPerUidMax) {
      spdlog::warn("uid {} has {} connections already: process {} is refused", peer.uid, count,
                   peer.pid);
      return;
    }
    ++count;

    auto connection = std::make_shared<Connection>();
    connection->context = &context_;
    connection->uid = peer.uid;
    connection->pid = peer.pid;
    auto close = kj::newPromiseAndFulfiller<void>();
    connection->close = kj::mv(close.fulfiller);
    auto live = kj::heap<LiveConnection>(kj::mv(socket), port_, std::move(pidfd), connection);
    auto over = live->network.onDisconnect()
                    .exclusiveJoin(live->ProcessGone())
                    .exclusiveJoin(kj::mv(close.promise))
                    .exclusiveJoin(HelloDeadline(connection));
    connections_.add(over.attach(kj::mv(live)));
  }

  kj::Promise<void> HelloDeadline(const std::shared_ptr<Connection>& connection) {
    return timer_.afterDelay(kHelloSeconds * kj::SECONDS).then([connection]() -> kj::Promise<void> {
      if (connection->handshake_done) return kj::NEVER_DONE;
      spdlog::warn("process {} did not say hello within {} s", connection->pid, kHelloSeconds);
      return kj::READY_NOW;
    });
  }

  void taskFailed(kj::Exception&& exception) override {
    spdlog::debug("connection: {}", exception.getDescription().cStr());
  }

  kj::UnixEventPort& port_;
  kj::Timer& timer_;
  kj::Own<kj::ConnectionReceiver> listener_;
  kj::TaskSet closings_;  // sessions whose end the loop has still to confirm
  ControlContext context_;
  kj::UnixEventPort::FdObserver answers_;
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
            // it had started: the daemon goes on without new clients until it is stopped
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
