#include "daemon/core/initial_parameters.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

void InitialParameters::Write(const CommandId& command, const protocol::Command& words) {
  const auto same_group = [&](const auto& entry) { return entry.second.group == words.group; };
  if (std::any_of(running_.begin(), running_.end(), same_group)) {
    io_.Answer(command, MakeError(ErrorId::kProtocol, absl::StrCat("group ", words.group,
                                                                   " is being written already")));
    return;
  }
  written_[words.group] = false;
  const TaskId task = io_.Start(
      TaskKind::kCopyInitial, command.session,
      CopyInitial{.session = command.session,
                  .grad_offset_bytes = words.arena_offset_bytes,
                  .weights_offset_bytes = layout_->groups()[words.group].weights_offset_bytes,
                  .bytes = layout_->group_bytes(words.group),
                  .dtype = layout_->spec().dtype});
  running_.emplace(task, Running{.command = command, .group = words.group});
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
  written_[copy.group] = status.ok();
  io_.Answer(copy.command, status);
  TryDone();
}

void InitialParameters::Done(const CommandId& command) {
  if (done_) {
    io_.Answer(command,
               MakeError(ErrorId::kProtocol,
                         "an end of the initialisation is waiting for its answer already"));
    return;
  }
  done_ = command;
  TryDone();
}

void InitialParameters::TryDone() {
  if (!done_ || !running_.empty()) return;
  const CommandId command = *std::exchange(done_, std::nullopt);
  const auto missing = std::find(written_.begin(), written_.end(), false);
  if (missing != written_.end()) {
    const auto group = static_cast<size_t>(missing - written_.begin());
    io_.Answer(command,
               MakeError(ErrorId::kNotReady,
                         absl::StrCat("the initial parameters of group ", group, " (",
                                      layout_->spec().group_names[group], ") were not written"),
                         "write every group, then end the initialisation"));
    return;
  }
  ready_ = true;
  writer_ = 0;
  io_.Answer(command, absl::OkStatus());
}

void InitialParameters::Reset(const absl::Status& status) {
  for (const auto& [task, copy] : running_) io_.Answer(copy.command, status);
  if (done_) io_.Answer(*done_, status);
  running_.clear();
  done_.reset();
  writer_ = 0;
  written_.assign(written_.size(), false);
}

}  // namespace forebay::daemon
