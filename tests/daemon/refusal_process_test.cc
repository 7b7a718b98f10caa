// SPDX-License-Identifier: Apache-2.0
// Goal    Every call with a wrong argument is refused with an error id, numbers and a hint. Committed data does not change, and
//         the same session trains one more step in the same daemon.
// Method  A table of calls and a table of attaches, against a job that has trained one step in a real daemon. After each
//         refusal, weights and states are compared byte by byte with the reference, before one more step and after it.

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/support/healthy_job.h"
#include "tests/support/refused_call.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon::refusal_process_test {
namespace {

using client::Attachment;
using protocol::ErrorId;
using testing::ExpectRefusal;
using testing::HealthyJob;
using testing::RefusedCall;

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ------------------------------------------------------------------------------- one rank, a table

struct Refusal {
  std::string name;
  ErrorId id;
  std::vector<std::string> words;
  std::function<absl::Status(Attachment&)> call;
};

void PrintTo(const Refusal& one, std::ostream* out) { *out << one.name; }

absl::Status StepAt(Attachment& session, uint64_t t) {
  return session.Step(t, testing::MakeHyperParams(), 0, {}, kTimeout).status();
}

// Step 2 with the first parameter group's scalars changed.
absl::Status StepWith(Attachment& session,
                      const std::function<void(protocol::HyperParams&)>& change) {
  auto hyper = testing::MakeHyperParams();
  change(hyper[0]);
  return session.Step(2, hyper, 0, {}, kTimeout).status();
}

absl::Status StepWithGradient(Attachment& session, float value) {
  RETURN_IF_ERROR(testing::DeliverValue(session, 1, value));
  return StepAt(session, 2);
}

absl::Status FetchAndRelease(Attachment& session) {
  ASSIGN_OR_RETURN(const client::Lease lease, session.Fetch(0, kTimeout));
  return session.Release(lease);
}

// Release() does not wait; a later call reports its error.
absl::Status ReleaseAndGoOn(Attachment& session, const client::Lease& lease) {
  RETURN_IF_ERROR(session.Release(lease));
  return FetchAndRelease(session);
}

absl::Status ReleaseTwice(Attachment& session) {
  ASSIGN_OR_RETURN(const client::Lease lease, session.Fetch(0, kTimeout));
  RETURN_IF_ERROR(session.Release(lease));
  return ReleaseAndGoOn(session, lease);
}

absl::Status ReadState(Attachment& session, const client::StateRange& range) {
  std::vector<float> values(16);
  return session.ReadState(range, values, kTimeout).status();
}

class RefusedCallOf : public RefusedCall, public ::testing::WithParamInterface<Refusal> {};

TEST_P(RefusedCallOf, LosesNothingAndTheSessionTrainsOn) {
  const auto job = Trained({.socket = socket_});
  ASSERT_NE(job, nullptr);
  Attachment& session = job->rank(0);
  ExpectRefusal(GetParam().call(session), GetParam().id, GetParam().words);
  (void)session.DropGradients();
  ExpectGoesOn(*job);
}

INSTANTIATE_TEST_SUITE_P(
    Calls, RefusedCallOf,
    ::testing::Values(
        Refusal{"StepZero",
                ErrorId::kStep,
                {"step 0", "committed step is 1", "next one 2"},
                [](Attachment& session) { return StepAt(session, 0); }},
        Refusal{"StepAfterAGap",
                ErrorId::kStep,
                {"step 3", "committed step is 1", "next one 2"},
                [](Attachment& session) { return StepAt(session, 3); }},
        Refusal{"GradientOfNan",
                ErrorId::kNonfinite,
                {"rank 0", "group 1 (layer1)", "step 2", "holds NaN or infinity"},
                [](Attachment& session) { return StepWithGradient(session, std::nanf("")); }},
        Refusal{"GradientOfInfinity",
                ErrorId::kNonfinite,
                {"rank 0", "group 1 (layer1)", "step 2", "holds NaN or infinity"},
                [](Attachment& session) { return StepWithGradient(session, -kInfinity); }},
        Refusal{"LearningRateOfNan",
                ErrorId::kOption,
                {"parameter group 0", "lr"},
                [](Attachment& session) {
                  return StepWith(session, [](auto& hyper) { hyper.lr = kNan; });
                }},
        Refusal{"BetaOfOne",
                ErrorId::kOption,
                {"parameter group 0", "beta2 1 "},
                [](Attachment& session) {
                  return StepWith(session, [](auto& hyper) { hyper.beta2 = 1; });
                }},
        Refusal{"TooFewParameterGroups",
                ErrorId::kOption,
                {"1 parameter groups", "the layout has 2"},
                [](Attachment& session) {
                  const auto hyper = testing::MakeHyperParams();
                  return session.Step(2, std::span(hyper).first(1), 0, {}, kTimeout).status();
                }},
        Refusal{"NegativeMaxGradNorm",
                ErrorId::kOption,
                {"max_grad_norm -1"},
                [](Attachment& session) {
                  return session.Step(2, testing::MakeHyperParams(), -1, {}, kTimeout).status();
                }},
        Refusal{"TooMuchExtraState",
                ErrorId::kExtraState,
                {"65537", "65536"},
                [](Attachment& session) {
                  const std::vector<std::byte> extra(65537);
                  return session.Step(2, testing::MakeHyperParams(), 0, extra, kTimeout).status();
                }},
        Refusal{"UnknownGroup",
                ErrorId::kRange,
                {"group 99", "2 groups"},
                [](Attachment& session) { return session.Fetch(99, kTimeout).status(); }},
        Refusal{"UnknownLease",
                ErrorId::kLease,
                {"4711"},
                [](Attachment& session) { return ReleaseAndGoOn(session, {.id = 4711}); }},
        Refusal{"LeaseReleasedBefore", ErrorId::kLease, {"released before"}, &ReleaseTwice},
        Refusal{"GradientWithoutASlot",
                ErrorId::kNotReady,
                {"group 1", "no open gradient slot"},
                [](Attachment& session) { return session.GradReady(1); }},
        Refusal{"StateBeyondTheParameter",
                ErrorId::kRange,
                {"1000000", "layer1.bias"},
                [](Attachment& session) {
                  return ReadState(
                      session,
                      {.param = "layer1.bias", .state = "exp_avg", .first_elem = 1'000'000});
                }},
        Refusal{"UnknownState",
                ErrorId::kRange,
                {"adamw", "momentum_buffer"},
                [](Attachment& session) {
                  return ReadState(session, {.param = "layer1.bias", .state = "momentum_buffer"});
                }},
        Refusal{"ParametersAfterTheFirstStep",
                ErrorId::kProtocol,
                {"rank 0 does not write the initial parameters"},
                [](Attachment& session) {
                  return session.WriteInitial(0, testing::MakeValues(session.layout(), 0, 5),
                                              kTimeout);
                }}),
    [](const ::testing::TestParamInfo<Refusal>& one) { return one.param.name; });

TEST_F(RefusedCall, RepeatedStepIsANoOp) {
  const auto job = Trained({.socket = socket_});
  ASSERT_NE(job, nullptr);
  ASSERT_OK_AND_ASSIGN(const client::StepResult again,
                       job->rank(0).Step(1, testing::MakeHyperParams(/*lr=*/0.5), 0, {}, kTimeout));
  EXPECT_TRUE(again.repeated);
  EXPECT_EQ(again.committed_step, 1U);
  ExpectGoesOn(*job);
}

TEST_F(RefusedCall, SecondGradientForAGroupNeedsAnotherAttempt) {
  const auto job = Trained({.socket = socket_});
  ASSERT_NE(job, nullptr);
  Attachment& session = job->rank(0);
  for (const uint32_t group : {1U, 0U}) {
    ASSERT_OK(testing::DeliverGradient(session, group, 0, 2));
  }
  ASSERT_OK(testing::DeliverValue(session, 1, 3.0F));
  ASSERT_OK(FetchAndRelease(session));  // The fetch is answered after the gradient delivery.
  ExpectRefusal(session.GradSlot(0, client::GradFill::kZero, kTimeout).status(),
                ErrorId::kGradRepeat, {"rank 0", "group 1 (layer1)", "step 2"});
  EXPECT_THAT(testing::CallStep(session, {.rank = 0, .t = 2}),
              testing::HasError(ErrorId::kGradRepeat));
  ASSERT_OK(session.DropGradients());  // the rank's next attempt: what was delivered is discarded
  EXPECT_OK(job->HoldsItsBytes());
  for (const uint32_t group : {1U, 0U}) {  // the next attempt: what was delivered is discarded
    ASSERT_OK(testing::DeliverGradient(session, group, 0, 2));
  }
  EXPECT_OK(job->StepAsDelivered());
  ExpectGoesOn(*job);
}

// ------------------------------------------------------------------------------- attaching wrongly

struct WrongAttach {
  std::string name;
  ErrorId id;
  std::vector<std::string> words;
  std::function<void(client::AttachOptions&)> change;
};

void PrintTo(const WrongAttach& one, std::ostream* out) { *out << one.name; }

class RefusedAttachOf : public RefusedCall, public ::testing::WithParamInterface<WrongAttach> {};

TEST_P(RefusedAttachOf, DisturbsNeitherTheJobNorItsSession) {
  const auto job = Trained({.socket = socket_});
  ASSERT_NE(job, nullptr);
  client::AttachOptions options{
      .socket = socket_,
      .job = "healthy",
      .layout = testing::MakeLayoutSpec({.world_size = 1, .groups = 2, .group_elems = 1000}),
      .timeout = kTimeout};
  GetParam().change(options);
  ExpectRefusal(Attachment::Attach(options).status(), GetParam().id, GetParam().words);
  ExpectGoesOn(*job);
}

constexpr uint64_t kTerabyte = uint64_t{1} << 40;

INSTANTIATE_TEST_SUITE_P(
    Attaches, RefusedAttachOf,
    ::testing::Values(WrongAttach{"AnotherShape",
                                  ErrorId::kLayout,
                                  {"job healthy", "parameter 1", "layer0.bias", "333", "334"},
                                  [](auto& options) { options.layout.params[1].shape = {334}; }},
                      WrongAttach{"AnotherNumberOfParameters",
                                  ErrorId::kLayout,
                                  {"number of parameters", "has 6", "wants 5"},
                                  [](auto& options) { options.layout.params.pop_back(); }},
                      WrongAttach{"AnotherWorldSize",
                                  ErrorId::kRank,
                                  {"world size", "has 1", "wants 2"},
                                  [](auto& options) { options.world_size = 2; }},
                      WrongAttach{"AnotherFormat",
                                  ErrorId::kLayout,
                                  {"dtype", "has float32", "wants bfloat16"},
                                  [](auto& options) {
                                    options.layout.dtype = protocol::DType::kBFloat16;
                                    options.layout.format = protocol::Format::kExact;
                                  }},
                      WrongAttach{"RankBeyondTheWorld",
                                  ErrorId::kRank,
                                  {"rank 7", "world of size 1"},
                                  [](auto& options) { options.rank = 7; }},
                      WrongAttach{"BadJobName",
                                  ErrorId::kJobName,
                                  {"[A-Za-z0-9._-]"},
                                  [](auto& options) { options.job = "no such/name"; }},
                      WrongAttach{"AnotherDurability",
                                  ErrorId::kOption,
                                  {"healthy", "memory", "epoch=3"},
                                  [](auto& options) {
                                    options.durability.level = {
                                        .level = protocol::DurabilityLevel::kEpoch, .steps = 3};
                                  }},
                      WrongAttach{
                          "MoreExtraStateThanTheFirstTook",
                          ErrorId::kExtraState,
                          {"100000", "65536"},
                          [](auto& options) { options.memory.extra_state_bytes = 100'000; }},
                      WrongAttach{"TooSmallAGradientArena",
                                  ErrorId::kRange,
                                  {"gradient arena", "64 bytes"},
                                  [](auto& options) { options.memory.grad_arena_bytes = 64; }},
                      WrongAttach{"AJobThatDoesNotFit",
                                  ErrorId::kDramLimit,
                                  {"weights", "gradient sums", "gradient arena", "ring", "states",
                                   "no swap", "the limit is", "other jobs hold"},
                                  [](auto& options) {
                                    options.job = "huge";
                                    options.layout.params[0].shape = {uint64_t{1} << 28};
                                  }},
                      WrongAttach{"AGradientArenaOfImpossibleSize",
                                  ErrorId::kDramLimit,
                                  {"gradient arena", "at most", "the limit is"},
                                  [](auto& options) {
                                    options.job = "huge";
                                    options.memory.grad_arena_bytes = ~uint64_t{0};
                                  }},
                      WrongAttach{"AGradientArenaThatDoesNotFit",
                                  ErrorId::kDramLimit,
                                  {"1 x (gradient arena 1.0 TiB", "the limit is"},
                                  [](auto& options) {
                                    options.job = "huge";
                                    options.memory.grad_arena_bytes = kTerabyte;
                                  }}),
    [](const ::testing::TestParamInfo<WrongAttach>& one) { return one.param.name; });

TEST_F(RefusedCall, WithParametersOfNanWritesNoneAndTheJobBeginsAfresh) {
  const testing::JobShape shape{.world_size = 1, .groups = 2, .group_elems = 1000};
  const auto healthy = Trained({.socket = socket_});
  ASSERT_NE(healthy, nullptr);
  ASSERT_OK_AND_ASSIGN(auto session, Attachment::Attach({.socket = socket_,
                                                         .job = "job",
                                                         .world_size = shape.world_size,
                                                         .layout = testing::MakeLayoutSpec(shape),
                                                         .timeout = kTimeout}));
  std::vector<std::byte> values = testing::MakeValues(session->layout(), 1, HealthyJob::kSeed);
  std::memcpy(values.data() + 12, &kInfinity, sizeof(kInfinity));
  ExpectRefusal(session->WriteInitial(1, values, kTimeout), ErrorId::kNonfinite,
                {"group 1 (layer1)", "hold NaN or infinity"});
  ExpectRefusal(session->Fetch(0, kTimeout).status(), ErrorId::kNotReady, {"job job"});
  ExpectRefusal(session->InitialDone(kTimeout), ErrorId::kNotReady,
                {"group 0 (layer0)", "were not all written"});
  ASSERT_OK(testing::WriteInitial(*session, HealthyJob::kSeed));
  EXPECT_OK(session->Detach());
  EXPECT_OK(testing::TrainsOneMoreStep({.socket = socket_, .job = "job", .shape = shape}));
  ExpectGoesOn(*healthy);
}

}  // namespace
}  // namespace forebay::daemon::refusal_process_test
