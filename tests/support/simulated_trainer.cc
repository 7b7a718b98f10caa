// SPDX-License-Identifier: Apache-2.0
#include "tests/support/simulated_trainer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::testing {

// NOLINTNEXTLINE(google-build-using-namespace): events and actions
using namespace daemon;
using protocol::ErrorId;
using protocol::Op;

SimulatedTrainer::SimulatedTrainer(std::string job, Rank rank,
                                   std::shared_ptr<const protocol::Layout> layout, Wires wires)
    : job_(std::move(job)),
      rank_(rank.rank),
      world_size_(rank.world_size),
      durability_(rank.durability),
      layout_(std::move(layout)),
      wires_(std::move(wires)),
      grad_arena_bytes_(2 * layout_->largest_piece_bytes()) {}

void SimulatedTrainer::Attach() {
  session_ = wires_.new_session();
  sessions_.insert(session_);
  phase_ = Phase::kAttaching;
  in_arena_.clear();
  leases_.clear();
  stepping_ = false;
  wires_.send(AttachRequested{.session = session_,
                              .uid = 1000,
                              .job = job_,
                              .rank = rank_,
                              .session_request = {.world_size = world_size_,
                                                  .grad_arena_bytes = grad_arena_bytes_,
                                                  .extra_state_bytes = 100,
                                                  .early_updates = true},
                              .durability = durability_,
                              .layout = layout_});
}

void SimulatedTrainer::Leave(EndCause cause) {
  phase_ = Phase::kOut;
  wires_.send(SessionEnded{.session = std::exchange(session_, 0), .cause = cause});
}

void SimulatedTrainer::BeginAttempt(uint64_t number) {
  attempt_ = number;
  planned_ = false;
  delivered_any_ = asked_ = false;
  present_.clear();
  to_deliver_.clear();
}

void SimulatedTrainer::OnAttach(const AnswerAttach& answer) {
  if (answer.session != session_) return;
  if (!answer.status.ok()) {
    ++errors_[static_cast<uint32_t>(protocol::IdOf(answer.status))];
    phase_ = Phase::kOut;
    session_ = 0;
    return;
  }
  attached_ = answer;
  committed_ = answer.committed_step;
  BeginAttempt(answer.attempt);
  initial_next_ = 0;
  phase_ = answer.writes_initial ? Phase::kInitial : Phase::kTraining;
}

void SimulatedTrainer::OnClosed(uint64_t session) {
  sessions_.erase(session);
  std::erase_if(sent_, [session](const auto& entry) { return entry.second.session == session; });
  if (session != session_) return;
  session_ = 0;
  phase_ = Phase::kOut;
}

void SimulatedTrainer::Send(uint64_t session, protocol::Command command, Sent sent) {
  command.tag = wires_.new_tag();
  sent.session = session;
  sent.attempt = attempt_;
  sent_.emplace(command.tag, sent);
  wires_.send(CommandArrived{.session = session, .command = command});
}

void SimulatedTrainer::Act(SimulationRandom& random, bool chaos) {
  if (chaos && random.OneIn(25)) {
    Misbehave(random);
    return;
  }
  switch (phase_) {
    case Phase::kOut:
      // A session without a detach ends with its process, some time later.
      if (!sessions_.empty() && random.OneIn(2)) {
        wires_.send(SessionEnded{.session = *sessions_.begin(), .cause = EndCause::kLost});
      }
      Attach();
      return;
    case Phase::kAttaching:
      return;
    case Phase::kInitial:
      WriteInitial();
      return;
    case Phase::kTraining:
      Train(random, chaos);
      return;
    case Phase::kLeaving:
      Leave(random.OneIn(2) ? EndCause::kDetached : EndCause::kLost);
      return;
  }
}

void SimulatedTrainer::Misbehave(SimulationRandom& random) {
  if (!sessions_.empty() && random.OneIn(3)) {  // may be a stale session
    auto it = sessions_.begin();
    std::advance(it, static_cast<int64_t>(random.Below(sessions_.size())));
    SendGarbage(random, *it);
    return;
  }
  if (phase_ == Phase::kOut) return;
  switch (random.Below(10)) {
    case 0:
      Leave(EndCause::kLost);
      return;
    case 1:
      Leave(EndCause::kDetached);
      return;
    case 2:
      if (random.OneIn(2)) Attach();  // while the old session is open
      return;
    default:
      SendGarbage(random, session_);
  }
}

void SimulatedTrainer::SendGarbage(SimulationRandom& random, uint64_t session) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(random.Below(9));
  command.kind = static_cast<uint16_t>(random.Below(4));
  command.partition = static_cast<uint32_t>(random.Below(layout_->groups().size() + 1));
  command.step = random.OneIn(2) ? random.Below(3) : committed_ + 2;
  const uint64_t wild[] = {0, 1, 64, 1 << 20, UINT64_MAX, UINT64_MAX - 63};
  command.arena_offset_bytes = wild[random.Below(6)];
  command.length_bytes = random.OneIn(2) ? wild[random.Below(6)] : 256;
  command.element_offset = wild[random.Below(6)];
  command.lease_id = random.Below(5);
  command.attempt = random.OneIn(4) ? wild[random.Below(6)] : attempt_;
  if (session == session_) {
    // Garbage on the current session must not happen to be a valid delivery or a valid step call.
    if (command.op == static_cast<uint16_t>(Op::kGradReady)) command.step = committed_ + 2;
    if (command.op == static_cast<uint16_t>(Op::kStep)) command.step = committed_ + 3;
    if (command.op == static_cast<uint16_t>(Op::kWriteInitial)) command.length_bytes = 7;
    if (command.op == static_cast<uint16_t>(Op::kInitialDone)) command.attempt = 1;
  } else if (command.op == static_cast<uint16_t>(Op::kGradReady) && random.OneIn(2)) {
    command.partition %= static_cast<uint32_t>(layout_->groups().size());
    command.step = committed_ + 1;
    command.arena_offset_bytes = 0;
    command.length_bytes = layout_->partition_bytes(command.partition);
    command.element_offset = 0;
    command.attempt = attempt_ + random.Below(2);
  }
  Send(session, command, {.kind = Kind::kOther});
}

void SimulatedTrainer::WriteInitial() {
  if (attached_.session != session_) return;
  if (initial_next_ == 0) wires_.send(SessionMapped{.session = session_});
  protocol::Command command{};
  if (initial_next_ < layout_->groups().size()) {
    command.op = static_cast<uint16_t>(Op::kWriteInitial);
    command.partition = initial_next_;
    command.length_bytes = layout_->partition_bytes(initial_next_);
    ++initial_next_;
    Send(session_, command, {.kind = Kind::kInitialWrite});
  } else if (initial_next_ == layout_->groups().size()) {
    ++initial_next_;
    command.op = static_cast<uint16_t>(Op::kInitialDone);
    Send(session_, command, {.kind = Kind::kInitialDone});
  }
}

// Plans one backward pass or several; delivery takes ranges from the back, the first pass first. Other ranks may plan another
// number of passes.
void SimulatedTrainer::Plan(SimulationRandom& random, bool chaos) {
  planned_ = true;
  const auto passes = static_cast<uint16_t>(random.OneIn(2) ? 1 : 1 + random.Below(3));
  for (uint16_t pass = passes; pass-- > 0;) PlanPass(random, pass, chaos);
}

// Plans one pass: some parameters have a gradient. Deliveries cover those parameters, cut at random places, in random order.
void SimulatedTrainer::PlanPass(SimulationRandom& random, uint16_t pass, bool chaos) {
  constexpr uint64_t kUnit = protocol::kGradUnitElems;
  std::set<uint32_t> present;
  for (uint32_t i = 0; i < layout_->params().size(); ++i) {
    if (random.OneIn(6)) continue;  // parameter without a gradient of this rank
    present.insert(i);
    present_[i].insert(pass);
  }
  std::vector<Range> of_pass;
  for (uint32_t group = 0; group < layout_->groups().size(); ++group) {
    const protocol::GroupPlace& place = layout_->groups()[group];
    std::vector<Range> ranges;
    for (uint64_t begin = 0; begin < place.elems; begin += kUnit) {
      const uint64_t end = std::min(begin + kUnit, place.elems);
      bool needed = false;
      for (uint32_t i = place.param_begin; i < place.param_end; ++i) {
        const protocol::ParamPlace& param = layout_->params()[i];
        needed = needed || (present.contains(i) && param.offset_elems < end &&
                            begin < param.offset_elems + param.elems);
      }
      if (!needed) continue;
      if (!ranges.empty() && ranges.back().end == begin && !random.OneIn(3)) {
        ranges.back().end = end;
      } else {
        ranges.push_back({.group = group, .pass = pass, .begin = begin, .end = end});
      }
    }
    of_pass.insert(of_pass.end(), ranges.begin(), ranges.end());
  }
  if (chaos && random.OneIn(4)) std::reverse(of_pass.begin(), of_pass.end());
  to_deliver_.insert(to_deliver_.end(), of_pass.begin(), of_pass.end());
}

void SimulatedTrainer::Train(SimulationRandom& random, bool chaos) {
  if (!planned_) {
    wires_.send(SessionMapped{.session = session_});
    Plan(random, chaos);
    if (!random.OneIn(4)) SendAnnouncement(random, chaos);
    return;
  }
  if (chaos && delivered_any_ && !stepping_ && random.OneIn(40)) {  // an exception in backward
    BeginAttempt(attempt_ + 1);
    return;
  }
  const uint64_t what = random.Below(12);
  protocol::Command command{};
  if (what == 0) {
    command.op = static_cast<uint16_t>(Op::kFetch);
    command.partition = static_cast<uint32_t>(random.Below(layout_->groups().size()));
    Send(session_, command, {.kind = Kind::kFetch});
  } else if (what == 1 && !leases_.empty()) {
    command.op = static_cast<uint16_t>(Op::kRelease);
    command.lease_id = leases_.back();
    leases_.pop_back();
    Send(session_, command, {.kind = Kind::kOther});
  } else if (what == 2 && !stepping_) {
    command.op = static_cast<uint16_t>(Op::kReadState);
    command.partition = static_cast<uint32_t>(random.Below(layout_->groups().size()));
    command.element_offset = random.Below(64);
    command.length_bytes = 4 * (1 + random.Below(64));
    if (in_arena_.empty()) Send(session_, command, {.kind = Kind::kOther});
  } else if (what == 3 && committed_ > 0 && !stepping_ && random.OneIn(4)) {
    command.op = static_cast<uint16_t>(Op::kStep);  // a repeat
    command.step = committed_;
    command.length_bytes = sizeof(protocol::StepRequest);
    command.arena_offset_bytes = attached_.step_region_offset;
    Send(session_, command, {.kind = Kind::kOther});
  } else if (what == 4 && chaos && random.OneIn(20)) {
    command.op = static_cast<uint16_t>(Op::kStep);
    command.step = committed_ + 3;  // a step of the future
    command.attempt = attempt_;
    command.length_bytes = sizeof(protocol::StepRequest);
    command.arena_offset_bytes = attached_.step_region_offset;
    Send(session_, command, {.kind = Kind::kOther});
  } else if (!stepping_ && !to_deliver_.empty()) {
    SendGradient(random, chaos);
  } else if (!stepping_ && !asked_ && random.OneIn(3)) {
    SendNorm(random);
  } else if (!stepping_ && (!WaitsForNorm() || (chaos && random.OneIn(20)))) {
    SendStep(random, chaos);
  }
}

std::optional<uint64_t> SimulatedTrainer::FreeOffset(uint64_t bytes) const {
  uint64_t offset = 0;
  for (const auto& [begin, end] : in_arena_) {
    if (offset + bytes <= begin) break;
    offset = end;
  }
  if (offset + bytes > grad_arena_bytes_) return std::nullopt;
  return offset;
}

bool SimulatedTrainer::SendGradient(SimulationRandom& random, bool chaos) {
  const Range range = to_deliver_.back();
  const uint64_t bytes = (range.end - range.begin) * protocol::SizeBytes(layout_->spec().dtype);
  const std::optional<uint64_t> offset = FreeOffset(bytes);
  if (!offset) return false;
  to_deliver_.pop_back();
  delivered_any_ = true;
  in_arena_[*offset] = *offset + bytes;
  wires_.model->PutGradient(session_, *offset,
                            {.session = session_,
                             .rank = rank_,
                             .partition = range.group,
                             .begin = range.begin,
                             .end = range.end,
                             .step = committed_ + 1,
                             .attempt = attempt_,
                             .pass = range.pass,
                             .finite = !(chaos && random.OneIn(300))});
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kGradReady);
  command.kind = range.pass;
  command.partition = range.group;
  command.step = committed_ + 1;
  command.attempt = attempt_;
  command.arena_offset_bytes = *offset;
  command.element_offset = range.begin;
  command.length_bytes = bytes;
  Send(session_, command, {.kind = Kind::kGradient, .offset = *offset});
  return true;
}

void SimulatedTrainer::ReleaseLeases() {
  while (!leases_.empty()) {
    protocol::Command command{};
    command.op = static_cast<uint16_t>(Op::kRelease);
    command.lease_id = leases_.back();
    leases_.pop_back();
    Send(session_, command, {.kind = Kind::kOther});
  }
}

void SimulatedTrainer::SendNorm(SimulationRandom& random) {
  asked_ = true;
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kGradNorm);
  command.partition = random.OneIn(4)
                          ? protocol::kAllParams
                          : static_cast<uint32_t>(random.Below(layout_->params().size()));
  command.attempt = attempt_;
  Send(session_, command, {.kind = Kind::kNorm});
}

bool SimulatedTrainer::WaitsForNorm() const {
  return std::any_of(sent_.begin(), sent_.end(), [this](const auto& entry) {
    return entry.second.kind == Kind::kNorm && entry.second.session == session_;
  });
}

void SimulatedTrainer::SendStep(SimulationRandom& random, bool chaos) {
  if (!chaos || !random.OneIn(10)) ReleaseLeases();  // otherwise the step is refused
  stepping_ = true;
  scalars_wrong_ = chaos && random.OneIn(40);
  request_garbage_ = chaos && random.OneIn(40);
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kStep);
  const protocol::StepAnswer answered_when =
      random.OneIn(2) ? protocol::StepAnswer::kCommitted : protocol::StepAnswer::kPublished;
  command.kind = static_cast<uint16_t>(answered_when);
  command.step = committed_ + 1;
  command.attempt = attempt_;
  command.arena_offset_bytes = attached_.step_region_offset;
  command.length_bytes = sizeof(protocol::StepRequest) + sizeof(protocol::HyperParams) +
                         protocol::PresenceBytes(layout_->params().size()) + 10;
  Send(session_, command, {.kind = Kind::kStep});
}

void SimulatedTrainer::SendAnnouncement(SimulationRandom& random, bool chaos) {
  scalars_wrong_ = chaos && random.OneIn(40);
  request_garbage_ = chaos && random.OneIn(40);
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kAnnounceStep);
  command.step = committed_ + 1;
  command.attempt = attempt_;
  command.arena_offset_bytes = attached_.step_region_offset;
  command.length_bytes = sizeof(protocol::StepRequest) + sizeof(protocol::HyperParams) +
                         protocol::PresenceBytes(layout_->params().size());
  Send(session_, command, {.kind = Kind::kAnnouncement});
}

StepRequestCopied SimulatedTrainer::StepRequestOf(const CopyStepRequest& copy) {
  StepRequestCopied copied{
      .session = copy.session, .tag = copy.tag, .request = {}, .hyper_params = {}};
  const auto sent = sent_.find(copy.tag);
  const bool announces = sent != sent_.end() && sent->second.kind == Kind::kAnnouncement;
  copied.request = {.step = committed_ + 1,
                    .param_groups = 1,
                    .extra_state_bytes = announces ? 0U : 10U,
                    // 1.0: the step is clipped.
                    .max_grad_norm = (committed_ + 1) % 5 == 0 ? 1.0 : 0.0,
                    .grad_scale = 1};
  copied.hyper_params = {
      {.lr = scalars_wrong_ ? 0.2 : 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}};
  copied.presence.assign(copy.presence_words, 0);
  for (const auto& [param, passes] : present_) {
    if (announces) break;
    if (param / 64 < copied.presence.size()) protocol::SetPresent(copied.presence, param);
  }
  if (request_garbage_ || copy.session != session_) copied.request.param_groups = 1000000;
  return copied;
}

void SimulatedTrainer::OnAnswer(const AnswerCommand& answer) {
  const auto it = sent_.find(answer.completion.tag);
  if (it == sent_.end() || it->second.session != answer.session) {
    fault_ = "an answer to no command";
    return;
  }
  const Sent sent = it->second;
  sent_.erase(it);
  const uint32_t error = answer.completion.error;
  if (error != 0) ++errors_[error];
  if (sent.kind == Kind::kGradient) wires_.model->DropGradient(answer.session, sent.offset);
  if (answer.session != session_) return;  // answer to an abandoned session
  // Garbage can contain a valid fetch, which is answered with a lease. A step call with leases is refused.
  const bool fetched = answer.completion.op == static_cast<uint16_t>(Op::kFetch) && error == 0;
  if (fetched && answer.completion.lease_id != 0) leases_.push_back(answer.completion.lease_id);
  switch (sent.kind) {
    case Kind::kGradient:
      OnGradientAnswer(sent, error);
      return;
    case Kind::kStep:
      OnStepAnswer(answer);
      return;
    case Kind::kInitialDone:
      phase_ = error == 0 ? Phase::kTraining : Phase::kLeaving;
      return;
    case Kind::kInitialWrite:
      if (error != 0) phase_ = Phase::kLeaving;
      return;
    case Kind::kNorm:  // the step answer will report it
    case Kind::kAnnouncement:
    case Kind::kFetch:
    case Kind::kOther:
      return;
  }
}

void SimulatedTrainer::OnGradientAnswer(const Sent& sent, uint32_t error) {
  in_arena_.erase(sent.offset);
  if (error == 0 || sent.attempt != attempt_) return;
  const auto id = static_cast<ErrorId>(error);
  if (id == ErrorId::kNonfinite) return;  // the step answer reports it
  // The other ranks continued after the refusal of this rank's step call: this rank begins a new attempt.
  if (id == ErrorId::kStep) {
    if (!stepping_) BeginAttempt(attempt_ + 1);
    return;
  }
  phase_ = Phase::kLeaving;
}

void SimulatedTrainer::OnStepAnswer(const AnswerCommand& answer) {
  stepping_ = false;
  switch (static_cast<ErrorId>(answer.completion.error)) {
    case ErrorId::kNone:
    case ErrorId::kOverflow:
      if (answer.completion.committed_step != committed_ + 1) fault_ = "step returned uncommitted";
      committed_ = answer.completion.committed_step;
      ++commits_seen_;
      BeginAttempt(0);
      return;
    case ErrorId::kNonfinite:
    case ErrorId::kDramLimit:  // too little DRAM for sums of several passes
    case ErrorId::kGradDropped:
      BeginAttempt(answer.completion.attempt);
      return;
    case ErrorId::kStep:
    case ErrorId::kOption:
      return;  // the rank calls step again
    case ErrorId::kLease:
      ReleaseLeases();
      return;
    default:
      phase_ = Phase::kLeaving;
  }
}

void SimulatedTrainer::OnCommitted() {
  committed_call_.reset();
  if (!is_stepping()) return;  // the rank died or was replaced after the call
  committed_call_ = {.session = session_, .attempt = attempt_, .present = present_};
}

std::string SimulatedTrainer::CheckPublished(uint64_t step,
                                             const NodeModel::Gradients& used) const {
  if (!committed_call_) return {};
  for (const auto& [param, tokens] : used) {
    for (const GradientToken& token : tokens) {
      const bool own =
          token.session == committed_call_->session && token.attempt == committed_call_->attempt;
      if (token.rank == rank_ && !own) {
        return absl::StrCat("step ", step, " used a gradient of rank ", rank_,
                            " from another session or attempt");
      }
    }
  }
  for (const auto& [param, passes] : committed_call_->present) {
    const auto tokens = used.find(param);
    for (const uint16_t pass : passes) {
      const auto is_it = [=, this](const GradientToken& token) {
        return token.rank == rank_ && token.pass == pass;
      };
      if (tokens != used.end() && std::ranges::any_of(tokens->second, is_it)) continue;
      return absl::StrCat("step ", step, " has not used the gradient of parameter ", param,
                          " of rank ", rank_, " in pass ", pass);
    }
  }
  return {};
}

}  // namespace forebay::testing
