// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/gateway_server.h"

#include <capnp/rpc-twoparty.h>
#include <kj/async-unix.h>
#include <kj/compat/tls.h>
#include <signal.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/gateway/control_queue.h"
#include "daemon/gateway/daemon_link.h"
#include "daemon/gateway/data_thread.h"
#include "daemon/gateway/gateway_session.h"
#include "daemon/gateway/rpc_values.h"
#include "daemon/gateway/tls_files.h"
#include "protocol/descriptor.h"
#include "protocol/error.h"
#include "protocol/layout_codec.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/remote.capnp.h"
#include "protocol/rpc_stream.h"
#include "protocol/wire.h"
#include "spdlog/spdlog.h"

namespace forebay::gateway {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::SetOutcome;
using protocol::UniqueFd;

constexpr uint32_t kHandshakesMax = 64;  // connections that have not said hello
constexpr uint32_t kConnectionsMax = 1024;
constexpr auto kHandshakeLimit = 5 * kj::SECONDS;
constexpr size_t kLayoutPieceMax = 256 << 10;

class Connection;

// Checks the size of extra_state, which is part of the answer to an attach, together with that of rank 0.
absl::Status CheckExtraState(uint64_t bytes) {
  if (bytes <= protocol::kRemoteExtraStateBytesMax) return absl::OkStatus();
  return MakeError(
      ErrorId::kExtraState,
      absl::StrCat(bytes,
                   " bytes of extra_state, with the model's buffers; a rank on another node than "
                   "the daemon has at most ",
                   protocol::kRemoteExtraStateBytesMax),
      "lower extra_state_bytes, or register_buffer(..., persistent=False) for what need "
      "not come back, or run a daemon on this node");
}

// State that all connections share.
struct Gateway {
  const GatewayConfig& config;
  const std::map<std::string, std::string> tokens;
  kj::LowLevelAsyncIoProvider& low_level;
  kj::Timer& timer;
  ControlQueue& control;
  const bool has_remote_reads;
  std::map<std::string, std::unique_ptr<DataThread>> threads = {};  // by principal
  std::map<std::string, uint32_t> sessions_of = {};
  uint64_t next_session = 1;
  uint32_t handshakes = 0;
  uint32_t connections = 0;

  protocol::UcxOptions UcxOptions() const {
    return {.tls = config.ucx_tls,
            .net_devices = config.ucx_net_devices,
            .keepalive = config.keepalive,
            .has_remote_reads = has_remote_reads};
  }

  absl::StatusOr<DataThread*> ThreadOf(const Principal& principal) {
    std::unique_ptr<DataThread>& thread = threads[principal.name];
    // A worker without sessions is created again, because UCX looks at the machine's devices once.
    if (thread == nullptr || sessions_of[principal.name] == 0) {
      thread.reset();
      auto made = DataThread::Create(UcxOptions(), config.keepalive / 5);
      if (!made.ok()) return made.status();
      thread = *std::move(made);
    }
    return thread.get();
  }
};

// Session of an agent: the daemon's Session capability, and the number of the session on the data thread.
class SessionState {
 public:
  SessionState(Gateway& gateway, const Principal& principal, DataThread& thread, uint64_t number,
               schema::Session::Client daemon)
      : gateway_(gateway),
        principal_(principal),
        thread_(thread),
        number_(number),
        daemon_(kj::mv(daemon)) {
    ++gateway_.sessions_of[principal_.name];
  }
  SessionState(const SessionState&) = delete;
  SessionState& operator=(const SessionState&) = delete;
  ~SessionState() { LetGo(); }

  // Releases the session because its connection is over. A call in progress may hold this object for longer than the gateway
  // exists.
  void LetGo() {
    if (std::exchange(is_let_go_, true)) return;
    daemon_ = nullptr;
    --gateway_.sessions_of[principal_.name];
    thread_.Post([&thread = thread_, number = number_] { thread.Remove(number); });
  }

  // Ends the session because the data plane has failed. Releasing `daemon_` tells the daemon.
  void End(const absl::Status& reason) {
    if (!reason_.ok() || has_left_ || is_let_go_) return;
    reason_ = reason;
    daemon_ = nullptr;
    spdlog::warn("session {} of {} has ended: {}", number_, principal_.name,
                 protocol::FormatError(reason));
    thread_.Post([&thread = thread_, number = number_] { thread.Remove(number); });
  }
  // Notes that the agent ends the session: a later failure of the data plane is expected.
  void OnLeft() { has_left_ = true; }
  const absl::Status& reason() const { return reason_; }
  kj::Maybe<schema::Session::Client>& daemon() { return daemon_; }

 private:
  Gateway& gateway_;
  const Principal principal_;
  DataThread& thread_;
  const uint64_t number_;
  kj::Maybe<schema::Session::Client> daemon_;
  absl::Status reason_;
  bool has_left_ = false;
  bool is_let_go_ = false;
};

class SessionServer final : public schema::Session::Server {
 public:
  explicit SessionServer(std::shared_ptr<SessionState> state) : state_(std::move(state)) {}

  kj::Promise<void> descriptor(DescriptorContext context) override {
    SetOutcome(MakeError(ErrorId::kUnsupported, "no descriptor leaves this machine"),
               context.getResults().initOutcome());
    return kj::READY_NOW;
  }
  kj::Promise<void> mapped(MappedContext context) override {
    context.allowCancellation();
    return WithDaemon(context, [&](schema::Session::Client& daemon) {
      return ForwardForOutcome(context, daemon.mappedRequest());
    });
  }
  kj::Promise<void> explain(ExplainContext context) override {
    context.allowCancellation();
    return WithDaemon(context, [&](schema::Session::Client& daemon) {
      auto request = daemon.explainRequest();
      request.setTag(context.getParams().getTag());
      return ForwardForOutcome(context, kj::mv(request));
    });
  }
  kj::Promise<void> exchange(ExchangeContext context) override {
    context.allowCancellation();
    return WithDaemon(
        context, [&](schema::Session::Client& daemon) { return ForwardExchange(context, daemon); });
  }
  kj::Promise<void> detach(DetachContext context) override {
    return Leave(context, [](schema::Session::Client& daemon) { return daemon.detachRequest(); });
  }
  kj::Promise<void> end(EndContext context) override {
    return Leave(context, [](schema::Session::Client& daemon) { return daemon.endRequest(); });
  }

 private:
  template <typename Context, typename MakeRequest>
  kj::Promise<void> Leave(Context context, MakeRequest make_request) {
    context.allowCancellation();
    return WithDaemon(context, [&](schema::Session::Client& daemon) {
      return ForwardForOutcome(context, make_request(daemon)).then([state = state_] {
        state->OnLeft();
      });
    });
  }

  template <typename Context, typename Call>
  kj::Promise<void> WithDaemon(Context context, Call call) {
    KJ_IF_MAYBE (daemon, state_->daemon()) {
      return call(*daemon);
    }
    SetOutcome(state_->reason(), context.getResults().initOutcome());
    return kj::READY_NOW;
  }

  std::shared_ptr<SessionState> state_;
};

// Connection of one agent.
class Connection {
 public:
  Connection(Gateway& shared, kj::Own<kj::AsyncIoStream> tls_stream, std::string name,
             std::string where);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() noexcept(false) {
    for (const auto& weak : sessions) {
      if (const auto session = weak.lock()) session->LetGo();
    }
    if (!is_connected) --gateway.handshakes;
    --gateway.connections;
  }

  // Ends with the agent's or the daemon's connection, or if no message arrives over TLS for too long.
  kj::Promise<void> OnEnd() {
    auto failed = kj::newPromiseAndFulfiller<void>();
    fail = kj::mv(failed.fulfiller);
    return network.onDisconnect().exclusiveJoin(kj::mv(failed.promise)).exclusiveJoin(Watch());
  }

  void OnHeard() {
    heard = gateway.timer.now();
    silent_looks = 0;
  }
  void OnConnected() {
    is_connected = true;
    --gateway.handshakes;
  }

  Gateway& gateway;
  const std::string peer;
  std::string certified_name;  // name in the certificate; empty: the principal has a token
  kj::Maybe<Principal> principal;
  bool is_connected = false;
  kj::TimePoint heard;
  int silent_looks = 0;  // number of times that Watch() has looked since `heard`
  kj::Own<DaemonLink> daemon;
  kj::Own<kj::PromiseFulfiller<void>> fail;
  std::vector<std::byte> layout;
  std::vector<std::weak_ptr<SessionState>> sessions;
  // Calls that may end after this object hold a weak pointer to it.
  const std::shared_ptr<const bool> is_there = std::make_shared<const bool>(true);

 private:
  kj::Promise<void> Watch() {
    const kj::Duration limit =
        is_connected ? gateway.config.keepalive.count() * kj::MILLISECONDS : kHandshakeLimit;
    return gateway.timer.afterDelay(limit / kLooksPerKeepalive)
        .then([this, limit]() -> kj::Promise<void> {
          const kj::Duration silent = gateway.timer.now() - heard;
          ++silent_looks;
          if (silent <= limit || silent_looks < kLooksPerKeepalive) return Watch();
          spdlog::warn("{}: nothing came over TLS for {} ms", peer, silent / kj::MILLISECONDS);
          return kj::READY_NOW;
        });
  }

 public:
  // Created last and destroyed first.
  kj::Own<kj::AsyncIoStream> stream;
  protocol::AnswersFirst<capnp::AsyncIoMessageStream> messages;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
};

class NodeServer final : public schema::RemoteNode::Server {
 public:
  NodeServer(Connection& connection, const Principal& principal)
      : connection_(connection), gateway_(connection.gateway), principal_(principal) {}

  kj::Promise<void> ping(PingContext) override {
    connection_.OnHeard();
    return kj::READY_NOW;
  }

  kj::Promise<void> layout(LayoutContext context) override {
    const auto bytes = context.getParams().getBytes();
    auto outcome = context.getResults().initOutcome();
    if (bytes.size() > kLayoutPieceMax ||
        connection_.layout.size() + bytes.size() > protocol::kLayoutBytesMax) {
      SetOutcome(MakeError(ErrorId::kLayout,
                           absl::StrCat("a layout of ", connection_.layout.size(), " + ",
                                        bytes.size(), " bytes (at most ", protocol::kLayoutBytesMax,
                                        ", ", kLayoutPieceMax, " a piece)")),
                 outcome);
      return kj::READY_NOW;
    }
    const std::vector<std::byte> piece = BytesOf(bytes);
    connection_.layout.insert(connection_.layout.end(), piece.begin(), piece.end());
    return kj::READY_NOW;
  }

  kj::Promise<void> admin(AdminContext context) override {
    context.allowCancellation();
    return connection_.daemon->node().adminRequest().send().then([context](auto&& answer) mutable {
      auto results = context.getResults();
      results.setOutcome(answer.getOutcome());
      if (answer.hasAdmin()) results.setAdmin(answer.getAdmin());
    });
  }

  kj::Promise<void> attach(AttachContext context) override {
    context.allowCancellation();
    const uint32_t sessions = gateway_.sessions_of[principal_.name];
    if (sessions >= principal_.sessions_max) {
      SetOutcome(MakeError(ErrorId::kLimit,
                           absl::StrCat("principal ", principal_.name, " has ", sessions,
                                        " sessions (at most ", principal_.sessions_max, ")"),
                           "detach one, or raise principal.NAME.sessions in gateway.toml"),
                 context.getResults().initOutcome());
      return kj::READY_NOW;
    }
    const absl::Status fits =
        CheckExtraState(context.getParams().getRequest().getExtraStateBytes());
    if (!fits.ok()) {
      SetOutcome(fits, context.getResults().initOutcome());
      return kj::READY_NOW;
    }
    auto encoded = std::make_shared<const std::vector<std::byte>>(
        std::exchange(connection_.layout, std::vector<std::byte>()));
    return connection_.daemon->Attach(context.getParams().getRequest(), *encoded)
        .then([this, context, encoded, is_there = std::weak_ptr(connection_.is_there)](
                  kj::Own<DaemonSession> attached) mutable {
          if (is_there.expired()) return;
          absl::Status status = attached->status;
          if (status.ok()) status = Begin(context, *attached, *encoded);
          if (!status.ok()) SetOutcome(status, context.getResults().initOutcome());
        });
  }

 private:
  // Makes the data plane from the memory that the daemon has granted.
  absl::Status Begin(AttachContext context, DaemonSession& attached,
                     const std::vector<std::byte>& encoded) {
    const schema::AttachReply::Reader reply = *attached.reply;
    RETURN_IF_ERROR(CheckExtraState(reply.getRank0ExtraStateBytes()));
    const schema::AttachRequest::Reader request = context.getParams().getRequest();
    ASSIGN_OR_RETURN(protocol::LayoutSpec spec, protocol::DecodeLayout(encoded));
    ASSIGN_OR_RETURN(protocol::Layout layout, protocol::Layout::Create(std::move(spec)));
    GatewaySessionOptions options;
    options.layout = std::make_shared<const protocol::Layout>(std::move(layout));
    options.step_region = {.offset_bytes = reply.getStepRegionOffset(),
                           .size_bytes = reply.getStepRegionBytes()};
    for (const uint32_t partition : reply.getTrace()) {
      if (partition < options.layout->partitions().size()) options.trace.push_back(partition);
    }
    options.is_reader = request.getReader();
    const bool brings_ahead =
        !options.is_reader && !options.layout->is_shared() && !reply.getWeightsOnSwap();
    for (uint32_t i = 0; brings_ahead && i < options.layout->partitions().size(); ++i) {
      if (options.layout->partitions()[i].owner == request.getRank()) options.own.insert(i);
    }
    options.writes_initial = reply.getWritesInitial();
    options.reads = gateway_.config.reads;
    ASSIGN_OR_RETURN(options.weights, SharedMemory::Map(std::move(attached.weights),
                                                        reply.getWeightsBytes(), Access::kRead));
    ASSIGN_OR_RETURN(options.grad_arena,
                     SharedMemory::Map(std::move(attached.grad_arena), reply.getGradArenaBytes(),
                                       Access::kReadWrite));
    struct Ring {
      std::shared_ptr<SharedMemory> memory;
      UniqueFd command_doorbell;
      UniqueFd completion_doorbell;
    };
    auto ring = std::make_shared<Ring>();
    ASSIGN_OR_RETURN(ring->memory,
                     SharedMemory::Map(std::move(attached.ring), sizeof(protocol::RingMemory),
                                       Access::kReadWrite));
    ring->command_doorbell = std::move(attached.command_doorbell);
    ring->completion_doorbell = std::move(attached.completion_doorbell);
    ASSIGN_OR_RETURN(
        options.channel,
        protocol::MakeRingClientChannel(
            {.ring = reinterpret_cast<protocol::RingMemory*>(ring->memory->bytes().data()),
             .command_doorbell_fd = ring->command_doorbell.get(),
             .completion_doorbell_fd = ring->completion_doorbell.get()}));
    options.ring = ring;
    const std::shared_ptr<SharedMemory> weights = options.weights;
    const uint64_t grad_arena_inode = options.grad_arena->inode();

    ASSIGN_OR_RETURN(DataThread * thread, gateway_.ThreadOf(principal_));
    SessionKey key{.number = gateway_.next_session++};
    if (::getrandom(key.secret.data(), key.secret.size(), 0) !=
        static_cast<ssize_t>(key.secret.size())) {
      return MakeError(ErrorId::kInternal, "getrandom");
    }
    auto state = std::make_shared<SessionState>(gateway_, principal_, *thread, key.number,
                                                KJ_ASSERT_NONNULL(attached.session));
    std::vector<std::byte> readable_key;
    const absl::Status begun = thread->Run([&]() -> absl::Status {
      ASSIGN_OR_RETURN(
          auto link,
          RemoteLink::Create(*thread, {.key = key,
                                       .peer_address = BytesOf(context.getParams().getWorker()),
                                       .peer = absl::StrCat("the agent at ", connection_.peer),
                                       .keepalive = gateway_.config.keepalive,
                                       .on_end = OnEnd(state)}));
      std::unique_ptr<protocol::UcxMemory> readable;
      if (gateway_.has_remote_reads) {
        ASSIGN_OR_RETURN(readable, thread->worker().Map(weights->bytes()));
        readable_key.assign(readable->key().begin(), readable->key().end());
      }
      thread->Add(key, std::make_unique<GatewaySession>(std::move(link), std::move(readable),
                                                        std::move(options)));
      return absl::OkStatus();
    });
    RETURN_IF_ERROR(begun);
    std::erase_if(connection_.sessions, [](const auto& weak) { return weak.expired(); });
    connection_.sessions.push_back(state);
    auto results = context.getResults();
    results.initOutcome();
    results.setReply(reply);
    results.getReply().setRemoteWeights(weights->inode());
    results.getReply().setRemoteGradArena(grad_arena_inode);
    results.setSession(kj::heap<SessionServer>(std::move(state)));
    auto terms = results.initTerms();
    terms.setSession(key.number);
    terms.setSecret(DataOf(key.secret));
    terms.setWorker(DataOf(thread->address()));
    terms.setWeightsKey(DataOf(readable_key));
    terms.setWeightsAddress(reinterpret_cast<uint64_t>(weights->bytes().data()));
    terms.setExtraState(DataOf(attached.extra_state));
    return absl::OkStatus();
  }

  // Returns the function that tells this thread of the end; the data thread calls it.
  std::function<void(const absl::Status&)> OnEnd(const std::shared_ptr<SessionState>& state) {
    return [&control = gateway_.control,
            weak = std::weak_ptr(state)](const absl::Status& reason) mutable {
      const bool has_room = control.Push([weak, reason = protocol::Unshared(reason)] {
        if (const auto here = weak.lock()) here->End(reason);
      });
      FOREBAY_CHECK(has_room);  // each session pushes one call; the queue has room for all
    };
  }

  Connection& connection_;
  Gateway& gateway_;
  const Principal principal_;
};

class GatewayServer final : public schema::Gateway::Server {
 public:
  explicit GatewayServer(Connection& connection) : connection_(connection) {}

  kj::Promise<void> hello(HelloContext context) override {
    context.allowCancellation();
    const auto params = context.getParams();
    if (params.getProtocolVersion() != protocol::kProtocolVersion ||
        params.getRemoteVersion() != protocol::kRemoteVersion) {
      return Refuse(
          context, MakeError(ErrorId::kProtocol,
                             absl::StrCat("the agent speaks protocol ", params.getProtocolVersion(),
                                          " (remote ", params.getRemoteVersion(),
                                          "), this gateway ", protocol::kProtocolVersion,
                                          " (remote ", protocol::kRemoteVersion, ")"),
                             "use one release on both nodes"));
    }
    if (connection_.is_connected) {
      return Refuse(context, MakeError(ErrorId::kProtocol, "a second hello on one connection"));
    }
    auto principal = Authenticate({params.getToken().begin(), params.getToken().size()});
    if (!principal.ok()) return Refuse(context, principal.status());
    auto daemon = DaemonLink::Connect(connection_.gateway.low_level,
                                      connection_.gateway.config.daemon_socket);
    if (!daemon.ok()) return Refuse(context, daemon.status());
    connection_.daemon = kj::mv(*daemon);
    return connection_.daemon->Hello(principal->uid, connection_.gateway.config.session_wait)
        .then([this, context, principal = *principal,
               is_there = std::weak_ptr(connection_.is_there)](const absl::Status& status) mutable {
          if (is_there.expired()) return kj::Promise<void>(kj::READY_NOW);
          if (!status.ok()) return Refuse(context, status);
          connection_.OnConnected();
          connection_.OnHeard();
          spdlog::info("{} is {} (uid {})", connection_.peer, principal.name, principal.uid);
          ended_ = connection_.daemon->OnDisconnect()
                       .then([this] { connection_.fail->fulfill(); })
                       .eagerlyEvaluate(nullptr);
          auto results = context.getResults();
          results.initOutcome();
          results.setNode(kj::heap<NodeServer>(connection_, principal));
          results.setRemoteReads(connection_.gateway.has_remote_reads);
          results.setKeepaliveMs(
              static_cast<uint32_t>(connection_.gateway.config.keepalive.count()));
          return kj::Promise<void>(kj::READY_NOW);
        });
  }

 private:
  absl::StatusOr<Principal> Authenticate(const std::string& token) {
    const GatewayConfig& config = connection_.gateway.config;
    std::string name = connection_.certified_name;
    if (name.empty()) {
      const auto found = NameOfToken(connection_.gateway.tokens, token);
      if (!found) {
        return MakeError(ErrorId::kPermission,
                         token.empty() ? "this gateway asks for a token, and none came"
                                       : "the token is nobody's at this gateway",
                         "put the principal's token into the file `token` of the agent's folder "
                         "(FOREBAY_REMOTE)");
      }
      name = *found;
    }
    const auto principal = config.principals.find(name);
    if (principal != config.principals.end()) return principal->second;
    return MakeError(ErrorId::kPermission,
                     absl::StrCat("this gateway has no principal named \"", name, "\""),
                     absl::StrCat("add [principal.", name, "] with a uid to gateway.toml"));
  }

  kj::Promise<void> Refuse(HelloContext context, const absl::Status& status) {
    spdlog::warn("{} is refused: {}", connection_.peer, protocol::FormatError(status));
    SetOutcome(status, context.getResults().initOutcome());
    return kj::READY_NOW;
  }

  Connection& connection_;
  kj::Promise<void> ended_ = kj::READY_NOW;
};

Connection::Connection(Gateway& shared, kj::Own<kj::AsyncIoStream> tls_stream, std::string name,
                       std::string where)
    : gateway(shared),
      peer(std::move(where)),
      certified_name(std::move(name)),
      heard(shared.timer.now()),
      stream(kj::mv(tls_stream)),
      messages(*stream),
      network(messages, capnp::rpc::twoparty::Side::SERVER, protocol::AnswerLimits()),
      rpc(capnp::makeRpcServer(network, kj::heap<GatewayServer>(*this))) {
  rpc.setFlowLimit(protocol::kCallWordsMax);
}

// Accepts connections until it is destroyed.
class Acceptor final : private kj::TaskSet::ErrorHandler {
 public:
  Acceptor(Gateway& gateway, kj::TlsContext& tls, kj::Own<kj::ConnectionReceiver> receiver)
      : gateway_(gateway), tls_(tls), receiver_(kj::mv(receiver)), tasks_(*this) {
    tasks_.add(AcceptNext());
  }

 private:
  kj::Promise<void> AcceptNext() {
    return receiver_->acceptAuthenticated().then([this](kj::AuthenticatedStream&& accepted) {
      if (gateway_.handshakes < kHandshakesMax && gateway_.connections < kConnectionsMax) {
        tasks_.add(Serve(kj::mv(accepted)));
      }
      return AcceptNext();
    });
  }

  kj::Promise<void> Serve(kj::AuthenticatedStream accepted) {
    std::string peer = accepted.peerIdentity->toString().cStr();
    ++gateway_.handshakes;
    ++gateway_.connections;
    auto counted = std::make_shared<bool>(true);  // true until the Connection counts itself
    auto uncount = kj::defer([this, counted] {
      if (!*counted) return;
      --gateway_.handshakes;
      --gateway_.connections;
    });
    return gateway_.timer.timeoutAfter(kHandshakeLimit, tls_.wrapServer(kj::mv(accepted)))
        .then(
            [this, peer, counted](kj::AuthenticatedStream&& stream) -> kj::Promise<void> {
              std::string name;
              if (!gateway_.config.client_ca.empty()) {
                auto& identity = kj::downcast<kj::TlsPeerIdentity>(*stream.peerIdentity);
                name = identity.getCommonName().cStr();
              }
              *counted = false;
              auto connection =
                  kj::heap<Connection>(gateway_, kj::mv(stream.stream), std::move(name), peer);
              auto over = connection->OnEnd();
              return over.attach(kj::mv(connection));
            },
            [peer](kj::Exception&& exception) -> kj::Promise<void> {
              spdlog::warn("{}: TLS: {}", peer, exception.getDescription().cStr());
              return kj::READY_NOW;
            })
        .attach(kj::mv(uncount));
  }

  void taskFailed(kj::Exception&& exception) override {
    spdlog::warn("connection: {}", exception.getDescription().cStr());
  }

  Gateway& gateway_;
  kj::TlsContext& tls_;
  kj::Own<kj::ConnectionReceiver> receiver_;
  kj::TaskSet tasks_;
};

// True if reads are on, or "auto" and the machine has InfiniBand hardware.
bool HasRemoteReads(const GatewayConfig& config) {
  if (config.reads != ReadPolicy::kAuto) return config.reads == ReadPolicy::kOn;
  std::error_code ignored;
  return !std::filesystem::is_empty("/sys/class/infiniband", ignored) && !ignored;
}

absl::StatusOr<std::map<std::string, std::string>> LoadTokens(const GatewayConfig& config) {
  if (config.tokens.empty()) return std::map<std::string, std::string>();
  ASSIGN_OR_RETURN(const std::string text, ReadSecretFile(config.tokens, "the tokens"));
  return ParseTokens(text, config.tokens);
}

}  // namespace

absl::Status CheckGateway(const GatewayConfig& config) {
  RETURN_IF_ERROR(LoadTokens(config).status());
  return MakeServerTls(config, nullptr).status();
}

absl::Status ServeGateway(const GatewayConfig& config) {
  ASSIGN_OR_RETURN(auto tokens, LoadTokens(config));
  ASSIGN_OR_RETURN(auto control, ControlQueue::Create(kControlCallsMax));
  absl::Status status;
  const auto exception = kj::runCatchingExceptions([&] {
    kj::UnixEventPort::captureSignal(SIGTERM);
    kj::UnixEventPort::captureSignal(SIGINT);
    kj::AsyncIoContext io = kj::setupAsyncIo();
    kj::Timer& timer = io.provider->getTimer();
    auto tls = MakeServerTls(config, &timer);
    if (!tls.ok()) {
      status = tls.status();
      return;
    }
    Gateway gateway{.config = config,
                    .tokens = std::move(tokens),
                    .low_level = *io.lowLevelProvider,
                    .timer = timer,
                    .control = *control,
                    .has_remote_reads = HasRemoteReads(config)};
    // UCX is tried before a client waits for it.
    const absl::Status ucx = protocol::UcxWorker::Create(gateway.UcxOptions()).status();
    if (!ucx.ok()) {
      status = ucx;
      return;
    }
    kj::Own<kj::ConnectionReceiver> receiver;
    const auto failed = kj::runCatchingExceptions([&] {
      receiver =
          io.provider->getNetwork().parseAddress(config.bind.c_str()).wait(io.waitScope)->listen();
    });
    KJ_IF_MAYBE (e, failed) {
      status = MakeError(ErrorId::kBusy,
                         absl::StrCat("cannot listen on bind = \"", config.bind,
                                      "\": ", e->getDescription().cStr()),
                         "give an address of this machine and a port that is free");
      return;
    }
    const uint32_t port = receiver->getPort();
    ControlQueueDrain drain(io.unixEventPort, *control);
    {
      Acceptor acceptor(gateway, **tls, kj::mv(receiver));
      std::fprintf(stderr, "forebay-gateway ready bind=%s port=%u\n", config.bind.c_str(), port);
      io.unixEventPort.onSignal(SIGTERM)
          .exclusiveJoin(io.unixEventPort.onSignal(SIGINT))
          .ignoreResult()
          .wait(io.waitScope);
    }
    gateway.threads.clear();
  });
  KJ_IF_MAYBE (e, exception) {
    return MakeError(ErrorId::kInternal, absl::StrCat("gateway: ", e->getDescription().cStr()));
  }
  return status;
}

}  // namespace forebay::gateway
