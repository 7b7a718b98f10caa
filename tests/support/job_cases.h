// SPDX-License-Identifier: Apache-2.0
// A small job of two ranks, and a node whose DRAM limit puts the job's states and weights where a test wants them.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/core/node/node_state.h"
#include "protocol/durability.h"
#include "protocol/layout.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"

namespace forebay::testing {

// kWeightsOnSwap and kSumsOnSwap use the smallest DRAM limit that admits the job. Only kSumsOnSwap puts gradient sums on swap.
enum class Place { kDram, kSwap, kHalf, kWeightsOnSwap, kSumsOnSwap };

struct JobCase {
  protocol::Durability durability = {};
  Place place = Place::kDram;
  bool early_updates = false;
  bool shared = false;
  // Each step has two unannounced backward passes: 16-bit gradient sums become float32. The float32 sums need DRAM that only
  // Place::kDram has free.
  bool several_passes = false;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  // The job has two more ranks on another node, which act like the ranks of this node.
  bool over_nodes = false;
};

inline constexpr uint32_t kCaseRanks = 2;

// Layout of a case. A sharded layout has one frozen parameter.
inline std::shared_ptr<const protocol::Layout> LayoutOf(const JobCase& with) {
  if (with.shared) {
    protocol::LayoutSpec spec = MakeLayout({2048, 2048, 1000})->spec();
    spec.optimizer = with.optimizer;
    return std::make_shared<const protocol::Layout>(*protocol::Layout::Create(std::move(spec)));
  }
  // Weights exceed their cache and the cache's records. For kSumsOnSwap there are more pages of gradient sums than frames.
  const bool is_large = with.place >= Place::kWeightsOnSwap;
  const size_t count = with.place == Place::kSumsOnSwap ? 10 : is_large ? 6 : 3;
  std::vector<std::vector<ShardedParam>> groups(
      count, {{.rows = kCaseRanks * uint64_t{is_large ? 4096U : 1024U}}});
  groups.push_back({{.rows = 256, .trainable = false}, {.rows = 512}});
  ShardedLayoutOptions options;
  if (with.several_passes) options.dtype = protocol::DType::kBFloat16;
  if (with.over_nodes) {
    options.ranks = 2 * kCaseRanks;
    options.node_ranks = kCaseRanks;
    for (std::vector<ShardedParam>& group : groups) {
      for (ShardedParam& param : group) param.rows *= 2;
    }
  }
  return MakeShardedLayout(groups, options);
}

// Options with swap, and with DRAM for all states and weights.
inline daemon::NodeState::Options RoomyCaseOptions() {
  daemon::NodeState::Options options = RoomyOptions();
  options.block_elems = 512;
  options.staging_slots = 3;
  options.staging_slot_bytes = 16384;
  options.swap = SwapPaths({4 << 20, 4 << 20});
  return options;
}

inline AttachRequest RequestOf(uint32_t rank, const JobCase& with) {
  return {.rank = rank,
          .world_ranks = with.over_nodes ? 2 * kCaseRanks : 0,
          .early_updates = with.early_updates,
          .durability = with.durability,
          .grad_arena_bytes = with.place >= Place::kWeightsOnSwap ? 512U << 10 : 64U << 10};
}

inline std::unique_ptr<NodeHarness> NodeWith(const JobCase& with,
                                             const daemon::NodeState::Options& options) {
  auto node = std::make_unique<NodeHarness>(options, kCaseRanks);
  for (uint32_t rank = 0; rank < kCaseRanks; ++rank) {
    node->Attach(LayoutOf(with), RequestOf(rank, with));
  }
  return node;
}

// Options of a node for a case. `keeps_jobs` is true for a node whose jobs survive it.
inline daemon::NodeState::Options OptionsOf(const JobCase& with, bool keeps_jobs = false) {
  daemon::NodeState::Options options = RoomyCaseOptions();
  options.keeps_jobs = keeps_jobs;
  if (with.place >= Place::kWeightsOnSwap) {
    options.block_elems = 4096;
    options.staging_slot_bytes = 65536;
  }
  if (with.place == Place::kDram) return options;
  if (with.place >= Place::kWeightsOnSwap) {
    options.dram_limit_bytes = LeastDramOf(LayoutOf(with), options, kCaseRanks, RequestOf(0, with),
                                           with.place == Place::kWeightsOnSwap);
    // DRAM and swap are both just large enough for the job.
    options.swap = SwapPaths({NodeWith(with, options)->state().Node().swap_used_bytes});
    return options;
  }
  const auto roomy = NodeWith(with, options);
  const daemon::JobView job = *roomy->FindJob("job");
  const uint64_t resident = with.place == Place::kHalf ? job.blocks / 2 : 0;
  options.dram_limit_bytes = roomy->state().Node().dram_used_bytes -
                             (job.blocks - resident) * (job.resident_bytes / job.blocks);
  return options;
}

}  // namespace forebay::testing
