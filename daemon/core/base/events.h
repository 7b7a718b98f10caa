// SPDX-License-Identifier: Apache-2.0
// Events and actions: the input and the output of the node's state machine. Values only: no pointers
// into shared memory, no descriptors, no clock. The reactor executes actions and turns their outcomes
// into events; a simulator does the same. Lists that a steady step has in them come from a memory resource of the
// loop thread: whoever has moved one destroys it there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "cpu_adam/square_sum.h"
#include "cpu_adam/update_kernel.h"
#include "daemon/core/base/record_actions.h"
#include "nvme/slot_map.h"
#include "protocol/durability.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

enum class Tier : uint8_t { kDram, kNvme };

// ------------------------------------------------------------------------------------------ events

struct AttachRequested {
  SessionId session = 0;  // chosen by the executor
  // The client's protocol, and its user.
  uint32_t protocol_version = protocol::kProtocolVersion;
  uint32_t uid = 0;
  // NAME or UID:NAME.
  std::string job;
  // A reader has no rank, calls no step, delivers nothing and cannot create the job.
  bool reader = false;
  // Not of a reader.
  uint32_t rank = 0;
  uint32_t world_size = 1;
  // Number of the job's ranks on all nodes; 0: the job is on one node. `rank` and `world_size` count this node's ranks alone.
  uint32_t world_ranks = 0;
  // Token of the run that the process belongs to, and whether it may take over another run's job.
  std::string run = {};
  bool resume = false;
  // Of a client whose session a daemon before this one has handed over: it goes on with the arenas that it has.
  bool reattach = false;
  // Of a reattach: inode of the gradient arena that it has mapped (0: it does not say), and whether the rank has another one,
  // since a process has attached in its place.
  uint64_t grad_arena_inode = 0;
  bool is_left_behind = false;
  // Another process of the same launch that has a session of this rank, and runs: its number. 0: there is none, or nobody
  // can say.
  int32_t rival_pid = 0;
  // That it had then, of a job with weights on swap.
  std::vector<uint64_t> held_leases = {};
  // Tag of the newest command that it has sent: one that is not newer is sent again.
  uint64_t newest_tag = 0;
  // How many exchanges it has had the answer of, and the newest of these; none where it is too large.
  uint64_t exchanges = 0;
  std::vector<std::string> exchanged = {};
  // Sharded: several backward passes a step.
  bool accumulate = false;
  // Blocks on swap may be updated before the decision (kAnnounceStep): room for their new weights.
  bool early_updates = false;
  // Not of a reader: its descriptor of the weights is for writing too.
  bool writable_weights = false;
  // For gradients alone; of a reader: for reads of states.
  uint64_t grad_arena_bytes = 0;
  uint64_t extra_state_bytes = 0;  // room for extra_state
  uint64_t activation_bytes = 0;   // not of a reader: room for what a forward pass keeps
  bool trace = false;              // not of a reader: room for what it did in a step
  // Not of a reader; of a job that exists it is the job's. Nothing: the node's default.
  std::optional<protocol::Durability> durability = {};
  std::shared_ptr<const protocol::Layout> layout;
};

// The client has mapped its arenas and the grad arena is sealed: its commands are accepted from now on.
struct SessionMapped {
  SessionId session = 0;
};

enum class EndCause : uint8_t {
  kDetached,  // the client has detached
  kLost,      // connection closed, process died, or it broke the protocol
  // The connection is closed, and the client may have another one soon: the session of a rank goes on without it, until
  // SessionReconnected or a SessionEnded of another cause. Where it cannot (a reader, initial parameters that are being
  // written, a session that is fenced) it is lost.
  kDisconnected,
};

struct SessionEnded {
  SessionId session = 0;
  EndCause cause = EndCause::kLost;
};

// The client of a disconnected session is back, with a ring of its own, and sends again what was not answered. Ends with
// AnswerAttach; SessionMapped follows. The other two are as of AttachRequested.
struct SessionReconnected {
  SessionId session = 0;
  std::vector<uint64_t> held_leases = {};
  uint64_t newest_tag = 0;
};

// A rank that had a session with the daemon before, and has none: it has detached there, or its process has ended. Comes
// again and again.
struct RankEnded {
  JobId job = 0;
  uint32_t rank = 0;
  bool has_detached = false;
};

struct CommandArrived {
  SessionId session = 0;
  protocol::Command command;  // a private copy; nothing in it has been checked
};

// Answer to CopyStepRequest, in the same turn of the loop.
struct StepRequestCopied {
  SessionId session = 0;
  uint64_t tag = 0;
  protocol::StepRequest request;  // private copies, unchecked
  // As many as the command's length has room for.
  std::pmr::vector<protocol::HyperParams> hyper_params;
  std::pmr::vector<uint64_t> presence = {};  // likewise; see wire.h
};

// Answer to CopySummary, in the same turn of the loop.
struct SummaryCopied {
  SessionId session = 0;
  uint64_t tag = 0;
  std::vector<std::byte> bytes;  // private copies, unchecked
};

// Of the elements of one segment: what LAMB's step length depends on.
struct SegmentNorms {
  double weight_squares = 0;
  double update_squares = 0;
};

// What each rank committed beside a step, by rank.
using ExtraStates = std::shared_ptr<const std::vector<std::vector<std::byte>>>;

struct DurableNode;  // durable_job.h

// The outcome of any action that carries a TaskId.
struct TaskDone {
  TaskId task = 0;
  absl::Status status;
  // UpdateBlock: masters that overflowed. CopyInitial, SetState: 1 if a value cannot be. AddGradients: 1 + the first
  // source that is not finite, 0 where all are.
  uint64_t count = 0;
  // UpdateBlock, SetState on a staging slot, EvictBlock, SpillSums, SavePart, DigestWeights: of the bytes.
  uint64_t checksum = 0;
  // ReadBlock, WriteBlock, LoadWeights, SpillSums, LoadSums, SavePart, RestorePart: when the disk had the
  // transfer; both 0: it had none.
  uint64_t begin_ns = 0;
  uint64_t end_ns = 0;
  cpu_adam::SquareSum squares = {};           // AddGradients, SumGradient: of the sums
  std::pmr::vector<SegmentNorms> norms = {};  // UpdateBlock of UpdatePass::kNorms: by segment
  WeightsDigests weights_digests = {};  // UpdateBlock and SetState on a staging slot with weights
  ExtraStates extra_states = {};        // KeepExtraStates
  // CommitLedger that has failed: nvme::Volume::Doubted().
  std::vector<nvme::Slot> doubted = {};
};

// A read into the staging slot was given up: it has failed, or does so with the next event, but the disk
// may still write to the slot. And it has ended at last.
struct StagingSlotKept {
  uint32_t slot = 0;
};
struct StagingSlotReturned {
  uint32_t slot = 0;
};

// The timer of StartLeaseTimer has run out.
struct LeaseTimeExpired {
  JobId job = 0;
  uint64_t step = 0;
};

// One block of states is to be in the other tier: from DRAM to swap, or back. It moves between two
// steps. Ignored where the block moves already, or where the node has neither slots nor DRAM for it.
struct BlockMoveRequested {
  JobId job = 0;
  uint32_t block = 0;
};

// The daemon will stop, and another daemon continues its jobs. Each job becomes quiescent between two steps and does not
// change after that. HandedOver answers when all jobs are quiescent; after HandOverDue, when as many as can are.
struct HandOverRequested {};
struct HandOverDue {};

// The first event: jobs that the daemon before was killed in the middle of an update of go on with it. Raised again before
// the daemon makes jobs durable for good, so that a job to which no rank has come back ends its update too.
struct UpdatesResumed {};

struct DeleteJobRequested {
  uint64_t request = 0;
  uint32_t uid = 0;
  std::string job;
};

// Answer to FreeJob. As long as another process has the weights open or mapped, their memory is not
// free: a second event follows when it is.
struct JobFreed {
  JobId job = 0;
  bool weights_in_use = false;
};

// One of the above. A type of its own, so that copying, moving and destroying it is compiled once.
struct Event
    : std::variant<AttachRequested, SessionMapped, SessionEnded, SessionReconnected, RankEnded,
                   CommandArrived, StepRequestCopied, SummaryCopied, TaskDone, StagingSlotKept,
                   StagingSlotReturned, LeaseTimeExpired, BlockMoveRequested, HandOverRequested,
                   HandOverDue, UpdatesResumed, DeleteJobRequested, JobFreed> {
  using variant::variant;
  Event(const Event& other);
  Event(Event&& other) noexcept;
  Event& operator=(const Event& other);
  Event& operator=(Event&& other) noexcept;
  ~Event();
};

// ----------------------------------------------------------------------------------------- actions

// Makes weights, state and step arenas of a job (zero-filled). Ends with TaskDone.
struct CreateJobMemory {
  TaskId task = 0;
  JobId job = 0;
  // Weights and state arena are there: the daemon before has left them. `keeps_gradients`: the ranks' arenas too.
  bool is_kept = false;
  bool keeps_gradients = false;
  bool keeps_step = false;  // the step arena has sums that are needed: there is no job without it
  uint64_t weights_bytes = 0;
  // Size of the state arena, which has a place for every block; 0: there are no states. Only these
  // parts get memory.
  uint64_t state_bytes = 0;
  std::vector<StatePart> resident = {};
  // Of a full block: on a machine with several NUMA nodes, blocks take turns.
  uint64_t block_bytes = 0;
  // Accumulators, overflow, extra_state; offsets into it are the state machine's.
  uint64_t step_bytes = 0;
  // Size of the whole step arena; 0: step_bytes. Bytes behind step_bytes have no memory until PopulateStepArena, but for
  // `float_sums`: those have memory from the start, if they have any bytes.
  uint64_t step_capacity_bytes = 0;
  StatePart float_sums = {};
};

// Writes zeros to the job's swap slots. Comes beside CreateJobMemory where blocks are swapped; ends
// with a TaskDone of its own.
struct CreateJobSwap {
  TaskId task = 0;
  JobId job = 0;
  std::vector<nvme::Slot> slots;
};

// From one memory to another, or within one.
struct BytesCopy {
  uint64_t from_bytes = 0;  // offsets
  uint64_t to_bytes = 0;
  uint64_t size_bytes = 0;
};

// Frees the job's step arena and makes another one (zero-filled) that holds the named extra_state of
// the old one. An error leaves the job without one; the next try gets the extra_state that was kept
// meanwhile, of as many ranks as it names. Ends with TaskDone.
struct ReplaceStepArena {
  TaskId task = 0;
  JobId job = 0;
  uint64_t step_bytes = 0;
  uint64_t step_capacity_bytes = 0;         // as of CreateJobMemory
  std::vector<BytesCopy> extra_state = {};  // by rank
};

// Gives memory to a part of the job's step arena that has none. Ends with TaskDone.
struct PopulateStepArena {
  TaskId task = 0;
  JobId job = 0;
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
};

// Makes grad arena (grad_bytes in all, step region included) and ring of a session.
struct CreateSessionMemory {
  TaskId task = 0;
  JobId job = 0;
  SessionId session = 0;
  uint64_t grad_bytes = 0;
};

// The attach call returns. On an error the session does not exist any more and CloseSession
// follows. A session that ends before this gets no answer, only CloseSession.
struct AnswerAttach {
  SessionId session = 0;
  absl::Status status;
  JobId job = 0;
  uint64_t committed_step = 0;
  bool writes_initial = false;   // shared: every group; sharded: its own partitions
  uint64_t weights_bytes = 0;    // of the arena
  bool weights_on_swap = false;  // of some partitions: the arena is not the size of the weights
  uint64_t grad_arena_bytes = 0;
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  uint64_t extra_state_bytes = 0;  // of committed_step; at extra_state_offset of the step arena
  uint64_t extra_state_offset = 0;
  // The same of rank 0; 0 bytes for rank 0 itself.
  uint64_t rank0_extra_state_bytes = 0;
  uint64_t rank0_extra_state_offset = 0;
  uint64_t trace_bytes = 0;      // at the end of the grad arena
  std::vector<uint32_t> trace;   // partitions; of a rank that is attached sharded: its own
  uint64_t attempt = 0;          // the newest one at the next step
  bool outlives_daemon = false;  // the job: where the daemon is killed, another one goes on with it
  uint32_t leases = 0;           // of AttachRequested::held_leases, that it has
  // As AttachReply has them.
  uint64_t prepared_step = 0;
  uint64_t durable_step = 0;
  uint64_t durable_before = 0;
  std::vector<std::byte> summary = {};
};

// Puts one completion into the session's ring; a status that is not OK is kept for Session.explain.
struct AnswerCommand {
  SessionId session = 0;
  protocol::Completion completion;
  absl::Status status;
};

// The session's tasks have all ended: unmap and close its arenas, doorbells and connection. Comes
// exactly once for every AttachRequested; what arrives for the session afterwards is ignored.
struct CloseSession {
  SessionId session = 0;
  absl::Status reason;                // OK after a detach or death; else why it was evicted
  bool is_of_old_generation = false;  // nobody misses its rank
};

// No session and no task of the job is left: free its memory, the weights as soon as no process uses
// them. Ends with JobFreed.
struct FreeJob {
  JobId job = 0;
  bool keeps_arenas = false;  // weights and states, as CreateJobMemory has found them
};

struct AnswerDelete {
  uint64_t request = 0;
  absl::Status status;
};

// Copies the StepRequest header, HyperParams and presence out of the grad arena at once (the range was
// checked) and calls back with StepRequestCopied before anything else.
struct CopyStepRequest {
  SessionId session = 0;
  uint64_t tag = 0;
  uint64_t arena_offset_bytes = 0;
  uint64_t length_bytes = 0;
  uint64_t presence_words = 0;
};

// Of a job over several nodes: to or from the grad arena, at once. CopySummary calls back with SummaryCopied before
// anything else.
struct WriteSummary {
  SessionId session = 0;
  uint64_t arena_offset_bytes = 0;
  std::vector<std::byte> bytes;
};
struct CopySummary {
  SessionId session = 0;
  uint64_t tag = 0;
  uint64_t arena_offset_bytes = 0;
  uint64_t bytes = 0;
};

// The rest is done by workers and the disk. Offsets are bytes into the named arena.

// grad arena -> weights, then a check that what comes first, the trainable parameters, is finite: the bits
// of frozen ones may be of another type.
struct CopyInitial {
  TaskId task = 0;
  SessionId session = 0;
  JobId job = 0;
  uint64_t grad_offset_bytes = 0;
  uint64_t weights_offset_bytes = 0;
  uint64_t bytes = 0;
  uint64_t checked_bytes = 0;
  protocol::DType dtype = protocol::DType::kFloat32;
};

// grad arena -> step arena: extra_state, or a contribution that waits in the overflow.
struct CopyToStepArena {
  TaskId task = 0;
  SessionId session = 0;
  JobId job = 0;
  uint64_t grad_offset_bytes = 0;
  uint64_t step_offset_bytes = 0;
  uint64_t bytes = 0;
};

// The type of a job's gradient sums: float32, or that of the gradients where one rank delivers them
// and there is nothing to add.
inline protocol::DType GradientSumType(protocol::DType dtype, uint32_t world_size) {
  return world_size == 1 ? dtype : protocol::DType::kFloat32;
}

// Where a contribution lies.
struct GradientSource {
  SessionId session = 0;  // whose grad arena; 0: the step arena
  uint64_t offset_bytes = 0;
};

// accumulator (step arena) = the sum of the sources, in their order, or += with assign false; and the
// squares of what it then holds. A source that is not finite leaves anything in the accumulator.
struct AddGradients {
  TaskId task = 0;
  JobId job = 0;
  uint32_t partition = 0;
  std::pmr::vector<GradientSource> sources = {};
  uint64_t accumulator_offset_bytes = 0;
  uint64_t first_elem = 0;  // of the partition; a multiple of kGradUnitElems
  uint64_t elems = 0;
  protocol::DType dtype = protocol::DType::kFloat32;      // of the sources
  protocol::DType sum_dtype = protocol::DType::kFloat32;  // of the accumulator
  bool assign = false;
};

// The squares of elements of an accumulator.
struct SumGradient {
  TaskId task = 0;
  JobId job = 0;
  uint32_t partition = 0;
  uint64_t accumulator_offset_bytes = 0;
  uint64_t elems = 0;
  protocol::DType sum_dtype = protocol::DType::kFloat32;  // of the accumulator
};

// The two parts of a block, a page of gradient sums, and a part of the weights arena. Values are in checksums.
enum class BlockPart : uint8_t { kStates = 1, kWeights = 2, kGradients = 3, kWeightsArena = 4 };

// Whose bytes a block holds; part of its checksum, so that right bytes in a wrong place fail too.
struct BlockIdentity {
  JobId job = 0;
  BlockPart part = BlockPart::kStates;
  uint64_t block = 0;  // of gradient sums: the page; of the weights arena: which part
  // 0: as it was before the first step.
  uint64_t written_step = 0;

  bool operator==(const BlockIdentity&) const = default;
};

struct BlockPlace {
  bool resident = true;
  // Resident: into the state arena.
  uint64_t state_offset_bytes = 0;
  // Else: where it is read to, updated and written from.
  uint32_t staging_slot = 0;
  // Else: the swap slot it is read from, or (WriteBlock) written to; empty: zeros, never written.
  std::optional<nvme::Slot> slot = {};
};

// Reads the block's slot into the staging slot. The bytes are verified by the next UpdateBlock.
struct ReadBlock {
  TaskId task = 0;
  JobId job = 0;
  uint64_t block = 0;
  BlockPlace place;
  uint64_t bytes = 0;
};

// Where weights are that change with the states of a block.
struct WeightsPlace {
  // In the plane behind the block's states, at the elements' place in the block; else in the weights arena.
  bool in_block = false;
  uint64_t offset_bytes = 0;  // in the arena
  // Of an early update: those in the arena stay, the new ones go here in the step arena (InstallWeights).
  std::optional<uint64_t> new_offset_bytes = {};
};

// One run of elements of one parameter.
struct UpdateSegment {
  WeightsPlace weights = {};
  uint64_t accumulator_offset_bytes = 0;
  uint64_t block_elem = 0;  // first element within the block's planes
  uint64_t elems = 0;
  // Of the parameter's own t (updates that it has had, this one included), with the rounding key of
  // its name.
  cpu_adam::StepScalars scalars{};
  uint64_t param_elem = 0;
  uint32_t param = 0;
  float trust = 1.0F;  // of LAMB, UpdatePass::kWhole
};

enum class UpdatePass : uint8_t {
  // Before the first step: masters that are a plane of their own are set from the weights.
  kMasters,
  // A step.
  kWhole,
  // Before that, of LAMB, whose step length depends on the norms of whole parameters: blocks are read, nothing changes.
  kNorms,
};

// Where a page of gradient sums is in the step arena.
struct SumFrame {
  uint64_t page = 0;
  uint64_t offset_bytes = 0;
};

// Verifies a swapped block's bytes against `identity_before` (zeros where it has no slot), runs the
// pass over its segments in place, then computes the checksum under `identity_after` of what has changed.
struct UpdateBlock {
  TaskId task = 0;
  JobId job = 0;
  BlockPlace place;
  // Planes are block_elems * width bytes each, each starting on a multiple of 4096.
  uint64_t block_elems = 0;
  uint64_t bytes = 0;  // of all planes
  BlockIdentity identity_before;
  BlockIdentity identity_after;
  uint64_t checksum_before = 0;
  // Of a step that is decided, of a job with a record: where the daemon is killed, another one goes on in the middle. What
  // it finds done is not updated again; bytes of a block that has begun are not verified.
  bool is_recorded = false;
  UpdatePass pass = UpdatePass::kWhole;
  protocol::DType sum_dtype = protocol::DType::kFloat32;  // of the accumulators
  std::pmr::vector<UpdateSegment> segments;  // they ascend in block_elem and do not overlap
  // Bytes of a page of sums. 0: sums are not paged, and accumulator_offset_bytes is an offset into the step arena. Else it
  // counts through all pages of sums, and sum_frames has those that hold this block's sums, by ascending page.
  uint64_t sum_page_bytes = 0;
  std::pmr::vector<SumFrame> sum_frames = {};
};

// New weights that an early update has put into the step arena -> weights arena.
struct InstallWeights {
  TaskId task = 0;
  JobId job = 0;
  uint64_t block = 0;
  std::pmr::vector<BytesCopy> copies = {};
};

// Writes the staging slot to the swap slot. `pause`: a moment later, since a write there failed just
// now.
struct WriteBlock {
  TaskId task = 0;
  JobId job = 0;
  BlockPlace place;
  uint64_t bytes = 0;
  BlockIdentity identity;
  uint64_t checksum = 0;
  bool pause = false;
  // The slot that its bytes were read from: they are verified first. E_CORRUPT: nothing was written.
  std::optional<nvme::Slot> read_from = {};
};

// DRAM to swap: writes a resident block to `place.slot`, then frees its memory. Its TaskDone brings the
// checksum; with an error nothing was freed.
struct EvictBlock {
  TaskId task = 0;
  JobId job = 0;
  BlockPlace place;
  uint64_t bytes = 0;
  BlockIdentity identity;
};

// Swap to DRAM: gives the block's place in the state arena memory, reads `place.slot` into it (empty:
// zeros) and verifies the bytes. With an error the memory is freed again.
struct PromoteBlock {
  TaskId task = 0;
  JobId job = 0;
  BlockPlace place;
  uint64_t bytes = 0;
  BlockIdentity identity;
  uint64_t checksum = 0;
};

// Decodes one state of consecutive elements of a resident or staged block into a grad arena, as
// float32 (verifying a staged block first).
struct DecodeState {
  TaskId task = 0;
  JobId job = 0;
  SessionId session = 0;
  BlockPlace place = {};
  BlockIdentity identity = {};
  uint64_t checksum = 0;
  uint64_t block_bytes = 0;
  uint64_t block_elems = 0;
  uint32_t state = 0;  // index into protocol::StateNames
  uint64_t block_elem = 0;
  uint64_t elems = 0;
  WeightsPlace weights = {};
  uint64_t grad_offset_bytes = 0;
};

// Sets one state of consecutive elements from a grad arena: masters (`dtype`), and the weights from them,
// rounded as an update rounds them, or a moment (float32, in format int8 whole groups); the checksum of a
// staged block afterwards. Where one is not finite, rounds to infinity, or is a square below 0
// (TaskDone::count 1), nothing is changed.
struct SetState {
  // Where they are, unless the parameter is frozen and its weights are in DRAM. A staged block is verified first.
  struct InBlock {
    BlockPlace place;
    BlockIdentity identity;
    uint64_t checksum = 0;
    uint64_t block_bytes = 0;
    uint64_t states_elems = 0;  // of the block; 0: it has frozen weights alone
    uint64_t block_elem = 0;
  };

  TaskId task = 0;
  JobId job = 0;
  SessionId session = 0;
  std::optional<InBlock> in_block = {};
  uint32_t state = 0;  // index into protocol::StateNames
  protocol::DType dtype = protocol::DType::kFloat32;
  uint64_t elems = 0;
  WeightsPlace weights = {};
  uint64_t grad_offset_bytes = 0;
};

// Reads whole pages of a swapped block's plane of weights into the staging slot, verifies them, then
// copies elements from there to the weights arena.
struct LoadWeights {
  TaskId task = 0;
  JobId job = 0;
  uint32_t partition = 0;
  uint64_t block = 0;
  uint32_t staging_slot = 0;
  nvme::Slot slot;
  uint64_t slot_offset_bytes = 0;  // of the first page, from the start of the slot
  uint64_t bytes = 0;
  WeightsDigests digests;
  uint64_t first_page = 0;                  // in `digests`
  std::pmr::vector<BytesCopy> copies = {};  // from what was read
};

// A page of gradient sums: step arena -> swap slot. Its TaskDone brings the checksum. `pause`: as WriteBlock.
struct SpillSums {
  TaskId task = 0;
  JobId job = 0;
  BlockIdentity identity;
  uint64_t offset_bytes = 0;  // in the step arena
  uint64_t bytes = 0;
  nvme::Slot slot;
  bool pause = false;
};

// The other way; the bytes are verified.
struct LoadSums {
  TaskId task = 0;
  JobId job = 0;
  BlockIdentity identity;
  uint64_t checksum = 0;
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
  nvme::Slot slot;
};

// A step is made durable: what is in DRAM goes to swap slots, what is there already stays, and one ledger names
// all of them. A job that the ledger names is restored the other way when it is attached again.

enum class SavedArena : uint8_t { kStates, kWeights };

// Part of an arena, whole pages -> swap slot. Nothing changes it before TaskDone, which brings the checksum.
// `pause`: as WriteBlock.
struct SavePart {
  TaskId task = 0;
  JobId job = 0;
  SavedArena arena = SavedArena::kStates;
  BlockIdentity identity;
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
  nvme::Slot slot;
  bool pause = false;
};

// The other way; the bytes are verified.
struct RestorePart {
  TaskId task = 0;
  JobId job = 0;
  SavedArena arena = SavedArena::kStates;
  BlockIdentity identity;
  uint64_t checksum = 0;
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
  nvme::Slot slot;
};

// Copies what ranks have committed out of the step arena. Ends with TaskDone.
struct KeepExtraStates {
  TaskId task = 0;
  JobId job = 0;
  std::vector<StatePart> parts = {};  // of the step arena, by rank
};

// A digest of a partition's weights, which are in DRAM. Ends with TaskDone.
struct DigestWeights {
  TaskId task = 0;
  JobId job = 0;
  uint64_t offset_bytes = 0;  // into the weights arena
  uint64_t bytes = 0;
};

// The other way of KeepExtraStates. Ends with TaskDone.
struct RestoreExtraStates {
  TaskId task = 0;
  JobId job = 0;
  ExtraStates extra_states;
  std::vector<uint64_t> offsets_bytes = {};  // into the step arena, by rank; may be fewer
};

// Makes a ledger of these jobs durable, and all slots that they name: nvme::Volume::CommitLedger. One at a time.
// Ends with TaskDone; the task is the node's, of no job.
struct CommitLedger {
  TaskId task = 0;
  std::shared_ptr<const DurableNode> node;
  bool pause = false;  // as WriteBlock: the one before was not made durable
};

// An attach to `job` waits for DRAM.
struct RoomAwaited {
  std::string job;  // as root writes names
  uint64_t missing_bytes = 0;
  std::vector<std::string> evicting_jobs;  // that move blocks to swap first
};

// The update of `step` waits for the leases of readers; 0: a fetch waits for those of nobody (LeaseTable).
// LeaseTimeExpired comes after `reader.lease_max`, unless the job has been freed before.
struct StartLeaseTimer {
  JobId job = 0;
  uint64_t step = 0;
};

// All ranks have called `step`: the clocks of JobStatus.lastStepSeconds and lastDecisionSeconds start.
// StepCommitted ends the second, StepPublished the first; a step that is refused after this (E_NONFINITE)
// has neither.
struct StepCalled {
  JobId job = 0;
  uint64_t step = 0;
};

// The step is decided; its update begins. Where it fails (E_JOB_FAILED) no StepPublished follows.
struct StepCommitted {
  JobId job = 0;
  uint64_t step = 0;
};

// What early updates have made of these blocks, or are making, is of no use: they are updated from their old
// states once more, or not at all.
struct EarlyUpdatesDropped {
  JobId job = 0;
  std::vector<uint64_t> blocks;
};

// All blocks of the committed step are updated and written: memory peaks and the step's timeline are taken
// now. Step 0: those of UpdatePass::kMasters.
struct StepPublished {
  JobId job = 0;
  uint64_t step = 0;
};

// These jobs are at rest, with `kept` set; those of durable levels are durable at their step, and the ledger of the
// volume is newer than all that was written. Nothing changes them any more, and their ranks' sessions are answered no more.
struct HandedOver {
  std::shared_ptr<const DurableNode> node;
  struct Session {
    SessionId session = 0;
    JobId job = 0;
    uint32_t rank = 0;
  };
  std::vector<Session> sessions = {};  // that go on with the next daemon
};

// A swap path has failed again and again (PathTable), or works again.
struct SwapPathMarked {
  uint32_t path = 0;
  bool marked = false;
};

// One of the above; as Event.
struct Action
    : std::variant<
          CreateJobMemory, CreateJobSwap, ReplaceStepArena, PopulateStepArena, CreateSessionMemory,
          AnswerAttach, AnswerCommand, CloseSession, FreeJob, AnswerDelete, CopyStepRequest,
          WriteSummary, CopySummary, CopyInitial, CopyToStepArena, AddGradients, SumGradient,
          ReadBlock, UpdateBlock, InstallWeights, WriteBlock, EvictBlock, PromoteBlock, DecodeState,
          SetState, LoadWeights, SpillSums, LoadSums, SavePart, RestorePart, KeepExtraStates,
          RestoreExtraStates, DigestWeights, CommitLedger, RoomAwaited, StartLeaseTimer, StepCalled,
          StepCommitted, EarlyUpdatesDropped, StepPublished, HandedOver, RecordJob, RecordBlock,
          RecordInstalled, RecordStaged, RecordSums, RecordAttempt, RecordPrepared, RecordDecision,
          RecordTrust, RecordStep, RecordUpdates, RecordLease, RecordLeaseEnd, DropRecord,
          UpdateNotResumed, JobWentBack, SwapPathMarked> {
  using variant::variant;
  Action(const Action& other);
  Action(Action&& other) noexcept;
  Action& operator=(const Action& other);
  Action& operator=(Action&& other) noexcept;
  ~Action();
};

}  // namespace forebay::daemon
