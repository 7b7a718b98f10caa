// SPDX-License-Identifier: Apache-2.0
// Goal    A loop that gathers, computes and reduces through the pipeline trains to the reference's bits in every stage of ZeRO,
//         with every communicator and however late the device is. The loop takes the memory that its stage promises. The loss
//         of a rank is an error of the other ranks.
// Method  Ranks are threads, and the daemon is in the same process. Compute is copies on the caller's stream: of the gathered
//         weights, and of known gradients. NCCL and CUDA are drivers that run work only when they must, or in random orders.

#include "client/pipeline.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/activation_store.h"
#include "client/admin.h"
#include "client/flat_shards.h"
#include "gmock/gmock.h"
#include "gpu/cuda_device.h"
#include "gpu/host_communicator.h"
#include "gpu/host_device.h"
#include "gpu/nccl_communicator.h"
#include "gtest/gtest.h"
#include "protocol/os/clock.h"
#include "tests/client/pipeline_rank.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_thread.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/rank_threads.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::client {
namespace {

using protocol::ErrorId;
using ::testing::AllOf;
using testing::FakeCuda;
using testing::FakeNccl;
using testing::HasError;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::OnRanks;
using ::testing::UnorderedElementsAre;

using Bytes = std::vector<std::byte>;

constexpr Timeout kTimeout = std::chrono::seconds(30);
constexpr uint64_t kSeed = 3;
constexpr uint64_t kGroupElems = 10'000;
constexpr uint32_t kGroups = 3;
constexpr uint64_t kGroupBytes = kGroupElems * sizeof(float);

struct LoopOptions {
  Kind kind = Kind::kHost;
  uint32_t ranks = 2;
  uint64_t steps = 3;
  bool has_reference = true;
  PipelineOptions pipeline = {};
  uint32_t nodes = 1;                             // nodes that share the ranks equally
  testing::ThreadExchange* all_gather = nullptr;  // between nodes; null if `nodes` is 1
  std::chrono::milliseconds time_limit = std::chrono::seconds(30);  // limit of each collective
  // The step in which rank 1 leaves before it reduces. 0: no rank leaves.
  uint64_t leaves_in_step = 0;
};

// One rank.
class Loop {
 public:
  static absl::StatusOr<std::unique_ptr<Loop>> Create(const std::string& socket, uint32_t rank,
                                                      const LoopOptions& options) {
    auto loop = std::make_unique<Loop>(rank, options);
    NodeRanks own;
    AllGather all_gather;
    if (options.nodes > 1) {
      own.count = options.ranks / options.nodes;
      own.first = rank / own.count * own.count;
      all_gather = options.all_gather->Of(rank);
    }
    ASSIGN_OR_RETURN(loop->own_, PipelineRank::Create({.socket = socket,
                                                       .rank = rank,
                                                       .ranks = options.ranks,
                                                       .own = own,
                                                       .all_gather = all_gather,
                                                       .kind = options.kind,
                                                       .spec = Spec(),
                                                       .pipeline = options.pipeline,
                                                       .activation_bytes = kGroupBytes,
                                                       .time_limit = options.time_limit}));
    if (loop->own_.attachment->writes_initial()) {
      for (uint32_t group = 0; group < kGroups; ++group) {
        RETURN_IF_ERROR(
            loop->own_.pipeline->WriteInitial(group, testing::MakeValues(Whole(), group, kSeed)));
      }
      RETURN_IF_ERROR(loop->own_.attachment->InitialDone(kTimeout));
    }
    return loop;
  }
  Loop(uint32_t rank, const LoopOptions& options) : rank_(rank), options_(options) {}
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Layout with a single owner, which the reference trainer uses.
  static protocol::LayoutSpec Spec() {
    return testing::MakeLayoutSpec({.groups = kGroups, .group_elems = kGroupElems});
  }
  static const protocol::Layout& Whole() {
    static const protocol::Layout layout = protocol::Layout::Create(Spec()).value();
    return layout;
  }

  // Trains and compares the gathered weights with the reference.
  absl::Status Run() {
    reference_ = std::make_unique<testing::ReferenceTrainer>(Whole(), options_.ranks, kSeed);
    testing::ReferenceTrainer& reference = *reference_;
    std::vector<uint32_t> all;
    for (uint32_t group = 0; group < kGroups; ++group) all.push_back(group);
    for (uint64_t t = 1; t <= options_.steps; ++t) {
      RETURN_IF_ERROR(MakeGradients(t));
      for (const uint32_t group : all) RETURN_IF_ERROR(Use(group));
      for (uint32_t group = kGroups; group-- > 0;) {
        RETURN_IF_ERROR(Use(group));
        if (options_.leaves_in_step == t && rank_ == 1) return absl::CancelledError("left");
        RETURN_IF_ERROR(Backward(group));
      }
      RETURN_IF_ERROR(own_.pipeline->Step(t, testing::MakeHyperParams(), 0, {}).status());
      RETURN_IF_ERROR(CompareUsed(reference, t));
      reference.Step(t, testing::MakeHyperParams(), 0, all);
    }
    RETURN_IF_ERROR(Use(0));
    return CompareUsed(reference, options_.steps + 1);
  }

  Pipeline& pipeline() { return *own_.pipeline; }
  gpu::Stream& compute() { return *own_.compute; }
  Attachment& attachment() { return *own_.attachment; }
  uint32_t rank() const { return rank_; }

  absl::Status Backward(uint32_t group) { return Backward(group, *own_.compute); }
  absl::Status Backward(uint32_t group, gpu::Stream& stream) {
    ASSIGN_OR_RETURN(const auto to, own_.pipeline->Gradient(group, stream));
    RETURN_IF_ERROR(stream.Copy(to, gradients_[group].bytes()));
    return own_.pipeline->Reduce(group, stream);
  }
  // Gathers the weights of all groups and returns them as the compute stream sees them.
  absl::StatusOr<Bytes> Weights() {
    Bytes all;
    for (uint32_t group = 0; group < kGroups; ++group) {
      RETURN_IF_ERROR(Use(group));
      const std::span<std::byte> saw = used_.back().second.bytes();
      all.resize(all.size() + saw.size());
      RETURN_IF_ERROR(own_.compute->Copy(std::span(all).last(saw.size()), saw));
      RETURN_IF_ERROR(own_.compute->Synchronize());
    }
    used_.clear();
    return all;
  }
  // Call this after Run. Runs a step whose gradients are computed on two streams, which wait for no weights.
  absl::Status StepOnTwoStreams(uint64_t t) {
    ASSIGN_OR_RETURN(second_, own_.device->MakeStream());
    RETURN_IF_ERROR(MakeGradients(t));
    FakeCuda::set_looks_until_done(1 << 30);  // a query of an event lets no work end
    for (uint32_t group = 0; group + 1 < kGroups; ++group) {
      RETURN_IF_ERROR(Backward(group, *second_));
    }
    RETURN_IF_ERROR(own_.pipeline->Gradient(kGroups - 1, *own_.compute).status());
    FakeCuda::set_looks_until_done(FakeCuda::Options().looks_until_done);
    RETURN_IF_ERROR(Backward(kGroups - 1));
    RETURN_IF_ERROR(own_.pipeline->Step(t, testing::MakeHyperParams(), 0, {}).status());
    reference_->Step(t, testing::MakeHyperParams(), 0, std::vector<uint32_t>{0, 1, 2});
    return Forward();
  }
  // Call this after Run. Compares the weights of all groups with the reference; steps without gradients in between change none.
  absl::Status Forward() {
    for (uint32_t group = 0; group < kGroups; ++group) RETURN_IF_ERROR(Use(group));
    return CompareUsed(*reference_, options_.steps + 1);
  }
  // Uses each group on two streams, each of which may be late. Then the step frees the weights.
  absl::Status UseOnTwoStreams(uint64_t t) {
    ASSIGN_OR_RETURN(second_, own_.device->MakeStream());
    std::vector<gpu::DeviceMemory> seen;
    for (uint32_t group = 0; group < kGroups; ++group) {
      for (gpu::Stream* const stream : {own_.compute.get(), second_.get()}) {
        ASSIGN_OR_RETURN(const auto weights, own_.pipeline->Gather(group, *stream));
        ASSIGN_OR_RETURN(auto saw, stream->Allocate(weights.size()));
        RETURN_IF_ERROR(stream->Copy(saw.bytes(), weights));
        seen.push_back(std::move(saw));
        RETURN_IF_ERROR(own_.pipeline->Release(group, *stream));
      }
    }
    RETURN_IF_ERROR(own_.pipeline->Step(t, testing::MakeHyperParams(), 0, {}).status());
    RETURN_IF_ERROR(own_.compute->Synchronize());
    RETURN_IF_ERROR(second_->Synchronize());
    for (size_t i = 0; i < seen.size(); i += 2) {
      Bytes first_saw(seen[i].bytes().size());
      Bytes second_saw(first_saw.size());
      RETURN_IF_ERROR(own_.compute->Copy(first_saw, seen[i].bytes()));
      RETURN_IF_ERROR(own_.compute->Copy(second_saw, seen[i + 1].bytes()));
      RETURN_IF_ERROR(own_.compute->Synchronize());
      if (first_saw != second_saw) return absl::DataLossError("freed while a stream used them");
    }
    return absl::OkStatus();
  }
  // Saves a gradient's bytes to the activation store and loads them back onto the device.
  absl::Status OffloadActivations() {
    ASSIGN_OR_RETURN(const auto store, ActivationStore::Create(*own_.attachment, own_.device));
    const std::span<std::byte> bytes = gradients_[0].bytes();
    ASSIGN_OR_RETURN(const std::optional<uint64_t> number, store->Save(bytes, *own_.compute));
    RETURN_IF_ERROR(store->Load(number.value(), bytes, *own_.compute));
    RETURN_IF_ERROR(store->LoadedFor(*number, *own_.compute));
    RETURN_IF_ERROR(own_.compute->Synchronize());
    return store->Drop(*number);
  }

 private:
  // Stands for compute with a group's weights: copies the gathered weights to `used_`.
  absl::Status Use(uint32_t group) {
    ASSIGN_OR_RETURN(const auto weights, own_.pipeline->Gather(group, *own_.compute));
    ASSIGN_OR_RETURN(auto saw, own_.compute->Allocate(weights.size()));
    RETURN_IF_ERROR(own_.compute->Copy(saw.bytes(), weights));
    used_.emplace_back(group, std::move(saw));
    return own_.pipeline->Release(group, *own_.compute);
  }
  // Makes each group's gradient on the device, before the step.
  absl::Status MakeGradients(uint64_t t) {
    gradients_.clear();
    for (uint32_t group = 0; group < kGroups; ++group) {
      const Bytes values = testing::MakeGradient(Whole(), group, rank_, t);
      ASSIGN_OR_RETURN(auto memory, own_.compute->Allocate(values.size()));
      RETURN_IF_ERROR(own_.compute->Copy(memory.bytes(), values));
      gradients_.push_back(std::move(memory));
    }
    const absl::Status status = own_.compute->Synchronize();
    return status;
  }
  absl::Status CompareUsed(const testing::ReferenceTrainer& reference, uint64_t t) {
    if (!options_.has_reference) used_.clear();
    for (const auto& [group, saw] : used_) {
      Bytes bytes(saw.bytes().size());
      RETURN_IF_ERROR(own_.compute->Copy(bytes, saw.bytes()));
      RETURN_IF_ERROR(own_.compute->Synchronize());
      if (!std::ranges::equal(bytes, reference.Weights(group))) {
        return absl::DataLossError("other weights of group " + std::to_string(group) + " in step " +
                                   std::to_string(t));
      }
    }
    used_.clear();
    return absl::OkStatus();
  }

  const uint32_t rank_;
  const LoopOptions options_;
  std::unique_ptr<gpu::Stream> second_;  // lives as long as the pipeline
  PipelineRank own_;
  std::unique_ptr<testing::ReferenceTrainer> reference_;
  std::vector<gpu::DeviceMemory> gradients_;
  std::vector<std::pair<uint32_t, gpu::DeviceMemory>> used_;  // by group
};

class PipelineTest : public ::testing::Test {
 protected:
  PipelineTest() { StartDrivers({}); }

  static void StartDrivers(const FakeCuda::Options& options) {
    FakeCuda::Start(options);
    FakeNccl::Start();
  }
  void StartDaemon() {
    daemon_.reset();
    ASSERT_OK_AND_ASSIGN(daemon_, testing::StartDaemonThread(dir_.path() + "/s"));
  }
  // Runs `act` with each rank's loop, each in a separate thread.
  std::vector<absl::Status> OnLoops(const LoopOptions& options,
                                    const std::function<absl::Status(Loop&)>& act) {
    StartDaemon();
    return OnRanks(options.ranks, [&](uint32_t rank) -> absl::Status {
      ASSIGN_OR_RETURN(const auto loop, Loop::Create(socket(), rank, options));
      return act(*loop);
    });
  }
  std::vector<absl::Status> Train(const LoopOptions& options) {
    return OnLoops(options, [](Loop& loop) { return loop.Run(); });
  }
  void ExpectTrains(const LoopOptions& options) {
    for (const absl::Status& status : Train(options)) EXPECT_OK(status);
    EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
    EXPECT_EQ(FakeCuda::leftovers(), FakeCuda::Leftovers());
    EXPECT_EQ(FakeNccl::communicators(), 0U);
  }
  std::string socket() const { return dir_.path() + "/s"; }

  testing::TempDir dir_;
  std::unique_ptr<daemon::Daemon> daemon_;
};

struct StageCase {
  std::string name;
  PipelineOptions options;
};

void PrintTo(const StageCase& one, std::ostream* out) { *out << one.name; }

class PipelineStages : public PipelineTest, public ::testing::WithParamInterface<StageCase> {};

TEST_P(PipelineStages, TrainToTheReferencesBits) {
  for (const uint32_t ranks : {1U, 2U}) {
    for (const Kind kind : {Kind::kHost, Kind::kCuda}) {
      StartDrivers({});
      ExpectTrains({.kind = kind, .ranks = ranks, .pipeline = GetParam().options});
    }
  }
}

TEST_P(PipelineStages, TrainToTheReferencesBitsInAnyOrderThatStreamsAllow) {
  constexpr uint64_t kSeeds = 6;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    StartDrivers({.seed = seed});
    ExpectTrains({.kind = Kind::kCuda, .pipeline = GetParam().options});
  }
}

INSTANTIATE_TEST_SUITE_P(
    Stages, PipelineStages,
    ::testing::Values(StageCase{"States", {.stage = ZeroStage::kStates}},
                      StageCase{"Gradients", {.stage = ZeroStage::kGradients}},
                      StageCase{"Weights", {.stage = ZeroStage::kWeights}},
                      StageCase{"WeightsAhead",
                                {.stage = ZeroStage::kWeights, .prefetch_bytes = 2 * kGroupBytes}},
                      StageCase{"WeightsThatStay",
                                {.stage = ZeroStage::kWeights, .resident_bytes = 2 * kGroupBytes}}),
    [](const auto& parameter) { return parameter.param.name; });

// Each node has a separate daemon. Ranks reach each other by the loop's own all_gather, and by collectives.
TEST_F(PipelineTest, TrainsToTheBitsOfOneNodeOverTwo) {
  constexpr uint32_t kRanks = 4;
  for (const Kind kind : {Kind::kHost, Kind::kCuda}) {
    std::vector<Bytes> seen;
    for (const uint32_t nodes : {1U, 2U}) {
      StartDrivers({});
      std::vector<std::unique_ptr<daemon::Daemon>> daemons(nodes);
      const auto socket_of = [&](uint32_t node) {
        return dir_.path() + "/" + std::to_string(node);
      };
      for (uint32_t node = 0; node < nodes; ++node) {
        ASSERT_OK_AND_ASSIGN(daemons[node], testing::StartDaemonThread(socket_of(node)));
      }
      testing::ThreadExchange all_gather(kRanks);
      const LoopOptions options{.kind = kind,
                                .ranks = kRanks,
                                // Four gradients are added in another order than the reference's.
                                .has_reference = false,
                                .nodes = nodes,
                                .all_gather = &all_gather};
      std::vector<Bytes> weights(kRanks);
      const auto statuses = OnRanks(kRanks, [&](uint32_t rank) -> absl::Status {
        ASSIGN_OR_RETURN(const auto loop,
                         Loop::Create(socket_of(rank / (kRanks / nodes)), rank, options));
        RETURN_IF_ERROR(loop->Run());
        ASSIGN_OR_RETURN(weights[rank], loop->Weights());
        return absl::OkStatus();
      });
      for (const absl::Status& status : statuses) EXPECT_OK(status);
      EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
      seen.insert(seen.end(), weights.begin(), weights.end());
    }
    Bytes initial;
    for (uint32_t group = 0; group < kGroups; ++group) {
      const Bytes values = testing::MakeValues(Loop::Whole(), group, kSeed);
      initial.insert(initial.end(), values.begin(), values.end());
    }
    EXPECT_NE(seen[0], initial);
    EXPECT_THAT(seen, ::testing::Each(seen[0]));
  }
}

TEST_F(PipelineTest, TakesTheMemoryThatItsStagePromises) {
  // A device has P bytes of weights and as many of gradients. The first stage takes 2 P. The second takes P, a whole gradient,
  // and two gradients that are being reduced with their parts. The third takes two groups of weights (one in use, one being
  // freed) instead of P.
  constexpr uint64_t kPadded = 2 * protocol::RoundUp(kGroupElems / 2, 64) * sizeof(float);
  constexpr uint64_t kModel = kGroups * kPadded;
  const auto max_of = [&](ZeroStage stage) {
    std::atomic<uint64_t> most = 0;  // both ranks store the same number
    const LoopOptions options{.kind = Kind::kHost, .pipeline = {.stage = stage}};
    for (const absl::Status& status : OnLoops(options, [&](Loop& loop) {
           const absl::Status done = loop.Run();
           most = loop.pipeline().device_bytes_max();
           return done;
         })) {
      EXPECT_OK(status);
    }
    return most.load();
  };
  EXPECT_EQ(max_of(ZeroStage::kStates), 2 * kModel);
  EXPECT_LE(max_of(ZeroStage::kGradients), kModel + 2 * kPadded + kPadded);
  EXPECT_LE(max_of(ZeroStage::kWeights), kPadded + 2 * kPadded + kPadded);
}

TEST_F(PipelineTest, TooLittleMemoryIsRefusedBeforeAnythingIsGathered) {
  // Bytes on each rank's device: a gradient that is filled and a gradient that is reduced, with their parts, and either all
  // weights or the weights of the group in use and of the group ahead. A part ends on 64 elements.
  constexpr uint64_t kPadded = 2 * protocol::RoundUp(kGroupElems / 2, 64) * sizeof(float);
  // Bytes of two whole gradients and of this rank's parts of all gradients. The session's arena has room for the parts.
  constexpr uint64_t kGradients = 2 * kPadded + kGroups * kPadded / 2;
  struct Case {
    PipelineOptions options;
    uint64_t needed_bytes;
    std::string hint;
  };
  const std::vector<Case> cases{
      {{.stage = ZeroStage::kStates}, 2 * kGroups * kPadded, "stage 3"},
      {{.stage = ZeroStage::kGradients}, kGroups * kPadded + kGradients, "stage 3"},
      {{.prefetch_bytes = kPadded}, 2 * kPadded + kGradients, "lower prefetch_bytes"},
      {{.prefetch_bytes = 100 * kPadded}, kGroups * kPadded + kGradients, "lower prefetch_bytes"},
      {{.resident_bytes = kPadded}, kGroups * kPadded + kGradients, "resident_bytes"}};
  for (const Case& one : cases) {
    StartDrivers({.memory_bytes = one.needed_bytes - 1});
    for (const absl::Status& status : Train({.kind = Kind::kCuda, .pipeline = one.options})) {
      EXPECT_THAT(status, HasError(ErrorId::kDeviceMemory));
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(std::to_string(one.needed_bytes - 1) + " bytes free"),
                        HasSubstr(std::to_string(one.needed_bytes) + " are needed")));
      EXPECT_THAT(protocol::HintOf(status), HasSubstr(one.hint));
    }
    StartDrivers({.memory_bytes = one.needed_bytes});
    for (const absl::Status& status : OnLoops({.kind = Kind::kCuda, .pipeline = one.options},
                                              [](Loop& /*loop*/) { return absl::OkStatus(); })) {
      EXPECT_OK(status);
    }
  }
}

TEST_F(PipelineTest, ATraceShowsWhatTheDevicesStreamsDid) {
  for (const Kind kind : {Kind::kHost, Kind::kCuda}) {
    StartDrivers({});
    const uint64_t begun_ns = protocol::MonotonicNs();
    std::set<std::string> lanes;
    const auto act = [&](Loop& loop) -> absl::Status {
      RETURN_IF_ERROR(loop.Run());  // also gathers a group for a fourth step
      RETURN_IF_ERROR(loop.Backward(1));
      RETURN_IF_ERROR(loop.OffloadActivations());
      RETURN_IF_ERROR(loop.pipeline().Step(4, testing::MakeHyperParams(), 0, {}).status());
      if (loop.rank() != 0) return absl::OkStatus();
      ASSIGN_OR_RETURN(const auto admin, AdminClient::Connect({.socket = socket()}));
      // Step() returned at the decision. A rank's records are visible once the step is published.
      for (uint64_t published = 0; published < 4;) {
        ASSIGN_OR_RETURN(const auto status, admin->Status());
        published = status->getJobs()[0].getPublishedStep();
      }
      ASSIGN_OR_RETURN(const Trace trace, admin->Trace("job"));
      for (const auto& event : trace->getEvents()) {
        if (event.getProcess() != "rank 0") continue;
        lanes.insert(event.getLane().cStr());
        EXPECT_LE(begun_ns, event.getStartNs());
        EXPECT_LE(event.getStartNs(), event.getEndNs());
        EXPECT_LE(event.getEndNs(), protocol::MonotonicNs());
      }
      return absl::OkStatus();
    };
    for (const absl::Status& status : OnLoops({.kind = kind}, act)) EXPECT_OK(status);
    EXPECT_THAT(lanes,
                UnorderedElementsAre("weights to device", "all-gather", "reduce", "gradient call",
                                     "gradients from device", "activations from device",
                                     "activations to device", "step call"));
  }
}

TEST_F(PipelineTest, GathersAheadAlongTheStepBefore) {
  constexpr uint64_t kPadded = 2 * protocol::RoundUp(kGroupElems / 2, 64) * sizeof(float);
  const LoopOptions options{.kind = Kind::kHost, .pipeline = {.prefetch_bytes = kPadded}};
  for (const absl::Status& status : OnLoops(options, [&](Loop& loop) -> absl::Status {
         RETURN_IF_ERROR(loop.Run());
         // Groups are gathered ahead in the order of the last gathers, which began with group 0.
         RETURN_IF_ERROR(loop.pipeline().Step(4, testing::MakeHyperParams(), 0, {}).status());
         RETURN_IF_ERROR(loop.pipeline().Gather(0, loop.compute()).status());
         EXPECT_EQ(loop.pipeline().device_bytes(), kPadded);
         return loop.pipeline().Release(0, loop.compute());
       })) {
    EXPECT_OK(status);
  }
}

TEST_F(PipelineTest, WrongCallsAreRefusedAndTheNextWork) {
  for (const absl::Status& status : OnLoops({.kind = Kind::kCuda}, [](Loop& loop) -> absl::Status {
         Pipeline& pipeline = loop.pipeline();
         gpu::Stream& compute = loop.compute();
         EXPECT_THAT(pipeline.Gather(kGroups, compute), HasError(ErrorId::kRange));
         EXPECT_THAT(pipeline.Release(0, compute), HasError(ErrorId::kLease));
         EXPECT_THAT(pipeline.Reduce(0, compute), HasError(ErrorId::kNotReady));
         EXPECT_THAT(pipeline.WriteInitial(0, Bytes(12)), HasError(ErrorId::kRange));
         RETURN_IF_ERROR(pipeline.Gather(0, compute).status());
         EXPECT_THAT(pipeline.Gather(0, compute), HasError(ErrorId::kLease));
         EXPECT_THAT(pipeline.Step(1, testing::MakeHyperParams(), 0, {}),
                     HasError(ErrorId::kLease));
         RETURN_IF_ERROR(pipeline.Release(0, compute));
         return loop.Run();
       })) {
    EXPECT_OK(status);
  }
}

TEST_F(PipelineTest, AGradientIsReducedOnceAPassAndNoneIsForgotten) {
  for (const ZeroStage stage : {ZeroStage::kStates, ZeroStage::kWeights}) {
    const LoopOptions options{.kind = Kind::kCuda, .pipeline = {.stage = stage}};
    StartDrivers({});
    for (const absl::Status& status : OnLoops(options, [](Loop& loop) -> absl::Status {
           Pipeline& pipeline = loop.pipeline();
           gpu::Stream& compute = loop.compute();
           RETURN_IF_ERROR(loop.Run());
           RETURN_IF_ERROR(loop.Backward(0));
           EXPECT_THAT(pipeline.Gradient(0, compute), HasError(ErrorId::kGradRepeat));
           EXPECT_THAT(pipeline.Reduce(0, compute), HasError(ErrorId::kNotReady));
           RETURN_IF_ERROR(pipeline.Gradient(1, compute).status());
           EXPECT_THAT(pipeline.Step(4, testing::MakeHyperParams(), 0, {}),
                       HasError(ErrorId::kNotReady));
           EXPECT_THAT(pipeline.BeginPass(), HasError(ErrorId::kNotReady));
           RETURN_IF_ERROR(loop.Backward(1));
           RETURN_IF_ERROR(pipeline.BeginPass());
           RETURN_IF_ERROR(loop.Backward(0));
           return pipeline.Step(4, testing::MakeHyperParams(), 0, {}).status();
         })) {
      EXPECT_OK(status);
    }
    EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
  }
}

TEST_F(PipelineTest, AStepThatOneRankRepeatsLeavesTheOrderOfItsGroups) {
  constexpr uint64_t kPadded = 2 * protocol::RoundUp(kGroupElems / 2, 64) * sizeof(float);
  const LoopOptions options{.kind = Kind::kHost, .pipeline = {.prefetch_bytes = kPadded}};
  for (const absl::Status& status : OnLoops(options, [](Loop& loop) -> absl::Status {
         RETURN_IF_ERROR(loop.Run());
         RETURN_IF_ERROR(loop.Forward());
         const Bytes too_much(loop.rank() == 0 ? protocol::kExtraStateBytesMax + 1 : 0);
         const auto step = [&](std::span<const std::byte> extra_state) {
           return loop.pipeline().Step(4, testing::MakeHyperParams(), 0, extra_state).status();
         };
         if (loop.rank() == 0) {
           EXPECT_THAT(step(too_much), HasError(ErrorId::kExtraState));
         }
         RETURN_IF_ERROR(step({}));
         return loop.Forward();  // gathers ahead as before, with the same bytes
       })) {
    EXPECT_OK(status);
  }
}

TEST_F(PipelineTest, GathersThatDifferFromTheStepBeforeTakeNoMoreMemory) {
  constexpr uint64_t kPadded = 2 * protocol::RoundUp(kGroupElems / 2, 64) * sizeof(float);
  const LoopOptions options{.kind = Kind::kCuda, .pipeline = {.prefetch_bytes = kPadded}};
  for (const absl::Status& status : OnLoops(options, [](Loop& loop) -> absl::Status {
         RETURN_IF_ERROR(loop.Run());
         for (const uint32_t group : {2U, 0U, 1U, 0U, 2U, 1U, 0U}) {
           RETURN_IF_ERROR(loop.pipeline().Gather(group, loop.compute()).status());
           EXPECT_LE(loop.pipeline().device_bytes(), 2 * kPadded);
           RETURN_IF_ERROR(loop.pipeline().Release(group, loop.compute()));
         }
         return absl::OkStatus();
       })) {
    EXPECT_OK(status);
  }
  EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
}

TEST_F(PipelineTest, GradientsLiveUntilTheyAreReducedWhicheverStreamMadeThem) {
  constexpr uint64_t kStreams = 6;  // streams of a device; each of them may be late
  for (uint64_t late = 0; late < uint64_t{1} << kStreams; ++late) {
    StartDrivers({.late_streams = late});
    const LoopOptions options{.kind = Kind::kCuda, .ranks = 1, .steps = 1};
    for (const absl::Status& status : OnLoops(options, [](Loop& loop) -> absl::Status {
           RETURN_IF_ERROR(loop.Run());
           return loop.StepOnTwoStreams(2);
         })) {
      EXPECT_OK(status) << late;
    }
  }
}

TEST_F(PipelineTest, WeightsLiveUntilEveryStreamThatUsedThemIsDone) {
  constexpr uint64_t kCompute = 1;  // bit of the device's first stream
  constexpr uint64_t kSecond = 1 << 5;
  for (const uint64_t late : {kCompute, kSecond, kCompute | kSecond}) {
    StartDrivers({.late_streams = late});
    const LoopOptions options{.kind = Kind::kCuda, .pipeline = {.resident_bytes = 2 * kGroupBytes}};
    for (const absl::Status& status : OnLoops(options, [](Loop& loop) -> absl::Status {
           RETURN_IF_ERROR(loop.Run());
           return loop.UseOnTwoStreams(4);
         })) {
      EXPECT_OK(status);
    }
    EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
  }
}

TEST_F(PipelineTest, PartsThatDoNotBelongTogetherAreRefusedOnEveryRank) {
  StartDaemon();
  const auto create = [&](const RankOptions& wanted, const auto& change) {
    StartDaemon();
    return OnRanks(2, [&](uint32_t rank) -> absl::Status {
      RankOptions options = wanted;
      options.socket = socket();
      options.rank = rank;
      options.ranks = 2;
      options.spec = Loop::Spec();
      ASSIGN_OR_RETURN(PipelineRank own, PipelineRank::Create(options));
      own.pipeline.reset();
      PipelineOptions pipeline;
      change(own, rank, pipeline);
      return Pipeline::Create(own.attachment, own.device, own.communicator, pipeline).status();
    });
  };
  const auto expect = [](const std::vector<absl::Status>& results, ErrorId id) {
    for (const absl::Status& status : results) EXPECT_THAT(status, HasError(id));
  };
  expect(create({}, [](PipelineRank&, uint32_t rank,
                       PipelineOptions& options) { options.prefetch_bytes = rank; }),
         ErrorId::kOption);
  expect(create({}, [](PipelineRank&, uint32_t,
                       PipelineOptions& options) { options.stage = static_cast<ZeroStage>(7); }),
         ErrorId::kOption);
  expect(create({.kind = Kind::kCuda},
                [](PipelineRank& own, uint32_t, PipelineOptions&) {
                  own.device = std::make_shared<gpu::HostDevice>();
                }),
         ErrorId::kOption);
  expect(create({}, [](PipelineRank& own, uint32_t, PipelineOptions&) { own.device = nullptr; }),
         ErrorId::kOption);
  // The collectives number the ranks in reverse order.
  expect(
      create({},
             [](PipelineRank& own, uint32_t rank, PipelineOptions&) {
               const auto exchange =
                   [&](const std::string& bytes) -> absl::StatusOr<std::vector<std::string>> {
                 ASSIGN_OR_RETURN(auto all, own.attachment->Exchange(bytes, kTimeout));
                 std::ranges::reverse(all);
                 return all;
               };
               own.communicator =
                   gpu::HostCommunicator::Create({.rank = 1 - rank, .size = 2}, exchange).value();
             }),
      ErrorId::kRank);
}

TEST_F(PipelineTest, AChildOfTheProcessIsRefusedAndTheParentTrainsOn) {
  for (const absl::Status& status : OnLoops({.ranks = 1}, [](Loop& loop) -> absl::Status {
         const pid_t child = ::fork();
         if (child == 0) {
           const bool is_refused =
               protocol::IdOf(loop.pipeline().Gather(0, loop.compute()).status()) ==
               ErrorId::kForked;
           ::_exit(is_refused ? 0 : 1);
         }
         int ended = 0;
         EXPECT_EQ(::waitpid(child, &ended, 0), child);
         EXPECT_EQ(ended, 0);
         return loop.Run();
       })) {
    EXPECT_OK(status);
  }
}

TEST_F(PipelineTest, ARankThatIsLostEndsTheOthersWaitAtOnce) {
  for (const Kind kind : {Kind::kHost, Kind::kCuda}) {
    StartDrivers({});
    const auto began = std::chrono::steady_clock::now();
    const LoopOptions options{
        .kind = kind, .time_limit = std::chrono::minutes(5), .leaves_in_step = 2};
    const std::vector<absl::Status> results = Train(options);
    EXPECT_THAT(results[0], HasError(ErrorId::kRankLost));
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::minutes(1));
  }
}

TEST_F(PipelineTest, AnExchangeOfTooManyBytesIsRefusedAndTheSessionGoesOn) {
  for (const absl::Status& status : OnLoops({.ranks = 1}, [](Loop& loop) -> absl::Status {
         const std::string large(size_t{1} << 20, 'x');
         EXPECT_THAT(loop.attachment().Exchange(large, kTimeout), HasError(ErrorId::kRange));
         return loop.Run();
       })) {
    EXPECT_OK(status);
  }
}

TEST_F(PipelineTest, AnotherLayoutIsRefused) {
  StartDaemon();
  protocol::LayoutSpec spec = ShardFlat(Loop::Spec(), 2);
  // Rank 0 owns all elements.
  std::erase_if(spec.partitions, [](const auto& one) { return one.owner == 1; });
  for (auto& partition : spec.partitions)
    partition = ShardFlat(Loop::Spec(), 1).partitions[partition.group];
  ASSERT_OK_AND_ASSIGN(auto made, Attachment::Attach({.socket = socket(),
                                                      .job = "job",
                                                      .rank = 0,
                                                      .world_size = 2,
                                                      .run = "run",
                                                      .layout = spec,
                                                      .timeout = kTimeout}));
  const std::shared_ptr<Attachment> attachment = std::move(made);
  testing::ThreadExchange exchange(2);
  const auto results = OnRanks(2, [&](uint32_t rank) -> absl::Status {
    ASSIGN_OR_RETURN(std::shared_ptr<gpu::Communicator> ranks,
                     gpu::HostCommunicator::Create({.rank = rank, .size = 2}, exchange.Of(rank)));
    if (rank == 1) return absl::OkStatus();
    return Pipeline::Create(attachment, std::make_shared<gpu::HostDevice>(), ranks, {}).status();
  });
  EXPECT_THAT(results[0], HasError(ErrorId::kRange));
}

TEST_F(PipelineTest, ARankThatIsGoneIsAnErrorOfTheOthersAndNothingIsApplied) {
  for (const Kind kind : {Kind::kHost, Kind::kCuda}) {
    StartDrivers({});
    const auto results =
        Train({.kind = kind, .time_limit = std::chrono::milliseconds(500), .leaves_in_step = 2});
    EXPECT_THAT(results[0], HasError(ErrorId::kRankLost));
    EXPECT_EQ(results[1].code(), absl::StatusCode::kCancelled);
    const auto loop = OnRanks(2, [&](uint32_t rank) -> absl::Status {
      ASSIGN_OR_RETURN(const auto again, Loop::Create(socket(), rank, {.kind = kind}));
      EXPECT_EQ(again->attachment().committed_step(), 1U);
      return absl::OkStatus();
    });
    for (const absl::Status& status : loop) EXPECT_OK(status);
  }
}

}  // namespace
}  // namespace forebay::client
