// SPDX-License-Identifier: Apache-2.0
// The ranks of one job in the harness. They train turn by turn, on one daemon and on the next.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/node/node_state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/durability.h"
#include "protocol/error.h"
#include "tests/support/job_cases.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::testing {

// Error id that the harness returns for a command without an answer.
inline constexpr protocol::ErrorId kUnanswered = protocol::ErrorId::kTimeout;
inline constexpr protocol::Durability kMemory{};
inline constexpr protocol::Durability kStep{.level = protocol::DurabilityLevel::kStep, .steps = 1};
inline constexpr protocol::Durability kEpoch{.level = protocol::DurabilityLevel::kEpoch,
                                             .steps = 2};

// Jobs in every tier that the next daemon continues.
inline constexpr JobCase kCasesThatGoOn[] = {
    {kMemory, Place::kDram},
    {kMemory, Place::kSwap},
    {kMemory, Place::kHalf},
    {kMemory, Place::kWeightsOnSwap},
    {kMemory, Place::kHalf, true},
    {kMemory, Place::kWeightsOnSwap, true},
    {kMemory, Place::kSumsOnSwap},
    {kMemory, Place::kSumsOnSwap, true},
    {kStep, Place::kSumsOnSwap, true},
    {kMemory, Place::kDram, false, true},
    {kMemory, Place::kHalf, false, true},
    {kStep, Place::kDram},
    {kStep, Place::kHalf},
    {kEpoch, Place::kDram},
    {kEpoch, Place::kHalf, true},
    {kEpoch, Place::kWeightsOnSwap},
    {.place = Place::kDram, .over_nodes = true},
    {.durability = kEpoch, .place = Place::kHalf, .early_updates = true, .over_nodes = true},
    {.place = Place::kSumsOnSwap, .early_updates = true, .over_nodes = true},
    {.durability = kStep, .place = Place::kDram, .several_passes = true, .over_nodes = true},
    {.place = Place::kDram, .several_passes = true},
    {.durability = kStep, .place = Place::kDram, .several_passes = true},
    {.place = Place::kDram, .shared = true, .optimizer = protocol::Optimizer::kLamb},
    {.place = Place::kHalf, .shared = true, .optimizer = protocol::Optimizer::kLamb},
    {.durability = kStep,
     .place = Place::kSwap,
     .shared = true,
     .optimizer = protocol::Optimizer::kLamb},
};

inline AttachRequest RequestOf(uint32_t rank, const JobCase& with, bool reattach) {
  AttachRequest request = RequestOf(rank, with);
  request.resume = request.reattach = reattach;
  return request;
}

// The ranks of one job, which train on the harness's current daemon.
class Training {
 public:
  Training(const JobCase& with, const daemon::NodeState::Options& options)
      : with_(with),
        options_(options),
        layout_(LayoutOf(with)),
        node_(std::make_unique<NodeHarness>(options, kCaseRanks)) {}

  void AttachAll(bool reattach = false) {
    sessions_.clear();
    for (uint32_t rank = 0; rank < kCaseRanks; ++rank) {
      sessions_.push_back(node_->Attach(layout_, RequestOf(rank, with_, reattach)));
    }
    for (const uint64_t session : sessions_) {
      const daemon::AnswerAttach* answer = node_->attached(session);
      ASSERT_NE(answer, nullptr);
      ASSERT_OK(answer->status);
      ASSERT_FALSE(reattach && answer->writes_initial);
      // The step was published when the daemon was killed, but no rank had received the answer.
      if (was_killed_ && session == sessions_[0] && answer->committed_step == answered_ + 1) {
        ++answered_;
      }
      ASSERT_EQ(answer->committed_step, answered_);
      node_->SetAttempt(session, answer->attempt);
      ASSERT_EQ(answer->extra_state_bytes, answered_ > 0 ? 32U : 0U);
      ASSERT_TRUE(answer->prepared_step == 0 || answer->prepared_step == answered_ + 1);
    }
    Begin();
    if (node_->attached(sessions_[0])->prepared_step == 0) return;
    // The step is prepared. Step calls are sent again and answered again.
    to_do_.clear();
    for (const uint64_t session : sessions_) Call(session, answered_ + 1);
  }

  // Does the next action of the current step, or finishes the oldest task and releases answered fetches.
  void Turn() {
    if (fetches_.empty()) waits_for_fetches_ = false;
    if (!to_do_.empty() && !waits_for_fetches_ && turn_++ % 2 == 0) {
      const auto next = to_do_.front();
      to_do_.erase(to_do_.begin());
      next();
      return;
    }
    if (!node_->model().running().empty()) FinishOldest();
    ReleaseAnswered();
    const bool is_answered =
        !calls_.empty() && to_do_.empty() && std::ranges::all_of(calls_, [this](uint64_t call) {
          return node_->ErrorOf(call) != kUnanswered;
        });
    if (!is_answered) return;
    for (const uint64_t call : calls_) EXPECT_EQ(node_->ErrorOf(call), protocol::ErrorId::kNone);
    node_->Hear();
    if (with_.over_nodes && !std::exchange(is_decided_, true)) {
      Decide();
      return;
    }
    ++answered_;
    Begin();
  }
  void TrainTo(uint64_t step) {
    for (int turn = 0; turn < 4000 && answered_ < step; ++turn) Turn();
    ASSERT_EQ(answered_, step);
  }

  // Holds leases on the first kCaseRanks partitions until just before the step call.
  void HoldFirstGroup() { holds_first_group_ = true; }
  bool holds_leases() const {
    return std::ranges::any_of(
        fetches_, [this](const Fetch& fetch) { return node_->answer(fetch.tag) != nullptr; });
  }

  // Makes the flushes of the next `count` commits fail.
  void FailFlushes(int count) { failing_ = count; }
  int failing() const { return failing_; }

  bool has_stopped() const { return !node_->Logged<daemon::JobsStopped>().empty(); }
  daemon::JobsStopped stopped() const { return node_->Logged<daemon::JobsStopped>().at(0); }
  // Requests a stop and takes turns until the job has stopped. Then creates the next daemon.
  void Stop() {
    node_->Send(daemon::StopRequested{});
    for (int turn = 0; turn < 4000 && !has_stopped(); ++turn) Turn();
    ASSERT_TRUE(has_stopped());
    ASSERT_THAT(stopped().jobs, ::testing::SizeIs(1));
    ASSERT_EQ(node_->Logged<daemon::RecordJob>().back().job->step, answered_);
    ASSERT_THAT(stopped().sessions, ::testing::SizeIs(kCaseRanks));
    NextDaemon();
  }
  void NextDaemon() {
    EXPECT_EQ(node_->fault(), "");
    node_ = NodeHarness::AfterStop(*node_, options_);
  }

  // Resumes an update that was killed: finishes up to `tasks` running tasks.
  void Resume(size_t tasks = SIZE_MAX) {
    for (size_t i = 0; i < tasks && !node_->model().running().empty(); ++i) FinishOldest();
  }

  // Kills the daemon and creates the next one. Returns false if the job was in the middle of an update that cannot be resumed.
  bool Kill() {
    EXPECT_EQ(node_->fault(), "");
    auto next = NodeHarness::AfterKill(*node_, options_);
    if (next == nullptr) return false;
    node_ = std::move(next);
    was_killed_ = true;
    return true;
  }

  // Disconnects the rank's client while up to `tasks` tasks finish, then reconnects it.
  void LoseClientOf(uint32_t rank, size_t tasks) {
    const uint64_t session = sessions_[rank];
    const std::vector<uint64_t> held = LeasesOf(session);
    node_->Disconnect(session);
    Resume(tasks);
    node_->Reconnect(session, View().weights_on_swap_bytes > 0 ? held : std::vector<uint64_t>());
    ASSERT_NE(node_->attached(session), nullptr);
    ASSERT_OK(node_->attached(session)->status);
  }

  // Bytes of the job's weights on swap. Attaches all ranks first if none is attached.
  uint64_t WeightsOnSwapBytes() {
    if (sessions_.empty()) AttachAll();
    return View().weights_on_swap_bytes;
  }
  daemon::JobView View() const { return *node_->FindJob("job"); }

  const JobCase with_;
  const daemon::NodeState::Options options_;
  const std::shared_ptr<const protocol::Layout> layout_;
  std::unique_ptr<NodeHarness> node_;
  std::vector<uint64_t> sessions_;
  uint64_t answered_ = 0;  // newest step whose answer every rank has received

 private:
  void FinishOldest() {
    const auto& [task, action] = *node_->model().running().begin();
    const bool fails = failing_ > 0 && std::holds_alternative<daemon::CommitLedger>(action);
    if (!fails) return node_->Finish(task);
    --failing_;
    node_->FailFlush();
  }

  int failing_ = 0;
  uint64_t OwnerOf(uint32_t partition) const {
    return sessions_[layout_->is_shared() ? 0 : layout_->partitions()[partition].owner];
  }
  void Begin() {
    is_decided_ = false;
    calls_.clear();
    to_do_.clear();
    fetches_.clear();
    waits_for_fetches_ = false;
    const uint64_t step = answered_ + 1;
    const auto partitions = static_cast<uint32_t>(layout_->partitions().size());
    for (uint32_t i = 0; i < partitions; ++i) {
      to_do_.push_back([=, this] {
        fetches_.push_back({OwnerOf(i), i, node_->Fetch(OwnerOf(i), i)});
      });
    }
    for (const uint64_t session : sessions_) {
      if (with_.early_updates) to_do_.push_back([=, this] { node_->Announce(session, step); });
    }
    AddBackward(step);
    if (with_.several_passes) {
      for (const uint64_t session : sessions_) {
        to_do_.push_back([=, this] { node_->BeginPass(session); });
      }
      AddBackward(step);
      for (const uint64_t session : sessions_) {
        to_do_.push_back([=, this] { node_->EndPasses(session); });
      }
    }
    to_do_.push_back([this] { waits_for_fetches_ = true; });
    for (const uint64_t session : sessions_) {
      to_do_.push_back([=, this] { Call(session, step); });
    }
  }
  void AddBackward(uint64_t step) {
    for (auto i = static_cast<uint32_t>(layout_->partitions().size()); i-- > 0;) {
      for (const uint64_t session : sessions_) {
        if (!layout_->is_shared() && session != OwnerOf(i)) continue;
        to_do_.push_back([=, this] { node_->Gradient(session, i, step); });
      }
    }
  }
  // Leases that the client of a session has received and not released.
  std::vector<uint64_t> LeasesOf(uint64_t session) const {
    std::vector<uint64_t> leases;
    for (const Fetch& fetch : fetches_) {
      if (fetch.session != session || node_->IsUnheard(fetch.tag)) continue;
      const daemon::AnswerCommand* answer = node_->answer(fetch.tag);
      if (answer != nullptr) leases.push_back(answer->completion.lease_id);
    }
    return leases;
  }
  // Releases the leases of answered fetches. No lease is held at a step call.
  void ReleaseAnswered() {
    std::erase_if(fetches_, [this](const Fetch& fetch) {
      const daemon::AnswerCommand* answer = node_->answer(fetch.tag);
      const bool is_held =
          holds_first_group_ && fetch.partition < kCaseRanks && !waits_for_fetches_;
      if (answer == nullptr || is_held) return false;
      node_->Release(fetch.session, answer->completion.lease_id);
      return true;
    });
  }

  void Call(uint64_t session, uint64_t step) {
    calls_.push_back(node_->Step(session, step, 0.1, 0, /*extra_state_bytes=*/32));
  }
  // Sends the decision to commit. The summary of the other node is assumed to be equal to this node's.
  void Decide() {
    const protocol::StepSummary& own = node_->SummaryTo(sessions_[0]);
    protocol::StepSummary world = own;
    world.Merge(own);
    world.head.decision = protocol::StepDecision::kCommit;
    calls_.clear();
    for (const uint64_t session : sessions_) calls_.push_back(node_->Decide(session, world));
  }

  bool is_decided_ = false;
  bool was_killed_ = false;
  uint64_t turn_ = 0;
  bool waits_for_fetches_ = false;
  std::vector<std::function<void()>> to_do_;
  std::vector<uint64_t> calls_;
  struct Fetch {
    uint64_t session;
    uint32_t partition;
    uint64_t tag;
  };
  std::vector<Fetch> fetches_;
  bool holds_first_group_ = false;
};

}  // namespace forebay::testing
