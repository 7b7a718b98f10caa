// SPDX-License-Identifier: Apache-2.0
// A sharded job whose gradients do not fit in DRAM.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"

namespace forebay::testing {

class SumsJob : public ShardedJob {
 public:
  static constexpr uint32_t kRanks = 2;
  // Exceeds all gradients that a rank delivers in several passes.
  static constexpr uint64_t kArenaBytes = 4 << 20;

  // Large groups, parameters split by columns, many tiny groups on one page, and a group that ends within a unit.
  static std::shared_ptr<const protocol::Layout> Awkward() {
    std::vector<std::vector<ShardedParam>> groups;
    for (int i = 0; i < 6; ++i) groups.push_back({{.rows = 16000, .columns = 4}});
    groups.push_back({{.rows = 301}, {.rows = 20, .columns = 15, .cut = ShardCut::kColumns}});
    for (int i = 0; i < 9; ++i) groups.push_back({{.rows = 30, .columns = 3}});
    groups.push_back({{.rows = 36001, .columns = 2}});
    return MakeShardedLayout(
        groups,
        {.ranks = kRanks, .dtype = protocol::DType::kBFloat16, .format = protocol::Format::kExact});
  }
  static daemon::NodeState::Options OptionsOf(uint64_t dram_bytes) {
    return {.dram_limit_bytes = dram_bytes,
            .node_bytes = 4096,
            .staging_slots = 3,
            .staging_slot_bytes = 65536,
            .swap = SwapPaths({16 << 20, 16 << 20}),
            .block_elems = 3072,
            .workers = 2};
  }
  static AttachRequest RequestOf(uint32_t rank, bool accumulate) {
    return {.rank = rank,
            .accumulate = accumulate,
            .early_updates = true,
            .grad_arena_bytes = kArenaBytes};
  }
  static uint64_t LeastDram(bool accumulate) {
    const auto find = [](bool in_passes) {
      return LeastDramOf(Awkward(), OptionsOf(0), kRanks, RequestOf(0, in_passes),
                         /*gradients_in_dram=*/false);
    };
    static const uint64_t once = find(false);
    static const uint64_t in_passes = find(true);
    return accumulate ? in_passes : once;
  }

  explicit SumsJob(bool accumulate = false, uint64_t more_bytes = 0)
      : ShardedJob(Awkward(), kRanks, OptionsOf(LeastDram(accumulate) + more_bytes)),
        accumulate_(accumulate) {
    node_.set_answered_when(protocol::StepAnswer::kCommitted);
    Attach();
  }
  void Attach() {
    sessions_.assign(kRanks, 0);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      sessions_[rank] = node_.Attach(layout_, RequestOf(rank, accumulate_));
      ASSERT_OK(StatusOf(sessions_[rank]));
    }
    ASSERT_TRUE(View().ready);
    ASSERT_GT(View().sums_on_swap_bytes, 0U);
  }
  uint64_t Deliver(uint32_t partition, uint64_t step) {
    return node_.Gradient(sessions_[layout_->partitions()[partition].owner], partition, step);
  }
  std::vector<uint64_t> DeliverAll(uint64_t step) {
    std::vector<uint64_t> tags;
    for (auto i = static_cast<uint32_t>(layout_->partitions().size()); i-- > 0;) {
      tags.push_back(Deliver(i, step));
    }
    return tags;
  }
  // Marks the gradient of every parameter as present. The harness marks only parameters that one delivered range holds whole.
  void SetAllPresent() {
    for (const uint64_t session : sessions_) {
      for (uint32_t param = 0; param < layout_->params().size(); ++param) {
        node_.SetPresent(session, param, true);
      }
    }
  }
  void Announce(uint64_t step, double lr = 0.1) {
    for (const uint64_t session : sessions_) node_.Announce(session, step, lr);
  }
  std::vector<uint64_t> CallAll(uint64_t step, double lr = 0.1, double max_grad_norm = 0) {
    std::vector<uint64_t> calls;
    for (const uint64_t session : sessions_) {
      calls.push_back(node_.Step(session, step, lr, max_grad_norm));
    }
    return calls;
  }
  void ExpectTrained(uint64_t step, size_t passes = 1) {
    EXPECT_EQ(View().published_step, step);
    for (const auto& [block, written] : node_.model().WrittenSteps(1)) {
      EXPECT_EQ(written, step) << block;
    }
    for (const auto& [param, tokens] : node_.model().committed_gradients(1)) {
      EXPECT_EQ(tokens.size() % passes, 0U) << param;
      EXPECT_GE(tokens.size(), passes) << param;
    }
    EXPECT_EQ(node_.fault(), "");
  }
  void Train(uint64_t step) {
    DeliverAll(step);
    const std::vector<uint64_t> calls = CallAll(step);
    node_.RunTasks();
    for (const uint64_t call : calls) EXPECT_EQ(node_.ErrorOf(call), protocol::ErrorId::kNone);
    ExpectTrained(step);
  }
  uint64_t page_bytes() { return node_.Logged<daemon::SpillSums>().at(0).bytes; }

  bool accumulate_;
};

}  // namespace forebay::testing
