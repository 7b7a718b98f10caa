// SPDX-License-Identifier: Apache-2.0
// Drives one NodeState like the daemon's loop, with a NodeModel for workers and disk. Invariants of the NodeState are checked
// after every event; a broken one aborts the test. Faults that the NodeModel finds are in fault().
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/node/node_state.h"
#include "nvme/slot_map.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/os/check.h"
#include "protocol/step_summary.h"
#include "protocol/wire.h"
#include "tests/support/kept_records.h"
#include "tests/support/layouts.h"
#include "tests/support/node_model.h"

namespace forebay::testing {

// Swap paths with the given data bytes each.
nvme::SlotMap SwapPaths(const std::vector<uint64_t>& path_bytes);

// Options with which a small job is entirely resident.
daemon::NodeState::Options RoomyOptions();

struct AttachRequest {
  std::string job = "job";
  uint32_t uid = 1000;
  bool reader = false;
  uint32_t rank = 0;
  uint32_t world_size = 0;  // 0: the harness's number
  uint32_t world_ranks = 0;
  std::string run = {};
  bool resume = false;
  bool reattach = false;
  bool is_left_behind = false;
  int32_t rival_pid = 0;
  std::vector<uint64_t> held_leases = {};
  bool accumulate = false;
  bool early_updates = false;
  std::optional<protocol::Durability> durability = {};
  uint64_t grad_arena_bytes = 0;  // 0: four times the largest group; for a reader: a page
  uint64_t extra_state_bytes = 64;
};

// The default attach request of rank 0 in a job with this layout. Plans use it, since they need no session.
daemon::AttachRequested RequestOf(const std::shared_ptr<const protocol::Layout>& layout,
                                  uint32_t world_size = 2);

class NodeHarness {
 public:
  explicit NodeHarness(const daemon::NodeState::Options& options, uint32_t world_size = 2)
      : state_(options), world_size_(world_size) {}

  // Creates a node on the disk of an earlier node: see Restart().
  NodeHarness(const daemon::NodeState::Options& options, uint32_t world_size, NodeModel model)
      : state_(options), world_size_(world_size), model_(std::move(model)) {}
  // The daemon of `before` has died. Creates the next daemon on its disk.
  static std::unique_ptr<NodeHarness> Restart(const NodeHarness& before,
                                              daemon::NodeState::Options options);
  // Creates the next daemon on a model of Restarted() or AfterPowerCut().
  static std::unique_ptr<NodeHarness> Restart(NodeModel left, uint32_t world_size,
                                              daemon::NodeState::Options options);

  // The daemon of `before` has stopped its jobs (JobsStopped) and ended. Creates the next daemon.
  static std::unique_ptr<NodeHarness> AfterStop(NodeHarness& before,
                                                daemon::NodeState::Options options);
  // The daemon of `before` was killed on a node that retains its jobs. Creates the next daemon. Returns null if no record is
  // readable.
  static std::unique_ptr<NodeHarness> AfterKill(NodeHarness& before,
                                                daemon::NodeState::Options options);

  daemon::NodeState& state() { return state_; }
  // The oldest job named `name`, of any user.
  std::optional<daemon::JobView> FindJob(const std::string& name) const;
  NodeModel& model() { return model_; }
  const std::string& fault() const { return model_.fault(); }
  // All actions of the state machine, in order.
  const std::vector<daemon::Action>& log() const { return log_; }
  template <typename A>
  std::vector<A> Logged() const {
    std::vector<A> found;
    for (const daemon::Action& action : log_) {
      if (const auto* a = std::get_if<A>(&action)) found.push_back(*a);
    }
    return found;
  }

  // Sets whether FreeJob finds that a process still uses the weights. If so, the test must send the final JobFreed.
  void set_weights_in_use(bool in_use) { weights_in_use_ = in_use; }

  // Handles one event. Requests to copy a step request are served at once, like in the daemon's loop.
  void Send(const daemon::Event& event);
  // Finishes running tasks, oldest first, until none runs. Includes tasks that start meanwhile.
  void RunTasks();
  void Finish(daemon::TaskId task, const absl::Status& status = absl::OkStatus());
  // Finishes tasks up to the next commit and fails the commit's flush.
  void FailFlush() {
    Finish(FinishUntil<daemon::CommitLedger>().task,
           protocol::MakeError(protocol::ErrorId::kSwapIo, "simulated: flush"));
  }
  // Running tasks of one kind, oldest first.
  template <typename A>
  std::vector<A> Running() const {
    std::vector<A> found;
    for (const auto& [task, action] : model_.running()) {
      if (const auto* a = std::get_if<A>(&action)) found.push_back(*a);
    }
    return found;
  }
  // Finishes tasks, oldest first, until a task A runs. Returns that task.
  template <typename A>
  A FinishUntil() {
    while (Running<A>().empty()) {
      FOREBAY_CHECK(!model_.running().empty());
      Finish(model_.running().begin()->first);
    }
    return Running<A>()[0];
  }
  template <typename A>
  void FinishAll() {
    for (const A& a : Running<A>()) Finish(a.task);
  }

  // Attaches a reader, runs all tasks and maps the arenas.
  uint64_t AttachReader(const std::shared_ptr<const protocol::Layout>& layout);
  // Sends AttachRequested only.
  uint64_t RequestAttach(std::shared_ptr<const protocol::Layout> layout,
                         const AttachRequest& request);
  // Attaches, runs all tasks and maps. For a new job, also writes the initial parameters. In a sharded job each rank writes its
  // own parameters, and kInitialDone is answered once every rank is attached.
  uint64_t Attach(const std::shared_ptr<const protocol::Layout>& layout,
                  const AttachRequest& request);
  // Attaches, runs all tasks and maps, but writes no initial parameters.
  uint64_t AttachOnly(const std::shared_ptr<const protocol::Layout>& layout,
                      const AttachRequest& request);
  // Writes the whole partition in one piece.
  uint64_t WriteInitial(uint64_t session, uint32_t partition);
  uint64_t InitialDone(uint64_t session);
  const daemon::AnswerAttach* attached(uint64_t session) const;
  bool is_closed(uint64_t session) const { return closed_.contains(session); }
  const absl::Status& close_reason(uint64_t session) const { return closed_.at(session); }
  void End(uint64_t session, daemon::EndCause cause) {
    Send(daemon::SessionEnded{.session = session, .cause = cause});
  }
  // Sets how many of the newest answers of each session its client has not received when it sends a command.
  void set_unheard_max(size_t answers) { unheard_max_ = answers; }
  // Disconnects the session's client. Answers that the client has not received are lost. Until Reconnect() the client sends
  // nothing, and the state machine may not answer it.
  void Disconnect(uint64_t session);
  // Reconnects the client with the leases that it holds. If the session's AnswerAttach reports no error, the client maps and
  // sends its unanswered commands again.
  void Reconnect(uint64_t session, std::vector<uint64_t> held_leases = {});
  // Lets all clients receive all answers so far.
  void Hear();
  bool IsUnheard(uint64_t tag) const;

  // Commands of clients. Each returns the tag of the command.
  uint64_t Command(uint64_t session, protocol::Command command);
  uint64_t Fetch(uint64_t session, uint32_t partition);
  uint64_t Release(uint64_t session, uint64_t lease);
  // Releases the lease of an answered fetch.
  void ReleaseFetched(uint64_t session, uint64_t fetch_tag);
  // Delivers the gradient of a whole partition (a group in a shared layout) or of a range of its elements. Marks a trainable
  // parameter as present if this call delivers all its elements in the partition.
  uint64_t Gradient(uint64_t session, uint32_t partition, uint64_t step, bool finite = true);
  uint64_t GradientRange(uint64_t session, uint32_t partition, uint64_t begin, uint64_t end,
                         uint64_t step, bool finite = true);
  // Offset that a gradient of `bytes` would get in the session's arena. Returns nothing if the arena has no room.
  std::optional<uint64_t> FreeOffset(uint64_t session, uint64_t bytes) const;
  // Starts a further backward pass: later gradients belong to it.
  void BeginPass(uint64_t session) { ++InfoOf(session).pass; }
  void EndPasses(uint64_t session) { InfoOf(session).pass = 0; }
  uint64_t GradNorm(uint64_t session, uint32_t param);
  // Sets the gradient scale of later step calls and announcements.
  void set_grad_scale(double scale) { grad_scale_ = scale; }
  void set_answered_when(protocol::StepAnswer when) { answered_when_ = when; }
  // Sets whether the rank's next step calls report a gradient of the parameter.
  void SetPresent(uint64_t session, uint32_t param, bool present);
  // Sets the attempt of the rank's later commands. Gradients that the rank has delivered are no longer present.
  void SetAttempt(uint64_t session, uint64_t attempt);
  uint64_t Step(uint64_t session, uint64_t step, double lr = 0.1, double max_grad_norm = 0,
                uint32_t extra_state_bytes = 0);
  // Announces the scalars of a step: the session's later deliveries belong to the step's last backward pass.
  uint64_t Announce(uint64_t session, uint64_t step, double lr = 0.1);
  // Calls step for each session, then runs all tasks. Returns the errors of the answers.
  std::vector<protocol::ErrorId> StepAll(const std::vector<uint64_t>& sessions, uint64_t step);
  // Writes a state of elements [begin, end) of a partition. end 0: the end of the partition.
  uint64_t WriteState(uint64_t session, uint32_t partition, uint64_t begin = 0, uint64_t end = 0,
                      uint16_t state = 0);
  uint64_t WriteUpdates(uint64_t session, uint32_t param, uint64_t updates);
  // For a job over several nodes. SummaryTo() is the summary that this node sent to the session for its step. Decide() sends
  // the session's decision, with the merged summary of all nodes.
  const protocol::StepSummary& SummaryTo(uint64_t session) const { return summaries_.at(session); }
  uint64_t Decide(uint64_t session, const protocol::StepSummary& world);
  uint64_t GoBack(uint64_t session, uint64_t step);
  uint64_t ReadState(uint64_t session, uint32_t param, uint64_t first, uint64_t elems);
  // The number of updates t for which a segment's scalars were computed. Returns 0 if they match no t below 10 with lr 0.1.
  static uint64_t UpdateCount(const daemon::UpdateSegment& segment);

  const daemon::AnswerCommand* answer(uint64_t tag) const;
  // Error id of the answer to `tag`. Returns kTimeout, which the state machine never uses, if the answer has not arrived.
  protocol::ErrorId ErrorOf(uint64_t tag) const;
  // Replaces the next step request that the state machine reads, of any session.
  void OverrideStepRequest(const protocol::StepRequest& request,
                           const std::vector<protocol::HyperParams>& hyper_params);

 private:
  struct SessionInfo {
    uint32_t rank = 0;
    std::shared_ptr<const protocol::Layout> layout;
    uint64_t grad_arena_bytes = 0;
    std::map<uint64_t, uint64_t> unanswered = {};  // begin and end offsets of gradients
    std::vector<uint64_t> presence = {};
    uint64_t attempt = 0;
    uint16_t pass = 0;
  };
  struct SentStep {
    uint64_t session = 0;
    daemon::StepRequestCopied copied;
  };
  struct SentGradient {
    uint64_t session = 0;
    uint64_t offset = 0;
    uint64_t end = 0;
  };
  struct SentCommand {
    uint64_t session = 0;
    protocol::Command command;
  };

  void Observe(const daemon::Action& action);
  void HearAllBut(uint64_t session, size_t answers);
  SessionInfo& InfoOf(uint64_t session) { return sessions_.at(session); }
  uint64_t AllocateOffset(uint64_t session, uint64_t bytes);
  uint64_t SendStepRequest(uint64_t session, protocol::Op op, daemon::StepRequestCopied copied);

  // Creates the daemon that continues the jobs of the records of `before`. Returns null if no record is readable.
  static std::unique_ptr<NodeHarness> Continue(NodeHarness& before,
                                               daemon::NodeState::Options options);

  daemon::NodeState state_;
  uint32_t world_size_;
  NodeModel model_;
  KeptRecords records_;
  std::vector<daemon::Action> log_;
  std::map<uint64_t, SessionInfo> sessions_;
  std::map<uint64_t, daemon::AnswerAttach> attached_;
  std::map<uint64_t, absl::Status> closed_;
  std::map<uint64_t, daemon::AnswerCommand> answers_;  // by tag
  std::map<uint64_t, uint32_t> fetches_;               // by tag: fetched partition
  std::map<uint64_t, SentGradient> gradients_;         // by tag
  std::map<uint64_t, SentStep> step_requests_;         // by tag
  std::map<uint64_t, SentCommand> commands_;           // by tag
  // By session: tags of answers that the client has not read.
  std::map<uint64_t, std::deque<uint64_t>> unheard_;
  std::set<uint64_t> away_;  // disconnected sessions
  std::map<uint64_t, protocol::StepSummary> summaries_;
  std::map<uint64_t, protocol::StepSummary> decisions_;  // by tag
  std::optional<daemon::StepRequestCopied> override_;
  size_t unheard_max_ = 0;
  bool weights_in_use_ = false;
  double grad_scale_ = 1;
  protocol::StepAnswer answered_when_ = protocol::StepAnswer::kPublished;
  uint64_t last_session_ = 0;
  uint64_t last_tag_ = 0;
};

}  // namespace forebay::testing
