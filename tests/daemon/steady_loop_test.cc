// SPDX-License-Identifier: Apache-2.0
// Goal    A step like the earlier steps allocates no memory on the daemon's loop thread.
// Method  This program's operator new counts allocations of the loop thread only. Ranks run as threads and train with a daemon
//         in this process. Containers grow to the largest number of operations in flight, which takes more steps on a busy
//         machine. So the ranks train until 20 consecutive steps have allocated nothing. If one step in 20 always allocates,
//         the test fails.

#include <pthread.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "client/flat_shards.h"
#include "daemon/daemon.h"
#include "gtest/gtest.h"
#include "tests/support/counted_heap.h"
#include "tests/support/daemon_process.h"
#include "tests/support/rank_threads.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::daemon {
namespace {

using client::Attachment;
using client::Timeout;
using testing::CountedHeap;

constexpr Timeout kTimeout = std::chrono::seconds(30);
constexpr uint32_t kGroups = 8;
constexpr uint64_t kBlockElems = 16 << 10;
constexpr uint64_t kGroupElems = 4 * kBlockElems;

bool IsLoopThread() {
  thread_local const bool is_loop = [] {
    std::array<char, 16> name{};
    return ::pthread_getname_np(::pthread_self(), name.data(), name.size()) == 0 &&
           std::string_view(name.data()) == "forebay-loop";
  }();
  return is_loop;
}

enum class OnSwap : uint8_t { kNothing, kStates, kWeights, kGradients };

struct Case {
  const char* name = "";
  OnSwap on_swap = OnSwap::kNothing;
  bool sharded = true;
  bool early = false;
  uint32_t ranks = 1;
  size_t paths = 1;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  bool asks_norm = false;
  bool keeps_jobs = false;  // The daemon writes a record after each step.
  uint32_t param_groups = 2;
};

class SteadyLoopTest : public ::testing::TestWithParam<Case> {
 protected:
  static client::AttachOptions OptionsOf(const std::string& socket, uint32_t rank) {
    const Case& what = GetParam();
    protocol::LayoutSpec spec = testing::MakeLayoutSpec({.groups = kGroups,
                                                         .group_elems = kGroupElems,
                                                         .dtype = protocol::DType::kBFloat16,
                                                         .format = protocol::Format::kExact,
                                                         .optimizer = what.optimizer});
    spec.params[0].param_group = what.param_groups - 1;
    return {.socket = socket,
            .job = "job",
            .rank = rank,
            .world_size = what.ranks,
            .run = "run",
            .early_updates = what.early,
            .layout = what.sharded ? client::ShardFlat(spec, what.ranks) : spec,
            .timeout = kTimeout};
  }

  static Config ConfigOf(const testing::TempDir& dir, uint64_t dram_bytes) {
    Config config;
    config.socket_path = dir.path() + "/s";
    config.dram_limit_bytes = dram_bytes;
    config.block_elems = kBlockElems;
    config.workers = 2;
    config.lock = pinned_mem::LockPolicy::kBestEffort;
    config.pidfd = PidfdPolicy::kBestEffort;  // The daemon's clients are threads of this process.
    for (size_t path = 0; path < GetParam().paths; ++path) {
      config.swap_paths.push_back(dir.Make("swap" + std::to_string(path)));
    }
    config.swap_capacity_bytes = {uint64_t{64} << 20};
    config.swap_life = GetParam().keeps_jobs ? nvme::FileLife::kKept : nvme::FileLife::kUnlinked;
    config.swap_probe = false;
    return config;
  }

  static DescriptorStore StoreOfCase() {
    if (!GetParam().keeps_jobs) return {};
    return {.keep = [](const std::string&, int) { return absl::OkStatus(); },
            .drop = [](const std::string&) {}};
  }

  // Returns the DRAM limit with which the job has on swap what the case requires.
  static absl::StatusOr<uint64_t> DramBytes() {
    const testing::TempDir dir;
    ASSIGN_OR_RETURN(const auto daemon,
                     Daemon::Start(ConfigOf(dir, uint64_t{256} << 20), {}, {}, StoreOfCase()));
    ASSIGN_OR_RETURN(const auto admin, client::AdminClient::Connect({.socket = dir.path() + "/s"}));
    ASSIGN_OR_RETURN(const client::JobPlan plan,
                     admin->Plan(OptionsOf(dir.path() + "/s", 0), std::nullopt));
    const uint64_t all = plan->getAllInDram();
    switch (GetParam().on_swap) {
      case OnSwap::kNothing:
        return all;
      case OnSwap::kStates:  // Half of the states.
        return all - plan->getStates() / 2;
      case OnSwap::kWeights:
        return all - plan->getStates() - plan->getWeights() / 4;
      case OnSwap::kGradients:
        return all - plan->getStates() - plan->getWeights() * 3 / 4 - plan->getSums() / 2;
    }
    return all;
  }

  static absl::StatusOr<std::unique_ptr<Attachment>> Attach(const std::string& socket,
                                                            uint32_t rank) {
    ASSIGN_OR_RETURN(auto session, Attachment::Attach(OptionsOf(socket, rank)));
    if (!session->writes_initial()) return session;
    for (const uint32_t partition : OwnPartitions(*session)) {
      const std::vector<std::byte> values(session->layout().partition_bytes(partition));
      RETURN_IF_ERROR(session->WriteInitial(partition, values, kTimeout));
    }
    RETURN_IF_ERROR(session->InitialDone(kTimeout));
    return session;
  }

  static std::vector<uint32_t> OwnPartitions(const Attachment& session) {
    std::vector<uint32_t> own;
    const protocol::Layout& layout = session.layout();
    for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
      if (layout.is_shared() || layout.partitions()[i].owner == session.rank()) own.push_back(i);
    }
    return own;
  }

  static absl::Status Step(Attachment& session, const std::vector<uint32_t>& own, uint64_t t) {
    std::vector<protocol::HyperParams> hyper_params = testing::MakeHyperParams();
    hyper_params.resize(GetParam().param_groups, hyper_params[0]);
    const auto use = [&](uint32_t partition) -> absl::Status {
      ASSIGN_OR_RETURN(const client::Lease lease, session.Fetch(partition, kTimeout));
      return session.Release(lease);
    };
    for (const uint32_t partition : own) RETURN_IF_ERROR(use(partition));
    if (GetParam().early) RETURN_IF_ERROR(session.AnnounceStep(t, hyper_params, kTimeout));
    for (size_t i = own.size(); i-- > 0;) {
      RETURN_IF_ERROR(use(own[i]));
      ASSIGN_OR_RETURN(const auto slot,
                       session.GradSlot(own[i], client::GradFill::kNone, kTimeout));
      std::memset(slot.data(), 1, slot.size());  // small numbers
      RETURN_IF_ERROR(session.GradReady(own[i]));
    }
    if (GetParam().asks_norm) RETURN_IF_ERROR(session.GradNorm(std::nullopt, kTimeout).status());
    return session.Step(t, hyper_params, /*max_grad_norm=*/0, {}, kTimeout).status();
  }

  static absl::Status CheckPlaces(const std::string& socket) {
    ASSIGN_OR_RETURN(const auto admin, client::AdminClient::Connect({.socket = socket}));
    ASSIGN_OR_RETURN(const client::NodeStatus status, admin->Status());
    const auto job = status->getJobs()[0];
    const OnSwap on_swap = GetParam().on_swap;
    EXPECT_EQ(job.getResidentBlocks() < job.getBlocks(), on_swap != OnSwap::kNothing);
    EXPECT_EQ(job.getWeightsOnSwapBytes() > 0, on_swap >= OnSwap::kWeights);
    EXPECT_EQ(job.getGradientsOnSwapBytes() > 0, on_swap == OnSwap::kGradients);
    EXPECT_EQ(job.getEarlyUpdates() > 0, GetParam().early);
    EXPECT_EQ(job.getDroppedUpdates(), 0U);
    return absl::OkStatus();
  }
};

TEST_P(SteadyLoopTest, TakesNoMemory) {
  ASSERT_OK_AND_ASSIGN(const uint64_t dram_bytes, DramBytes());
  const testing::TempDir dir;
  const std::string socket = dir.path() + "/s";
  ASSERT_OK_AND_ASSIGN(const auto daemon,
                       Daemon::Start(ConfigOf(dir, dram_bytes), {}, {}, StoreOfCase()));
  std::barrier<> ranks(GetParam().ranks);
  const uint64_t before = CountedHeap::allocations();
  const auto train = [&](uint32_t rank) -> absl::Status {
    ASSIGN_OR_RETURN(const auto session, Attach(socket, rank));
    const std::vector<uint32_t> own = OwnPartitions(*session);
    CountedHeap::Start(IsLoopThread);
    ASSIGN_OR_RETURN(const uint64_t alike, testing::TrainUntilSteady(ranks, [&](uint64_t t) {
                       return Step(*session, own, t);
                     }));
    CountedHeap::Stop();
    EXPECT_GE(alike, testing::kStepsAlike) << CountedHeap::allocations() - before << " allocations";
    return rank == 0 ? CheckPlaces(socket) : absl::OkStatus();
  };
  for (const absl::Status& status : testing::OnRanks(GetParam().ranks, train)) EXPECT_OK(status);
  EXPECT_GT(CountedHeap::allocations(), before) << "the first step allocates: nothing was counted";
}

INSTANTIATE_TEST_SUITE_P(
    Everywhere, SteadyLoopTest,
    ::testing::Values(
        Case{.name = "AllInDram", .sharded = false, .ranks = 2},
        Case{.name = "AllInDramNorm", .sharded = false, .ranks = 2, .asks_norm = true},
        Case{.name = "AllInDramLamb",
             .sharded = false,
             .ranks = 2,
             .optimizer = protocol::Optimizer::kLamb},
        Case{.name = "AllInDramRecorded", .sharded = false, .ranks = 2, .keeps_jobs = true},
        Case{.name = "StatesOnSwap", .on_swap = OnSwap::kStates},
        Case{.name = "StatesOnSwapEarly", .on_swap = OnSwap::kStates, .early = true},
        Case{.name = "StatesOnSwapLamb",
             .on_swap = OnSwap::kStates,
             .sharded = false,
             .optimizer = protocol::Optimizer::kLamb},
        Case{.name = "ManyParamGroups",
             .on_swap = OnSwap::kStates,
             .early = true,
             .keeps_jobs = true,
             .param_groups = protocol::kParamGroupsMax},
        Case{.name = "StatesOnTwoPaths", .on_swap = OnSwap::kStates, .early = true, .paths = 2},
        Case{.name = "WeightsOnSwap", .on_swap = OnSwap::kWeights, .early = true, .ranks = 2},
        Case{.name = "WeightsOnSwapRecorded",
             .on_swap = OnSwap::kWeights,
             .early = true,
             .ranks = 2,
             .keeps_jobs = true},
        Case{.name = "GradientsOnSwap", .on_swap = OnSwap::kGradients},
        Case{.name = "GradientsOnSwapEarly", .on_swap = OnSwap::kGradients, .early = true}),
    [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace forebay::daemon
