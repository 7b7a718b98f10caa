#include "daemon/core/initial_parameters.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::kGradUnitElems;
using protocol::MakeError;

InitialParameters::InitialParameters(JobTasks& io, std::shared_ptr<const protocol::Layout> layout)
    : io_(io), layout_(std::move(layout)) {
  for (const protocol::GroupPlace& group : layout_->groups()) {
    written_.emplace_back((group.elems + kGradUnitElems - 1) / kGradUnitElems, false);
  }
}

void InitialParameters::SetWritten(const Running& range, bool written) {
  for (uint64_t elem = range.begin; elem < range.end; elem += kGradUnitElems) {
    written_[range.group][elem / kGradUnitElems] = written;
  }
}

void InitialParameters::Write(const CommandId& command, const protocol::Command& words) {
  const uint64_t width = protocol::SizeBytes(layout_->spec().dtype);
  const Running range{.command = command,
                      .group = words.group,
                      .begin = words.element_offset,
                      .end = words.element_offset + words.length_bytes / width};
  const auto overlaps = [&range](const auto& entry) {
    const Running& other = entry.second;
    return other.group == range.group && other.begin < range.end && range.begin < other.end;
  };
  if (std::any_of(running_.begin(), running_.end(), overlaps)) {
    io_.Answer(command,
               MakeError(ErrorId::kProtocol,
                         absl::StrCat("elements ", range.begin, " to ", range.end, " of group ",
                                      words.group, " are being written already")));
    return;
  }
  SetWritten(range, false);
  const TaskId task = io_.Start(
      TaskKind::kCopyInitial, command.session,
      CopyInitial{.session = command.session,
                  .grad_offset_bytes = words.arena_offset_bytes,
                  .weights_offset_bytes =
                      layout_->groups()[words.group].weights_offset_bytes + range.begin * width,
                  .bytes = words.length_bytes,
                  .dtype = layout_->spec().dtype});
  running_.emplace(task, range);
}

void InitialParameters::OnCopied(const TaskDone& done) {
  const auto it = running_.find(done.task);
  FOREBAY_CHECK(it != running_.end());
  const Running copy = it->second;
  running_.erase(it);
  absl::Status status = done.status;
  if (status.ok() && done.count > 0) {
    status =
        MakeError(ErrorId::kNonfinite,
                  absl::StrCat("the initial parameters of group ", copy.group, " (",
                               layout_->spec().group_names[copy.group], ") hold NaN or infinity"),
                  "check the initialisation or the loaded checkpoint");
  }
  SetWritten(copy, status.ok());
  io_.Answer(copy.command, status);
  TryDone();
}

void InitialParameters::Done(const CommandId& command) {
  if (done_) {
    io_.Answer(command, MakeError(ErrorId::kProtocol,
                                  "initial_done was called twice; the first call still waits",
                                  "wait for the first call"));
    return;
  }
  done_ = command;
  TryDone();
}

void InitialParameters::TryDone() {
  if (!done_ || !running_.empty()) return;
  const auto missing = std::find_if(written_.begin(), written_.end(), [](const auto& units) {
    return std::find(units.begin(), units.end(), false) != units.end();
  });
  if (missing != written_.end()) {
    const auto group = static_cast<size_t>(missing - written_.begin());
    io_.Answer(*std::exchange(done_, std::nullopt),
               MakeError(ErrorId::kNotReady,
                         absl::StrCat("the initial parameters of group ", group, " (",
                                      layout_->spec().group_names[group], ") were not all written"),
                         "write every group, then call initial_done"));
    return;
  }
  ready_ = true;
  writer_ = 0;
}

void InitialParameters::Reset(const absl::Status& status) {
  for (const auto& [task, copy] : running_) io_.Answer(copy.command, status);
  if (done_) io_.Answer(*done_, status);
  running_.clear();
  done_.reset();
  writer_ = 0;
  for (std::vector<bool>& units : written_) units.assign(units.size(), false);
}

}  // namespace forebay::daemon
