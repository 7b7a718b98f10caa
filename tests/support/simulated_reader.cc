// SPDX-License-Identifier: Apache-2.0
#include "tests/support/simulated_reader.h"

#include <utility>

#include "protocol/error.h"
#include "protocol/units.h"

namespace forebay::testing {

// NOLINTNEXTLINE(google-build-using-namespace): events and actions
using namespace daemon;
using protocol::ErrorId;
using protocol::Op;

namespace {

constexpr uint64_t kStoppedTurns = 20;

}  // namespace

SimulatedReader::SimulatedReader(std::string job, std::shared_ptr<const protocol::Layout> layout,
                                 SimulatedTrainer::Wires wires)
    : job_(std::move(job)), layout_(std::move(layout)), wires_(std::move(wires)) {}

void SimulatedReader::Attach() {
  session_ = wires_.new_session();
  sessions_.insert(session_);
  attached_ = false;
  leases_.clear();
  fetching_.clear();
  wires_.send(AttachRequested{.session = session_,
                              .uid = 1000,
                              .job = job_,
                              .reader = true,
                              .session_request = {.grad_arena_bytes = protocol::kPageBytes},
                              .layout = layout_});
}

void SimulatedReader::End(EndCause cause) {
  const uint64_t session = std::exchange(session_, 0);
  wires_.model->ReleaseWeights(session);
  wires_.send(SessionEnded{.session = session, .cause = cause});
}

void SimulatedReader::Send(protocol::Command command) {
  command.tag = wires_.new_tag();
  if (command.op == static_cast<uint16_t>(Op::kFetch)) fetching_[command.tag] = command.partition;
  wires_.send(CommandArrived{.session = session_, .command = command});
}

void SimulatedReader::Release() {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(Op::kRelease);
  command.lease_id = leases_.back();
  leases_.pop_back();
  wires_.model->ReleaseWeights(session_, command.lease_id);
  Send(command);
}

void SimulatedReader::Act(SimulationRandom& random, bool chaos) {
  if (stopped_turns_ > 0) {
    --stopped_turns_;
    return;
  }
  if (session_ == 0) {
    if (random.OneIn(3)) Attach();
    return;
  }
  if (!attached_) return;
  if (chaos && random.OneIn(60)) {
    stopped_turns_ = kStoppedTurns;
    return;
  }
  protocol::Command command{};
  command.partition = static_cast<uint32_t>(random.Below(layout_->groups().size()));
  switch (random.Below(10)) {
    case 0:
      if (random.OneIn(chaos ? 20 : 50)) {
        End(random.OneIn(2) ? EndCause::kLost : EndCause::kDetached);
      }
      return;
    case 1:  // an operation that only a rank may do
      if (!chaos) return;
      command.op = static_cast<uint16_t>(1 + random.Below(7));
      command.step = random.Below(4);
      command.length_bytes = random.OneIn(2) ? layout_->partition_bytes(command.partition) : 0;
      if (command.op != static_cast<uint16_t>(Op::kRelease)) Send(command);
      return;
    case 2:
      command.op = static_cast<uint16_t>(Op::kReadState);
      command.length_bytes = 4 * (1 + random.Below(64));
      Send(command);
      return;
    case 3:
    case 4:
    case 5:
      command.op = static_cast<uint16_t>(Op::kFetch);
      Send(command);
      return;
    default:
      if (!leases_.empty()) Release();
  }
}

void SimulatedReader::OnAttach(const AnswerAttach& answer) {
  if (answer.session != session_) return;
  attached_ = answer.status.ok();
  if (answer.writes_initial) fault_ = "a reader was asked to write the initial parameters";
  if (attached_) {
    wires_.send(SessionMapped{.session = session_});
  } else {
    ++errors_[static_cast<uint32_t>(protocol::IdOf(answer.status))];
    session_ = 0;
  }
}

void SimulatedReader::OnAnswer(const AnswerCommand& answer) {
  if (answer.completion.error != 0) ++errors_[answer.completion.error];
  const bool was_fetch = fetching_.erase(answer.completion.tag) > 0;
  if (answer.session != session_ || !was_fetch || answer.completion.error != 0) return;
  ++fetches_;
  leases_.push_back(answer.completion.lease_id);
  wires_.model->HoldWeights(session_, answer.completion);
}

void SimulatedReader::OnClosed(const CloseSession& close) {
  if (!sessions_.contains(close.session)) return;
  sessions_.erase(close.session);
  if (protocol::IdOf(close.reason) == ErrorId::kLease) ++expired_;
  if (close.session == session_) session_ = 0;
}

}  // namespace forebay::testing
