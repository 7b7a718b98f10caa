// SPDX-License-Identifier: Apache-2.0
// Runs the actions of the state machine (Executor::Run).

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_join.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/exec/block_tasks.h"
#include "daemon/exec/clock.h"
#include "daemon/exec/executor.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "nvme/checksum.h"
#include "protocol/copy_changed.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

std::span<std::byte> Part(const ArenaRegistry::Arena& arena, uint64_t offset_bytes,
                          uint64_t bytes) {
  FOREBAY_CHECK(arena != nullptr && offset_bytes + bytes <= arena->capacity_bytes());
  return arena->bytes().subspan(offset_bytes, bytes);
}

// Returns the job's weights and formats, without a block.
StateMemory WeightsOf(const JobMemory& job) {
  const protocol::LayoutSpec& spec = job.layout->spec();
  return {.weights = job.weights->bytes(),
          .block = {},
          .optimizer = spec.optimizer,
          .format = spec.format,
          .dtype = spec.dtype};
}

// Returns the block in the state arena or in its staging slot, with the weights and formats of its job.
StateMemory StatesAt(const JobMemory& job, const BlockPlace& place, uint64_t block_bytes,
                     SwapSpace* swap) {
  StateMemory memory = WeightsOf(job);
  memory.block = place.resident ? Part(job.state, place.state_offset_bytes, block_bytes)
                                : swap->Slot(place.staging_slot, block_bytes);
  return memory;
}

TaskDone Counted(uint64_t count) {
  TaskDone done;
  done.count = count;
  return done;
}

}  // namespace

template <typename Work>
void Executor::PostTask(TaskId task, Work work) {
  runner_.Post(PoolId::kUpdate, [this, task, run = std::move(work)]() mutable -> TaskRunner::Then {
    TaskDone done = run();
    done.task = task;
    return [this, done = std::move(done)]() mutable { Raise(std::move(done)); };
  });
}

template <typename Work>
void Executor::PostTimed(TaskId task, Timed timed, Work work) {
  runner_.Post(
      PoolId::kUpdate,
      [this, task, timed, run = std::move(work)]() mutable -> TaskRunner::Then {
        TimedEvent event = timed.event;
        event.start_ns = MonotonicNs();
        TaskDone done = run();
        event.end_ns = MonotonicNs();
        done.task = task;
        return [this, owner = timed.job, done = std::move(done), event]() mutable {
          jobs_.at(owner).timeline.Add(event);
          Raise(std::move(done));
        };
      },
      timed.group);
}

template <typename Found, typename Work>
void Executor::PostParts(TaskId task, Timed timed, uint64_t elems, Work work,
                         TaskDone (*join)(std::span<const Found> found,
                                          std::pmr::memory_resource* memory)) {
  struct Times {
    uint64_t start_ns = 0;
    uint64_t end_ns = 0;
  };
  const uint64_t count = std::max<uint64_t>(1, (elems + kPartElems - 1) / kPartElems);
  // Results by part. Each part writes only its own element. The vectors live until the outcome has run.
  std::pmr::vector<Found> found(count, &memory_);
  std::pmr::vector<Times> times(count, &memory_);
  Found* const found_by_part = found.data();
  Times* const times_by_part = times.data();
  runner_.PostParts(
      PoolId::kUpdate, count,
      [found_by_part, times_by_part, elems, run = std::move(work)](size_t part) {
        const uint64_t begin = part * kPartElems;
        times_by_part[part].start_ns = MonotonicNs();
        found_by_part[part] = run(ElemRange{begin, std::min(begin + kPartElems, elems)});
        times_by_part[part].end_ns = MonotonicNs();
      },
      [this, task, timed, join, found = std::move(found), times = std::move(times)] {
        TaskDone done = join(found, &memory_);
        done.task = task;
        TimedEvent event = timed.event;
        event.start_ns = std::ranges::min(times, {}, &Times::start_ns).start_ns;
        event.end_ns = std::ranges::max(times, {}, &Times::end_ns).end_ns;
        jobs_.at(timed.job).timeline.Add(event);
        Raise(std::move(done));
      },
      timed.group);
}

// ----------------------------------------------------------------------------- making and unmaking

void Executor::Run(CreateJobMemory& action) {
  for (const JobView& view : state_.node().Jobs()) {
    if (view.id != action.job) continue;
    if (!action.keeps_gradients) recovery_.DropGradients(action.job);
    const bool has_step = jobs_.Create(action, {.uid = view.uid, .name = view.name}, view.layout);
    // Without its step arena, the extra_state that the record describes is lost.
    if (!has_step) recovery_.records().End(action.job);
    return;
  }
  FOREBAY_CHECK(false);
}

void Executor::Run(ReplaceStepArena& action) {
  recovery_.records().End(action.job);
  jobs_.Replace(action);
}

void Executor::Run(PopulateStepArena& action) { jobs_.Populate(action); }

void Executor::Run(CreateJobSwap& action) {
  FOREBAY_CHECK(swap_ != nullptr);
  std::vector<SwapDone> done;
  swap_->StartZero(action, done);
  EndTransfers(done);
}

void Executor::Run(CreateSessionMemory& action) {
  ClientSession& attaching = sessions_.at(action.session);
  SessionMemoryOptions memory{
      .job = attaching.request.job,
      .rank = attaching.rank(),
      .grad_bytes = protocol::RoundUp(action.grad_bytes, protocol::kPageBytes),
      .arenas = options_.arenas};
  memory.grad = recovery_.GradientsFor(action.job, attaching.request, memory.grad_bytes);
  const bool is_registered = memory.grad != nullptr;
  if (is_registered) attaching.kept_of = action.job;
  runner_.Post(PoolId::kSetup, [this, action, memory, is_registered]() -> TaskRunner::Then {
    auto made = MakeSessionMemory(memory);
    return [this, action, memory, is_registered, made = std::move(made)]() mutable {
      const auto fail = [&](const absl::Status& status) {
        KeepGradientsFurther(sessions_.at(action.session), memory.grad);
        Done(action.task, status);
      };
      if (!made.ok()) return fail(made.status());
      const SessionMemory arenas = *made;
      ClientSession& session = sessions_.at(action.session);
      auto io = SessionIo::Create(*std::move(made), session.request.protocol_version);
      if (!io.ok()) return fail(io.status());
      session.io = *std::move(io);
      const int rank = session.rank();
      if (!is_registered) registry_.Register({ArenaKind::kGrad, session.job, rank}, arenas.grad);
      registry_.Register({ArenaKind::kRing, session.job, rank}, arenas.ring);
      Done(action.task, absl::OkStatus());
    };
  });
}

void Executor::KeepGradientsFurther(const ClientSession& session, ArenaRegistry::Arena arena) {
  if (session.kept_of == 0) return;
  jobs_.at(session.kept_of).gradients.emplace(session.request.rank, std::move(arena));
}

absl::StatusOr<SessionFds> Executor::FdsFor(ClientSession& session, const AnswerAttach& answer) {
  ASSIGN_OR_RETURN(SessionFds fds, session.io->MakeClientFds());
  JobMemory& job = jobs_.at(answer.job);
  const bool is_writable = session.request.writable_weights && !session.request.reader;
  ASSIGN_OR_RETURN(fds.weights,
                   is_writable ? job.weights->WritableClientFd() : job.weights->ClientFd());
  const uint64_t saved_bytes = answer.extra_state_bytes + answer.rank0_extra_state_bytes;
  if (saved_bytes == 0) return fds;
  const auto own = Part(job.step, answer.extra_state_offset, answer.extra_state_bytes);
  const auto rank0 =
      Part(job.step, answer.rank0_extra_state_offset, answer.rank0_extra_state_bytes);
  pinned_mem::ArenaOptions copy = options_.arenas.Shared("forebay-extra-state", saved_bytes);
  copy.access = pinned_mem::Access::kServed;
  ASSIGN_OR_RETURN(session.extra_state, pinned_mem::PinnedArena::Create(copy));
  std::ranges::copy(rank0, std::ranges::copy(own, session.extra_state->bytes().begin()).out);
  registry_.Register({ArenaKind::kExtraState, session.job, session.rank()}, session.extra_state);
  ASSIGN_OR_RETURN(fds.extra_state, session.extra_state->ClientFd());
  return fds;
}

void Executor::Run(AnswerAttach& action) {
  const SessionId id = action.session;
  ClientSession& session = sessions_.at(id);
  AttachResult result{.answer = std::move(action), .fds = {}};
  if (result.answer.status.ok()) {
    const bool is_back = session.job_id != 0;  // the client continues a session of this daemon
    session.trace_bytes = result.answer.trace_bytes;
    session.job_id = result.answer.job;
    if (!session.request.reader) {
      const absl::Status stored = recovery_.store().Put(
          GradientsDescriptor(session.job_id, session.request.rank), session.io->grad());
      if (!stored.ok()) spdlog::warn("{}", protocol::FormatError(stored));
      if (!is_back) OnRankAttached(id, session);
    }
    auto fds = FdsFor(session, result.answer);
    if (fds.ok()) {
      result.fds = *std::move(fds);
      result.rpc_calls = jobs_.at(session.job_id).rpc_calls;
    } else {
      result.answer.status = fds.status();
      if (is_back) {
        reconnects_.Disconnect(id);
      } else {
        Raise(SessionEnded{.session = id, .cause = EndCause::kLost});
      }
    }
  } else if (session.was_mapped) {  // the session cannot continue
    Raise(SessionEnded{.session = id, .cause = EndCause::kLost});
  }
  result.answer.session = session.number;
  registry_.UpdatePeak();
  spdlog::debug(
      "session {}, {}: {}", result.answer.session, session.Who(),
      result.answer.status.ok() ? "attached" : protocol::FormatError(result.answer.status));
  if (session.callbacks.answered) session.callbacks.answered(std::move(result));
}

void Executor::Run(AnswerCommand& action) {
  ClientSession* const session = sessions_.Find(action.session);
  if (session == nullptr || session->broken || session->is_stopped) return;
  if (!action.status.ok()) session->io->KeepError(action.completion.tag, action.status);
  const absl::Status sent = session->io->channel().Send(action.completion);
  if (!sent.ok()) Break(action.session, *session, sent);
}

void Executor::OnRankAttached(SessionId id, ClientSession& session) {
  recovery_.ranks().OnAttached(session);
  const JobId job = session.job_id;
  AttachRequested& request = session.request;
  const std::vector<std::string> exchanged = std::exchange(request.exchanged, {});
  if (!request.reattach) return exchange_.ForgetMade(job);
  if (request.exchanges == 0 || exchanged.empty()) return;
  exchange_.SetMade({.session = id,
                     .number = request.exchanges - 1,
                     .job = job,
                     .rank = request.rank,
                     .world_size = request.session_request.world_size},
                    exchanged);
}

void Executor::Run(CloseSession& action) {
  ClientSession session = sessions_.Remove(action.session, action.reason);
  if (!action.reason.ok()) {
    spdlog::warn("session {}, {}, is over: {}", action.session, session.Who(),
                 protocol::FormatError(action.reason));
  }
  absl::AnyInvocable<void(const absl::Status&)> closed = std::move(session.callbacks.closed);
  if (session.io != nullptr) {
    poller_.Remove(action.session);
    if (session.job_id == 0) KeepGradientsFurther(session, session.io->grad());
    if (session.job_id != 0 && !session.request.reader && !session.is_stopped) {
      recovery_.store().Drop(GradientsDescriptor(session.job_id, session.request.rank),
                             session.io->grad());
      recovery_.ranks().OnEnded(session, action.is_of_old_generation);
    }
    if (!session.is_stopped) session.io->channel().Close(protocol::ChannelState::kEnded);
    runner_.Retire(std::move(session.io));
  }
  if (session.extra_state != nullptr) runner_.Retire(std::move(session.extra_state));
  LeaveExchange(action.session);
  if (closed) closed(action.reason);
}

void Executor::Run(FreeJob& action) {
  recovery_.records().End(action.job);
  if (!action.keeps_arenas) recovery_.Drop(action.job);
  jobs_.Free(action);
}

void Executor::Run(AnswerDelete& action) {
  auto node = deletes_.extract(action.request);
  FOREBAY_CHECK(!node.empty());
  node.mapped()(std::move(action.status));
}

// ------------------------------------------------------------------------------------ small copies

void Executor::Run(CopyStepRequest& action) {
  // The answer comes before any other event. Its actions run after those that run now.
  state_.Answer(sessions_.io(action.session).CopyRequest(action, &memory_));
}

void Executor::Run(WriteSummary& action) {
  const auto to =
      Part(sessions_.io(action.session).grad(), action.arena_offset_bytes, action.bytes.size());
  std::ranges::copy(action.bytes, to.begin());
}

void Executor::Run(CopySummary& action) {
  const auto from =
      Part(sessions_.io(action.session).grad(), action.arena_offset_bytes, action.bytes);
  state_.Answer(SummaryCopied{
      .session = action.session, .tag = action.tag, .bytes = {from.begin(), from.end()}});
}

void Executor::Run(CopyInitial& action) {
  const ArenaRegistry::Arena grad = sessions_.io(action.session).grad();
  const auto from = Part(grad, action.grad_offset_bytes, action.bytes);
  const auto to = Part(jobs_.at(action.job).weights, action.weights_offset_bytes, action.bytes);
  const uint64_t checked = action.checked_bytes;
  PostTask(action.task, [grad, from, to, checked, dtype = action.dtype] {
    return Counted(RunCopyInitial(dtype, from, to, checked) ? 0 : 1);
  });
}

void Executor::Run(CopyToStepArena& action) {
  const ArenaRegistry::Arena grad = sessions_.io(action.session).grad();
  const auto from = Part(grad, action.grad_offset_bytes, action.bytes);
  const auto to = Part(jobs_.at(action.job).step, action.step_offset_bytes, action.bytes);
  PostTask(action.task, [grad, from, to] {
    protocol::CopyChanged(from, to);  // most of extra_state is equal to that of an older step
    return TaskDone{};
  });
}

// ------------------------------------------------------------------------------------ the gradient

void Executor::Run(AddGradients& action) {
  JobMemory& job = jobs_.at(action.job);
  const uint64_t bytes = action.elems * protocol::SizeBytes(action.dtype);
  std::pmr::vector<ArenaRegistry::Arena> owners(&memory_);
  std::pmr::vector<std::span<const std::byte>> sources(&memory_);
  for (const GradientSource& source : action.sources) {
    owners.push_back(source.session == 0 ? job.step : sessions_.io(source.session).grad());
    sources.push_back(Part(owners.back(), source.offset_bytes, bytes));
  }
  const auto to = Part(job.step, action.accumulator_offset_bytes,
                       action.elems * protocol::SizeBytes(action.sum_dtype));
  const TaskId task = action.task;
  const uint64_t elems = action.elems;
  const Timed timed{.job = action.job,
                    .event = {.lane = Lane::kGradient,
                              .subject = TimedSubject::kPartition,
                              .index = action.partition,
                              .bytes = bytes * action.sources.size()}};
  PostParts<AddedGradients>(
      task, timed, elems,
      [owners = std::move(owners), sources = std::move(sources), to, action = std::move(action)](
          ElemRange range) { return RunAddGradients(action, range, sources, to); },
      [](std::span<const AddedGradients> parts, std::pmr::memory_resource*) {
        TaskDone done;
        for (const AddedGradients& part : parts) {
          if (part.culprit != 0 && (done.count == 0 || part.culprit < done.count)) {
            done.count = part.culprit;
          }
          done.squares.Merge(part.squares);
        }
        return done;
      });
}

void Executor::Run(SumGradient& action) {
  JobMemory& job = jobs_.at(action.job);
  const uint64_t bytes = action.elems * protocol::SizeBytes(action.sum_dtype);
  const std::span<const std::byte> accumulator =
      Part(job.step, action.accumulator_offset_bytes, bytes);
  PostParts<cpu_adam::SquareSum>(
      action.task,
      {.job = action.job,
       .event = {.lane = Lane::kGradient,
                 .subject = TimedSubject::kPartition,
                 .index = action.partition,
                 .bytes = bytes}},
      action.elems,
      [accumulator, dtype = action.sum_dtype](ElemRange range) {
        return RunSumGradient(dtype, range, accumulator);
      },
      [](std::span<const cpu_adam::SquareSum> parts, std::pmr::memory_resource*) {
        TaskDone done;
        for (const cpu_adam::SquareSum& part : parts) done.squares.Merge(part);
        return done;
      });
}

// ---------------------------------------------------------------------------------------- the step

void Executor::Run(ReadBlock& action) {
  FOREBAY_CHECK(swap_ != nullptr);
  if (!action.place.slot) {  // a block that was never written: zeros, without a read
    const auto slot = swap_->Slot(action.place.staging_slot, action.bytes);
    PostTask(action.task, [slot] {
      std::memset(slot.data(), 0, slot.size());
      return TaskDone{};
    });
    return;
  }
  std::vector<SwapDone> done;
  swap_->StartRead({.task = action.task,
                    .job = action.job,
                    .block = action.block,
                    .slot = *action.place.slot,
                    .bytes = swap_->Slot(action.place.staging_slot, action.bytes)},
                   done);
  EndTransfers(done);
}

int Executor::GroupOf(const JobMemory& job, const BlockPlace& place, uint64_t bytes) const {
  if (place.resident) return options_.arenas.GroupAt(*job.state, place.state_offset_bytes, bytes);
  const std::span<const std::byte> slot = swap_->Slot(place.staging_slot, bytes);
  const auto offset = static_cast<uint64_t>(slot.data() - swap_->staging()->bytes().data());
  return options_.arenas.GroupAt(*swap_->staging(), offset, bytes);
}

void Executor::Run(UpdateBlock& action) {
  JobMemory& job = jobs_.at(action.job);
  const bool resident = action.place.resident;
  UpdateMemory memory{.states = StatesAt(job, action.place, action.bytes, swap_),
                      .accumulators = job.step->bytes(),
                      .new_weights = job.step->bytes()};
  std::shared_ptr<KeptRecord> record;
  if (action.is_recorded) record = recovery_.records().Find(action.job);
  if (record != nullptr) {
    memory.undo = &record->undo();
    memory.block_arena = resident ? UndoneArena::kStates : UndoneArena::kStaging;
    const std::span<std::byte> arena = resident ? job.state->bytes() : swap_->staging()->bytes();
    memory.block_offset_bytes = static_cast<uint64_t>(memory.states.block.data() - arena.data());
  }
  const TaskId task = action.task;
  const uint64_t elems = action.block_elems;
  const Timed timed{.job = action.job,
                    .event = {.lane = Lane::kUpdate,
                              .subject = TimedSubject::kBlock,
                              .index = action.identity_before.block,
                              .bytes = action.bytes},
                    .group = GroupOf(job, action.place, action.bytes)};
  if (resident) {
    PostParts<UpdateFound>(
        task, timed, elems,
        [action = std::move(action), memory, record = std::move(record)](ElemRange range) {
          return RunUpdate(action, range, memory);
        },
        JoinUpdate);
    return;
  }
  const auto expected =
      swap_->Expected(action.place, action.identity_before, action.checksum_before);
  PostTimed(task, timed,
            [action = std::move(action), memory, record = std::move(record), expected,
             nonce = swap_->nonce()] {
              TaskDone done;
              const BlockIdentity& after = action.identity_after;
              const bool has_begun =
                  memory.undo != nullptr && memory.undo->HasBegun(after.block, after.written_step);
              if (!has_begun) {
                done.status = VerifyBlock(expected, action.identity_before, memory.states.block);
              }
              return done.status.ok() ? RunUpdateForSwap(action, memory, nonce) : done;
            });
}

void Executor::Run(InstallWeights& action) {
  const JobMemory& job = jobs_.at(action.job);
  uint64_t bytes = 0;
  for (const BytesCopy& copy : action.copies) bytes += copy.size_bytes;
  const TaskId task = action.task;
  const Timed timed{.job = action.job,
                    .event = {.lane = Lane::kUpdate,
                              .subject = TimedSubject::kWeightsOfBlock,
                              .index = action.block,
                              .bytes = bytes},
                    .group = options_.arenas.GroupAt(*job.weights, action.copies[0].to_bytes,
                                                     action.copies[0].size_bytes)};
  PostTimed(task, timed, [action = std::move(action), step = job.step, weights = job.weights] {
    RunCopies(action.copies, step->bytes(), weights->bytes());
    return TaskDone{};
  });
}

void Executor::Run(WriteBlock& action) {
  FOREBAY_CHECK(swap_ != nullptr && action.place.slot.has_value());
  if (!action.read_from) return Write(action);
  BlockPlace read = action.place;
  read.slot = std::exchange(action.read_from, std::nullopt);
  const auto expected = swap_->Expected(read, action.identity, action.checksum);
  const auto bytes = swap_->Slot(action.place.staging_slot, action.bytes);
  runner_.Post(PoolId::kUpdate, [this, action, expected, bytes]() -> TaskRunner::Then {
    const absl::Status verified = VerifyBlock(expected, action.identity, bytes);
    return [this, action, verified] {
      if (verified.ok()) return Write(action);
      spdlog::error("{}", protocol::FormatError(verified));
      Done(action.task, verified);
    };
  });
}

void Executor::Write(const WriteBlock& action) {
  std::vector<SwapDone> done;
  swap_->StartWrite({.task = action.task,
                     .job = action.job,
                     .block = action.identity.block,
                     .slot = *action.place.slot,
                     .bytes = swap_->Slot(action.place.staging_slot, action.bytes)},
                    action.pause, done);
  EndTransfers(done);
}

void Executor::Run(DecodeState& action) {
  JobMemory& job = jobs_.at(action.job);
  const bool resident = action.place.resident;
  const ArenaRegistry::Arena grad = sessions_.io(action.session).grad();
  const StateMemory memory = StatesAt(job, action.place, action.block_bytes, swap_);
  const auto expected =
      resident ? std::nullopt : swap_->Expected(action.place, action.identity, action.checksum);
  const auto to = Part(grad, action.grad_offset_bytes, action.elems * sizeof(float));
  PostTask(action.task, [action, resident, grad, memory, expected, to] {
    TaskDone done;
    if (!resident) {
      done.status = VerifyBlock(expected, action.identity, memory.block);
      if (!done.status.ok()) return done;
    }
    RunDecodeState(action, memory, to);
    return done;
  });
}

void Executor::Run(SetState& action) {
  JobMemory& job = jobs_.at(action.job);
  const ArenaRegistry::Arena grad = sessions_.io(action.session).grad();
  const auto from =
      Part(grad, action.grad_offset_bytes, action.elems * protocol::SizeBytes(action.dtype));
  const StateMemory memory =
      action.in_block ? StatesAt(job, action.in_block->place, action.in_block->block_bytes, swap_)
                      : WeightsOf(job);
  if (!action.in_block || action.in_block->place.resident) {
    PostTask(action.task, [action, grad, from, memory] {
      return Counted(RunSetState(action, memory, from) ? 0 : 1);
    });
    return;
  }
  const SetState::InBlock& in_block = *action.in_block;
  const auto expected = swap_->Expected(in_block.place, in_block.identity, in_block.checksum);
  PostTask(action.task, [action, grad, from, memory, expected, nonce = swap_->nonce()] {
    TaskDone done;
    done.status = VerifyBlock(expected, action.in_block->identity, memory.block);
    if (!done.status.ok()) return done;
    const bool was_set = RunSetState(action, memory, from);
    done = DigestBlock(action.in_block->identity, nonce, action.in_block->states_elems, memory);
    done.count = was_set ? 0 : 1;
    return done;
  });
}

void Executor::Run(LoadWeights& action) {
  FOREBAY_CHECK(swap_ != nullptr);
  const auto staged = swap_->Slot(action.staging_slot, action.bytes);
  const SwapTransfer transfer{.task = action.task,
                              .job = action.job,
                              .block = action.block,
                              .slot = action.slot,
                              .bytes = staged,
                              .slot_offset_bytes = action.slot_offset_bytes,
                              .order = TransferQueue::Order::kUrgent};
  loads_.emplace(action.task, std::move(action));
  std::vector<SwapDone> done;
  swap_->StartRead(transfer, done);
  EndTransfers(done);
}

bool Executor::CopyLoaded(const SwapDone& read, uint64_t end_ns) {
  auto node = loads_.extract(read.task);
  if (node.empty() || !read.status.ok()) return false;
  LoadWeights& action = node.mapped();
  const auto staged = swap_->Slot(action.staging_slot, action.bytes);
  const auto weights = jobs_.at(action.job).weights->bytes();
  const std::string_view path = swap_->path_name(action.slot.path);
  PostTask(read.task,
           [action = std::move(action), path, staged, weights, begin_ns = read.start_ns, end_ns] {
             TaskDone done;
             done.begin_ns = begin_ns;
             done.end_ns = end_ns;
             done.status = RunLoadWeights(action, path, staged, weights);
             return done;
           });
  return true;
}

void Executor::Run(EvictBlock& action) { mover_.Evict(action, jobs_.at(action.job).state); }

void Executor::Run(PromoteBlock& action) { mover_.Promote(action, jobs_.at(action.job).state); }

void Executor::Run(SpillSums& action) { mover_.Spill(action, jobs_.at(action.job).step); }

void Executor::Run(LoadSums& action) { mover_.Load(action, jobs_.at(action.job).step); }

// ----------------------------------------------------------------------------------- durable steps

void Executor::Run(SavePart& action) {
  const JobMemory& job = jobs_.at(action.job);
  mover_.Save(action, action.arena == SavedArena::kStates ? job.state : job.weights);
}

void Executor::Run(RestorePart& action) {
  const JobMemory& job = jobs_.at(action.job);
  mover_.Load(action, action.arena == SavedArena::kStates ? job.state : job.weights);
}

void Executor::Run(KeepExtraStates& action) {
  PostTask(action.task, [parts = std::move(action.parts), step = jobs_.at(action.job).step] {
    TaskDone done;
    done.extra_states = RunKeepExtraStates(parts, step->bytes());
    return done;
  });
}

void Executor::Run(RestoreExtraStates& action) {
  const TaskId task = action.task;
  ArenaRegistry::Arena step = jobs_.at(action.job).step;
  PostTask(task, [action = std::move(action), step = std::move(step)] {
    RunRestoreExtraStates(action, step->bytes());
    return TaskDone{};
  });
}

void Executor::Run(DigestWeights& action) {
  PostTask(action.task, [action, weights = jobs_.at(action.job).weights] {
    const auto bytes = weights->bytes().subspan(action.offset_bytes, action.bytes);
    TaskDone done;
    done.checksum = nvme::Checksum({}, bytes);
    return done;
  });
}

void Executor::Run(CommitLedger& action) {
  FOREBAY_CHECK(swap_ != nullptr);
  if (action.pause) {
    action.pause = false;
    return state_.StartTimer(MonotonicNs() + SwapSpace::kPauseNs, Action(std::move(action)));
  }
  runner_.Post(PoolId::kUpdate, [this, action]() -> TaskRunner::Then {
    auto ledger = EncodeLedger(*action.node, swap_->nonce(), swap_->place());
    return [this, task = action.task, node = action.node, ledger = std::move(ledger)] {
      if (!ledger.ok()) {
        spdlog::error("{}", protocol::FormatError(ledger.status()));
        return Done(task, ledger.status());
      }
      std::vector<SwapDone> done;
      swap_->CommitLedger(task, *ledger, SlotsOf(*node), done);
      EndTransfers(done);
    };
  });
}

void Executor::Run(JobWentBack& action) {
  spdlog::warn(
      "job {} goes back from step {} to step {}, which is durable: another of its nodes has no "
      "newer one",
      action.job, action.from_step, action.to_step);
}

void Executor::Run(UpdateNotResumed& action) {
  spdlog::error(
      "job {}: the update of step {}, in which the daemon before was killed, cannot go on: {}",
      action.job, action.step, protocol::FormatError(action.reason));
}

void Executor::Run(RoomAwaited& action) {
  spdlog::info("job {} waits for {} of DRAM until blocks have moved to swap, of: {}", action.job,
               protocol::FormatBytes(action.missing_bytes),
               absl::StrJoin(action.evicting_jobs, ", "));
}

void Executor::Run(StartLeaseTimer& action) {
  const auto wait_ns = static_cast<uint64_t>(options_.reader_lease_max.count());
  state_.StartTimer(MonotonicNs() + wait_ns,
                    Event(LeaseTimeExpired{.job = action.job, .step = action.step}));
}

void Executor::Run(StepCalled& action) { jobs_.at(action.job).timeline.StepCalled(MonotonicNs()); }

void Executor::Run(StepCommitted& action) {
  jobs_.at(action.job).timeline.StepCommitted(MonotonicNs());
}

void Executor::Run(EarlyUpdatesDropped& action) {
  spdlog::debug("job {}: {} blocks were updated early in vain", action.job, action.blocks.size());
}

void Executor::Run(SwapPathMarked& action) {
  const std::string_view path = swap_->path_name(action.path);
  if (action.marked) {
    spdlog::error(
        "swap path {} ({}) has failed {} times without a success: it gets new writes where no "
        "other path has room, and its blocks move away; forebay swap shows it",
        action.path, path, PathTable::kPathErrorsMax);
  } else {
    spdlog::info("swap path {} ({}) works again", action.path, path);
  }
}

void Executor::Run(StepPublished& action) {
  // Without a store, the job's record is only for an update that the earlier daemon began, which is finished now.
  if (!recovery_.store().is_available()) recovery_.records().End(action.job);
  jobs_.at(action.job).timeline.StepPublished(action.step, MonotonicNs());
  registry_.UpdatePeak();
}

}  // namespace forebay::daemon
