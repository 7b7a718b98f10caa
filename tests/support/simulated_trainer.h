// SPDX-License-Identifier: Apache-2.0
// One rank of a simulated training run: attaches, delivers gradients, steps, and sometimes misbehaves or dies. It records its
// deliveries, so that tests can compare a commit with them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "daemon/core/base/events.h"
#include "protocol/durability.h"
#include "protocol/layout.h"
#include "protocol/wire.h"
#include "tests/support/node_model.h"

namespace forebay::testing {

// Random numbers that are equal on every machine, unlike those of std::uniform_int_distribution.
class SimulationRandom {
 public:
  explicit SimulationRandom(uint64_t seed) : engine_(seed) {}
  uint64_t Next() { return engine_(); }
  uint64_t Below(uint64_t bound) { return engine_() % bound; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

class SimulatedTrainer {
 public:
  struct Wires {  // connections to the simulated node
    std::function<void(const daemon::Event&)> send;
    std::function<uint64_t()> new_session;
    std::function<uint64_t()> new_tag;
    NodeModel* model = nullptr;
  };

  struct Rank {
    uint32_t rank = 0;
    uint32_t world_size = 1;
    protocol::Durability durability = {};
  };

  SimulatedTrainer(std::string job, Rank rank, std::shared_ptr<const protocol::Layout> layout,
                   Wires wires);

  // Does one action. With `chaos` the action may be wrong.
  void Act(SimulationRandom& random, bool chaos);

  bool OwnsSession(uint64_t session) const { return sessions_.contains(session); }
  void OnAttach(const daemon::AnswerAttach& answer);
  void OnAnswer(const daemon::AnswerCommand& answer);
  void OnClosed(uint64_t session);
  daemon::StepRequestCopied StepRequestOf(const daemon::CopyStepRequest& copy);

  // Called when the step that the rank waits for is committed.
  void OnCommitted();
  // Compares the gradients that a step has used with those that this rank had delivered before it called step. Returns an empty
  // text if they agree.
  std::string CheckPublished(uint64_t step, const NodeModel::Gradients& used) const;

  const std::string& job() const { return job_; }
  bool is_stepping() const { return session_ != 0 && stepping_; }
  // True if this rank took part in the newest committed step. had_gradient: true if it had delivered a gradient of the
  // parameter.
  bool has_committed() const { return committed_call_.has_value(); }
  bool had_gradient(uint32_t param) const { return committed_call_->present.contains(param); }
  bool is_out() const { return phase_ == Phase::kOut; }
  uint64_t commits_seen() const { return commits_seen_; }
  const std::string& fault() const { return fault_; }
  // Number of errors that the rank received, by error id. Shows which errors the simulation reaches.
  const std::map<uint32_t, uint64_t>& errors() const { return errors_; }

 private:
  enum class Phase : uint8_t { kOut, kAttaching, kInitial, kTraining, kLeaving };
  enum class Kind : uint8_t {
    kInitialWrite,
    kInitialDone,
    kFetch,
    kGradient,
    kNorm,
    kStep,
    kAnnouncement,
    kOther
  };
  struct Sent {
    Kind kind = Kind::kOther;
    uint64_t session = 0;
    uint64_t offset = 0;
    uint64_t attempt = 0;
  };
  // Elements of a group whose gradient must still be delivered in a pass.
  struct Range {
    uint32_t group = 0;
    uint16_t pass = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  using Present = std::map<uint32_t, std::set<uint16_t>>;  // by parameter: passes with a gradient

  struct Call {
    uint64_t session = 0;
    uint64_t attempt = 0;
    Present present;
  };

  void Attach();
  void Leave(daemon::EndCause cause);
  void WriteInitial();
  void Train(SimulationRandom& random, bool chaos);
  void Misbehave(SimulationRandom& random);
  void SendGarbage(SimulationRandom& random, uint64_t session);
  bool SendGradient(SimulationRandom& random, bool chaos);
  void SendNorm(SimulationRandom& random);
  bool WaitsForNorm() const;
  void SendStep(SimulationRandom& random, bool chaos);
  void SendAnnouncement(SimulationRandom& random, bool chaos);
  void ReleaseLeases();
  void Send(uint64_t session, protocol::Command command, Sent sent);
  void BeginAttempt(uint64_t number);
  void Plan(SimulationRandom& random, bool chaos);
  void PlanPass(SimulationRandom& random, uint16_t pass, bool chaos);
  void OnGradientAnswer(const Sent& sent, uint32_t error);
  void OnStepAnswer(const daemon::AnswerCommand& answer);
  std::optional<uint64_t> FreeOffset(uint64_t bytes) const;

  std::string job_;
  uint32_t rank_;
  uint32_t world_size_;
  protocol::Durability durability_;
  std::shared_ptr<const protocol::Layout> layout_;
  Wires wires_;
  uint64_t grad_arena_bytes_;

  Phase phase_ = Phase::kOut;
  uint64_t session_ = 0;
  std::set<uint64_t> sessions_;    // sessions that were not closed, also the current one
  std::map<uint64_t, Sent> sent_;  // by tag
  daemon::AnswerAttach attached_;
  uint64_t committed_ = 0;
  uint64_t attempt_ = 0;           // attempt number on the wire
  std::vector<Range> to_deliver_;  // delivered from the back
  bool planned_ = false;
  bool delivered_any_ = false;
  Present present_;  // parameters with a gradient of this rank, in this attempt
  std::map<uint64_t, uint64_t> in_arena_;  // unanswered gradients: begin offset to end
  bool asked_ = false;                     // a norm was requested in this attempt
  bool stepping_ = false;
  std::optional<Call> committed_call_;  // nullopt: the call was lost before the decision
  uint32_t initial_next_ = 0;
  std::vector<uint64_t> leases_;
  bool scalars_wrong_ = false;
  bool request_garbage_ = false;

  uint64_t commits_seen_ = 0;
  std::map<uint32_t, uint64_t> errors_;
  std::string fault_;
};

}  // namespace forebay::testing
