// SPDX-License-Identifier: Apache-2.0
// Goal    Clients read the model's logical state, for jobs in DRAM and on swap. Before the first step the masters equal the
//         weights and the moments are zero. Frozen parameters have weights and no states. A parameter without a gradient
//         retains its weights, states and t to the bit. The world size changes no bit, from the first step or from any later
//         step on.
// Method  Real daemons, in DRAM and with half of the states on swap; weights and states are read by
//         name and compared bit by bit.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "cpu_adam/stream_kernel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/optimizer.h"
#include "tests/support/logical_state.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

using protocol::DType;
using protocol::ErrorId;
using protocol::Format;
using testing::DaemonProcess;
using testing::HasError;
using ::testing::IsEmpty;
using testing::LogicalJob;
using testing::LogicalState;
using testing::StateKind;
using testing::TempDir;

constexpr auto kTimeout = std::chrono::seconds(60);

const std::vector<StateKind> kFormats = {
    {.name = "fp32"},
    {.name = "fp32_bf16", .dtype = DType::kBFloat16},
    {.name = "exact", .format = Format::kExact, .dtype = DType::kBFloat16}};
const std::vector<StateKind> kRounded = {
    {.name = "fp32_fp16", .dtype = DType::kFloat16},
    {.name = "bf16", .format = Format::kBf16, .dtype = DType::kBFloat16},
    {.name = "int8", .format = Format::kInt8, .dtype = DType::kBFloat16}};

// Runs a daemon with a job of one format and optimizer.
class LogicalStates : public ::testing::TestWithParam<StateKind> {
 protected:
  LogicalJob Job(const std::string& name = "job") const {
    const StateKind& kind = GetParam();
    return {.socket = dir_.path() + "/s",
            .job = name,
            .layout = testing::MakeMixedLayout(kind.optimizer, kind.format, kind.dtype)};
  }
  void StartInDram() {
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(Job().socket, {"update.block_elems=4096"}));
  }
  void StartOnSwap(uint32_t world_size = 1) {
    ASSERT_OK_AND_ASSIGN(daemon_, testing::StartWithSwap(dir_, Job(), world_size));
  }
  // Expects that some blocks are in DRAM and some are on swap.
  void ExpectBothTiers() const {
    ASSERT_OK_AND_ASSIGN(auto admin, client::AdminClient::Connect({.socket = Job().socket}));
    ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
    ASSERT_EQ(status->getJobs().size(), 1U);
    EXPECT_GT(status->getJobs()[0].getResidentBlocks(), 0U);
    EXPECT_LT(status->getJobs()[0].getResidentBlocks(), status->getJobs()[0].getBlocks());
  }
  void ExpectMastersAreWeights(const LogicalState& state) const {
    const DType dtype = GetParam().dtype;
    for (const auto& param : Job().layout.params) {
      if (!param.trainable) continue;
      std::vector<uint32_t> master = state.at(param.name + "/weights");
      if (dtype != DType::kFloat32) {
        const std::vector<uint16_t> narrow(master.begin(), master.end());
        cpu_adam::AddGradient(narrow.size(), {narrow.data(), dtype}, cpu_adam::AddMode::kSet,
                              reinterpret_cast<float*>(master.data()));
      }
      EXPECT_EQ(state.at(param.name + "/master"), master) << param.name;
      EXPECT_EQ(state.at(param.name + "/step"), std::vector<uint32_t>{0});
      for (const auto& moment : protocol::Info(GetParam().optimizer).moments) {
        const std::vector<uint32_t> zeros(master.size(), 0);
        EXPECT_EQ(state.at(param.name + "/" + std::string(moment.name)), zeros) << param.name;
      }
    }
  }

  TempDir dir_;
  std::unique_ptr<DaemonProcess> daemon_;
};

std::string NameOf(const ::testing::TestParamInfo<StateKind>& kind) { return kind.param.name; }

// ---------------------------------------------------------------------------- before the first step

class LogicalStatesBeforeTheFirstStep : public LogicalStates {};

TEST_P(LogicalStatesBeforeTheFirstStep, AreTheWeightsAndZerosInDram) {
  StartInDram();
  ASSERT_OK(testing::Train(Job(), {}));
  ASSERT_OK_AND_ASSIGN(const LogicalState state, testing::ReadLogicalState(Job()));
  ExpectMastersAreWeights(state);
}

TEST_P(LogicalStatesBeforeTheFirstStep, AreTheWeightsAndZerosOnSwap) {
  StartOnSwap();
  ASSERT_OK(testing::Train(Job(), {}));
  ExpectBothTiers();
  ASSERT_OK_AND_ASSIGN(const LogicalState state, testing::ReadLogicalState(Job()));
  ExpectMastersAreWeights(state);
}

std::vector<StateKind> AllFormats() {
  std::vector<StateKind> kinds = kFormats;
  kinds.insert(kinds.end(), kRounded.begin(), kRounded.end());
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Formats, LogicalStatesBeforeTheFirstStep,
                         ::testing::ValuesIn(AllFormats()), NameOf);

// ------------------------------------------------------------------------------- parts of a parameter

class LogicalStatesInParts : public LogicalStates {};

// Reads ranges that begin at several offsets within a group of 128 elements, and lie within one block or across several.
TEST_P(LogicalStatesInParts, AreThoseOfTheWhole) {
  StartOnSwap();
  ASSERT_OK(testing::Train(Job(), {.first = 1, .end = 3}));
  ASSERT_OK_AND_ASSIGN(const LogicalState whole, testing::ReadLogicalState(Job()));
  ASSERT_OK_AND_ASSIGN(
      auto session,
      client::Attachment::Attach(
          {.socket = Job().socket, .job = "job", .run = "run", .layout = Job().layout}));
  const uint64_t elems = uint64_t{257} * 129;
  for (const std::string& state : protocol::StateNames(GetParam().optimizer)) {
    const std::vector<uint32_t>& all = whole.at("layer2.weight/" + state);
    for (const uint64_t first : {uint64_t{0}, uint64_t{1}, uint64_t{127}, uint64_t{129},
                                 uint64_t{4000}, uint64_t{20479}, elems - 1}) {
      for (const uint64_t n : {uint64_t{1}, uint64_t{128}, uint64_t{9001}, elems - 129}) {
        std::vector<float> values(std::min(n, elems - first));
        ASSERT_OK(session->ReadState(
            {.param = "layer2.weight", .state = state, .first_elem = first}, values, kTimeout));
        EXPECT_EQ(std::memcmp(values.data(), &all[first], values.size() * sizeof(float)), 0)
            << state << " from " << first << ", " << values.size();
      }
    }
  }
  EXPECT_OK(session->Detach());
}

INSTANTIATE_TEST_SUITE_P(Formats, LogicalStatesInParts, ::testing::ValuesIn(AllFormats()), NameOf);

// ------------------------------------------------------------------------------------------- frozen

class LogicalStatesOfFrozenParameters : public LogicalStates {};

TEST_P(LogicalStatesOfFrozenParameters, AreWeightsAlone) {
  StartOnSwap();
  ASSERT_OK(testing::Train(Job(), {}));
  ASSERT_OK_AND_ASSIGN(const LogicalState before, testing::ReadLogicalState(Job()));
  ASSERT_OK(testing::Train(Job(), {.first = 1, .end = 3}));
  ASSERT_OK_AND_ASSIGN(const LogicalState after, testing::ReadLogicalState(Job()));
  uint32_t frozen = 0;
  for (const auto& param : Job().layout.params) {
    const std::string weights = param.name + "/weights";
    EXPECT_EQ(before.at(weights) == after.at(weights), !param.trainable) << param.name;
    frozen += param.trainable ? 0 : 1;
  }
  EXPECT_EQ(frozen, 5U);

  ASSERT_OK_AND_ASSIGN(
      auto session,
      client::Attachment::Attach(
          {.socket = Job().socket, .job = "job", .run = "run", .layout = Job().layout}));
  const uint32_t param = 1;
  ASSERT_EQ(Job().layout.params[param].name, "layer0.frozen");
  std::vector<float> values(513);
  const auto read =
      session->ReadState({.param = "layer0.frozen", .state = "master"}, values, kTimeout);
  EXPECT_THAT(read, HasError(ErrorId::kRange));
  const std::vector<std::byte> gradient(513 * protocol::SizeBytes(GetParam().dtype));
  EXPECT_THAT(session->AddGradient(param, gradient, kTimeout), HasError(ErrorId::kUnsupported));
  EXPECT_OK(session->Detach());

  ASSERT_OK_AND_ASSIGN(const auto layout, protocol::Layout::Create(Job().layout));
  EXPECT_EQ(layout.total_elems() - layout.trainable_elems(), 4U * 513 + 700);
  ASSERT_OK_AND_ASSIGN(auto admin, client::AdminClient::Connect({.socket = Job().socket}));
  ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
  ASSERT_EQ(status->getJobs().size(), 1U);
  EXPECT_EQ(status->getJobs()[0].getStateBytes(),
            layout.total_elems() * protocol::SizeBytes(GetParam().dtype) +
                protocol::StateBytes(GetParam().optimizer, GetParam().format, GetParam().dtype,
                                     layout.trainable_elems()));
}

INSTANTIATE_TEST_SUITE_P(Formats, LogicalStatesOfFrozenParameters,
                         ::testing::ValuesIn(AllFormats()), NameOf);

// ------------------------------------------------------------------------- without a gradient in a step

class LogicalStatesWithoutAGradient : public LogicalStates {
 protected:
  // True for four parameters without a gradient in step 2. They lie in DRAM and on swap, and other parameters in the same
  // blocks have a gradient.
  static bool IsAbsent(const std::string& param) {
    return param == "layer0.bias" || param == "layer1.weight" || param == "layer2.scale" ||
           param == "layer3.weight";
  }
};

TEST_P(LogicalStatesWithoutAGradient, StayToTheBitAndSoDoesTheirT) {
  StartOnSwap();
  const LogicalJob job = Job();
  const auto params = job.layout.params;
  const auto gradient_of = [&params](uint32_t param, uint64_t t) {
    return t == 2 && IsAbsent(params[param].name) ? 0 : t;
  };
  const auto trained_until = [&](uint64_t t) -> absl::StatusOr<LogicalState> {
    const absl::Status status =
        testing::Train(job, {.first = t, .end = t + 1, .gradient_of = gradient_of});
    if (!status.ok()) return status;
    return testing::ReadLogicalState(job);
  };
  ASSERT_OK_AND_ASSIGN(const LogicalState first, trained_until(1));
  ExpectBothTiers();
  ASSERT_OK_AND_ASSIGN(const LogicalState second, trained_until(2));
  for (const auto& param : params) {
    if (!param.trainable) continue;
    const bool same = IsAbsent(param.name);
    for (const auto& [name, bits] : first) {
      if (!same || !name.starts_with(param.name + "/")) continue;
      EXPECT_EQ(second.at(name), bits) << name;
    }
    EXPECT_EQ(second.at(param.name + "/master") == first.at(param.name + "/master"), same)
        << param.name;
    EXPECT_EQ(second.at(param.name + "/step")[0], same ? 1U : 2U) << param.name;
  }

  // The third step of the parameters that had no gradient in step 2 equals that of a run without step 2.
  ASSERT_OK_AND_ASSIGN(const LogicalState third, trained_until(3));
  daemon_.reset();
  StartInDram();
  ASSERT_OK(testing::Train(
      job, {.first = 1, .end = 3, .gradient_of = [](uint32_t, uint64_t t) { return 2 * t - 1; }}));
  ASSERT_OK_AND_ASSIGN(const LogicalState without, testing::ReadLogicalState(job));
  for (const auto& [name, bits] : without) {
    if (!IsAbsent(name.substr(0, name.find('/')))) continue;
    EXPECT_EQ(third.at(name), bits) << name;
  }
}

std::vector<StateKind> KindsWithoutAGradient() {
  return testing::KindsOfAllOptimizers({kFormats[0], kFormats[1], kFormats[2], kRounded[2]});
}

INSTANTIATE_TEST_SUITE_P(Optimizers, LogicalStatesWithoutAGradient,
                         ::testing::ValuesIn(KindsWithoutAGradient()), NameOf);

// ----------------------------------------------------------------------------------------- any world

class LogicalStatesOfAnyWorld : public LogicalStates {};

TEST_P(LogicalStatesOfAnyWorld, AreThoseOfOneRank) {
  StartInDram();
  std::vector<LogicalState> worlds;
  for (const uint32_t world_size : {1U, 2U, 3U}) {
    const LogicalJob job = Job("world" + std::to_string(world_size));
    ASSERT_OK(testing::Train(job, {.world_size = world_size, .first = 1, .end = 4}));
    ASSERT_OK_AND_ASSIGN(worlds.emplace_back(), testing::ReadLogicalState(job, world_size));
  }
  EXPECT_EQ(worlds[0].at("layer0.bias/step")[0], 3U);
  EXPECT_THAT(testing::Differences(worlds[0], worlds[1]), IsEmpty());
  EXPECT_THAT(testing::Differences(worlds[0], worlds[2]), IsEmpty());
}

// Expects that each rank of both worlds has its extra_state of the newest step. A rank that is new in this world has none.
void ExpectExtraState(const LogicalJob& job, uint32_t world_size, uint32_t before, uint64_t step) {
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    ASSERT_OK_AND_ASSIGN(auto session, client::Attachment::Attach({.socket = job.socket,
                                                                   .job = job.job,
                                                                   .rank = rank,
                                                                   .world_size = world_size,
                                                                   .run = "run",
                                                                   .layout = job.layout}));
    const auto text = [](std::span<const std::byte> bytes) {
      return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    const std::string own = "rank " + std::to_string(rank) + " step " + std::to_string(step);
    EXPECT_EQ(text(session->extra_state()), rank < before ? own : "");
    if (rank > 0) {
      EXPECT_EQ(text(session->rank0_extra_state()), "rank 0 step " + std::to_string(step));
    }
    EXPECT_EQ(session->committed_step(), step);
    EXPECT_OK(session->Detach());
  }
}

TEST_P(LogicalStatesOfAnyWorld, GoOnInAnotherWorldAsInTheirOwn) {
  StartInDram();
  const LogicalJob stays = Job("stays");
  ASSERT_OK(testing::Train(stays, {.world_size = 2, .first = 1, .end = 5}));
  ASSERT_OK_AND_ASSIGN(const LogicalState expected, testing::ReadLogicalState(stays, 2));
  const LogicalJob moves = Job("moves");
  ASSERT_OK(testing::Train(moves, {.world_size = 2, .first = 1, .end = 2}));
  ASSERT_OK(testing::Train(moves, {.world_size = 1, .first = 2, .end = 3}));
  ExpectExtraState(moves, 3, /*before=*/1, /*step=*/2);
  ASSERT_OK(testing::Train(moves, {.world_size = 3, .first = 3, .end = 5}));
  ASSERT_OK_AND_ASSIGN(const LogicalState moved, testing::ReadLogicalState(moves, 3));
  EXPECT_THAT(testing::Differences(expected, moved), IsEmpty());
}

TEST_P(LogicalStatesOfAnyWorld, GoOnInAnotherWorldOnSwapToo) {
  StartOnSwap(3);
  ASSERT_OK(testing::Train(Job(), {.world_size = 1, .first = 1, .end = 2}));
  ASSERT_OK(testing::Train(Job(), {.world_size = 3, .first = 2, .end = 3}));
  ExpectBothTiers();
  ASSERT_OK(testing::Train(Job(), {.world_size = 2, .first = 3, .end = 4}));
  ExpectExtraState(Job(), 3, /*before=*/2, /*step=*/3);
  ASSERT_OK_AND_ASSIGN(const LogicalState moved, testing::ReadLogicalState(Job(), 1));
  daemon_.reset();
  StartInDram();
  ASSERT_OK(testing::Train(Job(), {.world_size = 1, .first = 1, .end = 4}));
  ASSERT_OK_AND_ASSIGN(const LogicalState expected, testing::ReadLogicalState(Job()));
  EXPECT_THAT(testing::Differences(expected, moved), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Optimizers, LogicalStatesOfAnyWorld,
                         ::testing::ValuesIn(testing::KindsOfAllOptimizers(kFormats)), NameOf);

}  // namespace
}  // namespace forebay::daemon
