// SPDX-License-Identifier: Apache-2.0
// The contents of memory that a client and the daemon share: ring entries and step requests. Types are trivially copyable, with
// explicit widths and asserted sizes. A side that reads bytes which the other side can write copies the bytes once, checks the
// copy, then uses the copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "protocol/limits.h"
#include "protocol/optimizer.h"

namespace forebay::protocol {

// Version of the protocol. Every change that an older peer would misread adds 1. hello() refuses a peer of another version,
// except a client of a daemon that speaks the version of the release before.
inline constexpr uint32_t kProtocolVersion = 14;
// Version of the release before: running ranks continue while their daemon is upgraded. A session is served in the form of the
// version that its client speaks.
inline constexpr uint32_t kProtocolVersionBefore = 14;
constexpr bool IsServedVersion(uint32_t version) {
  return version >= kProtocolVersionBefore && version <= kProtocolVersion;
}

// ------------------------------------------------------------------------------------ ring entries

// Commands of the client to the daemon. The daemon answers each command with exactly one Completion with its tag, in any order.
enum class Op : uint16_t {
  // Copies a range of weights of `partition`, which is the rank's own, from the grad arena. Only before kInitialDone.
  kWriteInitial = 1,
  // Tells that the rank has written its initial parameters: with shared attachment every group, with sharded attachment its own
  // partitions. Answered when the job is ready, with sharded attachment after every rank's kInitialDone.
  kInitialDone = 2,
  // Asks for a read lease on the weights of `partition`. Answered when the bytes are those of committed_step.
  kFetch = 3,
  kRelease = 4,  // releases lease `lease_id`
  // Delivers this rank's gradient of a range of `partition`. The bytes are free again once answered.
  kGradReady = 5,
  // Step call, a barrier. The StepRequest lies at arena_offset_bytes. Answered when `step` is committed. For a job over several
  // nodes the answer is kStepPrepared with this node's StepSummary (step_summary.h), and kDecide then decides the step.
  kStep = 6,
  // Decodes a state of parameter `partition` (its index) into the grad arena: float32 of consecutive elements, possibly none.
  kReadState = 7,
  // Writes a state of a range of `partition`, which is the rank's own (shared attachment: any rank's), from float32 values in
  // the grad arena. Masters set the weights too, to the rounded masters: before kInitialDone in ranges as below, or between
  // steps, any elements. Moments are written between steps, for trainable parameters; in format int8 in whole groups of
  // kScaleElems, counted from the start of the box, or to its end.
  kWriteState = 8,
  // Asks for the norm of the gradient of parameter `partition` (its index; kAllParams: of the whole gradient) in this attempt.
  // Sharded attachment: the norm of what this rank has delivered in all passes, answered when that is summed. Shared
  // attachment: the norm of the job's gradient, the mean over the ranks, answered when every rank has sent kGradNorm or kStep.
  // A rank that has asked delivers no more.
  kGradNorm = 9,
  // Does nothing. Answered at once, or with the reason why the session has ended. Sent by a rank that waits for other ranks
  // without the daemon.
  kCheck = 10,
  // Announces, before this rank's last backward pass of the step, the scalars that its step call will have: a
  // StepRequest without presence and extra_state. From then on the daemon may update blocks that have all
  // their gradients. Such a block is updated again from its old states if the step call has other scalars or
  // clips, if one of its parameters has no gradient, or if more gradients arrive. Answered at once.
  kAnnounceStep = 11,
  // Sets the number of updates that the parameter `partition` (its index) has had to `step`, at most kUpdatesMax. Sent between
  // steps, by any rank.
  kWriteUpdates = 12,
  // The decision of a job's nodes on `step`: a StepSummary of the world, of StepSummaryBytes() bytes at StepSummaryOffset().
  // For a prepared step any rank may send the decision, and the first one counts. If the decision commits the step, the answer
  // comes when that of kStep would, else at once. StepDecision::kWithdraw means that the rank does not call the step: calls of
  // the node's other ranks are then refused.
  kDecide = 13,
  // Takes a job over several nodes back to `step`, because a node has lost its newer steps. Does nothing if the job is at
  // `step` and has prepared no step. Otherwise `step` must be durable on this node (AttachReply). The sessions of all ranks
  // then end with E_FENCED, and attaches get E_BUSY until the job is back at `step`.
  kGoBack = 14,
};

// parameter index of kGradNorm for the whole gradient
inline constexpr uint32_t kAllParams = UINT32_MAX;
inline constexpr uint64_t kUpdatesMax = uint64_t{1} << 53;  // a double counts exactly up to this

// Gradients (and initial weights) travel in ranges of elements of a partition. With shared attachment partition g is group g. A
// range begins at a multiple of kGradUnitElems, ends at one or at the partition's end, and has at most kGradPieceBytesMax
// bytes. element_offset and length_bytes of the command name the range. Elements of parameters without a gradient are 0. With
// shared attachment a gradient is this rank's addend: the job's gradient is the sum over the ranks divided by the world size.
// With sharded attachment a gradient is the job's, as the ranks have reduced it, and its owner alone delivers it.
//
// Passes: a rank may run several backward passes for a step. The rank numbers its passes from 0 on, and delivers an element at
// most once in each. One pass follows the other, and a pass may skip elements. The daemon adds all passes in float32: the first
// passes of all ranks in rank order, then their second passes, and so on.
//
// Attempts: the deliveries and the call of a step carry the number of the rank's attempt at the step, from 0 on. A rank that
// restarts the step from scratch adds 1. The newest attempt of any rank counts: gradients of older attempts are discarded, and
// the step call of an older attempt fails with E_GRAD_DROPPED.
inline constexpr uint64_t kGradUnitElems = 4096;
inline constexpr uint64_t kGradPieceBytesMax = uint64_t{32} << 20;
inline constexpr uint32_t kGradPassesMax = 65536;  // limit of a rank in an attempt

struct Command {
  uint64_t tag;  // chosen by the client, unique among its commands in flight
  uint16_t op;   // Op
  // The backward pass for kGradReady, index into StateNames() for kReadState and kWriteState, FetchKind for
  // kFetch, StepAnswer for kStep and kDecide, else 0
  uint16_t kind;
  uint32_t partition;  // kReadState, kWriteUpdates: index of the parameter
  // kStep, kDecide, kGoBack and kAnnounceStep: t. kGradReady: the step of the gradient (committed_step + 1). kWriteUpdates: the
  // number of updates.
  uint64_t step;
  uint64_t arena_offset_bytes;  // into the session's grad arena; a multiple of 64
  uint64_t length_bytes;        // bytes in the grad arena; exact, see each Op
  // First element. kWriteInitial, kWriteState and kGradReady: counted in the partition. kReadState: counted in the parameter.
  uint64_t element_offset;
  uint64_t lease_id;  // kRelease
  uint64_t attempt;   // kGradReady, kGradNorm, kStep, kAnnounceStep; else 0
};
static_assert(sizeof(Command) == 64 && std::is_trivially_copyable_v<Command>);

struct Completion {
  uint64_t tag;
  uint16_t op;              // op of the command
  uint16_t flags;           // CompletionFlags
  uint32_t error;           // ErrorId; 0 is success. Text and hint: Session.explain(tag)
  uint64_t committed_step;  // newest committed step of the job when the answer was written
  uint64_t lease_id;        // kFetch; 0 if no lease was asked for
  // kFetch: offset of the partition in the weights arena. kReadState: number of updates that the parameter has had.
  uint64_t offset_bytes;
  uint64_t length_bytes;  // kFetch: bytes of the partition
  // kStep: gradient norm before clipping if max_grad_norm > 0, else 0. kGradNorm: the norm. Other commands: 0.
  double norm;
  // Newest attempt at step committed_step + 1. kFetch: number of times the partition's weights were written between steps.
  // Together with committed_step this number identifies the bytes.
  uint64_t attempt;
};
static_assert(sizeof(Completion) == 64 && std::is_trivially_copyable_v<Completion>);

// Lease id of weights that an agent sent to a trainer before the trainer asked. Such a lease delays nothing, and its release
// does nothing.
inline constexpr uint64_t kAheadLease = uint64_t{1} << 63;

enum class FetchKind : uint16_t {
  kLease = 0,
  // Tells the place of the bytes, when they are those of the committed step, and grants no lease. For a rank: the bytes do not
  // change before its next step call. Not for weights on swap, which have no fixed place.
  kPlace = 1,
};

// Time of the answer to a step call. In both modes the bytes that a session leases are those of the committed step. A session
// that reads weights without a lease waits for kPublished.
enum class StepAnswer : uint16_t {
  kPublished = 0,  // all blocks are updated and written
  // The step is decided: norm and clipping are known, and no client's crash can undo the step. Its blocks are updated in the
  // order in which the step before fetched partitions. A fetch is answered when its own blocks are updated. If a master becomes
  // infinite, the next step call reports it.
  kCommitted = 1,
};

enum CompletionFlags : uint16_t {
  kStepRepeated = 1,  // the step had been committed before: nothing was applied
  kStepClipped = 2,   // the gradient was scaled to max_grad_norm
  // For a job over several nodes. kStepPrepared: see kStep. kStepWithdrawn: the call is refused because another rank of the
  // node has withdrawn.
  kStepPrepared = 4,
  kStepWithdrawn = 8,
};

// ------------------------------------------------------------------------------------ step request

// Step request, at the command's offset of the grad arena: this header, `param_groups` HyperParams, PresenceBytes() bytes, then
// `extra_state_bytes` bytes. length_bytes of the command is the size of all four.
struct StepRequest {
  uint64_t step;               // t; equals Command::step
  uint32_t param_groups;       // Layout::param_groups() to Layout::param_group_rows()
  uint32_t extra_state_bytes;  // 0 to the size requested at attach
  double max_grad_norm;        // 0: no clipping
  double grad_scale = 1;       // factor of the gradient, before clipping; finite in float32
  // Bounds of each element after scaling: grad_min < 0 < grad_max, without max_grad_norm. Both 0: no bounds.
  double grad_min = 0;
  double grad_max = 0;
};
static_assert(sizeof(StepRequest) == 48 && std::is_trivially_copyable_v<StepRequest>);

// Parameters that this rank has delivered a gradient of in this attempt: bit i % 64 of word i / 64 is parameter i of the
// layout; bits after the last parameter are 0. If no rank has a gradient of a parameter, the parameter is not updated. If only
// some ranks have one, it counts as zero on the other ranks.
constexpr uint64_t PresenceWords(uint64_t params) { return (params + 63) / 64; }
constexpr uint64_t PresenceBytes(uint64_t params) {
  return PresenceWords(params) * sizeof(uint64_t);
}
constexpr bool IsPresent(std::span<const uint64_t> presence, uint32_t param) {
  return (presence[param / 64] >> (param % 64) & 1) != 0;
}
constexpr void SetPresent(std::span<uint64_t> presence, uint32_t param) {
  presence[param / 64] |= uint64_t{1} << (param % 64);
}

// Bytes of the client's mark at the end of a session's step region, behind the summary of a step over several nodes. The mark
// is zero once the daemon has taken back the arena's memory, which it does from the arena's begin on.
inline constexpr uint64_t kSessionMarkBytes = 64;

// Largest request and largest answer on the control socket. Requests of Forebay's client are far smaller. An answer has room
// for a status of the largest node: 1024 jobs with all their groups and arenas.
inline constexpr uint64_t kRequestBytesMax = uint64_t{512} << 10;
inline constexpr uint64_t kAnswerBytesMax = uint64_t{64} << 20;

// ------------------------------------------------------------------------------------- ring memory

inline constexpr uint64_t kRingMagic = 0x31474e4952594246;  // "FBYRING1" on a little-endian machine
// entries in each direction; a power of two
inline constexpr uint32_t kRingEntries = 256;
inline constexpr size_t kCacheLineBytes = 64;

// State of a session, which the daemon writes in its ring. Completions written before a state other than kOpen still count. The
// state is still kOpen after a daemon has died.
enum class ChannelState : uint32_t {
  kOpen = 0,
  kEnded = 1,  // the session has ended: attach again as a new session
  // The daemon stops, and its next instance continues the job. All blocks of committed_step are published, no gradient of the
  // next step was delivered, and every command that was read is answered. The client attaches again with
  // AttachRequest.reattach, gets the same weights and grad arena, and sends its other commands again.
  kRestarting = 2,
};

// A cache line that one side writes and the other reads.
struct alignas(kCacheLineBytes) RingLine {
  uint64_t index;     // entries written (producer's line) or read (consumer's line) so far
  uint32_t sleeping;  // consumer's line: 1 while the consumer may sleep and wants its doorbell
  uint32_t closed;    // completion_tail alone: ChannelState
  uint32_t reserved[12];
};
static_assert(sizeof(RingLine) == kCacheLineBytes);

struct alignas(kCacheLineBytes) RingHeader {
  uint64_t magic;    // kRingMagic
  uint32_t version;  // version that the client speaks
  uint32_t entries;  // kRingEntries
  uint64_t reserved[6];
};
static_assert(sizeof(RingHeader) == kCacheLineBytes);

// Trace of a client's newest steps (protocol/trace.h). It lies at the end of the session's arena, from a page boundary on, if
// the client asked for a trace. Only the client writes it.
inline constexpr size_t kTraceNameBytes = 38;
inline constexpr uint64_t kTraceRecords = 511;  // records of one step

struct TraceRecord {
  uint64_t start_ns;  // CLOCK_MONOTONIC
  uint64_t end_ns;
  uint64_t bytes;
  uint16_t lane;               // a ClientLane
  char name[kTraceNameBytes];  // padded with zeros
};
static_assert(sizeof(TraceRecord) == 64 && std::is_trivially_copyable_v<TraceRecord>);

struct alignas(kCacheLineBytes) TraceHalf {
  uint64_t step;
  uint64_t records_used;
  uint64_t reserved[6];
  TraceRecord records[kTraceRecords];
};
static_assert(sizeof(TraceHalf) == 64 * (1 + kTraceRecords));

struct alignas(kCacheLineBytes) TraceMemory {
  // Number of commits. Half (commits - 1) % 2 holds the newest step, and the client fills the other half.
  uint64_t commits;
  uint64_t reserved[7];
  TraceHalf halves[2];
};

// The ring arena: header, four lines, two arrays. The daemon creates and zeroes the arena and writes the header.
struct RingMemory {
  RingHeader header;
  RingLine command_tail;     // written by the client
  RingLine command_head;     // written by the daemon
  RingLine completion_tail;  // written by the daemon
  RingLine completion_head;  // written by the client
  Command commands[kRingEntries];
  Completion completions[kRingEntries];
};
static_assert(offsetof(RingMemory, command_tail) == 64);
static_assert(offsetof(RingMemory, completion_head) == 256);
static_assert(offsetof(RingMemory, commands) == 320);
static_assert(sizeof(RingMemory) == 320 + 2 * 64 * kRingEntries);

}  // namespace forebay::protocol
