// SPDX-License-Identifier: Apache-2.0
// Goal    Each call of a session writes the command that the protocol defines, and reads its answer correctly. A failure after
//         a call has returned is an error of a later call. A call that gives up leaks nothing.
// Method  Both ends of a real ring are in one process. A script plays the daemon.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <string_view>
#include <thread>

#include "client/internal/session_parts.h"
#include "gmock/gmock.h"
#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "tests/client/scripted_daemon.h"
#include "tests/support/pattern.h"

namespace forebay::client::internal::session_test {
namespace {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::Op;
using testing::HasError;
using testing::Pattern;

using MaybeCompletion = std::optional<Completion>;

bool Is(const Command& command, Op op) { return command.op == static_cast<uint16_t>(op); }

TEST_F(SessionTest, FetchGivesTheGroupWithinTheWindow) {
  StartSession(Obey());
  ASSERT_OK_AND_ASSIGN(const Lease lease, session_->Fetch(2, kTimeout));
  EXPECT_EQ(lease.id, 102U);
  EXPECT_EQ(lease.partition, 2U);
  EXPECT_EQ(lease.bytes.data(),
            weights_->bytes().data() + layout_->groups()[2].weights_offset_bytes);
  EXPECT_EQ(lease.bytes.size(), 512U);
  ASSERT_OK(session_->Release(lease));
  const std::vector<Command> seen = daemon_.WaitForCommands(2);
  EXPECT_EQ(seen[1].lease_id, 102U);
  EXPECT_EQ(gauge_->fetched_bytes, 512U);
}

TEST_F(SessionTest, APlaceThatIsNotTheLayoutsIsRefused) {
  StartSession([this](const Command& command) {
    Completion completion = Obeyed(command);
    completion.offset_bytes += 64;
    return MaybeCompletion(completion);
  });
  EXPECT_THAT(session_->Fetch(1, kTimeout), HasError(ErrorId::kProtocol));
}

TEST_F(SessionTest, AGroupThatIsNotThereIsRefusedByEveryCall) {
  StartSession(Obey());
  std::vector<std::byte> out(4);
  EXPECT_THAT(session_->Fetch(4, kTimeout), HasError(ErrorId::kRange));
  EXPECT_THAT(session_->GradSlot(4, GradFill::kZero, kTimeout), HasError(ErrorId::kRange));
  EXPECT_THAT(session_->GradReady(4), HasError(ErrorId::kRange));
  EXPECT_THAT(session_->WriteInitial(4, out, kTimeout), HasError(ErrorId::kRange));
  std::vector<float> values(1);
  EXPECT_THAT(session_->ReadState({.param = "e", .state = "exp_avg"}, values, kTimeout),
              HasError(ErrorId::kRange));
}

TEST_F(SessionTest, InitialParametersTravelWhole) {
  testing::Bytes arrived;
  StartSession([&](const Command& command) {
    if (Is(command, Op::kWriteInitial)) {
      const auto bytes = grad_->bytes().subspan(command.arena_offset_bytes, command.length_bytes);
      arrived.assign(bytes.begin(), bytes.end());
    }
    return MaybeCompletion(Obeyed(command));
  });
  const testing::Bytes values = Pattern(256, 1);
  ASSERT_OK(session_->WriteInitial(0, values, kTimeout));
  EXPECT_EQ(arrived, values);
  EXPECT_THAT(session_->WriteInitial(0, Pattern(255, 1), kTimeout), HasError(ErrorId::kRange));
  ASSERT_OK(session_->InitialDone(kTimeout));
}

TEST_F(SessionTest, AFetchThatTimedOutGivesItsLeaseBackWhenItArrives) {
  std::atomic<bool> hold{true};
  StartSession([&](const Command& command) {
    return hold && Is(command, Op::kFetch) ? MaybeCompletion() : MaybeCompletion(Obeyed(command));
  });
  EXPECT_THAT(session_->Fetch(1, Timeout(1)), HasError(ErrorId::kTimeout));
  const Command late = daemon_.WaitForCommands(1)[0];  // the script does not answer this command
  hold = false;
  daemon_.Answer(Obeyed(late));
  ASSERT_OK(session_->Fetch(2, kTimeout).status());
  const std::vector<Command> seen = daemon_.WaitForCommands(3);
  ASSERT_TRUE(Is(seen[2], Op::kRelease));
  EXPECT_EQ(seen[2].lease_id, 101U);
}

TEST_F(SessionTest, FetchesThatAreStartedTogetherAreFinishedInAnyOrder) {
  StartSession(Obey());
  ASSERT_OK_AND_ASSIGN(const FetchTicket first, session_->StartFetch(0));
  ASSERT_OK_AND_ASSIGN(const FetchTicket second, session_->StartFetch(2));
  ASSERT_OK_AND_ASSIGN(const Lease later, session_->FinishFetch(second, kTimeout));
  EXPECT_EQ(later.id, 102U);
  ASSERT_OK_AND_ASSIGN(const bool done, session_->IsFetchDone(first));
  EXPECT_TRUE(done) << "it was answered first";
  ASSERT_OK_AND_ASSIGN(const Lease earlier, session_->FinishFetch(first, kTimeout));
  EXPECT_EQ(earlier.id, 100U);
  EXPECT_THAT(session_->FinishFetch(first, kTimeout), HasError(ErrorId::kLease)) << "used up";
  EXPECT_THAT(session_->IsFetchDone(first), HasError(ErrorId::kLease));
  EXPECT_THAT(session_->CancelFetch(first), HasError(ErrorId::kLease));
}

TEST_F(SessionTest, ATicketOutlivesATimeout) {
  StartSession([&](const Command& command) {
    return Is(command, Op::kFetch) ? MaybeCompletion() : MaybeCompletion(Obeyed(command));
  });
  ASSERT_OK_AND_ASSIGN(const FetchTicket ticket, session_->StartFetch(1));
  EXPECT_THAT(session_->FinishFetch(ticket, Timeout(1)), HasError(ErrorId::kTimeout));
  ASSERT_OK_AND_ASSIGN(const bool done, session_->IsFetchDone(ticket));
  EXPECT_FALSE(done);
  daemon_.Answer(Obeyed(daemon_.WaitForCommands(1)[0]));
  ASSERT_OK_AND_ASSIGN(const Lease lease, session_->FinishFetch(ticket, kTimeout));
  EXPECT_EQ(lease.id, 101U);
}

TEST_F(SessionTest, TheLeaseOfACancelledFetchIsGivenBack) {
  StartSession(Obey());
  ASSERT_OK_AND_ASSIGN(const FetchTicket ticket, session_->StartFetch(1));
  ASSERT_OK(session_->CancelFetch(ticket));
  ASSERT_OK(session_->Fetch(0, kTimeout).status());  // handles the completion that arrives too late
  const std::vector<Command> seen = daemon_.WaitForCommands(3);
  ASSERT_TRUE(Is(seen[2], Op::kRelease) || Is(seen[1], Op::kRelease));
  EXPECT_EQ(Is(seen[2], Op::kRelease) ? seen[2].lease_id : seen[1].lease_id, 101U);
}

TEST_F(SessionTest, AReleaseErrorIsReportedOnceByTheNextCall) {
  StartSession([this](const Command& command) {
    if (Is(command, Op::kRelease)) {
      return MaybeCompletion(ScriptedDaemon::Failure(command, ErrorId::kLease));
    }
    return MaybeCompletion(Obeyed(command));
  });
  (void)session_->Release({.id = 7});
  daemon_.WaitForCommands(1);
  absl::Status reported;
  for (int i = 0; i < 2 && reported.ok(); ++i) reported = session_->Fetch(0, kTimeout).status();
  EXPECT_THAT(reported, HasError(ErrorId::kLease));
  EXPECT_OK(session_->Fetch(0, kTimeout).status());
}

TEST_F(SessionTest, AGradientTravelsFromTheSlotAsItIs) {
  testing::Bytes arrived;
  StartSession([&](const Command& command) {
    if (Is(command, Op::kGradReady)) {
      const auto bytes = grad_->bytes().subspan(command.arena_offset_bytes, command.length_bytes);
      arrived.assign(bytes.begin(), bytes.end());
      EXPECT_EQ(command.step, 1U);
      EXPECT_EQ(command.kind, 0U) << "the first pass";
      EXPECT_EQ(command.arena_offset_bytes % 64, 0U);
    }
    return MaybeCompletion(Obeyed(command));
  });
  std::fill(grad_->bytes().begin(), grad_->bytes().end(), std::byte{255});
  ASSERT_OK_AND_ASSIGN(const auto slot, session_->GradSlot(2, GradFill::kZero, kTimeout));
  ASSERT_EQ(slot.size(), 512U);
  EXPECT_TRUE(std::all_of(slot.begin(), slot.end(), [](std::byte b) { return b == std::byte{0}; }));
  const testing::Bytes gradient = Pattern(512, 3);
  std::copy(gradient.begin(), gradient.end(), slot.begin());
  ASSERT_OK_AND_ASSIGN(const auto again, session_->GradSlot(2, GradFill::kZero, kTimeout));
  EXPECT_EQ(again.data(), slot.data());
  ASSERT_OK(session_->GradReady(2));
  daemon_.WaitForCommands(1);
  ASSERT_OK(session_->Fetch(0, kTimeout).status());
  EXPECT_EQ(arrived, gradient);
  EXPECT_THAT(session_->GradReady(2), HasError(ErrorId::kNotReady));
}

TEST_F(SessionTest, ASlotWaitsForRoomThatDeliveredGradientsHold) {
  StartSession([&](const Command& command) {
    return Is(command, Op::kGradReady) ? MaybeCompletion() : MaybeCompletion(Obeyed(command));
  });
  for (const uint32_t group : {0U, 1U, 2U}) {
    ASSERT_OK(session_->GradSlot(group, GradFill::kZero, kTimeout).status());
    ASSERT_OK(session_->GradReady(group));
  }
  ASSERT_OK(session_->GradSlot(3, GradFill::kZero, kTimeout).status());
  EXPECT_EQ(session_->grad_owner(3), grad_);
  ASSERT_OK(session_->GradReady(3));
  // The ring now holds 64 + 64 + 128 + 64 of 384 elements. A slot of 128 elements has no room until another slot is freed.
  EXPECT_THAT(session_->GradSlot(2, GradFill::kZero, Timeout(1)), HasError(ErrorId::kTimeout));
  const std::vector<Command> seen = daemon_.WaitForCommands(4);
  std::thread later([&] {
    for (const Command& command : seen) daemon_.Answer(ScriptedDaemon::Success(command));
  });
  EXPECT_OK(session_->GradSlot(2, GradFill::kZero, kTimeout).status());
  later.join();
  EXPECT_EQ(gauge_->private_slots, 0U);
}

TEST_F(SessionTest, SlotsBeyondTheArenaArePrivateAndTravelAllTheSame) {
  std::map<uint32_t, testing::Bytes> arrived;
  StartSession([&](const Command& command) {
    if (Is(command, Op::kGradReady)) {
      const auto bytes = grad_->bytes().subspan(command.arena_offset_bytes, command.length_bytes);
      arrived[command.partition].assign(bytes.begin(), bytes.end());
    }
    return MaybeCompletion(Obeyed(command));
  });
  for (const uint32_t group : {2U, 0U, 1U, 3U}) {
    ASSERT_OK_AND_ASSIGN(const auto slot, session_->GradSlot(group, GradFill::kZero, kTimeout));
    const testing::Bytes gradient = Pattern(slot.size(), group);
    std::copy(gradient.begin(), gradient.end(), slot.begin());
  }
  EXPECT_GT(gauge_->private_slots, 0U);
  EXPECT_NE(session_->grad_owner(3), grad_);
  for (const uint32_t group : {3U, 2U, 1U, 0U}) ASSERT_OK(session_->GradReady(group));
  daemon_.WaitForCommands(4);
  ASSERT_OK(session_->Fetch(0, kTimeout).status());
  for (const uint32_t group : {0U, 1U, 2U, 3U}) {
    EXPECT_EQ(arrived[group], Pattern(layout_->partition_bytes(group), group)) << group;
  }
}

TEST_F(SessionTest, AGradientErrorStopsStepsUntilGradientsAreDropped) {
  StartSession([this](const Command& command) {
    if (Is(command, Op::kGradReady)) {
      return MaybeCompletion(ScriptedDaemon::Failure(command, ErrorId::kGradRepeat));
    }
    return MaybeCompletion(Obeyed(command));
  });
  const std::array<protocol::HyperParams, 1> hyper{};
  ASSERT_OK(session_->GradSlot(0, GradFill::kZero, kTimeout).status());
  ASSERT_OK(session_->GradReady(0));
  daemon_.WaitForCommands(1);
  ASSERT_OK(session_->Fetch(0, kTimeout).status());  // reads the completion of the delivery
  EXPECT_THAT(session_->GradSlot(1, GradFill::kZero, kTimeout), HasError(ErrorId::kGradRepeat));
  EXPECT_THAT(session_->Step(1, hyper, 0, {}, kTimeout), HasError(ErrorId::kGradRepeat));
  EXPECT_THAT(session_->Step(1, hyper, 0, {}, kTimeout), HasError(ErrorId::kGradRepeat));
  EXPECT_TRUE(daemon_.Seen(Op::kStep).empty());
  ASSERT_OK(session_->DropGradients());
  EXPECT_OK(session_->Step(1, hyper, 0, {}, kTimeout).status());
}

TEST_F(SessionTest, ANonfiniteGradientStillReachesTheBarrier) {
  StartSession([this](const Command& command) {
    const bool refused =
        Is(command, Op::kGradReady) || (Is(command, Op::kStep) && daemon_.Seen(Op::kStep).empty());
    return MaybeCompletion(refused ? ScriptedDaemon::Failure(command, ErrorId::kNonfinite)
                                   : Obeyed(command));
  });
  const std::array<protocol::HyperParams, 1> hyper{};
  ASSERT_OK(session_->GradSlot(0, GradFill::kZero, kTimeout).status());
  ASSERT_OK(session_->GradReady(0));
  daemon_.WaitForCommands(1);
  ASSERT_OK(session_->Fetch(0, kTimeout).status());
  EXPECT_THAT(session_->Step(1, hyper, 0, {}, kTimeout), HasError(ErrorId::kNonfinite));
  EXPECT_EQ(daemon_.Seen(Op::kStep).size(), 1U);
  EXPECT_OK(session_->GradSlot(1, GradFill::kZero, kTimeout).status());
  EXPECT_OK(session_->Step(1, hyper, 0, {}, kTimeout).status());
}

TEST_F(SessionTest, AStepNamesItsRequestInTheStepRegion) {
  std::vector<std::byte> request;
  StartSession([&](const Command& command) {
    Completion completion = Obeyed(command);
    const auto bytes = grad_->bytes().subspan(command.arena_offset_bytes, command.length_bytes);
    request.assign(bytes.begin(), bytes.end());
    completion.norm = 2.5;
    completion.flags = protocol::kStepClipped;
    return MaybeCompletion(completion);
  });
  const std::array<protocol::HyperParams, 2> hyper{
      protocol::HyperParams{
          .lr = 0.5, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1},
      protocol::HyperParams{
          .lr = 0.25, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-6, .weight_decay = 0}};
  const testing::Bytes extra = Pattern(100, 5);
  ASSERT_OK_AND_ASSIGN(const StepResult result, session_->Step(1, hyper, 1.5, extra, kTimeout));
  EXPECT_EQ(result.committed_step, 1U);
  EXPECT_EQ(result.norm, 2.5);
  EXPECT_TRUE(result.clipped);
  EXPECT_FALSE(result.repeated);
  EXPECT_EQ(gauge_->committed_step, 1U);
  protocol::StepRequest header{};
  const uint64_t presence_bytes = protocol::PresenceBytes(layout_->params().size());
  ASSERT_EQ(request.size(), sizeof(header) + sizeof(hyper) + presence_bytes + 100);
  std::memcpy(&header, request.data(), sizeof(header));
  EXPECT_EQ(header.step, 1U);
  EXPECT_EQ(header.param_groups, 2U);
  EXPECT_EQ(header.extra_state_bytes, 100U);
  EXPECT_EQ(header.max_grad_norm, 1.5);
  EXPECT_EQ(std::memcmp(request.data() + sizeof(header), hyper.data(), sizeof(hyper)), 0);
  EXPECT_TRUE(std::equal(extra.begin(), extra.end(), request.end() - 100));
}

TEST_F(SessionTest, AStepIsCheckedBeforeItIsSent) {
  StartSession(Obey());
  const std::array<protocol::HyperParams, 1> hyper{};
  EXPECT_THAT(session_->Step(1, hyper, 0, Pattern(1025, 1), kTimeout),
              HasError(ErrorId::kExtraState));
  EXPECT_THAT(session_->Step(1, {}, 0, {}, kTimeout), HasError(ErrorId::kOption));
  EXPECT_TRUE(daemon_.Seen(Op::kStep).empty());
}

TEST_F(SessionTest, AStepThatTimedOutIsWaitedForByTheSameCallAgain) {
  StartSession([&](const Command& command) {
    return Is(command, Op::kStep) ? MaybeCompletion() : MaybeCompletion(Obeyed(command));
  });
  const std::array<protocol::HyperParams, 1> hyper{};
  EXPECT_THAT(session_->Step(1, hyper, 0, {}, Timeout(1)), HasError(ErrorId::kTimeout));
  EXPECT_THAT(session_->Step(1, hyper, 2, {}, kTimeout), HasError(ErrorId::kStep));
  EXPECT_THAT(session_->Step(2, hyper, 0, {}, kTimeout), HasError(ErrorId::kStep));
  const std::vector<Command> seen = daemon_.WaitForCommands(1);
  daemon_.Answer(Obeyed(seen[0]));
  ASSERT_OK_AND_ASSIGN(const StepResult result, session_->Step(1, hyper, 0, {}, kTimeout));
  EXPECT_EQ(result.committed_step, 1U);
  EXPECT_EQ(daemon_.Seen(Op::kStep).size(), 1U);
}

TEST_F(SessionTest, AnErrorOfAStepNobodyWaitedForIsReportedByTheNextStep) {
  StartSession([&](const Command& command) {
    const bool held = Is(command, Op::kStep) && daemon_.Seen(Op::kStep).empty();
    return held ? MaybeCompletion() : MaybeCompletion(Obeyed(command));
  });
  const std::array<protocol::HyperParams, 1> hyper{};
  EXPECT_THAT(session_->Step(1, hyper, 0, {}, Timeout(1)), HasError(ErrorId::kTimeout));
  daemon_.Answer(ScriptedDaemon::Failure(daemon_.WaitForCommands(1)[0], ErrorId::kOverflow));
  ASSERT_OK(session_->Fetch(0, kTimeout).status());
  EXPECT_THAT(session_->Step(2, hyper, 0, {}, kTimeout), HasError(ErrorId::kOverflow));
  EXPECT_OK(session_->Step(2, hyper, 0, {}, kTimeout).status());
}

TEST_F(SessionTest, StateComesInPiecesThatFitTheArena) {
  StartSession([&](const Command& command) {
    if (Is(command, Op::kReadState)) {
      EXPECT_EQ(command.kind, 1U);
      auto bytes = grad_->bytes().subspan(command.arena_offset_bytes, command.length_bytes);
      for (size_t i = 0; i < bytes.size(); i += 4) {
        const auto elem = static_cast<uint32_t>(command.element_offset + i / 4);
        std::memcpy(bytes.data() + i, &elem, 4);
      }
    }
    return MaybeCompletion(Obeyed(command));
  });
  std::vector<float> values(97);
  ASSERT_OK(
      session_->ReadState({.param = "c", .state = "exp_avg", .first_elem = 31}, values, kTimeout));
  for (uint32_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), 31 + i);
  }
  const auto refused = [&](const StateRange& range) {
    return session_->ReadState(range, values, kTimeout).status();
  };
  EXPECT_THAT(refused({.param = "c", .state = "momentum_buffer"}), HasError(ErrorId::kRange));
  EXPECT_THAT(refused({.param = "c", .state = "exp_avg", .first_elem = 32}),
              HasError(ErrorId::kRange));
  EXPECT_THAT(refused({.param = "c", .state = "exp_avg", .first_elem = UINT64_MAX}),
              HasError(ErrorId::kRange));
}

TEST_F(SessionTest, AStateIsWrittenInPiecesOnceAllOfItCanBe) {
  std::vector<float> arrived;
  StartSession([&](const Command& command) {
    if (Is(command, Op::kWriteState)) {
      EXPECT_EQ(command.kind, 2U);
      EXPECT_EQ(command.element_offset, 3 + arrived.size());
      const auto bytes = grad_->bytes().subspan(command.arena_offset_bytes, command.length_bytes);
      const size_t before = arrived.size();
      arrived.resize(before + bytes.size() / sizeof(float));
      std::memcpy(&arrived[before], bytes.data(), bytes.size());
    }
    return MaybeCompletion(Obeyed(command));
  });
  const uint64_t elems = session_->layout().partitions()[2].elems;
  std::vector<float> values(elems - 3);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const auto write = [&](std::string_view state) {
    return session_->WriteState(2, 3, state, values, kTimeout);
  };
  EXPECT_THAT(write("sum"), HasError(ErrorId::kRange));
  values.back() = -1;
  EXPECT_THAT(write("exp_avg_sq"), HasError(ErrorId::kNonfinite));
  values.back() = std::numeric_limits<float>::infinity();
  EXPECT_THAT(write("exp_avg"), HasError(ErrorId::kNonfinite));
  EXPECT_THAT(arrived, ::testing::IsEmpty()) << "before anything is written";
  values.back() = 5;
  EXPECT_OK(write("exp_avg_sq"));
  EXPECT_EQ(arrived, values);
  values.resize(elems);
  EXPECT_THAT(write("exp_avg_sq"), HasError(ErrorId::kRange));
  ASSERT_OK(session_->WriteUpdates(1, 77, kTimeout));
  const std::vector<Command> counts = daemon_.Seen(Op::kWriteUpdates);
  ASSERT_EQ(counts.size(), 1U);
  EXPECT_EQ(counts[0].partition, 1U);
  EXPECT_EQ(counts[0].step, 77U);
}

TEST_F(SessionTest, StateIsReadAnewWhereAStepWasAppliedBetweenItsPieces) {
  uint64_t reads = 0;
  StartSession(
      [&](const Command& command) {
        Completion completion = Obeyed(command);
        if (Is(command, Op::kReadState)) {
          const uint64_t step = ++reads == 1 ? 5 : 6;
          completion.committed_step = step;
          const auto values = grad_->bytes().subspan(command.arena_offset_bytes);
          const std::vector<float> of_step(command.length_bytes / sizeof(float),
                                           static_cast<float>(step));
          std::memcpy(values.data(), of_step.data(), command.length_bytes);
        }
        return MaybeCompletion(completion);
      },
      [](SessionParts& parts) {
        parts.reader = true;
        parts.step_region_offset = parts.step_region_bytes = 4096;
        parts.grad_bytes_max = 128;
      });
  std::vector<float> values(128);
  ASSERT_OK(session_->ReadState({.param = "c", .state = "exp_avg"}, values, kTimeout));
  EXPECT_THAT(values, ::testing::Each(6.0F));
}

TEST_F(SessionTest, ARangeOfAReadThatTimedOutComesBackWithItsAnswer) {
  StartSession([&](const Command& command) {
    return Is(command, Op::kReadState) ? MaybeCompletion() : MaybeCompletion(Obeyed(command));
  });
  std::vector<float> out(128);
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(session_->ReadState({.param = "c", .state = "exp_avg"}, out, Timeout(1)),
                HasError(ErrorId::kTimeout));
  }
  for (const Command& command : daemon_.WaitForCommands(3)) {
    daemon_.Answer(ScriptedDaemon::Success(command));
  }
  for (const uint32_t group : {2U, 0U, 1U, 3U}) {
    ASSERT_OK(session_->GradSlot(group, GradFill::kZero, kTimeout).status());
    ASSERT_OK(session_->GradReady(group));
  }
}

}  // namespace
}  // namespace forebay::client::internal::session_test
