// SPDX-License-Identifier: Apache-2.0
// Goal    A channel delivers every command and every completion once and in order, refuses messages over its limit, and never
//         sleeps through a message. Both the ring and its fake do.
// Method  Run one contract on both; in the last case both ends are threads that sleep in poll().

#include "protocol/channel.h"

#include <poll.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "gtest/gtest.h"
#include "tests/support/fake_channel.h"
#include "tests/support/status_test.h"

namespace forebay::protocol {
namespace {

using testing::ChannelEnds;

struct Make {
  std::string name;
  absl::StatusOr<ChannelEnds> (*make)();
};

class ChannelContract : public ::testing::TestWithParam<Make> {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(ends_, GetParam().make()); }

  bool IsReadable(int fd) {
    pollfd poll_fd{.fd = fd, .events = POLLIN, .revents = 0};
    return ::poll(&poll_fd, 1, 0) == 1;
  }

  static Command Tagged(uint64_t tag) {
    Command command{};
    command.tag = tag;
    command.op = static_cast<uint16_t>(Op::kFetch);
    command.partition = static_cast<uint32_t>(tag * 3);
    command.attempt = ~tag;
    return command;
  }

  static Completion Answered(uint64_t tag) {
    Completion completion{};
    completion.tag = tag;
    completion.norm = 0.5;
    return completion;
  }

  ChannelEnds ends_;
};

TEST_P(ChannelContract, DeliversEachEntryOnceAndInOrder) {
  for (uint64_t tag = 1; tag <= 3 * kRingEntries; ++tag) {
    ASSERT_OK_AND_ASSIGN(const bool sent, ends_.client->Send(Tagged(tag)));
    ASSERT_TRUE(sent);
    ASSERT_OK_AND_ASSIGN(const auto command, ends_.server->Receive());
    ASSERT_TRUE(command.has_value());
    EXPECT_EQ(command->tag, tag);
    EXPECT_EQ(command->partition, static_cast<uint32_t>(tag * 3));
    EXPECT_EQ(command->attempt, ~tag);
    ASSERT_OK(ends_.server->Send(Answered(tag)));
    ASSERT_OK_AND_ASSIGN(const auto completion, ends_.client->Receive());
    ASSERT_TRUE(completion.has_value());
    EXPECT_EQ(completion->tag, tag);
    EXPECT_EQ(completion->norm, 0.5);
  }
  EXPECT_FALSE((*ends_.server->Receive()).has_value());
  EXPECT_FALSE((*ends_.client->Receive()).has_value());
}

TEST_P(ChannelContract, CountsACommandAsOutUntilItsCompletionWasReceived) {
  for (uint64_t tag = 0; tag < kRingEntries; ++tag) ASSERT_TRUE(*ends_.client->Send(Tagged(tag)));
  EXPECT_FALSE(*ends_.client->Send(Tagged(999)));
  for (uint64_t tag = 0; tag < kRingEntries; ++tag) {
    ASSERT_EQ((*ends_.server->Receive())->tag, tag);
    ASSERT_OK(ends_.server->Send(Answered(tag)));
  }
  EXPECT_FALSE(*ends_.client->Send(Tagged(999))) << "no completion has been taken out";
  EXPECT_EQ((*ends_.client->Receive())->tag, 0U);
  EXPECT_TRUE(*ends_.client->Send(Tagged(999)));
  EXPECT_FALSE(*ends_.client->Send(Tagged(1000)));
  EXPECT_EQ((*ends_.server->Receive())->tag, 999U);
}

TEST_P(ChannelContract, RingsTheDoorbellOfASleeperAlone) {
  ASSERT_TRUE(*ends_.client->Send(Tagged(1)));
  EXPECT_FALSE(IsReadable(ends_.server->wait_fd())) << "nobody slept";
  EXPECT_FALSE(*ends_.server->PrepareSleep()) << "a command is there";
  ASSERT_TRUE((*ends_.server->Receive()).has_value());
  ASSERT_TRUE(*ends_.server->PrepareSleep());
  ASSERT_TRUE(*ends_.client->Send(Tagged(2)));
  EXPECT_TRUE(IsReadable(ends_.server->wait_fd()));
  ends_.server->EndSleep();

  ASSERT_TRUE(*ends_.client->PrepareSleep());
  ASSERT_OK(ends_.server->Send(Answered(1)));
  EXPECT_TRUE(IsReadable(ends_.client->wait_fd()));
  ends_.client->EndSleep();
  EXPECT_FALSE(IsReadable(ends_.client->wait_fd())) << "EndSleep drains";
  EXPECT_FALSE(*ends_.client->PrepareSleep()) << "a completion is there";
}

TEST_P(ChannelContract, TellsOfItsCloseAfterTheLastCompletionAndWakesASleeper) {
  for (const ChannelState how : {ChannelState::kEnded, ChannelState::kRestarting}) {
    ASSERT_OK_AND_ASSIGN(ends_, GetParam().make());
    ASSERT_TRUE(*ends_.client->Send(Tagged(1)));
    ASSERT_TRUE((*ends_.server->Receive()).has_value());
    ASSERT_TRUE(*ends_.client->PrepareSleep());
    ASSERT_OK(ends_.server->Send(Answered(1)));
    EXPECT_EQ(ends_.client->state(), ChannelState::kOpen);
    ends_.server->Close(how);
    EXPECT_EQ(ends_.client->state(), how);
    EXPECT_TRUE(IsReadable(ends_.client->wait_fd()));
    ends_.client->EndSleep();
    EXPECT_FALSE(*ends_.client->PrepareSleep()) << "a completion is there";
    EXPECT_EQ((*ends_.client->Receive())->tag, 1U);
    EXPECT_THAT(ends_.client->Receive(), testing::HasError(ErrorId::kFenced));
    EXPECT_THAT(ends_.client->PrepareSleep(), testing::HasError(ErrorId::kFenced));
  }
}

TEST_P(ChannelContract, NeverSleepsThroughAMessageBetweenThreads) {
  constexpr uint64_t kMessages = 20'000;
  constexpr int kDeadlineMs = 60'000;
  // Sleeps until a message may have arrived. Returns false at the deadline, which means that a message was missed.
  const auto sleep = [](auto& end) {
    if (!*end.PrepareSleep()) return true;
    pollfd fd{.fd = end.wait_fd(), .events = POLLIN, .revents = 0};
    const bool woken = ::poll(&fd, 1, kDeadlineMs) == 1;
    end.EndSleep();
    return woken;
  };
  std::jthread server([&] {
    uint64_t drained = 0;
    for (uint64_t answered = 0; answered < kMessages;) {
      const auto command = ends_.server->Receive();
      ASSERT_OK(command);
      if (command->has_value()) {
        ASSERT_EQ((*command)->tag, answered++);
        ASSERT_OK(ends_.server->Send(Answered((*command)->tag)));
      } else {
        ASSERT_TRUE(sleep(*ends_.server)) << "after " << answered;
        // Reads the doorbell descriptor, as the IoEngine of the daemon's loop does.
        (void)!::read(ends_.server->wait_fd(), &drained, sizeof(drained));
      }
    }
  });
  uint64_t sent = 0;
  for (uint64_t received = 0; received < kMessages;) {
    // Sends bursts of changing length, so that both ends sleep at times.
    const uint64_t burst = 1 + sent % 7;
    for (uint64_t i = 0; i < burst && sent < kMessages; ++i) {
      const auto fits = ends_.client->Send(Tagged(sent));
      ASSERT_OK(fits);
      if (!*fits) break;
      ++sent;
    }
    while (received < sent) {
      const auto completion = ends_.client->Receive();
      ASSERT_OK(completion);
      if (completion->has_value()) {
        ASSERT_EQ((*completion)->tag, received++);
      } else {
        ASSERT_TRUE(sleep(*ends_.client)) << "after " << received;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Both, ChannelContract,
                         ::testing::Values(Make{"Ring", testing::MakeRingChannel},
                                           Make{"Fake", testing::MakeFakeChannel}),
                         [](const ::testing::TestParamInfo<Make>& one) { return one.param.name; });

}  // namespace
}  // namespace forebay::protocol
