// SPDX-License-Identifier: Apache-2.0
#include "client/internal/connection.h"

#include <sys/stat.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/channel.h"
#include "protocol/os/status_macros.h"
#include "protocol/wire.h"

namespace forebay::client::internal {
namespace {

using protocol::UniqueFd;

constexpr std::chrono::seconds kExplainTimeout{10};

// Zeros where the kernel does not say. `remote_inode`: of a daemon on another node.
FileIdentity IdentityOf(int fd, uint64_t remote_inode) {
  if (remote_inode != 0) return {.device = 0, .inode = remote_inode};
  struct stat info {};
  if (::fstat(fd, &info) != 0) return {};
  return {.device = info.st_dev, .inode = info.st_ino};
}

}  // namespace

std::string Difference(const SessionTerms& before, const SessionTerms& after) {
  const auto differs = [](const char* what, uint64_t was, uint64_t is) {
    return absl::StrCat(what, " was ", was, " and is ", is);
  };
  if (before.committed_step != after.committed_step) {
    return differs("the committed step", before.committed_step, after.committed_step);
  }
  if (before.weights_on_swap != after.weights_on_swap) {
    return after.weights_on_swap ? "weights are on swap now" : "weights are no longer on swap";
  }
  struct Number {
    const char* what;
    uint64_t SessionTerms::*value;
  };
  constexpr Number kNumbers[] = {
      {"the size of the weights arena, in bytes,", &SessionTerms::weights_bytes},
      {"the size of the gradient arena, in bytes,", &SessionTerms::grad_arena_bytes},
      {"the offset of the step region", &SessionTerms::step_region_offset},
      {"the size of the step region, in bytes,", &SessionTerms::step_region_bytes},
      {"the size of the trace, in bytes,", &SessionTerms::trace_bytes}};
  for (const auto& [what, value] : kNumbers) {
    if (before.*value != after.*value) return differs(what, before.*value, after.*value);
  }
  if (before.weights != after.weights) return "its memory of the weights is another";
  if (before.grad_arena != after.grad_arena) return "its memory of the gradients is another";
  return {};
}

absl::StatusOr<GrantedSession> ConnectAndAttach(const std::string& socket,
                                                const AttachRequest& request,
                                                std::span<const std::byte> encoded,
                                                const WaitLimits& limits,
                                                const RemoteArenas* remote_arenas) {
  using Kind = schema::Session::Kind;
  GrantedSession granted{.terms = {}, .connection = std::make_unique<Connection>()};
  Connection& connection = *granted.connection;
  ASSIGN_OR_RETURN(connection.control,
                   Control::Connect({.socket = socket, .remote_arenas = remote_arenas}, limits));
  Control* const control = connection.control.get();
  ASSIGN_OR_RETURN(granted.reply, control->Attach(request, encoded, limits));
  ASSIGN_OR_RETURN(granted.weights, control->Descriptor(Kind::WEIGHTS, limits));
  ASSIGN_OR_RETURN(granted.grad_arena, control->Descriptor(Kind::GRAD_ARENA, limits));
  ASSIGN_OR_RETURN(const UniqueFd ring_fd, control->Descriptor(Kind::RING, limits));
  ASSIGN_OR_RETURN(connection.command_doorbell,
                   control->Descriptor(Kind::COMMAND_DOORBELL, limits));
  ASSIGN_OR_RETURN(connection.completion_doorbell,
                   control->Descriptor(Kind::COMPLETION_DOORBELL, limits));
  ASSIGN_OR_RETURN(connection.ring, Mapping::MapFile(ring_fd.get(), sizeof(protocol::RingMemory),
                                                     MapAccess::kReadWrite));
  ASSIGN_OR_RETURN(
      granted.port.channel,
      protocol::MakeRingClientChannel(
          {.ring = reinterpret_cast<protocol::RingMemory*>(connection.ring->bytes().data()),
           .command_doorbell_fd = connection.command_doorbell.get(),
           .completion_doorbell_fd = connection.completion_doorbell.get()}));
  granted.port.daemon_pidfd = control->daemon_pidfd();
  granted.port.gone_fd = control->thread().gone_fd();
  granted.port.outlives_daemon = !request->getReader() && granted.reply->getOutlivesDaemon();
  granted.port.explain = [control](const protocol::Completion& completion) {
    return control->Explain(completion, {.deadline = Deadline::After(kExplainTimeout)});
  };
  const schema::AttachReply::Reader& reply = *granted.reply;
  granted.terms = {.committed_step = reply.getCommittedStep(),
                   .weights_bytes = reply.getWeightsBytes(),
                   .grad_arena_bytes = reply.getGradArenaBytes(),
                   .step_region_offset = reply.getStepRegionOffset(),
                   .step_region_bytes = reply.getStepRegionBytes(),
                   .trace_bytes = reply.getTraceBytes(),
                   .weights_on_swap = reply.getWeightsOnSwap(),
                   .leases = reply.getLeases(),
                   .weights = IdentityOf(granted.weights.get(), reply.getRemoteWeights()),
                   .grad_arena = IdentityOf(granted.grad_arena.get(), reply.getRemoteGradArena())};
  return granted;
}

}  // namespace forebay::client::internal
