// SPDX-License-Identifier: Apache-2.0
// Goal    The bytes that a command or a completion refers to are in place before it takes effect. Bytes that the other side
//         already has are not sent again. A message without the session's secret reaches neither end, nor does a range outside
//         the session's arenas.
// Method  Both ends of a session, each on its data thread, joined by UCX over TCP. This test is the trainer on one ring,
//         and the daemon on the other.

#include "daemon/gateway/gateway_session.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "daemon/gateway/agent_session.h"
#include "daemon/gateway/gateway_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/fake_channel.h"
#include "tests/support/layouts.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::gateway {
namespace {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::Op;
using protocol::RemoteHeader;
using protocol::RemoteKind;

constexpr std::chrono::seconds kDeadline{30};
constexpr uint64_t kGradBytes = 1 << 20;
constexpr uint64_t kStepOffset = kGradBytes / 2;
constexpr auto kKeepalive = std::chrono::milliseconds(10000);

template <typename Value>
std::optional<Value> Await(const std::function<std::optional<Value>()>& next) {
  const auto end = std::chrono::steady_clock::now() + kDeadline;
  while (std::chrono::steady_clock::now() < end) {
    if (std::optional<Value> value = next()) return value;
    std::this_thread::yield();
  }
  return std::nullopt;
}

std::shared_ptr<const protocol::Layout> MakeTestLayout() {
  protocol::LayoutSpec spec = testing::MakeLayoutSpec({.world_size = 1});
  // Freezes one parameter of group 0; the other parameters of group 0 are trained.
  spec.params[0].trainable = false;
  return std::make_shared<const protocol::Layout>(*protocol::Layout::Create(std::move(spec)));
}

class GatewaySessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (auto* thread : {&gateway_thread_, &agent_thread_}) {
      ASSERT_OK_AND_ASSIGN(*thread, DataThread::Create({.tls = "tcp"}, kKeepalive / 5));
    }
    layout_ = MakeLayout();
    for (auto* ends : {&daemon_ring_, &trainer_ring_}) {
      ASSERT_OK_AND_ASSIGN(*ends, testing::MakeRingChannel());
    }
    for (auto* memory : {&daemon_weights_, &window_}) {
      ASSERT_OK_AND_ASSIGN(*memory, SharedMemory::Create("w", layout_->weights_bytes()));
    }
    for (auto* memory : {&daemon_grad_, &trainer_grad_}) {
      ASSERT_OK_AND_ASSIGN(*memory, SharedMemory::Create("g", kGradBytes));
    }
    key_.number = 7;
    key_.secret.fill(std::byte{42});
    ASSERT_OK(gateway_thread_->Run([this] { return AddGateway(); }));
    ASSERT_OK(agent_thread_->Run([this] { return AddAgent(); }));
  }

  virtual std::shared_ptr<const protocol::Layout> MakeLayout() { return MakeTestLayout(); }

  RemoteLinkOptions LinkTo(DataThread& peer, std::promise<absl::Status>& ended) const {
    return {.key = key_,
            .peer_address = {peer.address().begin(), peer.address().end()},
            .peer = "the peer",
            .keepalive = kKeepalive,
            .on_end = [&ended](const absl::Status& status) {
              ended.set_value(protocol::Unshared(status));
            }};
  }

  absl::Status AddGateway() {
    ASSIGN_OR_RETURN(auto link,
                     RemoteLink::Create(*gateway_thread_, LinkTo(*agent_thread_, gateway_ended_)));
    GatewaySessionOptions options;
    options.weights = daemon_weights_;
    options.grad_arena = daemon_grad_;
    options.ring = daemon_ring_.memory;
    options.channel = std::move(daemon_ring_.client);
    options.layout = layout_;
    options.step_region = {.offset_bytes = kStepOffset, .size_bytes = 4096};
    options.reads = ReadPolicy::kOff;
    options.own = own_;
    gateway_thread_->Add(
        key_, std::make_unique<GatewaySession>(std::move(link), nullptr, std::move(options)));
    return absl::OkStatus();
  }

  absl::Status AddAgent() {
    ASSIGN_OR_RETURN(auto link,
                     RemoteLink::Create(*agent_thread_, LinkTo(*gateway_thread_, agent_ended_)));
    AgentSessionOptions options;
    options.weights = window_;
    options.grad_arena = trainer_grad_;
    options.ring = trainer_ring_.memory;
    options.channel = std::move(trainer_ring_.server);
    options.daemon_arena_bytes = kGradBytes;
    options.step_region = {.offset_bytes = kStepOffset, .size_bytes = 4096};
    options.layout = layout_;
    agent_thread_->Add(key_, std::make_unique<AgentSession>(std::move(link), std::move(options)));
    return absl::OkStatus();
  }

  // Sends a command as the trainer.
  void Send(Op op, uint32_t partition = 0, uint64_t length_bytes = 0) {
    Command command{};
    command.tag = next_tag_++;
    command.op = static_cast<uint16_t>(op);
    command.partition = partition;
    command.arena_offset_bytes = 128;
    command.length_bytes = length_bytes;
    const auto sent = trainer_ring_.client->Send(command);
    ASSERT_OK(sent.status());
    ASSERT_TRUE(*sent);
  }
  std::optional<Completion> Answered() {
    return Await<Completion>(
        [this] { return trainer_ring_.client->Receive().value_or(std::nullopt); });
  }

  // Receives the next command as the daemon.
  std::optional<Command> Received() {
    return Await<Command>([this] { return daemon_ring_.server->Receive().value_or(std::nullopt); });
  }
  void Answer(const Command& command, uint64_t step, uint64_t writes = 0, uint16_t flags = 0) {
    Completion completion{};
    completion.flags = flags;
    completion.tag = command.tag;
    completion.op = command.op;
    completion.committed_step = step;
    if (command.op == static_cast<uint16_t>(Op::kFetch)) {
      completion.offset_bytes = OffsetOf(command.partition);
      completion.length_bytes = layout_->partition_bytes(command.partition);
      completion.attempt = writes;
    }
    ASSERT_OK(daemon_ring_.server->Send(completion));
  }
  virtual uint64_t OffsetOf(uint32_t partition) const {
    return layout_->groups()[partition].weights_offset_bytes;
  }
  void FillWeights(std::byte value) { std::ranges::fill(daemon_weights_->bytes(), value); }
  // Fetches as the trainer. The daemon sets all weights to `value` before it answers. A gateway that has forwarded the command
  // has already sent the bytes that it read for the previous fetch.
  void Fetch(uint32_t partition, std::byte value, uint64_t step, uint64_t writes = 0) {
    Send(Op::kFetch, partition);
    const auto command = Received();
    ASSERT_TRUE(command.has_value());
    FillWeights(value);
    Answer(*command, step, writes);
    ASSERT_TRUE(Answered().has_value());
  }
  std::span<const std::byte> Window(uint32_t partition) const {
    return window_->bytes().subspan(OffsetOf(partition), layout_->partition_bytes(partition));
  }
  static bool AllAre(std::span<const std::byte> bytes, std::byte value) {
    return std::ranges::all_of(bytes, [value](std::byte byte) { return byte == value; });
  }

  std::shared_ptr<const protocol::Layout> layout_;
  std::set<uint32_t> own_;  // GatewaySessionOptions
  std::shared_ptr<SharedMemory> daemon_weights_, window_, daemon_grad_, trainer_grad_;
  testing::ChannelEnds daemon_ring_, trainer_ring_;
  SessionKey key_;
  uint64_t next_tag_ = 1;
  std::promise<absl::Status> gateway_ended_, agent_ended_;
  // Destroyed before the other members.
  std::unique_ptr<DataThread> gateway_thread_, agent_thread_;
};

TEST_F(GatewaySessionTest, AGradientIsThereWhenItsCommandIs) {
  constexpr uint64_t kBytes = 300'000;
  for (unsigned turn = 1; turn < 20; ++turn) {
    const auto value = static_cast<std::byte>(turn);
    std::ranges::fill(trainer_grad_->bytes().subspan(128, kBytes), value);
    Send(Op::kGradReady, 1, kBytes);
    const auto command = Received();
    ASSERT_TRUE(command.has_value());
    ASSERT_TRUE(AllAre(daemon_grad_->bytes().subspan(128, kBytes), value)) << turn;
    Answer(*command, 0);
    ASSERT_TRUE(Answered().has_value());
  }
  EXPECT_TRUE(AllAre(daemon_grad_->bytes().first(128), std::byte{0}));
}

TEST_F(GatewaySessionTest, WhatTheWindowHasDoesNotTravelAgain) {
  Fetch(1, std::byte{1}, /*step=*/1);
  EXPECT_TRUE(AllAre(Window(1), std::byte{1}));
  Fetch(1, std::byte{2}, 1);  // Not sent again: no step or write has changed the weights.
  EXPECT_TRUE(AllAre(Window(1), std::byte{1}));
  Fetch(1, std::byte{2}, 2);
  EXPECT_TRUE(AllAre(Window(1), std::byte{2}));
  Fetch(1, std::byte{3}, 2, /*writes=*/1);
  EXPECT_TRUE(AllAre(Window(1), std::byte{3}));
  EXPECT_TRUE(AllAre(Window(2), std::byte{0})) << "nobody has fetched it";
}

TEST_F(GatewaySessionTest, FrozenWeightsTravelOnceAndWhereTheyAreWritten) {
  const std::vector<WeightsRange> ranges = RangesOf(*layout_, 0);
  ASSERT_EQ(ranges.size(), 2u);
  ASSERT_FALSE(ranges[0].is_trainable);
  const auto part = [&](const WeightsRange& range) {
    return Window(0).subspan(range.offset_bytes, range.size_bytes);
  };
  Fetch(0, std::byte{1}, 1);
  Fetch(0, std::byte{2}, 2);
  EXPECT_TRUE(AllAre(part(ranges[0]), std::byte{1}));
  EXPECT_TRUE(AllAre(part(ranges[1]), std::byte{2}));
  Fetch(0, std::byte{2}, 2, 1);
  EXPECT_TRUE(AllAre(Window(0), std::byte{2}));
}

TEST_F(GatewaySessionTest, AStepIsAnsweredWhenAllWeightsAreThere) {
  FillWeights(std::byte{5});
  Send(Op::kStep);
  const auto step = Received();
  ASSERT_TRUE(step.has_value());
  Answer(*step, 1);
  for (size_t i = 0; i < layout_->partitions().size(); ++i) {
    EXPECT_FALSE(trainer_ring_.client->Receive().value_or(std::nullopt).has_value());
    const auto fetch = Received();
    ASSERT_TRUE(fetch.has_value());
    EXPECT_EQ(fetch->kind, static_cast<uint16_t>(protocol::FetchKind::kPlace));
    Answer(*fetch, 1);
  }
  ASSERT_TRUE(Answered().has_value());
  for (uint32_t i = 0; i < layout_->partitions().size(); ++i) {
    EXPECT_TRUE(AllAre(Window(i), std::byte{5})) << i;
  }
}

// Rank 1 of a sharded job of two ranks. Its window holds the partitions of both ranks.
class ShardedGatewaySessionTest : public GatewaySessionTest {
 protected:
  std::shared_ptr<const protocol::Layout> MakeLayout() override {
    auto layout = testing::MakeShardedLayout({{{.rows = 64}}, {{.rows = 32}}, {{.rows = 32}}});
    for (uint32_t i = 0; i < layout->partitions().size(); ++i) {
      if (layout->partitions()[i].owner == 1) own_.insert(i);
    }
    return layout;
  }
  uint64_t OffsetOf(uint32_t partition) const override {
    uint64_t offset = 0;
    for (uint32_t i = 0; i < partition; ++i) offset += layout_->partition_bytes(i);
    return offset;
  }

  // Runs a step that fills all weights with `value`. The gateway then asks the daemon for their places: see AnswerFetches().
  void MakeStep(uint64_t step, std::byte value) {
    Send(Op::kStep);
    const auto command = Received();
    ASSERT_TRUE(command.has_value());
    ASSERT_EQ(command->op, static_cast<uint16_t>(Op::kStep));
    FillWeights(value);
    Answer(*command, step);
    ASSERT_TRUE(Answered().has_value());
  }
  void AnswerFetches(size_t count, uint64_t step) {
    for (size_t i = 0; i < count; ++i) {
      const auto fetch = Received();
      ASSERT_TRUE(fetch.has_value());
      ASSERT_EQ(fetch->kind, static_cast<uint16_t>(protocol::FetchKind::kPlace));
      ASSERT_TRUE(own_.contains(fetch->partition));
      Answer(*fetch, step);
    }
  }
  // Fetches `partition` as the trainer. Returns the lease if the agent answers. Returns nothing if the daemon is asked.
  std::optional<uint64_t> FetchHere(uint32_t partition, uint64_t step) {
    Send(Op::kFetch, partition);
    const auto next = Await<std::variant<Command, Completion>>(
        [this]() -> std::optional<std::variant<Command, Completion>> {
          if (auto here = trainer_ring_.client->Receive().value_or(std::nullopt)) return *here;
          if (auto there = daemon_ring_.server->Receive().value_or(std::nullopt)) return *there;
          return std::nullopt;
        });
    EXPECT_TRUE(next.has_value());
    if (!next || std::holds_alternative<Completion>(*next)) {
      return next ? std::optional(std::get<Completion>(*next).lease_id) : std::nullopt;
    }
    Answer(std::get<Command>(*next), step);
    EXPECT_TRUE(Answered().has_value());
    return std::nullopt;
  }
  // Repeats a fetch until the agent answers it from weights that were brought ahead. Their arrival time is unknown.
  bool BecomesHere(uint32_t partition, uint64_t step) {
    const auto here = Await<uint64_t>([&] { return FetchHere(partition, step); });
    return here == protocol::kAheadLease;
  }
};

TEST_F(ShardedGatewaySessionTest, WhatAStepHasMadeComesBeforeItIsAskedFor) {
  for (uint64_t step = 1; step < 5; ++step) {
    const auto value = static_cast<std::byte>(step);
    MakeStep(step, value);
    AnswerFetches(own_.size(), step);
    for (const uint32_t partition : own_) {
      ASSERT_TRUE(BecomesHere(partition, step));
      EXPECT_TRUE(AllAre(Window(partition), value)) << partition;
    }
  }
}

TEST_F(ShardedGatewaySessionTest, OthersPartitionsAreAskedFor) {
  MakeStep(1, std::byte{1});
  AnswerFetches(own_.size(), 1);
  ASSERT_TRUE(BecomesHere(*own_.begin(), 1));
  EXPECT_EQ(FetchHere(0, 1), std::nullopt);
  EXPECT_EQ(FetchHere(0, 1), std::nullopt);
}

TEST_F(ShardedGatewaySessionTest, BehindAStepsCallNothingOfBeforeIsGiven) {
  MakeStep(1, std::byte{1});
  AnswerFetches(own_.size(), 1);
  for (const uint32_t partition : own_) ASSERT_TRUE(BecomesHere(partition, 1));
  Send(Op::kStep);
  Send(Op::kFetch, *own_.begin());
  const auto step = Received();
  const auto fetch = Received();
  ASSERT_TRUE(step.has_value() && fetch.has_value());
  EXPECT_EQ(step->op, static_cast<uint16_t>(Op::kStep));
  EXPECT_EQ(fetch->op, static_cast<uint16_t>(Op::kFetch)) << "the daemon knows when it may be";
}

// With a job over several nodes, the daemon reports no weights between preparation and decision.
TEST_F(ShardedGatewaySessionTest, AStepIsPreparedThenDecided) {
  Send(Op::kStep);
  const auto step = Received();
  ASSERT_TRUE(step.has_value());
  Answer(*step, 0, 0, protocol::kStepPrepared);
  ASSERT_TRUE(Answered().has_value());
  Send(Op::kDecide);
  const auto decide = Received();
  ASSERT_TRUE(decide.has_value());
  ASSERT_EQ(decide->op, static_cast<uint16_t>(Op::kDecide));
  Answer(*decide, 1);
  ASSERT_TRUE(Answered().has_value());
  AnswerFetches(own_.size(), 1);
}

// A step does not wait until the daemon has answered the gateway's own fetches. The gateway ignores the late answers and
// fetches again after the step.
TEST_F(ShardedGatewaySessionTest, NoCommandWaitsForFetchesThatAreNotAnswered) {
  MakeStep(1, std::byte{1});
  std::vector<Command> fetches;
  for (size_t i = 0; i < own_.size(); ++i) {
    const auto fetch = Received();
    ASSERT_TRUE(fetch.has_value());
    fetches.push_back(*fetch);
  }
  Send(Op::kStep);
  const auto step = Received();
  ASSERT_TRUE(step.has_value());
  ASSERT_EQ(step->op, static_cast<uint16_t>(Op::kStep));
  FillWeights(std::byte{2});
  for (const Command& fetch : fetches) Answer(fetch, 2);
  Answer(*step, 2);
  ASSERT_TRUE(Answered().has_value());
  AnswerFetches(own_.size(), 2);
  for (const uint32_t partition : own_) {
    ASSERT_TRUE(BecomesHere(partition, 2));
    EXPECT_TRUE(AllAre(Window(partition), std::byte{2}));
  }
}

// Another UCX program that sends to the gateway's worker.
class Stranger {
 public:
  Stranger(std::span<const std::byte> address) {
    worker_ = *protocol::UcxWorker::Create({.tls = "tcp"});
    endpoint_ = *worker_->Connect(address, [](const absl::Status&) {});
  }
  [[nodiscard]] bool Send(const RemoteHeader& header) {
    bool is_sent = false;
    endpoint_->Send(std::as_bytes(std::span(&header, 1)), {}, nullptr,
                    [&](const absl::Status&) { is_sent = true; });
    return Await<bool>([&]() -> std::optional<bool> {
             worker_->Progress();
             return is_sent ? std::optional(true) : std::nullopt;
           })
        .has_value();
  }

 private:
  std::unique_ptr<protocol::UcxWorker> worker_;
  std::unique_ptr<protocol::UcxEndpoint> endpoint_;
};

TEST_F(GatewaySessionTest, WhatHasNotTheSecretReachesNobody) {
  Stranger stranger(gateway_thread_->address());
  RemoteHeader header;
  header.kind = static_cast<uint16_t>(RemoteKind::kCommand);
  header.session = key_.number;
  header.secret = key_.secret;
  header.secret[15] ^= std::byte{1};
  Command command{};
  command.tag = 99;
  command.op = static_cast<uint16_t>(Op::kCheck);
  header.Set(command);
  ASSERT_TRUE(stranger.Send(header));
  Send(Op::kCheck);  // The trainer sends this command after the stranger's.
  const auto received = Received();
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->tag, 1u);
}

TEST_F(GatewaySessionTest, RangesOutsideTheArenaEndTheSession) {
  Stranger stranger(gateway_thread_->address());
  RemoteHeader header;
  header.kind = static_cast<uint16_t>(RemoteKind::kCommand);
  header.session = key_.number;
  header.secret = key_.secret;
  header.offset_bytes = ~uint64_t{0} - 10;
  header.length_bytes = 64;
  Command command{};
  command.tag = 99;
  header.Set(command);
  ASSERT_TRUE(stranger.Send(header));
  auto ended = gateway_ended_.get_future();
  ASSERT_EQ(ended.wait_for(kDeadline), std::future_status::ready);
  EXPECT_THAT(ended.get(), testing::HasError(ErrorId::kProtocol));
}

TEST(Tokens, AreSomebodysAsAWholeAlone) {
  ASSERT_OK_AND_ASSIGN(
      const auto tokens,
      ParseTokens("# who\n\none 0123456789abcdef\n two  fedcba9876543210 \n", "f"));
  EXPECT_EQ(NameOfToken(tokens, "0123456789abcdef"), "one");
  EXPECT_EQ(NameOfToken(tokens, "fedcba9876543210"), "two");
  for (const char* wrong : {"", "0123456789abcde", "0123456789abcdef0", "0123456789abcdeF"}) {
    EXPECT_EQ(NameOfToken(tokens, wrong), std::nullopt) << wrong;
  }
}

TEST(Tokens, LinesOfAnotherFormAreNamed) {
  for (const char* bad : {"one\n", "one 0123456789abcdef more\n", "one short\n",
                          "one 0123456789abcdef\ntwo 0123456789abcdef\n"}) {
    const auto tokens = ParseTokens(bad, "file");
    EXPECT_THAT(tokens.status(), testing::HasError(ErrorId::kConfig)) << bad;
    EXPECT_THAT(std::string(tokens.status().message()), ::testing::HasSubstr("file:")) << bad;
  }
}

}  // namespace
}  // namespace forebay::gateway
