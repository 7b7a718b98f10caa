// SPDX-License-Identifier: Apache-2.0
// A process's connection to the node: one rank of a job, or a reader of it.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device.h"
#include "protocol/durability.h"
#include "protocol/layout.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::client {

namespace internal {
class DeviceTrace;
struct SessionParts;
}  // namespace internal

using Timeout = std::chrono::milliseconds;

inline constexpr Timeout kNoTimeout = Timeout::max();
inline constexpr Timeout kDaemonWait = std::chrono::seconds(60);

// Called every 100 ms, and after each signal, by every call that waits, on the thread that waits. If the check returns true,
// the call returns E_INTERRUPTED.
using InterruptCheck = std::function<bool()>;

// Sends one rank's bytes to every rank. Returns the bytes of all ranks, by rank in the world. Blocks until every rank has
// called it; all ranks call it equally often. Runs over the ranks' process group on CPUs (gloo, MPI): no GPU work waits for it.
using AllGather = std::function<absl::StatusOr<std::vector<std::string>>(const std::string& bytes)>;

// A range of bytes in the window of weights.
struct WeightsRange {
  uint64_t begin_bytes = 0;
  uint64_t end_bytes = 0;
};

// A job over several nodes. Its ranks on one node follow each other; each node's daemon holds what its ranks own.
struct Nodes {
  uint32_t world_ranks = 0;  // ranks on all nodes; 0: the job is on one node
  AllGather all_gather = {};
};

// Memory of one session.
struct MemoryOptions {
  // Bytes of the gradient arena. 0 with shared attachment: four pieces of at most 32 MiB. 0 with sharded attachment: two pieces
  // (the least), or on a GPU the gradients of three layers if these have more than 64 MiB. 0 for a reader: 1 MiB.
  uint64_t grad_arena_bytes = 0;
  uint64_t extra_state_bytes = 64 * protocol::kKiB;  // bytes reserved for extra_state of one step
  // Bytes in each rank's arena for the activations of a forward pass (ActivationStore). Ignored for a reader.
  uint64_t activation_bytes = 0;
};

// Faults that a job and a session survive. Ignored for a reader.
struct DurabilityOptions {
  // Selects how much of the job's training a power cut, or the daemon's death, can undo. The first rank of a new job sets the
  // level for the life of the job; another level is then refused with E_OPTION. Not set: the job's level, for a new job the
  // daemon's default.
  std::optional<protocol::Durability> level = {};
  // Longest time that a call waits for a daemon that is being restarted (`systemctl restart forebayd`), within the call's own
  // limit. The session then continues. After this time the session has ended with E_DAEMON_GONE. Not set: FOREBAY_DAEMON_WAIT
  // in seconds, or, if unset, kDaemonWait.
  std::optional<Timeout> daemon_wait = {};
};

struct AttachOptions {
  std::string socket = {};  // empty: FOREBAY_SOCKET, else /run/forebay/forebay.sock
  std::string job = {};     // 1 to 200 bytes of [A-Za-z0-9._-]
  // True: attaches to a job that exists, without a rank. A reader reads weights and states and delivers nothing. The ranks
  // never wait for a reader longer than the daemon's reader.lease_max. Then the reader's session ends.
  bool reader = false;
  uint32_t rank = 0;        // rank of this process; ignored for a reader
  uint32_t world_size = 1;  // ranks of the job, on this node; the layout does not depend on it
  // Set if ranks of the job run on other nodes. Requires sharded attachment with LayoutSpec::is_part. `rank` counts from
  // LayoutSpec::first_rank.
  Nodes nodes = {};
  // The run that this process belongs to, at most 200 printable ASCII characters without spaces. Processes of one run replace
  // each other. Another run's job is continued only with `resume`. Empty: FOREBAY_RUN, or, if unset, this process alone. All
  // ranks of a job need the same run: a job of several ranks sets this option or FOREBAY_RUN.
  std::string run = {};
  bool resume = false;
  // Steps have several backward passes (BeginPass), whose gradients are added in float32. The sums take 4 bytes a
  // parameter from attach on, even if gradients have 2 bytes and nothing else needs sums (shared attachment: one rank).
  // Without `accumulate` the first further pass allocates the sums in addition to the gradients of 2 bytes.
  bool accumulate = false;
  // Step returns at its decision, and the daemon updates under the next forward; else Step waits until all
  // blocks are updated and written. Not set: true with sharded attachment. Set false if you read weights without a
  // lease.
  std::optional<bool> drain = {};
  // Promises calls of AnnounceStep. The daemon then updates a block on swap as soon as all gradients of the block were
  // delivered. If the weights are in DRAM, the new weights take as much DRAM again.
  bool early_updates = false;
  DurabilityOptions durability = {};
  protocol::LayoutSpec layout = {};
  MemoryOptions memory = {};
  // True: the events of this rank in the newest step are recorded for `forebay trace`, in 68 KiB. The job's first session
  // decides for all ranks. Ignored for a reader.
  bool trace = true;
  Timeout timeout = std::chrono::seconds(60);  // limit of Attach and of calls that take no timeout
  InterruptCheck interrupt_check = {};         // empty: none
  std::shared_ptr<gpu::Device> device = {};    // empty: gpu::HostDevice
  // Read by AdminClient::Plan alone. Attach asks the device.
  bool is_on_gpu = false;
};

// The right to read one partition's weights until it is released.
struct Lease {
  uint64_t id = 0;
  uint32_t partition = 0;
  std::span<const std::byte> bytes = {};  // the partition within the window
};

// Destination in device memory for the elements of a partition from `first_elem` on. The size of `to` is the number of elements
// times their width.
struct WeightsCopy {
  uint32_t partition = 0;
  uint64_t first_elem = 0;
  std::span<std::byte> to = {};
};

// A fetch in flight.
struct FetchTicket {
  uint64_t id = 0;
  uint32_t partition = 0;
};

// Bytes that a rank commits with a step: the parts of `front`, most of which are the same in each step (buffers), then `own`.
// The daemon stores them as one string of bytes. The caller owns the bytes.
struct ExtraState {
  using Bytes = std::span<const std::byte>;

  ExtraState() = default;
  template <std::convertible_to<Bytes> One>
  ExtraState(const One& bytes) : own(bytes) {}  // NOLINT: bytes are one
  ExtraState(std::span<const Bytes> same, Bytes changing) : front(same), own(changing) {}

  uint64_t size() const {
    uint64_t bytes = own.size();
    for (const Bytes part : front) bytes += part.size();
    return bytes;
  }

  std::span<const Bytes> front = {};
  Bytes own = {};
};

// Change to each element of a delivered gradient (the mean over the ranks) before the update. The same on every rank.
struct GradientEdit {
  double scale = 1.0;  // multiplies it, before clipping
  // Bounds of an element after scaling: min < 0 < max. Not together with max_grad_norm.
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();

  bool is_bounded() const { return std::isfinite(min) || std::isfinite(max); }
};

struct StepResult {
  uint64_t committed_step = 0;
  double norm = 0;  // norm of the gradient before clipping; 0 without max_grad_norm
  bool clipped = false;
  bool repeated = false;  // the step had been committed before: nothing was applied
};

enum class GradFill : uint8_t {
  kZero,  // a new slot is zero
  kNone,  // a new slot has any content: the caller writes every element
};

// Consecutive elements of one state of a parameter.
struct StateRange {
  std::string param;        // by name
  std::string state;        // "master", or a moment as torch calls it: "exp_avg", "sum", ...
  uint64_t first_elem = 0;  // offset from the start of the parameter
};

// Counts since Attach. Times are wall time spent inside the calls.
struct Counters {
  uint64_t rpc_calls = 0;  // control-plane calls; a steady step makes none
  uint64_t commands = 0;   // ring entries written
  uint64_t sleeps = 0;     // times a call went to sleep
  uint64_t wait_ns_fetch = 0;
  uint64_t wait_ns_grad = 0;  // AddGradient, FlushGradients, GradSlot and GradReady
  uint64_t wait_ns_step = 0;
  uint64_t wait_ns_other = 0;  // Release, WriteInitial, InitialDone, ReadState
  uint64_t fetched_bytes = 0;  // bytes of granted leases
  uint64_t copied_bytes = 0;   // bytes that CopyWeights copied
  uint64_t grad_bytes = 0;
  uint64_t private_slots = 0;  // slots that had to be private memory
  uint64_t reattaches = 0;     // number of attaches to a restarted daemon
};

// One session. With shared attachment (a layout without partitions) partition g is group g, every rank delivers addends of
// every gradient, and the weights window holds the groups at the offsets of the layout. With sharded attachment rank r owns the
// layout's partitions of owner r: the rank writes the initial parameters of its partitions and delivers their reduced
// gradients. A rank may fetch any partition, and the lease tells the place of the bytes.
//
// The weights window has one address for the life of the object, also after Detach and after the daemon's death.
//
// If the daemon is restarted while its jobs run, a session with a rank attaches again within the next call and continues.
// Windows, leases, gradients in flight and waiting calls stay valid.
//
// Every call that waits returns E_DAEMON_GONE within a second of the daemon's death, E_TIMEOUT at the end of the call's own
// time limit (the outcome is then unknown; Step may be called again with the same arguments), and E_INTERRUPTED if the
// interrupt check returns true. In a forked child every call returns E_FORKED and the destructor touches nothing.
//
// Errors     E_DEVICE if a call of the device failed, now or in the background: the session has then ended, as if
//            the process had, and every later call returns E_DEVICE.
//            An error after a call has returned is stored, the first of each kind. A release error is returned
//            once, by the next Fetch, Release, gradient call or Step. A gradient error is returned by every
//            gradient call and Step until DropGradients; E_NONFINITE until a Step has returned it. After that,
//            and after E_GRAD_DROPPED and E_DRAM_LIMIT of Step, the step restarts from scratch: every
//            gradient must be delivered again.
// Threads    Any. Calls are serialised: a call that waits delays all others except the accessors.
// Ownership  Spans are valid as long as the object, or as the results of weights_owner() and grad_owner().
class Attachment {
 public:
  // Connects, attaches and maps the arenas. Waits until other jobs have freed enough memory, the job's memory is allocated, the
  // initial parameters are written, a step in flight has ended and an older session of the rank is closed.
  //
  // Errors  E_NO_DAEMON, E_PROTOCOL, E_PERMISSION, E_JOB_NAME, E_JOB_EXISTS, E_JOB_FAILED, E_BUSY,
  //         E_FENCED, E_LAYOUT, E_UNSUPPORTED, E_OPTION, E_RANK, E_RANGE, E_EXTRA_STATE, E_MEMLOCK,
  //         E_DRAM_LIMIT, E_SWAP_NOSPC, E_SWAP_IO, E_LIMIT, and those of the class. A failed attach leaves
  //         nothing behind.
  //
  // For a job over several nodes every rank attaches at once, and an error of one rank is returned on all ranks. A step that
  // some nodes have committed and the others have prepared is committed by the others too. A step that no node has committed is
  // dropped. If a node has lost newer steps, all nodes return to the newest durable step that every node has (went_back_from).
  // Errors  E_STEP  the nodes still stand at different steps, and have no durable step in common.
  static absl::StatusOr<std::unique_ptr<Attachment>> Attach(AttachOptions options);

  // The last part of Attach, for tests that play the daemon: from mapped arenas and a ring.
  static absl::StatusOr<std::unique_ptr<Attachment>> Assemble(internal::SessionParts parts);

  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;
  // Ends the session. If Detach was not called before, the daemon counts the rank as lost.
  ~Attachment();

  uint32_t rank() const;
  std::string_view device_name() const;  // name of AttachOptions::device
  uint64_t gradient_room_bytes() const;  // bytes of gradients that can be in flight
  // True if some partitions' weights are on swap. The weights arena is then a cache, and only a lease tells the place of a
  // partition's weights.
  bool weights_on_swap() const;
  // True if this session must write its partitions, then call InitialDone. In a new job with shared attachment only rank 0
  // writes, and the attaches of all other ranks wait for rank 0.
  bool writes_initial() const;
  uint64_t committed_step() const;  // newest step known to this session
  // The newest step of any node, if this attach took a job over several nodes back to an older step. Otherwise 0.
  uint64_t went_back_from() const;
  // of this rank, from the step found at attach
  std::span<const std::byte> extra_state() const;
  std::span<const std::byte> rank0_extra_state() const;  // of rank 0, from the same step
  // Partitions in the order in which a step touches them. A rank with sharded attachment gets its own partitions alone. Empty
  // before the first step.
  std::span<const uint32_t> trace() const;
  const protocol::Layout& layout() const;
  std::string device_access() const;  // how the device reaches the arenas, for people
  absl::Status CheckPartition(uint32_t partition) const;  // E_RANGE: no such partition
  std::span<const std::byte> weights() const;             // the whole window, read-only
  // weights of one group; shared attachment alone
  std::span<const std::byte> weights(uint32_t group) const;
  std::shared_ptr<const void> weights_owner() const;  // keeps the window mapped
  // Lets this process write into weights() from now on, if InstallSegvHandler (client/window_registry.h) was called. The pages
  // around a write become private to this process: only this process sees what was written, until DropWrittenWeights. read(2)
  // and other system calls that would write into pages which are not private yet fail with EFAULT.
  //
  // Errors  E_UNSUPPORTED  sharded, or a reader. E_LIMIT  kWindowsMax.
  absl::Status AllowWeightWrites();
  bool has_written_weights() const;
  // Returns the ranges that are private to this process, at least 2 MiB around each write.
  std::vector<WeightsRange> WrittenWeights() const;
  // Maps the weights that the daemon holds a second time, without this process's writes. The mapping has the size of weights().
  absl::StatusOr<std::shared_ptr<const std::byte>> DaemonWeights() const;
  // Undoes this process's writes into weights(). No other thread may write meanwhile.
  void DropWrittenWeights();
  // Room for activations, of MemoryOptions::activation_bytes. Empty after Detach.
  std::span<std::byte> activation_room() const;
  // keeps the activation room mapped and registered
  std::shared_ptr<const void> activation_owner() const;
  // A word for the owner of the activation room. The word is lost if bytes of the room are lost. Null if the room is empty.
  std::atomic<uint64_t>* activation_mark() const;
  // Records the work of the caller's own streams for `forebay trace`.
  std::shared_ptr<internal::DeviceTrace> device_trace() const;

  // Asks the daemon whether the session continues. Returns OK while a call runs on another thread: that call returns the error.
  //
  // Errors  E_RANK_LOST  another rank was lost. E_FENCED, E_DAEMON_GONE, E_TIMEOUT.
  absl::Status CheckSession(Timeout timeout);

  // WriteInitial writes all bytes of a partition, with sharded attachment of a partition that this rank owns. InitialDone
  // returns when the job is ready, with sharded attachment when every rank has called InitialDone.
  absl::Status WriteInitial(uint32_t partition, std::span<const std::byte> bytes, Timeout timeout);
  absl::Status InitialDone(Timeout timeout);

  // Writes `values` to one state of a partition, from element `first_elem` on. `state` is a name as in ReadState. All other
  // states and elements are unchanged. Writing "master" sets the weights too, to the rounded masters. Masters can be written
  // instead of WriteInitial (then every rank writes all of its partitions so), or between steps. Moments can be written between
  // steps alone: in format int8 whole groups of 128 elements of a parameter's part in the partition. With shared attachment any
  // one rank writes, with sharded attachment the owner.
  //
  // Errors  E_NONFINITE  a value is not finite, is rounded to infinity, or is a second moment below 0: nothing is
  //                      written.
  //         E_RANGE      no such state or elements, frozen parameters among them, a part of a group.
  //         E_STEP       this rank has called Step.
  //         E_LEASE      this session holds a lease on the partition.
  //         E_SWAP_NOSPC durable steps retain the old version, and swap has no slot for another version; a part may be
  //                      written.
  absl::Status WriteState(uint32_t partition, uint64_t first_elem, std::string_view state,
                          std::span<const float> values, Timeout timeout);
  // Sets, for all ranks, how many updates parameter `param` of the layout has had. To be called between steps.
  //
  // Errors  E_RANGE  no such parameter, a frozen one, or more than kUpdatesMax updates. E_STEP as above.
  absl::Status WriteUpdates(uint32_t param, uint64_t updates, Timeout timeout);

  // StartFetch asks for a lease and returns. IsFetchDone looks, FinishFetch waits, and CancelFetch gives up: a lease that
  // arrives later is released. A ticket is used up by CancelFetch, and by a FinishFetch that returns neither E_TIMEOUT nor
  // E_INTERRUPTED. StartFetch waits, at most AttachOptions::timeout, only while kRingEntries commands are in flight.
  //
  // Errors  E_LEASE  the ticket is used up, or belongs to another attachment.
  absl::StatusOr<FetchTicket> StartFetch(uint32_t partition);
  absl::StatusOr<bool> IsFetchDone(const FetchTicket& ticket);
  absl::StatusOr<Lease> FinishFetch(const FetchTicket& ticket, Timeout timeout);
  absl::Status CancelFetch(const FetchTicket& ticket);

  // Calls StartFetch, then FinishFetch. Cancels the fetch on E_TIMEOUT and E_INTERRUPTED.
  absl::StatusOr<Lease> Fetch(uint32_t partition, Timeout timeout);
  // Leases the partitions, begins to copy on `stream`, and returns. Leases are taken one after the other if weights are on
  // swap, otherwise all at once. A lease is released when the copies from its partition have ended: by this call if the copies
  // end at once, otherwise by a thread of the session or by a later call. Step waits for the copies first.
  //
  // Ownership  `to` lives until the copies have ended; the stream is borrowed.
  // Errors     E_RANGE  no such partition or elements, memory of another device, or a misaligned address.
  //                     Nothing is copied.
  absl::Status CopyWeights(std::span<const WeightsCopy> copies, gpu::Stream& stream,
                           Timeout timeout);
  // Returns the places of the partitions' weights of the committed step, in the order of `partitions`, for a rank that reads
  // the weights in place. No step changes the weights before this rank calls Step or writes masters, because each step needs
  // this rank's call. Takes no lease. Another rank may still write masters into the weights: ranks that hold one partition
  // agree on when. Waits like Fetch. The places stay the same for the life of the job.
  //
  // Errors  E_UNSUPPORTED  weights_on_swap().
  absl::StatusOr<std::vector<std::span<const std::byte>>> Locate(
      std::span<const uint32_t> partitions, Timeout timeout);
  // Asks for the places of all `partitions` at once, so that each later Locate waits for its own partitions alone.
  absl::Status LocateAhead(std::span<const uint32_t> partitions, Timeout timeout);

  // Releases leases whose copies have ended. Returns the number of leases that still wait for their copies.
  absl::StatusOr<size_t> GiveBackCopied();

  // Releases a lease. Does not wait for the daemon's completion.
  absl::Status Release(const Lease& lease);

  // Gradients travel in pieces: ranges of a partition of at most kGradPieceBytesMax. A partition is delivered in one of two
  // ways in a step:
  //
  //   a parameter at a time   AddGradient copies the gradient into the open pieces that contain the parameter, and
  //                           delivers each piece as soon as all its parameters were added. FlushGradients delivers
  //                           the incomplete pieces: call it when no more gradients of a partition will come (after
  //                           the module's backward) and at the end of backward. A parameter that was not added by
  //                           then has no gradient, unless a later AddGradient still adds it. Step flushes too.
  //   a partition at a time   GradSlot, fill the slot, GradReady: every parameter of the partition has a gradient.
  //
  // A parameter without a gradient on any rank is not updated. If some ranks have a gradient of a parameter, the missing ones
  // count as zero. DropGradients restarts the step from scratch (a bad batch, an exception in backward).

  // Adds the whole gradient of parameter `param` of the layout, in the gradients' dtype. With sharded attachment: of the
  // elements that this rank owns, box after box. While pieces delivered earlier fill the arena, waits for room, at most
  // `timeout`.
  //
  // Errors  E_GRAD_REPEAT  the parameter has a gradient in this pass, or its partition was delivered.
  //         E_RANGE        no such parameter, or another number of bytes.
  //         E_RANK         sharded: the rank owns no element of the parameter.
  //         E_STEP         shared: the rank has asked for a norm (GradNorm).
  //         After other errors the attempt is lost: DropGradients.
  absl::Status AddGradient(uint32_t param, std::span<const std::byte> bytes, Timeout timeout);

  // Adds a gradient like the call above, with the same wait for room, from device memory that work begun on `ready` so far
  // fills. Returns when the copies have begun, on a stream of the session. A piece is delivered when the copies into it have
  // ended, also between two calls. Errors are those above, and E_RANGE if the memory is another device's or its address
  // misaligned.
  //
  // Ownership  `bytes` live until `keep` was dropped, which happens when they were copied: on any thread,
  //            while the session is locked. The stream is borrowed.
  absl::Status AddGradient(uint32_t param, std::span<const std::byte> bytes, gpu::Stream& ready,
                           const std::shared_ptr<const void>& keep, Timeout timeout);
  // empty: of all partitions
  absl::Status FlushGradients(std::optional<uint32_t> partition = std::nullopt);

  // Begins a further backward pass of the step. Gradients added from now on, of any parameter, are added in float32 to the
  // gradients that this rank has delivered. Delivers the open pieces of the pass before. With shared attachment the job's
  // gradient is the sum of all ranks' first passes, in rank order, then of their second passes, and so on, divided by the world
  // size. Ranks may have different numbers of passes.
  //
  // Errors  E_STEP         shared: the rank has asked for a norm (GradNorm).
  //         E_LIMIT        65536 passes.
  //         E_DRAM_LIMIT   of a later call, on all ranks: the node has no room for sums in float32, which
  //                        they were not until now. The step was not applied.
  absl::Status BeginPass();

  // Returns the norm of a parameter's gradient, or with an empty `param` of the whole gradient. Returns 0 if no gradient
  // exists. Delivers open pieces first. Sharded: the norm of the elements that this rank owns, of all passes so far. Shared:
  // the norm of the job's gradient, the mean over the ranks. A shared call waits until every other rank has called GradNorm or
  // Step too, and ends this rank's delivery of the step.
  //
  // Errors  E_NONFINITE, E_GRAD_DROPPED  as Step; Step returns the error again, DropGradients starts from scratch.
  //         E_RANGE                      no such parameter.
  absl::StatusOr<double> GradNorm(std::optional<uint32_t> param, Timeout timeout);

  // Returns the partition's open slot: memory for the partition's gradient. If no slot is open, opens and fills one. Waits for
  // room while gradients delivered earlier fill the arena. The slot is private memory if open slots fill the arena, or if the
  // partition is larger than a piece.
  absl::StatusOr<std::span<std::byte>> GradSlot(uint32_t partition, GradFill fill, Timeout timeout);
  // Keeps the partition's open slot mapped. Null if the partition has no open slot.
  std::shared_ptr<const void> grad_owner(uint32_t partition);

  // Delivers the open slot. The daemon owns its bytes from now on. Returns at once, except for a private slot, which waits for
  // room in the arena, at most AttachOptions::timeout.
  //
  // Errors  E_NOT_READY  the partition has no open slot.
  absl::Status GradReady(uint32_t partition);

  // Forgets open slots, open pieces and the stored gradient error. If something of this attempt was delivered, this rank begins
  // its next attempt at the step: the daemon discards the gradients that all ranks have delivered in older attempts, and a Step
  // of a rank in an older attempt returns E_GRAD_DROPPED.
  absl::Status DropGradients();

  // Announces, before the last backward pass of step `t`, that Step will have these hyper-parameters and this edit, and will
  // not clip. Blocks whose gradients are delivered from now on are updated at once (AttachOptions::early_updates). A broken
  // promise costs time alone: Step updates those blocks again.
  //
  // Errors  E_STEP  t is not the next step.
  absl::Status AnnounceStep(uint64_t t, std::span<const protocol::HyperParams> hyper_params,
                            Timeout timeout, const GradientEdit& edit = {});

  // Applies step `t` once all ranks have called Step. Open pieces are delivered. Open slots are neither delivered nor dropped.
  //
  // Errors  E_OVERFLOW      masters became non-finite; the step is committed nevertheless.
  //         E_NONFINITE     a gradient, or the sum of all ranks' gradients. Nothing was applied.
  //         E_GRAD_DROPPED  another rank has restarted the step from scratch. Nothing was applied.
  //                         After E_NONFINITE and E_GRAD_DROPPED the rank is at the newest attempt: deliver all
  //                         gradients of the step again, then call Step.
  absl::StatusOr<StepResult> Step(uint64_t t, std::span<const protocol::HyperParams> hyper_params,
                                  double max_grad_norm, const ExtraState& extra_state,
                                  Timeout timeout, const GradientEdit& edit = {});

  // Reads out.size() elements (possibly 0) of a state, converted to float32 from any format. Returns the number of updates that
  // the parameter has had (torch's "step"). All elements are of one step: a reader that finds another step between two pieces
  // reads from the beginning again.
  //
  // Errors  E_RANGE  no such parameter, state or elements; a frozen parameter has no states.
  absl::StatusOr<uint64_t> ReadState(const StateRange& range, std::span<float> out,
                                     Timeout timeout);
  // Returns E_RANGE as ReadState would, before memory is allocated for the elements.
  absl::Status CheckStateRange(const StateRange& range, uint64_t elems) const;

  // An all-gather of at most 4 KiB a rank, for setup before the ranks have other means to communicate. Returns the bytes of
  // all ranks, by rank. Waits until every rank of the job has called it; all ranks call it equally often. Of a job over
  // several nodes, Nodes::all_gather does the work.
  //
  // Errors  E_RANK_LOST    a rank has ended: attach again.
  //         E_RANGE        more than 4 KiB.
  //         E_UNSUPPORTED  the attachment has no daemon.
  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& bytes, Timeout timeout);

  // Ends the session in good order. Views stay readable. If the connection is lost, Detach first tries once to make it again, in
  // at most AttachOptions::timeout. While the daemon is being restarted, Detach does not tell the daemon: the next daemon
  // notices that the rank does not return.
  absl::Status Detach();

  Counters counters() const;

 private:
  struct State;
  class CallLock;
  static absl::StatusOr<std::unique_ptr<Attachment>> AttachHere(AttachOptions options);
  static absl::StatusOr<std::unique_ptr<Attachment>> AttachOverNodes(const AttachOptions& options);
  static absl::StatusOr<std::unique_ptr<Attachment>> AttachWhenBack(const AttachOptions& options);
  explicit Attachment(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::client
