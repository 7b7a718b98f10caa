// SPDX-License-Identifier: Apache-2.0
// Synthetic blocks of one optimizer, updated by the tasks of the daemon's workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu_adam/worker_pool.h"
#include "daemon/exec/block_tasks.h"
#include "protocol/optimizer.h"

namespace forebay::tools {

// The optimizer pass that a case of bench adam measures. Gradients have the type of the weights. For LAMB the measured time
// covers both passes over all blocks, and the limit counts the bytes of one pass.
//
// kWeights  computes the new weights alone, and writes them to a second place: UpdatePass::kWeights. Not for LAMB.
struct AdamPass {
  protocol::StateFormat format = protocol::StateFormat::kExact;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  int threads = 1;
  uint64_t parameters = 1;  // number of parameters, equal in size
  enum class Task { kUpdate, kWeights } task = Task::kUpdate;
  // kOff: resident blocks. kOn: blocks that go to disk, with their checksums.
  enum class Hash { kOff, kOn } hash = Hash::kOff;
  enum class Data { kNormal, kDenormal } data = Data::kNormal;  // second moments
};

std::span<const protocol::Plane> PlanesOf(const AdamPass& pass);

// Elements of all blocks: `params`, each parameter rounded up to whole groups of scales.
uint64_t ElemsOf(const AdamPass& pass, uint64_t params);
uint64_t StateBytesOf(const AdamPass& pass, uint64_t params);

// Memory for the blocks. Gradient and weights each have ElemsOf() elements of the weights' type. The states have
// StateBytesOf() bytes and begin at a page. For Task::kWeights the new weights are ElemsOf() elements too, anywhere in `weights`
// behind the weights.
struct AdamMemory {
  std::span<std::byte> gradient;
  std::span<std::byte> weights;
  std::span<std::byte> states;
  uint64_t new_weights_offset_bytes = 0;  // in `weights`
};

class AdamBlocks {
 public:
  // Fills the memory. Borrows the memory and the pool.
  AdamBlocks(const AdamPass& pass, uint64_t params, cpu_adam::WorkerPool& pool,
             const AdamMemory& memory);

  // Runs the pass's task over all blocks. kWeights does not read `hash`.
  void Run(AdamPass::Hash hash);

 private:
  struct Block {
    daemon::UpdateBlock action;
    daemon::UpdateMemory memory;
    std::vector<daemon::UpdateFound> found;  // by part
    daemon::TaskDone done;
  };

  void MakeBlocks(std::span<std::byte> states);
  void AddSegments(uint64_t block_begin, daemon::UpdateBlock& action) const;
  void Update(AdamPass::Hash hash);
  void UpdateBlocks(daemon::UpdatePass update_pass, AdamPass::Hash hash);
  void SetNewWeights();
  void SetTrustRatios();
  void FillData();
  void MakeDenormal(uint64_t pattern_bytes);

  AdamPass pass_;
  uint64_t params_;
  cpu_adam::WorkerPool& pool_;
  AdamMemory memory_;
  std::vector<Block> blocks_;
};

}  // namespace forebay::tools
