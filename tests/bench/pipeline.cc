// SPDX-License-Identifier: Apache-2.0
// Bench pipeline: measures the overhead of a group in a training loop in C++. The groups are so small that copies and
// collectives take almost no time. The result is compared with the same calls of the session and the same collectives
// without a pipeline.

#include "client/pipeline.h"

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/flat_shards.h"
#include "gpu/host_communicator.h"
#include "gpu/host_device.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "tests/bench/lab.h"
#include "tools/forebay/bench.h"
#include "tools/forebay/bench_harness.h"
#include "tools/forebay/private_daemon.h"

namespace forebay::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kSamples = 51;
constexpr uint64_t kParams = uint64_t{1} << 14;
constexpr uint64_t kGroupElems = 256;
constexpr client::Timeout kLimit = std::chrono::seconds(30);

// Microseconds for one group, as an average over the groups of a step.
struct StepTimes {
  double forward = 0;   // weights
  double backward = 0;  // weights and gradients
};

// A training with one rank on the host and a private daemon.
class Rank {
 public:
  static absl::StatusOr<std::unique_ptr<Rank>> Create(const PrivateDaemonOptions& daemon,
                                                      uint64_t params) {
    auto rank = std::make_unique<Rank>();
    ASSIGN_OR_RETURN(rank->daemon_, PrivateDaemon::Start(daemon));
    rank->device_ = std::make_shared<gpu::HostDevice>();
    ASSIGN_OR_RETURN(rank->compute_, rank->device_->MakeStream());
    protocol::LayoutSpec spec;
    rank->groups_ = static_cast<uint32_t>((params + kGroupElems - 1) / kGroupElems);
    for (uint32_t group = 0; group < rank->groups_; ++group) {
      const std::string name = absl::StrCat("group", group);
      spec.params.push_back({.name = name, .shape = {kGroupElems}, .group = group});
      spec.group_names.push_back(name);
    }
    client::AttachOptions attach;
    attach.socket = rank->daemon_->socket();
    attach.job = "bench";
    attach.layout = client::ShardFlat(spec, 1);
    attach.timeout = kLimit;
    attach.drain = false;
    attach.device = rank->device_;
    ASSIGN_OR_RETURN(rank->attachment_, client::Attachment::Attach(std::move(attach)));
    ASSIGN_OR_RETURN(rank->communicator_,
                     gpu::HostCommunicator::Create({}, [&](const std::string& bytes) {
                       return rank->attachment_->Exchange(bytes, kLimit);
                     }));
    ASSIGN_OR_RETURN(rank->pipeline_,
                     client::Pipeline::Create(rank->attachment_, rank->device_, rank->communicator_,
                                              {.prefetch_bytes = 4 * kGroupElems * sizeof(float)}));
    const std::vector<float> ones(kGroupElems, 1.0F);
    for (uint32_t group = 0; group < rank->groups_; ++group) {
      RETURN_IF_ERROR(rank->pipeline_->WriteInitial(group, std::as_bytes(std::span(ones))));
    }
    RETURN_IF_ERROR(rank->attachment_->InitialDone(kLimit));
    return rank;
  }
  Rank() = default;
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() { pipeline_.reset(); }

  // Runs a step through the pipeline and returns its times.
  absl::StatusOr<StepTimes> ThroughPipeline() {
    const auto use = [&](uint32_t group) -> absl::Status {
      RETURN_IF_ERROR(pipeline_->Gather(group, *compute_).status());
      return pipeline_->Release(group, *compute_);
    };
    const auto reduce = [&](uint32_t group) -> absl::Status {
      RETURN_IF_ERROR(pipeline_->Gradient(group, *compute_).status());
      return pipeline_->Reduce(group, *compute_);
    };
    return Step(use, reduce, [&](const protocol::HyperParams& hyper, uint64_t t) {
      return pipeline_->Step(t, {&hyper, 1}, 0, {}).status();
    });
  }

  // Runs the same step without the pipeline, by calls of the session and the communicator.
  absl::StatusOr<StepTimes> ByItself() {
    const std::span<std::byte> all = std::as_writable_bytes(std::span(weights_));
    const std::span<std::byte> sum = std::as_writable_bytes(std::span(*gradient_));
    const auto use = [&](uint32_t group) -> absl::Status {
      const client::WeightsCopy copy{.partition = group, .first_elem = 0, .to = all};
      RETURN_IF_ERROR(attachment_->CopyWeights({&copy, 1}, *compute_, kLimit));
      return communicator_->AllGather(*compute_, all, all);
    };
    const auto reduce = [&](uint32_t group) -> absl::Status {
      RETURN_IF_ERROR(communicator_->ReduceScatter(*compute_, sum, all, protocol::DType::kFloat32,
                                                   gpu::Reduction::kMean));
      RETURN_IF_ERROR(attachment_->AddGradient(group, sum, *compute_, gradient_, kLimit));
      return attachment_->FlushGradients(group);
    };
    return Step(use, reduce, [&](const protocol::HyperParams& hyper, uint64_t t) {
      return attachment_->Step(t, {&hyper, 1}, 0, {}, kLimit).status();
    });
  }

 private:
  template <typename Use, typename Reduce, typename End>
  absl::StatusOr<StepTimes> Step(const Use& use, const Reduce& reduce, const End& end) {
    const Clock::time_point began = Clock::now();
    for (uint32_t group = 0; group < groups_; ++group) RETURN_IF_ERROR(use(group));
    const Clock::time_point turned = Clock::now();
    for (uint32_t group = groups_; group-- > 0;) {
      RETURN_IF_ERROR(use(group));
      RETURN_IF_ERROR(reduce(group));
    }
    const Clock::time_point ended = Clock::now();
    const protocol::HyperParams hyper =
        protocol::DefaultHyperParams(attachment_->layout().spec().optimizer);
    RETURN_IF_ERROR(end(hyper, attachment_->committed_step() + 1));
    const auto per_group = [&](Clock::duration time) {
      return std::chrono::duration<double, std::micro>(time).count() / groups_;
    };
    return StepTimes{.forward = per_group(turned - began), .backward = per_group(ended - turned)};
  }

  std::unique_ptr<PrivateDaemon> daemon_;
  std::shared_ptr<gpu::HostDevice> device_;
  std::unique_ptr<gpu::Stream> compute_;
  std::shared_ptr<client::Attachment> attachment_;
  std::shared_ptr<gpu::Communicator> communicator_;
  std::unique_ptr<client::Pipeline> pipeline_;
  uint32_t groups_ = 0;
  std::vector<float> weights_ = std::vector<float>(kGroupElems, 1.0F);
  const std::shared_ptr<std::vector<float>> gradient_ =
      std::make_shared<std::vector<float>>(kGroupElems, 1.0F);
};

}  // namespace

absl::Status BenchPipeline(const BenchOptions& options, const Report& report) {
  PrivateDaemonOptions daemon;
  daemon.runtime_folders = options.runtime_folders;
  daemon.dram = "256MiB";
  ASSIGN_OR_RETURN(const std::unique_ptr<Rank> rank,
                   Rank::Create(daemon, options.params == 0 ? kParams : options.params));
  const uint32_t samples = options.samples == 0 ? kSamples : options.samples;
  for (const auto& [name, time] :
       {std::pair{"forward", &StepTimes::forward}, std::pair{"backward", &StepTimes::backward}}) {
    const auto sampler = [rank = rank.get(), time = time](auto step) -> Sampler {
      return [rank, time, step]() -> absl::StatusOr<Sample> {
        ASSIGN_OR_RETURN(const StepTimes times, (rank->*step)());
        return Sample{.value = times.*time};
      };
    };
    ASSIGN_OR_RETURN(
        const BenchResult result,
        MeasureCase({.bench = "pipeline",
                     .name = absl::StrCat("pipeline/device=host/dir=", name),
                     .unit = "us",
                     .limit_what = "the same calls of the session and collectives without it",
                     .measure = Measure::kTime},
                    samples, sampler(&Rank::ThroughPipeline), sampler(&Rank::ByItself)));
    RETURN_IF_ERROR(report(result));
  }
  return absl::OkStatus();
}

}  // namespace forebay::tools
