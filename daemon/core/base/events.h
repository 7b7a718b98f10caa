// SPDX-License-Identifier: Apache-2.0
// Events and actions: the input and the output of the node's state machine. Values only: no pointers into shared memory, no
// descriptors, no clock. The reactor executes actions and turns their outcomes into events; a simulator does the same. Lists in
// the events and actions of every step use a memory resource of the loop thread: only that thread may destroy them.
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
#include "daemon/core/base/session_request.h"
#include "nvme/slot_map.h"
#include "protocol/durability.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

enum class Tier : uint8_t { kDram, kNvme };

// ------------------------------------------------------------------------------------------ events

struct AttachRequested {
  SessionId session = 0;  // chosen by the executor
  // Protocol and user of the client.
  uint32_t protocol_version = protocol::kProtocolVersion;
  uint32_t uid = 0;
  // Name of the job: NAME or UID:NAME.
  std::string job;
  // True for a reader. It has no rank, calls no step, delivers nothing and cannot create the job.
  bool reader = false;
  uint32_t rank = 0;  // rank on this node; without meaning for a reader
  // World and memory that the client asks for. For a reader only `grad_arena_bytes`, for reads of states, has a meaning.
  // `session_request.durability` is not set: the state machine decides it.
  SessionRequest session_request = {};
  // Durability that the client asks for. nullopt for a reader, or to take the existing job's durability or the node's default.
  std::optional<protocol::Durability> durability = {};
  // Token of the run that the process belongs to. If `resume` is true, the run may take over another run's job.
  std::string run = {};
  bool resume = false;
  // The client had a session that was interrupted, and continues it with the arenas that it has mapped.
  bool reattach = false;
  // Reattach: inode of the gradient arena that the client has mapped (0 if unknown). `is_left_behind` is true if that arena is
  // no longer the rank's, because another process has attached in its place or the rank has detached.
  uint64_t grad_arena_inode = 0;
  bool is_left_behind = false;
  // Process id of another running process of the same launch that has a session of this rank. 0 if none is known.
  int32_t rival_pid = 0;
  // Reattach to a job with weights on swap: leases that the interrupted session had.
  std::vector<uint64_t> held_leases = {};
  // Reattach: tag of the newest command that the client has sent. A command with this tag or a lower one is a repetition.
  uint64_t newest_tag = 0;
  // Reattach: number of exchanges whose answer the client has received, and the newest answer, by rank (empty: too large).
  uint64_t exchanges = 0;
  std::vector<std::string> exchanged = {};
  // True if the client's descriptor of the weights is to be writable. False for a reader.
  bool writable_weights = false;
  std::shared_ptr<const protocol::Layout> layout;
};

// The client has mapped its arenas, and the grad arena is sealed. The session's commands are accepted from now on.
struct SessionMapped {
  SessionId session = 0;
};

enum class EndCause : uint8_t {
  kDetached,  // the client has detached
  kLost,      // the connection closed, or the client died or broke the protocol
  // The connection is closed, but the client may connect again. The session of the rank continues until SessionReconnected, or
  // SessionEnded with another cause. A session that cannot continue (of a reader, fenced, or writing initial parameters) is
  // lost.
  kDisconnected,
};

struct SessionEnded {
  SessionId session = 0;
  EndCause cause = EndCause::kLost;
};

// The client of a disconnected session has connected again, with a new ring, and sends unanswered commands again. Ends with
// AnswerAttach; SessionMapped follows. held_leases and newest_tag as in AttachRequested.
struct SessionReconnected {
  SessionId session = 0;
  std::vector<uint64_t> held_leases = {};
  uint64_t newest_tag = 0;
};

// A rank that was attached to the previous daemon, and has no session with this one, has detached from that daemon, or its
// process has ended. Raised repeatedly.
struct RankEnded {
  JobId job = 0;
  uint32_t rank = 0;
  bool has_detached = false;
};

struct CommandArrived {
  SessionId session = 0;
  protocol::Command command;  // a private copy; nothing in it has been checked
};

// Answers CopyStepRequest in the same turn of the loop.
struct StepRequestCopied {
  SessionId session = 0;
  uint64_t tag = 0;
  protocol::StepRequest request;  // a private copy, unchecked
  // Copies of request.param_groups HyperParams, or fewer if the command's length has room for fewer.
  std::pmr::vector<protocol::HyperParams> hyper_params;
  std::pmr::vector<uint64_t> presence = {};  // presence words of the request; see wire.h
};

// Answers CopySummary in the same turn of the loop.
struct SummaryCopied {
  SessionId session = 0;
  uint64_t tag = 0;
  std::vector<std::byte> bytes;  // a private copy, unchecked
};

// Sums of squares over the elements of one segment. LAMB's step length depends on them.
struct SegmentNorms {
  double weight_squares = 0;
  double update_squares = 0;
};

// extra_state that each rank has committed with a step, by rank.
using ExtraStates = std::shared_ptr<const std::vector<std::vector<std::byte>>>;

struct DurableNode;  // durable_job.h

// The outcome of any action that carries a TaskId.
struct TaskDone {
  TaskId task = 0;
  absl::Status status;
  // UpdateBlock: number of masters that overflowed. CopyInitial, SetState: 1 if a value is refused. AddGradients: 1 + the index
  // of the first source that is not finite, or 0 if all sources are finite.
  uint64_t count = 0;
  // UpdateBlock and SetState (on a staging slot), EvictBlock, SpillSums, SavePart, DigestWeights: checksum of the bytes.
  uint64_t checksum = 0;
  // ReadBlock, WriteBlock, LoadWeights, SpillSums, LoadSums, SavePart, RestorePart: when the disk began and ended the transfer.
  // Both are 0 if there was no transfer.
  uint64_t begin_ns = 0;
  uint64_t end_ns = 0;
  cpu_adam::SquareSum squares = {};           // AddGradients, SumGradient: squares of the sums
  std::pmr::vector<SegmentNorms> norms = {};  // UpdateBlock of UpdatePass::kNorms: by segment
  WeightsDigests weights_digests = {};  // UpdateBlock and SetState on a staging slot with weights
  ExtraStates extra_states = {};        // KeepExtraStates
  // CommitLedger that failed: nvme::Volume::Doubted().
  std::vector<nvme::Slot> doubted = {};
};

// A read into the staging slot was abandoned: it has failed, or fails with the next event, but the disk may still write to the
// slot. StagingSlotReturned: that read has ended.
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

// A block of states is to move to the other tier, between two steps: from DRAM to swap, or back. Ignored if the block is moving
// already, or if the node has neither slots nor DRAM for it.
struct BlockMoveRequested {
  JobId job = 0;
  uint32_t block = 0;
};

// The daemon will stop, and another daemon continues its jobs. Each job becomes quiescent between two steps and does not change
// after that. JobsStopped answers when all jobs are quiescent. After StopDue the answer does not wait for jobs any more.
struct StopRequested {};
struct StopDue {};

// The first event: jobs continue the update during which the previous daemon was killed. Raised again before the daemon makes
// jobs durable for good, so that a job to which no rank has attached ends its update too.
struct UpdatesResumed {};

struct DeleteJobRequested {
  uint64_t request = 0;
  uint32_t uid = 0;
  std::string job;
};

// Answers FreeJob. While another process has the weights open or mapped, their memory is not free (weights_in_use): a second
// event follows when it is.
struct JobFreed {
  JobId job = 0;
  bool weights_in_use = false;
};

// One event. Derives from std::variant so that copying, moving and destroying an event is compiled once.
struct Event
    : std::variant<AttachRequested, SessionMapped, SessionEnded, SessionReconnected, RankEnded,
                   CommandArrived, StepRequestCopied, SummaryCopied, TaskDone, StagingSlotKept,
                   StagingSlotReturned, LeaseTimeExpired, BlockMoveRequested, StopRequested,
                   StopDue, UpdatesResumed, DeleteJobRequested, JobFreed> {
  using variant::variant;
  Event(const Event& other);
  Event(Event&& other) noexcept;
  Event& operator=(const Event& other);
  Event& operator=(Event&& other) noexcept;
  ~Event();
};

// ----------------------------------------------------------------------------------------- actions

// Creates weights, state and step arenas of a job (zero-filled). Ends with TaskDone.
struct CreateJobMemory {
  TaskId task = 0;
  JobId job = 0;
  // True if the previous daemon has retained the weights and state arenas. `keeps_gradients`: also the ranks' grad arenas.
  bool is_kept = false;
  bool keeps_gradients = false;
  bool keeps_step = false;  // the retained step arena has sums that the job needs
  uint64_t weights_bytes = 0;
  // Bytes of the state arena, in which every block has a place. 0 if the job has no states. Only `resident` parts get memory.
  uint64_t state_bytes = 0;
  std::vector<StatePart> resident = {};
  // Bytes of a full block. On a machine with several NUMA nodes, memory of consecutive blocks alternates between the nodes.
  uint64_t block_bytes = 0;
  // Bytes of the step arena's accumulators, overflow and extra_state. The state machine chooses their offsets.
  uint64_t step_bytes = 0;
  // Size of the whole step arena; 0: step_bytes. Bytes after step_bytes have no memory until PopulateStepArena, except
  // `float_sums`.
  uint64_t step_capacity_bytes = 0;
  StatePart float_sums = {};
};

// Writes zeros to the job's swap slots, except slots of a recovered job. Emitted together with CreateJobMemory if the job has
// such slots. Ends with a TaskDone of its own.
struct CreateJobSwap {
  TaskId task = 0;
  JobId job = 0;
  std::vector<nvme::Slot> slots;
};

// A copy from one memory to another, or within one.
struct BytesCopy {
  uint64_t from_bytes = 0;  // offsets
  uint64_t to_bytes = 0;
  uint64_t size_bytes = 0;
};

// Frees the job's step arena and creates a new one (zero-filled) that holds the named extra_state of the old one. After an
// error the job has no step arena. The executor retains the extra_state, and the next try restores as many ranks' as it names.
// Ends with TaskDone.
struct ReplaceStepArena {
  TaskId task = 0;
  JobId job = 0;
  uint64_t step_bytes = 0;
  uint64_t step_capacity_bytes = 0;         // see CreateJobMemory
  std::vector<BytesCopy> extra_state = {};  // one copy for each rank
};

// Gives memory to a part of the job's step arena that has none. Ends with TaskDone.
struct PopulateStepArena {
  TaskId task = 0;
  JobId job = 0;
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
};

// Creates a session's ring, and its grad arena of grad_bytes, step region included.
struct CreateSessionMemory {
  TaskId task = 0;
  JobId job = 0;
  SessionId session = 0;
  uint64_t grad_bytes = 0;
};

// Answers an attach call. After an error the session no longer exists, and CloseSession follows. A session that ends before its
// attach call is answered gets CloseSession alone.
struct AnswerAttach {
  SessionId session = 0;
  absl::Status status;
  JobId job = 0;
  uint64_t committed_step = 0;
  bool writes_initial = false;   // the rank writes initial parameters; sharded: its own
  uint64_t weights_bytes = 0;    // size of the weights arena
  bool weights_on_swap = false;  // the arena is smaller than the weights
  uint64_t grad_arena_bytes = 0;
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  uint64_t extra_state_bytes = 0;  // committed extra_state, in the step arena
  uint64_t extra_state_offset = 0;
  // extra_state of rank 0; 0 bytes for rank 0 itself.
  uint64_t rank0_extra_state_bytes = 0;
  uint64_t rank0_extra_state_offset = 0;
  uint64_t trace_bytes = 0;      // bytes of TraceMemory at the end of the grad arena
  std::vector<uint32_t> trace;   // partitions; for a sharded rank, its own
  uint64_t attempt = 0;          // newest attempt at the next step
  bool outlives_daemon = false;  // if the daemon is killed, the job continues with the next one
  uint32_t leases = 0;           // number of AttachRequested::held_leases that are valid
  // Job over several nodes: see AttachReply (protocol/forebay.capnp).
  uint64_t prepared_step = 0;
  uint64_t durable_step = 0;
  uint64_t durable_before = 0;
  std::vector<std::byte> summary = {};
};

// Puts one completion into the session's ring. A status that is not OK is retained for Session.explain.
struct AnswerCommand {
  SessionId session = 0;
  protocol::Completion completion;
  absl::Status status;
};

// The session's tasks have all ended: unmap and close its arenas, doorbells and connection. Emitted exactly once for every
// AttachRequested. Later events of the session are ignored.
struct CloseSession {
  SessionId session = 0;
  absl::Status reason;                // OK after a detach or death; else why it was evicted
  bool is_of_old_generation = false;  // fenced, but not lost itself: no rank waits for it
};

// Frees the memory of a job that has no session and no task. The weights are freed once no process uses them. Ends with
// JobFreed.
struct FreeJob {
  JobId job = 0;
  bool keeps_arenas = false;  // free the step arena alone, retain weights and states
};

struct AnswerDelete {
  uint64_t request = 0;
  absl::Status status;
};

// Copies a StepRequest, its HyperParams and presence out of the grad arena at once. The range was checked before.
// StepRequestCopied answers before any other event.
struct CopyStepRequest {
  SessionId session = 0;
  uint64_t tag = 0;
  uint64_t arena_offset_bytes = 0;
  uint64_t length_bytes = 0;
  uint64_t presence_words = 0;
};

// Job over several nodes: copies a summary to or from the grad arena, at once. SummaryCopied answers CopySummary before any
// other event.
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

// The actions below are executed by workers and the disk. Offsets are bytes into the named arena.

// Copies initial parameters from the grad arena to the weights arena. Then checks that the first checked_bytes, the trainable
// parameters, are finite. Bits of frozen parameters may be of another type.
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

// Copies extra_state, or a contribution that waits in the overflow, from the grad arena to the step arena.
struct CopyToStepArena {
  TaskId task = 0;
  SessionId session = 0;
  JobId job = 0;
  uint64_t grad_offset_bytes = 0;
  uint64_t step_offset_bytes = 0;
  uint64_t bytes = 0;
};

// Returns the type of a job's gradient sums: float32, or the type of the gradients if one rank delivers them and nothing is
// added.
inline protocol::DType GradientSumType(protocol::DType dtype, uint32_t world_size) {
  return world_size == 1 ? dtype : protocol::DType::kFloat32;
}

// Place of one rank's contribution to a gradient sum.
struct GradientSource {
  SessionId session = 0;  // session with the grad arena; 0: the step arena
  uint64_t offset_bytes = 0;
};

// Sets an accumulator in the step arena to the sum of the sources in their order. If `assign` is false, the sum begins with the
// accumulator's value, and the sources are added to it one after the other. Also sums the squares of the result. If a source is
// not finite, the accumulator's content is undefined.
struct AddGradients {
  TaskId task = 0;
  JobId job = 0;
  uint32_t partition = 0;
  std::pmr::vector<GradientSource> sources = {};
  uint64_t accumulator_offset_bytes = 0;
  uint64_t first_elem = 0;  // within the partition; a multiple of kGradUnitElems
  uint64_t elems = 0;
  protocol::DType dtype = protocol::DType::kFloat32;      // type of the sources
  protocol::DType sum_dtype = protocol::DType::kFloat32;  // type of the accumulator
  bool assign = false;
};

// Sums the squares of elements of an accumulator.
struct SumGradient {
  TaskId task = 0;
  JobId job = 0;
  uint32_t partition = 0;
  uint64_t accumulator_offset_bytes = 0;
  uint64_t elems = 0;
  protocol::DType sum_dtype = protocol::DType::kFloat32;  // type of the accumulator
};

// Kinds of bytes with an identity: parts of a block, pages of sums, parts of the weights arena. Checksums cover the value.
enum class BlockPart : uint8_t { kStates = 1, kWeights = 2, kGradients = 3, kWeightsArena = 4 };

// Identity of the bytes in a block. It is part of their checksum, so that right bytes in a wrong place fail too.
struct BlockIdentity {
  JobId job = 0;
  BlockPart part = BlockPart::kStates;
  uint64_t block = 0;  // kGradients: the page; kWeightsArena: the part
  // The step that wrote the bytes; 0 if no step has written them.
  uint64_t written_step = 0;

  bool operator==(const BlockIdentity&) const = default;
};

struct BlockPlace {
  bool resident = true;
  // Offset in the state arena, if resident.
  uint64_t state_offset_bytes = 0;
  // Staging slot that a block on swap is read to, updated in and written from.
  uint32_t staging_slot = 0;
  // Swap slot that the block is read from or (WriteBlock, EvictBlock) written to. nullopt: zeros that were never written.
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

// Place of the weights that change with the states of a block.
struct WeightsPlace {
  // True: in the plane behind the block's states, at the elements' place in the block. False: in the weights arena.
  bool in_block = false;
  uint64_t offset_bytes = 0;  // offset in the weights arena
  // Offset for the new weights. Early update: in the step arena; the weights in the arena stay until InstallWeights.
  // UpdatePass::kWeights: in the weights arena.
  std::optional<uint64_t> new_offset_bytes = {};
};

// Elements of one parameter that UpdateBlock updates. They are contiguous in the block.
struct UpdateSegment {
  WeightsPlace weights = {};
  uint64_t accumulator_offset_bytes = 0;
  uint64_t block_elem = 0;  // first element within the block's planes
  uint64_t elems = 0;
  // Scalars for the parameter's number of updates, including this one, and the rounding key of the parameter's name.
  cpu_adam::StepScalars scalars{};
  uint64_t param_elem = 0;
  uint32_t param = 0;
  float trust = 1.0F;  // LAMB, UpdatePass::kWhole: the trust ratio
};

enum class UpdatePass : uint8_t {
  // Sets the masters from the weights, if the block has a plane of masters, before the first step.
  kMasters,
  // Updates the states and weights.
  kWhole,
  // Writes the new weights to another place, before kWhole. Nothing else changes.
  kWeights,
  // LAMB, before kWhole: sums the norms of parameters, on which the step length depends. Nothing changes.
  kNorms,
};

// A page of gradient sums in the step arena.
struct SumFrame {
  uint64_t page = 0;
  uint64_t offset_bytes = 0;
};

// Verifies a swapped block's bytes against `identity_before` (against zeros if it has no slot), runs the pass over its segments
// in place, then computes the checksum of the changed bytes under `identity_after`.
struct UpdateBlock {
  TaskId task = 0;
  JobId job = 0;
  BlockPlace place;
  // Planes are block_elems * width bytes each, each starting on a multiple of 4096.
  uint64_t block_elems = 0;
  uint64_t bytes = 0;  // bytes of all planes
  BlockIdentity identity_before;
  BlockIdentity identity_after;
  uint64_t checksum_before = 0;
  // The step is decided and the job has a record: if the daemon is killed, another daemon continues within the block (UndoLog).
  // Elements that are done are not updated again, and the bytes of a block that was begun are not verified.
  bool is_recorded = false;
  UpdatePass pass = UpdatePass::kWhole;
  protocol::DType sum_dtype = protocol::DType::kFloat32;  // type of the accumulators
  std::pmr::vector<UpdateSegment> segments;  // disjoint, in ascending order of block_elem
  // Bytes of a page of sums. 0 if sums are not paged: accumulator_offset_bytes is then an offset into the step arena. Otherwise
  // accumulator_offset_bytes counts through all pages, and sum_frames has the pages with this block's sums, ascending.
  uint64_t sum_page_bytes = 0;
  std::pmr::vector<SumFrame> sum_frames = {};
};

// Copies new weights of an early update from the step arena to the weights arena.
struct InstallWeights {
  TaskId task = 0;
  JobId job = 0;
  uint64_t block = 0;
  std::pmr::vector<BytesCopy> copies = {};
};

// Writes a staging slot to a swap slot. If `pause` is true, waits briefly first, because a write to that path has just failed.
struct WriteBlock {
  TaskId task = 0;
  JobId job = 0;
  BlockPlace place;
  uint64_t bytes = 0;
  BlockIdentity identity;
  uint64_t checksum = 0;
  bool pause = false;
  // Slot that the bytes were read from. If set, the bytes are verified first, and nothing is written on E_CORRUPT.
  std::optional<nvme::Slot> read_from = {};
};

// Moves a resident block to swap: writes the block to `place.slot`, then frees its DRAM. TaskDone has the checksum. On an error
// nothing is freed.
struct EvictBlock {
  TaskId task = 0;
  JobId job = 0;
  BlockPlace place;
  uint64_t bytes = 0;
  BlockIdentity identity;
};

// Moves a block to DRAM: gives memory to the block's place in the state arena, reads `place.slot` into the place (nullopt:
// zeros) and verifies the bytes. On an error the memory is freed.
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

// Sets one state of consecutive elements from a grad arena: masters (of `dtype`) and the weights, rounded as in an update; or a
// moment (float32, in format int8 whole groups). Then computes the checksum of a staged block. Nothing changes if a value is
// not finite, rounds to infinity, or is a square below 0 (TaskDone::count 1).
struct SetState {
  // The block with the elements. Absent if the parameter is frozen and its weights are in DRAM. A staged block is verified.
  struct InBlock {
    BlockPlace place;
    BlockIdentity identity;
    uint64_t checksum = 0;
    uint64_t block_bytes = 0;
    uint64_t states_elems = 0;  // elements with states; 0: the block is frozen
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
  uint64_t slot_offset_bytes = 0;  // offset of the first page in the slot
  uint64_t bytes = 0;
  WeightsDigests digests;
  uint64_t first_page = 0;                  // index into `digests`
  std::pmr::vector<BytesCopy> copies = {};  // from the staging slot to the arena
};

// Writes a page of gradient sums from the step arena to a swap slot. TaskDone has the checksum. `pause`: see WriteBlock.
struct SpillSums {
  TaskId task = 0;
  JobId job = 0;
  BlockIdentity identity;
  uint64_t offset_bytes = 0;  // offset in the step arena
  uint64_t bytes = 0;
  nvme::Slot slot;
  bool pause = false;
};

// Reads a page of gradient sums from a swap slot to the step arena, and verifies the bytes.
struct LoadSums {
  TaskId task = 0;
  JobId job = 0;
  BlockIdentity identity;
  uint64_t checksum = 0;
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
  nvme::Slot slot;
};

// A step is made durable: bytes in DRAM are written to swap slots, bytes on swap stay in their slots, and one ledger names all
// of these slots. The actions that restore a job copy in the other direction, when the job is attached again.

enum class SavedArena : uint8_t { kStates, kWeights };

// Writes a part of an arena, in whole pages, to a swap slot. The bytes do not change before TaskDone, which has the checksum.
// `pause`: see WriteBlock.
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

// Reads a part of an arena from a swap slot, and verifies the bytes.
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

// Copies extra_state that ranks have committed out of the step arena. Ends with TaskDone.
struct KeepExtraStates {
  TaskId task = 0;
  JobId job = 0;
  std::vector<StatePart> parts = {};  // ranges of the step arena, by rank
};

// Computes a digest of a partition's weights, which are in DRAM. Ends with TaskDone.
struct DigestWeights {
  TaskId task = 0;
  JobId job = 0;
  uint64_t offset_bytes = 0;  // into the weights arena
  uint64_t bytes = 0;
};

// Copies extra_state to the step arena. Ends with TaskDone.
struct RestoreExtraStates {
  TaskId task = 0;
  JobId job = 0;
  ExtraStates extra_states;
  std::vector<uint64_t> offsets_bytes = {};  // offsets in the step arena, by rank; may be shorter
};

// Makes a ledger of the node's jobs, and all slots that the jobs name, durable (nvme::Volume::CommitLedger). One CommitLedger
// runs at a time. Ends with TaskDone. The task belongs to the node, not to a job.
struct CommitLedger {
  TaskId task = 0;
  std::shared_ptr<const DurableNode> node;
  bool pause = false;  // wait briefly first: the previous try has failed
};

// An attach to `job` waits for DRAM; the log says so.
struct RoomAwaited {
  std::string job;  // name in the form in which root writes it
  uint64_t missing_bytes = 0;
  std::vector<std::string> evicting_jobs;  // jobs that move blocks to swap to make room
};

// The update of `step` waits for the leases of readers. Step 0: a fetch waits for leases without a session (LeaseTable).
// LeaseTimeExpired follows after `reader.lease_max`, unless the job has been freed before.
struct StartLeaseTimer {
  JobId job = 0;
  uint64_t step = 0;
};

// All ranks have called `step`. Starts the clocks of JobStatus.lastStepSeconds, which StepPublished ends, and of
// lastDecisionSeconds, which StepCommitted ends. A step that is refused later (E_NONFINITE) has neither event.
struct StepCalled {
  JobId job = 0;
  uint64_t step = 0;
};

// The step is decided; its update begins. If the update fails (E_JOB_FAILED), no StepPublished follows.
struct StepCommitted {
  JobId job = 0;
  uint64_t step = 0;
};

// Early updates of these blocks, ended or running, are discarded: the blocks are updated again from their old states, or not at
// all.
struct EarlyUpdatesDropped {
  JobId job = 0;
  std::vector<uint64_t> blocks;
};

// All blocks of the committed step are updated and written. Memory peaks and the step's timeline are recorded now. Step 0
// stands for UpdatePass::kMasters.
struct StepPublished {
  JobId job = 0;
  uint64_t step = 0;
};

// Answers StopRequested. Jobs at durable levels are durable at their step.
struct JobsStopped {
  // Quiescent jobs, each with a record of its step. The jobs no longer change, and the sessions of their ranks get no answers.
  std::vector<JobId> jobs = {};
  std::vector<SessionId> sessions = {};  // sessions of ranks that continue with the next daemon
};

// A swap path has failed repeatedly (PathTable), or works again.
struct SwapPathMarked {
  uint32_t path = 0;
  bool marked = false;
};

// One action. Derives from std::variant so that copying, moving and destroying an action is compiled once.
struct Action
    : std::variant<
          CreateJobMemory, CreateJobSwap, ReplaceStepArena, PopulateStepArena, CreateSessionMemory,
          AnswerAttach, AnswerCommand, CloseSession, FreeJob, AnswerDelete, CopyStepRequest,
          WriteSummary, CopySummary, CopyInitial, CopyToStepArena, AddGradients, SumGradient,
          ReadBlock, UpdateBlock, InstallWeights, WriteBlock, EvictBlock, PromoteBlock, DecodeState,
          SetState, LoadWeights, SpillSums, LoadSums, SavePart, RestorePart, KeepExtraStates,
          RestoreExtraStates, DigestWeights, CommitLedger, RoomAwaited, StartLeaseTimer, StepCalled,
          StepCommitted, EarlyUpdatesDropped, StepPublished, JobsStopped, RecordJob, RecordBlock,
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
