// What the executor does for each action of the state machine.

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/exec/block_tasks.h"
#include "daemon/exec/clock.h"
#include "daemon/exec/executor.h"
#include "protocol/descriptor.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

constexpr uint64_t kWeightsRetryMinNs = 2'000'000;
constexpr uint64_t kWeightsRetryMaxNs = 500'000'000;

std::span<std::byte> Part(const ArenaRegistry::Arena& arena, uint64_t offset_bytes,
                          uint64_t bytes) {
  FOREBAY_CHECK(arena != nullptr && offset_bytes + bytes <= arena->capacity_bytes());
  return arena->bytes().subspan(offset_bytes, bytes);
}

// Group whose accumulator lies at an offset of the step arena: they lie there in order.
std::string GroupAt(const protocol::Layout& layout, uint64_t accumulator_offset_bytes) {
  const uint64_t width = protocol::SizeBytes(GradientSumType(layout.spec()));
  uint64_t offset_bytes = 0;
  for (size_t i = 0; i < layout.groups().size(); ++i) {
    offset_bytes += layout.groups()[i].padded_elems * width;
    if (accumulator_offset_bytes < offset_bytes) return layout.spec().group_names[i];
  }
  return "unknown";
}

TaskDone Counted(uint64_t count) {
  TaskDone done;
  done.count = count;
  return done;
}

}  // namespace

void Executor::PostTask(TaskId task, Work work) {
  runner_.Post(PoolId::kUpdate, [this, task, run = std::move(work)]() mutable -> TaskRunner::Then {
    TaskDone done = run();
    run = nullptr;
    done.task = task;
    return [this, done = std::move(done)]() mutable { Raise(std::move(done)); };
  });
}

void Executor::PostTimed(TaskId task, Timed timed, Work work) {
  runner_.Post(
      PoolId::kUpdate,
      [this, task, timed = std::move(timed), run = std::move(work)]() mutable -> TaskRunner::Then {
        const uint64_t start_ns = MonotonicNs();
        TaskDone done = run();
        run = nullptr;
        done.task = task;
        TimedEvent event{.lane = timed.lane,
                         .name = std::move(timed.name),
                         .start_ns = start_ns,
                         .end_ns = MonotonicNs(),
                         .bytes = timed.bytes};
        return
            [this, owner = timed.job, done = std::move(done), event = std::move(event)]() mutable {
              job(owner).timeline.Add(std::move(event));
              Raise(std::move(done));
            };
      });
}

template <typename Found>
void Executor::PostParts(TaskId task, Timed timed, uint64_t elems,
                         absl::AnyInvocable<Found(ElemRange) const> work,
                         absl::AnyInvocable<TaskDone(const std::vector<Found>&)> join) {
  struct Parts {  // each part writes its own elements
    std::vector<Found> found;
    std::vector<uint64_t> start_ns;
    std::vector<uint64_t> end_ns;
  };
  const uint64_t count = std::max<uint64_t>(1, (elems + kPartElems - 1) / kPartElems);
  const auto parts = std::make_shared<Parts>(
      Parts{std::vector<Found>(count), std::vector<uint64_t>(count), std::vector<uint64_t>(count)});
  runner_.PostParts(
      PoolId::kUpdate, count,
      [parts, elems, run = std::move(work)](size_t part) {
        const uint64_t begin = part * kPartElems;
        parts->start_ns[part] = MonotonicNs();
        parts->found[part] = run({begin, std::min(begin + kPartElems, elems)});
        parts->end_ns[part] = MonotonicNs();
      },
      [this, task, parts, timed = std::move(timed), ended = std::move(join)]() mutable {
        TaskDone done = ended(parts->found);
        done.task = task;
        job(timed.job).timeline.Add({.lane = timed.lane,
                                     .name = std::move(timed.name),
                                     .start_ns = std::ranges::min(parts->start_ns),
                                     .end_ns = std::ranges::max(parts->end_ns),
                                     .bytes = timed.bytes});
        Raise(std::move(done));
      });
}

template <typename Resource>
void Executor::Retire(Resource resource) {
  runner_.Post(PoolId::kSetup, [resource = std::move(resource)]() mutable -> TaskRunner::Then {
    { const Resource dead = std::move(resource); }
    return [] {};
  });
}

// ----------------------------------------------------------------------------- making and unmaking

void Executor::Run(CreateJobMemory& action) {
  JobIo io;
  for (const JobView& view : state_.Jobs()) {
    if (view.id == action.job) {
      io.name = {.uid = view.uid, .name = view.name};
      io.layout = view.layout;
    }
  }
  FOREBAY_CHECK(io.layout != nullptr);
  const std::string name = io.name.name.substr(0, 100);
  jobs_.emplace(action.job, std::move(io));
  const auto make = [lock = options_.lock](const std::string& arena_name, uint64_t bytes,
                                           ArenaKind kind,
                                           ArenaRegistry::Arena& arena) -> absl::Status {
    if (bytes == 0) return absl::OkStatus();
    const bool weights = kind == ArenaKind::kWeights;
    ASSIGN_OR_RETURN(
        arena, pinned_mem::PinnedArena::Create(
                   {.name = arena_name,
                    .capacity_bytes = protocol::RoundUp(bytes, protocol::kPageBytes),
                    .lock = lock,
                    .access = weights ? pinned_mem::Access::kServed : pinned_mem::Access::kPrivate,
                    .at_end = weights ? pinned_mem::AtEnd::kKeepForReaders
                                      : pinned_mem::AtEnd::kFreePages}));
    return absl::OkStatus();
  };
  runner_.Post(PoolId::kSetup, [this, action, name, make]() -> TaskRunner::Then {
    ArenaRegistry::Arena weights;
    ArenaRegistry::Arena state;
    ArenaRegistry::Arena step;
    absl::Status status =
        make("forebay-weights-" + name, action.weights_bytes, ArenaKind::kWeights, weights);
    if (status.ok())
      status = make("forebay-state-" + name, action.state_bytes, ArenaKind::kState, state);
    if (status.ok())
      status = make("forebay-step-" + name, action.step_bytes, ArenaKind::kStep, step);
    return [this, action, status, weights, state, step]() mutable {
      if (status.ok()) {
        JobIo& io_now = job(action.job);
        io_now.weights = std::move(weights);
        io_now.state = std::move(state);
        io_now.step = std::move(step);
        registry_.Register({.kind = ArenaKind::kWeights, .job = io_now.name}, io_now.weights);
        if (io_now.state)
          registry_.Register({.kind = ArenaKind::kState, .job = io_now.name}, io_now.state);
        if (io_now.step)
          registry_.Register({.kind = ArenaKind::kStep, .job = io_now.name}, io_now.step);
      }
      Done(action.task, status);
    };
  });
}

void Executor::Run(CreateJobSwap& action) {
  FOREBAY_CHECK(swap_ != nullptr);
  std::vector<SwapDone> done;
  swap_->StartZero(action, done);
  EndTransfers(done);
}

void Executor::Run(CreateSessionMemory& action) {
  const auto found = sessions_.find(action.session);
  FOREBAY_CHECK(found != sessions_.end());
  const AttachRequested& request = found->second.request;
  SessionMemoryOptions memory{
      .job = request.job,
      .rank = RankOf(request),
      .grad_bytes = protocol::RoundUp(action.grad_bytes, protocol::kPageBytes),
      .lock = options_.lock};
  runner_.Post(PoolId::kSetup, [this, action, memory]() -> TaskRunner::Then {
    auto made = MakeSessionMemory(memory);
    return [this, action, made = std::move(made)]() mutable {
      if (!made.ok()) return Done(action.task, made.status());
      const SessionMemory arenas = *made;
      auto io = SessionIo::Create(*std::move(made));
      if (!io.ok()) return Done(action.task, io.status());
      Session& session = sessions_.at(action.session);
      session.io = *std::move(io);
      const int rank = RankOf(session.request);
      registry_.Register({ArenaKind::kGrad, session.job, rank}, arenas.grad);
      registry_.Register({ArenaKind::kRing, session.job, rank}, arenas.ring);
      Done(action.task, absl::OkStatus());
    };
  });
}

absl::StatusOr<SessionFds> Executor::FdsFor(Session& session, const AnswerAttach& answer) {
  ASSIGN_OR_RETURN(SessionFds fds, session.io->MakeClientFds());
  JobIo& io = job(answer.job);
  ASSIGN_OR_RETURN(fds.weights, io.weights->ClientFd());
  const auto own = Part(io.step, answer.extra_state_offset, answer.extra_state_bytes);
  const auto rank0 = Part(io.step, answer.rank0_extra_state_offset, answer.rank0_extra_state_bytes);
  const uint64_t saved_bytes = own.size() + rank0.size();
  if (saved_bytes == 0) return fds;
  ASSIGN_OR_RETURN(session.extra_state,
                   pinned_mem::PinnedArena::Create(
                       {.name = "forebay-extra-state",
                        .capacity_bytes = protocol::RoundUp(saved_bytes, protocol::kPageBytes),
                        .lock = options_.lock,
                        .access = pinned_mem::Access::kServed}));
  std::ranges::copy(rank0, std::ranges::copy(own, session.extra_state->bytes().begin()).out);
  registry_.Register({ArenaKind::kExtraState, session.job, RankOf(session.request)},
                     session.extra_state);
  ASSIGN_OR_RETURN(fds.extra_state, session.extra_state->ClientFd());
  return fds;
}

void Executor::Run(AnswerAttach& action) {
  Session& session = sessions_.at(action.session);
  AttachResult result{.answer = std::move(action), .fds = {}};
  if (result.answer.status.ok()) {
    auto fds = FdsFor(session, result.answer);
    if (fds.ok()) {
      result.fds = *std::move(fds);
    } else {
      result.answer.status = fds.status();
      events_.push_back(SessionEnded{.session = result.answer.session, .cause = EndCause::kLost});
    }
  }
  (void)registry_.Totals();  // the peak
  spdlog::debug(
      "session {}, {}: {}", result.answer.session, WhoIs(session.request),
      result.answer.status.ok() ? "attached" : protocol::FormatError(result.answer.status));
  if (session.callbacks.answered) session.callbacks.answered(std::move(result));
}

void Executor::Run(AnswerCommand& action) {
  const auto found = sessions_.find(action.session);
  if (found == sessions_.end() || found->second.broken) return;
  Session& session = found->second;
  if (!action.status.ok()) session.io->KeepError(action.completion.tag, action.status);
  const absl::Status sent = session.io->channel().Send(action.completion);
  if (!sent.ok()) Break(action.session, session, sent);
}

void Executor::Run(CloseSession& action) {
  auto node = sessions_.extract(action.session);
  FOREBAY_CHECK(!node.empty());
  Session& session = node.mapped();
  if (!action.reason.ok()) {
    spdlog::warn("session {}, {}, is over: {}", action.session, WhoIs(session.request),
                 protocol::FormatError(action.reason));
    if (evicted_.size() == kEvictedKeptMax) evicted_.pop_front();
    evicted_.emplace_back(action.session, action.reason);
  }
  absl::AnyInvocable<void(const absl::Status&)> closed = std::move(session.callbacks.closed);
  if (session.io != nullptr) {
    if (session.mapped) engine_.UnwatchEventFd(session.io->channel().wait_fd());
    session.io->channel().Close();
    Retire(std::move(session.io));
  }
  if (session.extra_state != nullptr) Retire(std::move(session.extra_state));
  if (closed) closed(action.reason);
}

void Executor::Run(FreeJob& action) {
  auto node = jobs_.extract(action.job);
  JobIo rest = node.empty() ? JobIo{} : std::move(node.mapped());
  DeletedWeights& weights = deleted_weights_[action.job];
  weights.arena = std::move(rest.weights);
  registry_.ChangeKind(weights.arena, ArenaKind::kDeletedWeights);
  TryFreeWeights(action.job, std::move(rest));
}

void Executor::TryFreeWeights(JobId job, JobIo rest) {
  DeletedWeights& weights = deleted_weights_.at(job);
  weights.trying = true;
  runner_.Post(PoolId::kSetup,
               [this, job, arena = std::move(weights.arena),
                rest = std::move(rest)]() mutable -> TaskRunner::Then {
                 { const JobIo dead = std::move(rest); }
                 if (arena != nullptr && arena->FreeIfUnused()) arena = nullptr;
                 return [this, job, arena = std::move(arena)]() mutable {
                   const bool freed = arena == nullptr;
                   DeletedWeights& tried = deleted_weights_.at(job);
                   tried.trying = false;
                   tried.arena = std::move(arena);
                   tried.wait_ns =
                       std::clamp(2 * tried.wait_ns, kWeightsRetryMinNs, kWeightsRetryMaxNs);
                   tried.next_try_ns = MonotonicNs() + tried.wait_ns;
                   if (freed) deleted_weights_.erase(job);
                   Raise(JobFreed{.job = job, .weights_in_use = !freed});
                 };
               });
}

std::chrono::nanoseconds Executor::FreeDeletedWeights() {
  std::chrono::nanoseconds sleep = nvme::IoEngine::kForever;
  const uint64_t now_ns = MonotonicNs();
  for (auto& [job, weights] : deleted_weights_) {
    if (weights.trying) continue;
    if (weights.next_try_ns <= now_ns) {
      TryFreeWeights(job, {});
    } else {
      const std::chrono::nanoseconds left(weights.next_try_ns - now_ns);
      if (sleep == nvme::IoEngine::kForever || left < sleep) sleep = left;
    }
  }
  return sleep;
}

void Executor::Run(AnswerDelete& action) {
  auto node = deletes_.extract(action.request);
  FOREBAY_CHECK(!node.empty());
  node.mapped()(std::move(action.status));
}

// ------------------------------------------------------------------------------------ small copies

void Executor::Run(CopyStepRequest& action) {
  // The answer comes before anything else: at once, its actions behind those that are being run.
  state_.Handle(session_io(action.session).CopyRequest(action), actions_);
}

void Executor::Run(CopyInitial& action) {
  const ArenaRegistry::Arena grad = session_io(action.session).grad();
  const auto from = Part(grad, action.grad_offset_bytes, action.bytes);
  const auto to = Part(job(action.job).weights, action.weights_offset_bytes, action.bytes);
  PostTask(action.task, [grad, from, to, dtype = action.dtype] {
    return Counted(RunCopyInitial(dtype, from, to) ? 0 : 1);
  });
}

void Executor::Run(CopyToStepArena& action) {
  const ArenaRegistry::Arena grad = session_io(action.session).grad();
  const auto from = Part(grad, action.grad_offset_bytes, action.bytes);
  const auto to = Part(job(action.job).step, action.step_offset_bytes, action.bytes);
  PostTask(action.task, [grad, from, to] {
    std::memcpy(to.data(), from.data(), from.size());
    return TaskDone{};
  });
}

// ------------------------------------------------------------------------------------ the gradient

void Executor::Run(AddGradient& action) {
  JobIo& io = job(action.job);
  const ArenaRegistry::Arena source =
      action.session == 0 ? io.step : session_io(action.session).grad();
  const uint64_t bytes = action.elems * protocol::SizeBytes(action.dtype);
  const auto from = Part(source, action.source_offset_bytes, bytes);
  const auto to = Part(io.step, action.accumulator_offset_bytes,
                       action.elems * protocol::SizeBytes(action.sum_dtype));
  PostParts<AddedGradient>(
      action.task,
      {.job = action.job,
       .lane = Lane::kGradient,
       .name = GroupAt(*io.layout, action.accumulator_offset_bytes),
       .bytes = bytes},
      action.elems,
      [source, from, to, action](ElemRange range) {
        return RunAddGradient(action, range, from, to);
      },
      [](const std::vector<AddedGradient>& parts) {
        TaskDone done;
        cpu_adam::SquareSum squares;
        for (const AddedGradient& part : parts) {
          if (!part.finite) done.count = 1;
          squares.Merge(part.squares);
        }
        done.sum_squares = squares.ToDouble();
        return done;
      });
}

void Executor::Run(SumGroup& action) {
  const auto accumulator =
      Part(job(action.job).step, action.accumulator_offset_bytes, action.elems * sizeof(float));
  PostTask(action.task, [accumulator] {
    TaskDone done;
    done.sum_squares = RunSumGroup(accumulator);
    return done;
  });
}

// ---------------------------------------------------------------------------------------- the step

void Executor::Run(ReadBlock& action) {
  FOREBAY_CHECK(swap_ != nullptr);
  if (!action.place.slot) {  // zeros: there is nothing to read
    const auto slot = swap_->Slot(action.place.staging_slot, action.bytes);
    PostTask(action.task, [slot] {
      std::memset(slot.data(), 0, slot.size());
      return TaskDone{};
    });
    return;
  }
  std::vector<SwapDone> done;
  swap_->StartRead(action, done);
  EndTransfers(done);
}

void Executor::Run(UpdateBlock& action) {
  JobIo& io = job(action.job);
  const bool resident = action.place.resident;
  const UpdateMemory memory{
      .weights = io.weights->bytes(),
      .accumulators = io.step->bytes(),
      .sum_dtype = GradientSumType(io.layout->spec()),
      .block = resident ? Part(io.state, action.place.state_offset_bytes, action.bytes)
                        : swap_->Slot(action.place.staging_slot, action.bytes),
      .optimizer = io.layout->spec().optimizer,
      .format = io.layout->spec().format,
      .dtype = io.layout->spec().dtype};
  const TaskId task = action.task;
  const uint64_t elems = action.block_elems;
  Timed timed{.job = action.job,
              .lane = Lane::kUpdate,
              .name = absl::StrCat("block ", action.identity_before.block),
              .bytes = action.bytes};
  if (resident) {
    PostParts<UpdateFound>(
        task, std::move(timed), elems,
        [action = std::move(action), memory](ElemRange range) {
          return RunUpdate(action, range, memory);
        },
        JoinUpdate);
    return;
  }
  const auto expected =
      swap_->Expected(action.place, action.identity_before, action.checksum_before);
  PostTimed(task, std::move(timed),
            [action = std::move(action), memory, expected, nonce = swap_->nonce()] {
              TaskDone done;
              done.status = VerifyBlock(expected, action.identity_before, memory.block);
              return done.status.ok() ? RunUpdateForSwap(action, memory, nonce) : done;
            });
}

void Executor::Run(WriteBlock& action) {
  FOREBAY_CHECK(swap_ != nullptr);
  std::vector<SwapDone> done;
  swap_->StartWrite(action, done);
  EndTransfers(done);
}

void Executor::Run(CopyState& action) {
  JobIo& io = job(action.job);
  const bool resident = action.place.resident;
  const ArenaRegistry::Arena grad = session_io(action.session).grad();
  const std::span<const std::byte> block =
      resident ? Part(io.state, action.place.state_offset_bytes, action.block_bytes)
               : swap_->Slot(action.place.staging_slot, action.block_bytes);
  const auto expected =
      resident ? std::nullopt : swap_->Expected(action.place, action.identity, action.checksum);
  const auto to = Part(grad, action.grad_offset_bytes, action.bytes);
  FOREBAY_CHECK(action.block_offset_bytes + action.bytes <= block.size());
  PostTask(action.task, [action, resident, grad, block, expected, to] {
    TaskDone done;
    if (!resident) {
      done.status = VerifyBlock(expected, action.identity, block);
      if (!done.status.ok()) return done;
    }
    std::memcpy(to.data(), block.data() + action.block_offset_bytes, to.size());
    return done;
  });
}

void Executor::Run(StartLeaseTimer& action) {
  const auto wait_ns = static_cast<uint64_t>(options_.reader_lease_max.count());
  timers_.emplace(MonotonicNs() + wait_ns,
                  LeaseTimeExpired{.job = action.job, .step = action.step});
}

void Executor::Run(StepCalled& action) { job(action.job).timeline.StepCalled(MonotonicNs()); }

void Executor::Run(StepCommitted& action) {
  job(action.job).timeline.Committed(action.step, MonotonicNs());
  (void)registry_.Totals();  // the peak
}

}  // namespace forebay::daemon
