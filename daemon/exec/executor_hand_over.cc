// The jobs of a daemon that ends go on with the next: what it leaves, and what it finds.

#include <utility>

#include "daemon/exec/executor.h"
#include "daemon/exec/hand_over.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {

void Executor::HandOver(KeepDescriptors keep, absl::AnyInvocable<void(const absl::Status&)> done) {
  keep_ = std::move(keep);
  handed_over_ = std::move(done);
  Raise(HandOverRequested{});
}

void Executor::HandOverDue() { Raise(::forebay::daemon::HandOverDue{}); }

void Executor::Adopt(std::vector<AdoptedArenas> all) {
  const auto own = [](const ArenaRegistry::Arena& arena) {
    if (arena != nullptr) arena->SetAtEnd(pinned_mem::AtEnd::kFreePages);
  };
  for (AdoptedArenas& job : all) {
    own(job.state);
    own(job.step);
    for (auto& [rank, arena] : job.gradients) {
      own(arena);
      registry_.Register({ArenaKind::kGrad, job.name, static_cast<int32_t>(rank)}, arena);
      kept_gradients_.emplace(std::pair(job.id, rank), std::move(arena));
    }
    jobs_.Adopt(std::move(job));
  }
}

ArenaRegistry::Arena Executor::KeptGradientsFor(JobId job, const AttachRequested& request,
                                                uint64_t bytes) {
  if (request.reader) return nullptr;
  auto node = kept_gradients_.extract({job, request.rank});
  if (node.empty()) return nullptr;
  ArenaRegistry::Arena arena = std::move(node.mapped());
  if (request.reattach && arena->capacity_bytes() == bytes) return arena;
  Retire(std::move(arena));
  return nullptr;
}

void Executor::DropKeptGradients(JobId job) {
  for (auto next = kept_gradients_.lower_bound({job, 0});
       next != kept_gradients_.end() && next->first.first == job;) {
    Retire(std::move(next->second));
    next = kept_gradients_.erase(next);
  }
}

absl::StatusOr<DescriptorsByName> Executor::DescriptorsOf(const HandedOver& action) {
  DescriptorsByName kept;
  const auto keep = [&kept](std::string name, const ArenaRegistry::Arena& arena) -> absl::Status {
    if (arena == nullptr) return absl::OkStatus();
    arena->SetAtEnd(pinned_mem::AtEnd::kKeepForReaders);
    ASSIGN_OR_RETURN(protocol::UniqueFd fd, arena->DuplicateFd());
    kept.emplace(std::move(name), std::move(fd));
    return absl::OkStatus();
  };
  for (const auto& job : action.node->jobs) {
    const JobMemory& memory = jobs_.at(job->id);
    RETURN_IF_ERROR(keep(WeightsDescriptor(job->id), memory.weights));
    RETURN_IF_ERROR(keep(StatesDescriptor(job->id), memory.state));
    RETURN_IF_ERROR(keep(StepDescriptor(job->id), memory.step));
  }
  for (const auto& [of, arena] : kept_gradients_) {
    RETURN_IF_ERROR(keep(GradientsDescriptor(of.first, of.second), arena));
  }
  for (const HandedOver::Session& session : action.sessions) {
    const SessionIo& io = session_io(session.session);
    RETURN_IF_ERROR(keep(GradientsDescriptor(session.job, session.rank), io.grad()));
    io.ring()->SetAtEnd(pinned_mem::AtEnd::kKeepForReaders);  // its client reads the last answers
  }
  const uint64_t nonce = swap_ == nullptr ? 0 : swap_->nonce();
  const uint64_t sequence = swap_ == nullptr ? 0 : swap_->durable_sequence();
  RETURN_IF_ERROR(AddHandedOver(*action.node, nonce, sequence, kept));
  return kept;
}

// Clients hear of it when everything is kept: until then they would wait in vain.
void Executor::Run(HandedOver& action) {
  FOREBAY_CHECK(keep_ != nullptr);
  absl::Status status;
  if (!action.node->jobs.empty()) {
    absl::StatusOr<DescriptorsByName> kept = DescriptorsOf(action);
    status = kept.status();
    if (kept.ok()) status = keep_(*std::move(kept));
    if (status.ok()) {
      for (const HandedOver::Session& session : action.sessions) {
        poller_.Remove(session.session);
        sessions_.at(session.session).is_handed_over = true;
        session_io(session.session).channel().Close(protocol::ChannelState::kRestarting);
      }
      for (const auto& job : action.node->jobs) {
        spdlog::info("job {}: its memory is kept at step {} for the next daemon", job->name,
                     job->step);
      }
    } else {
      spdlog::error("no job goes on with the next daemon: {}", protocol::FormatError(status));
    }
  }
  handed_over_(status);
}

}  // namespace forebay::daemon
