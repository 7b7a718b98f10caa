# SPDX-License-Identifier: Apache-2.0
@0x99f8f5f99f3e5b87;
# The control plane of Forebay: Cap'n Proto RPC over a Unix socket.
#
# Everything that happens once (hello, attach, descriptors, statistics) is here; whatever happens in every training
# step goes through the rings (protocol/wire.h). Outcomes a caller must handle are ordinary results: `Outcome` with a
# stable id; an exception means a broken connection. One descriptor a message. No message is larger than 256 KiB: a
# layout travels in a memfd. A field that was removed keeps its number, which is never used again, under the name "obsolete".

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("forebay::schema");

struct Outcome {
  # How a call ended. `error` is a number of protocol/error.h, 0 on success.
  error @0 :UInt16;
  message @1 :Text;
  hint @2 :Text;
}

interface Descriptor {
  # A capability that carries one file descriptor (Client::getFd()). The descriptor outlives the capability.
}

interface Node {
  # The bootstrap capability: the daemon on this node.

  hello @0 (protocolVersion :UInt32, program :Text, onBehalfOf :Int64 = -1, sessionWaitMs :UInt32) -> (outcome :Outcome, info :NodeInfo);
  # First call of every connection. Another version is refused with E_PROTOCOL that names both. `onBehalfOf`: not
  # negative, a uid: all that this connection does is done as that user, who sees no other user's jobs. From root and
  # the daemon's own user alone (forebay-gateway). `sessionWaitMs`, of such a connection: where it is lost, ranks have
  # so long to attach again (AttachRequest.reattach) before their sessions end.

  attach @1 (request :AttachRequest, layout :Descriptor) -> (outcome :Outcome, session :Session, reply :AttachReply);
  # Makes the caller rank `rank` of a job, which is created where it does not exist, or a reader of an existing one.
  # Waits until the job can accept the rank: memory created, the initial parameters written (unless it is this session that
  # writes them), a step in progress done. A live session of the same rank is fenced. The layout is a sealed memfd
  # with an encoded LayoutSpec.

  admin @2 () -> (outcome :Outcome, admin :Admin);
  # Reading needs no more than access to the socket, but shows jobs of other users to root, the daemon's user and the
  # group socket.operators alone; what changes something checks the caller's uid.
}

struct NodeInfo {
  pid @0 :UInt32;
  version @1 :Text;         # of the program
  protocolVersion @2 :UInt32;
  identity @3 :Text;        # of this process, and of no other daemon anywhere: ranks on several machines tell by it
                            # whether they have the same one
}

struct AttachRequest {
  job @0 :Text;              # 1 to 200 bytes of [A-Za-z0-9._-]
  rank @1 :UInt32;           # not of a reader
  worldSize @2 :UInt32;
  gradArenaBytes @3 :UInt64;    # for gradients; at least two pieces (32 MiB, or the largest group). Of a reader: for states
  extraStateBytes @4 :UInt64;   # room for extra_state of one step, at most 480 MiB, of a rank on another node 16 MiB
  layoutBytes @5 :UInt64;       # of the encoded LayoutSpec at offset 0 of the memfd, at most 64 MiB
  run @6 :Text;                 # token of the run this process belongs to, at most 200 bytes
  resume @7 :Bool;              # continue a job that another run has trained
  accumulate @9 :Bool;          # steps have several backward passes: sums take 4 bytes an element from the start
  writableWeights @10 :Bool;    # not of a reader: the weights' descriptor is for writing too, for a device
                                # that takes no memory that is mapped read-only
  activationBytes @11 :UInt64;  # not of a reader: room for what a forward pass keeps, behind the step region
  trace @12 :Bool;              # not of a reader: TraceMemory (wire.h) at the end of the arena
  earlyUpdates @13 :Bool;       # blocks on swap may be updated before the decision: room for their new weights
  durability @14 :Text;         # not of a reader: "memory", "epoch=N" or "step"; of a job that exists it is the job's.
                                # Empty: the daemon's default, or the job's
  reattach @15 :Bool;           # not of a reader: of a client whose session a daemon before this one has ended to be
                                # restarted (wire.h): it has its arenas mapped, and gets descriptors of the same
  heldLeases @16 :List(UInt64); # of a reattach to a job with weights on swap: that the session had
  gradArena @17 :UInt64;        # of a reattach: inode of the gradient arena that it has mapped (AttachReply.remoteGradArena
                                # if the reply had one). 0: it does not say
  newestTag @19 :UInt64;        # of a reattach: of the commands that the client has sent. What has no newer one is sent again
  exchanged @20 :List(Data);    # of a reattach: the answer of the newest exchange that the session has had one of; empty:
                                # of none, or it is larger than kExchangedBytesMax. Others may not have had it
  exchanges @21 :UInt64;        # of a reattach: that the session has had the answer of
  worldRanks @18 :UInt32;       # of a job over several nodes: all ranks, of which worldSize are on this node; 0: those
  reader @8 :Bool;              # no rank: reads weights and states, delivers nothing, is in no barrier
}

struct LayoutMessage {
  # The content of the layout memfd: an unpacked message with protocol::LayoutSpec. It says nothing of ranks.
  dtype @0 :Text;
  optimizer @1 :Text;
  format @2 :Text;
  groupNames @3 :List(Text);
  params @4 :List(Param);
  seed @5 :UInt64;                   # of formats that round stochastically
  partitions @6 :List(Partition);    # empty: shared attachment, the node owns every group whole
  gradDtype @7 :Text;                # of gradients; empty: that of the weights
  isPart @8 :Bool;                   # the partitions are those of one node; the other elements are elsewhere
  firstRank @9 :UInt32;              # of its ranks in the world: that of owner 0
  hasReplicas @10 :Bool;             # other nodes hold some of the partitions too

  struct Param {
    name @0 :Text;
    shape @1 :List(UInt64);
    group @2 :UInt32;
    paramGroup @3 :UInt32;
    frozen @4 :Bool;
  }

  struct Partition {
    group @0 :UInt32;
    owner @1 :UInt32;
    replica @2 :UInt32;
    boxes @3 :List(Box);
  }

  struct Box {
    param @0 :UInt32;
    firstElem @1 :UInt64;
    runElems @2 :UInt64;
    strideElems @3 :UInt64;
    runs @4 :UInt64;
  }
}

struct AttachReply {
  jobId @0 :UInt64;
  sessionId @1 :UInt64;
  committedStep @2 :UInt64;
  writesInitial @3 :Bool;    # this session must write initial parameters (Op.kWriteInitial, kInitialDone)
  weightsBytes @4 :UInt64;
  gradArenaBytes @5 :UInt64;    # of the whole arena: gradients, the step region, activations, then the trace
  stepRegionOffset @6 :UInt64;  # where the StepRequest and the extra_state go
  stepRegionBytes @7 :UInt64;
  extraStateBytes @8 :UInt64;   # of the extra_state committed with committedStep; 0 for none
  trace @9 :List(UInt32);       # partitions (sharded: this rank's own) in the order in which a step touches them
  rank0ExtraStateBytes @10 :UInt64;  # of rank 0's, for the other ranks: it follows their own in the same memfd
  attempt @11 :UInt64;          # the newest one at the next step (wire.h): where this session begins
  traceBytes @12 :UInt64;       # at the end of the arena; 0: the job's first session did not ask for it
  weightsOnSwap @13 :Bool;      # of some partitions: the arena is a cache, and a lease alone says where they are
  outlivesDaemon @14 :Bool;     # the job: where the daemon is killed, the session attaches again to the next one
  leases @15 :UInt32;           # of AttachRequest.heldLeases, that the session has now
  # Set only if the job is on several nodes.
  preparedStep @16 :UInt64;     # committedStep + 1, which the node has prepared and nobody has decided; 0: none
  durableStep @17 :UInt64;      # the newest that the node can go back to; of level "memory" 0
  summary @18 :Data;            # by which committedStep was committed; empty: the daemon does not know
  durableBefore @19 :UInt64;    # an older one that it can go back to; 0: none
  # If the daemon is on another node, the inodes of its arenas, which differ from those of the descriptors; else 0.
  remoteWeights @20 :UInt64;
  remoteGradArena @21 :UInt64;
}

interface Session {
  # One rank or reader. Dropping it, closing the connection or the death of the process ends the session (but see
  # Node.hello, sessionWaitMs).

  descriptor @0 (kind :Kind) -> (outcome :Outcome, descriptor :Descriptor);
  # The arenas and doorbells of the session, one a call.

  enum Kind {
    weights @0;             # read-only, but for AttachRequest.writableWeights
    gradArena @1;         # read and write; map it, then call mapped()
    ring @2;              # RingMemory, read and write
    commandDoorbell @3;     # eventfd the client writes
    completionDoorbell @4;  # end of a socket pair; readable after the daemon rang
    extraState @5;        # memfd, read-only, with the committed extra_state of this rank, then rank 0's
  }

  mapped @1 () -> (outcome :Outcome);
  # The client has mapped its arenas: the daemon reads its commands from now on.

  explain @2 (tag :UInt64) -> (outcome :Outcome);
  # The text behind a Completion whose `error` is not 0. The daemon keeps the newest 64 of a session.

  exchange @4 (bytes :Data, number :UInt64) -> (outcome :Outcome, all :List(Data));
  # The bytes of every rank, once all have called it: at most 4 KiB each. E_RANK_LOST where a rank ends before.
  # `number`: of exchanges that this session has had the answer of. Where a call gave up, and the others had
  # their answer, the next one, of the same number, gets that answer.

  detach @3 () -> (outcome :Outcome);
  # Ends the session in good order: leases released, no other rank is fenced.

  end @5 () -> (outcome :Outcome);
  # The client is no more: ends the session at once, as where a process dies. Of a connection that acts for others.
}

interface Admin {
  status @0 () -> (status :NodeStatus);
  trace @1 (job :Text) -> (outcome :Outcome, events :List(TraceEvent));
  # Timed events of the newest completed step of a job: the daemon's, and those of ranks that are attached.
  deleteJob @2 (job :Text) -> (outcome :Outcome);
  # Frees a job's memory and swap. Refused while it has ranks, and to others than its owner or root;
  # readers are ended.
  plan @3 (request :AttachRequest, layout :Descriptor, limitBytes :UInt64, swapBytes :UInt64) -> (outcome :Outcome, plan :JobPlan);
  # Bytes that an attach would allocate, by the daemon's own sum; nothing is allocated. With limitBytes 0: on this node as it
  # is now. Else on an empty node with this daemon's settings, that limit of DRAM and so much swap.
  planJob @5 (job :Text, limitBytes :UInt64, swapBytes :UInt64) -> (outcome :Outcome, plan :JobPlan);
  # The same sum of an existing job. With limitBytes 0: as it is now, its blocks where they are. Else what its
  # first rank would allocate on such an empty node.
  scrub @4 (bytesPerSecond :UInt64) -> (outcome :Outcome, report :ScrubReport);
  # Reads and verifies what the caller's durable jobs, or all that it may see, have on swap, behind the jobs' own
  # transfers and no faster than that; 0: a tenth of what the paths were measured with. Answers when it is done.
}

struct JobPlan {
  # Sizes in bytes; the first seven, and newWeights, are the job's DRAM.
  weights @0 :UInt64;       # of partitions whose weights stay in DRAM
  weightsCache @1 :UInt64;  # for copies of the others
  states @2 :UInt64;        # of blocks that are in DRAM
  sums @3 :UInt64;          # of gradients, and more pieces for overflow
  extraState @4 :UInt64;
  sessions @5 :UInt64;      # of all ranks: gradients on their way, activations, rings
  tables @6 :UInt64;
  node @7 :UInt64;          # the daemon itself: its private memory, and staging for swap
  others @8 :UInt64;        # other jobs
  limit @9 :UInt64;
  missing @10 :UInt64;      # of the limit, until other jobs have moved states to swap
  weightsOnSwap @11 :UInt64;
  blocks @12 :UInt32;
  residentBlocks @13 :UInt32;
  swap @14 :UInt64;         # bytes on swap: two slots for each block that is not in DRAM; at levels `epoch` and `step`
                            # more for it, and slots for what is in DRAM
  stepRead @15 :UInt64;     # from swap in a step in which every parameter has a gradient: states and weights of the
                            # update, and weights twice, in forward and backward
  stepWritten @16 :UInt64;
  allInDram @17 :UInt64;    # the limit with which nothing would be on swap
  newWeights @18 :UInt64;   # of early updates, until their step is decided
  gradientsOnSwap @19 :UInt64;  # those of a step that find no room in `sums`, at most: written, and read again unless
                                # their block was updated early; beside stepRead and stepWritten
  # Parts of `sessions` that each rank has: its arena, in four parts, its ring, and its copy of extra_state at attach.
  gradArena @20 :UInt64;        # gradients on their way
  stepRegion @21 :UInt64;
  activations @22 :UInt64;
  trace @23 :UInt64;
  ring @24 :UInt64;
  extraStateCopy @25 :UInt64;
  ranks @26 :List(RankPlan);    # of a sharded job
  durableWritten @27 :UInt64;   # beside stepWritten, by a step that becomes durable: what is in DRAM
  durableEvery @28 :UInt64;     # each so many steps; 0: none does
}

struct RankPlan {
  # Bytes that the partitions of one rank take. All ranks together: the terms of those names in JobPlan; `sums` without what
  # is common to all, and with those that find no room.
  rank @0 :UInt32;
  weights @1 :UInt64;
  weightsCache @2 :UInt64;
  states @3 :UInt64;
  sums @4 :UInt64;
  weightsOnSwap @5 :UInt64;
  statesOnSwap @6 :UInt64;      # of blocks, without slots for their next versions
  largestPartition @7 :UInt64;  # its weights: what one fetch brings
}

struct NodeStatus {
  info @0 :NodeInfo;
  uptimeSeconds @1 :Float64;
  memory @2 :MemoryStatus;
  swap @3 :List(SwapPathStatus);
  jobs @4 :List(JobStatus);
  ioEngine @5 :Text;        # "io_uring" or "threads"; the loop sleeps in it without swap too
  ioEngineReason @6 :Text;  # why not io_uring
  adamTarget @7 :Text;      # instruction set of the kernels
  workers @8 :UInt32;
  socketPath @9 :Text;
  scrubbedBytes @10 :UInt64;  # while a scrub runs: of what durable jobs have on swap, so much is verified
  scrubBytes @11 :UInt64;     # of so much; 0: none runs
  loopEvents @12 :UInt64;     # that the state machine has handled: commands, tasks' ends, transfers' ends, timers
  # CPU time of the thread that handles them, the kernel's included (it gives requests to the disk and wakes workers).
  loopCpuSeconds @13 :Float64;
}

struct MemoryStatus {
  limitBytes @0 :UInt64;
  usedBytes @1 :UInt64;      # allocated bytes of every memfd as the kernel counts them + private memory
  privateBytes @2 :UInt64;   # RssAnon of the daemon: heap and stacks; no page of a memfd is in it
  lockedBytes @3 :UInt64;
  hugeBytes @4 :UInt64;      # on 2 MiB pages
  peakBytes @5 :UInt64;      # highest usedBytes seen at attach and step ends
  arenas @6 :List(ArenaStatus);
}

struct ArenaStatus {
  kind @0 :Text;       # weights, state, step, staging, grad, ring, extra_state, weights of a deleted job
  job @1 :Text;        # empty for the node's own
  rank @2 :Int32;      # -1 where it belongs to no rank
  numaNodes @3 :List(UInt32);  # on which its pages are, ascending; several: interleaved
  sizeBytes @4 :UInt64;
  allocatedBytes @5 :UInt64;
  hugeBytes @6 :UInt64;
  locked @7 :Bool;
}

struct SwapPathStatus {
  path @0 :Text;
  capacityBytes @1 :UInt64;
  usedBytes @2 :UInt64;
  readBytes @3 :UInt64;
  writtenBytes @4 :UInt64;
  readOps @5 :UInt64;
  writeOps @6 :UInt64;
  errors @7 :UInt64;
  retries @8 :UInt64;
  direct @9 :Bool;       # the descriptor has O_DIRECT
  late @10 :UInt64;      # requests that took longer than 10 s, those in flight included
  lateNow @11 :UInt32;   # of these, in flight: the device does not answer
  lateSeconds @12 :Float64;  # how long the longest of these waits
  readErrors @13 :UInt64;    # of `errors`, the reads: blocks that could not be read back
  obsolete14 @14 :UInt64;    # was writtenDay
  obsolete15 @15 :UInt64;    # was enduranceBytes
  obsolete16 @16 :Float64;   # was daysLeft
  # Rates measured at the daemon's first start on this path, bytes a second; 0: not measured.
  readRate @17 :Float64;
  writeRate @18 :Float64;
  mixedRate @19 :Float64;      # of reads and writes together, as many of each
  requestBytes @20 :UInt64;    # the smallest requests, and the fewest of them, that read at 0.97 of the best rate
  requestsAtOnce @21 :UInt32;
  readSeconds @22 :Float64;    # of 1 MiB, alone
  share @23 :Float64;          # of new writes, by what the paths give now; all add up to 1
  # Rates of the path's last transfers, in both directions at once; 0: too few so far, and not measured.
  readRateNow @24 :Float64;
  writeRateNow @25 :Float64;
  marked @26 :Bool;  # it has failed repeatedly: it gets new writes if no other path has room, and its blocks move to other paths
  # Shares of readRate and writeRate that the last transfers reached; 0: not measured, or too few so far. While the path reads
  # and writes at once, each direction counts the time that the other leaves.
  readShare @27 :Float64;
  writeShare @28 :Float64;
  writtenInAll @29 :UInt64;  # over all starts of the daemon if the path's files persist; zeros over slots that jobs
                             # take are written too
}

struct JobStatus {
  name @0 :Text;
  id @1 :UInt64;
  uid @2 :UInt32;
  worldSize @3 :UInt32;
  sessions @4 :UInt32;
  committedStep @5 :UInt64;
  params @6 :UInt64;
  trainableParams @7 :UInt64;   # of these, those that are not frozen
  dtype @8 :Text;
  optimizer @9 :Text;
  format @10 :Text;
  stateBytes @11 :UInt64;    # weights and states of the parameters, padding left out
  blocks @12 :UInt32;
  residentBlocks @13 :UInt32;
  leases @14 :UInt32;
  updateReads @15 :UInt64;       # swap reads an update needed, since the job began
  updateReadsPrefetched @16 :UInt64;  # of these, requested before the update waited for them
  stateReadBytes @17 :UInt64;    # swap bytes read for updates
  stateWrittenBytes @18 :UInt64;
  failed @19 :Text;              # the error that made the job unusable; empty while the job is ok
  groups @20 :List(Text);
  lastStepReads @21 :UInt64;         # updateReads of the newest step
  lastStepReadsPrefetched @22 :UInt64;
  lastStepSeconds @23 :Float64;      # of the newest published step: from the last rank's call to its publication
  rpcCalls @24 :UInt64;              # control-plane calls of its sessions so far
  swapWait @25 :Text;  # the failed write that the running step waits for, tried again until it succeeds
  madeBytes @26 :UInt64;             # while its arenas and swap slots are created, or read back from swap: bytes so far
  makingBytes @27 :UInt64;           # of so many; both 0 afterwards
  evictedBlocks @28 :UInt64;   # moved from DRAM to swap between steps, to make room for other jobs
  promotedBlocks @29 :UInt64;  # moved back
  failedMoves @30 :UInt64;     # of either, whose write or read has failed: no bytes were lost
  weightsOnSwapBytes @31 :UInt64;   # of partitions whose weights are on swap; 0: all are in DRAM
  weightsCacheBytes @32 :UInt64;    # DRAM for copies of them
  weightFetches @33 :UInt64;        # of such partitions, answered so far
  weightFetchesAhead @34 :UInt64;   # of these, whose weights were in DRAM or on their way when they were asked for
  weightReadBytes @35 :UInt64;      # swap bytes read for them
  lastStepReadBytes @36 :UInt64;    # of the newest step: for updates
  lastStepWrittenBytes @37 :UInt64;
  publishedStep @38 :UInt64;        # all blocks of it are updated and written: committedStep, or the one before
  lastDecisionSeconds @39 :Float64;  # of the newest published step: from the last rank's call to the decision
  earlyUpdates @40 :UInt64;          # blocks that were updated before the decision of their step, and taken by it
  droppedUpdates @41 :UInt64;        # and updated again, because the step was another than announced, or had no use
  lastStepEarlyUpdates @42 :UInt64;  # of the newest step
  swapBytes @43 :UInt64;             # taken on swap
  stepReadBytes @44 :UInt64;         # of swap, in a step as JobPlan has it
  stepWrittenBytes @45 :UInt64;
  newWeightsBytes @46 :UInt64;       # DRAM for those of early updates
  lastUpdateBytes @47 :UInt64;       # of the newest step: read and written from its decision to its publication
  gradientsOnSwapBytes @48 :UInt64;  # of a step, at most; 0: all are in DRAM
  gradientReadBytes @49 :UInt64;     # of swap, in all steps
  gradientWrittenBytes @50 :UInt64;
  relocatedBlocks @51 :UInt64;       # moved off marked swap paths, or out of slots in doubt, between steps
  reclaimedReads @52 :UInt64;        # blocks read ahead whose slot something else needed first: they are read again
  durability @53 :Text;              # "memory", "epoch=N" or "step"
  durableStep @54 :UInt64;           # the newest that the daemon's death and a power cut leave; of "memory" 0
}

struct ScrubReport {
  # Every slot of durable jobs that the newest durable ledger names was read and verified.
  clean @0 :Bool;             # every job can be recovered at its newest durable step
  sequence @1 :UInt64;        # of the ledger; 0: nothing was ever committed
  fellBack @2 :Bool;          # a newer one may be lost, by damage or by a power cut while it was written: jobs may
                              # be recovered at the durable step before the newest
  # Copies that are not whole; where `fellBack` is false the others are.
  damagedLabels @3 :UInt32;
  damagedRecords @4 :UInt32;
  damagedLedgers @5 :UInt32;
  jobs @6 :List(ScrubbedJob);
}

struct ScrubbedJob {
  name @0 :Text;
  uid @1 :UInt32;
  durability @2 :Text;      # as in JobStatus
  durableStep @3 :UInt64;
  slots @4 :UInt64;
  bytes @5 :UInt64;
  seconds @6 :Float64;
  damaged @7 :List(DamagedSlot);  # by a daemon that runs: the first 256
  damagedSlots @8 :UInt64;
}

struct DamagedSlot {
  what @0 :Text;            # "block 3", "part 0 of the weights"
  path @1 :Text;            # the file or device
  offsetBytes @2 :UInt64;   # in it
  bytes @3 :UInt64;
  params @4 :List(Text);    # that have elements in it; by a daemon that runs: the first 16
  error @5 :Text;
  moreParams @6 :UInt32;    # than `params` names
}

struct TraceEvent {
  lane @0 :Text;       # of the daemon: "gradient", "swap read", "update", "swap write", "step"; of a rank:
                       # Name(ClientLane) of trace.h
  name @1 :Text;       # what: group or block
  startNs @2 :UInt64;  # CLOCK_MONOTONIC
  endNs @3 :UInt64;
  bytes @4 :UInt64;
  process @5 :Text;    # "forebayd", "rank 0"
}
