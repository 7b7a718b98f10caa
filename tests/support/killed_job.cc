// SPDX-License-Identifier: Apache-2.0
#include "tests/support/killed_job.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/admin.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::testing {
namespace {

using client::Attachment;
using protocol::ErrorId;
using protocol::Layout;

constexpr auto kTimeout = std::chrono::seconds(180);
constexpr auto kDaemonDeadline = std::chrono::seconds(180);
constexpr uint64_t kSeed = 14;  // seed of the initial parameters
constexpr JobShape kShape = {.world_size = kKilledRanks,
                             .groups = 3,
                             // Two blocks and a part of one, in three parameters.
                             .group_elems = 9001,
                             .dtype = protocol::DType::kBFloat16,
                             .format = protocol::Format::kExact};

Layout MakeLayout(protocol::LayoutSpec spec) {
  absl::StatusOr<Layout> layout = Layout::Create(std::move(spec));
  FOREBAY_CHECK(layout.ok());
  return *std::move(layout);
}

// Layout that splits each parameter into two uneven parts, one for each rank.
protocol::LayoutSpec ShardedSpec() {
  protocol::LayoutSpec spec = MakeLayoutSpec(kShape);
  for (uint32_t group = 0; group < kShape.groups; ++group) {
    for (uint32_t owner = 0; owner < kKilledRanks; ++owner) {
      protocol::PartitionSpec partition{.group = group, .owner = owner, .boxes = {}};
      for (uint32_t param = 0; param < spec.params.size(); ++param) {
        if (spec.params[param].group != group) continue;
        const uint64_t elems = spec.params[param].shape[0];
        const uint64_t cut = elems * 3 / 5;
        const uint64_t run = owner == 0 ? cut : elems - cut;
        partition.boxes.push_back({.param = param,
                                   .first_elem = owner == 0 ? 0 : cut,
                                   .run_elems = run,
                                   .stride_elems = run});
      }
      spec.partitions.push_back(std::move(partition));
    }
  }
  return spec;
}

bool MeansAnothersDeath(const absl::Status& status) {
  const ErrorId id = protocol::IdOf(status);
  return id == ErrorId::kRankLost || id == ErrorId::kDaemonGone || id == ErrorId::kNoDaemon ||
         id == ErrorId::kFenced;
}

// Every fifth step uses another learning rate than announced, which repeats the early updates.
std::vector<protocol::HyperParams> HyperParamsOf(uint64_t t) {
  return MakeHyperParams(t % 5 == 0 ? 3e-3 : 1e-2);
}

std::string ExtraState(uint32_t rank, uint64_t step) {
  return absl::StrCat("rank ", rank, " step ", step);
}

}  // namespace

KilledJob::KilledJob(KilledJobOptions options)
    : options_(std::move(options)),
      layout_(MakeLayout(IsSharded(options_.kind) ? ShardedSpec() : MakeLayoutSpec(kShape))),
      whole_layout_(MakeLayout(MakeLayoutSpec(kShape))) {}

uint32_t KilledJob::addends() const { return IsSharded(options_.kind) ? 1 : kKilledRanks; }

uint64_t KilledJob::snapshot_bytes() const {
  const uint64_t states = protocol::StateNames(kShape.optimizer).size();
  return kShape.groups * kShape.group_elems *
         (protocol::SizeBytes(kShape.dtype) + states * sizeof(float));
}

uint64_t KilledJob::state_bytes() const {
  return protocol::StateBytes(kShape.optimizer, kShape.format, kShape.dtype,
                              kShape.groups * kShape.group_elems);
}

std::vector<std::byte> KilledJob::SnapshotOf(const ReferenceTrainer& reference) const {
  std::vector<std::byte> all;
  const auto append = [&](std::span<const std::byte> bytes) {
    all.insert(all.end(), bytes.begin(), bytes.end());
  };
  for (uint32_t group = 0; group < kShape.groups; ++group) append(reference.Weights(group));
  const size_t states = protocol::StateNames(kShape.optimizer).size();
  for (uint32_t param = 0; param < whole_layout_.params().size(); ++param) {
    for (size_t state = 0; state < states; ++state) {
      const std::vector<float> values = reference.State(param, state);
      append(std::as_bytes(std::span(values)));
    }
  }
  FOREBAY_CHECK(all.size() == snapshot_bytes());
  return all;
}

bool KilledJob::Owns(uint32_t rank, uint32_t partition) const {
  return layout_.is_shared() || layout_.partitions()[partition].owner == rank;
}

template <typename Copy>
void KilledJob::ForEachRun(uint32_t partition, Copy copy) const {
  const uint64_t width = protocol::SizeBytes(kShape.dtype);
  if (layout_.is_shared()) {
    copy(uint64_t{0}, uint64_t{0}, kShape.group_elems * width);
    return;
  }
  const protocol::PartitionPlace& place = layout_.partitions()[partition];
  for (uint32_t box = place.box_begin; box < place.box_end; ++box) {
    const protocol::BoxPlace& from = layout_.boxes()[box];
    const protocol::ParamPlace& param = whole_layout_.params()[from.box.param];
    copy(from.partition_elem * width, (param.offset_elems + from.box.first_elem) * width,
         from.box.run_elems * width);
  }
}

absl::StatusOr<std::unique_ptr<Attachment>> KilledJob::Attach(uint32_t rank) const {
  const auto deadline = std::chrono::steady_clock::now() + kDaemonDeadline;
  while (true) {
    auto session = Attachment::Attach({.socket = options_.socket,
                                       .job = "killed",
                                       .rank = rank,
                                       .world_size = kKilledRanks,
                                       .run = "campaign",
                                       .early_updates = IsSharded(options_.kind),
                                       .durability = {.level = options_.durability},
                                       .layout = layout_.spec(),
                                       .timeout = kTimeout});
    if (session.ok() || protocol::IdOf(session.status()) != ErrorId::kNoDaemon ||
        std::chrono::steady_clock::now() > deadline) {
      return session;
    }
    ::poll(nullptr, 0, 1);
  }
}

absl::Status KilledJob::WriteInitial(Attachment& session, uint32_t rank) const {
  for (uint32_t i = 0; i < layout_.partitions().size(); ++i) {
    if (!Owns(rank, i)) continue;
    const std::vector<std::byte> group =
        MakeValues(whole_layout_, layout_.partitions()[i].group, kSeed);
    std::vector<std::byte> bytes(layout_.partition_bytes(i));
    ForEachRun(i, [&](uint64_t in_partition, uint64_t in_group, uint64_t size) {
      std::memcpy(bytes.data() + in_partition, group.data() + in_group, size);
    });
    RETURN_IF_ERROR(session.WriteInitial(i, bytes, kTimeout));
  }
  return session.InitialDone(kTimeout);
}

absl::Status KilledJob::ReadSnapshot(Attachment& session, std::span<std::byte> snapshot) const {
  const uint64_t group_bytes = kShape.group_elems * protocol::SizeBytes(kShape.dtype);
  for (uint32_t i = 0; i < layout_.partitions().size(); ++i) {
    ASSIGN_OR_RETURN(const client::Lease lease, session.Fetch(i, kTimeout));
    std::byte* group = snapshot.data() + layout_.partitions()[i].group * group_bytes;
    ForEachRun(i, [&](uint64_t in_partition, uint64_t in_group, uint64_t size) {
      std::memcpy(group + in_group, lease.bytes.data() + in_partition, size);
    });
    RETURN_IF_ERROR(session.Release(lease));
  }
  std::byte* to = snapshot.data() + kShape.groups * group_bytes;
  for (const protocol::ParamSpec& param : layout_.spec().params) {
    for (const std::string& state : protocol::StateNames(kShape.optimizer)) {
      std::vector<float> values(param.shape[0]);
      RETURN_IF_ERROR(
          session.ReadState({.param = param.name, .state = state}, values, kTimeout).status());
      std::memcpy(to, values.data(), values.size() * sizeof(float));
      to += values.size() * sizeof(float);
    }
  }
  return absl::OkStatus();
}

absl::Status KilledJob::ReadTiers(const Attachment& session, KilledJobMemory& memory) const {
  ASSIGN_OR_RETURN(auto admin, client::AdminClient::Connect({.socket = options_.socket}));
  ASSIGN_OR_RETURN(const client::NodeStatus status, admin->Status());
  memory.blocks = status->getJobs()[0].getBlocks();
  memory.resident_blocks = status->getJobs()[0].getResidentBlocks();
  memory.weights_on_swap = session.weights_on_swap();
  return absl::OkStatus();
}

absl::Status KilledJob::Deliver(Attachment& session, uint32_t rank, uint64_t t) const {
  for (auto i = static_cast<uint32_t>(layout_.partitions().size()); i-- > 0;) {
    if (!Owns(rank, i)) continue;
    const std::vector<std::byte> gradient = MakeGradient(
        whole_layout_, layout_.partitions()[i].group, layout_.is_shared() ? rank : 0, t);
    ASSIGN_OR_RETURN(const std::span<std::byte> slot,
                     session.GradSlot(i, client::GradFill::kZero, kTimeout));
    ForEachRun(i, [&](uint64_t in_partition, uint64_t in_group, uint64_t size) {
      std::memcpy(slot.data() + in_partition, gradient.data() + in_group, size);
    });
    RETURN_IF_ERROR(session.GradReady(i));
  }
  return absl::OkStatus();
}

absl::Status KilledJob::Train(uint32_t rank, KilledJobMemory& memory,
                              std::span<std::byte> snapshot) const {
  ASSIGN_OR_RETURN(const auto session, Attach(rank));
  if (session->writes_initial()) RETURN_IF_ERROR(WriteInitial(*session, rank));
  const uint64_t found = session->committed_step();
  const std::string expected = found == 0 ? "" : ExtraState(rank, found);
  if (!std::ranges::equal(session->extra_state(), std::as_bytes(std::span(expected)))) {
    return absl::DataLossError(absl::StrCat("extra_state is not that of step ", found));
  }
  RankProgress& progress = memory.ranks[rank];
  progress.attached = found + 1;
  if (rank == 0) {
    RETURN_IF_ERROR(ReadTiers(*session, memory));
    RETURN_IF_ERROR(ReadSnapshot(*session, snapshot));
    memory.snapshot_step = found + 1;
  }
  const std::vector<protocol::HyperParams> announced = HyperParamsOf(1);
  for (uint64_t t = found + 1;; ++t) {
    for (uint32_t i = 0; i < layout_.partitions().size(); ++i) {
      ASSIGN_OR_RETURN(const client::Lease lease, session->Fetch(i, kTimeout));
      RETURN_IF_ERROR(session->Release(lease));
    }
    if (IsSharded(options_.kind)) {
      RETURN_IF_ERROR(session->AnnounceStep(t, announced, kTimeout));
    }
    RETURN_IF_ERROR(Deliver(*session, rank, t));
    const std::string extra = ExtraState(rank, t);
    progress.called = t;
    ASSIGN_OR_RETURN(const client::StepResult result,
                     session->Step(t, HyperParamsOf(t), /*max_grad_norm=*/0,
                                   std::as_bytes(std::span(extra)), kTimeout));
    if (result.committed_step != t || result.repeated) {
      return absl::DataLossError(absl::StrCat("step ", t, " ended as ", result.committed_step));
    }
    progress.answered = t;
  }
}

int KilledJob::RunRank(uint32_t rank, KilledJobMemory& memory,
                       std::span<std::byte> snapshot) const {
  const absl::Status status = Train(rank, memory, snapshot);
  const std::string text = protocol::FormatError(status);
  auto& error = memory.ranks[rank].error;
  std::memcpy(error.data(), text.data(), std::min(text.size(), error.size() - 1));
  return MeansAnothersDeath(status) ? kEndedByAnothersDeath : 1;
}

UninterruptedRun::UninterruptedRun(const KilledJob& job) {
  newest_.emplace_back(job.whole_layout(), job.addends(), kSeed);
}

const ReferenceTrainer* UninterruptedRun::At(uint64_t step) {
  constexpr std::array<uint32_t, kShape.groups> kAllGroups = {0, 1, 2};
  while (last_step_ < step) {
    newest_.push_back(newest_.back());
    ++last_step_;
    newest_.back().Step(last_step_, HyperParamsOf(last_step_), /*max_grad_norm=*/0, kAllGroups);
    if (newest_.size() > kStepsKept) newest_.pop_front();
  }
  const uint64_t age = last_step_ - step;
  return age < newest_.size() ? &newest_[newest_.size() - 1 - age] : nullptr;
}

}  // namespace forebay::testing
