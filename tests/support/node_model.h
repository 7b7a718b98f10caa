// SPDX-License-Identifier: Apache-2.0
// A node without bytes: executes the state machine's actions on tokens, as careful as workers and
// disk have to be. Every task declares what it reads and writes; two that would race, a range
// outside its arena, a block that is not the one it should be, or a session closed under a task, is
// reported as a fault of the state machine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "nvme/slot_map.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::testing {

// A gradient of one rank, as it lies in an arena.
struct GradientToken {
  uint64_t session = 0;
  uint32_t rank = 0;
  uint32_t partition = 0;
  uint64_t begin = 0;  // elements of the partition
  uint64_t end = 0;
  uint64_t step = 0;
  uint64_t attempt = 0;  // raised by the client whenever it repeats a step
  uint16_t pass = 0;     // of its rank's, in the attempt
  bool finite = true;
};

// A block of states: whose, and of which step.
struct BlockToken {
  uint64_t job = 0;
  uint64_t block = 0;
  uint64_t written_step = 0;
  uint64_t checksum = 0;

  bool operator==(const BlockToken&) const = default;
};

// Of a block with these bytes.
BlockToken TokenOf(const daemon::BlockIdentity& identity, uint64_t checksum);
// Of the plane of weights behind the states of a block; null: it has none.
daemon::WeightsDigests DigestsOf(uint64_t checksum, const protocol::LayoutSpec& spec,
                                 uint64_t states_elems, uint64_t block_bytes);

class NodeModel {
 public:
  using TaskMap = std::map<daemon::TaskId, daemon::Action>;

  // Executes one action: what has a TaskId waits in running() until Finish.
  void Execute(const daemon::Action& action);
  // Ends a task and gives the event that reports it. With a status that is not OK nothing has
  // happened, but a failed write has destroyed what was in its slot. A commit with such a status is one whose flush of the
  // data has failed: a power cut may take all that was written since the last one, whatever is flushed later, until it is
  // written again. A ledger that names some of it is refused.
  daemon::TaskDone Finish(daemon::TaskId task, const absl::Status& status = absl::OkStatus());

  const TaskMap& running() const { return running_; }
  // What was wrong so far; empty while the state machine is well.
  const std::string& fault() const { return fault_; }

  // Clients.
  void PutGradient(uint64_t session, uint64_t offset_bytes, const GradientToken& token);
  void DropGradient(uint64_t session,
                    uint64_t offset_bytes);  // its bytes are used for other things
  enum class SumsAre : uint8_t { kInPlace, kPaged };
  void AddJob(uint64_t job, std::shared_ptr<const protocol::Layout> layout,
              SumsAre sums = SumsAre::kInPlace);
  void BindSession(uint64_t session, uint64_t job) { sessions_[session].job = job; }
  // A reader's leases: no update may write those weights until it releases them, ends, or its time
  // is over.
  void HoldWeights(uint64_t session, const protocol::Completion& fetched);
  void ReleaseWeights(uint64_t session, uint64_t lease);
  void ReleaseWeights(uint64_t session);
  void ReleaseWeightsOfJob(uint64_t job);
  // What a fetch of a partition was answered with: weights that are copied from swap are those of its blocks'
  // newest versions.
  void CheckFetched(uint64_t session, uint32_t partition, const protocol::Completion& fetched);
  void set_masters_overflow(uint64_t count) { masters_overflow_ = count; }

  // What was added to the accumulators that the last committed step of a job has used, by parameter;
  // of a sharded one, its partitions' in their order.
  using Gradients = std::map<uint32_t, std::vector<GradientToken>>;
  const Gradients& committed_gradients(uint64_t job) { return jobs_[job].committed; }
  uint64_t committed_step(uint64_t job) { return jobs_[job].committed_step; }

  // The ledger that is durable. What the next node finds when this one dies now: that ledger, and what is in slots,
  // but for those that are being written.
  const daemon::DurableNode& durable() const { return durable_; }
  NodeModel Restarted() const;
  // The same after a power cut: of what was written since the last flush each slot holds that, or what it held before,
  // or nothing whole, in any order. A ledger that is being committed is durable, or its data are, or neither.
  NodeModel AfterPowerCut(std::mt19937_64& random) const;
  // The device has dropped what a failed flush should have covered: reads show it.
  void LoseDoubted();
  // What the next node finds when this one has handed these jobs over: their arenas too.
  NodeModel HandedOver(const daemon::DurableNode& node);
  // The same where it was killed; with what tasks had begun, of which nobody knows how far they came.
  NodeModel Killed(const daemon::DurableNode& node);
  // What a record says of a job that could go on from it: its published step, and where the blocks of that are; in the
  // middle of an update, what was written of the next one.
  void CheckRecord(const daemon::DurableJob& record);
  // Steps of the published blocks of a job, and of those in DRAM.
  std::map<uint64_t, uint64_t> WrittenSteps(uint64_t job);
  bool has_session_arena(uint64_t session) { return sessions_[session].bytes > 0; }
  // Memory of a job's state arena.
  uint64_t StateBytes(uint64_t job);
  // Its step is decided, and not published.
  bool is_updating(uint64_t job) const { return jobs_.at(job).is_updating; }
  bool has_job(uint64_t job) const { return jobs_.contains(job); }

 private:
  // A run of bytes in one memory, that a task reads or writes.
  struct Use {
    std::string memory;
    uint64_t offset_bytes = 0;
    uint64_t bytes = 0;
    bool writes = false;
  };
  static Use DiskUse(const nvme::Slot& slot, uint64_t bytes, bool writes) {
    return {absl::StrCat("disk ", slot.path), slot.offset_bytes, bytes, writes};
  }
  // By partition and unit of kGradUnitElems.
  using Accumulators = std::map<std::pair<uint32_t, uint64_t>, std::vector<GradientToken>>;
  // Bytes that a LoadWeights has copied to the weights arena.
  struct LoadedRange {
    uint64_t bytes = 0;
    uint32_t partition = 0;
    BlockToken block;
  };
  // What an update of a block has used; one that was dropped has used nothing.
  struct BlockUpdate {
    std::map<uint32_t, uint64_t> elems;  // by parameter
    // By parameter and partition.
    std::map<std::pair<uint32_t, uint32_t>, std::vector<GradientToken>> used;
    std::map<uint64_t, uint64_t> to_install;  // new weights in the step arena: offset to bytes

    bool HasPartition(uint32_t partition) const {
      return std::ranges::any_of(
          used, [partition](const auto& entry) { return entry.first.second == partition; });
    }
  };
  struct ElemPlace {
    uint32_t partition = 0;
    uint64_t elem = 0;

    bool operator==(const ElemPlace&) const = default;
  };
  // A unit of elements, or the rest of a partition: of sums that are paged.
  struct PagedSum {
    ElemPlace place;
    uint64_t bytes = 0;
    std::vector<GradientToken> tokens;
  };
  struct Spilled {
    uint64_t checksum = 0;
    uint64_t page = 0;
    std::map<uint64_t, PagedSum> sums;  // by offset in the page
  };
  struct SumUnit {
    ElemPlace place;
    std::vector<GradientToken> tokens;
  };
  struct JobMemory {
    std::shared_ptr<const protocol::Layout> layout;
    bool has_paged_sums = false;
    std::map<uint64_t, PagedSum> paged;  // by offset in the step arena
    std::map<nvme::Slot, Spilled> spilled;
    uint64_t weights_bytes = 0;
    // Of the state arena, that have memory: offset to bytes.
    std::map<uint64_t, uint64_t> state_parts;
    uint64_t step_bytes = 0;
    uint64_t float_sums_offset = UINT64_MAX;  // behind it, once they have memory
    uint64_t float_sums_end = 0;
    std::set<nvme::Slot> slots;
    uint64_t committed_step = 0;
    bool has_published = false;                  // step 0, where it sets masters, or a later one
    std::map<uint64_t, GradientToken> overflow;  // by offset in the step arena
    Accumulators accumulators;
    Accumulators float_sums;                   // instead, from when they are used
    std::map<uint64_t, nvme::Slot> early;      // by block, of a step that is not decided
    std::map<uint64_t, nvme::Slot> written;    // by block, in this step
    std::map<uint64_t, nvme::Slot> published;  // by block
    std::map<uint64_t, LoadedRange> loaded;    // by offset in the weights arena
    std::set<uint32_t> loaded_partitions;      // ever
    std::set<uint64_t> masters_set;            // staged blocks that are to be written
    std::map<uint64_t, BlockToken> resident;   // by offset in the state arena
    std::map<uint64_t, BlockUpdate> updates;   // by block, in this step
    bool is_updating = false;                  // it is decided
    Gradients committed;
    // By step: the steps in which the published blocks were written.
    std::map<uint64_t, std::map<uint64_t, uint64_t>> history;
    // Weights in the arena, by offset: how many bytes, and the last step that has written them.
    std::map<uint64_t, std::pair<uint64_t, uint64_t>> weights_steps;

    bool HasBlockIn(const nvme::Slot& slot) const {
      const auto is_slot = [&slot](const auto& entry) { return entry.second == slot; };
      return std::ranges::any_of(written, is_slot) || std::ranges::any_of(published, is_slot) ||
             std::ranges::any_of(early, is_slot);
    }
  };
  struct SessionMemory {
    uint64_t job = 0;
    uint64_t bytes = 0;
    std::map<uint64_t, GradientToken> gradients;  // by offset
  };

  struct Held {
    uint64_t session = 0;
    uint64_t job = 0;
    uint64_t offset_bytes = 0;
    uint64_t bytes = 0;
  };

  void Fault(const std::string& what);
  void AddStateMemory(uint64_t job, const daemon::StatePart& part);
  void FreeStateMemory(uint64_t job, uint64_t offset_bytes, uint64_t bytes);
  void CheckKept(const JobMemory& job, const daemon::StatePart& part);
  void CheckResident(const BlockToken& block, const daemon::BlockIdentity& identity);
  void CheckHeld(const daemon::UpdateBlock& update);
  void CheckHeld(uint64_t job, uint64_t weights_offset_bytes, uint64_t bytes);
  void CheckBounds(const Use& use);
  uint64_t SizeOf(const std::string& memory);
  void CheckSlot(uint64_t job, const daemon::BlockPlace& place, bool writes);
  std::vector<Use> UsesOf(const daemon::Action& action);
  Use GradUse(uint64_t session, uint64_t offset, uint64_t bytes, bool writes) const;
  Use StepUse(uint64_t job, uint64_t offset, uint64_t bytes, bool writes) const;
  Use StateUse(uint64_t job, const daemon::BlockPlace& place, uint64_t bytes, bool writes) const;
  // Those that hold an offset of the step arena.
  static Accumulators& AccumulatorsAt(JobMemory& job, uint64_t offset_bytes);
  // The element at an offset of the accumulators, which lie side by side.
  static ElemPlace AccumulatorAt(const JobMemory& job, protocol::DType sum_dtype,
                                 uint64_t offset_bytes);
  // The contribution whose bytes lie at an offset of a session's arena or of the overflow.
  static GradientToken TokenAt(const std::map<uint64_t, GradientToken>& tokens, uint64_t width,
                               uint64_t offset_bytes);
  // The element at an offset of the weights, in which owners lie side by side; of no partition: none.
  static std::optional<ElemPlace> WeightsAt(const JobMemory& job, uint64_t weights_offset_bytes);
  static const PagedSum* PagedSumAt(const JobMemory& job, uint64_t offset_bytes);
  static void ForgetPaged(JobMemory& job, uint64_t offset_bytes, uint64_t bytes);
  void AddPaged(JobMemory& job, const daemon::AddGradients& a,
                const std::vector<GradientToken>& tokens);
  std::vector<Use> PiecesOf(const daemon::UpdateBlock& a, const daemon::UpdateSegment& segment);
  void AddSumUses(const daemon::UpdateBlock& a, const daemon::UpdateSegment& segment,
                  std::vector<Use>& uses);
  std::vector<SumUnit> UnitsOf(JobMemory& job, const daemon::UpdateBlock& a,
                               const daemon::UpdateSegment& segment);
  void CheckElems(const JobMemory& job, const daemon::UpdateSegment& segment,
                  const ElemPlace& place);

  void Apply(const daemon::CreateJobMemory& a, daemon::TaskDone& done);
  void Apply(const daemon::CreateJobSwap& a, daemon::TaskDone& done);
  void Apply(const daemon::ReplaceStepArena& a, daemon::TaskDone& done);
  void Apply(const daemon::PopulateStepArena& a, daemon::TaskDone& done);
  void Apply(const daemon::CreateSessionMemory& a, daemon::TaskDone& done);
  void Apply(const daemon::CopyInitial& a, daemon::TaskDone& done);
  void Apply(const daemon::CopyToStepArena& a, daemon::TaskDone& done);
  void Apply(const daemon::AddGradients& a, daemon::TaskDone& done);
  void Apply(const daemon::SumGradient& a, daemon::TaskDone& done);
  void Apply(const daemon::ReadBlock& a, daemon::TaskDone& done);
  void Apply(const daemon::UpdateBlock& a, daemon::TaskDone& done);
  void Apply(const daemon::WriteBlock& a, daemon::TaskDone& done);
  void Apply(const daemon::DecodeState& a, daemon::TaskDone& done);
  void Apply(const daemon::SetState& a, daemon::TaskDone& done);
  void Apply(const daemon::LoadWeights& a, daemon::TaskDone& done);
  void Apply(const daemon::SpillSums& a, daemon::TaskDone& done);
  void Apply(const daemon::LoadSums& a, daemon::TaskDone& done);
  void Apply(const daemon::EvictBlock& a, daemon::TaskDone& done);
  void Apply(const daemon::PromoteBlock& a, daemon::TaskDone& done);
  void Apply(const daemon::SavePart& a, daemon::TaskDone& done);
  void Apply(const daemon::RestorePart& a, daemon::TaskDone& done);
  void Apply(const daemon::KeepExtraStates& a, daemon::TaskDone& done);
  void Apply(const daemon::RestoreExtraStates& a, daemon::TaskDone& done);
  void Apply(const daemon::DigestWeights& a, daemon::TaskDone& done);
  void Apply(const daemon::CommitLedger& a, daemon::TaskDone& done);
  void SetDurable(const daemon::DurableNode& node);
  void Write(const nvme::Slot& slot, const BlockToken& token);
  void BeginFlush();
  void FailFlush(daemon::TaskDone& done);
  bool NamesDoubted(const daemon::CommitLedger& a) const;
  void CheckDurable(const daemon::DurableJob& job);
  void Recover(const daemon::DurableJob& job);
  // Another daemon has updated the block in this step.
  bool IsDone(const daemon::UpdateBlock& a);
  void CheckKeptUpdate(const JobMemory& job, const daemon::KeptUpdate& update);
  NodeModel GoOn(const daemon::DurableNode& node);
  static BlockToken WeightsToken(const daemon::BlockIdentity& identity, uint64_t checksum);
  template <typename Other>
  void Apply(const Other&, daemon::TaskDone&) {
    Fault("an action without a task was finished");
  }
  void Apply(const daemon::InstallWeights& a, daemon::TaskDone& done);
  void Dropped(const daemon::EarlyUpdatesDropped& a);
  void Published(const daemon::StepPublished& a);
  static void Merge(const BlockUpdate& update, BlockUpdate& all);

  TaskMap running_;
  std::map<daemon::TaskId, std::vector<Use>> uses_;
  std::map<uint64_t, JobMemory> jobs_;
  std::map<uint64_t, SessionMemory> sessions_;
  std::map<uint32_t, BlockToken> staging_;  // by slot
  std::map<nvme::Slot, BlockToken> disk_;   // of all jobs; a failed write leaves anything
  std::map<uint64_t, Held> held_;           // by lease
  // Of each slot that was written since the last flush, and of those that the commit that runs flushes: what it held
  // before, oldest first.
  std::map<nvme::Slot, std::vector<BlockToken>> unflushed_;
  std::map<nvme::Slot, std::vector<BlockToken>> flushing_;
  std::map<nvme::Slot, std::vector<BlockToken>> doubted_;  // the same, once a flush has failed
  // Copies of blocks in DRAM, by slot: as those were.
  std::map<nvme::Slot, BlockToken> copies_;
  daemon::DurableNode durable_;
  std::set<nvme::Slot> durable_slots_;         // that it names
  std::set<nvme::Slot> durable_slots_before_;  // that the one before it named
  std::set<uint64_t> closed_;
  std::set<daemon::TaskId> dropped_;  // updates and writes that run in vain
  std::string fault_;
  uint64_t masters_overflow_ = 0;
  uint64_t checksums_ = 0;
};

}  // namespace forebay::testing
