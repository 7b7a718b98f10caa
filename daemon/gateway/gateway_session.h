// SPDX-License-Identifier: Apache-2.0
// The gateway's side of a session: a client of the daemon's ring, whose commands come from the agent.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "daemon/gateway/data_thread.h"
#include "daemon/gateway/partition_ranges.h"
#include "daemon/gateway/remote_link.h"
#include "daemon/gateway/shared_memory.h"
#include "protocol/channel.h"
#include "protocol/layout.h"
#include "protocol/step_summary.h"

namespace forebay::gateway {

// Selects whether the agent reads weights itself. kAuto: the agent reads weights if the hardware supports remote reads.
enum class ReadPolicy : uint8_t { kAuto, kOn, kOff };

struct GatewaySessionOptions {
  std::shared_ptr<SharedMemory> weights;     // read-only
  std::shared_ptr<SharedMemory> grad_arena;  // read and write
  std::shared_ptr<const void> ring;          // memory that the channel borrows
  std::unique_ptr<protocol::ClientChannel> channel;
  std::shared_ptr<const protocol::Layout> layout;
  protocol::StepRegion step_region;
  std::vector<uint32_t> trace;  // partitions in the order in which a step touches them
  // The rank's own partitions with sharded attachment. After a step their weights are sent before the trainer asks for them.
  // Empty if weights are on swap.
  std::set<uint32_t> own;
  bool is_reader = false;
  bool writes_initial = false;
  ReadPolicy reads = ReadPolicy::kAuto;
};

// Forwards commands, completions and bytes between an agent and the daemon. Writes gradients and step requests to the grad
// arena before the daemon gets their commands. Sends the bytes of a completion to the agent before the completion counts at the
// agent.
//
// Weights  The place and version of the bytes that the agent has are noted for each partition. Bytes that the agent has are not
//          sent again. With shared attachment, parameters are views of the window, which may be read at any time. All changed
//          bytes are therefore sent before a step, or a write of weights, is answered. With sharded attachment the bytes are
//          sent after the answer, and the next command that changes weights waits until all bytes have arrived.
// Limits   At most 2 * kRingEntries commands of the agent, and kRemotePiecesInFlight pieces, are under way.
class GatewaySession final : public DataSession {
 public:
  GatewaySession(std::unique_ptr<RemoteLink> link, std::unique_ptr<protocol::UcxMemory> readable,
                 GatewaySessionOptions options);

  void OnMessage(const protocol::RemoteHeader& header, protocol::UcxArrival& arrival) override;
  bool Poll() override;
  bool PrepareSleep() override;
  void EndSleep() override;
  int wait_fd() const override { return options_.channel->wait_fd(); }
  void OnTick(Clock::time_point now) override { link_->OnTick(now); }

 private:
  // Command of the agent that waits for its bytes and for earlier commands.
  struct Incoming {
    protocol::RemoteKind kind = protocol::RemoteKind::kNone;
    protocol::Command command = {};
    bool has_arrived = false;
  };
  // A completion that waits until all changed weights are fetched and sent.
  struct Sync {
    std::optional<protocol::Completion> completion = {};
    std::deque<uint32_t> to_fetch = {};
    uint32_t fetching = 0;
    // The write command that this sync answers; nullopt: the sync answers no write. If no other write has changed the
    // partition, only the bytes of this command are sent.
    std::optional<protocol::Command> written = {};
    uint32_t error = 0;  // ErrorId of a fetch
  };
  struct Piece {
    protocol::RemoteRegion region = protocol::RemoteRegion::kWeights;
    uint64_t offset_bytes = 0;
    uint64_t length_bytes = 0;
  };

  void OnCommand(const protocol::RemoteHeader& header, protocol::UcxArrival& arrival);
  bool DeliverInOrder();
  void Deliver(const Incoming& incoming);
  bool SendToDaemon();
  bool ReceiveFromDaemon();
  void OnCompletion(const protocol::Completion& completion);
  void OnOwnFetch(const protocol::Completion& completion);
  struct OwnFetch {
    uint64_t sync_tag = 0;  // 0 if the fetch is of BringAhead()
    uint32_t partition = 0;
    uint64_t behind = 0;  // number of agent commands before the fetch
    uint64_t turn = 0;    // turn of BringAhead()
  };
  void OnFetchedAhead(const OwnFetch& fetch, protocol::Completion completion);
  void Answer(const protocol::Completion& completion, const protocol::Command& command);
  // `behind`: kPieces if all pieces queued so far must arrive before the completion counts.
  enum class Behind : uint8_t { kNothing, kPieces };
  void SendCompletion(const protocol::Completion& completion, Behind behind);
  void QueueRange(const Piece& range);
  // Queues the bytes of a fetched partition that the agent lacks.
  void QueuePartition(uint32_t partition, const protocol::Completion& fetched,
                      const std::optional<protocol::Command>& written);
  void Note(uint32_t partition, const WeightsVersion& version);
  bool SendPieces();
  // Fetches the rank's own partitions ahead, so that the agent can answer fetches of them.
  void BringAhead();
  // Stops sending partitions ahead. Returns false if some bytes are still to be sent or in flight.
  bool EndAhead();
  bool reads_remotely();
  void BeginSync(uint64_t tag, Sync sync);
  bool FetchForItself();
  void TryEndSync(uint64_t tag);
  bool brings_ahead() const { return !options_.own.empty(); }
  bool is_synced() const { return options_.layout->is_shared() && !options_.is_reader; }
  void End(const absl::Status& status) { link_->End(status); }

  GatewaySessionOptions options_;
  std::unique_ptr<RemoteLink> link_;
  std::unique_ptr<protocol::UcxMemory> readable_;
  std::map<uint64_t, Incoming> incoming_;  // by number
  uint64_t next_number_ = 0;
  std::deque<protocol::Command> to_daemon_;
  // Commands of the agent that are not answered, by tag.
  std::map<uint64_t, protocol::Command> in_flight_;
  std::deque<Piece> outgoing_;
  uint64_t pieces_queued_ = 0;  // pieces queued since the start
  uint64_t pieces_sent_ = 0;
  uint32_t pieces_in_flight_ = 0;
  bool reads_remotely_ = false;
  bool daemon_has_ended_ = false;
  std::map<uint32_t, WeightsVersion> known_;  // by partition
  std::map<uint64_t, uint32_t> known_at_;     // partitions by their offset
  // Syncs by the tag that they answer.
  std::map<uint64_t, Sync> syncs_;
  std::map<uint64_t, OwnFetch> own_fetches_;  // by tag
  uint64_t next_own_tag_ = protocol::kGatewayTag;
  std::deque<uint32_t> ahead_to_fetch_;
  uint64_t ahead_fetches_ = 0;  // fetches ahead in flight in this turn
  uint64_t ahead_turn_ = 0;
  uint64_t changing_ = 0;        // commands in flight that may change weights
  std::vector<uint32_t> order_;  // order in which partitions are fetched for a sync, or ahead
  std::vector<uint32_t> touched_;
  std::set<uint32_t> touched_set_;
  bool is_ready_ = false;  // the initial parameters are written
};

}  // namespace forebay::gateway
