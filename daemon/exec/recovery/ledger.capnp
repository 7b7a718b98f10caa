# SPDX-License-Identifier: Apache-2.0
@0xd1c6e0b4a97f3825;
# The ledger, which the swap volume makes durable: everything from which the next daemon recovers the jobs. The file also has the
# entries of the record of a job in memory (kept_record.h). Both stay while programs change, so fields and kinds of entries are
# added at the end and never change their meaning. A change that an older program would read wrongly raises the version
# (ledger_codec.cc, kept_record.cc).

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("forebay::daemon::schema");

struct Ledger {
  version @0 :UInt32;   # from 1; comes first and stays
  nonce @1 :UInt64;     # of the volume, part of every checksum
  lastJob @2 :UInt64;   # ids up to this one were assigned
  jobs @3 :List(Job);

  lastLease @4 :UInt64;  # of release 0.2.0; not read
  sequence @5 :UInt64;   # of release 0.2.0; not read

  # The place of the volume (volume_place.h).
  machine @6 :Data;     # empty: not known
  paths @7 :List(Path); # in the volume's order; empty: written by a program that did not record paths
}

struct Path {
  name @0 :Text;
  inode @1 :UInt64;  # 0: of a device
  disk @2 :Text;     # of a device: what it says of itself; empty: nothing
}

struct Job {
  id @0 :UInt64;
  name @1 :Text;
  uid @2 :UInt32;
  run @3 :Text;             # token of the run that trained it
  durability @4 :Text;      # "memory", "epoch=10", "step"
  layout @5 :Data;          # an unpacked LayoutMessage (protocol/layout_codec.h)
  worldSize @6 :UInt32;
  blockElems @7 :UInt64;
  slotBytes @8 :UInt64;     # of all its slots
  weightsOnSwap @9 :List(Bool);     # by partition; empty: of none
  step @10 :UInt64;                 # published, with all before it
  paramUpdates @11 :List(UInt64);   # by parameter: steps in which it had a gradient
  trace @12 :List(UInt32);          # partitions
  extraStates @13 :List(Data);      # by rank
  blocks @14 :List(Bytes);
  weights @15 :List(Bytes);         # parts of the arena, from its beginning
  digests @16 :List(UInt64);        # of the pages of all blocks' planes of weights, in the blocks' order
  kept @17 :Kept;                   # of a job whose memory is retained
  before @18 :Job;  # the durable step before, of a job over several nodes: its step, run, and what is bytes or a list.
                    # Since version 2
}

struct Kept {
  # KeptMemory of daemon/core/base/durable_job.h.
  resident @0 :List(Bool);          # by block
  weightsBytes @1 :UInt64;
  dramBytes @2 :UInt64;
  gradArenaBytes @3 :UInt64;
  extraStateBytes @4 :UInt64;
  activationBytes @5 :UInt64;
  trace @6 :Bool;
  accumulate @7 :Bool;
  earlyUpdates @8 :Bool;
  earlyWeightsSlots @9 :UInt32;
  attempt @10 :UInt64;
  spareSlots @11 :List(Bytes);      # of the job's slot size
  sumSlots @12 :List(Bytes);
  sumSlotBytes @13 :UInt64;
  writtenSteps @14 :List(UInt64);   # by block
  stepBytes @15 :UInt64;
  wasKilled @16 :Bool;              # false of a job that release 0.2.0 has handed over (release_before.h)
  norm @17 :Float64;
  clipped @18 :Bool;
  overflowed @19 :UInt64;
  sumFrames @20 :UInt32;
  leases @21 :List(Lease);
  worldRanks @22 :UInt32;
  summary @23 :Data;
  countsHandedOver @24 :Bool;       # of release 0.2.0; not read
}

struct Lease {
  lease @0 :UInt64;
  offsetBytes @1 :UInt64;
  rank @2 :UInt32;
  partition @3 :UInt32;
}

struct Bytes {
  # In a slot: 32 bytes, without pointers.
  offsetBytes @0 :UInt64;
  checksum @1 :UInt64;
  writtenStep @2 :UInt64;
  path @3 :UInt32;       # 1 + the path; 0: states that are all zeros and were never written
  digestPages @4 :UInt32;   # so many of `digests` are of this block
}

struct RecordEntry {
  # An action of daemon/core/base/record_actions.h. A daemon that does not know the kind of an entry is older than the record. It
  # refuses the record (E_CONFIG) and does not drop it.
  union {
    block @0 :BlockEntry;
    installed @1 :UInt32;   # the block whose new weights are in the weights arena
    staged @2 :StagedEntry;
    sums @3 :SumsEntry;
    attempt @4 :AttemptEntry;
    prepared @5 :PreparedEntry;
    decision @6 :DecisionEntry;
    trust @7 :TrustEntry;
    step @8 :StepEntry;
    updates @9 :UpdatesEntry;
    lease @10 :Lease;
    leaseEnd @11 :Lease;    # only `lease` is set
    order @12 :OrderEntry;  # comes before the decision of its step
  }
}

struct BlockEntry {
  step @0 :UInt64;
  offsetBytes @1 :UInt64;
  checksum @2 :UInt64;
  writtenStep @3 :UInt64;
  overflows @4 :UInt64;
  block @5 :UInt32;
  path @6 :UInt32;          # 1 + the path; 0: in DRAM
  weightsSlot @7 :UInt32;   # 1 + the slot; 0: none
  digests @8 :Data;         # of pages of weights, 8 bytes each, little-endian
}

struct StagedEntry {
  step @0 :UInt64;
  block @1 :UInt32;
  stagingSlot @2 :UInt32;
}

struct SumsEntry {
  step @0 :UInt64;
  offsetBytes @1 :UInt64;
  sizeBytes @2 :UInt64;
  checksum @3 :UInt64;
  spills @4 :UInt64;
  page @5 :UInt32;
  path @6 :UInt32;    # 1 + the path; 0: in no slot
  frame @7 :UInt32;   # 1 + the frame; 0: in no frame
}

struct AttemptEntry {
  step @0 :UInt64;
  attempt @1 :UInt64;
}

struct Part {
  # A StatePart.
  offsetBytes @0 :UInt64;
  bytes @1 :UInt64;
}

struct PreparedEntry {
  step @0 :UInt64;    # 0: the prepared step is abandoned
  attempt @1 :UInt64;
  maxGradNorm @2 :Float64;
  gradScale @3 :Float64;
  gradMin @4 :Float64;
  gradMax @5 :Float64;
  paramGroups @6 :UInt32;
  extraStateBytes @7 :UInt32;
  hyperParams @8 :List(List(Float64));  # by group, the values of protocol::HyperParams in their order
  floatSums @9 :Part;
  extraStates @10 :List(Part);          # by rank
  summary @11 :Data;
}

struct DecisionEntry {
  # A RecordDecision without its order.
  step @0 :UInt64;
  norm @1 :Float64;
  overflowed @2 :UInt64;
  clipped @3 :Bool;
  paramUpdates @4 :List(UInt64);        # by parameter
  trace @5 :List(UInt32);               # partitions
  extraStates @6 :List(Part);           # by rank
  summary @7 :Data;
}

struct OrderEntry {
  # A StepOrder: the parameters of the update of a decided step.
  step @0 :UInt64;
  gradScale @1 :Float32;
  gradMin @2 :Float32;
  gradMax @3 :Float32;
  hyperParams @4 :List(List(Float64));  # as in PreparedEntry
  params @5 :List(Bool);                # by parameter: true if the step updates it
  floatSums @6 :Part;
}

struct TrustEntry {
  step @0 :UInt64;
  trust @1 :List(Float32);  # by parameter
}

struct StepEntry {
  step @0 :UInt64;
  overflowed @1 :UInt64;
}

struct UpdatesEntry {
  updates @0 :UInt64;
  param @1 :UInt32;
}
