// What lies in shared memory between a client and the daemon: ring entries and the step request.
// Trivially copyable, explicit widths, sizes asserted. Whoever reads bytes that the other side can
// write copies them once, checks the copy, then uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "protocol/optimizer.h"

namespace forebay::protocol {

// Raised by one with every change that an older peer would misread; hello() refuses a peer of
// another version.
inline constexpr uint32_t kProtocolVersion = 2;

// ------------------------------------------------------------------------------------ ring entries

// Client to daemon. Each command is answered by exactly one Completion with its tag, in any order.
enum class Op : uint16_t {
  // Grad arena -> weights of `group`, whole padded group; only before kInitialDone
  kWriteInitial = 1,
  kInitialDone = 2,  // every group was written: the job becomes ready
  // Read lease on the weights of `group`; answered when its bytes are those of committed_step
  kFetch = 3,
  kRelease = 4,    // gives lease `lease_id` back
  kGradReady = 5,  // contribution of this rank to `group`; the bytes are free again once answered
  // barrier; the StepRequest lies at arena_offset_bytes; answered when `step` is committed
  kStep = 6,
  kReadState = 7,  // copies elements of plane `plane` of `group` into the grad arena
};

enum class GradKind : uint16_t {
  kPartial = 1,  // this rank's addend for the whole padded group
  kReduced = 2,  // the own partition, already summed over the world
};

struct Command {
  uint64_t tag;   // chosen by the client, unique among its commands in flight
  uint16_t op;    // Op
  uint16_t kind;  // GradKind for kGradReady, index into StatePlanes() for kReadState, else 0
  uint32_t group;
  uint64_t step;  // t for kStep, and the step a kGradReady belongs to (committed_step + 1)
  uint64_t arena_offset_bytes;  // into the session's grad arena; a multiple of 64
  uint64_t length_bytes;        // of the bytes in the grad arena; exact, see each Op
  uint64_t element_offset;      // kReadState: first element within the padded group
  uint64_t lease_id;            // kRelease
  uint64_t reserved;            // 0
};
static_assert(sizeof(Command) == 64 && std::is_trivially_copyable_v<Command>);

struct Completion {
  uint64_t tag;
  uint16_t op;              // of the command
  uint16_t flags;           // CompletionFlags
  uint32_t error;           // ErrorId; 0 is success. Text and hint: Session.explain(tag)
  uint64_t committed_step;  // of the job, when the answer was written
  uint64_t lease_id;        // kFetch
  uint64_t offset_bytes;    // kFetch: into the weights arena
  uint64_t length_bytes;    // kFetch: padded group
  double norm;              // kStep: gradient norm before clipping, where max_grad_norm > 0; else 0
  uint64_t reserved;
};
static_assert(sizeof(Completion) == 64 && std::is_trivially_copyable_v<Completion>);

enum CompletionFlags : uint16_t {
  kStepRepeated = 1,  // the step had been committed before: nothing was applied
  kStepClipped = 2,   // the gradient was scaled to max_grad_norm
};

// ------------------------------------------------------------------------------------ step request

// At the named offset of the grad arena: this header, `param_groups` HyperParams, then
// `extra_state_bytes` bytes. length_bytes of the command is the size of all three.
struct StepRequest {
  uint64_t step;               // t; equals Command::step
  uint32_t param_groups;       // 1 to kParamGroupsMax; covers every param_group of the layout
  uint32_t extra_state_bytes;  // 0 to what the session took at attach
  double max_grad_norm;        // 0: no clipping
  double reserved;
};
static_assert(sizeof(StepRequest) == 32 && std::is_trivially_copyable_v<StepRequest>);

inline constexpr uint64_t kExtraStateBytesMax = uint64_t{16} << 20;

// ------------------------------------------------------------------------------------- ring memory

inline constexpr uint64_t kRingMagic = 0x31474e4952594246;  // "FBYRING1" on a little-endian machine
inline constexpr uint32_t kRingEntries = 256;               // each way; a power of two
inline constexpr size_t kCacheLineBytes = 64;

// One cache line that one side writes and the other reads.
struct alignas(kCacheLineBytes) RingLine {
  uint64_t index;     // entries written (producer's line) or read (consumer's line) so far
  uint32_t sleeping;  // consumer's line: 1 while the consumer may sleep and wants its doorbell
  uint32_t closed;    // completion_tail alone: 1 once the daemon has ended the session
  uint32_t reserved[12];
};
static_assert(sizeof(RingLine) == kCacheLineBytes);

struct alignas(kCacheLineBytes) RingHeader {
  uint64_t magic;    // kRingMagic
  uint32_t version;  // kProtocolVersion
  uint32_t entries;  // kRingEntries
  uint64_t reserved[6];
};
static_assert(sizeof(RingHeader) == kCacheLineBytes);

// The ring arena: header, four lines, two arrays. The daemon makes and zeroes it and writes the
// header.
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
