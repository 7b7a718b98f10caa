// SPDX-License-Identifier: Apache-2.0
// Goal    A record gives the state of its job at the last complete change, whatever bytes were written after that change. It
//         gives no state if the job cannot continue. Bytes that are no record are refused.
// Method  A record of a job of the ledger's tests is changed in every way and adopted again by its descriptor, as after the
//         death of a process, before and behind each store that makes a change count.

#include "daemon/exec/recovery/kept_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/durable_jobs.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::kept_record_test {
namespace {

using protocol::ErrorId;
using protocol::UniqueFd;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::HasError;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr uint64_t kNonce = 77;
constexpr nvme::Slot kSlot{.path = 0, .offset_bytes = uint64_t{3} << 40, .size_bytes = 4096};

class KeptRecordTest : public ::testing::Test {
 protected:
  // Makes a job at step 6. Blocks without a slot are resident.
  void SetUp() override {
    const DurableNode node = testing::MakeDurableNode(1 << 20);
    job_ = *node.jobs.back();
    job_.step = 6;
    job_.weights.clear();
    job_.extra_states = nullptr;
    for (auto& block : job_.blocks) {
      if (block) block->written_step = 6;
    }
    for (uint64_t& updates : job_.param_updates) updates = 6;
    KeptMemory kept;
    for (const auto& block : job_.blocks) {
      kept.resident.push_back(!block);
      kept.written_steps.push_back(6);
    }
    kept.session.world_size = job_.world_size;
    kept.session.durability = job_.durability;
    kept.early_weights_slots = 3;
    kept.sum_frames = 7;
    kept.attempt = 2;
    kept.dram_bytes = uint64_t{1} << 30;
    kept.spare_slots = {SlotOf(1)};
    job_.kept = kept;
    step_arena_ = UniqueFd(::memfd_create("step", MFD_CLOEXEC));
    ASSERT_EQ(::pwrite(step_arena_.get(), "zeroone.", 8, 0), 8);
    MakeRecord();
  }
  void MakeRecord() {
    RecordJob record{.job = std::make_shared<const DurableJob>(job_), .extra_states = {}};
    record.extra_states = {{.offset_bytes = 0, .bytes = 4}};
    record.sum_pages = 3;
    ASSERT_OK_AND_ASSIGN(record_, KeptRecord::Make(record, kNonce, /*workers=*/2));
  }
  nvme::Slot SlotOf(uint64_t index) const {
    nvme::Slot slot = kSlot;
    slot.size_bytes = job_.slot_bytes;
    slot.offset_bytes += index * job_.slot_bytes;
    return slot;
  }
  // Reads the record through a duplicate of its descriptor, as another process does.
  absl::StatusOr<DurableJob> Found() {
    UniqueFd fd(::fcntl(record_->fd(), F_DUPFD_CLOEXEC, 0));
    ASSIGN_OR_RETURN(KeptRecord::Adopted adopted,
                     KeptRecord::Adopt(std::move(fd), step_arena_.get()));
    EXPECT_EQ(adopted.record->nonce(), kNonce);
    return std::move(adopted.job);
  }
  std::string ExtraStateOf(const DurableJob& job, size_t rank) {
    const std::vector<std::byte>& bytes = job.extra_states->at(rank);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  RecordDecision Decision(uint64_t step) const {
    RecordDecision decision{.step = step, .norm = 0.5 * static_cast<double>(step), .clipped = true};
    decision.order.step = step;
    decision.order.params.assign(job_.param_updates.size(), true);
    decision.param_updates.assign(job_.param_updates.size(), step);
    decision.extra_states = {{.offset_bytes = 4, .bytes = 3}};
    return decision;
  }
  RecordBlock Written(uint32_t block, uint64_t step) const {
    return {
        .block = block, .slot = SlotOf(step), .checksum = step, .written_step = step, .step = step};
  }
  // Returns the first block without a slot.
  uint32_t InDram() const {
    uint32_t block = 0;
    while (job_.blocks[block]) ++block;
    return block;
  }

  DurableJob job_;
  UniqueFd step_arena_;
  std::unique_ptr<KeptRecord> record_;
};

TEST_F(KeptRecordTest, SaysTheJobAsItWasMade) {
  ASSERT_OK_AND_ASSIGN(const DurableJob found, Found());
  EXPECT_EQ(found.name, job_.name);
  EXPECT_EQ(found.step, 6U);
  EXPECT_EQ(found.param_updates, job_.param_updates);
  EXPECT_EQ(found.trace, job_.trace);
  EXPECT_EQ(found.kept->resident, job_.kept->resident);
  EXPECT_EQ(found.kept->attempt, 2U);
  EXPECT_THAT(found.kept->spare_slots, ElementsAre(SlotOf(1)));
  EXPECT_EQ(ExtraStateOf(found, 0), "zero");
  for (size_t i = 0; i < job_.blocks.size(); ++i) {
    ASSERT_EQ(found.blocks[i].has_value(), job_.blocks[i].has_value());
    if (!found.blocks[i]) continue;
    EXPECT_EQ(found.blocks[i]->slot, job_.blocks[i]->slot);
    EXPECT_EQ(found.blocks[i]->checksum, job_.blocks[i]->checksum);
  }
}

TEST_F(KeptRecordTest, HasRoomForTheParameterGroupsOfItsLayout) {
  for (const uint32_t groups : {1U, 64U, 65U, 80U, 4096U}) {
    protocol::LayoutSpec spec = job_.layout->spec();
    spec.params[0].param_group = groups - 1;
    ASSERT_OK_AND_ASSIGN(protocol::Layout layout, protocol::Layout::Create(spec));
    job_.layout = std::make_shared<const protocol::Layout>(std::move(layout));
    MakeRecord();
    RecordDecision decision = Decision(7);
    // A client may send more rows of hyperparameters than the parameters need, up to the capacity of the record.
    for (uint32_t row = 0; row < std::max(groups, 64U); ++row) {
      decision.order.hyper_params.push_back({.lr = 1.0 + row, .initial_accumulator_value = -1});
    }
    decision.order.params[0] = false;
    record_->Set(RecordSums{.page = 0, .step = 7, .frame = 6});
    record_->Set(decision);
    ASSERT_OK_AND_ASSIGN(const DurableJob found, Found());
    const StepOrder& order = found.kept->update->order;
    ASSERT_THAT(order.hyper_params, SizeIs(decision.order.hyper_params.size()));
    for (uint32_t row = 0; row < order.hyper_params.size(); ++row) {
      ASSERT_EQ(order.hyper_params[row].lr, 1.0 + row);
      ASSERT_EQ(order.hyper_params[row].initial_accumulator_value, -1);
    }
    EXPECT_EQ(order.params, decision.order.params) << groups;
    ASSERT_THAT(found.kept->update->sums, SizeIs(1)) << groups;
    EXPECT_EQ(found.kept->update->sums[0].frame, 6U) << groups;
  }
}

TEST_F(KeptRecordTest, ABlockThatMovesIsInOnePlaceAlone) {
  const uint32_t block = InDram();
  record_->Set(RecordBlock{.block = block, .slot = SlotOf(1), .checksum = 5, .written_step = 6});
  ASSERT_OK_AND_ASSIGN(const DurableJob evicted, Found());
  EXPECT_FALSE(evicted.kept->resident[block]);
  ASSERT_TRUE(evicted.blocks[block].has_value());
  EXPECT_EQ(evicted.blocks[block]->slot, SlotOf(1));
  EXPECT_THAT(evicted.kept->spare_slots, IsEmpty());
  EXPECT_LT(evicted.kept->dram_bytes, job_.kept->dram_bytes);
  record_->Set(RecordBlock{.block = block, .written_step = 6});
  ASSERT_OK_AND_ASSIGN(const DurableJob back, Found());
  EXPECT_TRUE(back.kept->resident[block]);
  EXPECT_FALSE(back.blocks[block].has_value());
  EXPECT_EQ(back.kept->dram_bytes, job_.kept->dram_bytes);
  EXPECT_THAT(back.kept->spare_slots, ElementsAre(SlotOf(1)));
}

TEST_F(KeptRecordTest, AStepTakesAllOfItsBlocksAtOnceAndSoOn) {
  const uint32_t block = InDram();
  for (uint64_t step = 7; step < 12; ++step) {
    record_->Set(Decision(step));
    ASSERT_OK_AND_ASSIGN(const DurableJob begun, Found());
    EXPECT_NE(begun.kept->update, nullptr);
    record_->Set(Written(block, step));
    record_->Set(RecordStep{.step = step, .overflowed = step});
    ASSERT_OK_AND_ASSIGN(const DurableJob found, Found());
    EXPECT_EQ(found.step, step);
    EXPECT_EQ(found.kept->update, nullptr);
    EXPECT_THAT(found.param_updates, Each(step));
    EXPECT_THAT(found.trace, IsEmpty());
    EXPECT_EQ(ExtraStateOf(found, 0), "one");
    EXPECT_EQ(found.blocks[block]->slot, SlotOf(step));
    EXPECT_EQ(found.kept->norm, 0.5 * static_cast<double>(step));
    EXPECT_TRUE(found.kept->clipped);
    EXPECT_EQ(found.kept->overflowed, step);
    EXPECT_EQ(found.kept->attempt, 0U) << "of the step before";
  }
}

// Until a step is published, the record holds the step's decision and the blocks as they were before the step.
TEST_F(KeptRecordTest, TheMiddleOfAnUpdateIsSaid) {
  const uint32_t block = InDram();
  for (uint64_t step = 7; step < 10; ++step) {
    RecordDecision decision = Decision(step);
    decision.order.grad_scale = 0.25F;
    decision.order.grad_min = -1;
    decision.order.grad_max = 1;
    decision.order.hyper_params = {{.lr = 0.5}, {.lr = 0.125}};
    decision.order.params[0] = false;
    if (step == 8) decision.float_sums = {.offset_bytes = 4096, .bytes = 8192};
    ASSERT_OK_AND_ASSIGN(const DurableJob last, Found());
    record_->Set(RecordAttempt{.step = step, .attempt = 9});
    record_->Set(decision);
    record_->Set(RecordStaged{.block = block, .step = step, .staging_slot = 5});
    record_->Set(RecordAttempt{.step = step + 1, .attempt = 4});
    record_->Set(RecordSums{.page = 0, .step = step, .frame = 6});
    record_->Set(
        RecordSums{.page = 1, .step = step, .slot = SlotOf(90), .checksum = 8, .spills = 9});
    record_->Set(RecordSums{.page = 2, .step = step, .frame = 3});
    record_->Set(RecordSums{.page = 2, .step = step});
    ASSERT_OK_AND_ASSIGN(const DurableJob begun, Found());
    ASSERT_THAT(begun.kept->update->sums, SizeIs(2));
    EXPECT_EQ(begun.kept->update->sums[0].frame, 6U);
    EXPECT_EQ(begun.kept->update->sums[0].slot, std::nullopt);
    EXPECT_EQ(begun.kept->update->sums[1].page, 1U);
    EXPECT_EQ(begun.kept->update->sums[1].frame, std::nullopt);
    EXPECT_EQ(begun.kept->update->sums[1].slot, SlotOf(90));
    EXPECT_EQ(begun.kept->update->sums[1].checksum, 8U);
    EXPECT_EQ(begun.kept->update->sums[1].spills, 9U);
    EXPECT_THAT(begun.kept->sum_slots, ElementsAre(SlotOf(90)));
    EXPECT_EQ(begun.step, step);
    EXPECT_THAT(begun.param_updates, Each(step - 1));
    EXPECT_EQ(ExtraStateOf(begun, 0), "one");
    EXPECT_EQ(begun.kept->attempt, 4U);
    ASSERT_NE(begun.kept->update, nullptr);
    const StepOrder& order = begun.kept->update->order;
    EXPECT_EQ(order.step, step);
    EXPECT_EQ(order.grad_scale, 0.25F);
    EXPECT_EQ(order.grad_min, -1);
    EXPECT_EQ(order.grad_max, 1);
    ASSERT_THAT(order.hyper_params, SizeIs(2));
    EXPECT_EQ(order.hyper_params[1].lr, 0.125);
    EXPECT_EQ(order.params, decision.order.params);
    EXPECT_EQ(begun.kept->update->float_sums.offset_bytes, step == 8 ? 4096U : 0U);
    EXPECT_EQ(begun.kept->update->float_sums.bytes, step == 8 ? 8192U : 0U);
    EXPECT_EQ(begun.kept->dram_bytes, last.kept->dram_bytes + (step == 8 ? 8192 : 0));
    EXPECT_EQ(begun.kept->update->blocks[block].staging_slot, 5U);
    EXPECT_EQ(begun.kept->update->blocks[block].written, std::nullopt);
    const auto before = begun.blocks[block];

    RecordBlock written = Written(block, step);
    written.overflows = 3;
    written.weights_slot = 2;
    record_->Set(written);
    ASSERT_OK_AND_ASSIGN(const DurableJob later, Found());
    const KeptUpdate::Block& of = later.kept->update->blocks[block];
    EXPECT_EQ(of.staging_slot, std::nullopt);
    ASSERT_TRUE(of.written.has_value());
    EXPECT_EQ(of.written->slot, SlotOf(step));
    EXPECT_EQ(of.written->checksum, step);
    EXPECT_EQ(of.overflows, 3U);
    EXPECT_EQ(of.weights_slot, 2U);
    EXPECT_EQ(later.blocks[block].has_value(), before.has_value());
    if (before) {
      EXPECT_EQ(later.blocks[block]->slot, before->slot);
    }
    EXPECT_THAT(later.Slots(), Contains(SlotOf(step)));

    record_->Set(RecordInstalled{.block = block});
    ASSERT_OK_AND_ASSIGN(const DurableJob installed, Found());
    EXPECT_EQ(installed.kept->update->blocks[block].weights_slot, std::nullopt);
    EXPECT_TRUE(installed.kept->update->blocks[block].written.has_value());
    record_->Set(RecordStep{.step = step});
    ASSERT_OK_AND_ASSIGN(const DurableJob published, Found());
    EXPECT_EQ(published.kept->update, nullptr);
    EXPECT_EQ(published.blocks[block]->slot, SlotOf(step));
  }
}

TEST_F(KeptRecordTest, AnAttemptIsThatOfItsStep) {
  record_->Set(RecordAttempt{.step = 7, .attempt = 3});
  ASSERT_OK_AND_ASSIGN(const DurableJob found, Found());
  EXPECT_EQ(found.kept->attempt, 3U);
  record_->Set(RecordAttempt{.step = 8, .attempt = 4});
  ASSERT_OK_AND_ASSIGN(const DurableJob other, Found());
  EXPECT_EQ(other.kept->attempt, 0U);
}

TEST_F(KeptRecordTest, UpdatesThatWereSetCountUntilTheNextDecision) {
  record_->Set(RecordUpdates{.param = 1, .updates = 1000});
  ASSERT_OK_AND_ASSIGN(const DurableJob found, Found());
  std::vector<uint64_t> wanted = job_.param_updates;
  wanted[1] = 1000;
  EXPECT_EQ(found.param_updates, wanted);
  record_->Set(Decision(job_.step + 1));
  ASSERT_OK_AND_ASSIGN(const DurableJob decided, Found());
  EXPECT_EQ(decided.param_updates, wanted) << "those before the step, which is not published";
}

TEST_F(KeptRecordTest, CountsSumsInFloat32Once) {
  DurableJob job = job_;
  job.kept->session.accumulate = true;  // The job counts the float32 sums already.
  ASSERT_OK_AND_ASSIGN(record_, KeptRecord::Make({.job = std::make_shared<const DurableJob>(job)},
                                                 kNonce, /*workers=*/2));
  ASSERT_OK_AND_ASSIGN(const DurableJob published, Found());
  RecordDecision decision = Decision(7);
  decision.extra_states.clear();
  decision.float_sums = {.offset_bytes = 4096, .bytes = 8192};
  record_->Set(decision);
  ASSERT_OK_AND_ASSIGN(const DurableJob begun, Found());
  EXPECT_EQ(begun.kept->update->float_sums.bytes, 8192U);
  EXPECT_EQ(begun.kept->dram_bytes, published.kept->dram_bytes);
}

TEST_F(KeptRecordTest, SaysWhichLeasesThereAre) {
  DurableJob job = job_;
  job.weights_on_swap.assign(job.layout->partitions().size(), true);
  for (auto& block : job.blocks) block.reset();
  job.kept->leases = {{.lease = 5, .rank = 1, .partition = 2, .offset_bytes = 4096}};
  ASSERT_OK_AND_ASSIGN(record_, KeptRecord::Make({.job = std::make_shared<const DurableJob>(job)},
                                                 kNonce, /*workers=*/2));
  const KeptLease newer{.lease = 7, .rank = 0, .partition = 1, .offset_bytes = 8192};
  record_->Set(RecordLease{.lease = newer});
  ASSERT_OK_AND_ASSIGN(const DurableJob both, Found());
  EXPECT_THAT(both.kept->leases, ElementsAre(job.kept->leases[0], newer));
  record_->Set(RecordLeaseEnd{.lease = 5});
  record_->Set(RecordLeaseEnd{.lease = 6});
  ASSERT_OK_AND_ASSIGN(const DurableJob one, Found());
  EXPECT_THAT(one.kept->leases, ElementsAre(newer));
  const uint64_t max = LeasesRecordedMax(*job.layout, job.world_size);
  for (uint64_t i = 1; i < max; ++i) record_->Set(RecordLease{.lease = {.lease = 10 + i}});
  ASSERT_OK_AND_ASSIGN(const DurableJob full, Found());
  EXPECT_EQ(full.kept->leases.size(), max);
}

TEST_F(KeptRecordTest, OneThatWasDroppedSaysNothing) {
  record_->Drop();
  EXPECT_THAT(Found(), HasError(ErrorId::kJobFailed));
}

// Dropping an adopted record leaves it valid, so that the next daemon finds it after a failed start. Dropping a record whose
// arenas are owned ends it.
TEST_F(KeptRecordTest, TheEndOfItsOwnerDropsIt) {
  for (const bool is_owned : {false, true}) {
    UniqueFd fd(::fcntl(record_->fd(), F_DUPFD_CLOEXEC, 0));
    ASSERT_OK_AND_ASSIGN(auto adopted, KeptRecord::Adopt(std::move(fd), step_arena_.get()));
    if (is_owned) adopted.record->Own();
    adopted.record.reset();
    EXPECT_EQ(Found().ok(), !is_owned);
  }
}

// The state machine relies on it.
TEST_F(KeptRecordTest, APlaceWithTwoContentsIsRefused) {
  const uint32_t block = InDram();
  const auto with = [&](uint32_t weights_slot, uint32_t frame, uint64_t slot) {
    MakeRecord();
    record_->Set(Decision(7));
    for (const uint32_t one : {block, block + 1}) {
      RecordBlock written = Written(one, 7);
      written.weights_slot = one == block ? 1 : weights_slot;
      record_->Set(written);
    }
    record_->Set(RecordSums{.page = 0, .step = 7, .frame = 1});
    record_->Set(RecordSums{.page = 1, .step = 7, .frame = frame, .slot = SlotOf(90)});
    record_->Set(RecordSums{.page = 2, .step = 7, .slot = SlotOf(slot)});
    return Found().status();
  };
  EXPECT_OK(with(2, 2, 91));
  EXPECT_THAT(with(1, 2, 91), HasError(ErrorId::kCorrupt));
  EXPECT_THAT(with(3, 2, 91), HasError(ErrorId::kCorrupt));
  EXPECT_THAT(with(2, 1, 91), HasError(ErrorId::kCorrupt));
  EXPECT_THAT(with(2, 7, 91), HasError(ErrorId::kCorrupt));
  EXPECT_THAT(with(2, 2, 90), HasError(ErrorId::kCorrupt));
}

TEST_F(KeptRecordTest, AStepArenaThatIsTooShortIsSaid) {
  step_arena_ = UniqueFd(::memfd_create("short", MFD_CLOEXEC));
  EXPECT_THAT(Found(), HasError(ErrorId::kCorrupt));
}

TEST_F(KeptRecordTest, OtherBytesAreNoRecord) {
  for (const off_t bytes : {0, 100, 100000}) {
    UniqueFd fd(::memfd_create("other", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(fd.get(), bytes), 0);
    EXPECT_THAT(KeptRecord::Adopt(std::move(fd), -1), HasError(ErrorId::kCorrupt));
  }
  ASSERT_EQ(::ftruncate(record_->fd(), 2048), 0);
  UniqueFd cut(::fcntl(record_->fd(), F_DUPFD_CLOEXEC, 0));
  EXPECT_THAT(KeptRecord::Adopt(std::move(cut), -1), HasError(ErrorId::kCorrupt));
}

}  // namespace
}  // namespace forebay::daemon::kept_record_test
