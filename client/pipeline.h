// SPDX-License-Identifier: Apache-2.0
// ZeRO for a caller's training loop. A pipeline gathers groups of weights ahead of compute. It reduces gradients and delivers
// them behind compute.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "gpu/communicator.h"
#include "gpu/device.h"

namespace forebay::client {

// Selects how the weights and gradients of the model are divided among the ranks' devices. The daemon holds the optimizer's
// states in every stage.
//
// Source  Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
//         SC 2020, section 5.
enum class ZeroStage : uint8_t {
  kStates = 1,     // whole weights and gradients stay on each device for the step
  kGradients = 2,  // whole weights stay; a gradient is reduced to this rank's part at once
  kWeights = 3,    // weights are gathered for their use, then freed
};

struct PipelineOptions {
  ZeroStage stage = ZeroStage::kWeights;
  // Most bytes of groups that are gathered ahead of their use, in the order of the step before. The same on every rank.
  uint64_t prefetch_bytes = 0;
  // Most bytes of a group that stays gathered until the step. The same on every rank.
  uint64_t resident_bytes = 0;
  // Time limit of each call of the session. Collectives have a separate limit.
  Timeout timeout = std::chrono::seconds(60);
};

// Gathers weights and reduces gradients for one rank of a job. ShardFlat(), or over several nodes ShardFlatOfNode(), made the
// job's layout for as many ranks as the communicator has. All ranks make the same calls in the same order. In a step each group
// is gathered and released as often as forward and backward use the group. Its gradient is allocated and reduced once. Then
// Step is called.
//
// Work runs on the pipeline's streams, ordered by events. The CPU waits for the work in Step alone. If gradients that are
// together larger than the largest one wait for their reduction, compute waits for the first of them. While a collective waits,
// the pipeline asks the daemon whether another rank was lost.
//
// Errors     E_DEVICE, E_RANK_LOST, and those of Attachment's calls. A collective that fails ends with an error on
//            every rank. Every later call then returns that error; nothing of the step is applied.
//            E_FORKED in a child of the process: the call has no effect.
// Threads    One at a time.
// Ownership  Spans are valid until Release (weights) or Reduce (gradients).
class Pipeline {
 public:
  // Errors  E_OPTION         a pointer is null; session, device and collectives are of different devices; the
  //                          stage does not exist; the options differ from those of the other ranks.
  //         E_RANK           the communicator's rank is not the session's.
  //         E_RANGE          the layout is of another number of ranks, or neither ShardFlat() nor
  //                          ShardFlatOfNode() made it.
  //         E_DEVICE_MEMORY  the device has less memory free than weights and gradients take at once. The
  //                          other ranks' collectives end with E_RANK_LOST.
  static absl::StatusOr<std::unique_ptr<Pipeline>> Create(
      std::shared_ptr<Attachment> attachment, std::shared_ptr<gpu::Device> device,
      std::shared_ptr<gpu::Communicator> communicator, const PipelineOptions& options);

  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  ~Pipeline();

  // Writes this rank's part of a group's initial parameters. `whole` is the whole group in host memory. Attachment::InitialDone
  // follows the last group.
  absl::Status WriteInitial(uint32_t group, std::span<const std::byte> whole);

  // Returns the whole group, its parameters end to end, for work begun on `compute` from now on.
  //
  // Errors  E_LEASE  the group is in use already.
  absl::StatusOr<std::span<const std::byte>> Gather(uint32_t group, gpu::Stream& compute);
  // Ends one use of a group: work begun on `compute` so far is the last that reads the weights. `compute` must live as long as
  // the pipeline.
  //
  // Errors  E_LEASE  the group is not in use.
  absl::Status Release(uint32_t group, gpu::Stream& compute);

  // Returns uninitialised memory for the whole gradient of a group, in the layout's grad_dtype, for work of `compute`, which
  // must live as long as the pipeline. Elements of frozen parameters are included and ignored.
  //
  // Errors  E_GRAD_REPEAT  the gradient was reduced in this pass already.
  absl::StatusOr<std::span<std::byte>> Gradient(uint32_t group, gpu::Stream& compute);
  // Reduces the gradient of a group, which work begun on `compute` so far fills. The mean over the ranks is delivered to the
  // daemon.
  //
  // Errors  E_NOT_READY  the group has no gradient.
  absl::Status Reduce(uint32_t group, gpu::Stream& compute);

  // Begins a further backward pass (Attachment::BeginPass). Later gradients are added to the gradients of earlier passes.
  absl::Status BeginPass();

  // Waits until all collectives have ended successfully, then calls Attachment::Step.
  //
  // Errors  E_LEASE      a group is in use.
  //         E_NOT_READY  a gradient was not reduced.
  absl::StatusOr<StepResult> Step(uint64_t t, std::span<const protocol::HyperParams> hyper_params,
                                  double max_grad_norm, std::span<const std::byte> extra_state,
                                  const GradientEdit& edit = {});

  uint64_t device_bytes() const { return *device_bytes_; }  // bytes allocated now
  uint64_t device_bytes_max() const { return device_bytes_max_; }

 private:
  class CountedMemory;
  using Users = absl::InlinedVector<gpu::Stream*, 2>;  // each stream once
  static void AddUser(Users& users, gpu::Stream& stream);
  struct Group {
    uint64_t shard_elems = 0;
    uint64_t own_elems = 0;  // elements in this rank's part; the rest is padding
    std::optional<uint32_t> partition;
    std::vector<uint32_t> own_boxes;  // indices of this rank's boxes in the layout
    std::shared_ptr<CountedMemory> weights;
    std::shared_ptr<const gpu::Event> gathered;
    Users users;  // streams that used the weights since the gather
    bool in_use = false;
    std::shared_ptr<CountedMemory> gradient;  // filled by compute; kStates: until the step
    enum class Pass : uint8_t { kOpen, kFilling, kReduced } pass = Pass::kOpen;
  };
  // A whole gradient that is being reduced.
  struct Reduction {
    std::shared_ptr<CountedMemory> gradient;
    std::shared_ptr<const gpu::Event> reduced;
  };

  Pipeline(std::shared_ptr<Attachment> attachment, std::shared_ptr<gpu::Device> device,
           std::shared_ptr<gpu::Communicator> communicator, const PipelineOptions& options);

  absl::Status CheckParts() const;
  absl::Status CheckOtherRanks(const absl::Status& own);
  absl::Status CheckDeviceMemory() const;
  absl::Status CheckProcess() const;
  std::string_view GroupName(uint32_t group) const {
    return attachment_->layout().spec().group_names[group];
  }
  uint32_t NumberOf(const Group& group) const {
    return static_cast<uint32_t>(&group - groups_.data());
  }
  absl::Status CheckGroup(uint32_t group);
  absl::Status Fail(absl::Status status);
  absl::StatusOr<std::shared_ptr<CountedMemory>> Allocate(gpu::Stream& stream, uint64_t size_bytes);
  absl::Status StartGather(Group& group);
  bool IsNext(uint32_t group) const;  // true if the step before gathered it next
  absl::Status GatherAhead();
  absl::Status DropAhead(const Group& next);
  absl::Status FreeBehind(const Users& users);
  static void ForgetWeights(Group& group);
  absl::Status FreeAll();
  bool StaysGathered(const Group& group) const;
  absl::Status Deliver(const Group& group, const std::shared_ptr<CountedMemory>& memory,
                       std::span<const std::byte> part);
  absl::Status FreeReduced(gpu::Stream& compute);
  absl::Status CheckReduced() const;
  absl::Status WaitForCollectives(Timeout patience);
  uint64_t weights_bytes_max() const;  // most bytes of all groups at one time
  // most bytes of the groups' gradients at one time
  uint64_t gradient_bytes_max() const;
  uint64_t weights_bytes(const Group& group) const;   // bytes of the whole group, with padding
  uint64_t gradient_bytes(const Group& group) const;  // bytes of the group's gradient, with padding

  const std::shared_ptr<Attachment> attachment_;
  const std::shared_ptr<gpu::Device> device_;
  const std::shared_ptr<gpu::Communicator> communicator_;
  const std::shared_ptr<internal::DeviceTrace> trace_;
  const PipelineOptions options_;
  const pid_t pid_;
  // Device memory may be freed by the session's thread.
  std::shared_ptr<std::pmr::memory_resource> pool_ =
      std::make_shared<std::pmr::synchronized_pool_resource>();
  std::shared_ptr<std::atomic<uint64_t>> device_bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
  uint64_t device_bytes_max_ = 0;
  std::unique_ptr<gpu::Stream> copy_;     // gathers and frees weights
  std::unique_ptr<gpu::Stream> collect_;  // collectives
  std::vector<Group> groups_;
  uint64_t largest_gradient_bytes_ = 0;
  std::vector<uint32_t> order_;        // groups in the order of this step's gathers
  std::vector<uint32_t> expected_;     // order_ of the step before
  std::vector<Reduction> reductions_;  // in the order of their begin
  absl::Status failed_;
};

}  // namespace forebay::client
