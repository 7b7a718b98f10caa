// SPDX-License-Identifier: Apache-2.0
// The agent's side of a session: serves the trainer's ring as the daemon does, with bytes from the gateway.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>

#include "absl/status/status.h"
#include "daemon/gateway/data_thread.h"
#include "daemon/gateway/remote_link.h"
#include "daemon/gateway/shared_memory.h"
#include "protocol/channel.h"
#include "protocol/step_summary.h"

namespace forebay::gateway {

struct AgentSessionOptions {
  // The window: memory that receives weights, mapped by the trainer.
  std::shared_ptr<SharedMemory> weights;
  // The gradient arena of the daemon, and behind it the bytes that belong to the trainer alone.
  std::shared_ptr<SharedMemory> grad_arena;
  std::shared_ptr<const void> ring;  // memory that the channel borrows
  std::unique_ptr<protocol::ServerChannel> channel;
  uint64_t daemon_arena_bytes = 0;  // bytes of grad_arena that the daemon has too
  protocol::StepRegion step_region;
  std::shared_ptr<const protocol::Layout> layout;
  uint64_t weights_address = 0;  // address of the weights at the gateway
  bool has_rank = false;
};

// A session of a trainer on the agent's data thread. If the link to the gateway breaks, the agent closes the trainer's ring. A
// rank then attaches again through another agent.
class AgentSession final : public DataSession {
 public:
  AgentSession(std::unique_ptr<RemoteLink> link, AgentSessionOptions options);
  ~AgentSession() override;

  // Fetches all weights that have changed. Used with shared attachment alone. `on_done` is not called if the link ends first.
  void RequestSync(std::function<void()> on_done);
  // Closes the trainer's ring because the connection to the gateway is lost.
  void OnLost();

  void OnMessage(const protocol::RemoteHeader& header, protocol::UcxArrival& arrival) override;
  bool Poll() override;
  bool PrepareSleep() override;
  void EndSleep() override;
  int wait_fd() const override { return options_.channel->wait_fd(); }
  void OnTick(Clock::time_point now) override { link_->OnTick(now); }

 private:
  struct Range {
    uint64_t offset_bytes = 0;
    uint64_t length_bytes = 0;
  };
  struct Read {
    uint64_t number = 0;
    Range range;
  };
  struct Waiting {
    protocol::Completion completion = {};
    uint64_t pieces = 0;  // number of pieces that must have arrived
  };

  // Returns the bytes of the arena that the daemon reads for a command.
  Range BytesOf(const protocol::Command& command) const;
  bool ReceiveFromTrainer();
  // Answers the command if the weights have arrived already. Returns true if the trainer has its answer.
  bool AnswerHere(const protocol::Command& command);
  void OnAhead(const protocol::RemoteHeader& header);
  void OnCompletion(const protocol::RemoteHeader& header);
  void OnPiece(const protocol::RemoteHeader& header, protocol::UcxArrival& arrival);
  void OnPieceEnded(uint64_t number);
  bool StartReads();
  void DeliverCompletions();
  void Deliver(const protocol::Completion& completion);
  // Ends the session because a peer breaks the protocol.
  void End(const absl::Status& status);
  // Closes the trainer's ring. The trainer sees that the session is over, or (kRestarting) that it is to attach again.
  void Close(protocol::ChannelState state);

  AgentSessionOptions options_;
  std::unique_ptr<RemoteLink> link_;
  uint64_t next_number_ = 0;
  std::set<uint64_t> in_flight_;  // tags of the trainer's commands that wait for an answer
  // Answers to fetches, by partition. Changes of weights drop all answers; an answer counts if it is behind at least
  // ahead_from_ commands.
  std::map<uint32_t, Waiting> ahead_;
  uint64_t ahead_from_ = 0;
  std::map<uint64_t, std::function<void()>> syncs_;
  uint64_t next_sync_tag_ = protocol::kAgentTag;
  uint64_t pieces_ended_ = 0;  // all pieces with smaller numbers have arrived
  std::set<uint64_t> ended_ahead_;
  std::set<uint64_t> begun_;
  std::deque<Waiting> waiting_;
  std::deque<Read> reads_;
  uint32_t reads_in_flight_ = 0;
  bool is_closed_ = false;
};

}  // namespace forebay::gateway
