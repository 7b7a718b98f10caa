// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/rpc_servers.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/control/scrub_message.h"
#include "daemon/control/status_message.h"
#include "protocol/descriptor.h"
#include "protocol/durability.h"
#include "protocol/error.h"
#include "protocol/layout_codec.h"
#include "protocol/os/check.h"
#include "protocol/os/memfd.h"
#include "protocol/os/status_macros.h"
#include "protocol/wire.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::SetOutcome;

absl::Status Overloaded() {
  return MakeError(ErrorId::kLimit,
                   absl::StrCat(kCallsWaitingMax, " calls wait for the daemon's loop"),
                   "wait, then retry");
}

absl::Status OtherVersion(uint32_t version) {
  std::string served = absl::StrCat(protocol::kProtocolVersion);
  if (protocol::kProtocolVersionBefore < protocol::kProtocolVersion) {
    absl::StrAppend(&served, " and ", protocol::kProtocolVersionBefore);
  }
  return MakeError(ErrorId::kProtocol,
                   absl::StrCat("the client speaks protocol ", version, ", this daemon ", served),
                   "use client and daemon of one release, or a client of the release before");
}

absl::Status HandshakeMissing() {
  return MakeError(ErrorId::kProtocol, "the first call of a connection is hello");
}

// Asks the loop: `ask(executor, answer)` calls `answer(value)` at once or later. The value is `refused` if the loop takes no
// more calls. Values come as kj::Own: within a kj promise g++ 12 believes other values uninitialized.
template <typename Value, typename Ask>
kj::Promise<kj::Own<Value>> AskLoop(ControlContext& context, Value refused, Ask ask) {
  if (context.waiters.size() >= kCallsWaitingMax) return kj::heap<Value>(std::move(refused));
  auto reply = context.Expect<Value>();
  LoopCall call = [ask = std::move(ask), answer = std::move(reply.answer)](
                      Executor& executor) mutable { ask(executor, std::move(answer)); };
  if (!context.inbox.PushBelow(kCallsWaitingMax, std::move(call))) {
    context.waiters.erase(reply.waiter);
    return kj::heap<Value>(std::move(refused));
  }
  return kj::mv(reply.promise);
}

// Asks the loop with a call whose result is its outcome alone.
template <typename CallContext, typename Ask>
kj::Promise<void> AskForOutcome(ControlContext& control, CallContext context, Ask ask) {
  return AskLoop<absl::Status>(control, Overloaded(), std::move(ask))
      .then([context](kj::Own<absl::Status> status) mutable {
        SetOutcome(*status, context.getResults().initOutcome());
      });
}

// Returns the whole text: a name is not cut at a zero byte.
std::string TextOf(capnp::Text::Reader text) { return {text.begin(), text.size()}; }

// Copies the layout's bytes. message_relay.h passes sealed memfds alone, so a read of `fd` cannot block
// the control thread.
absl::StatusOr<std::vector<std::byte>> ReadLayoutBytes(int fd, uint64_t bytes) {
  if (bytes == 0 || bytes > protocol::kLayoutBytesMax) {
    return MakeError(ErrorId::kLayout, absl::StrCat("a layout of ", bytes, " bytes (1 to ",
                                                    protocol::kLayoutBytesMax, ")"));
  }
  std::vector<std::byte> out(bytes);
  const int64_t got = protocol::ReadFromStart(fd, out);
  if (got != static_cast<int64_t>(bytes)) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("the layout's memfd has ", got, " of ", bytes, " bytes"));
  }
  return out;
}

absl::StatusOr<std::shared_ptr<const protocol::Layout>> ReadLayout(int fd, uint64_t bytes) {
  ASSIGN_OR_RETURN(const std::vector<std::byte> encoded, ReadLayoutBytes(fd, bytes));
  ASSIGN_OR_RETURN(protocol::LayoutSpec spec, protocol::DecodeLayout(encoded));
  ASSIGN_OR_RETURN(protocol::Layout layout, protocol::Layout::Create(std::move(spec)));
  return std::make_shared<const protocol::Layout>(std::move(layout));
}

int FdOf(const SessionFds& fds, schema::Session::Kind kind) {
  switch (kind) {
    case schema::Session::Kind::WEIGHTS:
      return fds.weights.get();
    case schema::Session::Kind::GRAD_ARENA:
      return fds.grad.get();
    case schema::Session::Kind::RING:
      return fds.ring.get();
    case schema::Session::Kind::COMMAND_DOORBELL:
      return fds.command_doorbell.get();
    case schema::Session::Kind::COMPLETION_DOORBELL:
      return fds.completion_doorbell.get();
    case schema::Session::Kind::EXTRA_STATE:
      return fds.extra_state.get();
  }
  return -1;
}

// Errors  E_OPTION; those of the layout.
absl::StatusOr<AttachRequested> RequestOf(schema::AttachRequest::Reader request,
                                          const Connection& connection, int layout_fd) {
  std::optional<protocol::Durability> durability;
  if (const std::string text = TextOf(request.getDurability()); !text.empty()) {
    ASSIGN_OR_RETURN(durability, protocol::ParseDurability(text));
    if (durability->level == protocol::DurabilityLevel::kMemory) {
      durability = connection.context->least_durability;
    }
  }
  ASSIGN_OR_RETURN(auto layout, ReadLayout(layout_fd, request.getLayoutBytes()));
  std::vector<uint64_t> held_leases;
  for (const uint64_t lease : request.getHeldLeases()) held_leases.push_back(lease);
  std::vector<std::string> exchanged;
  const bool is_back = request.getReattach() && !request.getReader();
  const auto answer = request.getExchanged();
  if (is_back && answer.size() > 0 && answer.size() != request.getWorldSize()) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("the answer of an exchange of ", answer.size(),
                                  " ranks; the job has ", request.getWorldSize()));
  }
  for (unsigned i = 0; is_back && i < answer.size(); ++i) {
    if (answer[i].size() > protocol::kExchangeBytesMax) {
      return MakeError(
          ErrorId::kProtocol,
          absl::StrCat("the answer of an exchange with ", answer[i].size(), " bytes of rank ", i,
                       " (at most ", protocol::kExchangeBytesMax, ")"));
    }
    exchanged.emplace_back(answer[i].begin(), answer[i].end());
  }
  return AttachRequested{.uid = connection.viewer.uid,
                         .job = TextOf(request.getJob()),
                         .reader = request.getReader(),
                         .rank = request.getRank(),
                         .session_request = {.world_size = request.getWorldSize(),
                                             .world_ranks = request.getWorldRanks(),
                                             .grad_arena_bytes = request.getGradArenaBytes(),
                                             .extra_state_bytes = request.getExtraStateBytes(),
                                             .activation_bytes = request.getActivationBytes(),
                                             .trace = request.getTrace(),
                                             .accumulate = request.getAccumulate(),
                                             .early_updates = request.getEarlyUpdates()},
                         .durability = durability,
                         .run = TextOf(request.getRun()),
                         .resume = request.getResume(),
                         .reattach = request.getReattach(),
                         .grad_arena_inode = request.getGradArena(),
                         .held_leases = std::move(held_leases),
                         .newest_tag = request.getNewestTag(),
                         .exchanges = request.getExchanges(),
                         .exchanged = std::move(exchanged),
                         .writable_weights = request.getWritableWeights(),
                         .layout = std::move(layout)};
}

void FillPlan(const JobPlan& plan, schema::JobPlan::Builder reply) {
  reply.setWeights(plan.weights);
  reply.setWeightsCache(plan.weights_cache);
  reply.setStates(plan.states);
  reply.setSums(plan.sums);
  reply.setExtraState(plan.extra_state);
  reply.setSessions(plan.sessions);
  reply.setTables(plan.tables);
  reply.setNode(plan.node);
  reply.setOthers(plan.others);
  reply.setLimit(plan.limit);
  reply.setMissing(plan.missing);
  reply.setWeightsOnSwap(plan.weights_on_swap);
  reply.setBlocks(plan.blocks);
  reply.setResidentBlocks(plan.resident_blocks);
  reply.setSwap(plan.swap);
  reply.setStepRead(plan.step_read);
  reply.setStepWritten(plan.step_written);
  reply.setDurableWritten(plan.durable_written);
  reply.setDurableEvery(plan.durable_every);
  reply.setAllInDram(plan.all_in_dram);
  reply.setNewWeights(plan.new_weights);
  reply.setGradientsOnSwap(plan.sums_on_swap);
  reply.setGradArena(plan.grad_arena);
  reply.setStepRegion(plan.step_region);
  reply.setActivations(plan.activations);
  reply.setTrace(plan.trace);
  reply.setRing(plan.ring);
  reply.setExtraStateCopy(plan.extra_state_copy);
  auto ranks = reply.initRanks(static_cast<unsigned>(plan.ranks.size()));
  for (unsigned i = 0; i < ranks.size(); ++i) {
    const RankPlan& rank = plan.ranks[i];
    ranks[i].setRank(rank.rank);
    ranks[i].setWeights(rank.weights);
    ranks[i].setWeightsCache(rank.weights_cache);
    ranks[i].setStates(rank.states);
    ranks[i].setSums(rank.sums);
    ranks[i].setWeightsOnSwap(rank.weights_on_swap);
    ranks[i].setStatesOnSwap(rank.states_on_swap);
    ranks[i].setLargestPartition(rank.largest_partition);
  }
}

void FillReply(const AnswerAttach& answer, SessionId session, schema::AttachReply::Builder reply) {
  reply.setJobId(answer.job);
  reply.setSessionId(session);
  reply.setCommittedStep(answer.committed_step);
  reply.setWritesInitial(answer.writes_initial);
  reply.setWeightsBytes(answer.weights_bytes);
  reply.setGradArenaBytes(answer.grad_arena_bytes);
  reply.setStepRegionOffset(answer.step_region_offset);
  reply.setStepRegionBytes(answer.step_region_bytes);
  reply.setExtraStateBytes(answer.extra_state_bytes);
  reply.setRank0ExtraStateBytes(answer.rank0_extra_state_bytes);
  reply.setAttempt(answer.attempt);
  reply.setTraceBytes(answer.trace_bytes);
  reply.setWeightsOnSwap(answer.weights_on_swap);
  reply.setOutlivesDaemon(answer.outlives_daemon);
  reply.setLeases(answer.leases);
  reply.setPreparedStep(answer.prepared_step);
  reply.setDurableStep(answer.durable_step);
  reply.setDurableBefore(answer.durable_before);
  reply.setSummary(
      {reinterpret_cast<const kj::byte*>(answer.summary.data()), answer.summary.size()});
  auto trace = reply.initTrace(static_cast<unsigned>(answer.trace.size()));
  for (unsigned i = 0; i < trace.size(); ++i) trace.set(i, answer.trace[i]);
}

// ----------------------------------------------------------------------------------------- Session

class SessionServer final : public schema::Session::Server {
 public:
  explicit SessionServer(std::shared_ptr<SessionHandle> handle) : handle_(std::move(handle)) {}
  ~SessionServer() { handle_->End(EndCause::kDisconnected); }

  kj::Promise<void> descriptor(DescriptorContext context) override {
    Count();
    auto results = context.getResults();
    KJ_IF_MAYBE (descriptor, handle_->Descriptor(context.getParams().getKind())) {
      results.initOutcome();
      results.setDescriptor(*descriptor);
      return kj::READY_NOW;
    }
    SetOutcome(WhyNoDescriptor(context.getParams().getKind()), results.initOutcome());
    return kj::READY_NOW;
  }

  kj::Promise<void> mapped(MappedContext context) override {
    context.allowCancellation();
    Count();
    return AskForOutcome(handle_->context, context,
                         [id = handle_->id()](Executor& executor, auto answer) mutable {
                           answer(executor.Mapped(id));
                         });
  }

  kj::Promise<void> explain(ExplainContext context) override {
    context.allowCancellation();
    Count();
    return AskForOutcome(
        handle_->context, context,
        [id = handle_->id(), tag = context.getParams().getTag()](
            Executor& executor, auto answer) mutable { answer(executor.Explain(id, tag)); });
  }

  kj::Promise<void> exchange(ExchangeContext context) override {
    context.allowCancellation();
    Count();
    using Bytes = absl::StatusOr<std::vector<std::string>>;
    const auto given = context.getParams().getBytes();
    const uint64_t call = handle_->context.next_exchange++;
    return AskLoop<Bytes>(handle_->context, Bytes(Overloaded()),
                          [id = handle_->id(), call, number = context.getParams().getNumber(),
                           bytes = std::string(given.begin(), given.end())](Executor& executor,
                                                                            auto answer) mutable {
                            executor.Exchange(id, call, number, std::move(bytes),
                                              std::move(answer));
                          })
        .then([context](kj::Own<Bytes> all) mutable {
          auto results = context.getResults();
          SetOutcome(all->status(), results.initOutcome());
          if (!all->ok()) return;
          auto list = results.initAll(static_cast<unsigned>((*all)->size()));
          for (unsigned i = 0; i < list.size(); ++i) {
            const std::string& one = (**all)[i];
            list.set(i, {reinterpret_cast<const kj::byte*>(one.data()), one.size()});
          }
        })
        .attach(kj::defer([handle = handle_, call] {  // the client may have cancelled the call
          if (handle->ended()) return;                // the ControlContext may be destroyed
          (void)handle->context.inbox.PushBelow(
              kCallsWaitingMax,
              [id = handle->id(), call](Executor& executor) { executor.CancelExchange(id, call); });
        }));
  }

  kj::Promise<void> detach(DetachContext context) override {
    context.allowCancellation();
    Count();
    handle_->End(EndCause::kDetached);
    context.getResults().initOutcome();
    return closed_.addBranch();
  }

  kj::Promise<void> end(EndContext context) override {
    Count();
    handle_->End(EndCause::kLost);
    context.getResults().initOutcome();
    return kj::READY_NOW;
  }

  // `closed`: the loop has released the session.
  void SetClosed(kj::ForkedPromise<void> closed) { closed_ = kj::mv(closed); }

 private:
  absl::Status WhyNoDescriptor(schema::Session::Kind kind) const {
    if (handle_->ended() || !handle_->fds.ring.valid()) {
      return MakeError(ErrorId::kFenced, "the session is over", "attach again");
    }
    if (FdOf(handle_->fds, kind) >= 0) return NoDescriptor("copy a session's descriptor");
    return MakeError(ErrorId::kNotReady, "this session has no such descriptor");
  }

  void Count() { ++*handle_->rpc_calls; }

  std::shared_ptr<SessionHandle> handle_;
  kj::ForkedPromise<void> closed_ = nullptr;
};

// ------------------------------------------------------------------------------------------- Admin

class AdminServer final : public schema::Admin::Server {
 public:
  explicit AdminServer(std::shared_ptr<Connection> connection)
      : connection_(std::move(connection)) {}

  kj::Promise<void> status(StatusContext context) override {
    context.allowCancellation();
    return AskLoop<NodeSnapshot>(
               *connection_->context, NodeSnapshot{},
               [](Executor& executor, auto answer) mutable { answer(executor.Snapshot()); })
        .then([this, context](kj::Own<NodeSnapshot> snapshot) mutable {
          FillStatus(*snapshot, connection_->viewer, connection_->context->served_at,
                     context.getResults().initStatus());
        });
  }

  kj::Promise<void> trace(TraceContext context) override {
    context.allowCancellation();
    auto job = ParseJobName(TextOf(context.getParams().getJob()), connection_->viewer.uid,
                            connection_->viewer.others);
    using Events = absl::StatusOr<std::vector<ShownEvent>>;
    return AskLoop<Events>(*connection_->context, Events(Overloaded()),
                           [job = std::move(job)](Executor& executor, auto answer) mutable {
                             answer(job.ok() ? executor.Trace(*job) : Events(job.status()));
                           })
        .then([context](kj::Own<Events> events) mutable {
          auto results = context.getResults();
          SetOutcome(events->status(), results.initOutcome());
          if (!events->ok()) return;
          FillTrace(**events, results.initEvents(static_cast<unsigned>((*events)->size())));
        });
  }

  kj::Promise<void> plan(PlanContext context) override {
    context.allowCancellation();
    auto layout = context.getParams().getLayout();
    return layout.getFd().then([this, context, layout](kj::Maybe<int> fd) mutable {
      KJ_IF_MAYBE (layout_fd, fd) {
        return PlanWith(context, *layout_fd);
      }
      SetOutcome(MakeError(ErrorId::kProtocol, "plan came without the layout, a sealed memfd"),
                 context.getResults().initOutcome());
      return kj::Promise<void>(kj::READY_NOW);
    });
  }

  kj::Promise<void> planJob(PlanJobContext context) override {
    context.allowCancellation();
    const auto params = context.getParams();
    auto job =
        ParseJobName(TextOf(params.getJob()), connection_->viewer.uid, connection_->viewer.others);
    return AnswerPlan(context, [job = std::move(job),
                                limits = LimitsOf(params)](Executor& executor) {
      return job.ok() ? executor.PlanOfJob(*job, limits) : absl::StatusOr<JobPlan>(job.status());
    });
  }

  kj::Promise<void> scrub(ScrubContext context) override {
    context.allowCancellation();
    ControlContext& control = *connection_->context;
    ScrubRequest request{.number = control.next_scrub++,
                         .bytes_per_s = context.getParams().getBytesPerSecond()};
    if (connection_->viewer.others == OtherUsers::kRefused) request.uid = connection_->viewer.uid;
    using Report = absl::StatusOr<ScrubReport>;
    return AskLoop<Report>(control, Report(Overloaded()),
                           [request](Executor& executor, auto answer) mutable {
                             executor.Scrub(request, std::move(answer));
                           })
        .then([context](kj::Own<Report> report) mutable {
          auto results = context.getResults();
          SetOutcome(report->status(), results.initOutcome());
          if (report->ok()) FillScrubReport(**report, kAnswerLimits, results.initReport());
        })
        .attach(kj::defer([&control, number = request.number] {  // the client may have cancelled
          (void)control.inbox.PushBelow(
              kCallsWaitingMax, [number](Executor& executor) { executor.CancelScrub(number); });
        }));
  }

  kj::Promise<void> deleteJob(DeleteJobContext context) override {
    context.allowCancellation();
    return AskForOutcome(*connection_->context, context,
                         [job = TextOf(context.getParams().getJob()),
                          uid = connection_->viewer.uid](Executor& executor, auto answer) mutable {
                           executor.DeleteJob(std::move(job), uid, std::move(answer));
                         });
  }

 private:
  kj::Promise<void> PlanWith(PlanContext context, int layout_fd) {
    const auto params = context.getParams();
    auto request = RequestOf(params.getRequest(), *connection_, layout_fd);
    if (!request.ok()) {
      SetOutcome(request.status(), context.getResults().initOutcome());
      return kj::READY_NOW;
    }
    return AnswerPlan(context, [request = *std::move(request), limits = LimitsOf(params)](
                                   Executor& executor) { return executor.Plan(request, limits); });
  }

  // Returns limits of another node, if the request names any; otherwise the plan is for this node.
  static std::optional<NodeState::Limits> LimitsOf(const auto& params) {
    if (params.getLimitBytes() == 0) return std::nullopt;
    return NodeState::Limits{.dram_bytes = params.getLimitBytes(),
                             .swap_bytes = params.getSwapBytes()};
  }

  template <typename CallContext, typename MakePlan>
  kj::Promise<void> AnswerPlan(CallContext context, MakePlan make_plan) {
    using Plan = absl::StatusOr<JobPlan>;
    return AskLoop<Plan>(
               *connection_->context, Plan(Overloaded()),
               [make_plan = std::move(make_plan)](Executor& executor, auto answer) mutable {
                 answer(Plan(make_plan(executor)));
               })
        .then([context](kj::Own<Plan> plan) mutable {
          auto results = context.getResults();
          SetOutcome(plan->status(), results.initOutcome());
          if (plan->ok()) FillPlan(**plan, results.initPlan());
        });
  }

  std::shared_ptr<Connection> connection_;
};

// -------------------------------------------------------------------------------------------- Node

class NodeServer final : public schema::Node::Server {
 public:
  explicit NodeServer(std::shared_ptr<Connection> connection)
      : connection_(std::move(connection)) {}

  kj::Promise<void> hello(HelloContext context) override {
    const auto params = context.getParams();
    auto results = context.getResults();
    FillInfo(connection_->context->served_at.identity, results.initInfo());
    auto outcome = results.initOutcome();
    if (!protocol::IsServedVersion(params.getProtocolVersion())) {
      SetOutcome(OtherVersion(params.getProtocolVersion()), outcome);
      return kj::READY_NOW;
    }
    connection_->protocol_version = params.getProtocolVersion();
    if (params.getOnBehalfOf() >= 0) {
      const absl::Status status = ActAs(params.getOnBehalfOf());
      SetOutcome(status, outcome);
      if (!status.ok()) return kj::READY_NOW;
      connection_->session_wait = std::chrono::milliseconds(
          std::min(params.getSessionWaitMs(), protocol::kSessionWaitMsMax));
    }
    connection_->handshake_done = true;
    return kj::READY_NOW;
  }

  kj::Promise<void> attach(AttachContext context) override {
    context.allowCancellation();
    if (!connection_->handshake_done) return Refuse(context, HandshakeMissing());
    auto layout = context.getParams().getLayout();
    return layout.getFd().then([this, context, layout](kj::Maybe<int> fd) mutable {
      KJ_IF_MAYBE (layout_fd, fd) {
        return AttachWith(context, *layout_fd);
      }
      return Refuse(context,
                    MakeError(ErrorId::kProtocol, "attach came without the layout, a sealed memfd",
                              "the daemon may have no descriptor left: raise LimitNOFILE="));
    });
  }

  kj::Promise<void> admin(AdminContext context) override {
    auto results = context.getResults();
    if (!connection_->handshake_done) {
      SetOutcome(HandshakeMissing(), results.initOutcome());
      return kj::READY_NOW;
    }
    results.initOutcome();
    results.setAdmin(kj::heap<AdminServer>(connection_));
    return kj::READY_NOW;
  }

 private:
  static kj::Promise<void> Refuse(AttachContext context, const absl::Status& status) {
    SetOutcome(status, context.getResults().initOutcome());
    return kj::READY_NOW;
  }

  // Sets the user for whom the peer acts, for the rest of the connection.
  absl::Status ActAs(int64_t uid) {
    if (!connection_->may_act_for_others || connection_->handshake_done) {
      return MakeError(ErrorId::kPermission,
                       absl::StrCat("user ", connection_->viewer.uid, " acts for user ", uid),
                       "run forebay-gateway as the daemon's own user");
    }
    if (uid == 0 || uid >= UINT32_MAX) {
      return MakeError(ErrorId::kPermission, absl::StrCat("nobody acts for user ", uid),
                       "give the principal the uid of a user of its own");
    }
    connection_->viewer = {.uid = static_cast<uint32_t>(uid), .others = OtherUsers::kRefused};
    return absl::OkStatus();
  }

  kj::Promise<void> AttachWith(AttachContext context, int layout_fd) {
    auto request = RequestOf(context.getParams().getRequest(), *connection_, layout_fd);
    if (!request.ok()) return Refuse(context, request.status());
    // Checked here, after the last wait: a descriptor may have been promised and come late.
    if (connection_->context->sessions >= kSessionsMax) {
      return Refuse(context,
                    MakeError(ErrorId::kLimit, absl::StrCat(kSessionsMax, " sessions are open"),
                              "detach one"));
    }
    ControlContext& control = *connection_->context;
    auto handle = std::make_shared<SessionHandle>(control, control.next_session++);
    std::erase_if(connection_->sessions, [](const auto& weak) { return weak.expired(); });
    connection_->sessions.push_back(handle);
    request->session = handle->id();
    request->protocol_version = connection_->protocol_version;

    auto answered = control.Expect<AttachResult>();
    auto closed = control.Expect<absl::Status>();
    // The process of a client on another node is unknown: it may return on another connection.
    const bool is_waited_for = connection_->session_wait.count() > 0;
    LoopCall call = [request = *std::move(request), answer = std::move(answered.answer),
                     close = std::move(closed.answer), wait = connection_->session_wait,
                     process = is_waited_for ? protocol::UniqueFd()
                                             : protocol::DuplicateFd(connection_->pidfd)](
                        Executor& executor) mutable {
      executor.Attach(std::move(request),
                      {.answered = std::move(answer), .closed = std::move(close)},
                      std::move(process), wait);
    };
    if (!control.inbox.PushBelow(kCallsWaitingMax, std::move(call))) {
      handle->Forget();
      control.waiters.erase(answered.waiter);
      control.waiters.erase(closed.waiter);
      return Refuse(context, Overloaded());
    }
    auto when_closed = WatchClosed(handle, answered.waiter, kj::mv(closed.promise));
    return answered.promise.then([this, context, handle, when_closed = kj::mv(when_closed)](
                                     kj::Own<AttachResult> result) mutable {
      Answer(context, std::move(*result), std::move(handle), kj::mv(when_closed));
    });
  }

  // Releases the descriptors when the loop has released the session. A client that wrote an invalid ring loses its connection
  // too.
  kj::ForkedPromise<void> WatchClosed(const std::shared_ptr<SessionHandle>& handle,
                                      uint64_t answer_waiter,
                                      kj::Promise<kj::Own<absl::Status>> closed) {
    ++connection_->context->sessions;
    auto forked =
        closed
            .then([connection = connection_, context = connection_->context, answer_waiter,
                   weak = std::weak_ptr(handle)](kj::Own<absl::Status> reason) {
              --context->sessions;
              context->waiters.erase(answer_waiter);  // the session has ended before the answer
              if (const auto here = weak.lock()) {
                here->LetGo();
                here->Forget();  // the loop gets no more calls for the session
              }
              if (protocol::IdOf(*reason) == ErrorId::kRing) connection->close->fulfill();
            })
            .fork();
    connection_->context->tasks.add(forked.addBranch());
    return forked;
  }

  void Answer(AttachContext context, AttachResult result, std::shared_ptr<SessionHandle> handle,
              kj::ForkedPromise<void> when_closed) {
    auto results = context.getResults();
    SetOutcome(result.answer.status, results.initOutcome());
    if (!result.answer.status.ok()) return;
    handle->fds = std::move(result.fds);
    handle->rpc_calls = std::move(result.rpc_calls);
    ++*handle->rpc_calls;
    FillReply(result.answer, handle->id(), results.initReply());
    auto server = kj::heap<SessionServer>(std::move(handle));
    server->SetClosed(kj::mv(when_closed));
    results.setSession(kj::mv(server));
  }

  std::shared_ptr<Connection> connection_;
};

}  // namespace

SessionHandle::SessionHandle(ControlContext& shared, SessionId id) : context(shared), id_(id) {}

SessionHandle::~SessionHandle() { End(EndCause::kDisconnected); }

void SessionHandle::End(EndCause cause) {
  if (ended_) return;
  ended_ = true;
  LoopCall call = [id = id_, cause](Executor& executor) { executor.End(id, cause); };
  // Never full: kSessionsMax items are reserved.
  FOREBAY_CHECK(context.inbox.Push(std::move(call)));
}

kj::Maybe<schema::Descriptor::Client> SessionHandle::Descriptor(schema::Session::Kind kind) {
  if (const auto known = descriptors_.find(kind); known != descriptors_.end()) {
    return known->second;
  }
  protocol::UniqueFd copy = protocol::DuplicateFd(FdOf(fds, kind));
  if (!copy.valid()) return nullptr;
  return descriptors_.emplace(kind, protocol::MakeDescriptor(std::move(copy))).first->second;
}

void SessionHandle::LetGo() {
  fds = {};
  descriptors_.clear();
}

schema::Node::Client MakeNode(std::shared_ptr<Connection> connection) {
  return kj::heap<NodeServer>(std::move(connection));
}

}  // namespace forebay::daemon
