// SPDX-License-Identifier: Apache-2.0
// A sharded job on a NodeHarness, and a layout with every kind of shard.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/blocks/block_map.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::testing {

// Three groups over two ranks: p0 in uneven rows and p1 in columns, p2 of rank 0 alone, p3.
// Partitions 0 and 1 are of group 0, partition 2 of group 1, partitions 3 and 4 of group 2.
inline std::shared_ptr<const protocol::Layout> ThreeGroups() {
  return MakeShardedLayout({{{.rows = 301}, {.rows = 20, .columns = 15, .cut = ShardCut::kColumns}},
                            {{.rows = 1, .columns = 100}},
                            {{.rows = 130}}});
}

// Smallest DRAM limit in bytes that admits the first session of a job, in whole pages. If `gradients_in_dram`, all gradient
// sums must also be in DRAM. Requires that 64 MiB suffice.
inline uint64_t LeastDramOf(const std::shared_ptr<const protocol::Layout>& layout,
                            daemon::NodeState::Options options, uint32_t ranks,
                            const AttachRequest& request, bool gradients_in_dram) {
  uint64_t refused = 0;
  uint64_t admitted = uint64_t{64} << 20;
  while (admitted - refused > protocol::kPageBytes) {
    const uint64_t dram = (refused + admitted) / 2 / protocol::kPageBytes * protocol::kPageBytes;
    options.dram_limit_bytes = dram;
    NodeHarness node(options, ranks);
    const uint64_t session = node.AttachOnly(layout, request);
    const bool fits = node.attached(session)->status.ok() &&
                      (!gradients_in_dram || node.FindJob("job")->sums_on_swap_bytes == 0);
    (fits ? admitted : refused) = dram;
  }
  return admitted;
}

// A job of `world_size` ranks on a NodeHarness, with the operations that tests share. No rank is attached at first.
class ShardedJob {
 public:
  ShardedJob(std::shared_ptr<const protocol::Layout> layout, uint32_t world_size,
             const daemon::NodeState::Options& options = RoomyOptions())
      : layout_(std::move(layout)),
        world_size_(world_size),
        block_elems_(protocol::RoundUp(options.block_elems, layout_->states_align_elems())),
        node_(options, world_size) {}

  // Attaches all ranks. grad_arena_bytes 0: the default of AttachRequest.
  void AttachAll(uint64_t grad_arena_bytes = 0) {
    sessions_.clear();
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      sessions_.push_back(
          node_.Attach(layout_, {.rank = rank, .grad_arena_bytes = grad_arena_bytes}));
      ASSERT_OK(StatusOf(sessions_.back()));
    }
    ASSERT_TRUE(View().ready);
  }
  // Attaches all ranks without writing initial parameters.
  void AttachWriters() {
    sessions_.clear();
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      sessions_.push_back(node_.AttachOnly(layout_, {.rank = rank}));
      ASSERT_OK(StatusOf(sessions_.back()));
      EXPECT_TRUE(node_.attached(sessions_.back())->writes_initial);
    }
  }
  std::vector<uint32_t> OwnedBy(uint32_t rank) const {
    std::vector<uint32_t> owned;
    for (uint32_t i = 0; i < layout_->partitions().size(); ++i) {
      if (layout_->partitions()[i].owner == rank) owned.push_back(i);
    }
    return owned;
  }
  void WriteOwn(uint32_t rank) {
    for (const uint32_t partition : OwnedBy(rank)) node_.WriteInitial(sessions_[rank], partition);
    node_.RunTasks();
  }
  void DeliverOwn(uint32_t rank, uint64_t step) {
    for (const uint32_t partition : OwnedBy(rank)) {
      const uint64_t tag = node_.Gradient(sessions_[rank], partition, step);
      node_.RunTasks();
      EXPECT_EQ(node_.ErrorOf(tag), protocol::ErrorId::kNone);
    }
  }
  // Calls step once for each rank. Returns the errors of the answers.
  std::vector<protocol::ErrorId> StepAll(uint64_t step, double max_grad_norm = 0) {
    tags_.clear();
    for (const uint64_t session : sessions_) {
      tags_.push_back(node_.Step(session, step, 0.1, max_grad_norm));
    }
    node_.RunTasks();
    std::vector<protocol::ErrorId> errors;
    for (const uint64_t tag : tags_) errors.push_back(node_.ErrorOf(tag));
    return errors;
  }
  void TrainStep(uint64_t step) {
    for (uint32_t rank = 0; rank < world_size_; ++rank) DeliverOwn(rank, step);
    EXPECT_THAT(StepAll(step), ::testing::Each(protocol::ErrorId::kNone));
    EXPECT_EQ(View().committed_step, step);
  }
  // Delivers the gradient of each partition by its owner. The worker of partition i reports sums[i] as its sum of squares.
  void DeliverSums(const std::vector<double>& sums) {
    for (uint32_t i = 0; i < sums.size(); ++i) {
      node_.Gradient(sessions_[layout_->partitions()[i].owner], i, 1);
      ASSERT_EQ(node_.Running<daemon::AddGradients>().size(), 1U);
      daemon::TaskDone done = node_.model().Finish(node_.Running<daemon::AddGradients>()[0].task);
      done.squares = {};
      done.squares.AddChunk(sums[i]);
      node_.Send(done);
    }
  }

  absl::Status StatusOf(uint64_t session) const {
    const daemon::AnswerAttach* answer = node_.attached(session);
    return answer == nullptr ? absl::UnavailableError("no answer yet") : answer->status;
  }
  std::string MessageOf(uint64_t tag) const {
    const daemon::AnswerCommand* answer = node_.answer(tag);
    return answer == nullptr ? "no answer yet" : std::string(answer->status.message());
  }
  daemon::JobView View() const { return *node_.FindJob("job"); }
  // Byte offset of an element of a parameter in the weights arena, computed from the layout's boxes. The layout has at most two
  // owners.
  uint64_t WeightsOffset(uint32_t param, uint64_t elem) const {
    const uint64_t width = protocol::SizeBytes(layout_->spec().dtype);
    for (const protocol::BoxPlace& place : layout_->boxes()) {
      const protocol::BoxSpec& box = place.box;
      for (uint64_t run = 0; run < box.runs && box.param == param; ++run) {
        const uint64_t begin = box.first_elem + run * box.stride_elems;
        if (elem < begin || elem >= begin + box.run_elems) continue;
        const protocol::PartitionPlace& partition = layout_->partitions()[place.partition];
        const uint64_t owner_begin = partition.owner == 0 ? 0 : layout_->owners()[0].weights_bytes;
        return owner_begin + partition.weights_offset_bytes +
               (place.partition_elem + run * box.run_elems + elem - begin) * width;
      }
    }
    return UINT64_MAX;
  }
  // Partitions that have elements in the block of an update.
  std::set<uint32_t> PartitionsOf(const daemon::UpdateBlock& update) {
    const daemon::BlockMap map(layout_, block_elems_);
    const std::vector<uint32_t> partitions =
        map.Partitions(static_cast<uint32_t>(update.identity_before.block));
    return {partitions.begin(), partitions.end()};
  }

  std::shared_ptr<const protocol::Layout> layout_;
  uint32_t world_size_;
  uint64_t block_elems_;
  NodeHarness node_;
  std::vector<uint64_t> sessions_;
  std::vector<uint64_t> tags_;  // tags of the last StepAll()
};

}  // namespace forebay::testing
