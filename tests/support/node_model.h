// SPDX-License-Identifier: Apache-2.0
// A node without bytes: executes the state machine's actions on tokens that stand for bytes. Every task declares the ranges
// that it reads and writes. Reports these faults of the state machine: tasks that would race, a range outside its arena, a
// wrong block, a session closed while a task uses it.
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

// A gradient of one rank in an arena.
struct GradientToken {
  uint64_t session = 0;
  uint32_t rank = 0;
  uint32_t partition = 0;
  uint64_t begin = 0;  // elements in the partition
  uint64_t end = 0;
  uint64_t step = 0;
  uint64_t attempt = 0;  // raised by the client whenever it repeats a step
  uint16_t pass = 0;     // the rank's backward pass in the attempt
  bool finite = true;
};

// The contents of a block of states.
struct BlockToken {
  uint64_t job = 0;
  uint64_t block = 0;
  uint64_t written_step = 0;
  uint64_t checksum = 0;

  bool operator==(const BlockToken&) const = default;
};

// The token of a block with this identity and checksum.
BlockToken TokenOf(const daemon::BlockIdentity& identity, uint64_t checksum);
// Digests of the plane of weights behind the states of a block. Returns null if the block has no such plane.
daemon::WeightsDigests DigestsOf(uint64_t checksum, const protocol::LayoutSpec& spec,
                                 uint64_t states_elems, uint64_t block_bytes);

class NodeModel {
 public:
  using TaskMap = std::map<daemon::TaskId, daemon::Action>;

  // Executes one action. An action with a TaskId is added to running() until Finish().
  void Execute(const daemon::Action& action);
  // Ends a task and returns the event that reports its end. With a status that is not OK the task has had no effect, except
  // that a failed write has destroyed the contents of its slot. A commit with such a status has failed to flush the data: a
  // power cut may lose all data written since the last flush, even after later flushes, until the data are written again. A
  // ledger that names such data is refused.
  daemon::TaskDone Finish(daemon::TaskId task, const absl::Status& status = absl::OkStatus());

  const TaskMap& running() const { return running_; }
  // Faults of the state machine found so far; empty if none was found.
  const std::string& fault() const { return fault_; }

  // Clients.
  void PutGradient(uint64_t session, uint64_t offset_bytes, const GradientToken& token);
  void DropGradient(uint64_t session,
                    uint64_t offset_bytes);  // the client reuses the bytes
  enum class SumsAre : uint8_t { kInPlace, kPaged };
  void AddJob(uint64_t job, std::shared_ptr<const protocol::Layout> layout,
              SumsAre sums = SumsAre::kInPlace);
  void BindSession(uint64_t session, uint64_t job) { sessions_[session].job = job; }
  // Leases of a reader. No update may write the leased weights until the reader releases them or ends, or the lease expires.
  void HoldWeights(uint64_t session, const protocol::Completion& fetched);
  void ReleaseWeights(uint64_t session, uint64_t lease);
  void ReleaseWeights(uint64_t session);
  void ReleaseWeightsOfJob(uint64_t job);
  // Checks the answer to a fetch of a partition: weights copied from swap must come from the newest versions of its blocks.
  void CheckFetched(uint64_t session, uint32_t partition, const protocol::Completion& fetched);
  void set_masters_overflow(uint64_t count) { masters_overflow_ = count; }

  // Gradients in the accumulators that the last committed step of a job has used, by parameter. For a sharded job the gradients
  // of a parameter are in the order of its partitions.
  using Gradients = std::map<uint32_t, std::vector<GradientToken>>;
  const Gradients& committed_gradients(uint64_t job) { return jobs_[job].committed; }
  uint64_t committed_step(uint64_t job) { return jobs_[job].committed_step; }

  // durable() is the durable ledger. Restarted() is the state that the next node finds if this one dies now: the durable ledger
  // and the contents of the slots, except slots that are being written.
  const daemon::DurableNode& durable() const { return durable_; }
  NodeModel Restarted() const;
  // The state that the next node finds after a power cut. Each slot written since the last flush holds the new block, an older
  // one or garbage, at random. A commit in progress has made its data and its ledger durable, only its data, or neither.
  NodeModel AfterPowerCut(std::mt19937_64& random) const;
  // Reads return old data for all slots that a failed flush should have covered: the device has dropped the new data.
  void LoseDoubted();
  // Checks that no task runs and that no job is in the middle of a step.
  void CheckStopped();
  // The state that the next node finds after this one has stopped or was killed, with the arenas of the jobs of `node`. Running
  // tasks may have come to any point.
  NodeModel Killed(const daemon::DurableNode& node);
  // Checks the record of a job that can resume from it: the newest decided step and the places of the published blocks; during
  // an update, also the blocks already written for the decided step.
  void CheckRecord(const daemon::DurableJob& record);
  // Steps of the published blocks of a job, and of those in DRAM.
  std::map<uint64_t, uint64_t> WrittenSteps(uint64_t job);
  bool has_session_arena(uint64_t session) { return sessions_[session].bytes > 0; }
  // Bytes of a job's state arena that have memory.
  uint64_t StateBytes(uint64_t job);
  // True if the job's newest step is decided but not published.
  bool is_updating(uint64_t job) const { return jobs_.at(job).is_updating; }
  bool has_job(uint64_t job) const { return jobs_.contains(job); }

 private:
  // A range of bytes in one memory that a task reads or writes.
  struct Use {
    std::string memory;
    uint64_t offset_bytes = 0;
    uint64_t bytes = 0;
    bool writes = false;
  };
  static Use DiskUse(const nvme::Slot& slot, uint64_t bytes, bool writes) {
    return {absl::StrCat("disk ", slot.path), slot.offset_bytes, bytes, writes};
  }
  // Gradients in the sums, by partition and unit of kGradUnitElems elements.
  using Accumulators = std::map<std::pair<uint32_t, uint64_t>, std::vector<GradientToken>>;
  // Bytes that a LoadWeights has copied to the weights arena.
  struct LoadedRange {
    uint64_t bytes = 0;
    uint32_t partition = 0;
    BlockToken block;
  };
  // Gradients that an update of a block has used, and weights that it has computed. Dropped updates have no entry.
  struct BlockUpdate {
    std::map<uint32_t, uint64_t> elems;  // by parameter
    // Used gradients by parameter and partition.
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
  // A paged sum of one unit of elements. The last unit of a partition may be shorter.
  struct PagedSum {
    ElemPlace place;
    uint64_t bytes = 0;
    std::vector<GradientToken> tokens;
  };
  struct Spilled {
    uint64_t checksum = 0;
    uint64_t page = 0;
    std::map<uint64_t, PagedSum> sums;  // sums by offset in the page
  };
  struct SumUnit {
    ElemPlace place;
    std::vector<GradientToken> tokens;
  };
  struct JobMemory {
    std::shared_ptr<const protocol::Layout> layout;
    bool has_paged_sums = false;
    std::map<uint64_t, PagedSum> paged;  // sums by offset in the step arena
    std::map<nvme::Slot, Spilled> spilled;
    uint64_t weights_bytes = 0;
    // Parts of the state arena that have memory: offset to bytes.
    std::map<uint64_t, uint64_t> state_parts;
    uint64_t step_bytes = 0;
    // Offset past the step arena; UINT64_MAX: no memory yet.
    uint64_t float_sums_offset = UINT64_MAX;
    uint64_t float_sums_end = 0;
    std::set<nvme::Slot> slots;
    uint64_t committed_step = 0;
    bool has_published = false;                  // step 0 (if it sets masters) or a later one
    std::map<uint64_t, GradientToken> overflow;  // gradients by offset in the step arena
    Accumulators accumulators;
    Accumulators float_sums;                   // replaces `accumulators` once sums are float32
    std::map<uint64_t, nvme::Slot> early;      // slots by block, written before the step is decided
    std::map<uint64_t, nvme::Slot> written;    // slots by block, written for the decided step
    std::map<uint64_t, nvme::Slot> published;  // slots by block
    std::map<uint64_t, LoadedRange> loaded;    // ranges by offset in the weights arena
    std::set<uint32_t> loaded_partitions;      // partitions that were ever loaded
    std::set<uint64_t> masters_set;            // staged blocks that are to be written
    std::map<uint64_t, BlockToken> resident;   // blocks by offset in the state arena
    std::map<uint64_t, BlockUpdate> updates;   // this step's updates by block
    bool is_updating = false;                  // the step is decided but not published
    Gradients committed;
    // By step and block: the step that wrote the published block.
    std::map<uint64_t, std::map<uint64_t, uint64_t>> history;
    // Weights in the arena, by offset: their number of bytes, and the last step that has written them.
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
  // Accumulators that contain an offset of the step arena.
  static Accumulators& AccumulatorsAt(JobMemory& job, uint64_t offset_bytes);
  // The element at an offset of the accumulators, which are adjacent.
  static ElemPlace AccumulatorAt(const JobMemory& job, protocol::DType sum_dtype,
                                 uint64_t offset_bytes);
  // The contribution whose bytes lie at an offset of a session's arena or of the overflow.
  static GradientToken TokenAt(const std::map<uint64_t, GradientToken>& tokens, uint64_t width,
                               uint64_t offset_bytes);
  // The element at an offset of the weights, in which owners are adjacent. Returns nullopt if no partition contains the offset.
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
  // True if a previous daemon has already updated the block in this step.
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
  // By slot, all jobs; a failed write leaves unspecified contents.
  std::map<nvme::Slot, BlockToken> disk_;
  std::map<uint64_t, Held> held_;  // leased weights by lease
  // Previous contents of slots, oldest first. unflushed_: slots written since the last flush. flushing_: slots that the running
  // commit flushes. doubted_: slots that a failed flush should have covered.
  std::map<nvme::Slot, std::vector<BlockToken>> unflushed_;
  std::map<nvme::Slot, std::vector<BlockToken>> flushing_;
  std::map<nvme::Slot, std::vector<BlockToken>> doubted_;
  // Tokens of resident blocks at the time when they were copied to a slot, by slot.
  std::map<nvme::Slot, BlockToken> copies_;
  daemon::DurableNode durable_;
  std::set<nvme::Slot> durable_slots_;         // slots that durable_ names
  std::set<nvme::Slot> durable_slots_before_;  // slots that the previous ledger named
  std::set<uint64_t> closed_;
  std::set<daemon::TaskId> dropped_;  // running updates and writes whose results are dropped
  std::string fault_;
  uint64_t masters_overflow_ = 0;
  uint64_t checksums_ = 0;
};

}  // namespace forebay::testing
