// SPDX-License-Identifier: Apache-2.0
// Goal    A client's malformed data ends at most that client's session: bytes that change in shared memory while the daemon
//         reads them, and malformed names and requests. The daemon continues, and another job's bytes do not change.
// Method  A raw client has a second thread that overwrites step requests and gradients with seeded words while the daemon
//         executes commands. Another job runs at the same time, and its weights are compared at the end.

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::daemon::racing_client_process_test {
namespace {

using protocol::Command;
using protocol::ErrorId;
using protocol::HyperParams;
using protocol::Op;
using protocol::StepRequest;
using testing::DaemonProcess;
using testing::HasError;
using testing::RawSession;
using testing::TempDir;

constexpr uint64_t kSeed = 20261121;
constexpr int kCommands = 3000;

Command Make(Op op) {
  Command command{};
  command.op = static_cast<uint16_t>(op);
  return command;
}

class RacingClient : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_)); }

  std::unique_ptr<RawSession> Ready(const std::string& job) {
    auto raw = RawSession::Connect(socket_);
    EXPECT_OK(raw);
    if (!raw.ok()) return nullptr;
    EXPECT_OK((*raw)->Hello());
    EXPECT_OK((*raw)->Attach({.job = job}, spec_));
    EXPECT_OK((*raw)->Map());
    for (uint32_t group = 0; group < layout_.groups().size(); ++group) {
      const std::vector<std::byte> values = testing::MakeValues(layout_, group, kSeed);
      std::memcpy((*raw)->grad().data(), values.data(), values.size());
      Command write = Make(Op::kWriteInitial);
      write.partition = group;
      write.length_bytes = layout_.partition_bytes(group);
      EXPECT_OK((*raw)->Ask(write));
    }
    EXPECT_OK((*raw)->Ask(Make(Op::kInitialDone)));
    return *std::move(raw);
  }

  // Stores word by word, so that the client's own threads do not race with each other.
  static void StoreWords(const void* from, size_t bytes, std::byte* to) {
    auto* const at = reinterpret_cast<uint64_t*>(to);
    for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i) {
      uint64_t word = 0;
      std::memcpy(&word, static_cast<const std::byte*>(from) + i * sizeof(word), sizeof(word));
      std::atomic_ref(at[i]).store(word, std::memory_order_relaxed);
    }
  }

  // Writes a step request into the session's arena. Returns the command that names the request.
  Command WriteStep(RawSession& raw, uint64_t step, uint32_t param_groups) const {
    const std::vector<HyperParams> hyper = testing::MakeHyperParams();
    StepRequest request{};
    request.step = step;
    request.param_groups = param_groups;
    Command command = Make(Op::kStep);
    command.step = step;
    command.arena_offset_bytes = raw.reply().getStepRegionOffset();
    // The presence bits say that no parameter has a gradient.
    const std::vector<std::byte> presence(protocol::PresenceBytes(layout_.params().size()));
    command.length_bytes = sizeof(request) + param_groups * sizeof(HyperParams) + presence.size();
    std::byte* at = raw.grad().data() + command.arena_offset_bytes;
    StoreWords(&request, sizeof(request), at);
    StoreWords(hyper.data(), param_groups * sizeof(HyperParams), at + sizeof(request));
    StoreWords(presence.data(), presence.size(),
               at + sizeof(request) + param_groups * sizeof(HyperParams));
    return command;
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const protocol::LayoutSpec spec_ =
      testing::MakeLayoutSpec({.world_size = 1, .groups = 2, .group_elems = 1000});
  const protocol::Layout layout_ = *protocol::Layout::Create(spec_);
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(RacingClient, WhoOverwritesWhatIsBeingReadReachesNobodyElse) {
  std::vector<std::byte> before;
  std::vector<std::byte> after;
  std::jthread([&] {  // A thread of its own, because a thread has one event loop.
    const auto good = Ready("good");
    before.assign(good->weights().begin(), good->weights().end());
    std::jthread([&] {
      const auto bad = Ready("bad");
      const std::span<std::byte> arena = bad->grad();
      const uint64_t region = bad->reply().getStepRegionOffset();
      std::atomic<bool> stop = false;
      std::jthread scribbler([&] {
        std::mt19937_64 random(kSeed);
        while (!stop) {
          const uint64_t offset = (random() % 2 == 0 ? region : 0) + random() % 32 * 8;
          auto& word = *reinterpret_cast<uint64_t*>(arena.data() + offset);
          const uint64_t value = random() % 2 == 0 ? random() : random() % 70;
          std::atomic_ref(word).store(value, std::memory_order_relaxed);
        }
      });
      std::mt19937_64 random(kSeed + 1);
      uint64_t step = 1;
      for (int i = 0; i < kCommands; ++i) {
        Command command = WriteStep(*bad, step, static_cast<uint32_t>(random() % 3));
        if (random() % 2 == 0) {
          command = Make(Op::kGradReady);
          command.step = step;
          command.length_bytes = layout_.partition_bytes(0);
        }
        ASSERT_OK_AND_ASSIGN(const protocol::Completion done, bad->Call(command));
        if (done.error == 0 && command.op == static_cast<uint16_t>(Op::kStep)) ++step;
      }
      stop = true;
    }).join();
    EXPECT_OK(good->Ask(Make(Op::kFetch)));
    after.assign(good->weights().begin(), good->weights().end());
  })
      .join();
  EXPECT_TRUE(daemon_->IsAlive());
  EXPECT_FALSE(before.empty());
  EXPECT_TRUE(before == after);
}

TEST_F(RacingClient, WithoutHyperParametersIsRefused) {
  const auto raw = Ready("job");
  EXPECT_THAT(raw->Ask(WriteStep(*raw, 1, 0)), HasError(ErrorId::kOption));
  EXPECT_OK(raw->Ask(WriteStep(*raw, 1, 2)));
}

TEST_F(RacingClient, MeansAllOfAName) {
  const auto good = Ready("job");
  std::jthread([&] {
    ASSERT_OK_AND_ASSIGN(const auto raw, RawSession::Connect(socket_));
    ASSERT_OK(raw->Hello());
    const std::string name("job\0x", 5);
    EXPECT_THAT(raw->Attach({.job = name}, spec_), HasError(ErrorId::kJobName));
  }).join();
  EXPECT_OK(good->Ask(Make(Op::kFetch)));  // The session has not been fenced.
}

}  // namespace
}  // namespace forebay::daemon::racing_client_process_test
