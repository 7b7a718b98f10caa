// SPDX-License-Identifier: Apache-2.0
#include "tests/support/node_harness.h"

#include <algorithm>
#include <set>
#include <utility>
#include <variant>

#include "cpu_adam/step_scalars.h"
#include "daemon/core/node/killed_jobs.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::testing {

// NOLINTNEXTLINE(google-build-using-namespace): events and actions
using namespace daemon;
using protocol::ErrorId;
using protocol::Op;

namespace {

constexpr protocol::HyperParams kHyper{
    .lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};

}  // namespace

nvme::SlotMap SwapPaths(const std::vector<uint64_t>& path_bytes) {
  std::vector<nvme::PathSpace> spaces;
  for (const uint64_t bytes : path_bytes) spaces.push_back({.begin_bytes = 0, .end_bytes = bytes});
  return nvme::SlotMap(spaces);
}

NodeState::Options RoomyOptions() {
  return {.dram_limit_bytes = uint64_t{1} << 30,
          .node_bytes = 4096,
          .staging_slots = 0,
          .staging_slot_bytes = 0,
          .block_elems = 64,
          .workers = 2};
}

std::optional<JobView> NodeHarness::FindJob(const std::string& name) const {
  for (const JobView& job : state_.Jobs()) {
    if (job.name == name) return job;
  }
  return std::nullopt;
}

std::unique_ptr<NodeHarness> NodeHarness::Restart(const NodeHarness& before,
                                                  NodeState::Options options) {
  return Restart(before.model_.Restarted(), before.world_size_, std::move(options));
}

std::unique_ptr<NodeHarness> NodeHarness::Restart(NodeModel left, uint32_t world_size,
                                                  NodeState::Options options) {
  options.recovered = left.durable();
  for (const auto& job : options.recovered.jobs) {
    for (const nvme::Slot& slot : job->Slots()) FOREBAY_CHECK(options.swap.Reserve(slot));
  }
  return std::make_unique<NodeHarness>(options, world_size, std::move(left));
}

std::unique_ptr<NodeHarness> NodeHarness::AfterStop(NodeHarness& before,
                                                    NodeState::Options options) {
  FOREBAY_CHECK(before.Logged<JobsStopped>().size() == 1);
  before.model_.CheckStopped();
  return Continue(before, std::move(options));
}

std::unique_ptr<NodeHarness> NodeHarness::AfterKill(NodeHarness& before,
                                                    NodeState::Options options) {
  std::unique_ptr<NodeHarness> next = Continue(before, std::move(options));
  if (next != nullptr) next->Send(daemon::UpdatesResumed{});
  return next;
}

std::unique_ptr<NodeHarness> NodeHarness::Continue(NodeHarness& before,
                                                   NodeState::Options options) {
  options.recovered = before.model_.durable();
  for (const auto& job : options.recovered.jobs) {
    for (const nvme::Slot& slot : job->Slots()) FOREBAY_CHECK(options.swap.Reserve(slot));
  }
  std::vector<DurableJob> jobs = before.records_.Read();
  for (DurableJob& job : jobs) FOREBAY_CHECK(daemon::ReserveKilled(job, options).ok());
  if (jobs.empty()) return nullptr;
  daemon::AddKilled(std::move(jobs), options);
  options.recovered.last_lease = uint64_t{1} << 40;
  NodeModel left = before.model_.Killed(options.recovered);
  auto next = std::make_unique<NodeHarness>(options, before.world_size_, std::move(left));
  next->records_ = std::move(before.records_);
  return next;
}

void NodeHarness::Send(const Event& event) {
  std::vector<Event> queue{event};
  for (size_t i = 0; i < queue.size(); ++i) {
    std::vector<Action> actions;
    state_.Handle(Event(queue[i]), actions);
    state_.CheckInvariants();
    for (const Action& action : actions) {
      log_.push_back(action);
      Observe(action);
      records_.Execute(action);
      if (const auto* copy = std::get_if<CopyStepRequest>(&action)) {
        StepRequestCopied copied = override_ ? *override_ : step_requests_.at(copy->tag).copied;
        override_.reset();
        copied.session = copy->session;
        copied.tag = copy->tag;
        queue.push_back(copied);
      }
      if (const auto* copy = std::get_if<daemon::CopySummary>(&action)) {
        daemon::SummaryCopied copied{.session = copy->session, .tag = copy->tag, .bytes = {}};
        copied.bytes.resize(copy->bytes);
        protocol::EncodeStepSummary(decisions_.at(copy->tag), copied.bytes);
        queue.push_back(copied);
      }
      if (const auto* written = std::get_if<daemon::WriteSummary>(&action)) {
        const uint64_t params = InfoOf(written->session).layout->params().size();
        summaries_[written->session] = *protocol::DecodeStepSummary(written->bytes, params);
      }
      if (const auto* freed = std::get_if<FreeJob>(&action)) {
        queue.push_back(JobFreed{.job = freed->job, .weights_in_use = weights_in_use_});
      }
    }
  }
}

void NodeHarness::Observe(const Action& action) {
  if (const auto* attach = std::get_if<AnswerAttach>(&action)) {
    attached_.insert_or_assign(attach->session, *attach);
    if (attach->status.ok()) model_.BindSession(attach->session, attach->job);
  } else if (const auto* close = std::get_if<CloseSession>(&action)) {
    closed_.emplace(close->session, close->reason);
  } else if (const auto* memory = std::get_if<CreateJobMemory>(&action)) {
    for (const JobView& job : state_.Jobs()) {
      if (job.id != memory->job) continue;
      model_.AddJob(
          job.id, job.layout,
          job.sum_frames_bytes > 0 ? NodeModel::SumsAre::kPaged : NodeModel::SumsAre::kInPlace);
    }
  } else if (const auto* answer = std::get_if<AnswerCommand>(&action)) {
    FOREBAY_CHECK(answers_.emplace(answer->completion.tag, *answer).second);  // exactly once
    FOREBAY_CHECK(!away_.contains(answer->session));
    unheard_[answer->session].push_back(answer->completion.tag);
    FOREBAY_CHECK(answer->completion.error ==
                  static_cast<uint32_t>(protocol::IdOf(answer->status)));
    const auto fetch = fetches_.find(answer->completion.tag);
    if (fetch != fetches_.end() && answer->status.ok()) {
      model_.CheckFetched(answer->session, fetch->second, answer->completion);
    }
    const auto gradient = gradients_.find(answer->completion.tag);
    const auto step = step_requests_.find(answer->completion.tag);
    if (step != step_requests_.end() && answer->completion.op == static_cast<uint16_t>(Op::kStep)) {
      const ErrorId id = protocol::IdOf(answer->status);
      const bool anew = id == ErrorId::kNonfinite || id == ErrorId::kGradDropped;
      const bool done = id == ErrorId::kNone || id == ErrorId::kOverflow;
      if (anew || done) SetAttempt(step->second.session, answer->completion.attempt);
    }
    if (gradient != gradients_.end()) {
      model_.DropGradient(gradient->second.session, gradient->second.offset);
      if (unheard_max_ == 0) {
        InfoOf(gradient->second.session).unanswered.erase(gradient->second.offset);
      }
    }
  }
  model_.Execute(action);
}

void NodeHarness::RunTasks() {
  while (!model_.running().empty()) Finish(model_.running().begin()->first);
}

void NodeHarness::Finish(TaskId task, const absl::Status& status) {
  Send(model_.Finish(task, status));
}

AttachRequested RequestOf(const std::shared_ptr<const protocol::Layout>& layout,
                          uint32_t world_size) {
  const AttachRequest request;
  return {.uid = request.uid,
          .job = request.job,
          .session_request = {.world_size = world_size,
                              .grad_arena_bytes = 4 * layout->largest_gradient_bytes(),
                              .extra_state_bytes = request.extra_state_bytes},
          .layout = layout};
}

uint64_t NodeHarness::RequestAttach(std::shared_ptr<const protocol::Layout> layout,
                                    const AttachRequest& request) {
  const uint64_t session = ++last_session_;
  const uint64_t default_bytes =
      request.reader ? protocol::kPageBytes : 4 * layout->largest_gradient_bytes();
  const uint64_t grad_bytes =
      request.grad_arena_bytes != 0 ? request.grad_arena_bytes : default_bytes;
  SessionInfo& info = sessions_[session];
  info.rank = request.rank;
  info.layout = layout;
  info.grad_arena_bytes = grad_bytes;
  info.presence.assign(protocol::PresenceWords(layout->params().size()), 0);
  Send(AttachRequested{
      .session = session,
      .uid = request.uid,
      .job = request.job,
      .reader = request.reader,
      .rank = request.rank,
      .session_request = {.world_size = request.world_size != 0 ? request.world_size : world_size_,
                          .world_ranks = request.world_ranks,
                          .grad_arena_bytes = grad_bytes,
                          .extra_state_bytes = request.reader ? 0 : request.extra_state_bytes,
                          .accumulate = request.accumulate,
                          .early_updates = request.early_updates},
      .durability = request.durability,
      .run = request.run,
      .resume = request.resume,
      .reattach = request.reattach,
      .is_left_behind = request.is_left_behind,
      .rival_pid = request.rival_pid,
      .held_leases = request.held_leases,
      .layout = std::move(layout)});
  return session;
}

uint64_t NodeHarness::AttachReader(const std::shared_ptr<const protocol::Layout>& layout) {
  return Attach(layout, {.reader = true});
}

uint64_t NodeHarness::AttachOnly(const std::shared_ptr<const protocol::Layout>& layout,
                                 const AttachRequest& request) {
  const uint64_t session = RequestAttach(layout, request);
  RunTasks();
  Send(SessionMapped{.session = session});
  const AnswerAttach* answer = attached(session);
  if (answer != nullptr && answer->status.ok()) SetAttempt(session, answer->attempt);
  return session;
}

uint64_t NodeHarness::Attach(const std::shared_ptr<const protocol::Layout>& layout,
                             const AttachRequest& request) {
  const uint64_t session = AttachOnly(layout, request);
  const AnswerAttach* answer = attached(session);
  if (answer == nullptr || !answer->status.ok() || !answer->writes_initial) return session;
  for (uint32_t partition = 0; partition < layout->partitions().size(); ++partition) {
    const bool writes =
        layout->is_shared() || layout->partitions()[partition].owner == request.rank;
    if (!writes) continue;
    WriteInitial(session, partition);
    RunTasks();
  }
  InitialDone(session);
  RunTasks();
  return session;
}

uint64_t NodeHarness::WriteInitial(uint64_t session, uint32_t partition) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kWriteInitial);
  command.partition = partition;
  command.length_bytes = InfoOf(session).layout->partition_bytes(partition);
  return Command(session, command);
}

uint64_t NodeHarness::InitialDone(uint64_t session) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kInitialDone);
  return Command(session, command);
}

const AnswerAttach* NodeHarness::attached(uint64_t session) const {
  const auto it = attached_.find(session);
  return it == attached_.end() ? nullptr : &it->second;
}

uint64_t NodeHarness::Command(uint64_t session, protocol::Command command) {
  command.tag = ++last_tag_;
  HearAllBut(session, unheard_max_);
  commands_[command.tag] = {.session = session, .command = command};
  Send(CommandArrived{.session = session, .command = command});
  return command.tag;
}

void NodeHarness::HearAllBut(uint64_t session, size_t answers) {
  std::deque<uint64_t>& unheard = unheard_[session];
  for (; unheard.size() > answers; unheard.pop_front()) {
    const auto gradient = gradients_.find(unheard.front());
    if (gradient != gradients_.end() && unheard_max_ > 0) {
      InfoOf(session).unanswered.erase(gradient->second.offset);
    }
  }
}

void NodeHarness::Hear() {
  for (const auto& [session, tags] : unheard_) HearAllBut(session, 0);
}

void NodeHarness::Disconnect(uint64_t session) {
  for (const uint64_t tag : unheard_[session]) {
    answers_.erase(tag);
    const auto gradient = gradients_.find(tag);
    if (gradient == gradients_.end()) continue;
    InfoOf(session).unanswered[gradient->second.offset] = gradient->second.end;
  }
  unheard_[session].clear();
  away_.insert(session);
  End(session, daemon::EndCause::kDisconnected);
}

bool NodeHarness::IsUnheard(uint64_t tag) const {
  return std::ranges::any_of(
      unheard_, [tag](const auto& of) { return std::ranges::count(of.second, tag) > 0; });
}

void NodeHarness::Reconnect(uint64_t session, std::vector<uint64_t> held_leases) {
  const std::set<uint64_t> held(held_leases.begin(), held_leases.end());
  attached_.erase(session);
  Send(daemon::SessionReconnected{
      .session = session, .held_leases = std::move(held_leases), .newest_tag = last_tag_});
  away_.erase(session);
  const AnswerAttach* const terms = attached(session);
  if (terms == nullptr || !terms->status.ok()) return;
  FOREBAY_CHECK(terms->leases == held.size());
  Send(SessionMapped{.session = session});
  for (const auto& [tag, sent] : commands_) {
    if (sent.session != session || answers_.contains(tag)) continue;
    if (sent.command.op != static_cast<uint16_t>(Op::kRelease) ||
        held.contains(sent.command.lease_id)) {
      Send(CommandArrived{.session = session, .command = sent.command});
      continue;
    }
    daemon::AnswerCommand given_back{.session = session, .completion = {}, .status = {}};
    given_back.completion.tag = tag;
    answers_.emplace(tag, given_back);  // the disconnection has ended the lease
  }
}

uint64_t NodeHarness::Fetch(uint64_t session, uint32_t partition) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kFetch);
  command.partition = partition;
  fetches_[last_tag_ + 1] = partition;
  return Command(session, command);
}

uint64_t NodeHarness::Release(uint64_t session, uint64_t lease) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kRelease);
  command.lease_id = lease;
  std::erase_if(unheard_[session], [&](uint64_t tag) {
    return fetches_.contains(tag) && answers_.at(tag).completion.lease_id == lease;
  });
  return Command(session, command);
}

void NodeHarness::ReleaseFetched(uint64_t session, uint64_t fetch_tag) {
  const daemon::AnswerCommand* fetched = answer(fetch_tag);
  FOREBAY_CHECK(fetched != nullptr && fetched->status.ok());
  FOREBAY_CHECK(ErrorOf(Release(session, fetched->completion.lease_id)) ==
                protocol::ErrorId::kNone);
}

// Lowest offset of free memory in the gradient arena, outside unanswered gradients. Returns nullopt if no gap is large enough;
// a client would wait.
std::optional<uint64_t> NodeHarness::FreeOffset(uint64_t session, uint64_t bytes) const {
  const SessionInfo& info = sessions_.at(session);
  bytes = protocol::RoundUp(bytes, protocol::kGradAlignBytes);
  uint64_t offset = 0;
  for (const auto& [begin, end] : info.unanswered) {
    if (offset + bytes <= begin) break;
    offset = end;
  }
  if (offset + bytes > info.grad_arena_bytes) return std::nullopt;
  return offset;
}

uint64_t NodeHarness::AllocateOffset(uint64_t session, uint64_t bytes) {
  std::optional<uint64_t> offset = FreeOffset(session, bytes);
  if (!offset) {
    HearAllBut(session, 0);
    offset = FreeOffset(session, bytes);
  }
  FOREBAY_CHECK(offset.has_value());
  InfoOf(session).unanswered[*offset] =
      *offset + protocol::RoundUp(bytes, protocol::kGradAlignBytes);
  return *offset;
}

void NodeHarness::SetPresent(uint64_t session, uint32_t param, bool present) {
  uint64_t& word = InfoOf(session).presence[param / 64];
  const uint64_t bit = uint64_t{1} << (param % 64);
  word = present ? word | bit : word & ~bit;
}

void NodeHarness::SetAttempt(uint64_t session, uint64_t attempt) {
  SessionInfo& info = InfoOf(session);
  info.attempt = attempt;
  info.pass = 0;
  info.presence.assign(info.presence.size(), 0);
}

uint64_t NodeHarness::Gradient(uint64_t session, uint32_t partition, uint64_t step, bool finite) {
  const uint64_t elems = InfoOf(session).layout->partitions()[partition].gradient_elems;
  return GradientRange(session, partition, 0, elems, step, finite);
}

uint64_t NodeHarness::GradientRange(uint64_t session, uint32_t partition, uint64_t begin,
                                    uint64_t end, uint64_t step, bool finite) {
  const SessionInfo& info = InfoOf(session);
  const protocol::Layout& layout = *info.layout;
  for (const protocol::BoxPlace& place : layout.boxes_of(partition)) {
    const bool wholly =
        begin <= place.partition_elem && place.partition_elem + place.box.elems() <= end;
    if (wholly && layout.params()[place.box.param].trainable) {
      SetPresent(session, place.box.param, true);
    }
  }
  const uint64_t width = protocol::SizeBytes(layout.grad_dtype());
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kGradReady);
  command.kind = info.pass;
  command.partition = partition;
  command.step = step;
  command.attempt = info.attempt;
  command.element_offset = begin;
  command.length_bytes = (end - begin) * width;
  command.arena_offset_bytes = AllocateOffset(session, command.length_bytes);
  model_.PutGradient(session, command.arena_offset_bytes,
                     {.session = session,
                      .rank = info.rank,
                      .partition = partition,
                      .begin = begin,
                      .end = end,
                      .step = step,
                      .attempt = info.attempt,
                      .pass = info.pass,
                      .finite = finite});
  gradients_[last_tag_ + 1] = {.session = session,
                               .offset = command.arena_offset_bytes,
                               .end = InfoOf(session).unanswered.at(command.arena_offset_bytes)};
  return Command(session, command);
}

uint64_t NodeHarness::Step(uint64_t session, uint64_t step, double lr, double max_grad_norm,
                           uint32_t extra_state_bytes) {
  StepRequestCopied copied;
  copied.request = {.step = step,
                    .param_groups = 1,
                    .extra_state_bytes = extra_state_bytes,
                    .max_grad_norm = max_grad_norm,
                    .grad_scale = grad_scale_};
  copied.hyper_params = {kHyper};
  copied.hyper_params[0].lr = lr;
  const std::vector<uint64_t>& presence = InfoOf(session).presence;
  copied.presence.assign(presence.begin(), presence.end());
  return SendStepRequest(session, Op::kStep, std::move(copied));
}

uint64_t NodeHarness::Announce(uint64_t session, uint64_t step, double lr) {
  StepRequestCopied copied;
  copied.request = {.step = step,
                    .param_groups = 1,
                    .extra_state_bytes = 0,
                    .max_grad_norm = 0,
                    .grad_scale = grad_scale_};
  copied.hyper_params = {kHyper};
  copied.hyper_params[0].lr = lr;
  copied.presence.resize(InfoOf(session).presence.size());
  return SendStepRequest(session, Op::kAnnounceStep, std::move(copied));
}

uint64_t NodeHarness::SendStepRequest(uint64_t session, Op op, StepRequestCopied copied) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(op);
  if (op == Op::kStep) command.kind = static_cast<uint16_t>(answered_when_);
  command.step = copied.request.step;
  const AnswerAttach* attach = attached(session);
  command.arena_offset_bytes = attach != nullptr ? attach->step_region_offset : 0;
  command.attempt = InfoOf(session).attempt;
  command.length_bytes = sizeof(protocol::StepRequest) + sizeof(protocol::HyperParams) +
                         copied.presence.size() * sizeof(uint64_t) +
                         copied.request.extra_state_bytes;
  step_requests_[last_tag_ + 1] = {.session = session, .copied = std::move(copied)};
  return Command(session, command);
}

std::vector<ErrorId> NodeHarness::StepAll(const std::vector<uint64_t>& sessions, uint64_t step) {
  std::vector<uint64_t> tags;
  for (const uint64_t session : sessions) tags.push_back(Step(session, step));
  RunTasks();
  std::vector<ErrorId> errors;
  for (const uint64_t tag : tags) errors.push_back(ErrorOf(tag));
  return errors;
}

uint64_t NodeHarness::UpdateCount(const UpdateSegment& segment) {
  for (uint64_t t = 1; t < 10; ++t) {
    const auto scalars = cpu_adam::MakeStepScalars(protocol::Optimizer::kAdamW, kHyper, t, 1);
    const bool same = scalars.step_size == segment.scalars.step_size &&
                      scalars.inv_sqrt_bias2 == segment.scalars.inv_sqrt_bias2;
    if (same) return t;
  }
  return 0;
}

uint64_t NodeHarness::GradNorm(uint64_t session, uint32_t param) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kGradNorm);
  command.partition = param;
  command.attempt = InfoOf(session).attempt;
  return Command(session, command);
}

uint64_t NodeHarness::WriteState(uint64_t session, uint32_t partition, uint64_t begin, uint64_t end,
                                 uint16_t state) {
  if (end == 0) end = InfoOf(session).layout->partitions()[partition].elems;
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kWriteState);
  command.kind = state;
  command.partition = partition;
  command.element_offset = begin;
  command.length_bytes = (end - begin) * sizeof(float);
  return Command(session, command);
}

uint64_t NodeHarness::WriteUpdates(uint64_t session, uint32_t param, uint64_t updates) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kWriteUpdates);
  command.partition = param;
  command.step = updates;
  return Command(session, command);
}

uint64_t NodeHarness::Decide(uint64_t session, const protocol::StepSummary& world) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kDecide);
  command.kind = static_cast<uint16_t>(answered_when_);
  command.step = world.head.step;
  command.attempt = InfoOf(session).attempt;
  decisions_[last_tag_ + 1] = world;
  return Command(session, command);
}

uint64_t NodeHarness::GoBack(uint64_t session, uint64_t step) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kGoBack);
  command.step = step;
  return Command(session, command);
}

uint64_t NodeHarness::ReadState(uint64_t session, uint32_t param, uint64_t first, uint64_t elems) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kReadState);
  command.kind = 1;  // exp_avg_sq
  command.partition = param;
  command.element_offset = first;
  command.length_bytes = elems * 4;
  return Command(session, command);
}

const AnswerCommand* NodeHarness::answer(uint64_t tag) const {
  const auto it = answers_.find(tag);
  return it == answers_.end() ? nullptr : &it->second;
}

protocol::ErrorId NodeHarness::ErrorOf(uint64_t tag) const {
  const AnswerCommand* found = answer(tag);
  return found == nullptr ? protocol::ErrorId::kTimeout : protocol::IdOf(found->status);
}

void NodeHarness::OverrideStepRequest(const protocol::StepRequest& request,
                                      const std::vector<protocol::HyperParams>& hyper_params) {
  override_ = StepRequestCopied{.request = request,
                                .hyper_params = {hyper_params.begin(), hyper_params.end()},
                                .presence = {0}};  // one word: no gradient in 64 parameters
}

}  // namespace forebay::testing
