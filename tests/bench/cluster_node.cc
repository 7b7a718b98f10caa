// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/cluster_node.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "protocol/os/status_macros.h"
#include "protocol/wire.h"
#include "tests/bench/cluster_daemon.h"
#include "tools/forebay/cluster_model.h"

namespace forebay::tools {
namespace {

using protocol::Completion;
using protocol::Op;

constexpr uint32_t kStepsBefore = 2;
constexpr protocol::HyperParams kHyper{
    .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};

protocol::Command MakeCommand(Op op, uint32_t partition = 0) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(op);
  command.partition = partition;
  return command;
}

// The training ranks of the node. All ranks work in lockstep.
class VirtualTrainer {
 public:
  VirtualTrainer(const VirtualNodeOptions& options, VirtualClock& clock, VirtualDaemon& daemon)
      : options_(options), clock_(clock), daemon_(daemon), layout_(*options.layout) {
    groups_ = static_cast<uint32_t>(layout_.groups().size());
    of_group_.resize(groups_);
    uint32_t ranks = 0;
    for (uint32_t i = 0; i < layout_.partitions().size(); ++i) {
      const protocol::PartitionPlace& partition = layout_.partitions()[i];
      of_group_[partition.group].push_back(i);
      group_elems_.resize(groups_);
      group_elems_[partition.group] += partition.elems;
      elems_ += partition.elems;
      ranks = std::max(ranks, partition.owner + 1);
    }
    ranks_.resize(ranks);
    piece_elems_ = protocol::kGradPieceBytesMax / protocol::SizeBytes(layout_.grad_dtype());
    piece_bytes_ = layout_.largest_piece_bytes();
  }

  absl::Status Attach() {
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      RETURN_IF_ERROR(AttachRank(rank));
    }
    for (uint32_t i = 0; i < layout_.partitions().size(); ++i) WriteInitial(i);
    uint32_t ready = 0;
    for (const Rank& rank : ranks_) {
      daemon_.Call(rank.session, MakeCommand(Op::kInitialDone),
                   [&](const Completion&) { ++ready; });
    }
    RunUntilIdle();
    RETURN_IF_ERROR(daemon_.status());
    if (ready != ranks_.size()) return absl::InternalError("the job never became ready");
    return absl::OkStatus();
  }

  // Runs one step until all ranks have the answer to their call of step.
  absl::Status Step(uint64_t step) {
    step_ = step;
    next_ = 0;
    undelivered_ = 0;
    computing_ = false;
    ready_.assign(2 * groups_, false);
    leases_.assign(2 * groups_, {});
    stepped_ = 0;
    StartFetch(0);
    while (daemon_.status().ok() && stepped_ < ranks_.size()) {
      if (!clock_.RunOne()) return absl::InternalError("nothing goes on");
    }
    return daemon_.status();
  }
  void RunUntilIdle() {
    while (daemon_.status().ok() && clock_.RunOne()) continue;
  }

 private:
  struct Piece {
    uint32_t index = 0;  // position in the step of the computation of the gradient
    uint32_t partition = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  struct Rank {
    uint64_t session = 0;
    uint64_t attempt = 0;
    std::vector<uint64_t> free;  // offsets in the rank's arena
    std::deque<Piece> pieces;    // wait for a free offset
  };

  absl::Status AttachRank(uint32_t number) {
    Rank& rank = ranks_[number];
    rank.session = number + 1;
    daemon_.Send(daemon::AttachRequested{
        .session = rank.session,
        .uid = 1000,
        .job = "job",
        .rank = number,
        .session_request = {.world_size = static_cast<uint32_t>(ranks_.size()),
                            .grad_arena_bytes = kPiecesOfARank * piece_bytes_,
                            .early_updates = options_.early_updates},
        .layout = options_.layout});
    RunUntilIdle();
    const daemon::AnswerAttach* answer = daemon_.attached(rank.session);
    if (answer == nullptr) return absl::InternalError("an attach has no answer");
    RETURN_IF_ERROR(answer->status);
    rank.attempt = answer->attempt;
    for (uint32_t piece = 0; piece < kPiecesOfARank; ++piece)
      rank.free.push_back(piece * piece_bytes_);
    daemon_.Send(daemon::SessionMapped{.session = rank.session});
    return absl::OkStatus();
  }

  void WriteInitial(uint32_t partition) {
    const uint64_t width = protocol::SizeBytes(layout_.spec().dtype);
    const uint64_t elems = layout_.partitions()[partition].elems;
    for (uint64_t begin = 0; begin < elems; begin += piece_bytes_ / width) {
      const uint64_t end = std::min(begin + piece_bytes_ / width, elems);
      protocol::Command command = MakeCommand(Op::kWriteInitial, partition);
      command.length_bytes = (end - begin) * width;
      command.element_offset = begin;
      daemon_.Call(SessionOf(partition), command, [](const Completion&) {});
      RunUntilIdle();
    }
  }

  uint32_t GroupOf(uint32_t index) const {
    return index < groups_ ? index : 2 * groups_ - 1 - index;
  }
  Rank& RankOf(uint32_t partition) { return ranks_[layout_.partitions()[partition].owner]; }
  uint64_t SessionOf(uint32_t partition) { return RankOf(partition).session; }
  double ShareOf(uint32_t group) const {
    return static_cast<double>(group_elems_[group]) / static_cast<double>(elems_);
  }
  double HostSeconds(uint32_t group, protocol::DType dtype) const {
    return TransferSeconds(static_cast<double>(group_elems_[group] * protocol::SizeBytes(dtype)),
                           options_.host_link_rate);
  }
  double GatherSeconds(uint32_t group) const {
    return static_cast<double>(group_elems_[group]) * options_.gather_s_per_elem;
  }

  void FetchBehind(uint32_t index) {
    if (index + 1 < 2 * groups_) StartFetch(index + 1);
  }
  void StartFetch(uint32_t index) {
    const std::vector<uint32_t>& partitions = of_group_[GroupOf(index)];
    for (const uint32_t partition : partitions) {
      daemon_.Call(SessionOf(partition), MakeCommand(Op::kFetch, partition),
                   [this, index, partition](const Completion& fetched) {
                     leases_[index].emplace_back(partition, fetched.lease_id);
                     if (leases_[index].size() == of_group_[GroupOf(index)].size()) OnLeased(index);
                   });
    }
  }
  void OnLeased(uint32_t index) {
    const uint32_t group = GroupOf(index);
    const double copied = to_gpus_.Serve(clock_.now(), HostSeconds(group, layout_.spec().dtype));
    clock_.At(copied, [this, index, group] {
      if (options_.host_link_rate > 0) Release(index);
      clock_.At(link_.Serve(clock_.now(), GatherSeconds(group)), [this, index] {
        ready_[index] = true;
        ComputeNext();
      });
    });
  }
  void Release(uint32_t index) {
    for (const auto& [partition, lease] : std::exchange(leases_[index], {})) {
      protocol::Command command = MakeCommand(Op::kRelease);
      command.lease_id = lease;
      daemon_.Call(SessionOf(partition), command, [](const Completion&) {});
    }
  }

  // True if the next group may be computed. If weights are copied to GPUs, the gradient of one group may wait on the GPUs until
  // an arena has room.
  bool MayCompute() const {
    const uint32_t waiting_max = options_.host_link_rate > 0 ? 1 : 0;
    return !computing_ && next_ < 2 * groups_ && ready_[next_] && undelivered_ <= waiting_max;
  }
  void ComputeNext() {
    if (!MayCompute()) return;
    const uint32_t index = next_;
    computing_ = true;
    if (index == groups_ && options_.early_updates) CallStep(Op::kAnnounceStep);
    if (!options_.in_turn) FetchBehind(index);
    const double share = index < groups_ ? options_.forward_share : 1 - options_.forward_share;
    const double seconds = options_.compute_s * share * ShareOf(GroupOf(index));
    clock_.At(clock_.now() + seconds, [this, index] { OnComputed(index); });
  }
  void OnComputed(uint32_t index) {
    computing_ = false;
    ++next_;
    if (options_.host_link_rate <= 0) Release(index);
    if (index >= groups_) {
      ++undelivered_;
      const uint32_t group = GroupOf(index);
      clock_.At(link_.Serve(clock_.now(), GatherSeconds(group)), [this, index, group] {
        const double copied =
            from_gpus_.Serve(clock_.now(), HostSeconds(group, layout_.grad_dtype()));
        clock_.At(copied, [this, index] { Deliver(index); });
        if (options_.in_turn) FetchBehind(index);
      });
    } else if (options_.in_turn) {
      FetchBehind(index);
    }
    ComputeNext();
  }

  void Deliver(uint32_t index) {
    waiting_pieces_[index] = 0;
    for (const uint32_t partition : of_group_[GroupOf(index)]) {
      const uint64_t elems = layout_.partitions()[partition].gradient_elems;
      for (uint64_t begin = 0; begin < elems; begin += piece_elems_) {
        RankOf(partition).pieces.push_back({.index = index,
                                            .partition = partition,
                                            .begin = begin,
                                            .end = std::min(begin + piece_elems_, elems)});
        ++waiting_pieces_[index];
      }
    }
    for (const uint32_t partition : of_group_[GroupOf(index)]) SendPieces(RankOf(partition));
  }
  void SendPieces(Rank& rank) {
    while (!rank.pieces.empty() && !rank.free.empty()) {
      const Piece piece = rank.pieces.front();
      rank.pieces.pop_front();
      const uint64_t offset = rank.free.back();
      rank.free.pop_back();
      protocol::Command command = MakeCommand(Op::kGradReady, piece.partition);
      command.step = step_;
      command.arena_offset_bytes = offset;
      command.length_bytes = (piece.end - piece.begin) * protocol::SizeBytes(layout_.grad_dtype());
      command.element_offset = piece.begin;
      command.attempt = rank.attempt;
      daemon_.Call(rank.session, command, [this, &rank, offset](const Completion&) {
        rank.free.push_back(offset);
        SendPieces(rank);
      });
      if (--waiting_pieces_[piece.index] > 0) continue;
      waiting_pieces_.erase(piece.index);
      --undelivered_;
      if (piece.index + 1 == 2 * groups_) CallStep(Op::kStep);
      ComputeNext();
    }
  }

  // Sends the call from every rank. In a call of step each parameter has a gradient.
  void CallStep(Op op) {
    for (uint32_t number = 0; number < ranks_.size(); ++number) {
      Rank& rank = ranks_[number];
      daemon::StepRequestCopied copied;
      copied.request = {
          .step = step_, .param_groups = 1, .extra_state_bytes = 0, .max_grad_norm = 0};
      copied.hyper_params = {kHyper};
      copied.presence.assign(protocol::PresenceWords(layout_.params().size()), 0);
      for (const protocol::BoxPlace& place : layout_.boxes()) {
        if (op != Op::kStep || layout_.partitions()[place.partition].owner != number) continue;
        protocol::SetPresent(copied.presence, place.box.param);
      }
      protocol::Command command = MakeCommand(op);
      if (op == Op::kStep && options_.drain) {
        command.kind = static_cast<uint16_t>(protocol::StepAnswer::kCommitted);
      }
      command.step = step_;
      command.arena_offset_bytes = daemon_.attached(rank.session)->step_region_offset;
      command.attempt = rank.attempt;
      command.length_bytes = sizeof(protocol::StepRequest) + sizeof(protocol::HyperParams) +
                             copied.presence.size() * sizeof(uint64_t);
      daemon_.CallStep(rank.session, command, std::move(copied),
                       [this, op, &rank](const Completion& answer) {
                         if (op != Op::kStep) return;
                         rank.attempt = answer.attempt;
                         ++stepped_;
                       });
    }
  }

  const VirtualNodeOptions& options_;
  VirtualClock& clock_;
  VirtualDaemon& daemon_;
  const protocol::Layout& layout_;
  uint32_t groups_ = 0;
  uint64_t elems_ = 0;
  uint64_t piece_elems_ = 0;
  uint64_t piece_bytes_ = 0;
  std::vector<std::vector<uint32_t>> of_group_;
  std::vector<uint64_t> group_elems_;
  std::vector<Rank> ranks_;
  Server to_gpus_;
  Server from_gpus_;
  Server link_;

  uint64_t step_ = 0;
  uint32_t next_ = 0;  // next computation: groups ascending, then descending
  bool computing_ = false;
  uint32_t undelivered_ = 0;  // groups with gradients that are not in an arena yet
  size_t stepped_ = 0;
  std::vector<bool> ready_;
  std::vector<std::vector<std::pair<uint32_t, uint64_t>>> leases_;  // partitions and leases
  std::map<uint32_t, uint64_t> waiting_pieces_;
};

}  // namespace

absl::StatusOr<VirtualSteps> SimulateNode(const VirtualNodeOptions& options, uint32_t steps) {
  VirtualClock clock;
  VirtualDaemon daemon(options, clock);
  VirtualTrainer trainer(options, clock, daemon);
  RETURN_IF_ERROR(trainer.Attach());
  daemon.StartTime();
  for (uint64_t step = 1; step <= kStepsBefore; ++step) RETURN_IF_ERROR(trainer.Step(step));
  const double began = clock.now();
  const Transfer before = daemon.moved();
  const double disk_before = daemon.disk_s();
  for (uint64_t step = 1; step <= steps; ++step) {
    RETURN_IF_ERROR(trainer.Step(kStepsBefore + step));
  }
  const daemon::JobView view = daemon.View();
  VirtualSteps found{.events = daemon.handled(),
                     .blocks = view.blocks,
                     .resident_blocks = view.resident_blocks,
                     .weights_on_swap_bytes = view.weights_on_swap_bytes};
  found.step_s = (clock.now() - began) / steps;
  found.read_bytes = static_cast<double>(daemon.moved().read - before.read) / steps;
  found.written_bytes = static_cast<double>(daemon.moved().written - before.written) / steps;
  found.disk_s = (daemon.disk_s() - disk_before) / steps;
  found.gpu_wait_s = found.step_s - options.compute_s;
  trainer.RunUntilIdle();
  RETURN_IF_ERROR(daemon.status());
  return found;
}

}  // namespace forebay::tools
