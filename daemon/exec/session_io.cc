// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/session_io.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/ring.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::UniqueFd;

absl::StatusOr<UniqueFd> Duplicate(const UniqueFd& from) {
  UniqueFd copy(::fcntl(from.get(), F_DUPFD_CLOEXEC, 3));
  if (!copy.valid()) return NoDescriptor("duplicate a descriptor of a session");
  return copy;
}

}  // namespace

absl::Status NoDescriptor(const char* what) {
  return protocol::MakeError(ErrorId::kLimit, protocol::ErrnoText(what, errno),
                             "raise the daemon's limit of open files (LimitNOFILE=)");
}

namespace {

pinned_mem::ArenaOptions SessionArena(const ArenaPolicy& policy, const char* kind,
                                      const std::string& job, int32_t rank, uint64_t bytes) {
  pinned_mem::ArenaOptions arena = policy.Shared(
      absl::StrCat(kind, job.substr(0, 100), "-", rank < 0 ? "reader" : absl::StrCat(rank)), bytes);
  arena.access = pinned_mem::Access::kShared;
  return arena;
}

}  // namespace

pinned_mem::ArenaOptions GradientOptions(const ArenaPolicy& policy, const std::string& job,
                                         int32_t rank, uint64_t bytes) {
  return SessionArena(policy, "forebay-grad-", job, rank, bytes);
}

absl::StatusOr<SessionMemory> MakeSessionMemory(const SessionMemoryOptions& options) {
  SessionMemory memory{.grad = options.grad, .ring = nullptr};
  if (memory.grad == nullptr) {
    ASSIGN_OR_RETURN(memory.grad,
                     pinned_mem::PinnedArena::Create(GradientOptions(
                         options.arenas, options.job, options.rank, options.grad_bytes)));
  }
  ASSIGN_OR_RETURN(memory.ring, pinned_mem::PinnedArena::Create(
                                    SessionArena(options.arenas, "forebay-ring-", options.job,
                                                 options.rank, sizeof(protocol::RingMemory))));
  return memory;
}

absl::StatusOr<std::unique_ptr<SessionIo>> SessionIo::Create(SessionMemory memory,
                                                             uint32_t protocol_version) {
  std::unique_ptr<SessionIo> session(new SessionIo());
  session->memory_ = std::move(memory);
  ASSIGN_OR_RETURN(session->command_doorbell_, protocol::MakeDoorbell());
  ASSIGN_OR_RETURN(session->completion_doorbell_, protocol::MakeSocketDoorbell());
  auto* ring = reinterpret_cast<protocol::RingMemory*>(session->memory_.ring->bytes().data());
  protocol::FormatRing(*ring, protocol_version);
  session->channel_ = protocol::MakeRingServerChannel(
      {.ring = ring,
       .command_doorbell_fd = session->command_doorbell_.get(),
       .completion_doorbell_fd = session->completion_doorbell_.ringer.get()});
  return session;
}

absl::StatusOr<SessionFds> SessionIo::MakeClientFds() const {
  SessionFds fds;
  ASSIGN_OR_RETURN(fds.grad, memory_.grad->ClientFd());
  ASSIGN_OR_RETURN(fds.ring, memory_.ring->ClientFd());
  ASSIGN_OR_RETURN(fds.command_doorbell, Duplicate(command_doorbell_));
  ASSIGN_OR_RETURN(fds.completion_doorbell, Duplicate(completion_doorbell_.waiter));
  return fds;
}

StepRequestCopied SessionIo::CopyRequest(const CopyStepRequest& action,
                                         std::pmr::memory_resource* memory) const {
  const std::span<const std::byte> arena = memory_.grad->bytes();
  FOREBAY_CHECK(action.length_bytes >= sizeof(protocol::StepRequest) &&
                action.arena_offset_bytes + action.length_bytes <= arena.size());
  const auto bytes = arena.subspan(action.arena_offset_bytes, action.length_bytes);
  StepRequestCopied copied{.session = action.session,
                           .tag = action.tag,
                           .request = {},
                           .hyper_params = std::pmr::vector<protocol::HyperParams>(memory),
                           .presence = std::pmr::vector<uint64_t>(memory)};
  std::memcpy(&copied.request, bytes.data(), sizeof(copied.request));
  const uint64_t room =
      (bytes.size() - sizeof(protocol::StepRequest)) / sizeof(protocol::HyperParams);
  const uint64_t count =
      std::min<uint64_t>({copied.request.param_groups, room, protocol::kParamGroupsMax});
  copied.hyper_params.resize(count);
  auto rest = bytes.subspan(sizeof(protocol::StepRequest));
  if (count > 0) {
    std::memcpy(copied.hyper_params.data(), rest.data(), count * sizeof(protocol::HyperParams));
    rest = rest.subspan(count * sizeof(protocol::HyperParams));
  }
  copied.presence.resize(std::min<uint64_t>(action.presence_words, rest.size() / sizeof(uint64_t)));
  if (!copied.presence.empty()) {
    std::memcpy(copied.presence.data(), rest.data(), copied.presence.size() * sizeof(uint64_t));
  }
  return copied;
}

void SessionIo::KeepError(uint64_t tag, absl::Status status) {
  if (errors_.size() == kErrorsKeptMax) errors_.pop_front();
  errors_.emplace_back(tag, std::move(status));
}

absl::Status SessionIo::Explain(uint64_t tag) const {
  const auto found = std::find_if(errors_.rbegin(), errors_.rend(),
                                  [&](const auto& entry) { return entry.first == tag; });
  return found == errors_.rend() ? absl::OkStatus() : found->second;
}

}  // namespace forebay::daemon
