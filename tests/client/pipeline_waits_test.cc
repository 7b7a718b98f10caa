// SPDX-License-Identifier: Apache-2.0
// Goal    Each event and each wait of the pipeline is needed, and the results are right however late the device does its work.
// Method  One rank trains alone, so that no wait is for another rank. The daemon poisons slots that are returned. CUDA is a
//         driver that runs work only when it must. The test runs once with all waits, and once without each of the waits.

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/pipeline.h"
#include "gmock/gmock.h"
#include "gpu/communicator.h"
#include "gpu/cuda_device.h"
#include "gtest/gtest.h"
#include "tests/client/poisoning_daemon.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/status_test.h"

namespace forebay::client::internal {
namespace {

using testing::FakeCuda;
using ::testing::IsEmpty;

constexpr uint32_t kGroups = 3;
constexpr uint64_t kElems = 1024;  // elements of a group, which is one parameter
constexpr uint64_t kGroupBytes = kElems * sizeof(float);

// Communicator of one rank, whose collectives are copies on the stream. NCCL's communicator would query pending work, and so
// let the work end early.
class Alone final : public gpu::Communicator {
 public:
  std::string_view name() const override { return "alone"; }
  std::string_view device() const override { return "cuda:0"; }
  uint32_t rank() const override { return 0; }
  uint32_t size() const override { return 1; }
  absl::Status AllGather(gpu::Stream&, std::span<std::byte> to,
                         std::span<const std::byte> from) override {
    return to.data() == from.data() ? absl::OkStatus() : absl::UnimplementedError("in place alone");
  }
  absl::Status ReduceScatter(gpu::Stream& stream, std::span<std::byte> to,
                             std::span<const std::byte> from, protocol::DType,
                             gpu::Reduction) override {
    return stream.Copy(to, from);
  }
  // Reads and writes `bytes`, like a reduction.
  absl::Status AllReduce(gpu::Stream& stream, std::span<std::byte> bytes, protocol::DType,
                         gpu::Reduction) override {
    ASSIGN_OR_RETURN(const auto sum, stream.Allocate(bytes.size()));
    RETURN_IF_ERROR(stream.Copy(sum.bytes(), bytes));
    return stream.Copy(bytes, sum.bytes());
  }
  absl::Status Group(const std::function<absl::Status()>& calls) override { return calls(); }
  absl::Status Check() override { return absl::OkStatus(); }
  void Abort() override {}
  void WatchWith(std::function<absl::Status()> /*check*/) override {}
};

class Loop {
 public:
  explicit Loop(const PipelineOptions& options)
      : device_(gpu::CudaDevice::Create({.soname = FakeCuda::Library()}).value()),
        daemon_(UnitsSpec(kGroups, 1, kElems), kGroups, device_) {
    compute_ = device_->MakeStream().value();
    pipeline_ =
        Pipeline::Create(daemon_.session(), device_, std::make_shared<Alone>(), options).value();
  }
  ~Loop() {
    FakeCuda::set_counts_waits(false);
    pipeline_.reset();
    used_.clear();
    kept_.clear();
    daemon_.EndSession();
    compute_.reset();
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Trains two steps. Returns the errors; empty if there are none.
  std::vector<std::string> Run() {
    for (uint64_t step = 1; step <= 2; ++step) {
      for (uint32_t group = 0; group < kGroups; ++group) Use(group);
      // All uses of weights come before the gradients, so the frees of gradients wait for no later gather.
      for (uint32_t group = kGroups; group-- > 0;) Use(group);
      for (uint32_t group = kGroups; group-- > 0;) Backward(group, step);
      for (uint32_t group = 0; group < kGroups; ++group) Use(group);  // evaluation
      waits_for_collectives_.push_back(FakeCuda::waits());
      const std::array<protocol::HyperParams, 1> hyper{};
      Note(pipeline_->Step(step, hyper, 0, {}).status(), "Step");
      const auto wrong = daemon_.CheckGradients(step, [](uint32_t) { return true; });
      wrong_.insert(wrong_.end(), wrong.begin(), wrong.end());
      CompareUsed(step - 1);
    }
    return wrong_;
  }

  // Numbers of the first wait in each call of Step. This wait lets Step detect ranks that are lost, so a single rank does not
  // need it.
  const std::vector<size_t>& waits_for_collectives() const { return waits_for_collectives_; }

 private:
  void Note(const absl::Status& status, const std::string& what) {
    if (!status.ok()) wrong_.push_back(what + ": " + std::string(status.message()));
  }
  void Use(uint32_t group) {
    const auto weights = pipeline_->Gather(group, *compute_);
    Note(weights.status(), "Gather");
    if (!weights.ok()) return;
    used_.emplace_back(group, FakeCuda::Allocate(kGroupBytes));
    Note(compute_->Copy(*used_.back().second, *weights), "compute");
    Note(pipeline_->Release(group, *compute_), "Release");
  }
  void Backward(uint32_t group, uint64_t step) {
    const auto gradient = pipeline_->Gradient(group, *compute_);
    Note(gradient.status(), "Gradient");
    if (!gradient.ok()) return;
    const FakeCuda::Memory& values = kept_.emplace_back(FakeCuda::Allocate(kGroupBytes));
    for (uint64_t i = 0; i < kElems; ++i) {
      const float value = GradientOf(step, group, i);
      std::memcpy(values->data() + i * sizeof(float), &value, sizeof(value));
    }
    Note(compute_->Copy(*gradient, *values), "compute");
    Note(pipeline_->Reduce(group, *compute_), "Reduce");
  }
  void CompareUsed(uint64_t step) {
    FakeCuda::set_counts_waits(false);
    Note(compute_->Synchronize(), "compute");
    FakeCuda::set_counts_waits(true);
    for (const auto& [group, saw] : used_) {
      if (!daemon_.AreWeights(step, group, *saw)) {
        wrong_.push_back("other weights of group " + std::to_string(group));
      }
    }
    used_.clear();
    kept_.clear();
  }

  std::shared_ptr<gpu::CudaDevice> device_;
  PoisoningDaemon daemon_;
  std::unique_ptr<gpu::Stream> compute_;
  std::unique_ptr<Pipeline> pipeline_;
  std::vector<std::pair<uint32_t, FakeCuda::Memory>> used_;  // copies of gathered weights, by group
  std::vector<FakeCuda::Memory> kept_;  // memory that lives until compute has ended
  std::vector<std::string> wrong_;
  std::vector<size_t> waits_for_collectives_;
};

struct StageCase {
  std::string name;
  PipelineOptions options;
};

void PrintTo(const StageCase& one, std::ostream* out) { *out << one.name; }

class PipelineWaits : public ::testing::TestWithParam<StageCase> {
 protected:
  static std::vector<std::string> Train(const FakeCuda::Options& options,
                                        std::optional<size_t> left_out = std::nullopt) {
    FakeCuda::Start(options);
    FakeCuda::set_counts_waits(true);
    if (left_out.has_value()) FakeCuda::LeaveOut(*left_out);
    Loop loop(GetParam().options);
    std::vector<std::string> wrong = loop.Run();
    not_needed_alone = loop.waits_for_collectives();
    return wrong;
  }
  static std::vector<FakeCuda::Options> Devices();
  static bool IsNoticed(size_t wait);

  static inline std::vector<size_t> not_needed_alone;
};

constexpr uint64_t kSeeds = 20;

// Options of a device on which all streams are late, and of devices with every choice of late streams. The other streams run
// their work at once.
std::vector<FakeCuda::Options> PipelineWaits::Devices() {
  // The session queries its copies in each call and every 100 us. With this limit they end only when the session waits for
  // them.
  constexpr int kLooks = 40;
  constexpr uint64_t kStreams = 4;  // streams of the session, of compute, and two of the pipeline
  std::vector<FakeCuda::Options> devices{{.looks_until_done = kLooks}};
  for (uint64_t streams = 0; streams < uint64_t{1} << kStreams; ++streams) {
    devices.push_back({.looks_until_done = kLooks, .late_streams = streams});
  }
  return devices;
}

// True if the tests fail without the wait. If the machine stops this process for long, the session's thread ends copies early,
// so a run that notices nothing is repeated.
bool PipelineWaits::IsNoticed(size_t wait) {
  constexpr int kTries = 3;
  for (int tries = 0; tries < kTries; ++tries) {
    for (const FakeCuda::Options& options : Devices()) {
      if (!Train(options, wait).empty() || !FakeCuda::mistakes().empty()) return true;
    }
  }
  return false;
}

TEST_P(PipelineWaits, EachIsNeeded) {
  size_t waits = 0;
  for (const FakeCuda::Options& options : Devices()) {
    ASSERT_THAT(Train(options), IsEmpty());
    EXPECT_THAT(FakeCuda::mistakes(), IsEmpty());
    waits = std::max(waits, FakeCuda::waits());
  }
  EXPECT_GT(waits, 40U);
  const std::set<size_t> others(not_needed_alone.begin(), not_needed_alone.end());
  for (size_t wait = 0; wait < waits; ++wait) {
    EXPECT_TRUE(others.contains(wait) || IsNoticed(wait))
        << "without wait " << wait << " of " << waits;
  }
}

TEST_P(PipelineWaits, AreEnoughInAnyOrderThatStreamsAllow) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EXPECT_THAT(Train({.seed = seed}), IsEmpty()) << "seed " << seed;
    EXPECT_THAT(FakeCuda::mistakes(), IsEmpty()) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Stages, PipelineWaits,
    ::testing::Values(StageCase{"States", {.stage = ZeroStage::kStates}},
                      StageCase{"Gradients", {.stage = ZeroStage::kGradients}},
                      StageCase{"Weights", {.stage = ZeroStage::kWeights}},
                      StageCase{"WeightsAhead",
                                {.stage = ZeroStage::kWeights, .prefetch_bytes = kGroupBytes}},
                      StageCase{"WeightsThatStay",
                                {.stage = ZeroStage::kWeights, .resident_bytes = kGroupBytes}}),
    [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace forebay::client::internal
