// SPDX-License-Identifier: Apache-2.0
// Goal    A gradient that is delivered parameter by parameter is sent in ranges of whole units as soon as the units are
//         complete, with zeros for a parameter without a gradient. A unit that is flushed in part waits for its rest or for
//         Step. A dropped attempt begins the next attempt.
// Method  The daemon's end of the ring is scripted and copies the values of each delivery.

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/wire.h"
#include "tests/client/scripted_daemon.h"
#include "tests/support/status_test.h"

namespace forebay::client::internal::pieces_test {
namespace {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::kGradUnitElems;
using protocol::Op;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::HasError;

constexpr uint64_t kUnit = kGradUnitElems;

// The layout has one group of three parameters over three units. The second parameter crosses two borders of units.
class PiecesTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElems0 = 1000;
  static constexpr uint64_t kElems1 = 2 * kUnit;
  static constexpr uint64_t kElems2 = 500;
  static constexpr Timeout kTimeout = kTestDeadline;

  virtual bool b_is_frozen() const { return false; }

  struct Delivery {
    uint64_t begin = 0;
    uint64_t attempt = 0;
    uint16_t pass = 0;
    std::vector<float> values;

    uint64_t end() const { return begin + values.size(); }
  };

  void SetUp() override {
    protocol::LayoutSpec spec{
        .dtype = protocol::DType::kFloat32,
        .optimizer = protocol::Optimizer::kAdamW,
        .format = protocol::Format::kFp32,
        .params = {{.name = "a", .shape = {kElems0}, .group = 0},
                   {.name = "b", .shape = {kElems1}, .group = 0, .trainable = !b_is_frozen()},
                   {.name = "c", .shape = {kElems2}, .group = 0}},
        .group_names = {"g"},
        .partitions = {}};
    layout_ =
        std::make_shared<const protocol::Layout>(protocol::Layout::Create(std::move(spec)).value());
    const uint64_t grad_bytes = 2 * layout_->largest_gradient_bytes();
    weights_ = Mapping::MapPrivate(layout_->weights_bytes()).value();
    grad_ = Mapping::MapPrivate(grad_bytes + 8192).value();
    SessionParts parts{.layout = layout_,
                       .port = {.channel = protocol::MakeRingClientChannel(daemon_.Ends()).value(),
                                .daemon_pidfd = -1,
                                .gone_fd = daemon_.gone_fd(),
                                .explain =
                                    [](const Completion& completion) {
                                      return protocol::MakeError(
                                          static_cast<ErrorId>(completion.error),
                                          "as the script says");
                                    }},
                       .weights = weights_,
                       .grad = grad_,
                       .step_region_offset = grad_bytes,
                       .step_region_bytes = 8192,
                       .extra_state_bytes = 0,
                       .gauge = std::make_shared<SessionGauge>(),
                       .timeout = kTimeout,
                       .interrupt_check = {},
                       .device = std::make_shared<gpu::HostDevice>()};
    daemon_.Start([this](const Command& command) { return Serve(command); });
    ASSERT_OK_AND_ASSIGN(session_, Attachment::Assemble(std::move(parts)));
  }
  void TearDown() override { daemon_.Stop(); }

  std::optional<Completion> Serve(const Command& command) {
    Completion completion = ScriptedDaemon::Success(command);
    const auto bytes = grad_->bytes().subspan(command.arena_offset_bytes, command.length_bytes);
    if (command.op == static_cast<uint16_t>(Op::kGradReady)) {
      Delivery delivery{.begin = command.element_offset,
                        .attempt = command.attempt,
                        .pass = command.kind,
                        .values = std::vector<float>(bytes.size() / sizeof(float))};
      std::memcpy(delivery.values.data(), bytes.data(), bytes.size());
      delivered_.push_back(std::move(delivery));
    } else if (command.op == static_cast<uint16_t>(Op::kStep)) {
      attempt_of_step_ = command.attempt;
      std::memcpy(&presence_,
                  bytes.data() + sizeof(protocol::StepRequest) + sizeof(protocol::HyperParams),
                  sizeof(presence_));
      if (answer_of_step_ != ErrorId::kNone) {
        completion.error = static_cast<uint32_t>(answer_of_step_);
        completion.attempt = 7;
      } else {
        completion.committed_step = command.step;
      }
    }
    return completion;
  }

  absl::Status Add(uint32_t param, float value) {
    const std::vector<float> gradient(layout_->params()[param].elems, value);
    return session_->AddGradient(param, std::as_bytes(std::span(gradient)), kTimeout);
  }
  absl::Status Step(uint64_t t) {
    const std::array<protocol::HyperParams, 1> hyper{};
    return session_->Step(t, hyper, 0, {}, kTimeout).status();
  }
  // Checks the deliveries after a Step: every delivered element of parameter i equals values[i], 0 without a gradient. Bit i of
  // `presence` is set if parameter i has a gradient.
  void ExpectDelivered(std::array<float, 3> values, uint64_t presence) const {
    for (uint32_t param = 0; param < values.size(); ++param) {
      EXPECT_THAT(DeliveredOf(param), Each(values[param])) << "parameter " << param;
    }
    EXPECT_EQ(presence_, presence);
  }

  // The delivered elements of parameter `param`, in the order of the deliveries. Call this after a Step.
  std::vector<float> DeliveredOf(uint32_t param) const {
    const protocol::ParamPlace& place = layout_->params()[param];
    std::vector<float> values;
    for (const Delivery& delivery : delivered_) {
      for (uint64_t i = 0; i < delivery.values.size(); ++i) {
        const uint64_t elem = delivery.begin + i;
        if (elem >= place.offset_elems && elem < place.offset_elems + place.elems) {
          values.push_back(delivery.values[i]);
        }
      }
    }
    return values;
  }

  std::shared_ptr<const protocol::Layout> layout_;
  std::shared_ptr<Mapping> weights_;
  std::shared_ptr<Mapping> grad_;
  ScriptedDaemon daemon_;
  std::unique_ptr<Attachment> session_;
  // The daemon's thread records commands in the members below. Only that thread uses them until Step has returned.
  std::vector<Delivery> delivered_;
  uint64_t presence_ = 0;
  uint64_t attempt_of_step_ = 0;
  ErrorId answer_of_step_ = ErrorId::kNone;
};

TEST_F(PiecesTest, APieceIsDeliveredWhenItsLastParameterIsThere) {
  ASSERT_OK(Add(2, 3));
  ASSERT_OK(Add(1, 2));
  ASSERT_OK(Add(0, 1));
  daemon_.WaitForCommands(1);
  ASSERT_OK(Step(1));
  ASSERT_EQ(delivered_.size(), 1U);
  EXPECT_EQ(delivered_[0].begin, 0U);
  EXPECT_EQ(delivered_[0].end(), layout_->groups()[0].elems);
  ExpectDelivered({1.0F, 2.0F, 3.0F}, 0b111U);
}

TEST_F(PiecesTest, OfAFlushedPieceWholeUnitsAreDeliveredAndPartsWithTheStep) {
  ASSERT_OK(Add(1, 2));
  ASSERT_OK(session_->FlushGradients());
  const std::vector<Command> seen = daemon_.WaitForCommands(1);
  EXPECT_EQ(seen[0].element_offset, kUnit) << "the unit that parameter b has alone";
  EXPECT_EQ(seen[0].length_bytes, kUnit * sizeof(float));
  ASSERT_OK(Step(1));
  ASSERT_EQ(delivered_.size(), 3U);
  EXPECT_THAT(DeliveredOf(1), Each(2.0F));
  EXPECT_EQ(DeliveredOf(1).size(), kElems1);
  EXPECT_THAT(DeliveredOf(0), Each(0.0F)) << "in the unit that it shares";
  EXPECT_EQ(presence_, 0b010U);
}

TEST_F(PiecesTest, ALaterGradientCompletesWhatWasFlushed) {
  ASSERT_OK(Add(1, 2));
  ASSERT_OK(session_->FlushGradients(0));
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(session_->FlushGradients());
  ASSERT_OK(Step(1));
  EXPECT_THAT(DeliveredOf(0), Each(1.0F));
  EXPECT_THAT(DeliveredOf(1), Each(2.0F));
  EXPECT_EQ(DeliveredOf(0).size(), kElems0);
  EXPECT_EQ(DeliveredOf(1).size(), kElems1);
  EXPECT_EQ(presence_, 0b011U);
}

TEST_F(PiecesTest, UnitsWithoutAGradientAreNotDelivered) {
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(Step(1));
  ASSERT_EQ(delivered_.size(), 1U);
  EXPECT_EQ(delivered_[0].begin, 0U);
  EXPECT_EQ(delivered_[0].end(), kUnit);
  ASSERT_OK(Step(2));
  EXPECT_EQ(delivered_.size(), 1U);
  EXPECT_EQ(presence_, 0U);
}

TEST_F(PiecesTest, ASecondGradientAndAnotherSizeAreRefusedByName) {
  ASSERT_OK(Add(0, 1));
  EXPECT_THAT(Add(0, 1), HasError(ErrorId::kGradRepeat));
  EXPECT_THAT(session_->AddGradient(1, {}, kTimeout), HasError(ErrorId::kRange));
  EXPECT_THAT(session_->AddGradient(3, {}, kTimeout), HasError(ErrorId::kRange));
  ASSERT_OK(Add(1, 1));
  ASSERT_OK(Step(1));
  EXPECT_OK(Add(0, 1)) << "of the next step";
}

TEST_F(PiecesTest, AFurtherPassTakesEachParameterAgainBehindWhatIsThereOfTheOneBefore) {
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(Add(1, 2));
  ASSERT_OK(session_->BeginPass());
  ASSERT_OK(Add(0, 3));
  EXPECT_THAT(Add(0, 3), HasError(ErrorId::kGradRepeat));
  ASSERT_OK(Add(2, 5));
  ASSERT_OK(session_->BeginPass());
  ASSERT_OK(Add(2, 7));
  ASSERT_OK(Step(1));
  EXPECT_EQ(presence_, 0b111U) << "of all passes";
  std::vector<std::array<float, 3>> sums(3);  // [pass][parameter]: its first element
  for (const Delivery& delivery : delivered_) {
    ASSERT_LT(delivery.pass, 3U);
    for (uint32_t param = 0; param < 3; ++param) {
      const uint64_t elem = layout_->params()[param].offset_elems;
      if (delivery.begin > elem || elem >= delivery.end()) continue;
      sums[delivery.pass][param] += delivery.values[elem - delivery.begin];
    }
  }
  EXPECT_THAT(sums[0], ElementsAre(1, 2, 0));
  EXPECT_THAT(sums[1], ElementsAre(3, 0, 5));
  EXPECT_THAT(sums[2], ElementsAre(0, 0, 7));
  const auto passes = [](const Delivery& one, const Delivery& other) {
    return one.pass < other.pass;
  };
  EXPECT_TRUE(std::ranges::is_sorted(delivered_, passes));
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(Step(2));
  EXPECT_EQ(delivered_.back().pass, 0U) << "passes count from 0 in each step";
}

TEST_F(PiecesTest, PassesBeginAnewInAnAttemptAndEndWithANorm) {
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(session_->BeginPass());
  ASSERT_OK(session_->DropGradients());
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(session_->FlushGradients());
  ASSERT_OK(Add(1, 1));
  ASSERT_OK(session_->GradNorm(0, kTimeout).status());
  EXPECT_EQ(delivered_.back().attempt, 1U);
  EXPECT_EQ(delivered_.back().pass, 0U);
  EXPECT_THAT(session_->BeginPass(), HasError(ErrorId::kStep));
  EXPECT_THAT(Add(2, 1), HasError(ErrorId::kStep));
}

TEST_F(PiecesTest, AStepHasSoManyPasses) {
  for (uint32_t pass = 1; pass < protocol::kGradPassesMax; ++pass) {
    ASSERT_OK(session_->BeginPass()) << pass;
  }
  EXPECT_THAT(session_->BeginPass(), HasError(ErrorId::kLimit));
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(Step(1));
  EXPECT_EQ(delivered_.back().pass, protocol::kGradPassesMax - 1);
}

TEST_F(PiecesTest, DropGradientsBeginsAnAttemptWhereSomethingWasDelivered) {
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(session_->DropGradients());  // nothing was delivered: the piece was open
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(session_->FlushGradients());
  ASSERT_OK(Add(1, 5));
  ASSERT_OK(Add(2, 5));
  ASSERT_OK(session_->FlushGradients());
  ASSERT_OK(session_->DropGradients());
  ASSERT_OK(Add(0, 9));
  ASSERT_OK(Step(1));
  EXPECT_EQ(attempt_of_step_, 1U);
  EXPECT_EQ(presence_, 0b001U);
  EXPECT_EQ(delivered_.front().attempt, 0U);
  EXPECT_EQ(delivered_.back().attempt, 1U);
  ASSERT_OK(Add(0, 9));
  ASSERT_OK(Step(2));
  EXPECT_EQ(attempt_of_step_, 0U) << "attempts count from 0 in each step";
}

TEST_F(PiecesTest, ADroppedStepBringsTheRankToTheNewestAttempt) {
  answer_of_step_ = ErrorId::kGradDropped;
  ASSERT_OK(Add(0, 1));
  EXPECT_THAT(Step(1), HasError(ErrorId::kGradDropped));
  answer_of_step_ = ErrorId::kNone;
  ASSERT_OK(Add(0, 1)) << "everything is brought again";
  ASSERT_OK(Step(1));
  EXPECT_EQ(attempt_of_step_, 7U);
  EXPECT_EQ(delivered_.back().attempt, 7U);
}

class PiecesWithFrozenTest : public PiecesTest {
 protected:
  bool b_is_frozen() const override { return true; }
};

TEST_F(PiecesWithFrozenTest, AFrozenParameterIsNotWaitedFor) {
  ASSERT_OK(Add(2, 3));
  ASSERT_OK(Add(0, 1));
  daemon_.WaitForCommands(2);  // both commands come before Step is called
  ASSERT_OK(Step(1));
  ASSERT_EQ(delivered_.size(), 2U) << "the unit that it has alone does not travel";
  EXPECT_EQ(delivered_[0].begin, 0U);
  EXPECT_EQ(delivered_[0].end(), kUnit);
  EXPECT_EQ(delivered_[1].begin, 2 * kUnit);
  EXPECT_EQ(delivered_[1].end(), layout_->groups()[0].elems);
  ExpectDelivered({1.0F, 0.0F, 3.0F}, 0b101U);
}

TEST_F(PiecesWithFrozenTest, AFlushDeliversWhatIsCompleteBesideIt) {
  ASSERT_OK(Add(0, 1));
  ASSERT_OK(session_->FlushGradients());
  const std::vector<Command> seen = daemon_.WaitForCommands(1);
  EXPECT_EQ(seen[0].element_offset, 0U);
  EXPECT_EQ(seen[0].length_bytes, kUnit * sizeof(float));
  EXPECT_THAT(Add(1, 1), HasError(ErrorId::kUnsupported));
  ASSERT_OK(Step(1));
  EXPECT_EQ(delivered_.size(), 1U);
  EXPECT_EQ(presence_, 0b001U);
}

}  // namespace
}  // namespace forebay::client::internal::pieces_test
