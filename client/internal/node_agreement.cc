// SPDX-License-Identifier: Apache-2.0
#include "client/internal/node_agreement.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::StepDecision;
using protocol::StepSummary;

// Head of an encoded message. The text of an error or a summary follows.
struct Head {
  NodeMessage::Kind kind;
  uint8_t is_new;
  uint16_t error;
  uint32_t first_rank;
  uint64_t committed_step;
  uint64_t prepared_step;
  uint64_t durable_step;
  uint64_t durable_before;
  uint32_t message_bytes;  // bytes of the error's message; its hint follows
  uint32_t digests;        // number of digests, which follow the summary
};
static_assert(sizeof(Head) == 48);

absl::Status BadMessage(size_t bytes) {
  return MakeError(ErrorId::kProtocol,
                   absl::StrCat("a rank has sent ", bytes, " bytes that are no message of a step"),
                   "all ranks of a job use the same version of Forebay, and all_gather gives every "
                   "rank's bytes, by rank");
}

absl::StatusOr<std::vector<NodeMessage>> DecodeAll(std::span<const std::string> messages) {
  std::vector<NodeMessage> decoded;
  for (const std::string& bytes : messages) {
    ASSIGN_OR_RETURN(decoded.emplace_back(), DecodeNodeMessage(bytes));
  }
  if (decoded.empty()) return BadMessage(0);
  return decoded;
}

// Returns the error of a message with the number of its rank in front, for the other ranks to raise.
absl::Status ErrorOf(size_t rank, const NodeMessage& message) {
  return MakeError(protocol::IdOf(message.error),
                   absl::StrCat("rank ", rank, ": ", message.error.message()),
                   protocol::HintOf(message.error));
}

std::string RanksOf(const std::vector<size_t>& ranks) {
  const bool follow = ranks.back() - ranks.front() + 1 == ranks.size();
  if (ranks.size() > 2 && follow)
    return absl::StrCat("ranks ", ranks.front(), " to ", ranks.back());
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

// The ranks that say the same, by what they say.
template <typename Say>
std::string WhoSays(std::span<const NodeMessage> messages, Say say) {
  std::map<std::string, std::vector<size_t>> ranks;
  for (size_t rank = 0; rank < messages.size(); ++rank) ranks[say(messages[rank])].push_back(rank);
  std::vector<std::string> parts;
  for (const auto& [what, who] : ranks) parts.push_back(absl::StrCat(RanksOf(who), " ", what));
  return absl::StrJoin(parts, ", ");
}

// Returns the error of the lowest rank that sent its own error, and the decision that follows. nullopt: no rank sent one.
std::optional<StepOutcome> FirstError(std::span<const NodeMessage> messages) {
  std::optional<StepOutcome> outcome;
  bool is_own = false;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const NodeMessage& message = messages[rank];
    if (message.kind == NodeMessage::Kind::kPrepared) continue;
    if (!outcome) {
      outcome.emplace();
      outcome->summary.head.decision = StepDecision::kRepeat;
    }
    if (!is_own) outcome->error = ErrorOf(rank, message);
    is_own = is_own || message.kind != NodeMessage::Kind::kWithdrawn;
    if (message.kind == NodeMessage::Kind::kLost) {
      outcome->summary.head.decision = StepDecision::kDrop;
    }
  }
  return outcome;
}

bool Has(const NodeMessage::State& node, uint64_t step) {
  if (node.is_new) return false;
  return node.committed_step == step || node.durable_step == step || node.durable_before == step;
}

// The newest step that every node stands at or can go back to; 0: none.
uint64_t NewestCommonStep(std::span<const NodeMessage> messages) {
  const NodeMessage::State& first = messages[0].state;
  uint64_t newest = 0;
  for (const uint64_t step : {first.committed_step, first.durable_step, first.durable_before}) {
    const bool is_common = std::ranges::all_of(
        messages, [step](const NodeMessage& one) { return Has(one.state, step); });
    if (is_common) newest = std::max(newest, step);
  }
  return newest;
}

// Two nodes have other weights of a partition; OK: none has.
absl::Status CompareReplicas(std::span<const NodeMessage> messages, const protocol::Layout& layout,
                             uint64_t step) {
  std::map<uint64_t, std::pair<uint64_t, size_t>> seen;  // partition -> digest, rank
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    for (const ReplicaDigest& one : messages[rank].digests) {
      const auto [first, is_new] = seen.emplace(one.partition, std::pair(one.digest, rank));
      if (is_new || first->second.first == one.digest) continue;
      const std::vector<std::string>& groups = layout.spec().group_names;
      return MakeError(ErrorId::kCorrupt,
                       absl::StrCat("the replicas of ",
                                    one.group < groups.size() ? groups[one.group] : "a group",
                                    " on the nodes of ranks ", first->second.second, " and ", rank,
                                    " have other weights after step ", step - 1, ": step ", step,
                                    " is not applied"),
                       "one of them was computed or kept wrongly (memory, or a gradient that was "
                       "not reduced): go back to a "
                       "checkpoint on all nodes");
    }
  }
  return absl::OkStatus();
}

StepOutcome Refused(StepSummary summary, absl::Status error) {
  summary.head.decision = StepDecision::kRepeat;
  return {.summary = std::move(summary), .error = std::move(error)};
}

}  // namespace

std::vector<ReplicaDigest> ReplicaDigestsOf(const protocol::Layout& layout,
                                            std::span<const std::byte> bytes) {
  std::vector<ReplicaDigest> digests;
  for (uint32_t i = 0; (i + 1) * sizeof(uint64_t) <= bytes.size(); ++i) {
    uint64_t digest = 0;
    std::memcpy(&digest, bytes.data() + i * sizeof(digest), sizeof(digest));
    if (digest == 0) continue;
    const protocol::PartitionPlace& partition = layout.partitions()[i];
    std::string name;
    for (uint32_t box = partition.box_begin; box < partition.box_end; ++box) {
      const protocol::BoxSpec& of = layout.boxes()[box].box;
      absl::StrAppend(&name, layout.spec().params[of.param].name, " ", of.first_elem, " ",
                      of.run_elems, " ", of.stride_elems, " ", of.runs, "\n");
    }
    digests.push_back(
        {.partition = protocol::NameHash(name), .digest = digest, .group = partition.group});
  }
  return digests;
}

std::string EncodeNodeMessage(const NodeMessage& message) {
  const std::string text(message.error.message());
  const std::string hint = protocol::HintOf(message.error);
  const Head head{.kind = message.kind,
                  .is_new = static_cast<uint8_t>(message.state.is_new ? 1 : 0),
                  .error = static_cast<uint16_t>(protocol::IdOf(message.error)),
                  .first_rank = message.first_rank,
                  .committed_step = message.state.committed_step,
                  .prepared_step = message.state.prepared_step,
                  .durable_step = message.state.durable_step,
                  .durable_before = message.state.durable_before,
                  .message_bytes = static_cast<uint32_t>(text.size()),
                  .digests = static_cast<uint32_t>(message.digests.size())};
  std::string bytes(sizeof(head), '\0');
  std::memcpy(bytes.data(), &head, sizeof(head));
  if (!message.error.ok()) return bytes + text + hint;
  const auto append = [&bytes](std::span<const std::byte> more) {
    bytes.append(reinterpret_cast<const char*>(more.data()), more.size());
  };
  append(message.summary);
  append(std::as_bytes(std::span(message.digests)));
  return bytes;
}

absl::StatusOr<NodeMessage> DecodeNodeMessage(std::string_view bytes) {
  Head head{};
  if (bytes.size() < sizeof(head)) return BadMessage(bytes.size());
  std::memcpy(&head, bytes.data(), sizeof(head));
  const std::string_view rest = bytes.substr(sizeof(head));
  if (head.kind < NodeMessage::Kind::kPrepared || head.kind > NodeMessage::Kind::kWithdrawn ||
      head.message_bytes > rest.size()) {
    return BadMessage(bytes.size());
  }
  NodeMessage message{.kind = head.kind,
                      .first_rank = head.first_rank,
                      .state = {.committed_step = head.committed_step,
                                .prepared_step = head.prepared_step,
                                .durable_step = head.durable_step,
                                .durable_before = head.durable_before,
                                .is_new = head.is_new != 0}};
  if (head.error != 0) {
    message.error = MakeError(protocol::Info(static_cast<ErrorId>(head.error)).id,
                              rest.substr(0, head.message_bytes), rest.substr(head.message_bytes));
  } else {
    const uint64_t digests_bytes = head.digests * uint64_t{sizeof(ReplicaDigest)};
    if (digests_bytes > rest.size()) return BadMessage(bytes.size());
    const auto* const begin = reinterpret_cast<const std::byte*>(rest.data());
    message.summary.assign(begin, begin + (rest.size() - digests_bytes));
    message.digests.resize(head.digests);
    if (digests_bytes > 0) {
      std::memcpy(message.digests.data(), begin + message.summary.size(), digests_bytes);
    }
  }
  const bool is_error = head.kind == NodeMessage::Kind::kRefused ||
                        head.kind == NodeMessage::Kind::kLost ||
                        head.kind == NodeMessage::Kind::kWithdrawn;
  if (is_error == message.error.ok()) return BadMessage(bytes.size());
  return message;
}

absl::StatusOr<StepOutcome> DecideStep(std::span<const std::string> messages,
                                       const protocol::Layout& layout, uint64_t step) {
  ASSIGN_OR_RETURN(const std::vector<NodeMessage> decoded, DecodeAll(messages));
  if (std::optional<StepOutcome> outcome = FirstError(decoded)) return *std::move(outcome);
  std::optional<StepSummary> world;
  std::vector<StepSummary> nodes(decoded.size());
  for (size_t rank = 0; rank < decoded.size(); ++rank) {
    ASSIGN_OR_RETURN(nodes[rank],
                     protocol::DecodeStepSummary(decoded[rank].summary, layout.params().size()));
    if (nodes[rank].head.step != step) {
      return MakeError(ErrorId::kProtocol,
                       absl::StrCat("rank ", rank, " has prepared step ", nodes[rank].head.step,
                                    ", this one step ", step));
    }
    if (decoded[rank].first_rank != rank) continue;  // a node counts once
    if (world) {
      world->Merge(nodes[rank]);
    } else {
      world = nodes[rank];
    }
  }
  if (!world) return BadMessage(messages.front().size());
  if (absl::Status differ = CompareReplicas(decoded, layout, step); !differ.ok()) {
    return Refused(*std::move(world), std::move(differ));
  }
  for (size_t rank = 1; rank < nodes.size(); ++rank) {
    if (nodes[rank].head.scalars == nodes[0].head.scalars) continue;
    return Refused(*std::move(world),
                   MakeError(ErrorId::kStep,
                             absl::StrCat("ranks 0 and ", rank, " called step ", step,
                                          " with different scalars: lr or another hyper-parameter, "
                                          "max_grad_norm, or what gradients are multiplied by"),
                             "call step again with the same scalars on every rank; the gradients "
                             "are kept"));
  }
  const uint32_t partial = world->FirstPartial();
  if (partial < layout.params().size()) {
    size_t lacking = 0;
    while (!protocol::IsPresent(nodes[lacking].lacking, partial)) ++lacking;
    return Refused(
        *std::move(world),
        MakeError(ErrorId::kGradPartial,
                  absl::StrCat("the node of rank ", lacking,
                               " lacks a gradient of its part of parameter ",
                               layout.spec().params[partial].name, " in step ", step,
                               ", of which other nodes have one"),
                  "every rank takes part in the reduction of a gradient and delivers its "
                  "own part"));
  }
  world->head.decision = StepDecision::kCommit;
  return StepOutcome{.summary = *std::move(world), .error = absl::OkStatus()};
}

absl::StatusOr<AttachOutcome> AgreeOnStep(std::span<const std::string> messages,
                                          const std::string& job) {
  ASSIGN_OR_RETURN(const std::vector<NodeMessage> decoded, DecodeAll(messages));
  for (size_t rank = 0; rank < decoded.size(); ++rank) {
    if (!decoded[rank].error.ok()) return ErrorOf(rank, decoded[rank]);
  }
  const auto committed = [](const NodeMessage& one) { return one.state.committed_step; };
  const auto [low, high] = std::ranges::minmax(decoded, {}, committed);
  const uint64_t step = committed(low) + 1;
  const auto has_prepared = [&](const NodeMessage& one) { return one.state.prepared_step == step; };
  if (committed(low) == committed(high)) {
    const bool drops = std::ranges::any_of(decoded, has_prepared);
    return AttachOutcome{.todo = drops ? AttachOutcome::Todo::kDrop : AttachOutcome::Todo::kNothing,
                         .step = step};
  }
  const auto may_follow = [&](const NodeMessage& one) {
    return committed(one) == step || has_prepared(one);
  };
  if (committed(high) == step && std::ranges::all_of(decoded, may_follow)) {
    for (const NodeMessage& one : decoded) {
      if (committed(one) != step || one.summary.empty()) continue;
      return AttachOutcome{
          .todo = AttachOutcome::Todo::kCommit, .step = step, .summary = one.summary};
    }
  }
  if (const uint64_t common = NewestCommonStep(decoded); common > 0) {
    return AttachOutcome{
        .todo = AttachOutcome::Todo::kGoBack, .step = common, .from_step = committed(high)};
  }
  return MakeError(
      ErrorId::kStep,
      absl::StrCat("the nodes of job ", job, " stand at different steps: ",
                   WhoSays(decoded,
                           [](const NodeMessage& one) {
                             return one.state.is_new
                                        ? std::string("have no parameters of it")
                                        : absl::StrCat("at step ", one.state.committed_step,
                                                       " (durable ", one.state.durable_step, ")");
                           })),
      absl::StrCat("delete the job on every node (forebay jobs --delete ", job,
                   ") and start from a checkpoint of the script's own"));
}

}  // namespace forebay::client::internal
