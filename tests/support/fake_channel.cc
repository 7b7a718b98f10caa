// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_channel.h"

#include <deque>
#include <optional>
#include <utility>

#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/ring.h"

namespace forebay::testing {
namespace {

using protocol::ChannelState;
using protocol::Command;
using protocol::Completion;
using protocol::MutexLock;

struct Fake {
  protocol::UniqueFd command_doorbell;
  protocol::SocketDoorbell completion_doorbell;
  protocol::Mutex mutex;
  std::deque<Command> commands ABSL_GUARDED_BY(mutex);
  std::deque<Completion> completions ABSL_GUARDED_BY(mutex);
  bool server_sleeps ABSL_GUARDED_BY(mutex) = false;
  bool client_sleeps ABSL_GUARDED_BY(mutex) = false;
  uint64_t sent ABSL_GUARDED_BY(mutex) = 0;      // commands
  uint64_t taken ABSL_GUARDED_BY(mutex) = 0;     // commands that the server has received
  uint64_t answered ABSL_GUARDED_BY(mutex) = 0;  // completions sent
  uint64_t received ABSL_GUARDED_BY(mutex) = 0;  // completions that the client has received
  protocol::ChannelState state ABSL_GUARDED_BY(mutex) = protocol::ChannelState::kOpen;
};

class FakeClient final : public protocol::ClientChannel {
 public:
  explicit FakeClient(std::shared_ptr<Fake> fake) : fake_(std::move(fake)) {}

  absl::StatusOr<bool> Send(const Command& command) override {
    bool wake = false;
    {
      MutexLock lock(fake_->mutex);
      if (fake_->sent - fake_->received >= protocol::kRingEntries) return false;
      fake_->commands.push_back(command);
      ++fake_->sent;
      wake = fake_->server_sleeps;
    }
    if (wake) protocol::RingDoorbell(fake_->command_doorbell.get());
    return true;
  }

  absl::StatusOr<std::optional<Completion>> Receive() override {
    MutexLock lock(fake_->mutex);
    if (fake_->completions.empty()) {
      if (fake_->state != ChannelState::kOpen) return Closed();
      return std::optional<Completion>();
    }
    const Completion completion = fake_->completions.front();
    fake_->completions.pop_front();
    ++fake_->received;
    return std::optional<Completion>(completion);
  }

  absl::StatusOr<bool> PrepareSleep() override {
    MutexLock lock(fake_->mutex);
    if (fake_->completions.empty() && fake_->state != ChannelState::kOpen) return Closed();
    fake_->client_sleeps = fake_->completions.empty();
    return fake_->client_sleeps;
  }

  void EndSleep() override {
    {
      MutexLock lock(fake_->mutex);
      fake_->client_sleeps = false;
    }
    protocol::DrainSocketDoorbell(wait_fd());
  }

  int wait_fd() const override { return fake_->completion_doorbell.waiter.get(); }

  ChannelState state() const override {
    MutexLock lock(fake_->mutex);
    return fake_->state;
  }

 private:
  static absl::Status Closed() {
    return protocol::MakeError(protocol::ErrorId::kFenced, "closed", "attach again");
  }

  std::shared_ptr<Fake> fake_;
};

class FakeServer final : public protocol::ServerChannel {
 public:
  explicit FakeServer(std::shared_ptr<Fake> fake) : fake_(std::move(fake)) {}

  absl::StatusOr<std::optional<Command>> Receive() override {
    MutexLock lock(fake_->mutex);
    if (fake_->commands.empty()) return std::optional<Command>();
    const Command command = fake_->commands.front();
    fake_->commands.pop_front();
    ++fake_->taken;
    return std::optional<Command>(command);
  }

  absl::Status Send(const Completion& completion) override {
    bool wake = false;
    {
      MutexLock lock(fake_->mutex);
      FOREBAY_CHECK(fake_->answered < fake_->taken);
      fake_->completions.push_back(completion);
      ++fake_->answered;
      wake = fake_->client_sleeps;
    }
    if (wake) protocol::RingSocketDoorbell(fake_->completion_doorbell.ringer.get());
    return absl::OkStatus();
  }

  void Close(ChannelState state) override {
    {
      MutexLock lock(fake_->mutex);
      fake_->state = state;
    }
    protocol::RingSocketDoorbell(fake_->completion_doorbell.ringer.get());
  }

  absl::StatusOr<bool> PrepareSleep() override {
    MutexLock lock(fake_->mutex);
    fake_->server_sleeps = fake_->commands.empty();
    return fake_->server_sleeps;
  }

  void EndSleep() override {
    MutexLock lock(fake_->mutex);
    fake_->server_sleeps = false;
  }

  int wait_fd() const override { return fake_->command_doorbell.get(); }

 private:
  std::shared_ptr<Fake> fake_;
};

struct Ring {
  protocol::RingMemory memory = {};
  protocol::UniqueFd command_doorbell;
  protocol::SocketDoorbell completion_doorbell;
};

}  // namespace

absl::StatusOr<ChannelEnds> MakeFakeChannel() {
  auto fake = std::make_shared<Fake>();
  ASSIGN_OR_RETURN(fake->command_doorbell, protocol::MakeDoorbell());
  ASSIGN_OR_RETURN(fake->completion_doorbell, protocol::MakeSocketDoorbell());
  return ChannelEnds{std::make_unique<FakeClient>(fake), std::make_unique<FakeServer>(fake), fake};
}

absl::StatusOr<ChannelEnds> MakeRingChannel() {
  auto ring = std::make_shared<Ring>();
  ASSIGN_OR_RETURN(ring->command_doorbell, protocol::MakeDoorbell());
  ASSIGN_OR_RETURN(ring->completion_doorbell, protocol::MakeSocketDoorbell());
  protocol::FormatRing(ring->memory);
  protocol::RingChannelOptions options{
      .ring = &ring->memory,
      .command_doorbell_fd = ring->command_doorbell.get(),
      .completion_doorbell_fd = ring->completion_doorbell.waiter.get()};
  ASSIGN_OR_RETURN(auto client, protocol::MakeRingClientChannel(options));
  options.completion_doorbell_fd = ring->completion_doorbell.ringer.get();
  return ChannelEnds{std::move(client), protocol::MakeRingServerChannel(options), ring};
}

}  // namespace forebay::testing
