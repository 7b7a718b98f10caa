// SPDX-License-Identifier: Apache-2.0
// Goal    A session whose daemon is restarted continues with the next daemon. Unanswered commands are sent again. Old leases
//         are void, except leases on weights on swap, which continue. No call waits longer than its limit. If the next daemon
//         does not have the same job and memory, the session ends.
// Method  Both ends of a real ring in one process; one script plays the daemon before, another the one after
//         the restart.

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/internal/session_parts.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/scripted_daemon.h"

namespace forebay::client::internal::session_restart_test {
namespace {

using protocol::ChannelState;
using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::Op;
using testing::HasError;
using ::testing::HasSubstr;

using MaybeCompletion = std::optional<Completion>;

constexpr std::array<protocol::HyperParams, 1> kHyper{};

MaybeCompletion Silent(const Command&) { return std::nullopt; }

absl::Status NoDaemon() { return protocol::MakeError(ErrorId::kNoDaemon, "connection refused"); }

class SessionRestart : public SessionTest {
 protected:
  ~SessionRestart() override { session_.reset(); }  // ends before the later daemons' rings

  void StartRank(ScriptedDaemon::Script script,
                 const std::function<void(SessionParts&)>& change = {}) {
    StartSession(std::move(script), [&](SessionParts& parts) {
      parts.daemon_wait = kTimeout;
      parts.attach_again = [this](const SessionBefore& before, const WaitLimits&) {
        ++attaches_;
        grad_arena_ = before.grad_arena_inode;
        newest_tag_ = before.newest_tag;
        held_.assign(before.held_leases.begin(), before.held_leases.end());
        return grant_();
      };
      if (change) change(parts);
    });
  }

  GrantedSession Granted(ScriptedDaemon& daemon) {
    return {.terms = {.committed_step = gauge_->committed_step,
                      .weights_on_swap = on_swap_,
                      .leases = static_cast<uint32_t>(held_.size())},
            .port = PortTo(daemon)};
  }

  // Answers like Obey(), with lease ids that the previous daemon has not used.
  ScriptedDaemon::Script ObeyNext() {
    return [this](const Command& command) {
      Completion completion = Obeyed(command);
      if (completion.lease_id != 0) completion.lease_id += 100;
      return MaybeCompletion(completion);
    };
  }

  void Restart() { daemon_.Close(ChannelState::kRestarting); }

  ScriptedDaemon next_;
  bool on_swap_ = false;
  // Values that the session has sent with the last attach: its leases on weights on swap, the inode of its gradient arena, and
  // the tag of its newest command.
  std::vector<uint64_t> held_;
  uint64_t grad_arena_ = 0;
  uint64_t newest_tag_ = 0;
  std::atomic<int> attaches_{0};
  std::function<absl::StatusOr<GrantedSession>()> grant_ = [this] { return Granted(next_); };
};

TEST_F(SessionRestart, SendsWhatWasNotAnsweredInItsOrderUnderItsTags) {
  StartRank(Silent);
  std::vector<FetchTicket> tickets;
  for (const uint32_t partition : {2U, 0U, 3U}) {
    ASSERT_OK_AND_ASSIGN(const FetchTicket ticket, session_->StartFetch(partition));
    tickets.push_back(ticket);
  }
  const std::vector<Command> before = daemon_.WaitForCommands(3);
  Restart();
  next_.Start(ObeyNext());
  for (const FetchTicket& ticket : tickets) {
    ASSERT_OK_AND_ASSIGN(const Lease lease, session_->FinishFetch(ticket, kTimeout));
    EXPECT_EQ(lease.id, 200 + ticket.partition);
  }
  const std::vector<Command> after = next_.WaitForCommands(3);
  ASSERT_EQ(after.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(after[i].tag, before[i].tag);
    EXPECT_EQ(after[i].op, before[i].op);
    EXPECT_EQ(after[i].partition, before[i].partition);
  }
  EXPECT_EQ(attaches_, 1);
  EXPECT_EQ(session_->counters().reattaches, 1U);
  EXPECT_EQ(session_->counters().commands, 6U);
}

TEST_F(SessionRestart, ARingFullOfCommandsIsSentAgain) {
  StartRank(Silent);
  std::vector<FetchTicket> tickets(protocol::kRingEntries);
  for (FetchTicket& ticket : tickets) {
    ASSERT_OK_AND_ASSIGN(ticket, session_->StartFetch(1));
  }
  daemon_.WaitForCommands(protocol::kRingEntries);
  Restart();
  next_.Start(ObeyNext());
  for (const FetchTicket& ticket : tickets) {
    ASSERT_OK(session_->FinishFetch(ticket, kTimeout).status());
  }
  EXPECT_EQ(next_.SeenCount(), protocol::kRingEntries);
}

TEST_F(SessionRestart, AnswersBeforeTheEndAreHandledFirst) {
  StartRank(Obey());
  ASSERT_OK_AND_ASSIGN(const FetchTicket ticket, session_->StartFetch(1));
  daemon_.WaitForCommands(1);
  Restart();
  grant_ = [] { return NoDaemon(); };
  ASSERT_OK_AND_ASSIGN(const Lease lease, session_->FinishFetch(ticket, kTimeout));
  EXPECT_EQ(lease.id, 101U) << "of the daemon before";
  EXPECT_EQ(attaches_, 0) << "there was nothing to wait for";
}

TEST_F(SessionRestart, ACallThatBeginsAfterTheRestartGoesToTheNextDaemon) {
  StartRank(Obey());
  Restart();
  daemon_.Die();
  next_.Start(ObeyNext());
  ASSERT_OK_AND_ASSIGN(const Lease lease, session_->Fetch(1, kTimeout));
  EXPECT_EQ(lease.id, 201U);
  EXPECT_OK(session_->CheckSession(kTimeout));
  EXPECT_EQ(attaches_, 1);
}

TEST_F(SessionRestart, ADeadDaemonThatHasNotSaidSoIsNotWaitedFor) {
  StartRank(Obey());
  daemon_.Die();
  EXPECT_THAT(session_->Fetch(1, kTimeout), HasError(ErrorId::kDaemonGone));
  EXPECT_EQ(attaches_, 0);
}

TEST_F(SessionRestart, AnEndForGoodStaysOne) {
  StartRank(Obey());
  daemon_.Close(ChannelState::kEnded);
  EXPECT_THAT(session_->Fetch(1, kTimeout), HasError(ErrorId::kFenced));
  EXPECT_EQ(attaches_, 0);
}

TEST_F(SessionRestart, ALeaseOfTheDaemonBeforeIsGivenBackWithoutACommand) {
  StartRank(Obey());
  ASSERT_OK_AND_ASSIGN(const Lease old, session_->Fetch(0, kTimeout));
  ASSERT_OK_AND_ASSIGN(const Lease newest, session_->Fetch(3, kTimeout));
  Restart();
  next_.Start(ObeyNext());
  ASSERT_OK(session_->Release(newest)) << "before the next daemon is there";
  ASSERT_OK_AND_ASSIGN(const Lease lease, session_->Fetch(2, kTimeout));
  ASSERT_OK(session_->Release(old)) << "later too";
  ASSERT_OK(session_->Release(lease));
  ASSERT_OK(session_->CheckSession(kTimeout));
  const std::vector<Command> released = next_.Seen(Op::kRelease);
  ASSERT_EQ(released.size(), 1U);
  EXPECT_EQ(released[0].lease_id, lease.id);
}

TEST_F(SessionRestart, AReleaseThatWasNotAnsweredIsNotSentAgain) {
  StartRank([this](const Command& command) {
    const bool is_release = command.op == static_cast<uint16_t>(Op::kRelease);
    return is_release ? MaybeCompletion() : MaybeCompletion(Obeyed(command));
  });
  ASSERT_OK_AND_ASSIGN(const Lease lease, session_->Fetch(0, kTimeout));
  ASSERT_OK(session_->Release(lease));
  daemon_.WaitForCommands(2);
  Restart();
  next_.Start(ObeyNext());
  ASSERT_OK(session_->CheckSession(kTimeout));
  EXPECT_TRUE(next_.Seen(Op::kRelease).empty());
  EXPECT_EQ(next_.SeenCount(), 1U);
}

TEST_F(SessionRestart, AStepCallIsSentAgainWithItsAttempt) {
  StartRank([this](const Command& command) {
    const bool is_step = command.op == static_cast<uint16_t>(Op::kStep);
    return is_step ? MaybeCompletion() : MaybeCompletion(Obeyed(command));
  });
  ASSERT_OK(session_->GradSlot(0, GradFill::kZero, kTimeout).status());
  ASSERT_OK(session_->GradReady(0));
  ASSERT_OK(session_->DropGradients());
  std::jthread step([&] {
    ASSERT_OK_AND_ASSIGN(const StepResult result, session_->Step(1, kHyper, 0, {}, kTimeout));
    EXPECT_EQ(result.committed_step, 1U);
  });
  daemon_.WaitForCommands(2);
  next_.Start(ObeyNext());
  Restart();
  step.join();
  const std::vector<Command> steps = next_.Seen(Op::kStep);
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].attempt, 1U);
  EXPECT_EQ(steps[0].tag, daemon_.Seen(Op::kStep)[0].tag);
  EXPECT_EQ(session_->committed_step(), 1U);
}

TEST_F(SessionRestart, GradientsGoOnInTheSameAttemptFromTheSameSlots) {
  StartRank(Obey());
  ASSERT_OK(session_->GradSlot(0, GradFill::kZero, kTimeout).status());
  ASSERT_OK(session_->GradReady(0));
  ASSERT_OK(session_->DropGradients());
  daemon_.WaitForCommands(1);
  ASSERT_OK_AND_ASSIGN(const auto slot, session_->GradSlot(2, GradFill::kZero, kTimeout));
  Restart();
  next_.Start(ObeyNext());
  ASSERT_OK_AND_ASSIGN(const auto same, session_->GradSlot(2, GradFill::kZero, kTimeout));
  EXPECT_EQ(same.data(), slot.data());
  ASSERT_OK(session_->GradReady(2));
  const Command ready = next_.WaitForCommands(1)[0];
  EXPECT_EQ(ready.op, static_cast<uint16_t>(Op::kGradReady));
  EXPECT_EQ(ready.attempt, 1U);
  EXPECT_EQ(ready.step, 1U);
}

TEST_F(SessionRestart, TriesAgainUntilADaemonIsThere) {
  StartRank(Obey());
  Restart();
  next_.Start(ObeyNext());
  const std::map<int, absl::Status> passing{
      {1, NoDaemon()},
      {2, protocol::MakeError(ErrorId::kDaemonGone, "the connection was lost")},
      {3, protocol::MakeError(ErrorId::kLimit, "too many calls wait")}};
  grant_ = [&]() -> absl::StatusOr<GrantedSession> {
    const auto refused = passing.find(attaches_);
    if (refused != passing.end()) return refused->second;
    return Granted(next_);
  };
  EXPECT_OK(session_->Fetch(0, kTimeout).status());
  EXPECT_EQ(attaches_, 4);
}

TEST_F(SessionRestart, EndsWhenNoDaemonComesBackInTime) {
  StartRank(Obey(), [](SessionParts& parts) { parts.daemon_wait = Timeout(50); });
  Restart();
  grant_ = [] { return NoDaemon(); };
  const absl::Status gone = session_->Fetch(0, kNoTimeout).status();
  EXPECT_THAT(gone, HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(std::string(gone.message()), HasSubstr("within"));
  EXPECT_THAT(std::string(gone.message()), HasSubstr("connection refused"));
  EXPECT_THAT(protocol::HintOf(gone), HasSubstr("FOREBAY_DAEMON_WAIT"));
  EXPECT_GE(attaches_, 2);
  const int attaches = attaches_;
  EXPECT_THAT(session_->Step(1, kHyper, 0, {}, kTimeout), HasError(ErrorId::kDaemonGone));
  EXPECT_EQ(attaches_, attaches) << "the session is over";
}

TEST_F(SessionRestart, ACallsOwnTimeEndsTheCallAlone) {
  StartRank(Obey());
  Restart();
  grant_ = [] { return NoDaemon(); };
  EXPECT_THAT(session_->Fetch(0, Timeout(30)), HasError(ErrorId::kTimeout));
  EXPECT_THAT(session_->CheckSession(Timeout(0)), HasError(ErrorId::kTimeout));
  next_.Start(ObeyNext());
  grant_ = [this] { return Granted(next_); };
  EXPECT_OK(session_->Fetch(0, kTimeout).status());
}

TEST_F(SessionRestart, ADaemonThatIsBackIsFoundAlsoWhereItsTimeRanOutBetweenTwoCalls) {
  StartRank(Obey(), [](SessionParts& parts) { parts.daemon_wait = Timeout(0); });
  Restart();
  grant_ = [] { return protocol::MakeError(ErrorId::kInterrupted, "attach was interrupted"); };
  EXPECT_THAT(session_->Fetch(0, kTimeout), HasError(ErrorId::kInterrupted));
  next_.Start(ObeyNext());
  grant_ = [this] { return Granted(next_); };
  EXPECT_OK(session_->Fetch(0, kTimeout).status());
}

TEST_F(SessionRestart, AFetchThatGaveUpInBetweenGivesItsLeaseBack) {
  StartRank(Silent);
  ASSERT_OK_AND_ASSIGN(const FetchTicket ticket, session_->StartFetch(1));
  daemon_.WaitForCommands(1);
  Restart();
  grant_ = [] { return NoDaemon(); };
  EXPECT_THAT(session_->FinishFetch(ticket, Timeout(30)), HasError(ErrorId::kTimeout));
  ASSERT_OK(session_->CancelFetch(ticket));
  next_.Start(ObeyNext());
  grant_ = [this] { return Granted(next_); };
  ASSERT_OK(session_->CheckSession(kTimeout));
  ASSERT_OK(session_->CheckSession(kTimeout));
  const std::vector<Command> released = next_.Seen(Op::kRelease);
  ASSERT_EQ(released.size(), 1U);
  EXPECT_EQ(released[0].lease_id, 201U);
}

TEST_F(SessionRestart, AnInterruptEndsTheWaitForADaemon) {
  std::atomic<bool> is_interrupted{false};
  StartRank(Obey(), [&](SessionParts& parts) {
    parts.interrupt_check = [&] { return is_interrupted.load(); };
  });
  Restart();
  grant_ = [&] {
    is_interrupted = true;
    return NoDaemon();
  };
  EXPECT_THAT(session_->Fetch(0, kNoTimeout), HasError(ErrorId::kInterrupted));
  is_interrupted = false;
  next_.Start(ObeyNext());
  grant_ = [this] { return Granted(next_); };
  EXPECT_OK(session_->Fetch(0, kTimeout).status());
}

TEST_F(SessionRestart, EndsWhereTheNextDaemonHasNotTheSame) {
  struct Case {
    std::string message;
    std::function<void(SessionTerms&)> change;
  };
  const std::vector<Case> cases{
      {"memory of the weights", [](auto& terms) { terms.weights.inode = 7; }},
      {"memory of the gradients", [](auto& terms) { terms.grad_arena.device = 7; }},
      {"committed step was 0 and is 3", [](auto& terms) { terms.committed_step = 3; }},
      {"size of the weights", [](auto& terms) { terms.weights_bytes = 7; }},
      {"size of the gradient arena", [](auto& terms) { terms.grad_arena_bytes = 7; }},
      {"offset of the step region", [](auto& terms) { terms.step_region_offset = 7; }},
      {"size of the step region", [](auto& terms) { terms.step_region_bytes = 7; }},
      {"size of the trace", [](auto& terms) { terms.trace_bytes = 7; }},
      {"weights are on swap", [](auto& terms) { terms.weights_on_swap = true; }}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.message);
    GrantedSession granted{.terms = {}};
    one.change(granted.terms);
    EXPECT_THAT(Difference({}, granted.terms), HasSubstr(one.message));
  }
  EXPECT_EQ(Difference({}, {}), "");

  StartRank(Obey());
  Restart();
  grant_ = [this]() -> absl::StatusOr<GrantedSession> {
    GrantedSession granted = Granted(next_);
    granted.terms.weights.inode = 7;
    return granted;
  };
  const absl::Status gone = session_->Fetch(0, kTimeout).status();
  EXPECT_THAT(gone, HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(std::string(gone.message()), HasSubstr("memory of the weights"));
  EXPECT_THAT(protocol::HintOf(gone), HasSubstr("start the trainer again"));
  EXPECT_THAT(session_->CheckSession(kTimeout), HasError(ErrorId::kDaemonGone));
  EXPECT_EQ(attaches_, 1);
}

TEST_F(SessionRestart, EndsWhereTheNextDaemonRefuses) {
  StartRank(Obey());
  Restart();
  grant_ = [] { return protocol::MakeError(ErrorId::kProtocol, "version 9", "use the library"); };
  const absl::Status gone = session_->Fetch(0, kTimeout).status();
  EXPECT_THAT(gone, HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(std::string(gone.message()), HasSubstr("E_PROTOCOL: version 9"));
  EXPECT_EQ(protocol::HintOf(gone), "use the library");
  EXPECT_EQ(attaches_, 1);
}

TEST_F(SessionRestart, HearsThatARankIsLostAsInOneDaemon) {
  StartRank(Obey(), [](SessionParts& parts) { parts.terms.grad_arena.inode = 5; });
  Restart();
  grant_ = [] { return protocol::MakeError(ErrorId::kRankLost, "lost", "attach again"); };
  const absl::Status lost = session_->Fetch(0, kTimeout).status();
  EXPECT_THAT(lost, HasError(ErrorId::kRankLost));
  EXPECT_EQ(protocol::HintOf(lost), "attach again");
  EXPECT_EQ(grad_arena_, 5U);
  EXPECT_EQ(newest_tag_, 1U) << "the fetch's";
  EXPECT_THAT(session_->CheckSession(kTimeout), HasError(ErrorId::kRankLost));
  EXPECT_EQ(attaches_, 1);
}

TEST_F(SessionRestart, AReaderEndsWithItsDaemon) {
  StartRank(Obey(), [](SessionParts& parts) {
    parts.reader = true;
    parts.step_region_offset = parts.step_region_bytes = 4096;
    parts.attach_again = {};
  });
  Restart();
  const absl::Status gone = session_->Fetch(0, kTimeout).status();
  EXPECT_THAT(gone, HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(std::string(gone.message()), HasSubstr("is being restarted"));
  EXPECT_THAT(session_->CheckSession(kTimeout), HasError(ErrorId::kDaemonGone));
}

TEST_F(SessionRestart, LeasesOnWeightsOnSwapGoOn) {
  on_swap_ = true;
  StartRank(Obey(), [](SessionParts& parts) {
    parts.weights_on_swap = parts.terms.weights_on_swap = true;
  });
  ASSERT_OK_AND_ASSIGN(const Lease given_back, session_->Fetch(0, kTimeout));
  ASSERT_OK_AND_ASSIGN(const Lease held, session_->Fetch(1, kTimeout));
  ASSERT_OK_AND_ASSIGN(const Lease meanwhile, session_->Fetch(2, kTimeout));
  ASSERT_OK(session_->Release(given_back));
  ASSERT_OK(session_->CheckSession(kTimeout));
  Restart();
  ASSERT_OK(session_->Release(meanwhile));
  next_.Start(ObeyNext());
  ASSERT_OK_AND_ASSIGN(const Lease newer, session_->Fetch(3, kTimeout));
  EXPECT_EQ(held_, (std::vector<uint64_t>{held.id, meanwhile.id}));
  ASSERT_OK(session_->Release(held));
  ASSERT_OK(session_->Release(newer));
  ASSERT_OK(session_->CheckSession(kTimeout));
  const std::vector<Command> released = next_.Seen(Op::kRelease);
  ASSERT_EQ(released.size(), 3U);
  EXPECT_EQ(released[0].lease_id, meanwhile.id);
  EXPECT_EQ(released[1].lease_id, held.id);
  EXPECT_EQ(released[2].lease_id, newer.id);
}

TEST_F(SessionRestart, AndEndTheSessionWhereTheyAreLost) {
  on_swap_ = true;
  StartRank(Obey(), [](SessionParts& parts) {
    parts.weights_on_swap = parts.terms.weights_on_swap = true;
  });
  ASSERT_OK_AND_ASSIGN(const Lease lease, session_->Fetch(0, kTimeout));
  ASSERT_OK(session_->Release(lease));
  ASSERT_OK(session_->CheckSession(kTimeout));
  Restart();
  next_.Start(ObeyNext());
  ASSERT_OK(session_->Fetch(1, kTimeout).status());
  ScriptedDaemon third;
  grant_ = [&] {
    held_.clear();
    return Granted(third);
  };
  next_.Close(ChannelState::kRestarting);
  const absl::Status gone = session_->Fetch(0, kTimeout).status();
  EXPECT_THAT(gone, HasError(ErrorId::kDaemonGone));
  EXPECT_THAT(std::string(gone.message()),
              HasSubstr("held 1 leases on weights that are on swap, of which 0"));
  session_.reset();
}

TEST_F(SessionRestart, GoesOnThroughOneRestartAfterAnother) {
  StartRank(Obey());
  Restart();
  next_.Start(ObeyNext());
  ASSERT_OK_AND_ASSIGN(const Lease lease, session_->Fetch(0, kTimeout));
  ScriptedDaemon third;
  third.Start(ObeyNext());
  grant_ = [&] { return Granted(third); };
  next_.Close(ChannelState::kRestarting);
  EXPECT_OK(session_->Release(lease));
  EXPECT_OK(session_->CheckSession(kTimeout));
  EXPECT_TRUE(third.Seen(Op::kRelease).empty());
  EXPECT_EQ(session_->counters().reattaches, 2U);
  session_.reset();
}

TEST_F(SessionRestart, ThreadsThatCallMeanwhileAllGoOn) {
  StartRank(Obey());
  next_.Start(ObeyNext());
  constexpr int kThreads = 4;
  constexpr int kFetches = 200;
  std::vector<std::jthread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([this, i] {
      for (int n = 0; n < kFetches; ++n) {
        ASSERT_OK_AND_ASSIGN(const Lease lease,
                             session_->Fetch(static_cast<uint32_t>(i), kTimeout));
        ASSERT_OK(session_->Release(lease));
      }
    });
  }
  daemon_.WaitForCommands(kFetches);
  Restart();
  threads.clear();
  EXPECT_EQ(attaches_, 1);
  EXPECT_GT(next_.SeenCount(), 0U);
}

TEST_F(SessionRestart, ADetachDoesNotWaitForADaemon) {
  StartRank(Obey());
  Restart();
  grant_ = [] { return NoDaemon(); };
  EXPECT_OK(session_->Detach());
  EXPECT_EQ(attaches_, 1);
  EXPECT_THAT(session_->Fetch(0, kTimeout), HasError(ErrorId::kFenced));
}

}  // namespace
}  // namespace forebay::client::internal::session_restart_test
