// SPDX-License-Identifier: Apache-2.0
// Goal    No index that a peer can write makes an end of the ring access memory outside its entries, wait permanently or take
//         an entry twice. An invalid header is refused.
// Method  Pass every kind of impossible index to both ends. The last case shows an end without the check: it takes entries that
//         were never written.

#include "protocol/ring.h"

#include <limits>
#include <memory>

#include "gtest/gtest.h"
#include "protocol/channel.h"
#include "tests/support/status_test.h"

namespace forebay::protocol {
namespace {

using testing::HasError;

class RingFixture : public ::testing::Test {
 protected:
  RingFixture() { FormatRing(*ring_); }

  RingConsumer<Command> Commands() {
    return {ring_->command_head, ring_->command_tail, std::span<const Command>(ring_->commands)};
  }
  RingProducer<Completion> Completions() {
    return {ring_->completion_tail, ring_->completion_head, ring_->completions};
  }

  static Completion Answered(uint64_t tag) {
    Completion completion{};
    completion.tag = tag;
    return completion;
  }

  std::unique_ptr<RingMemory> ring_ = std::make_unique<RingMemory>();
};

using RingConsumerTest = RingFixture;
using RingProducerTest = RingFixture;
using RingHeaderTest = RingFixture;
using RingServerTest = RingFixture;

TEST_F(RingConsumerTest, BelievesNoTailFurtherAheadThanTheRingIsLong) {
  for (const uint64_t tail :
       {uint64_t{kRingEntries} + 1, uint64_t{1} << 63, std::numeric_limits<uint64_t>::max()}) {
    ring_->command_tail.index = tail;
    auto consumer = Commands();
    EXPECT_THAT(consumer.Pop(), HasError(ErrorId::kRing)) << tail;
    EXPECT_THAT(consumer.PrepareSleep(), HasError(ErrorId::kRing)) << tail;
    EXPECT_EQ(ring_->command_head.sleeping, 0U);
  }
  ring_->command_tail.index = kRingEntries;
  auto consumer = Commands();
  for (uint32_t i = 0; i < kRingEntries; ++i) EXPECT_TRUE((*consumer.Pop()).has_value());
  EXPECT_FALSE((*consumer.Pop()).has_value());
}

TEST_F(RingConsumerTest, BelievesNoTailThatGoesBackwards) {
  auto consumer = Commands();
  ring_->command_tail.index = 2;
  ASSERT_TRUE((*consumer.Pop()).has_value());
  ASSERT_TRUE((*consumer.Pop()).has_value());
  ring_->command_tail.index = 1;
  EXPECT_THAT(consumer.Pop(), HasError(ErrorId::kRing));
}

TEST_F(RingConsumerTest, TakesNoNoticeOfItsOwnIndexInSharedMemory) {
  auto consumer = Commands();
  ring_->command_tail.index = 1;
  ring_->command_head.index = 77;  // the peer can write this index too
  ASSERT_TRUE((*consumer.Pop()).has_value());
  EXPECT_EQ(ring_->command_head.index, 1U);
  EXPECT_FALSE((*consumer.Pop()).has_value());
}

TEST_F(RingProducerTest, BelievesNoHeadThatWasNotReached) {
  auto producer = Completions();
  ASSERT_OK(producer.Push({}));
  for (const uint64_t head :
       {uint64_t{2}, uint64_t{kRingEntries}, std::numeric_limits<uint64_t>::max()}) {
    ring_->completion_head.index = head;
    EXPECT_THAT(producer.ConsumedHead(), HasError(ErrorId::kRing)) << head;
  }
  ring_->completion_head.index = 1;
  EXPECT_EQ(*producer.ConsumedHead(), 1U);
  ring_->completion_head.index = 0;
  EXPECT_THAT(producer.ConsumedHead(), HasError(ErrorId::kRing)) << "backwards";
}

TEST_F(RingProducerTest, WritesNothingIntoAFullRing) {
  auto producer = Completions();
  for (uint64_t i = 0; i < kRingEntries; ++i) {
    ASSERT_EQ(*producer.Push(Answered(i)), PushResult::kPushed);
  }
  EXPECT_EQ(*producer.Push(Answered(999)), PushResult::kFull);
  EXPECT_EQ(ring_->completions[0].tag, 0U);
  ring_->completion_head.index = 1;
  EXPECT_EQ(*producer.Push(Answered(999)), PushResult::kPushed);
  EXPECT_EQ(ring_->completions[0].tag, 999U);
}

TEST_F(RingHeaderTest, OfAnotherVersionIsRefused) {
  EXPECT_OK(CheckRingHeader(*ring_));
  FormatRing(*ring_, kProtocolVersion - 1);
  EXPECT_EQ(ring_->header.version, kProtocolVersion - 1) << "as a client of that version has it";
  EXPECT_THAT(CheckRingHeader(*ring_), HasError(ErrorId::kRing));
  FormatRing(*ring_);
  ring_->header.version += 1;
  EXPECT_THAT(CheckRingHeader(*ring_), HasError(ErrorId::kRing));
  FormatRing(*ring_);
  ring_->header.magic ^= 1;
  EXPECT_THAT(CheckRingHeader(*ring_), HasError(ErrorId::kRing));
  FormatRing(*ring_);
  ring_->header.entries *= 2;
  EXPECT_THAT(MakeRingClientChannel({.ring = ring_.get()}), HasError(ErrorId::kRing));
}

TEST_F(RingServerTest, RefusesMoreCommandsThanItHasRoomToAnswer) {
  const auto server = MakeRingServerChannel({.ring = ring_.get()});
  ring_->command_tail.index = kRingEntries;
  for (uint32_t i = 0; i < kRingEntries; ++i) {
    ASSERT_TRUE((*server->Receive()).has_value());
    ASSERT_OK(server->Send({}));
  }
  ring_->command_tail.index = kRingEntries + 1;  // no completion has been taken
  EXPECT_THAT(server->Receive(), HasError(ErrorId::kRing));
}

// Takes entries until the ring is empty, an error is returned, or more entries were taken than the ring can hold.
template <typename Consumer>
uint32_t DrainAll(Consumer consumer) {
  uint32_t taken = 0;
  while (taken <= kRingEntries) {
    const auto command = consumer.Pop();
    if (!command.ok() || !command->has_value()) break;
    ++taken;
  }
  return taken;
}

TEST_F(RingConsumerTest, WithoutTheRangeCheckTakesEntriesThatWereNeverWritten) {
  ring_->command_tail.index = uint64_t{1} << 40;
  const RingConsumer<Command, RangeCheck::kOffForTest> unchecked(
      ring_->command_head, ring_->command_tail, std::span<const Command>(ring_->commands));
  EXPECT_GT(DrainAll(unchecked), kRingEntries);
  EXPECT_EQ(DrainAll(Commands()), 0U);
}

}  // namespace
}  // namespace forebay::protocol
