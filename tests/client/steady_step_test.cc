// SPDX-License-Identifier: Apache-2.0
// Goal    A step like the steps before it allocates no memory of the process: not in the pipeline, not in the session, not in
//         the device.
// Method  This program's operator new counts allocations on every thread, except those of the tests' drivers. Ranks are
//         threads, and their daemon is a process. Buffers grow with the most work that was ever under way at once. A busy
//         machine takes more steps to reach that most, so ranks train until 20 steps in a row allocated nothing. If one step in
//         20 always allocates, the ranks never reach that.

#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/client/pipeline_rank.h"
#include "tests/support/counted_heap.h"
#include "tests/support/daemon_process.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/rank_threads.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace {

bool IsOfADriver() {
  std::array<void*, 64> frames{};
  const int depth = ::backtrace(frames.data(), frames.size());
  return std::any_of(frames.begin(), frames.begin() + depth, [](void* frame) {
    Dl_info info{};
    return ::dladdr(frame, &info) != 0 &&
           std::string_view(info.dli_fname).find("libfake_") != std::string_view::npos;
  });
}

}  // namespace

namespace forebay::client {
namespace {

using testing::CountedHeap;
using testing::FakeCuda;
using testing::FakeNccl;

constexpr Timeout kTimeout = std::chrono::seconds(30);
constexpr uint32_t kRanks = 2;
constexpr uint32_t kGroups = 6;
constexpr uint64_t kGroupElems = 10'000;

class SteadyStepTest : public ::testing::TestWithParam<std::tuple<Kind, ZeroStage>> {
 protected:
  SteadyStepTest() {
    FakeCuda::Start();
    FakeNccl::Start();
  }

  static absl::StatusOr<PipelineRank> Create(const std::string& socket, uint32_t rank) {
    const auto& [kind, stage] = GetParam();
    constexpr uint64_t kGroupBytes = kGroupElems * sizeof(float);
    protocol::LayoutSpec spec =
        testing::MakeLayoutSpec({.groups = kGroups, .group_elems = kGroupElems});
    spec.params.back().param_group = protocol::kParamGroupsMax - 1;
    ASSIGN_OR_RETURN(
        PipelineRank own,
        PipelineRank::Create({.socket = socket,
                              .rank = rank,
                              .ranks = kRanks,
                              .kind = kind,
                              .spec = std::move(spec),
                              .pipeline = {.stage = stage, .prefetch_bytes = 3 * kGroupBytes}}));
    for (uint32_t group = 0; group < kGroups; ++group) {
      RETURN_IF_ERROR(own.pipeline->WriteInitial(group, std::as_bytes(std::span(Values()))));
    }
    RETURN_IF_ERROR(own.attachment->InitialDone(kTimeout));
    return own;
  }

  static absl::Status Step(PipelineRank& own, uint64_t t,
                           std::span<const protocol::HyperParams> hyper_params) {
    Pipeline& pipeline = *own.pipeline;
    gpu::Stream& compute = *own.compute;
    const auto use = [&](uint32_t group) -> absl::Status {
      RETURN_IF_ERROR(pipeline.Gather(group, compute).status());
      return pipeline.Release(group, compute);
    };
    for (uint32_t group = 0; group < kGroups; ++group) RETURN_IF_ERROR(use(group));
    for (uint32_t group = kGroups; group-- > 0;) {
      RETURN_IF_ERROR(use(group));
      ASSIGN_OR_RETURN(const auto gradient, pipeline.Gradient(group, compute));
      RETURN_IF_ERROR(compute.Copy(gradient, std::as_bytes(std::span(Values()))));
      RETURN_IF_ERROR(pipeline.Reduce(group, compute));
    }
    return pipeline.Step(t, hyper_params, 1.0, {}).status();
  }

 private:
  static const std::vector<float>& Values() {
    static const std::vector<float> values(kGroupElems, 0.5F);
    return values;
  }
};

TEST_P(SteadyStepTest, TakesNoMemory) {
  const testing::TempDir dir;
  const std::string socket = dir.path() + "/s";
  ASSERT_OK_AND_ASSIGN(const auto daemon, testing::DaemonProcess::Start(socket));
  std::barrier<> ranks(kRanks);
  const uint64_t before = CountedHeap::allocations();
  const auto train = [&](uint32_t rank) -> absl::Status {
    ASSIGN_OR_RETURN(PipelineRank own, Create(socket, rank));
    std::vector<protocol::HyperParams> hyper_params = testing::MakeHyperParams();
    hyper_params.resize(protocol::kParamGroupsMax, hyper_params[0]);
    CountedHeap::Start([] { return !IsOfADriver(); });
    ASSIGN_OR_RETURN(const uint64_t alike, testing::TrainUntilSteady(ranks, [&](uint64_t t) {
                       return Step(own, t, hyper_params);
                     }));
    CountedHeap::Stop();
    EXPECT_GE(alike, testing::kStepsAlike) << CountedHeap::allocations() - before << " allocations";
    return absl::OkStatus();
  };
  for (const absl::Status& status : testing::OnRanks(kRanks, train)) EXPECT_OK(status);
  EXPECT_GT(CountedHeap::allocations(), before) << "the first step allocates: nothing was counted";
}

INSTANTIATE_TEST_SUITE_P(Everywhere, SteadyStepTest,
                         ::testing::Combine(::testing::Values(Kind::kHost, Kind::kCuda),
                                            ::testing::Values(ZeroStage::kStates,
                                                              ZeroStage::kGradients,
                                                              ZeroStage::kWeights)));

}  // namespace
}  // namespace forebay::client
