// SPDX-License-Identifier: Apache-2.0
// ScriptedDaemon serves the daemon's end of a ring in a separate thread and answers as a test says. SessionTest is a fixture
// with a session that is connected to a ScriptedDaemon.
#pragma once

#include <poll.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "client/internal/session_parts.h"
#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "protocol/channel.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/mutex.h"
#include "protocol/ring.h"
#include "tests/support/status_test.h"

namespace forebay::client::internal {

inline constexpr std::chrono::seconds kTestDeadline{20};

// Threads  Any; the script runs on the daemon's thread.
class ScriptedDaemon {
 public:
  // Returns the completion of a command, or nothing if the test answers later.
  using Script = std::function<std::optional<protocol::Completion>(const protocol::Command&)>;

  ScriptedDaemon() {
    ring_ = Mapping::MapPrivate(sizeof(protocol::RingMemory)).value();
    protocol::FormatRing(ring());
    command_doorbell_ = protocol::MakeDoorbell().value();
    completion_doorbell_ = protocol::MakeSocketDoorbell().value();
    gone_ = protocol::MakeDoorbell().value();
    stop_ = protocol::MakeDoorbell().value();
    protocol::RingChannelOptions ends = Ends();
    ends.completion_doorbell_fd = completion_doorbell_.ringer.get();
    channel_ = protocol::MakeRingServerChannel(ends);
  }
  ~ScriptedDaemon() { Stop(); }

  void Start(Script script) {
    script_ = std::move(script);
    thread_ = std::thread([this] { Loop(); });
  }
  void Stop() {
    if (!thread_.joinable()) return;
    protocol::RingDoorbell(stop_.get());
    thread_.join();
  }

  // Ends the session like a daemon that exits: no further command is read or answered.
  void Close(protocol::ChannelState state) {
    {
      const protocol::MutexLock lock(mutex_);
      channel_->Close(state);
      is_closed_ = true;
    }
    protocol::RingDoorbell(stop_.get());
  }

  // A completion that reports success of `command`.
  static protocol::Completion Success(const protocol::Command& command) {
    protocol::Completion completion{};
    completion.tag = command.tag;
    completion.op = command.op;
    return completion;
  }
  static protocol::Completion Failure(const protocol::Command& command, protocol::ErrorId id) {
    protocol::Completion completion = Success(command);
    completion.error = static_cast<uint32_t>(id);
    return completion;
  }

  void Answer(const protocol::Completion& completion) {
    const protocol::MutexLock lock(mutex_);
    EXPECT_OK(channel_->Send(completion));
  }

  // Waits until `count` commands have come, and returns all that came.
  std::vector<protocol::Command> WaitForCommands(size_t count) {
    const protocol::MutexLock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
    while (seen_.size() < count && std::chrono::steady_clock::now() < deadline) {
      arrived_.wait_until(mutex_, deadline);
    }
    EXPECT_GE(seen_.size(), count);
    return seen_;
  }
  size_t SeenCount() {
    const protocol::MutexLock lock(mutex_);
    return seen_.size();
  }
  std::vector<protocol::Command> Seen(protocol::Op op) {
    const protocol::MutexLock lock(mutex_);
    std::vector<protocol::Command> found;
    for (const protocol::Command& command : seen_) {
      if (command.op == static_cast<uint16_t>(op)) found.push_back(command);
    }
    return found;
  }

  void RingClient() { protocol::RingSocketDoorbell(completion_doorbell_.ringer.get()); }
  void Die() { protocol::RingDoorbell(gone_.get()); }
  int gone_fd() const { return gone_.get(); }
  protocol::RingMemory& ring() {
    return *reinterpret_cast<protocol::RingMemory*>(ring_->bytes().data());
  }
  // The client's ends of the ring channel.
  protocol::RingChannelOptions Ends() {
    return {.ring = &ring(),
            .command_doorbell_fd = command_doorbell_.get(),
            .completion_doorbell_fd = completion_doorbell_.waiter.get()};
  }

 private:
  bool Turn() {
    protocol::Command command{};
    {
      const protocol::MutexLock lock(mutex_);
      if (is_closed_) return false;
      const auto received = channel_->Receive();
      if (!received.ok() || !received->has_value()) return false;
      command = **received;
    }
    const std::optional<protocol::Completion> completion = script_(command);
    const protocol::MutexLock lock(mutex_);
    seen_.push_back(command);
    if (completion.has_value() && !is_closed_) {
      EXPECT_OK(channel_->Send(*completion));
    }
    arrived_.notify_all();
    return true;
  }

  void Loop() {
    while (true) {
      while (Turn()) {
      }
      {
        const protocol::MutexLock lock(mutex_);
        if (is_closed_) return;
        const auto may_sleep = channel_->PrepareSleep();
        if (may_sleep.ok() && !*may_sleep) continue;
      }
      std::array<pollfd, 2> entries{
          pollfd{.fd = command_doorbell_.get(), .events = POLLIN, .revents = 0},
          pollfd{.fd = stop_.get(), .events = POLLIN, .revents = 0}};
      ::poll(entries.data(), entries.size(), -1);
      if ((entries[1].revents & POLLIN) != 0) return;
      protocol::DrainDoorbell(command_doorbell_.get());
      const protocol::MutexLock lock(mutex_);
      channel_->EndSleep();
    }
  }

  std::shared_ptr<Mapping> ring_;
  protocol::UniqueFd command_doorbell_;
  protocol::SocketDoorbell completion_doorbell_;
  protocol::UniqueFd gone_;
  protocol::UniqueFd stop_;
  Script script_;
  protocol::Mutex mutex_;
  std::condition_variable_any arrived_;
  std::unique_ptr<protocol::ServerChannel> channel_;
  std::vector<protocol::Command> seen_ ABSL_GUARDED_BY(mutex_);
  bool is_closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// A session with four groups of 64, 64, 128 and 64 float32 elements. The gradient arena has room for three of the largest.
class SessionTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kLargest = 512;
  static constexpr uint64_t kGradBytes = 3 * kLargest;
  static constexpr uint64_t kStepBytes = 8192;
  static constexpr Timeout kTimeout = kTestDeadline;

  // Starts a session whose daemon runs `script`.
  void StartSession(ScriptedDaemon::Script script,
                    const std::function<void(SessionParts&)>& change = {}) {
    protocol::LayoutSpec spec{.dtype = protocol::DType::kFloat32,
                              .optimizer = protocol::Optimizer::kAdamW,
                              .format = protocol::Format::kFp32,
                              .params = {{.name = "a", .shape = {64}, .group = 0},
                                         {.name = "b", .shape = {64}, .group = 1},
                                         {.name = "c", .shape = {128}, .group = 2},
                                         {.name = "d", .shape = {64}, .group = 3}},
                              .group_names = {"g0", "g1", "g2", "g3"},
                              .partitions = {}};
    auto layout =
        std::make_shared<const protocol::Layout>(protocol::Layout::Create(std::move(spec)).value());
    ASSERT_EQ(layout->largest_gradient_bytes(), kLargest);
    layout_ = layout;
    weights_ = Mapping::MapPrivate(layout->weights_bytes()).value();
    grad_ = Mapping::MapPrivate(kGradBytes + kStepBytes).value();
    gauge_ = std::make_shared<SessionGauge>();
    SessionParts options{.layout = layout,
                         .port = PortTo(daemon_),
                         .weights = weights_,
                         .grad = grad_,
                         .step_region_offset = kGradBytes,
                         .step_region_bytes = kStepBytes,
                         .extra_state_bytes = 1024,
                         .gauge = gauge_,
                         .timeout = kTimeout,
                         .interrupt_check = {},
                         .device = std::make_shared<gpu::HostDevice>()};
    if (change) change(options);
    daemon_.Start(std::move(script));
    ASSERT_OK_AND_ASSIGN(session_, Attachment::Assemble(std::move(options)));
  }

  static CommandPort::Options PortTo(ScriptedDaemon& daemon) {
    return {.channel = protocol::MakeRingClientChannel(daemon.Ends()).value(),
            .daemon_pidfd = -1,
            .gone_fd = daemon.gone_fd(),
            .explain = [](const protocol::Completion& completion) {
              return protocol::MakeError(static_cast<protocol::ErrorId>(completion.error),
                                         "as the script says");
            }};
  }

  // A script that answers every command with success, and a fetch with the place of its weights.
  ScriptedDaemon::Script Obey() {
    return [this](const protocol::Command& command) {
      return std::optional<protocol::Completion>(Obeyed(command));
    };
  }
  protocol::Completion Obeyed(const protocol::Command& command) {
    protocol::Completion completion = ScriptedDaemon::Success(command);
    if (command.op == static_cast<uint16_t>(protocol::Op::kFetch)) {
      completion.lease_id = 100 + command.partition;
      completion.offset_bytes = layout_->groups()[command.partition].weights_offset_bytes;
      completion.length_bytes = layout_->partition_bytes(command.partition);
    }
    if (command.op == static_cast<uint16_t>(protocol::Op::kStep)) {
      completion.committed_step = command.step;
    }
    return completion;
  }

  std::shared_ptr<const protocol::Layout> layout_;
  std::shared_ptr<Mapping> weights_;
  std::shared_ptr<Mapping> grad_;
  std::shared_ptr<SessionGauge> gauge_;
  ScriptedDaemon daemon_;  // destroyed before layout_, which its thread may still read
  std::unique_ptr<Attachment> session_;
};

}  // namespace forebay::client::internal
