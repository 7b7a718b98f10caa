// SPDX-License-Identifier: Apache-2.0
// Goal    A job trained through a real daemon has the bits of the scalar reference: formats fp32 and exact, all in DRAM and
//         mostly on swap, with clipping, for every order in which ranks deliver, and after a killed rank.
// Method  Two ranks, each a thread with its own connection, deliver gradients that the reference
//         knows; after each step every byte of the weights, and at the end every byte of the states,
//         is compared.

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon::training_process_test {
namespace {

using client::AdminClient;
using client::Attachment;
using protocol::DType;
using protocol::Format;
using protocol::Layout;
using protocol::Optimizer;
using testing::DaemonProcess;
using testing::JobShape;
using testing::ReferenceTrainer;
using testing::TempDir;

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr uint64_t kSeed = 7;

struct Case {
  std::string name;
  JobShape shape;
  std::vector<std::string> settings;
  bool swapped = false;
  double max_grad_norm = 0;
  bool announces = false;
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

absl::StatusOr<std::unique_ptr<Attachment>> Attach(const std::string& socket, const Case& of,
                                                   uint32_t rank) {
  const JobShape& shape = of.shape;
  return Attachment::Attach({.socket = socket,
                             .job = "job",
                             .rank = rank,
                             .world_size = shape.world_size,
                             .early_updates = of.announces,
                             .layout = testing::MakeLayoutSpec(shape),
                             .timeout = kTimeout});
}

std::vector<uint32_t> AllGroups(const Layout& layout) {
  std::vector<uint32_t> groups(layout.groups().size());
  for (uint32_t g = 0; g < groups.size(); ++g) groups[g] = g;
  return groups;
}

void ExpectWeights(Attachment& session, const ReferenceTrainer& reference) {
  for (uint32_t g = 0; g < session.layout().groups().size(); ++g) {
    ASSERT_OK_AND_ASSIGN(const client::Lease lease, session.Fetch(g, kTimeout));
    const auto expected = reference.Weights(g);
    EXPECT_TRUE(std::ranges::equal(lease.bytes, expected)) << "weights of group " << g;
    EXPECT_OK(session.Release(lease));
  }
}

class DaemonTraining : public ::testing::TestWithParam<Case> {};

TEST_P(DaemonTraining, HasTheBitsOfTheScalarReference) {
  const TempDir dir;
  std::vector<std::string> settings = GetParam().settings;
  if (GetParam().swapped) {
    settings.push_back("swap.paths=[\"" + dir.Make("a") + "\", \"" + dir.Make("b") + "\"]");
    settings.push_back("swap.capacity=32MiB");
  }
  const std::string socket = dir.path() + "/s";
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(socket, settings));
  const JobShape& shape = GetParam().shape;
  ASSERT_OK_AND_ASSIGN(const Layout layout, Layout::Create(testing::MakeLayoutSpec(shape)));
  ReferenceTrainer reference(layout, shape.world_size, kSeed);

  std::vector<std::unique_ptr<Attachment>> ranks;
  for (uint32_t rank = 0; rank < shape.world_size; ++rank) {
    ASSERT_OK_AND_ASSIGN(ranks.emplace_back(), Attach(socket, GetParam(), rank));
    EXPECT_EQ(ranks.back()->writes_initial(), rank == 0);
    if (rank == 0) {
      ASSERT_OK(testing::WriteInitial(*ranks.back(), kSeed));
    }
  }
  constexpr uint64_t kSteps = 4;
  for (uint64_t t = 1; t <= kSteps; ++t) {
    SCOPED_TRACE("step " + std::to_string(t));
    const double norm =
        reference.Step(t, testing::MakeHyperParams(), GetParam().max_grad_norm, AllGroups(layout));
    std::vector<absl::StatusOr<client::StepResult>> results(ranks.size());
    {
      std::vector<std::jthread> threads;
      for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
        threads.emplace_back([&, rank] {
          if (GetParam().announces) {
            EXPECT_OK(ranks[rank]->AnnounceStep(t, testing::MakeHyperParams(), kTimeout));
          }
          results[rank] = testing::TrainStep(*ranks[rank], {rank, t, GetParam().max_grad_norm});
        });
      }
    }
    for (const auto& result : results) {
      ASSERT_OK(result);
      EXPECT_EQ(result->committed_step, t);
      EXPECT_EQ(result->norm, norm);
      EXPECT_EQ(result->clipped, GetParam().max_grad_norm > 0);
      EXPECT_FALSE(result->repeated);
    }
    for (const auto& rank : ranks) ExpectWeights(*rank, reference);
  }
  EXPECT_OK(testing::CheckStates(*ranks[0], reference));
  for (const uint64_t t : {kSteps, kSteps + 2}) {
    EXPECT_THAT(ranks[0]->AnnounceStep(t, testing::MakeHyperParams(), kTimeout),
                testing::HasError(protocol::ErrorId::kStep));
  }

  ASSERT_OK_AND_ASSIGN(auto admin, AdminClient::Connect({.socket = socket}));
  ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
  ASSERT_EQ(status->getJobs().size(), 1U);
  EXPECT_EQ(status->getJobs()[0].getCommittedStep(), kSteps);
  EXPECT_LE(status->getMemory().getUsedBytes() - status->getMemory().getPrivateBytes(),
            status->getMemory().getLimitBytes());
  const uint32_t swapped =
      status->getJobs()[0].getBlocks() - status->getJobs()[0].getResidentBlocks();
  if (GetParam().swapped) {
    EXPECT_GT(swapped, 0U);
    EXPECT_GT(status->getJobs()[0].getResidentBlocks(), 0U);
    EXPECT_GE(status->getJobs()[0].getUpdateReads(), swapped * (kSteps - 1));
    uint64_t written_bytes = 0;
    for (const auto path : status->getSwap()) written_bytes += path.getWrittenBytes();
    EXPECT_GT(written_bytes,
              // Includes the zeros written at the start.
              status->getJobs()[0].getStateWrittenBytes());
  } else {
    EXPECT_EQ(swapped, 0U);
  }
  EXPECT_EQ(status->getJobs()[0].getEarlyUpdates() > 0,
            GetParam().announces && GetParam().max_grad_norm == 0);
  EXPECT_EQ(status->getJobs()[0].getDroppedUpdates() > 0,
            GetParam().announces && GetParam().max_grad_norm > 0);
  if (GetParam().announces) return;  // The trace also has block updates from before the step.
  ASSERT_OK_AND_ASSIGN(const auto trace, admin->Trace("job"));
  std::vector<schema::TraceEvent::Reader> events;
  for (const auto event : trace->getEvents()) events.push_back(event);
  const auto lane_is = [](const std::string& lane) {
    return [lane](const auto& event) { return event.getLane().cStr() == lane; };
  };
  EXPECT_EQ(std::ranges::count_if(events, lane_is("step")), 1);
  EXPECT_EQ(std::ranges::count_if(events, lane_is("update")), status->getJobs()[0].getBlocks());
  EXPECT_EQ(std::ranges::count_if(events, lane_is("swap read")), swapped);
  EXPECT_EQ(std::ranges::count_if(events, lane_is("swap write")), swapped);
  // A group has one addition of gradients if all ranks have delivered, and at most one for each rank.
  const auto passes = std::ranges::count_if(events, lane_is("gradient"));
  EXPECT_GE(passes, shape.groups);
  EXPECT_LE(passes, shape.groups * shape.world_size);
  for (const auto& event : events) EXPECT_LE(event.getStartNs(), event.getEndNs());

  for (auto& rank : ranks) EXPECT_OK(rank->Detach());
  const testing::Ended ended = daemon->Stop();
  EXPECT_EQ(ended.exit_code, 0) << ended.errors;
}

constexpr uint64_t kSwapGroupElems = 64 << 10;
const std::vector<std::string> kTight = {"dram.limit=14464KiB", "update.block_elems=4096"};

INSTANTIATE_TEST_SUITE_P(
    Jobs, DaemonTraining,
    ::testing::Values(
        Case{"fp32InDram", {}, {"update.block_elems=1024"}},
        Case{"fp32OneRankClipped", {.world_size = 1, .groups = 2}, {}, false, 0.01},
        Case{"exactInDram",
             {.dtype = DType::kBFloat16, .format = Format::kExact},
             {"update.block_elems=1024"}},
        Case{"fp32OnSwap", {.groups = 8, .group_elems = kSwapGroupElems}, kTight, true},
        Case{"fp32OnSwapClipped", {.groups = 8, .group_elems = kSwapGroupElems}, kTight, true, 0.5},
        Case{"fp32OnSwapEarly",
             {.groups = 8, .group_elems = kSwapGroupElems},
             {"dram.limit=16512KiB", "update.block_elems=4096"},
             true,
             0,
             true},
        Case{"fp32OnSwapEarlyClipped",
             {.groups = 8, .group_elems = kSwapGroupElems},
             {"dram.limit=16512KiB", "update.block_elems=4096"},
             true,
             0.5,
             true},
        Case{"exactOnSwapEarly",
             {.groups = 8,
              .group_elems = kSwapGroupElems,
              .dtype = DType::kBFloat16,
              .format = Format::kExact},
             {"dram.limit=12416KiB", "update.block_elems=4096"},
             true,
             0,
             true},
        Case{"fp32OnSwapThreads",
             {.groups = 8, .group_elems = kSwapGroupElems},
             {"dram.limit=14464KiB", "update.block_elems=4096", "io.engine=threads"},
             true},
        Case{"exactOnSwap",
             {.groups = 8,
              .group_elems = kSwapGroupElems,
              .dtype = DType::kBFloat16,
              .format = Format::kExact},
             {"dram.limit=11392KiB", "update.block_elems=4096"},
             true},
        Case{"exactOneRankInDramInParts",
             {.world_size = 1,
              .groups = 2,
              .group_elems = 1'300'000,
              .dtype = DType::kBFloat16,
              .format = Format::kExact},
             {}},
        Case{"exactTwoRanksInParts",
             {.groups = 2,
              .group_elems = 700'000,
              .dtype = DType::kBFloat16,
              .format = Format::kExact},
             {},
             false,
             0.01},
        Case{"exactOneRankOnSwapClipped",
             {.world_size = 1,
              .groups = 8,
              .group_elems = kSwapGroupElems,
              .dtype = DType::kBFloat16,
              .format = Format::kExact},
             {"dram.limit=10368KiB", "update.block_elems=4096"},
             true,
             0.01},
        Case{"amsgradOnSwapInSmallerBlocks",
             {.groups = 8, .group_elems = kSwapGroupElems, .optimizer = Optimizer::kAdamWAmsgrad},
             kTight,
             true},
        Case{"adagradOnSwap",
             {.groups = 8, .group_elems = kSwapGroupElems, .optimizer = Optimizer::kAdagrad},
             {"dram.limit=14464KiB", "update.block_elems=4096"},
             true},
        Case{"lionExactInDram",
             {.dtype = DType::kBFloat16, .format = Format::kExact, .optimizer = Optimizer::kLion},
             {"update.block_elems=1024"}},
        Case{"sgdInDramClipped", {.optimizer = Optimizer::kSgd}, {}, false, 0.01}),
    [](const ::testing::TestParamInfo<Case>& one) { return one.param.name; });

}  // namespace
}  // namespace forebay::daemon::training_process_test
