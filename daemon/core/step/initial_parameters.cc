// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/initial_parameters.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::kGradUnitElems;
using protocol::MakeError;

InitialParameters::InitialParameters(const JobSpec& spec, JobTasks& io)
    : spec_(spec), io_(io), ready_(spec.recovered != nullptr) {
  for (const protocol::PartitionPlace& partition : spec_.layout->partitions()) {
    written_.emplace_back((partition.elems + kGradUnitElems - 1) / kGradUnitElems, false);
  }
}

bool InitialParameters::WaitsForWriter(uint32_t rank) const {
  if (ready_ || (spec_.layout->is_shared() && rank != 0)) return false;
  return std::none_of(writers_.begin(), writers_.end(),
                      [rank](const auto& entry) { return entry.second.rank == rank; });
}

void InitialParameters::AddWriter(SessionId session, uint32_t rank) {
  FOREBAY_CHECK(WaitsForWriter(rank));
  writers_.emplace(session, Writer{.rank = rank});
}

bool InitialParameters::Writes(uint32_t rank, uint32_t partition) const {
  return spec_.layout->is_shared() || spec_.layout->partitions()[partition].owner == rank;
}

void InitialParameters::SetWritten(const PartitionRange& range, bool written) {
  for (uint64_t elem = range.begin; elem < range.end; elem += kGradUnitElems) {
    written_[range.partition][elem / kGradUnitElems] = written;
  }
}

absl::Status InitialParameters::CheckKind(const protocol::Command& words) {
  const bool masters = static_cast<protocol::Op>(words.op) == protocol::Op::kWriteState;
  if (has_masters_.value_or(masters) != masters) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("initial ", masters ? "masters" : "weights", " after initial ",
                                  masters ? "weights" : "masters"),
                     "write the initial parameters of all ranks in one way");
  }
  const uint64_t begin = words.element_offset;
  const uint64_t end = begin + words.length_bytes / sizeof(float);
  const bool ends_well =
      end % kGradUnitElems == 0 || end == spec_.layout->partitions()[words.partition].elems;
  if (masters && (begin % kGradUnitElems != 0 || !ends_well)) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("initial masters of elements ", begin, " to ", end, " of ",
                                  spec_.layout->DescribePartition(words.partition),
                                  ": they begin at multiples of ", kGradUnitElems,
                                  " and end at one or with the partition"));
  }
  has_masters_ = masters;
  return absl::OkStatus();
}

void InitialParameters::SetMasters(const PartitionRange& range, bool written) {
  if (!ready_) SetWritten(range, written);
}

void InitialParameters::Write(const CommandId& command, const protocol::Command& words) {
  const uint64_t width = protocol::SizeBytes(spec_.layout->spec().dtype);
  const PartitionRange range{.partition = words.partition,
                             .begin = words.element_offset,
                             .end = words.element_offset + words.length_bytes / width};
  const auto overlaps = [&range](const auto& entry) { return entry.second.range.Overlaps(range); };
  if (std::any_of(running_.begin(), running_.end(), overlaps)) {
    io_.Answer(command,
               MakeError(ErrorId::kProtocol,
                         absl::StrCat("elements ", range.begin, " to ", range.end, " of partition ",
                                      words.partition, " are being written already")));
    return;
  }
  SetWritten(range, false);
  const uint64_t trainable = spec_.layout->partitions()[range.partition].gradient_elems;
  const uint64_t checked = std::clamp(trainable, range.begin, range.end) - range.begin;
  const TaskId task = io_.Start(
      TaskKind::kCopyInitial, command.session,
      CopyInitial{.session = command.session,
                  .grad_offset_bytes = words.arena_offset_bytes,
                  .weights_offset_bytes =
                      spec_.plan.placement.WherePartition(words.partition).weights_offset_bytes +
                      range.begin * width,
                  .bytes = words.length_bytes,
                  .checked_bytes = checked * width,
                  .dtype = spec_.layout->spec().dtype});
  running_.emplace(task, Running{.command = command, .range = range});
}

void InitialParameters::OnCopied(const TaskDone& done) {
  const auto it = running_.find(done.task);
  FOREBAY_CHECK(it != running_.end());
  const Running copy = it->second;
  running_.erase(it);
  absl::Status status = done.status;
  if (status.ok() && done.count > 0) {
    status = MakeError(ErrorId::kNonfinite,
                       absl::StrCat("the initial parameters of ",
                                    spec_.layout->DescribePartition(copy.range.partition),
                                    " hold NaN or infinity"),
                       "check the initialisation or the loaded checkpoint");
  }
  SetWritten(copy.range, status.ok());
  io_.Answer(copy.command, status);
  TryDone();
}

void InitialParameters::Done(const CommandId& command) {
  Writer& writer = writers_.at(command.session);
  if (writer.done) {
    io_.Answer(command, MakeError(ErrorId::kProtocol,
                                  "initial_done was called twice; the first call still waits",
                                  "wait for the first call"));
    return;
  }
  writer.done = command;
  TryDone();
}

void InitialParameters::TryDone() {
  for (auto& [session, writer] : writers_) {
    const auto is_of = [id = session](const auto& entry) {
      return entry.second.command.session == id;
    };
    // A writer may write again while it waits for other writers.
    writer.complete = false;
    if (writer.done && std::none_of(running_.begin(), running_.end(), is_of)) {
      CheckComplete(writer);
    }
  }
  const uint32_t needed = spec_.layout->is_shared() ? 1 : spec_.world_size();
  const auto complete = std::count_if(writers_.begin(), writers_.end(),
                                      [](const auto& entry) { return entry.second.complete; });
  ready_ = static_cast<uint32_t>(complete) == needed;
}

// Completes the writer, so that its kInitialDone waits for the other writers, or answers the command with an error.
void InitialParameters::CheckComplete(Writer& writer) {
  for (uint32_t partition = 0; partition < written_.size(); ++partition) {
    const std::vector<bool>& units = written_[partition];
    if (!Writes(writer.rank, partition)) continue;
    if (std::find(units.begin(), units.end(), false) == units.end()) continue;
    io_.Answer(
        *std::exchange(writer.done, std::nullopt),
        MakeError(ErrorId::kNotReady,
                  absl::StrCat("the initial parameters of ",
                               spec_.layout->DescribePartition(partition), " were not all written"),
                  "write all of them, then call initial_done"));
    return;
  }
  writer.complete = true;
}

std::vector<CommandId> InitialParameters::DrainDone() {
  std::vector<CommandId> done;
  if (!ready_) return done;
  for (const auto& [session, writer] : writers_) done.push_back(*writer.done);
  writers_.clear();
  return done;
}

void InitialParameters::AnswerWriter(SessionId session, const absl::Status& status) {
  std::erase_if(running_, [&](const auto& entry) {
    if (entry.second.command.session != session) return false;
    io_.Answer(entry.second.command, status);
    return true;
  });
  Writer& writer = writers_.at(session);
  if (writer.done) io_.Answer(*std::exchange(writer.done, std::nullopt), status);
}

void InitialParameters::Reset(const absl::Status& status) {
  for (const auto& [session, writer] : writers_) AnswerWriter(session, status);
  writers_.clear();
  has_masters_.reset();
  for (std::vector<bool>& units : written_) units.assign(units.size(), false);
}

uint64_t InitialParameters::unanswered(SessionId session) const {
  const auto running = std::count_if(running_.begin(), running_.end(), [&](const auto& entry) {
    return entry.second.command.session == session;
  });
  const auto writer = writers_.find(session);
  const bool waits = writer != writers_.end() && writer->second.done;
  return static_cast<uint64_t>(running) + (waits ? 1 : 0);
}

}  // namespace forebay::daemon
