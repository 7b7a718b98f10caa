// SPDX-License-Identifier: Apache-2.0
#include "client/pipeline.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/flat_shards.h"
#include "client/internal/deadline.h"
#include "client/internal/device_trace.h"
#include "client/internal/pool_allocator.h"
#include "gpu/nvtx_range.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {

using gpu::Event;
using gpu::Stream;
using internal::Deadline;
using protocol::BoxPlace;
using protocol::ErrorId;
using protocol::Layout;
using protocol::MakeError;

namespace {

constexpr Timeout kLastCollectives = std::chrono::seconds(5);  // when a pipeline ends

// The partitions that ShardFlat() makes of `spec` for `ranks` ranks; over several nodes those that ShardFlatOfNode() makes for
// this node.
std::vector<protocol::PartitionSpec> FlatPartitions(const protocol::LayoutSpec& spec,
                                                    uint32_t ranks) {
  if (!spec.is_part) return ShardFlat(spec, ranks).partitions;
  NodeRanks own{.first = spec.first_rank};
  for (const protocol::PartitionSpec& partition : spec.partitions) {
    own.count = std::max(own.count, partition.owner + 1);
  }
  return ShardFlatOfNode(spec, ranks, own).partitions;
}

}  // namespace

class Pipeline::CountedMemory {
 public:
  CountedMemory(Stream& stream, gpu::DeviceMemory memory,
                std::shared_ptr<std::atomic<uint64_t>> total_bytes)
      : stream_(stream), memory_(std::move(memory)), total_bytes_(std::move(total_bytes)) {}
  CountedMemory(const CountedMemory&) = delete;
  CountedMemory& operator=(const CountedMemory&) = delete;
  ~CountedMemory() { *total_bytes_ -= bytes().size(); }

  std::span<std::byte> bytes() const { return memory_.bytes(); }
  Stream& stream() const { return stream_; }  // stream that frees the memory

 private:
  Stream& stream_;
  gpu::DeviceMemory memory_;
  std::shared_ptr<std::atomic<uint64_t>> total_bytes_;
};

Pipeline::Pipeline(std::shared_ptr<Attachment> attachment, std::shared_ptr<gpu::Device> device,
                   std::shared_ptr<gpu::Communicator> communicator, const PipelineOptions& options)
    : attachment_(std::move(attachment)),
      device_(std::move(device)),
      communicator_(std::move(communicator)),
      trace_(attachment_->device_trace()),
      options_(options),
      pid_(::getpid()) {}

Pipeline::~Pipeline() {
  if (!CheckProcess().ok()) return;  // the work belongs to the parent
  communicator_->WatchWith({});
  // Work in flight reads and writes this pipeline's memory. If other ranks do not join its collectives in time, they are
  // aborted and the step is lost.
  if (collect_ != nullptr && !WaitForCollectives(kLastCollectives).ok()) {
    communicator_->Abort();
    collect_->Synchronize().IgnoreError();
  }
  FreeAll().IgnoreError();
}

absl::StatusOr<std::unique_ptr<Pipeline>> Pipeline::Create(
    std::shared_ptr<Attachment> attachment, std::shared_ptr<gpu::Device> device,
    std::shared_ptr<gpu::Communicator> communicator, const PipelineOptions& options) {
  if (attachment == nullptr || device == nullptr || communicator == nullptr) {
    return MakeError(ErrorId::kOption, "a pipeline without a session, a device or collectives");
  }
  const Layout& layout = attachment->layout();
  const uint32_t ranks = communicator->size();
  if (layout.spec().partitions != FlatPartitions(layout.spec(), ranks)) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("the layout is not cut into equal parts for ", ranks, " ranks"),
                     "attach with ShardFlat(spec, ranks), or over several nodes with "
                     "ShardFlatOfNode(spec, ranks, own)");
  }
  std::unique_ptr<Pipeline> made(
      new Pipeline(std::move(attachment), std::move(device), std::move(communicator), options));
  RETURN_IF_ERROR(made->CheckOtherRanks(made->CheckParts()));
  const uint32_t own = made->attachment_->rank();  // rank on its node
  for (const protocol::GroupPlace& place : layout.groups()) {
    Group& group = made->groups_.emplace_back();
    group.shard_elems = FlatShardElems(place.elems, ranks);
    made->largest_gradient_bytes_ =
        std::max(made->largest_gradient_bytes_, made->gradient_bytes(group));
  }
  for (uint32_t partition = 0; partition < layout.partitions().size(); ++partition) {
    const protocol::PartitionPlace& place = layout.partitions()[partition];
    if (place.owner != own) continue;
    Group& group = made->groups_[place.group];
    group.partition = partition;
    group.own_elems = place.elems;
    for (uint32_t box = place.box_begin; box < place.box_end; ++box) group.own_boxes.push_back(box);
  }
  const absl::Status fits = made->CheckDeviceMemory();
  if (!fits.ok()) return made->Fail(fits);
  ASSIGN_OR_RETURN(made->copy_, made->device_->MakeStream());
  ASSIGN_OR_RETURN(made->collect_, made->device_->MakeStream());
  made->communicator_->WatchWith([session = made->attachment_]() -> absl::Status {
    constexpr Timeout kPatience = std::chrono::seconds(5);
    const absl::Status status = session->CheckSession(kPatience);
    const bool is_late = protocol::IdOf(status) == ErrorId::kTimeout;  // says nothing of the ranks
    return is_late ? absl::OkStatus() : status;
  });
  return made;
}

absl::Status Pipeline::CheckParts() const {
  if (options_.stage < ZeroStage::kStates || options_.stage > ZeroStage::kWeights) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("there is no ZeRO stage ", static_cast<int>(options_.stage)),
                     "use kStates, kGradients or kWeights");
  }
  const uint32_t rank = attachment_->layout().spec().first_rank + attachment_->rank();
  if (communicator_->rank() != rank) {
    return MakeError(ErrorId::kRank,
                     absl::StrCat("rank ", rank, " of the job is rank ", communicator_->rank(),
                                  " of the collectives"),
                     "make the communicator with the rank that was attached; over several nodes "
                     "with that of all of them");
  }
  const std::string session(attachment_->device_name());
  const std::string device(device_->name());
  const std::string collectives(communicator_->device());
  if (session == device && device == collectives) return absl::OkStatus();
  return MakeError(
      ErrorId::kOption,
      absl::StrCat("the session is attached with device ", session, ", the pipeline is on ", device,
                   ", its collectives on ", collectives),
      "pass one device to attach, communicator and pipeline");
}

// Checks that all ranks have the same options, and tells them this rank's error.
absl::Status Pipeline::CheckOtherRanks(const absl::Status& own) {
  const std::string options =
      absl::StrCat("stage ", static_cast<int>(options_.stage), ", prefetch_bytes ",
                   options_.prefetch_bytes, ", resident_bytes ", options_.resident_bytes);
  const auto all = attachment_->Exchange(
      own.ok() ? options : absl::StrCat("error: ", std::string(own.message())), options_.timeout);
  RETURN_IF_ERROR(own);
  if (protocol::IdOf(all.status()) == ErrorId::kUnsupported) return absl::OkStatus();  // in tests
  RETURN_IF_ERROR(all.status());
  for (size_t rank = 0; rank < all->size(); ++rank) {
    if ((*all)[rank] == options) continue;
    return MakeError(ErrorId::kOption,
                     absl::StrCat("rank ", rank, " has ", (*all)[rank], "; rank ",
                                  communicator_->rank(), " has ", options),
                     "make the pipeline with the same options on every rank");
  }
  return absl::OkStatus();
}

uint64_t Pipeline::weights_bytes_max() const {
  uint64_t staying_bytes = 0;
  uint64_t passing_bytes = 0;
  uint64_t largest_bytes = 0;  // largest group that does not stay gathered
  for (const Group& group : groups_) {
    const uint64_t bytes = weights_bytes(group);
    (StaysGathered(group) ? staying_bytes : passing_bytes) += bytes;
    if (!StaysGathered(group)) largest_bytes = std::max(largest_bytes, bytes);
  }
  const uint64_t ahead_bytes = std::min(options_.prefetch_bytes, passing_bytes - largest_bytes);
  return staying_bytes + largest_bytes + ahead_bytes;
}

uint64_t Pipeline::gradient_bytes_max() const {
  uint64_t all_bytes = 0;
  for (const Group& group : groups_) all_bytes += gradient_bytes(group);
  if (options_.stage == ZeroStage::kStates) return all_bytes;
  // Whole gradients: compute fills one, and others that are together no larger than the largest are being reduced. Parts of
  // this rank: as many as gradient_room_bytes() holds wait for their copy, and one more waits for room.
  const uint64_t whole_bytes = std::min(2 * largest_gradient_bytes_, all_bytes);
  const uint64_t ranks = communicator_->size();
  const uint64_t parts_bytes = std::min(
      attachment_->gradient_room_bytes() + largest_gradient_bytes_ / ranks, all_bytes / ranks);
  return whole_bytes + parts_bytes;
}

absl::Status Pipeline::CheckDeviceMemory() const {
  ASSIGN_OR_RETURN(const std::optional<uint64_t> free_bytes, device_->FreeBytes());
  const uint64_t weights = weights_bytes_max();
  const uint64_t gradients = gradient_bytes_max();
  if (!free_bytes.has_value() || weights + gradients <= *free_bytes) return absl::OkStatus();
  return MakeError(
      ErrorId::kDeviceMemory,
      absl::StrCat(std::string(device_->name()), " has ", *free_bytes, " bytes free; ",
                   weights + gradients, " are needed: weights ", weights, ", gradients ", gradients,
                   ", at ZeRO stage ", static_cast<int>(options_.stage), " with ",
                   options_.prefetch_bytes, " bytes of prefetch"),
      options_.stage != ZeroStage::kWeights
          ? "use stage 3 (ZeroStage::kWeights)"
          : "lower prefetch_bytes or resident_bytes, or cut the model into smaller groups");
}

uint64_t Pipeline::weights_bytes(const Group& group) const {
  return group.shard_elems * communicator_->size() * SizeBytes(attachment_->layout().spec().dtype);
}

uint64_t Pipeline::gradient_bytes(const Group& group) const {
  return group.shard_elems * communicator_->size() * SizeBytes(attachment_->layout().grad_dtype());
}

absl::Status Pipeline::CheckProcess() const {
  if (::getpid() == pid_) return absl::OkStatus();
  return MakeError(ErrorId::kForked, absl::StrCat("this pipeline belongs to process ", pid_),
                   "train in the process that attached");
}

absl::Status Pipeline::CheckGroup(uint32_t group) {
  RETURN_IF_ERROR(CheckProcess());
  RETURN_IF_ERROR(failed_);
  if (group < groups_.size()) return absl::OkStatus();
  return MakeError(ErrorId::kRange, absl::StrCat("there is no group ", group, ": the job has ",
                                                 groups_.size(), " groups"));
}

absl::Status Pipeline::Fail(absl::Status status) {
  if (failed_.ok()) failed_ = std::move(status);
  communicator_->Abort();
  return failed_;
}

absl::StatusOr<std::shared_ptr<Pipeline::CountedMemory>> Pipeline::Allocate(Stream& stream,
                                                                            uint64_t size_bytes) {
  ASSIGN_OR_RETURN(gpu::DeviceMemory memory, stream.Allocate(size_bytes));
  *device_bytes_ += size_bytes;
  device_bytes_max_ = std::max(device_bytes_max_, device_bytes());
  return std::allocate_shared<CountedMemory>(internal::PoolAllocator<CountedMemory>(pool_), stream,
                                             std::move(memory), device_bytes_);
}

absl::Status Pipeline::WriteInitial(uint32_t number, std::span<const std::byte> whole) {
  RETURN_IF_ERROR(CheckGroup(number));
  const Group& group = groups_[number];
  const Layout& layout = attachment_->layout();
  const uint64_t width = SizeBytes(layout.spec().dtype);
  const uint64_t elems = layout.groups()[number].elems;
  if (whole.size() != elems * width) {
    return MakeError(ErrorId::kRange, absl::StrCat("group ", number, " has ", elems * width,
                                                   " bytes, ", whole.size(), " are given"));
  }
  if (!group.partition.has_value()) return absl::OkStatus();
  const uint64_t first = communicator_->rank() * group.shard_elems;
  return attachment_->WriteInitial(
      *group.partition, whole.subspan(first * width, group.own_elems * width), options_.timeout);
}

// ---------------------------------------------------------------------------------------- the weights

absl::Status Pipeline::StartGather(Group& group) {
  const uint64_t width = SizeBytes(attachment_->layout().spec().dtype);
  ASSIGN_OR_RETURN(group.weights, Allocate(*copy_, weights_bytes(group)));
  const uint64_t shard_bytes = group.shard_elems * width;
  const std::span<std::byte> part =
      group.weights->bytes().subspan(communicator_->rank() * shard_bytes, shard_bytes);
  if (group.partition.has_value()) {
    const std::array<WeightsCopy, 1> copies{WeightsCopy{
        .partition = *group.partition, .first_elem = 0, .to = part.first(group.own_elems * width)}};
    RETURN_IF_ERROR(attachment_->CopyWeights(copies, *copy_, options_.timeout));
  }
  ASSIGN_OR_RETURN(const auto copied, copy_->Record());
  RETURN_IF_ERROR(collect_->WaitFor(*copied));
  auto begun = trace_->Begin(*collect_);
  RETURN_IF_ERROR(communicator_->AllGather(*collect_, group.weights->bytes(), part));
  trace_->End(*collect_, std::move(begun),
              {.lane = protocol::ClientLane::kAllGather,
               .name = GroupName(NumberOf(group)),
               .bytes = group.weights->bytes().size()});
  ASSIGN_OR_RETURN(group.gathered, collect_->Record());
  return absl::OkStatus();
}

// Frees weights that were gathered or retained for a use that did not come, because `next` is used instead.
absl::Status Pipeline::DropAhead(const Group& next) {
  for (Group& group : groups_) {
    if (&group == &next || group.weights == nullptr || group.in_use || StaysGathered(group))
      continue;
    RETURN_IF_ERROR(copy_->WaitFor(*group.gathered));
    RETURN_IF_ERROR(FreeBehind(group.users));
    ForgetWeights(group);
  }
  return absl::OkStatus();
}

bool Pipeline::IsNext(uint32_t group) const {
  return order_.size() < expected_.size() && expected_[order_.size()] == group;
}

// Gathers the groups that the step before used next, as far as prefetch_bytes allows.
absl::Status Pipeline::GatherAhead() {
  uint64_t ahead_bytes = 0;
  for (size_t next = order_.size(); next < expected_.size(); ++next) {
    Group& group = groups_[expected_[next]];
    if (group.in_use || StaysGathered(group)) continue;
    ahead_bytes += weights_bytes(group);
    if (ahead_bytes > options_.prefetch_bytes) break;
    if (group.weights == nullptr) RETURN_IF_ERROR(StartGather(group));
  }
  return absl::OkStatus();
}

bool Pipeline::StaysGathered(const Group& group) const {
  return options_.stage != ZeroStage::kWeights || weights_bytes(group) <= options_.resident_bytes;
}

absl::StatusOr<std::span<const std::byte>> Pipeline::Gather(uint32_t number, Stream& compute) {
  RETURN_IF_ERROR(CheckGroup(number));
  const gpu::NvtxRange range("forebay.gather", GroupName(number));
  Group& group = groups_[number];
  if (group.in_use) {
    return MakeError(ErrorId::kLease, absl::StrCat("group ", number, " is in use already"),
                     "Release it between two uses");
  }
  const bool is_expected = IsNext(number);
  order_.push_back(number);
  absl::Status status;
  if (!is_expected) status = DropAhead(group);
  if (status.ok() && group.weights == nullptr) status = StartGather(group);
  // A stream that has used these weights since they were gathered has already waited.
  const bool has_waited = std::ranges::find(group.users, &compute) != group.users.end();
  if (status.ok() && !has_waited) status = compute.WaitFor(*group.gathered);
  group.in_use = true;
  if (status.ok() && is_expected) status = GatherAhead();
  if (!status.ok()) return Fail(std::move(status));
  const uint64_t width = SizeBytes(attachment_->layout().spec().dtype);
  return group.weights->bytes().first(attachment_->layout().groups()[number].elems * width);
}

absl::Status Pipeline::Release(uint32_t number, Stream& compute) {
  RETURN_IF_ERROR(CheckGroup(number));
  Group& group = groups_[number];
  if (!group.in_use) {
    return MakeError(ErrorId::kLease, absl::StrCat("group ", number, " is not in use"),
                     "Gather it first");
  }
  AddUser(group.users, compute);
  group.in_use = false;
  // Weights that are used next stay gathered: the last group of forward is the first of backward.
  if (IsNext(number) || StaysGathered(group)) return absl::OkStatus();
  const absl::Status waits = FreeBehind(group.users);
  if (!waits.ok()) return Fail(waits);
  ForgetWeights(group);
  return absl::OkStatus();
}

void Pipeline::AddUser(Users& users, Stream& stream) {
  if (std::ranges::find(users, &stream) == users.end()) users.push_back(&stream);
}

// Makes `copy_` wait for the work of the streams so far, so that weights freed from now on are freed after that work.
absl::Status Pipeline::FreeBehind(const Users& users) {
  for (Stream* const user : users) {
    ASSIGN_OR_RETURN(const auto used, user->Record());
    RETURN_IF_ERROR(copy_->WaitFor(*used));
  }
  return absl::OkStatus();
}

void Pipeline::ForgetWeights(Group& group) {
  group.weights.reset();
  group.gathered.reset();
  group.users.clear();
}

// Frees all weights and gradients. All collectives have ended.
absl::Status Pipeline::FreeAll() {
  Users users;
  for (const Group& group : groups_) {
    for (Stream* const user : group.users) AddUser(users, *user);
  }
  RETURN_IF_ERROR(FreeBehind(users));
  for (Group& group : groups_) {
    ForgetWeights(group);
    group.gradient.reset();
    group.pass = Group::Pass::kOpen;
  }
  return absl::OkStatus();
}

// -------------------------------------------------------------------------------------- the gradients

// Frees whole gradients whose reductions have ended. If too many bytes still wait, compute waits for the first reductions.
absl::Status Pipeline::FreeReduced(Stream& compute) {
  uint64_t waiting_bytes = 0;
  for (const Reduction& one : reductions_) waiting_bytes += one.gradient->bytes().size();
  auto first = reductions_.begin();
  for (; first != reductions_.end(); ++first) {
    ASSIGN_OR_RETURN(const bool has_ended, first->reduced->Done());
    if (!has_ended) {
      if (waiting_bytes <= largest_gradient_bytes_) break;
      RETURN_IF_ERROR(compute.WaitFor(*first->reduced));
      Stream& own = first->gradient->stream();
      if (&own != &compute) RETURN_IF_ERROR(own.WaitFor(*first->reduced));
    }
    waiting_bytes -= first->gradient->bytes().size();
  }
  reductions_.erase(reductions_.begin(), first);
  return absl::OkStatus();
}

absl::StatusOr<std::span<std::byte>> Pipeline::Gradient(uint32_t number, Stream& compute) {
  RETURN_IF_ERROR(CheckGroup(number));
  Group& group = groups_[number];
  if (group.pass == Group::Pass::kReduced) {
    return MakeError(ErrorId::kGradRepeat,
                     absl::StrCat("the gradient of group ", number, " was reduced already"),
                     "reduce it once a step, or call BeginPass before those of a further pass");
  }
  absl::Status status;
  if (options_.stage != ZeroStage::kStates) status = FreeReduced(compute);
  if (status.ok() && group.gradient == nullptr) {
    auto memory = Allocate(compute, gradient_bytes(group));
    status = memory.status();
    if (status.ok()) group.gradient = *std::move(memory);
  }
  if (!status.ok()) return Fail(std::move(status));
  group.pass = Group::Pass::kFilling;
  const uint64_t width = SizeBytes(attachment_->layout().grad_dtype());
  return group.gradient->bytes().first(attachment_->layout().groups()[number].elems * width);
}

absl::Status Pipeline::Deliver(const Group& group, const std::shared_ptr<CountedMemory>& memory,
                               std::span<const std::byte> part) {
  const Layout& layout = attachment_->layout();
  const uint64_t width = SizeBytes(layout.grad_dtype());
  for (const uint32_t index : group.own_boxes) {
    const BoxPlace& place = layout.boxes()[index];
    if (!layout.params()[place.box.param].trainable) continue;
    RETURN_IF_ERROR(attachment_->AddGradient(
        place.box.param, part.subspan(place.partition_elem * width, place.box.elems() * width),
        *collect_, memory, options_.timeout));
  }
  if (group.partition.has_value()) return attachment_->FlushGradients(*group.partition);
  return absl::OkStatus();
}

absl::Status Pipeline::Reduce(uint32_t number, Stream& compute) {
  RETURN_IF_ERROR(CheckGroup(number));
  Group& group = groups_[number];
  if (group.pass != Group::Pass::kFilling) {
    return MakeError(ErrorId::kNotReady, absl::StrCat("group ", number, " has no gradient"),
                     "fill what Gradient() gives first");
  }
  group.pass = Group::Pass::kReduced;
  const gpu::NvtxRange range("forebay.reduce", GroupName(number));
  const protocol::DType dtype = attachment_->layout().grad_dtype();
  const uint64_t shard_bytes = group.shard_elems * SizeBytes(dtype);
  const auto reduce = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const auto filled, compute.Record());
    RETURN_IF_ERROR(collect_->WaitFor(*filled));
    auto begun = trace_->Begin(*collect_);
    std::shared_ptr<CountedMemory> memory = group.gradient;
    std::span<const std::byte> part =
        memory->bytes().subspan(communicator_->rank() * shard_bytes, shard_bytes);
    if (options_.stage == ZeroStage::kStates) {
      RETURN_IF_ERROR(
          communicator_->AllReduce(*collect_, memory->bytes(), dtype, gpu::Reduction::kMean));
    } else {
      ASSIGN_OR_RETURN(memory, Allocate(*collect_, shard_bytes));
      part = memory->bytes();
      RETURN_IF_ERROR(communicator_->ReduceScatter(
          *collect_, memory->bytes(), group.gradient->bytes(), dtype, gpu::Reduction::kMean));
      ASSIGN_OR_RETURN(std::shared_ptr<const Event> reduced, collect_->Record());
      reductions_.push_back({.gradient = std::move(group.gradient), .reduced = std::move(reduced)});
    }
    trace_->End(*collect_, std::move(begun),
                {.lane = protocol::ClientLane::kReduce,
                 .name = GroupName(number),
                 .bytes = shard_bytes * communicator_->size()});
    return Deliver(group, memory, part);
  };
  absl::Status status = reduce();
  return status.ok() ? status : Fail(std::move(status));
}

absl::Status Pipeline::BeginPass() {
  RETURN_IF_ERROR(CheckProcess());
  RETURN_IF_ERROR(failed_);
  RETURN_IF_ERROR(CheckReduced());
  RETURN_IF_ERROR(attachment_->BeginPass());
  for (Group& group : groups_) {
    group.gradient.reset();  // the copy in flight holds its own reference
    group.pass = Group::Pass::kOpen;
  }
  return absl::OkStatus();
}

absl::Status Pipeline::CheckReduced() const {
  for (uint32_t number = 0; number < groups_.size(); ++number) {
    if (groups_[number].pass != Group::Pass::kFilling) continue;
    return MakeError(ErrorId::kNotReady,
                     absl::StrCat("the gradient of group ", number, " was not reduced"),
                     "call Reduce for each gradient that was asked for");
  }
  return absl::OkStatus();
}

// Waits at most `patience` until all collectives have ended. Each collective also has the communicator's time limit.
absl::Status Pipeline::WaitForCollectives(Timeout patience) {
  constexpr std::chrono::microseconds kPause{20};
  const Deadline deadline = Deadline::After(patience);
  ASSIGN_OR_RETURN(const auto last, collect_->Record());
  while (true) {
    ASSIGN_OR_RETURN(const bool has_ended, last->Done());
    if (has_ended) break;
    RETURN_IF_ERROR(communicator_->Check());
    if (deadline.Expired()) return MakeError(ErrorId::kTimeout, "collectives are still under way");
    std::this_thread::sleep_for(kPause);
  }
  reductions_.clear();
  // Results are valid only if nothing was aborted meanwhile.
  return communicator_->Check();
}

// ------------------------------------------------------------------------------------------- the step

absl::StatusOr<StepResult> Pipeline::Step(uint64_t t,
                                          std::span<const protocol::HyperParams> hyper_params,
                                          double max_grad_norm,
                                          std::span<const std::byte> extra_state,
                                          const GradientEdit& edit) {
  RETURN_IF_ERROR(CheckProcess());
  RETURN_IF_ERROR(failed_);
  RETURN_IF_ERROR(CheckReduced());
  for (uint32_t number = 0; number < groups_.size(); ++number) {
    if (!groups_[number].in_use) continue;
    return MakeError(ErrorId::kLease, absl::StrCat("group ", number, " is in use"),
                     "Release it before the step");
  }
  const absl::Status reduced = WaitForCollectives(kNoTimeout);
  if (!reduced.ok()) return Fail(reduced);
  absl::StatusOr<StepResult> result =
      attachment_->Step(t, hyper_params, max_grad_norm, extra_state, options_.timeout, edit);
  // Frees everything even if the step was not applied: the next attempt starts from scratch.
  const absl::Status freed = FreeAll();
  if (!freed.ok()) return Fail(freed);
  // The order is empty if this rank alone repeats the call: then the order of the step is retained.
  if (!order_.empty()) std::swap(expected_, order_);
  order_.clear();
  return result;
}

}  // namespace forebay::client
