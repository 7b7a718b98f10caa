// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/agent_server.h"

#include <capnp/rpc-twoparty.h>
#include <fcntl.h>
#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <kj/compat/tls.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/gateway/agent_session.h"
#include "daemon/gateway/control_queue.h"
#include "daemon/gateway/data_thread.h"
#include "daemon/gateway/rpc_values.h"
#include "daemon/gateway/tls_files.h"
#include "protocol/descriptor.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/layout_codec.h"
#include "protocol/os/check.h"
#include "protocol/os/memfd.h"
#include "protocol/os/status_macros.h"
#include "protocol/remote.capnp.h"
#include "protocol/ring.h"
#include "protocol/rpc_stream.h"
#include "protocol/wire.h"

namespace forebay::gateway {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::SetOutcome;
using protocol::UniqueFd;

constexpr size_t kLayoutPieceBytes = 256 << 10;
constexpr auto kConnectLimit = 10 * kj::SECONDS;
constexpr auto kEndingsLimit = 1 * kj::SECONDS;

// Returns "host" of "host:port" or "[host]:port".
std::string HostOf(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  const bool is_bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return is_bracketed ? host.substr(1, host.size() - 2) : host;
}

// Number of descriptors that a session takes: memory and doorbells, TLS, and UCX with a handful of networks. The agent checks
// for them first, because UCX ends the peer's process if it runs out of descriptors while it connects.
constexpr size_t kDescriptorsMin = 40;

absl::Status CheckDescriptors() {
  std::vector<UniqueFd> free;
  for (size_t i = 0; i < kDescriptorsMin; ++i) {
    free.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (free.back().valid()) continue;
    return MakeError(
        ErrorId::kLimit,
        protocol::ErrnoText(absl::StrCat("descriptor ", i + 1, " of the ", kDescriptorsMin,
                                         " that a session with another node takes"),
                            errno),
        "raise the limit of open files (ulimit -n) of the trainer");
  }
  return absl::OkStatus();
}

// The connection to a gateway.
struct GatewayLink {
  GatewayLink(kj::Own<kj::AsyncIoStream> tls_stream)
      : stream(kj::mv(tls_stream)),
        network(*stream, capnp::rpc::twoparty::Side::CLIENT, protocol::AnswerLimits()),
        rpc(capnp::makeRpcClient(network)),
        gateway(protocol::BootstrapOf<schema::Gateway>(rpc)) {}

  kj::Own<kj::AsyncIoStream> stream;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
  schema::Gateway::Client gateway;
};

// State of a session of the trainer in the agent.
struct AgentSessionState {
  kj::Maybe<schema::Session::Client> remote;
  uint64_t number = 0;
  bool is_shared = false;
  bool has_rank = false;
  bool is_back = false;  // the rank continues to use its arenas
  bool is_mapped = false;
  bool is_detached = false;
  bool has_left = false;
  absl::Status reason;  // reason of the end, if the agent knows it
  UniqueFd weights;     // the descriptor that the trainer gets
  std::shared_ptr<SharedMemory> grad_arena;
  std::shared_ptr<SharedMemory> ring;
  UniqueFd command_doorbell;
  protocol::SocketDoorbell completion_doorbell;
  UniqueFd extra_state;
};

// State of the agent on the control thread.
class Agent final : private kj::TaskSet::ErrorHandler {
 public:
  Agent(kj::AsyncIoContext& async_io, const AgentOptions& agent_options,
        ControlQueue& control_queue)
      : io(async_io), options(agent_options), control(control_queue) {}

  // Connects to the gateway on the first call. Later calls return the outcome of the first.
  kj::Promise<absl::Status> Connect() {
    if (node != nullptr) return absl::Status();
    if (absl::Status enough = CheckDescriptors(); !enough.ok()) return enough;
    auto credentials = LoadCredentials(options.folder);
    if (!credentials.ok()) return credentials.status();
    auto context = MakeClientTls(*credentials);
    if (!context.ok()) return context.status();
    tls = kj::mv(*context);
    auto connected = io.provider->getNetwork()
                         .parseAddress(options.address.c_str())
                         .then([](kj::Own<kj::NetworkAddress>&& address) {
                           auto connecting = address->connect();
                           return connecting.attach(kj::mv(address));
                         });
    return io.provider->getTimer()
        .timeoutAfter(kConnectLimit, kj::mv(connected))
        .then([this, token = credentials->token](
                  kj::Own<kj::AsyncIoStream>&& stream) { return Hello(kj::mv(stream), token); },
              [this](kj::Exception&& exception) -> kj::Promise<absl::Status> {
                return MakeError(ErrorId::kNoDaemon,
                                 absl::StrCat("no gateway answers at ucx://", options.address, ": ",
                                              exception.getDescription().cStr()),
                                 "start it on the daemon's node (systemctl start forebay-gateway), "
                                 "and look at the name and the port");
              });
  }

  // Ends all sessions because the connection to the gateway is broken.
  void Fail(const absl::Status& why) {
    if (!reason.ok()) return;
    reason = why;
    for (const auto& weak : sessions) {
      if (const auto session = weak.lock()) EndSession(*session, why);
    }
    // Calls that wait end too: they must not wait for a link that is broken.
    (void)kj::runCatchingExceptions([this] { link->stream->abortRead(); });
  }

  // Ends a session that the trainer has released, or whose trainer has ended. The gateway is notified, because it would wait
  // for a lost link. A call in progress may hold the session for longer than the agent exists.
  void Leave(AgentSessionState& session) {
    if (std::exchange(session.has_left, true)) return;
    // A cancelled attempt to attach again is not the trainer's end.
    const bool is_tried = session.is_back && !session.is_mapped;
    const auto remove = [thread = data.get(), number = session.number] {
      thread->Post([thread, number] { thread->Remove(number); });
    };
    if (!session.is_detached && !is_tried && session.reason.ok() && reason.ok()) {
      // The end request goes first: a gateway that loses the data plane alone lets the daemon wait for the rank.
      auto heard = KJ_ASSERT_NONNULL(session.remote).endRequest().send().ignoreResult();
      endings.add(heard.then(remove, [remove](kj::Exception&&) { remove(); }));
    } else {
      remove();
    }
    // The capability belongs to this thread, and the data thread may be the last to hold the session.
    session.remote = nullptr;
  }

  void LeaveAll() {
    for (const auto& weak : sessions) {
      if (const auto session = weak.lock()) Leave(*session);
    }
  }

  kj::Promise<void> OnEndingsHeard() {
    return io.provider->getTimer()
        .timeoutAfter(kEndingsLimit, endings.onEmpty())
        .then([] {}, [](kj::Exception&&) {});
  }

  void EndSession(AgentSessionState& session, const absl::Status& why) {
    if (session.reason.ok()) session.reason = why;
    if (data == nullptr || session.number == 0) return;
    data->Post([thread = data.get(), number = session.number] {
      auto* const found = static_cast<AgentSession*>(thread->Find(number));
      if (found != nullptr) found->OnLost();
    });
  }

  absl::Status StartData() {
    if (data != nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(
        data, DataThread::Create({.keepalive = keepalive, .has_remote_reads = has_remote_reads},
                                 keepalive / 5));
    return absl::OkStatus();
  }

  kj::AsyncIoContext& io;
  const AgentOptions& options;
  ControlQueue& control;
  kj::Own<kj::TlsContext> tls;
  kj::Own<GatewayLink> link;
  kj::Maybe<schema::RemoteNode::Client> node;
  std::chrono::milliseconds keepalive{10000};
  bool has_remote_reads = false;
  std::unique_ptr<DataThread> data;
  std::vector<std::weak_ptr<AgentSessionState>> sessions;
  absl::Status reason;

 private:
  void taskFailed(kj::Exception&&) override {}  // the link is lost too
  kj::Promise<absl::Status> Hello(kj::Own<kj::AsyncIoStream> stream, const std::string& token) {
    auto handshake = tls->wrapClient(kj::mv(stream), HostOf(options.address).c_str())
                         .then([this, token](kj::Own<kj::AsyncIoStream>&& secured) {
                           link = kj::heap<GatewayLink>(kj::mv(secured));
                           auto request = link->gateway.helloRequest();
                           request.setProtocolVersion(protocol::kProtocolVersion);
                           request.setRemoteVersion(protocol::kRemoteVersion);
                           request.setToken(token.c_str());
                           return request.send();
                         });
    return io.provider->getTimer()
        .timeoutAfter(kConnectLimit, kj::mv(handshake))
        .then(
            [this](auto&& response) -> absl::Status {
              RETURN_IF_ERROR(protocol::StatusOf(response.getOutcome()));
              node = response.getNode();
              keepalive = std::chrono::milliseconds(response.getKeepaliveMs());
              has_remote_reads = response.getRemoteReads();
              pinging = Ping().eagerlyEvaluate(nullptr);
              watching =
                  link->network.onDisconnect()
                      .then([this] { Fail(Broken("closed the connection")); },
                            [this](kj::Exception&& e) { Fail(Broken(e.getDescription().cStr())); })
                      .eagerlyEvaluate(nullptr);
              return absl::OkStatus();
            },
            [this](kj::Exception&& exception) {
              if (exception.getType() == kj::Exception::Type::OVERLOADED) {
                return Broken(
                    absl::StrCat("no answer over TLS within ", kConnectLimit / kj::SECONDS, " s"));
              }
              return MakeError(
                  ErrorId::kPermission,
                  absl::StrCat("TLS with the gateway at ucx://", options.address, ": ",
                               exception.getDescription().cStr()),
                  absl::StrCat("the gateway's certificate is to be signed by ca.pem of ",
                               options.folder,
                               " and to name the host, and cert.pem there by the gateway's "
                               "tls.client_ca; both of today. Where it has ended just now, "
                               "attach again"));
            });
  }

  absl::Status Broken(const std::string& how) {
    return MakeError(ErrorId::kRemote,
                     absl::StrCat("the gateway at ucx://", options.address, ": ", how));
  }

  // Waits for the answer to a ping, for this many looks.
  kj::Promise<void> AwaitAnswer(kj::Promise<void> answer, int looks) {
    auto shared = kj::heap(answer.fork());
    auto is_here = shared->addBranch().then([] { return true; });
    auto is_late = io.provider->getTimer()
                       .afterDelay(keepalive.count() * kj::MILLISECONDS / kLooksPerKeepalive)
                       .then([] { return false; });
    return is_here.exclusiveJoin(kj::mv(is_late))
        .then(
            [this, looks, shared = kj::mv(shared)](bool is_answered) mutable -> kj::Promise<void> {
              if (is_answered) return kj::READY_NOW;
              if (looks > 1) return AwaitAnswer(shared->addBranch(), looks - 1);
              return KJ_EXCEPTION(OVERLOADED, "no answer");
            });
  }

  kj::Promise<void> Ping() {
    kj::Timer& timer = io.provider->getTimer();
    const kj::Duration limit = keepalive.count() * kj::MILLISECONDS;
    return timer.afterDelay(limit / kLooksPerKeepalive)
        .then([this] {
          return AwaitAnswer(KJ_ASSERT_NONNULL(node).pingRequest().send().ignoreResult(),
                             kLooksPerKeepalive);
        })
        .then([this] { return Ping(); },
              [this](kj::Exception&&) {
                Fail(Broken(absl::StrCat("no answer over TLS for ", keepalive.count(), " ms")));
                return kj::Promise<void>(kj::READY_NOW);
              });
  }

  kj::TaskSet endings{*this};
  kj::Promise<void> pinging = kj::READY_NOW;
  kj::Promise<void> watching = kj::READY_NOW;
};

class AgentSessionServer final : public schema::Session::Server {
 public:
  AgentSessionServer(Agent& agent, std::shared_ptr<AgentSessionState> state)
      : agent_(agent), state_(std::move(state)) {}
  ~AgentSessionServer() noexcept(false) {
    if (!state_->has_left) agent_.Leave(*state_);  // otherwise the agent may be destroyed already
  }

  kj::Promise<void> descriptor(DescriptorContext context) override {
    auto results = context.getResults();
    const int fd = FdOf(context.getParams().getKind());
    UniqueFd copy = fd < 0 ? UniqueFd() : protocol::DuplicateFd(fd);
    if (!copy.valid()) {
      SetOutcome(MakeError(ErrorId::kNotReady, "this session has no such descriptor"),
                 results.initOutcome());
      return kj::READY_NOW;
    }
    results.initOutcome();
    results.setDescriptor(protocol::MakeDescriptor(std::move(copy)));
    return kj::READY_NOW;
  }

  kj::Promise<void> mapped(MappedContext context) override {
    context.allowCancellation();
    if (!state_->reason.ok()) return Refuse(context);
    return Remote().mappedRequest().send().then(
        [this, context](auto&& response) mutable -> kj::Promise<void> {
          context.getResults().setOutcome(response.getOutcome());
          state_->is_mapped = state_->is_mapped || response.getOutcome().getError() == 0;
          // A session that was continued has its weights already.
          if (response.getOutcome().getError() != 0 || !is_synced() || state_->is_back) {
            return kj::READY_NOW;
          }
          return Synced(context);
        });
  }

  kj::Promise<void> explain(ExplainContext context) override {
    context.allowCancellation();
    if (!state_->reason.ok()) return Refuse(context);
    auto request = Remote().explainRequest();
    request.setTag(context.getParams().getTag());
    return ForwardForOutcome(context, kj::mv(request));
  }

  kj::Promise<void> exchange(ExchangeContext context) override {
    context.allowCancellation();
    if (!state_->reason.ok()) return Refuse(context);
    return ForwardExchange(context, Remote()).then([this, context]() mutable -> kj::Promise<void> {
      // A rank must see the weights that other ranks wrote before an exchange: fetches them before the answer.
      if (!is_synced()) return kj::READY_NOW;
      return Synced(context);
    });
  }

  kj::Promise<void> detach(DetachContext context) override {
    context.allowCancellation();
    if (!state_->reason.ok()) return Refuse(context);
    state_->is_detached = true;
    return ForwardForOutcome(context, Remote().detachRequest());
  }

  kj::Promise<void> end(EndContext context) override {
    SetOutcome(MakeError(ErrorId::kUnsupported, "the trainer's end is what its socket says"),
               context.getResults().initOutcome());
    return kj::READY_NOW;
  }

 private:
  schema::Session::Client& Remote() { return KJ_ASSERT_NONNULL(state_->remote); }
  bool is_synced() const { return state_->is_shared && state_->has_rank; }

  int FdOf(schema::Session::Kind kind) const {
    switch (kind) {
      case schema::Session::Kind::WEIGHTS:
        return state_->weights.get();
      case schema::Session::Kind::GRAD_ARENA:
        return state_->grad_arena->fd();
      case schema::Session::Kind::RING:
        return state_->ring->fd();
      case schema::Session::Kind::COMMAND_DOORBELL:
        return state_->command_doorbell.get();
      case schema::Session::Kind::COMPLETION_DOORBELL:
        return state_->completion_doorbell.waiter.get();
      case schema::Session::Kind::EXTRA_STATE:
        return state_->extra_state.get();
    }
    return -1;
  }

  template <typename Context>
  kj::Promise<void> Refuse(Context context) {
    SetOutcome(state_->reason, context.getResults().initOutcome());
    return kj::READY_NOW;
  }

  // Waits until all weights have arrived. If the session ends first, the outcome says so.
  template <typename Context>
  kj::Promise<void> Synced(Context context) {
    auto paf = kj::newPromiseAndFulfiller<void>();
    auto fulfiller = std::make_shared<kj::Own<kj::PromiseFulfiller<void>>>(kj::mv(paf.fulfiller));
    waiting_.push_back(fulfiller);
    // A fulfiller of kj is used on this thread alone.
    agent_.data->Post([thread = agent_.data.get(), number = state_->number,
                       &control = agent_.control, weak = std::weak_ptr(fulfiller)] {
      auto* const session = static_cast<AgentSession*>(thread->Find(number));
      if (session == nullptr) return;
      session->RequestSync([&control, weak] {
        FOREBAY_CHECK(control.Push([weak] {
          if (const auto here = weak.lock()) (*here)->fulfill();
        }));
      });
    });
    return kj::mv(paf.promise).exclusiveJoin(Ended()).then([this, context]() mutable {
      std::erase_if(waiting_, [](const auto& one) { return !(*one)->isWaiting(); });
      if (!state_->reason.ok()) {
        SetOutcome(state_->reason, context.getResults().initOutcome());
      }
    });
  }

  kj::Promise<void> Ended() {
    if (!state_->reason.ok()) return kj::READY_NOW;
    return agent_.io.provider->getTimer().afterDelay(100 * kj::MILLISECONDS).then([this] {
      return Ended();
    });
  }

  Agent& agent_;
  std::shared_ptr<AgentSessionState> state_;
  std::vector<std::shared_ptr<kj::Own<kj::PromiseFulfiller<void>>>> waiting_;
};

class AgentNode final : public schema::Node::Server {
 public:
  explicit AgentNode(Agent& agent) : agent_(agent) {}

  kj::Promise<void> hello(HelloContext context) override {
    context.allowCancellation();
    const uint32_t version = context.getParams().getProtocolVersion();
    if (version != protocol::kProtocolVersion) {
      SetOutcome(MakeError(ErrorId::kProtocol,
                           absl::StrCat("the client speaks protocol ", version,
                                        ", this forebay-gateway ", protocol::kProtocolVersion),
                           "use client and forebay-gateway of one release"),
                 context.getResults().initOutcome());
      return kj::READY_NOW;
    }
    return agent_.Connect().then([context](const absl::Status& status) mutable {
      auto results = context.getResults();
      SetOutcome(status, results.initOutcome());
      results.initInfo().setProtocolVersion(protocol::kProtocolVersion);
    });
  }

  kj::Promise<void> admin(AdminContext context) override {
    context.allowCancellation();
    KJ_IF_MAYBE (node, agent_.node) {
      return node->adminRequest().send().then([context](auto&& answer) mutable {
        auto results = context.getResults();
        results.setOutcome(answer.getOutcome());
        if (answer.hasAdmin()) results.setAdmin(answer.getAdmin());
      });
    }
    return Refuse(context, NotConnected());
  }

  kj::Promise<void> attach(AttachContext context) override {
    context.allowCancellation();
    if (agent_.node == nullptr) return Refuse(context, NotConnected());
    if (!agent_.reason.ok()) return Refuse(context, agent_.reason);
    auto layout = context.getParams().getLayout();
    return layout.getFd().then([this, context, layout](kj::Maybe<int> fd) mutable {
      KJ_IF_MAYBE (layout_fd, fd) {
        return AttachWith(context, *layout_fd);
      }
      return Refuse(context, MakeError(ErrorId::kProtocol, "attach came without the layout"));
    });
  }

 private:
  struct Attaching {
    std::vector<std::byte> encoded;
    std::shared_ptr<const protocol::Layout> layout;
  };

  static absl::Status NotConnected() {
    return MakeError(ErrorId::kProtocol, "the first call of a connection is hello");
  }

  template <typename Context>
  static kj::Promise<void> Refuse(Context context, const absl::Status& status) {
    SetOutcome(status, context.getResults().initOutcome());
    return kj::READY_NOW;
  }

  kj::Promise<void> AttachWith(AttachContext context, int layout_fd) {
    auto attaching = ReadLayout(layout_fd, context.getParams().getRequest().getLayoutBytes());
    if (!attaching.ok()) return Refuse(context, attaching.status());
    const absl::Status started = agent_.StartData();
    if (!started.ok()) return Refuse(context, started);
    auto shared = std::make_shared<const Attaching>(*std::move(attaching));
    return SendLayout(shared, 0).then([this, context, shared](const absl::Status& sent) mutable {
      if (!sent.ok()) return Refuse(context, sent);
      auto request = KJ_ASSERT_NONNULL(agent_.node).attachRequest();
      request.setRequest(context.getParams().getRequest());
      // The daemon's node takes no memory for activations: they stay on the trainer's node.
      request.getRequest().setActivationBytes(0);
      request.setWorker(DataOf(agent_.data->address()));
      return request.send().then([this, context, shared](auto&& response) mutable {
        absl::Status status = protocol::StatusOf(response.getOutcome());
        if (status.ok()) {
          status = Begin(context, *shared, response.getReply(), response.getTerms(),
                         response.getSession());
        }
        if (!status.ok()) SetOutcome(status, context.getResults().initOutcome());
      });
    });
  }

  static absl::StatusOr<Attaching> ReadLayout(int fd, uint64_t bytes) {
    if (bytes == 0 || bytes > protocol::kLayoutBytesMax) {
      return MakeError(ErrorId::kLayout, absl::StrCat("a layout of ", bytes, " bytes (1 to ",
                                                      protocol::kLayoutBytesMax, ")"));
    }
    Attaching attaching;
    attaching.encoded.resize(bytes);
    if (protocol::ReadFromStart(fd, attaching.encoded) != static_cast<int64_t>(bytes)) {
      return MakeError(ErrorId::kProtocol, "the layout's memfd is shorter than the layout");
    }
    ASSIGN_OR_RETURN(protocol::LayoutSpec spec, protocol::DecodeLayout(attaching.encoded));
    ASSIGN_OR_RETURN(protocol::Layout layout, protocol::Layout::Create(std::move(spec)));
    attaching.layout = std::make_shared<const protocol::Layout>(std::move(layout));
    return attaching;
  }

  // Sends the layout from `begin` on, piece by piece.
  kj::Promise<absl::Status> SendLayout(const std::shared_ptr<const Attaching>& attaching,
                                       size_t begin) {
    if (begin >= attaching->encoded.size()) return absl::Status();
    const std::span<const std::byte> rest = std::span(attaching->encoded).subspan(begin);
    const size_t bytes = std::min(rest.size(), kLayoutPieceBytes);
    auto request = KJ_ASSERT_NONNULL(agent_.node).layoutRequest();
    request.setBytes(DataOf(rest.first(bytes)));
    return request.send().then(
        [this, attaching, begin, bytes](auto&& response) -> kj::Promise<absl::Status> {
          const absl::Status status = protocol::StatusOf(response.getOutcome());
          if (!status.ok()) return status;
          return SendLayout(attaching, begin + bytes);
        });
  }

  absl::Status Begin(AttachContext context, const Attaching& attaching,
                     schema::AttachReply::Reader reply, schema::RemoteTerms::Reader terms,
                     schema::Session::Client remote) {
    const schema::AttachRequest::Reader request = context.getParams().getRequest();
    const std::vector<std::byte> secret = BytesOf(terms.getSecret());
    SessionKey key{.number = terms.getSession()};
    const uint64_t step_end = reply.getStepRegionOffset() + reply.getStepRegionBytes();
    if (secret.size() != key.secret.size() || step_end > reply.getGradArenaBytes()) {
      return MakeError(ErrorId::kProtocol, "the gateway's terms of the session are impossible");
    }
    std::copy(secret.begin(), secret.end(), key.secret.begin());

    auto state = std::make_shared<AgentSessionState>();
    state->remote = kj::mv(remote);
    state->number = key.number;
    state->is_shared = attaching.layout->is_shared();
    state->has_rank = !request.getReader();
    state->is_back = request.getReattach();
    AgentSessionOptions options;
    options.has_rank = state->has_rank;
    options.daemon_arena_bytes = step_end;
    options.step_region = {.offset_bytes = reply.getStepRegionOffset(),
                           .size_bytes = reply.getStepRegionBytes()};
    options.layout = attaching.layout;
    options.weights_address = terms.getWeightsAddress();
    const uint64_t grad_bytes = reply.getGradArenaBytes() + request.getActivationBytes();
    ASSIGN_OR_RETURN(options.weights, MakeOrReuse(agent_.options.weights, "forebay-weights",
                                                  reply.getWeightsBytes(), request.getReattach()));
    ASSIGN_OR_RETURN(options.grad_arena, MakeOrReuse(agent_.options.grad_arena, "forebay-grad",
                                                     grad_bytes, request.getReattach()));
    ASSIGN_OR_RETURN(state->ring,
                     SharedMemory::Create("forebay-ring", sizeof(protocol::RingMemory)));
    state->grad_arena = options.grad_arena;
    ASSIGN_OR_RETURN(state->weights, WeightsFd(*options.weights, request.getWritableWeights()));
    ASSIGN_OR_RETURN(state->command_doorbell, protocol::MakeDoorbell());
    ASSIGN_OR_RETURN(state->completion_doorbell, protocol::MakeSocketDoorbell());
    if (terms.getExtraState().size() > 0) {
      state->extra_state =
          protocol::MakeSealedMemfd("forebay-extra", BytesOf(terms.getExtraState()));
    }
    auto* const ring = reinterpret_cast<protocol::RingMemory*>(state->ring->bytes().data());
    protocol::FormatRing(*ring);
    options.channel = protocol::MakeRingServerChannel(
        {.ring = ring,
         .command_doorbell_fd = state->command_doorbell.get(),
         .completion_doorbell_fd = state->completion_doorbell.ringer.get()});
    options.ring = state;
    DataThread& thread = *agent_.data;
    const std::vector<std::byte> weights_key = BytesOf(terms.getWeightsKey());
    const absl::Status begun = thread.Run([&]() -> absl::Status {
      ASSIGN_OR_RETURN(auto link,
                       RemoteLink::Create(thread, {.key = key,
                                                   .peer_address = BytesOf(terms.getWorker()),
                                                   .peer = absl::StrCat("the gateway at ucx://",
                                                                        agent_.options.address),
                                                   .keepalive = agent_.keepalive,
                                                   .on_end = OnEnd(state)}));
      if (weights_key.empty()) {
        options.weights_address = 0;
      } else {
        RETURN_IF_ERROR(link->endpoint().SetRemoteMemory(weights_key));
      }
      thread.Add(key, std::make_unique<AgentSession>(std::move(link), std::move(options)));
      return absl::OkStatus();
    });
    RETURN_IF_ERROR(begun);
    agent_.sessions.push_back(state);
    auto results = context.getResults();
    results.initOutcome();
    results.setReply(reply);
    results.getReply().setGradArenaBytes(grad_bytes);
    results.getReply().setOutlivesDaemon(true);  // the agent is this session's daemon
    results.setSession(kj::heap<AgentSessionServer>(agent_, std::move(state)));
    return absl::OkStatus();
  }

  // `before`: arena of a session that is continued, which the trainer has mapped.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> MakeOrReuse(const UniqueFd& before,
                                                                   const char* name,
                                                                   uint64_t size_bytes,
                                                                   bool is_back) {
    if (!is_back) return SharedMemory::Create(name, size_bytes);
    UniqueFd fd(::open(absl::StrCat("/proc/self/fd/", before.get()).c_str(), O_RDWR | O_CLOEXEC));
    if (fd.valid()) return SharedMemory::Map(std::move(fd), size_bytes, Access::kReadWrite);
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a rank comes back without its arena ", name));
  }

  // Returns a new descriptor of the weights for the trainer. The descriptor is read-only unless `is_writable`, as a daemon's
  // descriptor is.
  static absl::StatusOr<UniqueFd> WeightsFd(const SharedMemory& weights, bool is_writable) {
    UniqueFd fd = is_writable
                      ? protocol::DuplicateFd(weights.fd())
                      : UniqueFd(::open(absl::StrCat("/proc/self/fd/", weights.fd()).c_str(),
                                        O_RDONLY | O_CLOEXEC));
    if (fd.valid()) return fd;
    return MakeError(ErrorId::kLimit, protocol::ErrnoText("open the weights again", errno));
  }

  std::function<void(const absl::Status&)> OnEnd(const std::shared_ptr<AgentSessionState>& state) {
    return [this, weak = std::weak_ptr(state)](const absl::Status& reason) {
      FOREBAY_CHECK(agent_.control.Push([this, weak, why = protocol::Unshared(reason)] {
        if (const auto here = weak.lock()) agent_.EndSession(*here, why);
      }));
    };
  }

  Agent& agent_;
};

}  // namespace

absl::Status ServeAgent(AgentOptions options) {
  ASSIGN_OR_RETURN(auto control, ControlQueue::Create(kControlCallsMax));
  const auto exception = kj::runCatchingExceptions([&] {
    kj::AsyncIoContext io = kj::setupAsyncIo();
    ControlQueueDrain drain(io.unixEventPort, *control);
    Agent agent(io, options, *control);
    auto stream = io.lowLevelProvider->wrapUnixSocketFd(options.trainer.get(),
                                                        kj::LowLevelAsyncIoProvider::Flags(0));
    capnp::TwoPartyVatNetwork network(*stream, protocol::kFdsPerMessageMax,
                                      capnp::rpc::twoparty::Side::SERVER, protocol::AnswerLimits());
    auto serving = kj::heap(capnp::makeRpcServer(network, kj::heap<AgentNode>(agent)));
    // The promise has an error if the trainer was killed before it had read all messages.
    kj::Promise<void> over = network.onDisconnect().then([] {}, [](kj::Exception&&) {});
    kj::Own<kj::UnixEventPort::FdObserver> observer;
    if (options.lifetime.valid()) {
      observer = kj::heap<kj::UnixEventPort::FdObserver>(
          io.unixEventPort, options.lifetime.get(), kj::UnixEventPort::FdObserver::OBSERVE_READ);
      over = over.exclusiveJoin(observer->whenBecomesReadable());
    }
    over.wait(io.waitScope);
    serving = nullptr;
    agent.LeaveAll();  // ends sessions that have not detached
    agent.OnEndingsHeard().wait(io.waitScope);
  });
  KJ_IF_MAYBE (e, exception) {
    return MakeError(ErrorId::kInternal, absl::StrCat("agent: ", e->getDescription().cStr()));
  }
  return absl::OkStatus();
}

}  // namespace forebay::gateway
