// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <optional>
#include <span>

#include "absl/strings/str_cat.h"
#include "protocol/channel.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/ring.h"

namespace forebay::protocol {
namespace {

absl::Status ChannelClosed() {
  return MakeError(ErrorId::kFenced, "the daemon has ended the session", "attach again");
}

class RingClientChannel final : public ClientChannel {
 public:
  explicit RingClientChannel(const RingChannelOptions& options)
      : commands_(options.ring->command_tail, options.ring->command_head, options.ring->commands),
        completions_(options.ring->completion_head, options.ring->completion_tail,
                     std::span<const Completion>(options.ring->completions)),
        magic_(&options.ring->header.magic),
        closed_(&options.ring->completion_tail.closed),
        command_doorbell_fd_(options.command_doorbell_fd),
        completion_doorbell_fd_(options.completion_doorbell_fd) {}

  absl::StatusOr<bool> Send(const Command& command) override {
    if (commands_.pushed() - completions_.popped() >= kRingEntries) return false;
    const absl::StatusOr<PushResult> result = commands_.Push(command);
    if (!result.ok()) return Explain(result.status());
    if (*result == PushResult::kFull) return false;
    if (*result == PushResult::kPushedAsleep) RingDoorbell(command_doorbell_fd_);
    return true;
  }

  absl::StatusOr<std::optional<Completion>> Receive() override {
    // Read before the ring: what was sent before the close still counts.
    const bool closed = Closed();
    absl::StatusOr<std::optional<Completion>> completion = completions_.Pop();
    if (!completion.ok()) return Explain(completion.status());
    if (!completion->has_value() && closed) return ChannelClosed();
    return completion;
  }
  absl::StatusOr<bool> PrepareSleep() override {
    const absl::StatusOr<bool> empty = completions_.PrepareSleep();
    if (!empty.ok()) return Explain(empty.status());
    if (!*empty || !Closed()) return empty;
    completions_.EndSleep();
    return ChannelClosed();
  }
  void EndSleep() override {
    completions_.EndSleep();
    DrainSocketDoorbell(completion_doorbell_fd_);
  }
  int wait_fd() const override { return completion_doorbell_fd_; }
  ChannelState state() const override {
    const uint32_t word = internal::LoadWord(*closed_, std::memory_order_acquire);
    if (word == static_cast<uint32_t>(ChannelState::kRestarting)) return ChannelState::kRestarting;
    return word != 0 || Freed() ? ChannelState::kEnded : ChannelState::kOpen;
  }

 private:
  // The ring of an ended session reads as zeros as soon as the daemon has freed its pages.
  bool Freed() const { return internal::LoadWord(*magic_, std::memory_order_acquire) == 0; }
  bool Closed() const { return state() != ChannelState::kOpen; }
  absl::Status Explain(const absl::Status& ring_error) const {
    return Freed() ? ChannelClosed() : ring_error;
  }

  RingProducer<Command> commands_;
  RingConsumer<Completion> completions_;
  const uint64_t* magic_;
  const uint32_t* closed_;
  int command_doorbell_fd_;
  int completion_doorbell_fd_;
};

class RingServerChannel final : public ServerChannel {
 public:
  explicit RingServerChannel(const RingChannelOptions& options)
      : commands_(options.ring->command_head, options.ring->command_tail,
                  std::span<const Command>(options.ring->commands)),
        completions_(options.ring->completion_tail, options.ring->completion_head,
                     options.ring->completions),
        closed_(&options.ring->completion_tail.closed),
        command_doorbell_fd_(options.command_doorbell_fd),
        completion_doorbell_fd_(options.completion_doorbell_fd) {}

  absl::StatusOr<std::optional<Command>> Receive() override {
    ASSIGN_OR_RETURN(const std::optional<Command> command, commands_.Pop());
    if (!command.has_value() || commands_.popped() - received_ <= kRingEntries) return command;
    // The client receives a completion before it sends more, so its index is at least this fresh.
    ASSIGN_OR_RETURN(received_, completions_.ConsumedHead());
    if (commands_.popped() - received_ <= kRingEntries) return command;
    return MakeError(
        ErrorId::kRing,
        absl::StrCat("the client has sent ", commands_.popped() - received_,
                     " commands without receiving their completions (at most ", kRingEntries, ")"),
        "the session has ended: attach again");
  }

  absl::Status Send(const Completion& completion) override {
    FOREBAY_CHECK(completions_.pushed() < commands_.popped());
    ASSIGN_OR_RETURN(const PushResult result, completions_.Push(completion));
    FOREBAY_CHECK(result != PushResult::kFull);  // Receive() admits only commands that have room
    if (result == PushResult::kPushedAsleep) RingSocketDoorbell(completion_doorbell_fd_);
    return absl::OkStatus();
  }

  // Rings whether or not the client sleeps: it may be about to.
  void Close(ChannelState state) override {
    FOREBAY_CHECK(state != ChannelState::kOpen);
    internal::StoreWord(*closed_, static_cast<uint32_t>(state), std::memory_order_release);
    RingSocketDoorbell(completion_doorbell_fd_);
  }

  absl::StatusOr<bool> PrepareSleep() override { return commands_.PrepareSleep(); }
  void EndSleep() override { commands_.EndSleep(); }
  int wait_fd() const override { return command_doorbell_fd_; }

 private:
  RingConsumer<Command> commands_;
  RingProducer<Completion> completions_;
  uint32_t* closed_;
  uint64_t received_ = 0;
  int command_doorbell_fd_;
  int completion_doorbell_fd_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ClientChannel>> MakeRingClientChannel(
    const RingChannelOptions& options) {
  RETURN_IF_ERROR(CheckRingHeader(*options.ring));
  return std::make_unique<RingClientChannel>(options);
}

std::unique_ptr<ServerChannel> MakeRingServerChannel(const RingChannelOptions& options) {
  return std::make_unique<RingServerChannel>(options);
}

}  // namespace forebay::protocol
