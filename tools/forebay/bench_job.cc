// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_job.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <numeric>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/flat_shards.h"
#include "daemon/daemon.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/os/status_macros.h"
#include "protocol/wire.h"

namespace forebay::tools {
namespace {

using client::Attachment;

constexpr client::Timeout kLimit = std::chrono::seconds(120);
constexpr float kGradient = 1e-3F;  // not denormal: denormal numbers are slow

// Sets all elements, which have the job's type, to one value.
void Fill(protocol::DType dtype, float value, std::span<std::byte> bytes) {
  if (dtype == protocol::DType::kFloat32) {
    auto* elems = reinterpret_cast<float*>(bytes.data());
    std::fill_n(elems, bytes.size() / sizeof(float), value);
  } else {
    const auto bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    auto* elems = reinterpret_cast<uint16_t*>(bytes.data());
    std::fill_n(elems, bytes.size() / sizeof(uint16_t), bits);
  }
}

protocol::LayoutSpec MakeLayout(const BenchJobOptions& options) {
  protocol::LayoutSpec layout;
  layout.format = options.format;
  if (options.format != protocol::Format::kFp32) layout.dtype = protocol::DType::kBFloat16;
  for (uint64_t begin = 0; begin < options.params; begin += options.group_elems) {
    const auto group = static_cast<uint32_t>(layout.params.size());
    const std::string name = absl::StrCat("group", group);
    layout.params.push_back({.name = name,
                             .shape = {std::min(options.group_elems, options.params - begin)},
                             .group = group});
    layout.group_names.push_back(name);
  }
  return options.is_sharded ? client::ShardFlat(std::move(layout), options.ranks) : layout;
}

absl::Status WriteParameters(Attachment& attachment, std::span<const uint32_t> partitions) {
  const protocol::Layout& layout = attachment.layout();
  for (const uint32_t partition : partitions) {
    std::vector<std::byte> ones(layout.partition_bytes(partition));
    Fill(layout.spec().dtype, 1.0F, ones);
    RETURN_IF_ERROR(attachment.WriteInitial(partition, ones, kLimit));
  }
  return attachment.InitialDone(kLimit);
}

absl::Status Deliver(Attachment& attachment, uint32_t partition) {
  ASSIGN_OR_RETURN(const std::span<std::byte> slot,
                   attachment.GradSlot(partition, client::GradFill::kNone, kLimit));
  const protocol::Layout& layout = attachment.layout();
  Fill(layout.spec().dtype, kGradient, slot.first(layout.partition_bytes(partition)));
  return attachment.GradReady(partition);
}

}  // namespace

BenchJob::BenchJob(std::unique_ptr<PrivateDaemon> daemon) : daemon_(std::move(daemon)) {}

absl::StatusOr<std::unique_ptr<BenchJob>> BenchJob::Create(const BenchJobOptions& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<PrivateDaemon> daemon, PrivateDaemon::Start(options.daemon));
  // The constructor is private: make_unique cannot reach it.
  std::unique_ptr<BenchJob> job(new BenchJob(std::move(daemon)));
  if (options.daemon.can_start_again) {
    job->keeper_ = std::jthread([daemon = job->daemon_.get()](const std::stop_token& stop) {
      constexpr int kPeriodMs = 20;
      while (!stop.stop_requested()) {
        pollfd messages{.fd = daemon->messages_fd(), .events = POLLIN, .revents = 0};
        if (::poll(&messages, 1, kPeriodMs) > 0) daemon->HandleMessages();
      }
    });
  }
  ASSIGN_OR_RETURN(job->admin_, client::AdminClient::Connect({.socket = job->daemon_->socket()}));
  for (uint32_t rank = 0; rank < options.ranks; ++rank) {
    client::AttachOptions attach;
    attach.socket = job->daemon_->socket();
    attach.job = "bench";
    attach.rank = rank;
    attach.world_size = options.ranks;
    attach.layout = MakeLayout(options);
    attach.timeout = kLimit;
    attach.drain = options.drain;
    attach.early_updates = options.early_updates;
    attach.durability.level = options.durability;
    ASSIGN_OR_RETURN(job->attachments_.emplace_back(), Attachment::Attach(std::move(attach)));
  }
  job->partitions_.resize(options.ranks);
  const std::span<const protocol::PartitionPlace> partitions =
      job->attachment().layout().partitions();
  for (uint32_t partition = 0; partition < partitions.size(); ++partition) {
    job->partitions_[partitions[partition].owner].push_back(partition);
  }
  RETURN_IF_ERROR(job->OnEachRank(WriteParameters));
  return job;
}

uint32_t BenchJob::groups() const {
  return static_cast<uint32_t>(attachments_.front()->layout().groups().size());
}

absl::Status BenchJob::OnEachRank(const RankWork& work) {
  std::vector<absl::Status> results(attachments_.size());
  const auto run = [&](size_t rank) {
    results[rank] = work(*attachments_[rank], partitions_[rank]);
  };
  {
    std::vector<std::jthread> others;
    for (size_t rank = 1; rank < attachments_.size(); ++rank) others.emplace_back(run, rank);
    run(0);
  }
  const auto failed = std::ranges::find_if_not(results, &absl::Status::ok);
  return failed == results.end() ? absl::OkStatus() : *failed;
}

absl::Status BenchJob::DeliverGradient(uint32_t group) { return Deliver(attachment(), group); }

absl::Status BenchJob::DeliverGradients() {
  return OnEachRank([](Attachment& attachment, std::span<const uint32_t> partitions) {
    for (const uint32_t partition : partitions) RETURN_IF_ERROR(Deliver(attachment, partition));
    return absl::OkStatus();
  });
}

absl::StatusOr<uint64_t> BenchJob::BytesBesideStates() {
  ASSIGN_OR_RETURN(const client::NodeStatus status, Status());
  uint64_t bytes = daemon::PrivateBytes(status->getWorkers());
  for (const auto arena : status->getMemory().getArenas()) {
    if (arena.getKind() != "state" && arena.getKind() != "staging") bytes += arena.getSizeBytes();
  }
  return bytes;
}

protocol::HyperParams BenchJob::HyperParams() const {
  return protocol::DefaultHyperParams(attachments_.front()->layout().spec().optimizer);
}

absl::Status BenchJob::AnnounceStep() {
  const protocol::HyperParams hyper = HyperParams();
  return OnEachRank([&](Attachment& attachment, std::span<const uint32_t>) {
    return attachment.AnnounceStep(attachment.committed_step() + 1, {&hyper, 1}, kLimit);
  });
}

absl::StatusOr<double> BenchJob::TimedStep() {
  const protocol::HyperParams hyper = HyperParams();
  const auto began = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(
      OnEachRank([&](Attachment& attachment, std::span<const uint32_t>) -> absl::Status {
        ASSIGN_OR_RETURN(
            const client::StepResult result,
            attachment.Step(attachment.committed_step() + 1, {&hyper, 1}, 0.0, {}, kLimit));
        if (!result.repeated) return absl::OkStatus();
        return protocol::MakeError(protocol::ErrorId::kInternal, "a step was repeated");
      }));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  return took.count();
}

absl::StatusOr<client::JobPlan> BenchJob::Plan(uint64_t dram_bytes) {
  client::AttachOptions attach;
  attach.layout = attachment().layout().spec();
  attach.world_size = static_cast<uint32_t>(attachments_.size());
  return admin_->Plan(attach, client::AdminClient::NodeSize{.dram_bytes = dram_bytes});
}

absl::StatusOr<client::NodeStatus> BenchJob::Status() {
  ASSIGN_OR_RETURN(client::NodeStatus status, admin_->Status());
  if (status->getJobs().size() != 1) {
    return protocol::MakeError(protocol::ErrorId::kInternal,
                               "the daemon has another number of jobs");
  }
  return status;
}

void UseSwap(const BenchOptions& options, PrivateDaemonOptions& daemon) {
  const size_t paths = std::max<size_t>(1, options.limit_rates.size());
  daemon.swap.assign(paths, options.swap_folder);
  if (options.limit_rates.empty()) return;
  daemon.settings.push_back(
      absl::StrCat("swap.limit_rate=[", absl::StrJoin(options.limit_rates, ","), "]"));
}

double TotalRate(const BenchOptions& options) {
  return static_cast<double>(
      std::accumulate(options.limit_rates.begin(), options.limit_rates.end(), uint64_t{0}));
}

}  // namespace forebay::tools
