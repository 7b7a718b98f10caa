// SPDX-License-Identifier: Apache-2.0
// Actions of every kind that change a record (KeptRecord), chosen at random by a seed as a job in steps emits them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/record_actions.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "protocol/optimizer.h"
#include "protocol/step_summary.h"
#include "tests/support/durable_jobs.h"

namespace forebay::testing {

// NOLINTBEGIN(google-build-using-namespace): the actions
namespace random_records {
using namespace daemon;
// NOLINTEND(google-build-using-namespace)

using AnyRecord = std::variant<RecordBlock, RecordInstalled, RecordStaged, RecordSums,
                               RecordAttempt, RecordPrepared, RecordDecision, RecordTrust,
                               RecordStep, RecordUpdates, RecordLease, RecordLeaseEnd>;

inline constexpr uint64_t kNonce = 77;
inline constexpr uint32_t kSumPages = 5;
inline constexpr uint64_t kRanks = 2;

enum class Kind : uint8_t { kOnSwap, kLamb };

// Makes a job over several nodes at step 6: sharded with weights on swap, or shared with LAMB.
inline DurableJob MakeJob(Kind kind) {
  const DurableNode node = MakeDurableNode(1 << 20);
  DurableJob job = kind == Kind::kLamb ? *node.jobs.front() : *node.jobs.back();
  if (kind == Kind::kLamb) {
    protocol::LayoutSpec spec = job.layout->spec();
    spec.optimizer = protocol::Optimizer::kLamb;
    job.layout = MakeDurableLayout(std::move(spec));
    job.world_size = kRanks;
  }
  job.step = 6;
  job.weights.clear();
  job.extra_states = nullptr;
  for (uint64_t& updates : job.param_updates) updates = 6;
  KeptMemory kept;
  for (auto& block : job.blocks) {
    if (block) block->written_step = 6;
    kept.resident.push_back(!block);
    kept.written_steps.push_back(6);
  }
  kept.session.world_size = job.world_size;
  kept.session.world_ranks = 4;
  kept.session.durability = job.durability;
  kept.early_weights_slots = static_cast<uint32_t>(job.blocks.size());
  kept.sum_frames = kSumPages;
  kept.attempt = 2;
  kept.dram_bytes = uint64_t{1} << 40;
  kept.spare_slots = {{.path = 1, .offset_bytes = uint64_t{5} << 40, .size_bytes = job.slot_bytes}};
  job.kept = kept;
  return job;
}

inline RecordJob MakeRecordJob(const DurableJob& job) {
  return {.job = std::make_shared<const DurableJob>(job),
          .extra_states = {{.offset_bytes = 0, .bytes = 4}, {.offset_bytes = 4, .bytes = 2}},
          .sum_pages = kSumPages};
}

inline bool HasTrust(const DurableJob& job) {
  return protocol::Info(job.layout->spec().optimizer).passes > 1;
}

inline uint64_t LeasesMax(const DurableJob& job) {
  return job.weights_on_swap.empty() ? 0 : LeasesRecordedMax(*job.layout, job.world_size);
}

// Chooses the actions of a job in steps.
class Actions {
 public:
  Actions(const DurableJob& job, uint64_t seed)
      : job_(job), random_(seed), published_(job.step), leases_max_(LeasesMax(job)) {}

  AnyRecord Next() {
    if (Below(4) == 0) return NextAnywhere();
    return decided_ ? NextInUpdate() : NextBetween();
  }

  uint64_t published() const { return published_; }

 private:
  uint64_t Below(uint64_t end) { return random_() % end; }
  uint32_t RandomBlock() { return static_cast<uint32_t>(Below(job_.blocks.size())); }

  uint32_t RandomPartition() {
    return static_cast<uint32_t>(Below(job_.layout->partitions().size()));
  }

  nvme::Slot NextSlot() {
    return {.path = static_cast<uint32_t>(Below(2)),
            .offset_bytes = (uint64_t{1} << 44) + job_.slot_bytes * slots_++,
            .size_bytes = job_.slot_bytes};
  }

  RecordBlock Place(uint32_t block) {
    RecordBlock to{.block = block, .written_step = Below(6), .overflows = Below(3)};
    if (Below(3) == 0) return to;
    to.slot = NextSlot();
    to.checksum = random_();
    const auto& digests = job_.blocks[block] ? job_.blocks[block]->weights_digests : nullptr;
    if (digests != nullptr) {
      std::vector<uint64_t> random(digests->size());
      for (uint64_t& digest : random) digest = random_();
      to.weights_digests = std::make_shared<const std::vector<uint64_t>>(std::move(random));
    }
    return to;
  }

  AnyRecord NextAnywhere() {
    switch (Below(4)) {
      case 0:
        return RecordAttempt{.step = published_ + (decided_ ? 2 : 1), .attempt = Below(9)};
      case 1:
        return RecordLeaseEnd{.lease = last_lease_ + 1 - Below(3)};
      case 2:
        if (last_lease_ < leases_max_) {
          return RecordLease{.lease = {.lease = ++last_lease_,
                                       .rank = static_cast<uint32_t>(Below(kRanks)),
                                       .partition = RandomPartition(),
                                       .offset_bytes = Below(1000)}};
        }
        [[fallthrough]];
      default: {
        RecordSums sums{.page = static_cast<uint32_t>(Below(kSumPages)), .step = published_ + 1};
        if (Below(2) == 0) sums.frame = sums.page;
        if (Below(2) == 0) sums.slot = NextSlot();
        sums.checksum = random_();
        sums.spills = Below(9);
        return sums;
      }
    }
  }

  AnyRecord NextBetween() {
    switch (Below(5)) {
      case 0:
        return RecordUpdates{.param = static_cast<uint32_t>(Below(job_.param_updates.size())),
                             .updates = Below(1000)};
      case 1:
        return Below(3) == 0 ? RecordPrepared() : Prepared();
      case 2:
        decided_ = true;
        written_.assign(job_.blocks.size(), false);
        return Decision();
      default:
        return Place(RandomBlock());
    }
  }

  AnyRecord NextInUpdate() {
    const uint64_t step = published_ + 1;
    const uint32_t block = RandomBlock();
    switch (Below(6)) {
      case 0: {
        if (!HasTrust(job_) || std::exchange(trusted_, step) == step) {
          return RecordInstalled{.block = block};
        }
        RecordTrust trust{.step = step};
        for (size_t i = 0; i < job_.param_updates.size(); ++i) {
          trust.trust.push_back(static_cast<float>(Below(100)));
        }
        return trust;
      }
      case 1:
        return RecordStaged{
            .block = block, .step = step, .staging_slot = static_cast<uint32_t>(Below(9))};
      case 2:
        return RecordInstalled{.block = block};
      case 3:
        if (Below(3) == 0) {
          decided_ = false;
          return RecordStep{.step = ++published_, .overflowed = Below(9)};
        }
        [[fallthrough]];
      default:
        if (written_[block]) return RecordInstalled{.block = block};
        written_[block] = true;
        RecordBlock written = Place(block);
        written.step = written.written_step = step;
        if (Below(2) == 0) written.weights_slot = block;
        return written;
    }
  }

  std::pmr::vector<protocol::HyperParams> Groups() {
    std::pmr::vector<protocol::HyperParams> groups(1 + Below(job_.layout->param_group_rows()));
    for (auto& group : groups) group.lr = static_cast<double>(Below(100));
    groups[0].initial_accumulator_value = -1;
    return groups;
  }

  std::vector<std::byte> Summary() {
    std::vector<std::byte> summary(protocol::NodeSummaryBytes(*job_.layout));
    for (std::byte& byte : summary) byte = static_cast<std::byte>(Below(256));
    return summary;
  }

  RecordPrepared Prepared() {
    return {.step = published_ + 1,
            .attempt = Below(9),
            .request = {.step = published_ + 1,
                        .param_groups = 3,
                        .extra_state_bytes = 5,
                        .max_grad_norm = 0.5,
                        .grad_scale = 0.25,
                        .grad_min = -1,
                        .grad_max = 2},
            .hyper_params = Groups(),
            .float_sums = {.offset_bytes = 4096 * Below(3), .bytes = 4096 * Below(3)},
            .extra_states = {{.offset_bytes = Below(4), .bytes = Below(4)},
                             {.offset_bytes = 4, .bytes = 1}},
            .summary = Summary()};
  }

  RecordDecision Decision() {
    RecordDecision to{.step = published_ + 1,
                      .order = {.step = published_ + 1,
                                .grad_scale = 0.25F,
                                .grad_min = -1,
                                .grad_max = static_cast<float>(Below(9)),
                                .hyper_params = Groups()},
                      .float_sums = {.offset_bytes = 4096, .bytes = 4096 * Below(3)},
                      .extra_states = {{.offset_bytes = Below(4), .bytes = Below(4)}},
                      .norm = static_cast<double>(Below(100)),
                      .clipped = Below(2) == 0,
                      .overflowed = Below(3),
                      .summary = Summary()};
    for (size_t i = 0; i < job_.param_updates.size(); ++i) {
      to.order.params.push_back(Below(2) == 0);
      to.param_updates.push_back(Below(100));
    }
    for (uint64_t i = Below(3); i > 0; --i) to.trace.push_back(RandomPartition());
    return to;
  }

  const DurableJob& job_;
  std::mt19937_64 random_;
  uint64_t published_;
  bool decided_ = false;
  std::vector<bool> written_;  // by block: in the decided step
  uint64_t trusted_ = 0;       // step of the newest RecordTrust
  uint64_t slots_ = 0;
  uint64_t leases_max_;
  uint64_t last_lease_ = 0;
};

inline std::string Describe(const DurableBytes& bytes) {
  std::string text =
      absl::StrCat(bytes.slot.path, ":", bytes.slot.offset_bytes, ":", bytes.slot.size_bytes, " ",
                   bytes.checksum, " ", bytes.written_step);
  if (bytes.weights_digests == nullptr) return text;
  for (const uint64_t digest : *bytes.weights_digests) absl::StrAppend(&text, " ", digest);
  return text;
}

inline std::string Describe(const void* bytes, size_t size) {
  return absl::BytesToHexString({static_cast<const char*>(bytes), size});
}

// Returns a text with everything that a job that was read has. The order of its spare slots and leases has no meaning.
inline std::string Describe(DurableJob job) {
  std::ranges::sort(job.kept->spare_slots);
  std::ranges::sort(job.kept->leases, {}, &KeptLease::lease);
  const auto shared = std::make_shared<const DurableJob>(job);
  const auto encoded = EncodeKept({.last_job = job.id, .last_lease = 0, .jobs = {shared}}, kNonce);
  if (!encoded.ok()) return encoded.status().ToString();
  std::string text = Describe(encoded->data(), encoded->size());
  const KeptUpdate* const update = job.kept->update.get();
  if (update == nullptr) return text;
  const StepOrder& order = update->order;
  absl::StrAppend(&text, "\norder ", order.step, " ", order.grad_scale, " ", order.grad_min, " ",
                  order.grad_max, " ", update->float_sums.offset_bytes, " ",
                  update->float_sums.bytes, " ",
                  Describe(order.hyper_params.data(),
                           order.hyper_params.size() * sizeof(protocol::HyperParams)));
  for (const bool param : order.params) absl::StrAppend(&text, param ? "1" : "0");
  for (const float trust : update->trust) absl::StrAppend(&text, " ", trust);
  for (const KeptUpdate::Block& block : update->blocks) {
    absl::StrAppend(&text, "\nblock ", block.written ? Describe(*block.written) : "-", " ",
                    block.overflows, " ", block.weights_slot.value_or(99), " ",
                    block.staging_slot.value_or(99));
  }
  for (const KeptUpdate::Sums& sums : update->sums) {
    absl::StrAppend(&text, "\nsums ", sums.page, " ", sums.frame.value_or(99), " ", sums.checksum,
                    " ", sums.spills, " ",
                    sums.slot ? Describe(DurableBytes{.slot = *sums.slot}) : "-");
  }
  if (!update->prepared) return text;
  const KeptPrepared& prepared = *update->prepared;
  absl::StrAppend(&text, "\nprepared ", prepared.attempt, " ",
                  Describe(&prepared.request, sizeof(prepared.request)), " ",
                  Describe(prepared.summary.data(), prepared.summary.size()));
  for (const auto& state : *prepared.extra_states) {
    absl::StrAppend(&text, " ", Describe(state.data(), state.size()));
  }
  return text;
}

}  // namespace random_records
}  // namespace forebay::testing
