// Goal    A step like the steps before it takes no memory of the process's: not the pipeline, not the
//         session, not the device.
// Method  This program's operator new counts, on every thread, but for calls from the drivers of the tests.
//         Ranks as threads train, with a daemon that is a process. Room grows with the most that was ever under
//         way at once, which takes the more steps the busier the machine is; so ranks train until 20 steps in
//         a row took no memory. Where one in 20 takes some, whatever was under way, they never do.

#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "gtest/gtest.h"
#include "tests/client/pipeline_rank.h"
#include "tests/support/daemon_process.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/rank_threads.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace {

std::atomic<bool> counts = false;
std::atomic<uint64_t> allocations = 0;

bool IsOfADriver() {
  std::array<void*, 64> frames{};
  const int depth = ::backtrace(frames.data(), frames.size());
  return std::any_of(frames.begin(), frames.begin() + depth, [](void* frame) {
    Dl_info info{};
    return ::dladdr(frame, &info) != 0 &&
           std::string_view(info.dli_fname).find("libfake_") != std::string_view::npos;
  });
}

void* Allocate(size_t size_bytes, size_t align_bytes) {
  if (counts && !IsOfADriver()) ++allocations;
  void* const memory =
      std::aligned_alloc(align_bytes, (size_bytes / align_bytes + 1) * align_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t size_bytes) { return Allocate(size_bytes, alignof(std::max_align_t)); }
void* operator new(size_t size_bytes, std::align_val_t align) {
  return Allocate(size_bytes, static_cast<size_t>(align));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace forebay::client {
namespace {

using testing::FakeCuda;
using testing::FakeNccl;

constexpr Timeout kTimeout = std::chrono::seconds(30);
constexpr uint32_t kRanks = 2;
constexpr uint32_t kGroups = 6;
constexpr uint64_t kGroupElems = 10'000;
constexpr uint64_t kStepsAlike = 20;
constexpr uint64_t kStepsMax = 1000;

class SteadyStepTest : public ::testing::TestWithParam<std::tuple<Kind, ZeroStage>> {
 protected:
  SteadyStepTest() {
    FakeCuda::Start();
    FakeNccl::Start();
  }

  static absl::StatusOr<PipelineRank> Create(const std::string& socket, uint32_t rank) {
    const auto& [kind, stage] = GetParam();
    constexpr uint64_t kGroupBytes = kGroupElems * sizeof(float);
    ASSIGN_OR_RETURN(
        PipelineRank own,
        PipelineRank::Create(
            {.socket = socket,
             .rank = rank,
             .ranks = kRanks,
             .kind = kind,
             .spec = testing::MakeLayoutSpec({.groups = kGroups, .group_elems = kGroupElems}),
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

  // Trains until kStepsAlike steps in a row took no memory, and returns how many did. All ranks see the same
  // count, because nobody begins a step before everybody has read it.
  static absl::StatusOr<uint64_t> Train(PipelineRank& own, std::barrier<>& ranks) {
    const absl::Cleanup leave = [&ranks] { ranks.arrive_and_drop(); };
    const std::vector<protocol::HyperParams> hyper_params = testing::MakeHyperParams();
    uint64_t alike = 0;
    uint64_t seen = 0;
    for (uint64_t t = 1; t <= kStepsMax && alike < kStepsAlike; ++t) {
      RETURN_IF_ERROR(Step(own, t, hyper_params));
      ranks.arrive_and_wait();
      const uint64_t now = allocations;
      ranks.arrive_and_wait();
      alike = now == std::exchange(seen, now) ? alike + 1 : 0;
    }
    return alike;
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
  const auto train = [&](uint32_t rank) -> absl::Status {
    ASSIGN_OR_RETURN(PipelineRank own, Create(socket, rank));
    counts = true;
    ASSIGN_OR_RETURN(const uint64_t alike, Train(own, ranks));
    counts = false;
    EXPECT_GE(alike, kStepsAlike) << allocations << " allocations in " << kStepsMax << " steps";
    return absl::OkStatus();
  };
  for (const absl::Status& status : testing::OnRanks(kRanks, train)) EXPECT_OK(status);
  EXPECT_GT(allocations, 0U) << "the first step allocates: nothing was counted";
}

INSTANTIATE_TEST_SUITE_P(Everywhere, SteadyStepTest,
                         ::testing::Combine(::testing::Values(Kind::kHost, Kind::kCuda),
                                            ::testing::Values(ZeroStage::kStates,
                                                              ZeroStage::kGradients,
                                                              ZeroStage::kWeights)));

}  // namespace
}  // namespace forebay::client
