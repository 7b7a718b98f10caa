// SPDX-License-Identifier: Apache-2.0
// Goal    Whatever three jobs, their readers, their deaths, bad words and failing disks do, in any order,
//         and however blocks move between DRAM and swap and off failing paths: invariants hold after each event, each
//         committed step has used exactly what its ranks had delivered, by passes and ranks, and has updated
//         each block once; a block is in one place, and the DRAM of states is what jobs account for;
//         nothing of a step is published before all of it is written, however many writes fail; a
//         step never waits for the readers of another job; when the faults end, every client trains
//         on, for jobs make room for each other. Equal seeds give equal traces.
// Method  The production state machine with a model of workers and disk that ends tasks in random
//         order. 10^5 events from a printed seed, run twice; then a quiet phase. FOREBAY_SEED
//         chooses another seed.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "daemon/core/node/node_state.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/kept_records.h"
#include "tests/support/node_harness.h"
#include "tests/support/node_model.h"
#include "tests/support/sanitized.h"
#include "tests/support/simulated_reader.h"
#include "tests/support/simulated_trainer.h"

namespace forebay::daemon::simulation_property_test {
namespace {

using ::forebay::testing::KeptRecords;
using ::forebay::testing::MakeLayoutOfParams;
using ::forebay::testing::NodeModel;
using ::forebay::testing::SimulatedReader;
using ::forebay::testing::SimulatedTrainer;
using ::forebay::testing::SimulationRandom;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;

constexpr uint64_t kChaosEvents = 100000;
constexpr uint64_t kEventsBetweenReads = 400;
constexpr uint64_t kQuietEventsMax = 50000;
constexpr uint64_t kQuietCommits = 5;
constexpr protocol::Durability kStep{.level = protocol::DurabilityLevel::kStep, .steps = 1};
constexpr protocol::Durability kEpoch{.level = protocol::DurabilityLevel::kEpoch, .steps = 2};

// FNV-1a over words.
class TraceHash {
 public:
  void Add(uint64_t word) {
    for (int byte = 0; byte < 8; ++byte) {
      hash_ = (hash_ ^ ((word >> (8 * byte)) & 0xff)) * 0x100000001b3;
    }
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

// Hashes the fields of an action as words.
struct Words {
  TraceHash& hash;
  void operator()(const CreateJobMemory& a) const { Put({a.task, a.job, a.state_bytes}); }
  void operator()(const CreateJobSwap& a) const { Put({a.task, a.job, a.slots.size()}); }
  void operator()(const ReplaceStepArena& a) const { Put({a.task, a.job, a.step_bytes}); }
  void operator()(const PopulateStepArena& a) const { Put({a.task, a.job, a.bytes}); }
  void operator()(const CreateSessionMemory& a) const { Put({a.task, a.session, a.grad_bytes}); }
  void operator()(const AnswerAttach& a) const { Put({a.session, Id(a.status), a.committed_step}); }
  void operator()(const AnswerCommand& a) const {
    Put({a.session, a.completion.tag, a.completion.error, a.completion.committed_step,
         a.completion.lease_id});
  }
  void operator()(const CloseSession& a) const { Put({a.session, Id(a.reason)}); }
  void operator()(const FreeJob& a) const { Put({a.job}); }
  void operator()(const AnswerDelete& a) const { Put({a.request, Id(a.status)}); }
  void operator()(const CopyStepRequest& a) const { Put({a.session, a.tag}); }
  void operator()(const WriteSummary& a) const { Put({a.session, a.bytes.size()}); }
  void operator()(const CopySummary& a) const { Put({a.session, a.tag}); }
  void operator()(const CopyInitial& a) const { Put({a.task, a.session, a.weights_offset_bytes}); }
  void operator()(const CopyToStepArena& a) const { Put({a.task, a.session, a.step_offset_bytes}); }
  void operator()(const AddGradients& a) const {
    Put({a.task, a.sources.size(), a.accumulator_offset_bytes, a.elems, a.assign ? 1U : 0U});
    for (const GradientSource& source : a.sources) Put({source.session, source.offset_bytes});
  }
  void operator()(const SumGradient& a) const { Put({a.task, a.accumulator_offset_bytes}); }
  void operator()(const ReadBlock& a) const { Put({a.task, a.block, a.place.staging_slot}); }
  void operator()(const UpdateBlock& a) const {
    Put({a.task, a.identity_after.block, a.identity_after.written_step, a.segments.size()});
  }
  void operator()(const InstallWeights& a) const { Put({a.task, a.block, a.copies.size()}); }
  void operator()(const EarlyUpdatesDropped& a) const { Put({a.job, a.blocks.size()}); }
  void operator()(const WriteBlock& a) const {
    Put({a.task, a.place.slot->path, a.place.slot->offset_bytes, a.checksum});
  }
  void operator()(const DecodeState& a) const {
    Put({a.task, a.session, a.identity.block, a.elems});
  }
  void operator()(const SetState& a) const { Put({a.task, a.session, a.state, a.elems}); }
  void operator()(const LoadWeights& a) const { Put({a.task, a.partition, a.block, a.bytes}); }
  void operator()(const EvictBlock& a) const {
    Put({a.task, a.identity.block, a.place.slot->path, a.place.slot->offset_bytes});
  }
  void operator()(const PromoteBlock& a) const { Put({a.task, a.identity.block, a.checksum}); }
  void operator()(const SpillSums& a) const {
    Put({a.task, a.identity.block, a.slot.offset_bytes});
  }
  void operator()(const LoadSums& a) const { Put({a.task, a.identity.block, a.checksum}); }
  void operator()(const SavePart& a) const { Put({a.task, a.identity.block, a.slot.offset_bytes}); }
  void operator()(const RestorePart& a) const { Put({a.task, a.identity.block, a.checksum}); }
  void operator()(const KeepExtraStates& a) const { Put({a.task, a.parts.size()}); }
  void operator()(const RestoreExtraStates& a) const { Put({a.task, a.offsets_bytes.size()}); }
  void operator()(const DigestWeights& a) const { Put({a.task, a.offset_bytes, a.bytes}); }
  void operator()(const CommitLedger& a) const {
    Put({a.task, a.node->jobs.size(), a.pause ? 1U : 0U});
    for (const auto& job : a.node->jobs) Put({job->id, job->step, job->slots()});
  }
  void operator()(const RoomAwaited& a) const { Put({a.missing_bytes, a.evicting_jobs.size()}); }
  void operator()(const StartLeaseTimer& a) const { Put({a.job, a.step}); }
  void operator()(const StepCalled& a) const { Put({a.job, a.step}); }
  void operator()(const StepCommitted& a) const { Put({a.job, a.step}); }
  void operator()(const StepPublished& a) const { Put({a.job, a.step}); }
  void operator()(const JobsStopped& a) const { Put({a.jobs.size(), a.sessions.size()}); }
  void operator()(const RecordJob& a) const { Put({a.job->id, a.job->step}); }
  void operator()(const RecordBlock& a) const { Put({a.job, a.block, a.checksum}); }
  void operator()(const RecordInstalled& a) const { Put({a.job, a.block}); }
  void operator()(const RecordStaged& a) const { Put({a.job, a.block, a.step, a.staging_slot}); }
  void operator()(const RecordSums& a) const { Put({a.job, a.page, a.step, a.checksum}); }
  void operator()(const RecordAttempt& a) const { Put({a.job, a.step, a.attempt}); }
  void operator()(const RecordPrepared& a) const { Put({a.job, a.step, a.attempt}); }
  void operator()(const RecordDecision& a) const { Put({a.job, a.step}); }
  void operator()(const RecordTrust& a) const { Put({a.job, a.step, a.trust.size()}); }
  void operator()(const RecordStep& a) const { Put({a.job, a.step, a.overflowed}); }
  void operator()(const RecordUpdates& a) const { Put({a.job, a.param, a.updates}); }
  void operator()(const RecordLease& a) const { Put({a.job, a.lease.lease, a.lease.offset_bytes}); }
  void operator()(const RecordLeaseEnd& a) const { Put({a.job, a.lease}); }
  void operator()(const UpdateNotResumed& a) const { Put({a.step}); }
  void operator()(const JobWentBack& a) const { Put({a.from_step, a.to_step}); }
  void operator()(const DropRecord& a) const { Put({a.job}); }
  void operator()(const SwapPathMarked& a) const { Put({a.path, a.marked ? 1U : 0U}); }

  static uint64_t Id(const absl::Status& status) {
    return static_cast<uint64_t>(protocol::IdOf(status));
  }
  void Put(std::initializer_list<uint64_t> words) const {
    for (const uint64_t word : words) hash.Add(word);
  }
};

NodeState::Options TightOptions() {
  return {.dram_limit_bytes = 1852 << 10,  // Fits three jobs and records, but few blocks.
          .node_bytes = 3 * 12288,
          .staging_slots = 3,
          .staging_slot_bytes = 12288,  // three planes of a page
          .swap = SwapPaths({32 << 20, 32 << 20}),
          .keeps_jobs = true,
          .block_elems = 512,
          .workers = 2};
}

class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed), state_(TightOptions()) {
    const SimulatedTrainer::Wires wires{.send = [this](const Event& event) { Send(event); },
                                        .new_session = [this] { return ++last_session_; },
                                        .new_tag = [this] { return ++last_tag_; },
                                        .model = &model_};
    using Groups = std::vector<std::vector<uint64_t>>;
    layouts_ = {
        {"alpha", MakeLayoutOfParams(Groups{{300}, {5000, 20, 4000}, {64}, {9000, 3000}, {512}})},
        // "beta" has masters, which are set before the first step.
        {"beta", MakeLayoutOfParams(Groups{{400, 5000}, {90}}, protocol::DType::kBFloat16)},
        {"gamma", MakeLayoutOfParams(Groups{{2000, 70}, {600}})}};
    trainers_.emplace_back("alpha", SimulatedTrainer::Rank{0, 2, kEpoch}, layouts_["alpha"], wires);
    trainers_.emplace_back("alpha", SimulatedTrainer::Rank{1, 2, kEpoch}, layouts_["alpha"], wires);
    trainers_.emplace_back("beta", SimulatedTrainer::Rank{0, 1, {}}, layouts_["beta"], wires);
    trainers_.emplace_back("gamma", SimulatedTrainer::Rank{0, 1, kStep}, layouts_["gamma"], wires);
    readers_.emplace_back("alpha", layouts_["alpha"], wires);
    readers_.emplace_back("alpha", layouts_["alpha"], wires);
    readers_.emplace_back("beta", layouts_["beta"], wires);
  }

  void RunChaos(uint64_t events = kChaosEvents) {
    while (events_ < events && fault().empty()) Turn(/*chaos=*/true);
  }

  // Injects no more faults, and expects that every client commits further steps. Returns true if every client does.
  bool RunQuiet() {
    FreeWeightsInUse();
    while (!kept_slots_.empty()) ReturnSlot();
    std::vector<uint64_t> goals;
    for (const SimulatedTrainer& trainer : trainers_) {
      goals.push_back(trainer.commits_seen() + kQuietCommits);
    }
    const uint64_t end = events_ + kQuietEventsMax;
    while (events_ < end && fault().empty()) {
      Turn(/*chaos=*/false);
      bool reached = true;
      for (size_t i = 0; i < trainers_.size(); ++i) {
        reached = reached && trainers_[i].commits_seen() >= goals[i];
      }
      if (reached) return true;
    }
    return false;
  }

  std::string fault() const {
    if (!model_.fault().empty()) return model_.fault();
    if (!fault_.empty()) return fault_;
    for (const SimulatedTrainer& trainer : trainers_) {
      if (!trainer.fault().empty()) return trainer.fault();
    }
    for (const SimulatedReader& reader : readers_) {
      if (!reader.fault().empty()) return reader.fault();
    }
    return {};
  }
  uint64_t hash() const { return hash_.value(); }
  uint64_t events() const { return events_; }
  uint64_t commits() const { return commits_; }
  uint64_t failures() const { return io_errors_; }
  uint64_t failed_writes() const { return failed_writes_; }
  uint64_t failed_saves() const { return failed_saves_; }
  uint64_t ledgers() const { return ledgers_; }
  uint64_t records_read() const { return records_read_; }
  uint64_t slots_kept() const { return slots_kept_; }
  uint64_t evictions() const { return evictions_; }
  uint64_t promotions() const { return promotions_; }
  // Early updates that a decision has accepted.
  uint64_t early_updates() const { return early_updates_; }
  uint64_t early_updates_dropped() const { return early_updates_dropped_; }
  uint64_t failed_moves() const { return failed_moves_; }
  uint64_t relocations() const {
    uint64_t relocations = 0;
    for (const auto& [job, count] : relocated_) relocations += count;
    return relocations;
  }
  uint64_t waited_for_room() const { return waited_for_room_; }
  uint64_t commits_beside_leases() const { return commits_beside_leases_; }
  uint64_t fetches_of_readers() const {
    uint64_t fetches = 0;
    for (const SimulatedReader& reader : readers_) fetches += reader.fetches();
    return fetches;
  }
  uint64_t expired_readers() const {
    uint64_t expired = 0;
    for (const SimulatedReader& reader : readers_) expired += reader.expired();
    return expired;
  }
  std::set<uint32_t> errors() const {
    std::set<uint32_t> ids;
    for (const SimulatedTrainer& trainer : trainers_) {
      for (const auto& [id, count] : trainer.errors()) ids.insert(id);
    }
    for (const SimulatedReader& reader : readers_) {
      for (const auto& [id, count] : reader.errors()) ids.insert(id);
    }
    return ids;
  }
  const NodeState& state() const { return state_; }

 private:
  void Turn(bool chaos) {
    const auto& running = model_.running();
    if (!running.empty() && random_.Below(10) < 6) {
      auto it = running.begin();
      std::advance(it, static_cast<int64_t>(random_.Below(running.size())));
      FinishTask(it->first, it->second, chaos);
    } else if (random_.OneIn(100)) {
      DeleteSomething();
    } else if (random_.OneIn(30)) {
      MoveSomething();
    } else if (!kept_slots_.empty() && random_.OneIn(300)) {
      ReturnSlot();
    } else if (!lease_timers_.empty() && random_.OneIn(100)) {
      const LeaseTimeExpired expired = lease_timers_.front();
      lease_timers_.erase(lease_timers_.begin());
      model_.ReleaseWeightsOfJob(expired.job);
      Send(expired);
    } else if (random_.OneIn(4)) {
      readers_[random_.Below(readers_.size())].Act(random_, chaos);
    } else {
      trainers_[random_.Below(trainers_.size())].Act(random_, chaos);
    }
  }

  void FinishTask(TaskId task, const Action& action, bool chaos) {
    const bool may_fail = std::holds_alternative<ReadBlock>(action) ||
                          std::holds_alternative<UpdateBlock>(action) ||
                          std::holds_alternative<DecodeState>(action) ||
                          std::holds_alternative<CreateJobSwap>(action) ||
                          std::holds_alternative<CreateSessionMemory>(action) ||
                          std::holds_alternative<PromoteBlock>(action);
    const auto* evict = std::get_if<EvictBlock>(&action);
    const bool moves = evict != nullptr || std::holds_alternative<PromoteBlock>(action);
    if (chaos && random_.OneIn(2000)) down_path_ = static_cast<uint32_t>(random_.Below(2));
    if (!chaos || random_.OneIn(200)) down_path_.reset();
    const auto* write = std::get_if<WriteBlock>(&action);
    const auto* save = std::get_if<SavePart>(&action);
    const bool saves = save != nullptr || std::holds_alternative<CommitLedger>(action);
    const bool is_down = save != nullptr && save->slot.path == down_path_;
    if (saves && (is_down || (chaos && random_.OneIn(50)))) {
      ++failed_saves_;
      Send(model_.Finish(task, protocol::MakeError(ErrorId::kSwapIo, "simulated save")));
      return;
    }
    if (std::holds_alternative<CommitLedger>(action)) ++ledgers_;
    const BlockPlace* const written =
        write != nullptr ? &write->place : (evict != nullptr ? &evict->place : nullptr);
    if (written != nullptr && (written->slot->path == down_path_ || (chaos && random_.OneIn(50)))) {
      ++(moves ? failed_moves_ : failed_writes_);
      Send(model_.Finish(task, protocol::MakeError(ErrorId::kSwapIo, "simulated write")));
      return;
    }
    if (chaos && may_fail && random_.OneIn(moves ? 50 : 2000)) {
      ++(moves ? failed_moves_ : io_errors_);
      if (const auto* read = std::get_if<ReadBlock>(&action)) KeepSlot(read->place.staging_slot);
      Send(model_.Finish(task, protocol::MakeError(ErrorId::kSwapIo, "simulated")));
      return;
    }
    if (moves) ++(evict != nullptr ? evictions_ : promotions_);
    if (chaos && random_.OneIn(500)) model_.set_masters_overflow(1);
    // Reads and writes on one of the two paths are slower. The slower path changes now and then.
    const auto* read = std::get_if<ReadBlock>(&action);
    const BlockPlace* const place = read != nullptr ? &read->place : written;
    const uint64_t took_ns =
        place == nullptr || !place->slot ? 0 : (place->slot->path == slower_path_ ? 4000 : 1000);
    if (random_.OneIn(5000)) slower_path_ = static_cast<uint32_t>(random_.Below(2));
    TaskDone done = model_.Finish(task);
    done.begin_ns = now_ns_;
    done.end_ns = now_ns_ += took_ns;
    Send(done);
  }

  // After a read was given up, the disk may still write to its staging slot. At least one slot is always usable.
  void KeepSlot(uint32_t slot) {
    if (kept_slots_.size() + 1 == TightOptions().staging_slots) return;
    kept_slots_.insert(slot);
    ++slots_kept_;
    Send(StagingSlotKept{.slot = slot});
  }
  void ReturnSlot() {
    Send(StagingSlotReturned{.slot = kept_slots_.extract(kept_slots_.begin()).value()});
  }

  // Requests the deletion of a job. A job with sessions is not deleted. Deletion is the cure for a failed job.
  void DeleteSomething() {
    FreeWeightsInUse();
    std::vector<std::string> names = {"alpha", "beta", "gamma"};
    for (const JobView& job : state_.Jobs()) {
      if (job.sessions.empty()) names = {job.name};
    }
    Send(DeleteJobRequested{
        .request = ++last_request_, .uid = 1000, .job = names[random_.Below(names.size())]});
  }

  // Requests a move of any block to the other tier. Now and then the block number does not exist.
  void MoveSomething() {
    const std::vector<JobView> jobs = state_.Jobs();
    if (jobs.empty()) return;
    for (const JobView& job : jobs) relocated_[job.id] = job.moves.relocated;
    const JobView& job = jobs[random_.Below(jobs.size())];
    Send(BlockMoveRequested{.job = job.id,
                            .block = static_cast<uint32_t>(random_.Below(job.blocks + 1))});
    CheckStateBytes();
  }

  // Checks the DRAM of states. A moving block counts before its memory is allocated, and until its memory is freed.
  void CheckStateBytes() {
    for (const JobView& job : state_.Jobs()) {
      if (model_.StateBytes(job.id) > job.resident_bytes && fault_.empty()) {
        fault_ = "a job has more states in DRAM than it accounts for";
      }
    }
  }

  // Processes that still had the weights of deleted jobs have unmapped them.
  void FreeWeightsInUse() {
    for (const JobId job : std::exchange(weights_in_use_, {})) Send(JobFreed{.job = job});
  }

  // A client may act on an answer at once: what it then sends waits for its turn.
  void Send(const Event& event) {
    queue_.push_back(event);
    if (sending_) return;
    sending_ = true;
    while (!queue_.empty()) {
      const Event next = queue_.front();
      queue_.erase(queue_.begin());
      ++events_;
      hash_.Add(next.index());
      std::vector<Action> actions;
      state_.Handle(next, actions);
      state_.CheckInvariants();
      is_attach_ = std::holds_alternative<AttachRequested>(next);
      // Events of copied step requests, which precede all other events.
      std::vector<Event> copied;
      for (const Action& action : actions) {
        hash_.Add(action.index());
        std::visit(Words{hash_}, action);
        Observe(action, copied);
        records_.Execute(action);
      }
      if (events_ % kEventsBetweenReads == 0) CheckRecords();
      queue_.insert(queue_.begin(), copied.begin(), copied.end());
    }
    sending_ = false;
    CheckStepsThatWait();
  }

  void CheckRecords() {
    for (const DurableJob& job : records_.Read()) {
      ++records_read_;
      model_.CheckRecord(job);
    }
  }

  // Checks, while no task runs, that a step called by all ranks waits only for readers of its own job.
  void CheckStepsThatWait() {
    if (!model_.running().empty()) return;
    for (const JobView& job : state_.Jobs()) {
      const auto waits = [&job](const SimulatedTrainer& trainer) {
        return trainer.job() != job.name || trainer.is_stepping();
      };
      const auto holds_up = [](const SessionView& session) {
        return session.reader && session.leases > 0;
      };
      if (std::ranges::all_of(trainers_, waits) && std::ranges::none_of(job.sessions, holds_up) &&
          fault_.empty()) {
        fault_ = "a step of job " + job.name + " waits, and no reader of the job holds it up";
      }
    }
  }

  void Observe(const Action& action, std::vector<Event>& copied) {
    if (const auto* memory = std::get_if<CreateJobMemory>(&action)) {
      if (!is_attach_) ++waited_for_room_;
      const std::string name = NameOf(memory->job);
      model_.AddJob(memory->job, layouts_.at(name));
    }
    if (const auto* attach = std::get_if<AnswerAttach>(&action)) {
      if (attach->status.ok()) model_.BindSession(attach->session, attach->job);
    }
    if (const auto* timer = std::get_if<StartLeaseTimer>(&action)) {
      lease_timers_.push_back({.job = timer->job, .step = timer->step});
      held_up_.insert(timer->job);
    }
    if (const auto* read = std::get_if<ReadBlock>(&action);
        read != nullptr && kept_slots_.contains(read->place.staging_slot) && fault_.empty()) {
      fault_ = "a block is read into a slot that the disk may still write to";
    }
    model_.Execute(action);
    for (SimulatedReader& reader : readers_) {
      if (const auto* attach = std::get_if<AnswerAttach>(&action)) {
        if (reader.OwnsSession(attach->session)) reader.OnAttach(*attach);
      } else if (const auto* answer = std::get_if<AnswerCommand>(&action)) {
        if (reader.OwnsSession(answer->session)) reader.OnAnswer(*answer);
      } else if (const auto* close = std::get_if<CloseSession>(&action)) {
        reader.OnClosed(*close);
      }
    }
    for (SimulatedTrainer& trainer : trainers_) {
      if (const auto* attach = std::get_if<AnswerAttach>(&action)) {
        if (trainer.OwnsSession(attach->session)) trainer.OnAttach(*attach);
      } else if (const auto* answer = std::get_if<AnswerCommand>(&action)) {
        if (trainer.OwnsSession(answer->session)) trainer.OnAnswer(*answer);
      } else if (const auto* close = std::get_if<CloseSession>(&action)) {
        if (trainer.OwnsSession(close->session)) trainer.OnClosed(close->session);
      } else if (const auto* copy = std::get_if<CopyStepRequest>(&action)) {
        if (trainer.OwnsSession(copy->session)) copied.push_back(trainer.StepRequestOf(*copy));
      } else if (const auto* committed = std::get_if<StepCommitted>(&action)) {
        if (NameOf(committed->job) == trainer.job()) trainer.OnCommitted();
      } else if (const auto* published = std::get_if<StepPublished>(&action)) {
        if (NameOf(published->job) == trainer.job()) CheckPublished(trainer, *published);
      }
    }
    if (const auto* published = std::get_if<StepPublished>(&action)) {
      ++commits_;
      held_up_.erase(published->job);
      if (!held_up_.empty()) ++commits_beside_leases_;
    }
    if (std::holds_alternative<InstallWeights>(action)) ++early_updates_;
    if (const auto* dropped = std::get_if<EarlyUpdatesDropped>(&action)) {
      early_updates_dropped_ += dropped->blocks.size();
    }
    if (const auto* freed = std::get_if<FreeJob>(&action)) {
      held_up_.erase(freed->job);
      const bool in_use = random_.OneIn(2);
      if (in_use) weights_in_use_.push_back(freed->job);
      copied.push_back(JobFreed{.job = freed->job, .weights_in_use = in_use});
    }
  }

  void CheckPublished(const SimulatedTrainer& trainer, const StepPublished& published) {
    if (published.step == 0) return;
    const NodeModel::Gradients& used = model_.committed_gradients(published.job);
    const std::string wrong = trainer.CheckPublished(published.step, used);
    if (fault_.empty()) fault_ = wrong;
    CheckPresence(trainer.job(), used);
    if (used.size() != layouts_.at(trainer.job())->params().size()) return;
    // Every parameter had a gradient, so that every block must be of this step.
    for (const auto& [block, step] : model_.WrittenSteps(published.job)) {
      if (step != published.step && fault_.empty()) fault_ = "a block was left behind";
    }
  }

  // If every rank waited in the step when it was decided, the updated parameters are exactly those for which any rank had a
  // gradient.
  void CheckPresence(const std::string& job, const NodeModel::Gradients& used) {
    std::set<uint32_t> present;
    for (const SimulatedTrainer& trainer : trainers_) {
      if (trainer.job() != job) continue;
      if (!trainer.has_committed()) return;
      for (uint32_t i = 0; i < layouts_.at(job)->params().size(); ++i) {
        if (trainer.had_gradient(i)) present.insert(i);
      }
    }
    std::set<uint32_t> updated;
    for (const auto& [param, tokens] : used) updated.insert(param);
    if (updated != present && fault_.empty()) fault_ = "other parameters were updated than had one";
  }

  std::string NameOf(JobId id) const {
    for (const JobView& job : state_.Jobs()) {
      if (job.id == id) return job.name;
    }
    return "freed";
  }

  SimulationRandom random_;
  NodeState state_;
  NodeModel model_;
  KeptRecords records_;
  uint64_t records_read_ = 0;
  std::map<std::string, std::shared_ptr<const protocol::Layout>> layouts_;
  std::vector<SimulatedTrainer> trainers_;
  std::vector<JobId> weights_in_use_;
  std::vector<SimulatedReader> readers_;
  std::vector<LeaseTimeExpired> lease_timers_;
  // Jobs with an unpublished step that began while readers had leases on its groups.
  std::set<JobId> held_up_;
  std::vector<Event> queue_;
  bool sending_ = false;
  TraceHash hash_;
  std::string fault_;
  uint64_t events_ = 0;
  uint64_t commits_ = 0;
  uint64_t io_errors_ = 0;
  // Swap path on which writes fail for a while. nullopt: no path.
  std::optional<uint32_t> down_path_;
  uint32_t slower_path_ = 0;
  uint64_t now_ns_ = 1;
  uint64_t failed_writes_ = 0;
  uint64_t failed_saves_ = 0;
  uint64_t ledgers_ = 0;  // Number of ledgers made durable.
  uint64_t slots_kept_ = 0;
  std::set<uint32_t> kept_slots_;
  uint64_t evictions_ = 0;
  uint64_t promotions_ = 0;
  uint64_t early_updates_ = 0;
  uint64_t early_updates_dropped_ = 0;
  uint64_t failed_moves_ = 0;
  std::map<JobId, uint64_t> relocated_;
  // Number of jobs that were created later than at their first attach.
  uint64_t waited_for_room_ = 0;
  uint64_t commits_beside_leases_ = 0;  // Commits while another job's step waited for readers.
  bool is_attach_ = false;
  uint64_t last_session_ = 0;
  uint64_t last_tag_ = 0;
  uint64_t last_request_ = 0;
};

uint64_t Seed() {
  const char* chosen = std::getenv("FOREBAY_SEED");
  return chosen != nullptr ? std::strtoull(chosen, nullptr, 10) : 20240607;
}

TEST(NodeStateSimulation, HoldsItsInvariantsAndTrainsOnAfterTheFaults) {
  const uint64_t seed = Seed();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Simulation first(seed);
  first.RunChaos();
  ASSERT_EQ(first.fault(), "") << "seed " << seed << ", event " << first.events();
  EXPECT_TRUE(first.RunQuiet()) << "seed " << seed << ": not every client trains on";
  ASSERT_EQ(first.fault(), "") << "seed " << seed << ", event " << first.events();
  EXPECT_GE(first.events(), kChaosEvents);
  EXPECT_GT(first.records_read(), 300U);
  std::printf(
      "%llu events, %llu commits, %llu failed tasks, %llu + %llu moves, %llu failed, %llu off "
      "marked paths, %llu waits, "
      "%llu fetches and %llu expiries of readers, %llu early updates and %llu in vain\n",
      static_cast<unsigned long long>(first.events()),
      static_cast<unsigned long long>(first.commits()),
      static_cast<unsigned long long>(first.failures()),
      static_cast<unsigned long long>(first.evictions()),
      static_cast<unsigned long long>(first.promotions()),
      static_cast<unsigned long long>(first.failed_moves()),
      static_cast<unsigned long long>(first.relocations()),
      static_cast<unsigned long long>(first.waited_for_room()),
      static_cast<unsigned long long>(first.fetches_of_readers()),
      static_cast<unsigned long long>(first.expired_readers()),
      static_cast<unsigned long long>(first.early_updates()),
      static_cast<unsigned long long>(first.early_updates_dropped()));

  // Each of these events must have happened often enough for the run to be useful.
  EXPECT_GT(first.commits(), 500U);
  EXPECT_GT(first.failures(), 5U);
  EXPECT_GT(first.slots_kept(), 3U);
  EXPECT_GT(first.failed_writes(), 100U);
  EXPECT_GT(first.failed_saves(), 10U);
  EXPECT_GT(first.ledgers(), 100U);
  EXPECT_GT(first.evictions(), 100U);
  EXPECT_GT(first.promotions(), 50U);
  EXPECT_GT(first.failed_moves(), 5U);
  EXPECT_GT(first.relocations(), 0U);
  EXPECT_GT(first.waited_for_room(), 0U);
  EXPECT_GT(first.commits_beside_leases(), 50U);
  EXPECT_GT(first.fetches_of_readers(), 500U);
  EXPECT_GT(first.expired_readers(), 5U);
  EXPECT_GT(first.early_updates(), 100U);
  EXPECT_GT(first.early_updates_dropped(), 100U);
  for (const ErrorId id : {ErrorId::kRankLost, ErrorId::kFenced, ErrorId::kRange, ErrorId::kLease,
                           ErrorId::kStep, ErrorId::kGradDropped, ErrorId::kNonfinite,
                           ErrorId::kOverflow, ErrorId::kJobFailed, ErrorId::kProtocol}) {
    EXPECT_TRUE(first.errors().contains(static_cast<uint32_t>(id))) << protocol::Info(id).name;
  }

  if (testing::kSanitized) return;  // The program without sanitizers has the same trace.
  Simulation second(seed);
  second.RunChaos();
  second.RunQuiet();
  EXPECT_EQ(first.hash(), second.hash());
  EXPECT_EQ(first.events(), second.events());
}

TEST(NodeStateSimulation, AnotherSeedIsAnotherTrace) {
  Simulation first(1);
  Simulation second(2);
  first.RunChaos(kChaosEvents / 10);
  second.RunChaos(kChaosEvents / 10);
  EXPECT_EQ(first.fault(), "");
  EXPECT_EQ(second.fault(), "");
  EXPECT_NE(first.hash(), second.hash());
}

}  // namespace
}  // namespace forebay::daemon::simulation_property_test
