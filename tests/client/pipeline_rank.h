// SPDX-License-Identifier: Apache-2.0
// A rank with a pipeline, on the host, on the drivers of the tests or on a GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/flat_shards.h"
#include "client/pipeline.h"
#include "gpu/cuda_device.h"
#include "gpu/host_communicator.h"
#include "gpu/host_device.h"
#include "gpu/nccl_communicator.h"
#include "protocol/os/status_macros.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_nccl.h"

namespace forebay::client {

enum class Kind : uint8_t {
  kHost,
  kCuda,  // CUDA and NCCL over the tests' drivers
  kGpu,
};

struct RankOptions {
  std::string socket = {};
  std::string job = "job";
  uint32_t rank = 0;
  uint32_t ranks = 1;
  NodeRanks own = {};         // this node's ranks; empty if the job has one node
  AllGather all_gather = {};  // between nodes; empty if the job has one node
  Kind kind = Kind::kHost;
  protocol::LayoutSpec spec = {};  // layout of a single owner, which Create() splits over the ranks
  PipelineOptions pipeline = {};
  uint64_t activation_bytes = 0;
  std::chrono::milliseconds time_limit = std::chrono::seconds(30);  // limit of each collective
};

// Members die in reverse order.
struct PipelineRank {
  std::shared_ptr<gpu::Device> device;
  std::unique_ptr<gpu::Stream> compute;
  std::shared_ptr<gpu::Communicator> communicator;
  std::shared_ptr<Attachment> attachment;
  std::unique_ptr<Pipeline> pipeline;

  static absl::StatusOr<PipelineRank> Create(const RankOptions& options) {
    constexpr Timeout kTimeout = std::chrono::seconds(30);
    PipelineRank made;
    std::shared_ptr<gpu::CudaDevice> cuda;
    if (options.kind != Kind::kHost) {
      gpu::CudaDevice::Options device{.ordinal = static_cast<int>(options.rank)};
      if (options.kind == Kind::kCuda) {
        device = {.ordinal = 0, .soname = testing::FakeCuda::Library()};
      }
      ASSIGN_OR_RETURN(cuda, gpu::CudaDevice::Create(device));
      made.device = cuda;
    } else {
      made.device = std::make_shared<gpu::HostDevice>();
    }
    ASSIGN_OR_RETURN(made.compute, made.device->MakeStream());
    const bool has_nodes = options.own.count > 0;
    const Nodes nodes{.world_ranks = has_nodes ? options.ranks : 0,
                      .all_gather = options.all_gather};
    ASSIGN_OR_RETURN(
        made.attachment,
        Attachment::Attach(
            {.socket = options.socket,
             .job = options.job,
             .rank = options.rank - options.own.first,
             .world_size = has_nodes ? options.own.count : options.ranks,
             .nodes = nodes,
             .run = "run",
             .layout = has_nodes ? ShardFlatOfNode(options.spec, options.ranks, options.own)
                                 : ShardFlat(options.spec, options.ranks),
             .memory = {.activation_bytes = options.activation_bytes},
             .timeout = kTimeout,
             .device = made.device}));
    const gpu::Exchange exchange = [&](const std::string& bytes) {
      return made.attachment->Exchange(bytes, kTimeout);
    };
    if (cuda != nullptr) {
      gpu::NcclCommunicator::Options nccl{
          .rank = options.rank, .size = options.ranks, .time_limit = options.time_limit};
      nccl.soname = options.kind == Kind::kCuda ? testing::FakeNccl::Library()
                                                : testing::FakeNccl::RealLibrary();
      ASSIGN_OR_RETURN(made.communicator, gpu::NcclCommunicator::Create(nccl, cuda, exchange));
    } else {
      ASSIGN_OR_RETURN(
          made.communicator,
          gpu::HostCommunicator::Create(
              {.rank = options.rank, .size = options.ranks, .time_limit = options.time_limit},
              exchange));
    }
    ASSIGN_OR_RETURN(made.pipeline, Pipeline::Create(made.attachment, made.device,
                                                     made.communicator, options.pipeline));
    return made;
  }
};

}  // namespace forebay::client
