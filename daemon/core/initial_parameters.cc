#include "daemon/core/initial_parameters.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

void InitialParameters::Write(JobIo& io, const CommandId& command, const protocol::Command& words) {
  const auto same_group = [&](const auto& entry) { return entry.second.group == words.group; };
  if (std::any_of(running_.begin(), running_.end(), same_group)) {
    io.Answer(command, MakeError(ErrorId::kProtocol,
                                 absl::StrCat("group ", words.group, " is being written already")));
    return;
  }
  written_[words.group] = false;
  const TaskId task = io.Start(
      TaskKind::kCopyInitial, command.session,
      CopyInitial{.session = command.session,
                  .grad_offset_bytes = words.arena_offset_bytes,
                  .weights_offset_bytes = layout_->groups()[words.group].weights_offset_bytes,
                  .bytes = layout_->group_bytes(words.group),
                  .dtype = layout_->spec().dtype});
  running_.emplace(task, Running{.command = command, .group = words.group});
}

void InitialParameters::OnCopied(JobIo& io, const TaskDone& done) {
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
  written_[copy.group] = status.ok();
  io.Answer(copy.command, status);
  TryDone(io);
}

void InitialParameters::Done(JobIo& io, const CommandId& command) {
  if (done_) {
    io.Answer(command, MakeError(ErrorId::kProtocol, "the end of the initial parameters was said"));
    return;
  }
  done_ = command;
  TryDone(io);
}

void InitialParameters::TryDone(JobIo& io) {
  if (!done_ || !running_.empty()) return;
  const CommandId command = *std::exchange(done_, std::nullopt);
  const auto missing = std::find(written_.begin(), written_.end(), false);
  if (missing != written_.end()) {
    const auto group = static_cast<size_t>(missing - written_.begin());
    io.Answer(command,
              MakeError(ErrorId::kNotReady,
                        absl::StrCat("the initial parameters of group ", group, " (",
                                     layout_->spec().group_names[group], ") were not written"),
                        "write every group, then end the initialisation"));
    return;
  }
  ready_ = true;
  writer_ = 0;
  io.Answer(command, absl::OkStatus());
}

void InitialParameters::Reset(JobIo& io, const absl::Status& status) {
  for (const auto& [task, copy] : running_) io.Answer(copy.command, status);
  if (done_) io.Answer(*done_, status);
  running_.clear();
  done_.reset();
  writer_ = 0;
  written_.assign(written_.size(), false);
}

}  // namespace forebay::daemon
