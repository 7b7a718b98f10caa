// SPDX-License-Identifier: Apache-2.0
// Goal    A job into which every state of another job was written is the same job. It has the same bits in every format that
//         preserves them, also after the same further gradients, in DRAM and on swap. If steps are durable, this holds after a
//         kill of the daemon too.
// Method  Real daemons. One job is trained, and one rank writes the states that clients read from it into a new job, in pieces.
//         Both jobs continue with the same gradients. int8 rounds written values and is compared with a bound.

#include <bit>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/logical_state.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

using protocol::DType;
using protocol::Format;
using protocol::Optimizer;
using testing::DaemonProcess;
using ::testing::IsEmpty;
using testing::LogicalJob;
using testing::LogicalState;
using testing::StateKind;
using testing::TempDir;

constexpr auto kTimeout = std::chrono::seconds(60);
// Number of steps of the job whose states are written into the other job.
constexpr uint64_t kSteps = 3;

std::vector<StateKind> Formats() {
  return {{.name = "fp32_bf16", .dtype = DType::kBFloat16},
          {.name = "fp32_fp16", .dtype = DType::kFloat16},
          {.name = "exact", .format = Format::kExact, .dtype = DType::kBFloat16},
          {.name = "bf16", .format = Format::kBf16, .dtype = DType::kBFloat16},
          {.name = "int8", .format = Format::kInt8, .dtype = DType::kBFloat16},
          {.name = "amsgrad_int8",
           .optimizer = Optimizer::kAdamAmsgrad,
           .format = Format::kInt8,
           .dtype = DType::kBFloat16}};
}

// Returns all formats of AdamW, and all optimizers in float32.
std::vector<StateKind> Kinds() {
  std::vector<StateKind> kinds = testing::KindsOfAllOptimizers({{.name = "fp32"}});
  for (const StateKind& kind : Formats()) kinds.push_back(kind);
  return kinds;
}

class WrittenStates : public ::testing::TestWithParam<StateKind> {
 protected:
  LogicalJob Job(const std::string& name) const {
    const StateKind& kind = GetParam();
    return {.socket = dir_.path() + "/s",
            .job = name,
            .layout = testing::MakeMixedLayout(kind.optimizer, kind.format, kind.dtype)};
  }
  client::AttachOptions OptionsOf(const LogicalJob& job) const {
    return {.socket = job.socket, .job = job.job, .run = "run", .layout = job.layout};
  }

  // Writes every state of every trainable parameter, in pieces that begin where scales begin.
  absl::Status Write(const LogicalState& from, const LogicalJob& job) const {
    ASSIGN_OR_RETURN(const auto session, client::Attachment::Attach(OptionsOf(job)));
    const protocol::Layout& layout = session->layout();
    for (uint32_t param = 0; param < layout.params().size(); ++param) {
      const protocol::ParamPlace& place = layout.params()[param];
      const std::string& name = layout.spec().params[param].name;
      if (!place.trainable) continue;
      for (const std::string& state : protocol::StateNames(layout.spec().optimizer)) {
        const std::vector<uint32_t>& bits = from.at(absl::StrCat(name, "/", state));
        std::vector<float> values(bits.size());
        for (size_t i = 0; i < bits.size(); ++i) values[i] = std::bit_cast<float>(bits[i]);
        constexpr size_t kPiece = 40 * 128;  // More elements than a block has.
        for (size_t begin = 0; begin < values.size(); begin += kPiece) {
          const auto piece =
              std::span(values).subspan(begin, std::min(kPiece, values.size() - begin));
          RETURN_IF_ERROR(
              session->WriteState(place.group, place.offset_elems + begin, state, piece, kTimeout));
        }
      }
      RETURN_IF_ERROR(session->WriteUpdates(param, from.at(name + "/step")[0], kTimeout));
    }
    return session->Detach();
  }

  // Trains two steps from `first` on, with the gradients of steps kSteps + 1 and kSteps + 2.
  absl::Status GoOn(const LogicalJob& job, uint64_t first) const {
    return testing::Train(
        job, {.first = first, .end = first + 2, .gradient_of = [first](uint32_t, uint64_t t) {
                return kSteps + 1 + t - first;
              }});
  }

  bool IsRounded() const { return GetParam().format == Format::kInt8; }
  void ExpectSame(const LogicalState& wanted, const LogicalState& found) const {
    if (!IsRounded()) {
      EXPECT_THAT(testing::Differences(wanted, found), IsEmpty());
      return;
    }
    for (const auto& [name, bits] : wanted) {
      const bool is_moment = name.find("/exp_avg") != std::string::npos ||
                             name.find("/max_exp_avg") != std::string::npos;
      if (!is_moment) {
        EXPECT_EQ(found.at(name), bits) << name;
        continue;
      }
      const bool is_square = name.ends_with("_sq");
      const auto value = [&](const std::vector<uint32_t>& of, size_t i) {
        const float one = std::bit_cast<float>(of[i]);
        return is_square ? std::sqrt(one) : one;
      };
      for (size_t begin = 0; begin < bits.size(); begin += 128) {
        const size_t end = std::min(begin + 128, bits.size());
        float largest = 0;
        for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(value(bits, i)));
        // Half a quantization step of the group's scale.
        const float bound = 0.51F * largest / (is_square ? 255 : 127);
        for (size_t i = begin; i < end; ++i) {
          ASSERT_NEAR(value(found.at(name), i), value(bits, i), bound) << name << " " << i;
        }
      }
    }
  }

  void TestCopy() {
    const LogicalJob original = Job("original");
    const LogicalJob copy = Job("copy");
    ASSERT_OK(testing::Train(original, {.first = 1, .end = kSteps + 1}));
    ASSERT_OK_AND_ASSIGN(const LogicalState state, testing::ReadLogicalState(original));
    ASSERT_OK(GoOn(original, kSteps + 1));
    ASSERT_OK_AND_ASSIGN(const LogicalState later, testing::ReadLogicalState(original));
    ASSERT_OK(testing::Train(copy, {}));
    ASSERT_OK(Write(state, copy));
    ASSERT_OK_AND_ASSIGN(const LogicalState written, testing::ReadLogicalState(copy));
    ExpectSame(state, written);
    ASSERT_OK(GoOn(copy, 1));
    ASSERT_OK_AND_ASSIGN(const LogicalState gone_on, testing::ReadLogicalState(copy));
    if (!IsRounded()) {
      EXPECT_THAT(testing::Differences(later, gone_on), IsEmpty());
    }
    for (const auto& param : copy.layout.params) {
      if (!param.trainable) continue;
      EXPECT_EQ(gone_on.at(param.name + "/step"), std::vector<uint32_t>{kSteps + 2});
    }
  }

  TempDir dir_;
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_P(WrittenStates, AreTheOthersInDram) {
  ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(Job("").socket, {"update.block_elems=4096"}));
  TestCopy();
}

TEST_P(WrittenStates, AreTheOthersOnSwap) {
  ASSERT_OK_AND_ASSIGN(daemon_, testing::StartWithSwap(dir_, Job("original"), 1));
  // The job's earlier states are written back into the job itself.
  const LogicalJob copy = Job("original");
  ASSERT_OK(testing::Train(copy, {.first = 1, .end = kSteps + 1}));
  ASSERT_OK_AND_ASSIGN(const LogicalState state, testing::ReadLogicalState(copy));
  ASSERT_OK(GoOn(copy, kSteps + 1));
  ASSERT_OK_AND_ASSIGN(const LogicalState later, testing::ReadLogicalState(copy));
  // Write the earlier states into the job, and train on.
  ASSERT_OK(Write(state, copy));
  ASSERT_OK_AND_ASSIGN(const LogicalState written, testing::ReadLogicalState(copy));
  ExpectSame(state, written);
  ASSERT_OK(GoOn(copy, kSteps + 3));
  ASSERT_OK_AND_ASSIGN(const LogicalState again, testing::ReadLogicalState(copy));
  if (!IsRounded()) {
    EXPECT_THAT(testing::Differences(later, again), IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, WrittenStates, ::testing::ValuesIn(Kinds()),
                         [](const auto& kind) { return kind.param.name; });

class WrittenStatesOfDurableJobs : public WrittenStates {};

// Written states become durable with the next step, just like the results of a step.
TEST_P(WrittenStatesOfDurableJobs, SurviveTheDaemon) {
  const std::vector<std::string> settings = {"update.block_elems=4096", "jobs.durability=step",
                                             "swap.capacity=64MiB",
                                             absl::StrCat("swap.paths=[\"", dir_.Make("a"), "\"]")};
  const LogicalJob job = Job("job");
  ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(job.socket, settings));
  ASSERT_OK(testing::Train(job, {.first = 1, .end = kSteps + 1}));
  ASSERT_OK_AND_ASSIGN(const LogicalState state, testing::ReadLogicalState(job));
  ASSERT_OK(testing::Train(job, {.first = kSteps + 1, .end = kSteps + 3}));
  ASSERT_OK(Write(state, job));
  ASSERT_OK_AND_ASSIGN(const LogicalState written, testing::ReadLogicalState(job));
  // A step without a gradient changes no state, and makes the written states durable.
  ASSERT_OK(testing::Train(job, {.first = kSteps + 3,
                                 .end = kSteps + 4,
                                 .gradient_of = [](uint32_t, uint64_t) { return 0; }}));
  daemon_->Kill();
  daemon_.reset();
  ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(job.socket, settings));
  ASSERT_OK_AND_ASSIGN(const LogicalState after, testing::ReadLogicalState(job));
  EXPECT_THAT(testing::Differences(written, after), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Formats, WrittenStatesOfDurableJobs, ::testing::ValuesIn(Formats()),
                         [](const auto& kind) { return kind.param.name; });

}  // namespace
}  // namespace forebay::daemon
