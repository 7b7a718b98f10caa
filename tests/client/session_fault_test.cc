// SPDX-License-Identifier: Apache-2.0
// Goal    No call hangs, whatever the daemon does: death, silence, interrupts, a full ring, impossible answers.
// Method  Both ends of a real ring are in one process. A script plays the daemon, correctly or not.

#include <atomic>
#include <thread>

#include "client/internal/session_parts.h"
#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "tests/client/scripted_daemon.h"

namespace forebay::client::internal::session_fault_test {
namespace {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::Op;
using testing::HasError;

using MaybeCompletion = std::optional<Completion>;
using SessionFault = SessionTest;

MaybeCompletion Silent(const Command&) { return std::nullopt; }

TEST_F(SessionFault, DeathEndsEveryWaitForGood) {
  StartSession(Silent);
  std::thread killer([&] {
    daemon_.WaitForCommands(1);
    daemon_.Die();
  });
  EXPECT_THAT(session_->Fetch(0, kNoTimeout), HasError(ErrorId::kDaemonGone));
  killer.join();
  const std::array<protocol::HyperParams, 1> hyper{};
  std::vector<std::byte> bytes(256);
  EXPECT_THAT(session_->Fetch(0, kTimeout), HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(session_->Release({}), HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(session_->WriteInitial(0, bytes, kTimeout), HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(session_->InitialDone(kTimeout), HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(session_->GradSlot(0, GradFill::kZero, kTimeout), HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(session_->GradReady(0), HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(session_->Step(1, hyper, 0, {}, kTimeout), HasError(ErrorId::kDaemonGone));
  std::vector<float> values(1);
  EXPECT_THAT(session_->ReadState({.param = "a", .state = "exp_avg"}, values, kTimeout),
              HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(session_->DropGradients(), HasError(ErrorId::kDaemonGone));
}

TEST_F(SessionFault, ADeadDaemonIsNoticedByACallThatDoesNotWait) {
  StartSession(Obey());
  ASSERT_OK(session_->GradSlot(0, GradFill::kZero, kTimeout).status());
  daemon_.Die();
  EXPECT_THAT(session_->GradReady(0), HasError(ErrorId::kDaemonGone));
}

TEST_F(SessionFault, WhatWasAnsweredBeforeDeathStillCounts) {
  StartSession([this](const Command& command) {
    daemon_.Die();
    return MaybeCompletion(Obeyed(command));
  });
  // Fetch may see the answer first and succeed, or see the death first and return E_DAEMON_GONE.
  const absl::StatusOr<Lease> lease = session_->Fetch(0, kTimeout);
  if (!lease.ok()) {
    EXPECT_THAT(lease, HasError(ErrorId::kDaemonGone));
  }
  EXPECT_THAT(session_->Fetch(0, kTimeout), HasError(ErrorId::kDaemonGone));
}

TEST_F(SessionFault, AnInterruptEndsAWaitThatHasNoTimeout) {
  std::atomic<bool> interrupted{false};
  StartSession(Silent, [&](SessionParts& options) {
    options.interrupt_check = [&] { return interrupted.load(); };
  });
  std::thread signal([&] {
    daemon_.WaitForCommands(1);
    interrupted = true;
  });
  EXPECT_THAT(session_->Fetch(0, kNoTimeout), HasError(ErrorId::kInterrupted));
  signal.join();
}

TEST_F(SessionFault, AFullRingMakesASenderWait) {
  std::atomic<bool> silent{true};
  StartSession(
      [&](const Command& command) {
        return silent ? MaybeCompletion() : MaybeCompletion(Obeyed(command));
      },
      [](SessionParts& options) { options.timeout = Timeout(1); });
  for (uint32_t i = 0; i < protocol::kRingEntries; ++i) ASSERT_OK(session_->Release({.id = i}));
  EXPECT_THAT(session_->Release({.id = 999}), HasError(ErrorId::kTimeout));
  const std::vector<Command> seen = daemon_.WaitForCommands(protocol::kRingEntries);
  silent = false;
  for (const Command& command : seen) daemon_.Answer(ScriptedDaemon::Success(command));
  EXPECT_OK(session_->Fetch(0, kTimeout).status());
  EXPECT_EQ(daemon_.Seen(Op::kRelease).size(), protocol::kRingEntries);
}

TEST_F(SessionFault, AnAnswerToNoCommandBreaksTheSession) {
  StartSession([](const Command& command) {
    Completion completion = ScriptedDaemon::Success(command);
    completion.tag += 1000;
    return MaybeCompletion(completion);
  });
  EXPECT_THAT(session_->Fetch(0, kTimeout), HasError(ErrorId::kProtocol));
  EXPECT_THAT(session_->Fetch(0, kTimeout), HasError(ErrorId::kProtocol));
}

TEST_F(SessionFault, AnImpossibleRingIndexBreaksTheSession) {
  StartSession([this](const Command& command) {
    std::atomic_ref<uint64_t>(daemon_.ring().completion_tail.index).store(100000);
    daemon_.RingClient();
    return command.tag == 0 ? MaybeCompletion(Completion{}) : MaybeCompletion();
  });
  EXPECT_THAT(session_->Fetch(0, kTimeout), HasError(ErrorId::kRing));
  EXPECT_THAT(session_->GradSlot(0, GradFill::kZero, kTimeout), HasError(ErrorId::kRing));
}

TEST_F(SessionFault, ArenasThatDoNotFitTheLayoutAreRefused) {
  StartSession(Obey());
  const auto refused = [&](auto change) {
    SessionParts options{
        .layout = layout_,
        .port = {.channel = protocol::MakeRingClientChannel(daemon_.Ends()).value(), .explain = {}},
        .weights = weights_,
        .grad = grad_,
        .step_region_offset = kGradBytes,
        .step_region_bytes = kStepBytes,
        .gauge = gauge_,
        .interrupt_check = {},
        .device = std::make_shared<gpu::HostDevice>()};
    change(options);
    return Attachment::Assemble(std::move(options)).status();
  };
  EXPECT_OK(refused([](SessionParts&) {}));
  const auto weights_too_small = [](SessionParts& options) {
    options.weights = Mapping::MapPrivate(4096).value();
  };
  EXPECT_THAT(refused(weights_too_small), HasError(ErrorId::kProtocol));
  EXPECT_THAT(refused([](SessionParts& options) { options.step_region_offset = 448; }),
              HasError(ErrorId::kProtocol));
  EXPECT_THAT(refused([](SessionParts& options) { options.step_region_offset = ~uint64_t{0}; }),
              HasError(ErrorId::kProtocol));
  EXPECT_THAT(refused([](SessionParts& options) { options.step_region_bytes = ~uint64_t{0}; }),
              HasError(ErrorId::kProtocol));
}

}  // namespace
}  // namespace forebay::client::internal::session_fault_test
