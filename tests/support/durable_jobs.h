// SPDX-License-Identifier: Apache-2.0
// Invented durable jobs of every kind. Each job has its own slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/core/base/durable_job.h"
#include "daemon/core/blocks/block_map.h"
#include "gtest/gtest.h"
#include "protocol/units.h"

namespace forebay::testing {

inline std::shared_ptr<const protocol::Layout> MakeDurableLayout(protocol::LayoutSpec spec) {
  for (size_t i = 0; i < spec.params.size(); ++i) {
    spec.params[i].name = "p" + std::to_string(i);
    if (spec.group_names.size() <= spec.params[i].group) spec.group_names.emplace_back("g");
  }
  auto layout = protocol::Layout::Create(std::move(spec));
  EXPECT_TRUE(layout.ok()) << layout.status();
  return std::make_shared<const protocol::Layout>(*std::move(layout));
}

// Fills a job that has an id, a layout and sizes. Slots begin at `offset_bytes` and alternate between two paths. Every third
// block counts as never written.
inline void FillDurableJob(uint64_t& offset_bytes, daemon::DurableJob& job) {
  const auto slot = [&] {
    const nvme::Slot next{.path = static_cast<uint32_t>(offset_bytes / job.slot_bytes % 2),
                          .offset_bytes = offset_bytes,
                          .size_bytes = job.slot_bytes};
    offset_bytes += job.slot_bytes;
    return next;
  };
  const daemon::BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  for (uint32_t block = 0; block < map.blocks(); ++block) {
    auto& to = job.blocks.emplace_back();
    if (block % 3 == 2) continue;
    to = daemon::DurableBytes{
        .slot = slot(), .checksum = job.id * 1000 + block, .written_step = job.step - block % 2};
    if (!map.has_weights(block)) continue;
    const uint64_t pages =
        (map.bytes(block) - map.weights_plane_offset(block)) / protocol::kPageBytes;
    to->weights_digests = std::make_shared<const std::vector<uint64_t>>(pages, 77 + block);
  }
  uint64_t weights_bytes = 0;
  for (uint32_t i = 0; i < job.layout->partitions().size(); ++i) {
    if (map.is_on_swap(i)) continue;
    weights_bytes += protocol::RoundUp(job.layout->partition_bytes(i), protocol::kPageBytes);
  }
  for (uint64_t done = 0; done < weights_bytes; done += job.slot_bytes) {
    job.weights.push_back({.slot = slot(), .checksum = done + 5, .written_step = job.step});
  }
  job.param_updates.assign(job.layout->params().size(), job.step - 1);
  job.trace.push_back(0);
  std::vector<std::vector<std::byte>> by_rank(3);  // rank 1 has no extra state
  by_rank[0].assign(1000, static_cast<std::byte>(job.id));
  by_rank[2].assign(7, static_cast<std::byte>(job.id + 1));
  job.extra_states =
      std::make_shared<const std::vector<std::vector<std::byte>>>(std::move(by_rank));
}

struct DurableParam {
  std::vector<uint64_t> shape;
  uint32_t group = 0;
  bool trainable = true;
};

inline std::vector<protocol::ParamSpec> ParamsOf(const std::vector<DurableParam>& params) {
  std::vector<protocol::ParamSpec> specs;
  for (const DurableParam& param : params) {
    protocol::ParamSpec& spec = specs.emplace_back();
    spec.shape = param.shape;
    spec.group = param.group;
    spec.trainable = param.trainable;
  }
  return specs;
}

// Layout of two owners whose first partitions hold columns of the same parameter. Another parameter is frozen.
inline protocol::LayoutSpec ShardedDurableSpec() {
  protocol::LayoutSpec spec;
  spec.dtype = protocol::DType::kBFloat16;
  spec.grad_dtype = protocol::DType::kFloat32;
  spec.format = protocol::Format::kBf16;
  spec.seed = 9;
  spec.params = ParamsOf({{{24, 90}, 0}, {{7700}, 0, false}, {{200}, 1}});
  spec.partitions.resize(3);
  spec.partitions[0].boxes = {{0, 31, 59, 90, 24}, {1, 0, 7700, 7700, 1}};
  spec.partitions[1].owner = 1;
  spec.partitions[1].boxes = {{0, 0, 31, 90, 24}};
  spec.partitions[2].group = 1;
  spec.partitions[2].boxes = {{2, 0, 200, 200, 1}};
  return spec;
}

// Makes four jobs: a shared one, a shared one with frozen parameters (LoRA), a sharded one, and one whose weights, frozen ones
// among them, are on swap except for one partition. Slots begin at `begin_bytes` on both paths.
inline daemon::DurableNode MakeDurableNode(uint64_t begin_bytes) {
  protocol::LayoutSpec shared;
  shared.params = ParamsOf({{{300, 7}, 0}, {{513}, 1}});
  protocol::LayoutSpec lora;
  lora.dtype = protocol::DType::kBFloat16;
  lora.format = protocol::Format::kExact;
  lora.params = ParamsOf({{{64, 8}, 0}, {{400, 50}, 0, false}, {{}, 1}});
  lora.params[2].param_group = 3;
  std::vector<daemon::DurableJob> jobs(4);
  jobs[0].id = 1;
  jobs[0].name = "gpt";
  jobs[0].uid = 1000;
  jobs[0].run = "token-1";
  jobs[0].layout = MakeDurableLayout(shared);
  jobs[0].durability = {.level = protocol::DurabilityLevel::kStep, .steps = 1};
  jobs[1].id = 3;
  jobs[1].name = "gpt";
  jobs[1].layout = MakeDurableLayout(lora);
  jobs[1].durability = {.level = protocol::DurabilityLevel::kEpoch, .steps = 10};
  jobs[2].id = 4;
  jobs[2].name = "sharded";
  jobs[2].uid = 5;
  jobs[2].layout = MakeDurableLayout(ShardedDurableSpec());
  jobs[2].world_size = 2;
  jobs[3] = jobs[2];
  jobs[3].id = 9;
  jobs[3].name = "big";
  jobs[3].run = "r";
  jobs[3].weights_on_swap = {true, true, false};
  daemon::DurableNode node;
  node.last_job = 12;
  uint64_t offset_bytes = begin_bytes;
  for (daemon::DurableJob& job : jobs) {
    job.block_elems = 256;
    job.slot_bytes = 8 * protocol::kPageBytes;
    job.step = 40 + job.id;
    FillDurableJob(offset_bytes, job);
    node.jobs.push_back(std::make_shared<const daemon::DurableJob>(std::move(job)));
  }
  return node;
}

inline void ExpectEqual(const daemon::DurableBytes& a, const daemon::DurableBytes& b) {
  EXPECT_EQ(a.slot, b.slot);
  EXPECT_EQ(a.checksum, b.checksum);
  EXPECT_EQ(a.written_step, b.written_step);
  ASSERT_EQ(a.weights_digests == nullptr, b.weights_digests == nullptr);
  if (a.weights_digests == nullptr) return;
  EXPECT_EQ(*a.weights_digests, *b.weights_digests);
}

inline void ExpectEqual(const daemon::DurableJob& a, const daemon::DurableJob& b) {
  EXPECT_EQ(a.id, b.id);
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.uid, b.uid);
  EXPECT_EQ(a.run, b.run);
  EXPECT_EQ(a.durability, b.durability);
  EXPECT_EQ(a.layout->spec(), b.layout->spec());
  EXPECT_EQ(a.world_size, b.world_size);
  EXPECT_EQ(a.block_elems, b.block_elems);
  EXPECT_EQ(a.slot_bytes, b.slot_bytes);
  EXPECT_EQ(a.weights_on_swap, b.weights_on_swap);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.param_updates, b.param_updates);
  EXPECT_EQ(a.trace, b.trace);
  EXPECT_EQ(*a.extra_states, *b.extra_states);
  ASSERT_EQ(a.blocks.size(), b.blocks.size());
  for (size_t i = 0; i < a.blocks.size(); ++i) {
    ASSERT_EQ(a.blocks[i].has_value(), b.blocks[i].has_value());
    if (a.blocks[i]) ExpectEqual(*a.blocks[i], *b.blocks[i]);
  }
  ASSERT_EQ(a.weights.size(), b.weights.size());
  for (size_t i = 0; i < a.weights.size(); ++i) ExpectEqual(a.weights[i], b.weights[i]);
  ASSERT_EQ(a.before == nullptr, b.before == nullptr);
  if (a.before != nullptr) ExpectEqual(*a.before, *b.before);
}

inline void ExpectEqual(const daemon::DurableNode& a, const daemon::DurableNode& b) {
  EXPECT_EQ(a.last_job, b.last_job);
  ASSERT_EQ(a.jobs.size(), b.jobs.size());
  for (size_t i = 0; i < a.jobs.size(); ++i) ExpectEqual(*a.jobs[i], *b.jobs[i]);
}

}  // namespace forebay::testing
