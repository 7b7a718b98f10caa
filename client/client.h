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

// Asked every 100 ms, and after each signal, by every call that waits, on the thread that waits.
// True makes the call return E_INTERRUPTED.
using InterruptCheck = std::function<bool()>;

// Sends one rank's bytes to every rank. Returns the bytes of all ranks, by rank in the world. Blocks until every rank has
// called it; all ranks call it equally often. Runs over the ranks' process group on CPUs (gloo, MPI): no GPU work waits for it.
using AllGather = std::function<absl::StatusOr<std::vector<std::string>>(const std::string& bytes)>;

// Bytes of the window of weights.
struct WeightsRange {
  uint64_t begin_bytes = 0;
  uint64_t end_bytes = 0;
};

// A job over several nodes. Its ranks on one node follow each other; each node's daemon holds what its ranks own.
struct Nodes {
  uint32_t world_ranks = 0;  // ranks on all nodes; 0: the job is on one node
  AllGather all_gather = {};
};

struct AttachOptions {
  std::string socket = {};  // empty: FOREBAY_SOCKET, else /run/forebay/forebay.sock
  std::string job = {};     // 1 to 200 bytes of [A-Za-z0-9._-]
  // Attaches to a job that exists, without a rank: reads weights and states, delivers nothing. The
  // ranks never wait for it longer than the daemon's reader.lease_max; then its session ends.
  bool reader = false;
  uint32_t rank = 0;        // not of a reader
  uint32_t world_size = 1;  // ranks of the job, on this node; the layout does not depend on it
  // Set if ranks of the job run on other nodes. Requires sharded attachment with LayoutSpec::is_part. `rank` counts from
  // LayoutSpec::first_rank.
  Nodes nodes = {};
  // The run that this process belongs to, at most 200 printable ASCII characters without spaces.
  // Processes of one run replace each other; another run's job is continued only with `resume`.
  // Empty: FOREBAY_RUN, else this process alone. All ranks of a job need the same run: where there
  // are several, give it or set FOREBAY_RUN.
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
  // AnnounceStep will be called: blocks on swap are updated as soon as all their gradients are there. Their new
  // weights take as much DRAM as the weights have, where these are in DRAM.
  bool early_updates = false;
  // Not of a reader: what a power cut, or the daemon's death, can undo of the job's training. The first rank of
  // a new job decides for its life; another level is then refused with E_OPTION. Not set: the job's, of a new
  // one the daemon's default.
  std::optional<protocol::Durability> durability = {};
  protocol::LayoutSpec layout = {};
  // 0: four pieces of at most 32 MiB, sharded two (the least), on GPUs also the gradients of three layers; of a
  // reader: 1 MiB.
  uint64_t grad_arena_bytes = 0;
  uint64_t extra_state_bytes = 64 * protocol::kKiB;  // room for extra_state of one step
  // Bytes in each rank's arena for the activations of a forward pass (ActivationStore). Ignored for a reader.
  uint64_t activation_bytes = 0;
  // Not of a reader: keeps what this rank did in the newest step, for `forebay trace`; 68 KiB. For all ranks
  // what the job's first session says.
  bool trace = true;
  Timeout timeout = std::chrono::seconds(60);  // for Attach and for calls without their own
  // Not of a reader: how long a call waits for a daemon that is being restarted (`systemctl restart forebayd`),
  // within its own time. The session then goes on; after this long it has ended with E_DAEMON_GONE. Not set:
  // FOREBAY_DAEMON_WAIT in seconds, else kDaemonWait.
  std::optional<Timeout> daemon_wait = {};
  InterruptCheck interrupt_check = {};       // empty: none
  std::shared_ptr<gpu::Device> device = {};  // empty: gpu::HostDevice
  bool is_on_gpu = false;                    // for AdminClient::Plan; Attach asks the device
};

// The right to read one partition's weights until it is released.
struct Lease {
  uint64_t id = 0;
  uint32_t partition = 0;
  std::span<const std::byte> bytes = {};  // the partition within the window
};

// Elements of a partition from `first_elem` on, as many as `to` has room for, and where on the device
// they go.
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

// Bytes that a rank commits with a step. They count as one: first the parts of `front`, most of which are the same in each
// step (buffers), then `own`. Does not own them.
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
  uint64_t first_elem = 0;  // from the start of the parameter
};

// Since Attach. Times are wall time spent inside the calls.
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
  uint64_t reattaches = 0;     // to a daemon that was restarted
};

// One session. With shared attachment (a layout without partitions) partition g is group g, every rank
// delivers addends of every gradient, and the weights window holds the groups where the layout says.
// With sharded attachment rank r owns the layout's partitions of owner r: it writes their initial
// parameters and delivers their reduced gradients; it may fetch any partition, and the lease says where
// the bytes are.
//
// The weights window has one address for the life of the object, also after Detach and
// after the daemon's death.
//
// Where the daemon is restarted under its jobs, a session with a rank attaches again within the next call, and
// goes on: windows, leases, gradients on their way and the calls that wait stay what they are.
//
// Every call that waits returns E_DAEMON_GONE within a second of the daemon's death, E_TIMEOUT when
// its own time is up (the outcome is then unknown; Step may be called again with the same
// arguments), E_INTERRUPTED when the interrupt check says so. In a forked child every call returns
// E_FORKED and the destructor touches nothing.
//
// Errors     E_DEVICE where a call of the device's failed, now or in the background: the session has ended
//            then, as if the process had, and every later call says so.
//            What fails after its call has returned is kept, the first of its kind. A release error
//            is returned once, by the next Fetch, Release, gradient call or Step. A gradient error
//            is returned by every gradient call and Step until DropGradients; E_NONFINITE until a
//            Step has returned it. After that, and after E_GRAD_DROPPED and E_DRAM_LIMIT of Step, the
//            attempt at the step begins anew: gradients are delivered again.
// Threads    Any. Calls are serialised: one that waits holds up the others, but for the accessors.
// Ownership  Spans die with the object, or with what weights_owner() and grad_owner() returned.
class Attachment {
 public:
  // Connects, attaches and maps. Waits until other jobs have made room, the job's memory is made,
  // the initial parameters are written, a step under way is over and an older session of the rank
  // is closed.
  //
  // Errors  E_NO_DAEMON, E_PROTOCOL, E_PERMISSION, E_JOB_NAME, E_JOB_EXISTS, E_JOB_FAILED, E_BUSY,
  //         E_FENCED, E_LAYOUT, E_UNSUPPORTED, E_OPTION, E_RANK, E_RANGE, E_EXTRA_STATE, E_MEMLOCK,
  //         E_DRAM_LIMIT, E_SWAP_NOSPC, E_SWAP_IO, E_LIMIT, and those above. Nothing is left
  //         behind.
  //
  // Over several nodes every rank of the job attaches at once, and all of them raise what one of them meets. A step
  // that some nodes have committed and the others have prepared is committed by these too; one that none has is dropped.
  // Where a node has lost newer steps, all go back to the newest durable one that every node has (went_back_from).
  // Errors  E_STEP  the nodes stand at different steps all the same, and have no durable one in common.
  static absl::StatusOr<std::unique_ptr<Attachment>> Attach(AttachOptions options);

  // The last part of Attach, for tests that play the daemon: from mapped arenas and a ring.
  static absl::StatusOr<std::unique_ptr<Attachment>> Assemble(internal::SessionParts parts);

  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;
  // Without a Detach before it the daemon counts the rank as lost.
  ~Attachment();

  uint32_t rank() const;
  std::string_view device_name() const;  // name of AttachOptions::device
  uint64_t gradient_room_bytes() const;  // bytes of gradients that can be in flight
  // True if some partitions' weights are on swap. The weights arena is then a cache, and only a lease tells the place of a
  // partition's weights.
  bool weights_on_swap() const;
  // This session must write its partitions, then call InitialDone. Of a new job with shared attachment it is rank 0,
  // which the attaches of the others wait for.
  bool writes_initial() const;
  uint64_t committed_step() const;  // the newest step this session knows of
  // The newest step of any node, if this attach took a job over several nodes back to an older step. Otherwise 0.
  uint64_t went_back_from() const;
  std::span<const std::byte> extra_state() const;        // this rank's, of the step found at attach
  std::span<const std::byte> rank0_extra_state() const;  // the same of rank 0
  // Partitions in the order of a step; empty before the first.
  std::span<const uint32_t> trace() const;
  const protocol::Layout& layout() const;
  std::string device_access() const;  // how the device reaches the arenas, for people
  absl::Status CheckPartition(uint32_t partition) const;     // E_RANGE where there is none
  std::span<const std::byte> weights() const;                // the whole window, read-only
  std::span<const std::byte> weights(uint32_t group) const;  // one group of it; shared alone
  std::shared_ptr<const void> weights_owner() const;         // keeps the window mapped
  // From now on this process may write into weights(), if InstallSegvHandler (client/window_registry.h) was called: the
  // pages around a write become its own, and show what was written to this process alone until DropWrittenWeights.
  // read(2) and other system calls that would write there fail (EFAULT) where the pages are not its own yet.
  //
  // Errors  E_UNSUPPORTED  sharded, or a reader. E_LIMIT  kWindowsMax.
  absl::Status AllowWeightWrites();
  bool has_written_weights() const;
  // The ranges that are this process's own, at least 2 MiB around each write.
  std::vector<WeightsRange> WrittenWeights() const;
  // The daemon's bytes behind all of weights(), mapped once more; as long as weights().
  absl::StatusOr<std::shared_ptr<const std::byte>> DaemonWeights() const;
  // No other thread writes meanwhile.
  void DropWrittenWeights();
  // AttachOptions::activation_bytes; none once detached.
  std::span<std::byte> activation_room() const;
  std::shared_ptr<const void> activation_owner() const;  // keeps it mapped and registered
  // A word for the user of the room, which is lost when bytes of the room are lost. Null if there is no room.
  std::atomic<uint64_t>* activation_mark() const;
  // Records the work of the caller's own streams for `forebay trace`.
  std::shared_ptr<internal::DeviceTrace> device_trace() const;

  // Asks the daemon whether the session goes on. OK while a call runs on another thread: that call ends with
  // the error.
  //
  // Errors  E_RANK_LOST  another rank was lost. E_FENCED, E_DAEMON_GONE, E_TIMEOUT.
  absl::Status CheckSession(Timeout timeout);

  // All bytes of a partition; sharded: of one that this rank owns. InitialDone returns when the job is
  // ready: sharded, when every rank has called it.
  absl::Status WriteInitial(uint32_t partition, std::span<const std::byte> bytes, Timeout timeout);
  absl::Status InitialDone(Timeout timeout);

  // Sets one state of a partition's elements from `first_elem` on, by name as ReadState; the others stay.
  // "master" sets the weights too, which are the masters rounded: as initial parameters instead of
  // WriteInitial (then every rank writes all of its partitions so), or between steps. Moments between steps
  // alone: in format int8 whole groups of 128 elements of a parameter's part in the partition. With shared
  // attachment any one rank writes, with sharded the owner.
  //
  // Errors  E_NONFINITE  one is not finite, is rounded to infinity, or is a square (a second moment) below 0:
  //                      nothing is written.
  //         E_RANGE      no such state or elements, frozen parameters among them, a part of a group.
  //         E_STEP       this rank has called step.
  //         E_LEASE      this session holds a lease on the partition.
  //         E_SWAP_NOSPC durable steps keep what is there, and swap has no slot for another version; a part may be
  //                      written.
  absl::Status WriteState(uint32_t partition, uint64_t first_elem, std::string_view state,
                          std::span<const float> values, Timeout timeout);
  // Sets, for all ranks, how many updates parameter `param` of the layout has had. To be called between steps.
  //
  // Errors  E_RANGE  no such parameter, a frozen one, or more than kUpdatesMax updates. E_STEP as above.
  absl::Status WriteUpdates(uint32_t param, uint64_t updates, Timeout timeout);

  // Asks for a lease and returns: IsFetchDone looks, FinishFetch waits, CancelFetch gives up (a lease
  // that arrives later is given back). A ticket is used up by a FinishFetch that returns neither
  // E_TIMEOUT nor E_INTERRUPTED, and by CancelFetch. StartFetch waits, at most
  // AttachOptions::timeout, only while kRingEntries commands are in flight.
  //
  // Errors  E_LEASE  the ticket is used up, or another attachment's.
  absl::StatusOr<FetchTicket> StartFetch(uint32_t partition);
  absl::StatusOr<bool> IsFetchDone(const FetchTicket& ticket);
  absl::StatusOr<Lease> FinishFetch(const FetchTicket& ticket, Timeout timeout);
  absl::Status CancelFetch(const FetchTicket& ticket);

  // StartFetch and FinishFetch; cancelled where it gives up.
  absl::StatusOr<Lease> Fetch(uint32_t partition, Timeout timeout);
  // Leases the partitions (one after the other where weights are on swap, else at once), begins to copy on
  // `stream`, and returns. A lease is given back when the
  // copies from its partition have ended: by this call where they end at once, else by a thread of the
  // session's or a later call. Step waits for the copies first.
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
  // Asks for all of them at once, so that each Locate that follows waits for its own partitions alone.
  absl::Status LocateAhead(std::span<const uint32_t> partitions, Timeout timeout);

  // Releases leases whose copies have ended. Returns the number of leases that still wait for their copies.
  absl::StatusOr<size_t> GiveBackCopied();

  // Does not wait for its completion.
  absl::Status Release(const Lease& lease);

  // Gradients travel in pieces: ranges of a partition of at most kGradPieceBytesMax. Two ways to deliver,
  // a partition by one of them in a step:
  //
  //   a parameter at a time   AddGradient copies it into the open pieces it lies in, and delivers
  //                           each piece as soon as all its parameters are there. FlushGradients
  //                           delivers what is there of the others: call it where no more gradients
  //                           of a partition will come (after the module's backward) and at the end of
  //                           backward. What was not added by then has no gradient, unless a later
  //                           AddGradient still brings it; Step flushes too.
  //   a partition at a time   GradSlot, fill it, GradReady: every parameter of it has a gradient.
  //
  // A parameter without a gradient on any rank is not updated; with one on some, the others count as
  // zero. To begin the step anew (a bad batch, an exception in backward): DropGradients.

  // The whole gradient of parameter `param` of the layout, in the gradients' dtype; sharded: of what this
  // rank owns of it, box after box. Waits, at most `timeout`,
  // for room while pieces delivered earlier hold it.
  //
  // Errors  E_GRAD_REPEAT  the parameter has a gradient in this pass, or its partition was delivered.
  //         E_RANGE        no such parameter, or another number of bytes.
  //         E_RANK         sharded: the rank owns nothing of it.
  //         E_STEP         shared: the rank has asked for a norm (GradNorm).
  //         After other errors the attempt is lost: DropGradients.
  absl::Status AddGradient(uint32_t param, std::span<const std::byte> bytes, Timeout timeout);

  // Adds a gradient in device memory that work begun on `ready` so far fills. Returns when the copies have begun, on a stream
  // of the session. A piece is delivered when the copies into it have ended, also between two calls. Errors of AddGradient
  // above, and E_RANGE if the memory is another device's or its address misaligned.
  //
  // Ownership  `bytes` live until `keep` was dropped, which happens when they were copied: on any thread,
  //            while the session is locked. The stream is borrowed.
  absl::Status AddGradient(uint32_t param, std::span<const std::byte> bytes, gpu::Stream& ready,
                           const std::shared_ptr<const void>& keep, Timeout timeout);
  absl::Status FlushGradients(std::optional<uint32_t> partition = std::nullopt);  // empty: of all

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

  // The norm of a parameter's gradient, or of the whole (empty); 0 where there is none. Delivers open
  // pieces first. Sharded: of what this rank owns, of all passes so far. Shared: of the job's gradient,
  // the mean over the ranks; waits until every other rank has asked too or called step, and ends this
  // rank's delivery of the step.
  //
  // Errors  E_NONFINITE, E_GRAD_DROPPED  as Step; Step says it again, DropGradients begins anew.
  //         E_RANGE                      no such parameter.
  absl::StatusOr<double> GradNorm(std::optional<uint32_t> param, Timeout timeout);

  // The partition's open slot, made and filled where there is none: room for its gradient. Waits
  // for room while gradients delivered earlier hold it; is private memory where open slots hold it,
  // or where the partition is larger than a piece.
  absl::StatusOr<std::span<std::byte>> GradSlot(uint32_t partition, GradFill fill, Timeout timeout);
  // Keeps the open slot mapped; or null.
  std::shared_ptr<const void> grad_owner(uint32_t partition);

  // Delivers the open slot, whose bytes are the daemon's from now on. Returns at once, but for a
  // private slot, which waits for room in the arena, at most AttachOptions::timeout.
  //
  // Errors  E_NOT_READY  the partition has no open slot.
  absl::Status GradReady(uint32_t partition);

  // Forgets open slots and pieces and the kept gradient error. Where something of this attempt was
  // delivered, this rank's next attempt at the step begins: what all ranks have delivered in older
  // ones is discarded, and a Step of theirs returns E_GRAD_DROPPED.
  absl::Status DropGradients();

  // Before the last backward pass of step `t`: Step will have these hyper-parameters and this edit, and will
  // not clip. What is delivered from now on is updated at once (AttachOptions::early_updates). A promise that
  // is not kept costs time alone: Step updates those blocks anew.
  //
  // Errors  E_STEP  t is not the next step.
  absl::Status AnnounceStep(uint64_t t, std::span<const protocol::HyperParams> hyper_params,
                            Timeout timeout, const GradientEdit& edit = {});

  // Applies step `t` once all ranks have called it. Open pieces are delivered; open slots are neither
  // delivered nor dropped.
  //
  // Errors  E_OVERFLOW      masters became non-finite; the step is committed nevertheless.
  //         E_NONFINITE     a gradient, or the sum of all ranks'. Nothing was applied.
  //         E_GRAD_DROPPED  another rank has begun the step anew. Nothing was applied.
  //                         After these two the rank is at the newest attempt: bring all gradients of
  //                         the step again, then call Step.
  absl::StatusOr<StepResult> Step(uint64_t t, std::span<const protocol::HyperParams> hyper_params,
                                  double max_grad_norm, const ExtraState& extra_state,
                                  Timeout timeout, const GradientEdit& edit = {});

  // Reads out.size() elements (0: none) of a state as float32, whatever the format holds it in, and returns how
  // many updates the parameter has had (torch's "step"). All of one step: a reader that meets another
  // one between two pieces begins anew.
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

  // Ends the session in good order; views stay readable. While the daemon is being restarted it ends here
  // alone: the next daemon sees that the rank does not come back.
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
