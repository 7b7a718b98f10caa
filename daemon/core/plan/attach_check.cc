// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/plan/attach_check.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/wire.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// Checks a run token. It appears in messages to other processes of the job's user, so only printable characters are allowed.
absl::Status CheckRunToken(const std::string& run) {
  const auto is_printable = [](char c) { return c > ' ' && c <= '~'; };
  if (run.size() <= kRunTokenBytesMax && std::all_of(run.begin(), run.end(), is_printable)) {
    return absl::OkStatus();
  }
  return MakeError(ErrorId::kOption,
                   absl::StrCat("the run token has ", run.size(), " bytes (at most ",
                                kRunTokenBytesMax, ", printable characters without spaces)"),
                   "set FOREBAY_RUN, or run at attach, to a short name of this run");
}

// Checks that this node's ranks are a part of the job's ranks, and that the layout holds a part of the parameters.
absl::Status CheckNodes(const protocol::Layout& layout, const SessionRequest& request) {
  const bool is_over_nodes = request.world_ranks > 0;
  if (layout.spec().is_part != is_over_nodes) {
    return MakeError(ErrorId::kLayout, is_over_nodes
                                           ? "a job over several nodes, and a layout of one"
                                           : "a layout of one of several nodes, and a job on one");
  }
  if (!is_over_nodes) return absl::OkStatus();
  if (layout.is_shared()) {
    return MakeError(
        ErrorId::kUnsupported,
        absl::StrCat("a job of ", request.world_ranks, " ranks, of which ", request.world_size,
                     " are on this node, without partitions of theirs"),
        "attach sharded: with shared attachment all ranks have one daemon");
  }
  const uint32_t first_rank = layout.spec().first_rank;
  if (request.world_ranks <= request.world_size || request.world_ranks > kWorldRanksMax ||
      first_rank > request.world_ranks - request.world_size) {
    return MakeError(
        ErrorId::kRank,
        absl::StrCat("ranks ", first_rank, " to ", uint64_t{first_rank} + request.world_size - 1,
                     " on this node are not some of the job's ", request.world_ranks,
                     " ranks (at most ", kWorldRanksMax, ")"));
  }
  return absl::OkStatus();
}

// Checks that every owner of a partition is a rank on this node. Partitions of other replicas than 0 are allowed only if the
// job is over several nodes.
absl::Status CheckOwners(const protocol::Layout& layout, uint32_t world_size) {
  if (layout.is_shared()) return absl::OkStatus();
  for (const protocol::PartitionPlace& partition : layout.partitions()) {
    if (partition.owner >= world_size) {
      return MakeError(ErrorId::kRank, absl::StrCat("the layout has partitions of rank ",
                                                    layout.WorldRank(partition.owner),
                                                    "; the world size is ", world_size));
    }
    if (partition.replica != 0 && !layout.spec().is_part) {
      return MakeError(ErrorId::kUnsupported,
                       absl::StrCat("the layout has replica ", partition.replica, " of group ",
                                    partition.group, ": a node holds one copy"),
                       "give each shard one owner; the ranks that replicate it fetch that one");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckAttachRequest(const AttachRequested& request) {
  const SessionRequest& session = request.session_request;
  if (request.reader) return CheckReaderRequest(session.grad_arena_bytes);
  RETURN_IF_ERROR(CheckRunToken(request.run));
  if (session.world_size == 0 || session.world_size > protocol::kWorldMax) {
    return MakeError(ErrorId::kRank, absl::StrCat("world size ", session.world_size,
                                                  " is not 1 to ", protocol::kWorldMax));
  }
  if (request.rank >= session.world_size) {
    return MakeError(ErrorId::kRank, absl::StrCat("there is no rank ", request.rank,
                                                  " in a world of size ", session.world_size));
  }
  if (request.held_leases.size() > kLeasesPerSessionMax) {
    return MakeError(ErrorId::kLimit,
                     absl::StrCat("a session that held ", request.held_leases.size(),
                                  " leases (at most ", kLeasesPerSessionMax, ")"));
  }
  RETURN_IF_ERROR(CheckNodes(*request.layout, session));
  RETURN_IF_ERROR(CheckOwners(*request.layout, session.world_size));
  return CheckSessionRequest(*request.layout, session);
}

}  // namespace forebay::daemon
