// SPDX-License-Identifier: Apache-2.0
// A reader in a simulation: fetches, holds leases and reads states. At times it is killed, stopped, or sends a command that
// only a rank may send.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "daemon/core/base/events.h"
#include "protocol/layout.h"
#include "protocol/wire.h"
#include "tests/support/simulated_trainer.h"

namespace forebay::testing {

class SimulatedReader {
 public:
  SimulatedReader(std::string job, std::shared_ptr<const protocol::Layout> layout,
                  SimulatedTrainer::Wires wires);

  // Does one action; none while the reader is stopped.
  void Act(SimulationRandom& random, bool chaos);

  bool OwnsSession(uint64_t session) const { return sessions_.contains(session); }
  void OnAttach(const daemon::AnswerAttach& answer);
  void OnAnswer(const daemon::AnswerCommand& answer);
  void OnClosed(const daemon::CloseSession& close);

  uint64_t fetches() const { return fetches_; }  // fetches answered with a lease
  uint64_t expired() const { return expired_; }  // sessions that held a lease too long
  const std::map<uint32_t, uint64_t>& errors() const { return errors_; }
  const std::string& fault() const { return fault_; }

 private:
  void Attach();
  void End(daemon::EndCause cause);
  void Send(protocol::Command command);
  void Release();

  std::string job_;
  std::shared_ptr<const protocol::Layout> layout_;
  SimulatedTrainer::Wires wires_;
  uint64_t session_ = 0;         // 0: none
  std::set<uint64_t> sessions_;  // sessions that were not closed
  bool attached_ = false;
  uint64_t stopped_turns_ = 0;
  std::map<uint64_t, uint32_t> fetching_;  // tag of a fetch to its group
  std::vector<uint64_t> leases_;
  uint64_t fetches_ = 0;
  uint64_t expired_ = 0;
  std::map<uint32_t, uint64_t> errors_;
  std::string fault_;
};

}  // namespace forebay::testing
