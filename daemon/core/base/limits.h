// SPDX-License-Identifier: Apache-2.0
// Limits of the node's state machine. The limits of what clients send are in protocol/limits.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>

namespace forebay::daemon {

// | constant                  | unit              | why this limit                                             |
// | ------------------------- | ----------------- | ---------------------------------------------------------- |
// | kWorldRanksMax            | ranks, all nodes  | the number of a rank fits in 20 bits                       |
// | kJobsMax                  | jobs of a node    | bounds the ledger and the status                           |
// | kJobNameBytesMax          | bytes             | a name fits in one line of a message                       |
// | kRunTokenBytesMax         | bytes             | a run's token is about as long as a name                   |
// | kLeasesPerSessionMax      | leases            | a rank leases a few partitions; bounds a leak of leases    |
// | kGradArenaBytesMax        | bytes a session   | times kWorldMax ranks fits in 64 bits; for activations too |
inline constexpr uint32_t kWorldRanksMax = 1 << 20;
inline constexpr uint32_t kJobsMax = 1024;
inline constexpr uint32_t kJobNameBytesMax = 200;
inline constexpr uint32_t kRunTokenBytesMax = 200;
inline constexpr uint32_t kLeasesPerSessionMax = 4096;
inline constexpr uint64_t kGradArenaBytesMax = uint64_t{1} << 46;

// Gradients.
//
// | constant                  | unit              | why this limit                                             |
// | ------------------------- | ----------------- | ---------------------------------------------------------- |
// | kGradPiecesMin            | pieces of an      | the client fills one piece while the daemon adds another   |
// |                           | arena             | (MemoryPlan::piece_bytes)                                  |
// | kOverflowSlotsPerRank     | pieces            | of a rank in the overflow area of the step arena           |
// | kSumPageElemsMax          | elements          | of a page of sums, if not all sums fit in DRAM             |
// | kSpareSumFrames           | frames            | are freed before a page needs one                          |
inline constexpr uint32_t kGradPiecesMin = 2;
inline constexpr uint32_t kOverflowSlotsPerRank = 2;
inline constexpr uint64_t kSumPageElemsMax = uint64_t{1} << 19;
inline constexpr uint32_t kSpareSumFrames = 4;

// Concurrent tasks.
//
// | constant                  | unit              | why this limit                                             |
// | ------------------------- | ----------------- | ---------------------------------------------------------- |
// | kUpdatesPerWorker         | updates in flight | if only blocks in DRAM remain to update: one runs and      |
// |                           |                   | one waits, so that the worker need not wait for the loop   |
// | kReadsPerPath             | reads of states   | two keep most paths busy, and a fetch of weights waits for |
// |                           |                   | few; PathTable raises it for paths of high latency         |
// | kSavesPerPath             | writes            | that save parts of arenas for a durable step               |
// | kTurnsBetweenSteps        | accesses, moves   | may run before a decision, if all ranks called the step    |
// |                           |                   | before the previous step was published                     |
inline constexpr uint32_t kUpdatesPerWorker = 2;
inline constexpr uint32_t kReadsPerPath = 2;
inline constexpr uint32_t kSavesPerPath = 2;
inline constexpr uint32_t kTurnsBetweenSteps = 8;

// Memory and swap of a job.
//
// | constant                  | unit              | why this limit                                             |
// | ------------------------- | ----------------- | ---------------------------------------------------------- |
// | kCachedPartitionsPerOwner | largest partition | of weights on swap: one is used while the next is read     |
// | kStagingSlotsForWeights   | staging slots     | that reads of states before a decision leave free for      |
// |                           |                   | loads of weights, in a job with weights on swap            |
// | kSwapSlotsPerBlock        | slots of a block  | the current version, and the next step's                   |
// |                           | on swap           |                                                            |
// | kSwapSlotsPerBlockAtStep  | slots of a block, | with durable steps: the last two durable steps, and the    |
// |                           | in DRAM too       | step that is being written                                 |
// | kSwapSlotsPerBlockAtEpoch | same              | at level epoch: also the current step, which is newer than |
// |                           |                   | the newest durable step                                    |
// | kSwapSlotsPerWeightsPart  | slots of a part   | with durable steps; the weights arena itself is in DRAM    |
// | kAdvisedBlocksMax         | blocks            | of a refused job, for whose hint all blocks are listed     |
// | kReadersRoomBytes         | bytes, at most    | stay free for readers when blocks return to DRAM: a        |
// |                           | 1/64 of the limit | reader's arena has 1 MiB                                   |
// | kStepMemoryOptions        | pool options      | objects that live for one step; larger allocations come    |
// |                           |                   | from the heap                                              |
inline constexpr uint32_t kCachedPartitionsPerOwner = 2;
inline constexpr uint32_t kStagingSlotsForWeights = 2;
inline constexpr uint32_t kSwapSlotsPerBlock = 2;
inline constexpr uint32_t kSwapSlotsPerBlockAtStep = 3;
inline constexpr uint32_t kSwapSlotsPerBlockAtEpoch = 4;
inline constexpr uint32_t kSwapSlotsPerWeightsPart = 3;
inline constexpr uint64_t kAdvisedBlocksMax = uint64_t{1} << 20;
inline constexpr uint64_t kReadersRoomBytes = uint64_t{4} << 20;
inline constexpr std::pmr::pool_options kStepMemoryOptions = {
    .max_blocks_per_chunk = 256, .largest_required_pool_block = size_t{1} << 20};

}  // namespace forebay::daemon
