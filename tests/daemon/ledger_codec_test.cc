// SPDX-License-Identifier: Apache-2.0
// Goal    Decoding a ledger recovers every value of every job. Bytes that are no ledger are refused, with the job and the
//         reason. No bytes crash the decoder.
// Method  Jobs of every kind are encoded and decoded. One value after the other is invalidated. The encoded bytes are cut at
//         every length and changed at seeded places. Bytes that are then accepted must encode and decode to the same ledger.

#include "daemon/exec/recovery/ledger_codec.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/durable_jobs.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::ledger_codec_test {
namespace {

using protocol::ErrorId;
using testing::ExpectEqual;
using testing::HasError;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MakeDurableNode;

constexpr uint64_t kNonce = 0x1234'5678'9abc'def0;
constexpr uint64_t kBeginBytes = 1 << 20;
constexpr int kChanges = 10'000;
constexpr uint32_t kSeed = 14;

VolumePlace MakePlace() {
  VolumePlace place{.paths = {{.name = "/mnt/a/forebay.swap", .inode = 77},
                              {.name = "/dev/sdb1", .disk = "naa.5000 partition 1"}}};
  place.machine.fill(std::byte{9});
  return place;
}

std::vector<std::byte> Encode(const DurableNode& node, const VolumePlace& place = MakePlace()) {
  auto bytes = EncodeLedger(node, kNonce, place);
  EXPECT_OK(bytes);
  return bytes.value_or(std::vector<std::byte>{});
}

TEST(LedgerCodec, EveryValueOfEveryJobComesBack) {
  const DurableNode node = MakeDurableNode(kBeginBytes);
  ASSERT_OK_AND_ASSIGN(const DecodedLedger decoded, DecodeLedger(Encode(node)));
  EXPECT_EQ(decoded.nonce, kNonce);
  EXPECT_EQ(decoded.place, MakePlace());
  ExpectEqual(decoded.node, node);
  EXPECT_EQ(SlotsOf(decoded.node), SlotsOf(node));
  EXPECT_GT(SlotsOf(node).size(), 20U);
  const DurableJob& big = *node.jobs.back();
  EXPECT_TRUE(std::ranges::any_of(big.blocks, [](const auto& block) {
    return block && block->weights_digests != nullptr;
  })) << "no block with a plane of weights";
}

TEST(LedgerCodec, ALedgerWithoutJobsComesBack) {
  ASSERT_OK_AND_ASSIGN(const DecodedLedger decoded,
                       DecodeLedger(Encode({.last_job = 7, .jobs = {}})));
  EXPECT_EQ(decoded.node.last_job, 7U);
  EXPECT_TRUE(decoded.node.jobs.empty());
}

// Older programs wrote ledgers without a place.
TEST(LedgerCodec, ALedgerWithoutAPlaceIsOneWhosePlaceIsNotKnown) {
  const DurableNode node = MakeDurableNode(kBeginBytes);
  ASSERT_OK_AND_ASSIGN(const DecodedLedger decoded, DecodeLedger(Encode(node, {})));
  EXPECT_EQ(decoded.place, VolumePlace{});
  ExpectEqual(decoded.node, node);
}

TEST(LedgerCodec, APlaceTakesNoMoreThanItsEstimate) {
  VolumePlace place = MakePlace();
  for (size_t length = 1; length < 30; ++length) {
    place.paths[0].name.assign(length, 'n');
    place.paths[1].disk.assign(length, 'd');
    EXPECT_LE(Encode({}, place).size() - Encode({}, {}).size(), LedgerBytes(place)) << length;
  }
}

TEST(LedgerCodec, ABlockTakesFourWords) {
  const DurableNode node = MakeDurableNode(kBeginBytes);
  DurableJob job = *node.jobs[0];
  job.weights.clear();
  const size_t without =
      Encode({.last_job = 1, .jobs = {std::make_shared<const DurableJob>(job)}}).size();
  for (int i = 0; i < 100; ++i) job.blocks.push_back(job.blocks[0]);
  const size_t with =
      Encode({.last_job = 1, .jobs = {std::make_shared<const DurableJob>(job)}}).size();
  EXPECT_EQ(with - without, 100U * 32);
}

// ---------------------------------------------------------------------------- what is in memory alone

// Returns MakeDurableNode() as its records have it: with the memory of its jobs. The first job is not durable.
DurableNode MakeKeptNode() {
  DurableNode node = MakeDurableNode(kBeginBytes);
  uint64_t offset_bytes = uint64_t{1} << 40;
  for (std::shared_ptr<const DurableJob>& job : node.jobs) {
    DurableJob kept_job = *job;
    const uint64_t id = job->id;
    KeptMemory& kept = kept_job.kept.emplace();
    for (size_t block = 0; block < job->blocks.size(); ++block) {
      kept.resident.push_back(block % 2 == 0);
      kept.written_steps.push_back(job->step - block % 3);
    }
    kept_job.durability = {.level = protocol::DurabilityLevel::kStep, .steps = 1};
    if (job == node.jobs.front()) kept_job.durability = {};
    kept_job.weights.clear();
    for (size_t block = 0; block < job->blocks.size(); block += 2) kept_job.blocks[block] = {};
    kept.weights_bytes = 1 + id;
    kept.step_bytes = 9 + id;
    kept.dram_bytes = 2 + id;
    kept.session = {.world_size = job->world_size,
                    .grad_arena_bytes = 3 + id,
                    .extra_state_bytes = 4 + id,
                    .activation_bytes = 5 + id,
                    .trace = id % 2 == 0,
                    .accumulate = id % 2 == 1,
                    .early_updates = id % 3 == 0,
                    .durability = kept_job.durability};
    kept.early_weights_slots = 6;
    kept.attempt = 7 + id;
    for (int i = 0; i < 3; ++i, offset_bytes += uint64_t{1} << 30) {
      kept.spare_slots.push_back(
          {.path = 1, .offset_bytes = offset_bytes, .size_bytes = job->slot_bytes});
      kept.sum_slots.push_back(
          {.path = 2, .offset_bytes = offset_bytes, .size_bytes = 2 * job->slot_bytes});
    }
    job = std::make_shared<const DurableJob>(std::move(kept_job));
  }
  return node;
}

TEST(LedgerCodec, WhatIsKeptComesBack) {
  const DurableNode node = MakeKeptNode();
  ASSERT_OK_AND_ASSIGN(const std::vector<std::byte> bytes, EncodeKept(node, kNonce));
  ASSERT_OK_AND_ASSIGN(const DecodedLedger decoded, DecodeLedger(bytes));
  EXPECT_THAT(decoded.handed_over, IsEmpty());
  ExpectEqual(decoded.node, node);
  for (size_t i = 0; i < node.jobs.size(); ++i) {
    EXPECT_EQ(decoded.node.jobs[i]->AllSlots(), node.jobs[i]->AllSlots());
    ASSERT_TRUE(decoded.node.jobs[i]->kept);
    EXPECT_EQ(*decoded.node.jobs[i]->kept, *node.jobs[i]->kept);
  }
}

TEST(LedgerCodec, WrongValuesOfWhatIsKeptAreNamed) {
  const std::vector<std::pair<std::function<void(DurableJob&)>, std::string>> cases = {
      {[](DurableJob& job) { job.kept->resident.pop_back(); }, "blocks with a place"},
      {[](DurableJob& job) { job.kept->written_steps.push_back(0); }, "blocks with a step"},
      {[](DurableJob& job) { job.kept->spare_slots[0].offset_bytes += 8; }, "a slot at offset"},
      {[](DurableJob& job) { job.kept->sum_slots[0].path = 16; }, "of swap path 16"},
      {[](DurableJob& job) { job.kept->spare_slots[0] = job.kept->spare_slots[1]; },
       "two slots at offset"},
      {[](DurableJob& job) { job.kept.reset(); }, "parts of weights"},
  };
  for (const auto& [make, why] : cases) {
    DurableNode node = MakeKeptNode();
    DurableJob job = *node.jobs[0];
    make(job);
    node.jobs[0] = std::make_shared<const DurableJob>(std::move(job));
    ASSERT_OK_AND_ASSIGN(const auto bytes, EncodeKept(node, kNonce));
    const auto decoded = DecodeLedger(bytes);
    EXPECT_THAT(decoded, HasError(ErrorId::kCorrupt)) << why;
    EXPECT_THAT(std::string(decoded.status().message()), HasSubstr(why));
  }
}

TEST(LedgerCodec, AVolumeHasNothingOfWhatIsInMemoryAlone) {
  const DurableNode kept = MakeKeptNode();
  DurableNode node = MakeDurableNode(kBeginBytes);
  for (size_t i = 0; i < node.jobs.size(); ++i) {
    DurableJob job = *node.jobs[i];
    job.kept = kept.jobs[i]->kept;
    node.jobs[i] = std::make_shared<const DurableJob>(std::move(job));
  }
  ASSERT_OK_AND_ASSIGN(const DecodedLedger decoded, DecodeLedger(Encode(node)));
  ExpectEqual(decoded.node, node);
  for (const auto& job : decoded.node.jobs) EXPECT_FALSE(job->kept);
}

// ------------------------------------------------------------------------------------- wrong values

struct Wrong {
  std::function<void(DurableJob&)> make;
  std::string why;  // part of the message
  size_t job = 3;   // Index into MakeDurableNode()'s jobs; job 3 has every field set.
};

TEST(LedgerCodec, EveryWrongValueIsNamed) {
  const std::vector<Wrong> cases = {
      {[](DurableJob& job) { job.id = 0; }, "ids up to 12"},
      {[](DurableJob& job) { job.id = 13; }, "ids up to 12"},
      {[](DurableJob& job) { job.id = 4; }, "two jobs with id 4"},
      {[](DurableJob& job) { job.name = "sharded"; }, "or name sharded"},
      {[](DurableJob& job) { job.name = ""; }, "not a name"},
      {[](DurableJob& job) { job.name = "5:big"; }, "not a name"},
      {[](DurableJob& job) { job.name = "a b"; }, "not a name"},
      {[](DurableJob& job) { job.name = std::string(201, 'n'); }, "not a name"},
      {[](DurableJob& job) { job.run = std::string(201, 'r'); }, "token"},
      {[](DurableJob& job) {
         job.durability = {protocol::DurabilityLevel::kEpoch, 0};
       },
       "epoch=0"},
      {[](DurableJob& job) { job.world_size = 0; }, "0 ranks"},
      {[](DurableJob& job) { job.world_size = 1025; }, "1025 ranks"},
      {[](DurableJob& job) { job.block_elems = 0; }, "blocks of 0"},
      {[](DurableJob& job) { job.block_elems = 100; }, "blocks of 100"},
      {[](DurableJob& job) { job.block_elems = uint64_t{1} << 27; }, "blocks of 134217728"},
      {[](DurableJob& job) { job.block_elems = 64; }, "blocks; its layout has"},
      {[](DurableJob& job) { job.slot_bytes = 0; }, "slots of 0"},
      {[](DurableJob& job) { job.slot_bytes = 1000; }, "slots of 1000"},
      {[](DurableJob& job) { job.slot_bytes = 4096; }, "its slot 4096"},
      {[](DurableJob& job) { job.slot_bytes = uint64_t{1} << 40; }, "two slots at offset"},
      {[](DurableJob& job) { job.weights_on_swap.pop_back(); }, "2 partitions"},
      {[](DurableJob& job) {
         job.weights_on_swap = {true, true};
       },
       "2 partitions", 0},
      {[](DurableJob& job) { job.weights_on_swap[2] = true; }, "; its layout has"},
      {[](DurableJob& job) { job.step = 1; }, "a slot of step"},
      {[](DurableJob& job) { job.param_updates.push_back(0); }, "4 parameters"},
      {[](DurableJob& job) { job.param_updates[1] = protocol::kUpdatesMax + job.step + 1; },
       "a parameter with"},
      {[](DurableJob& job) { job.trace = {3}; }, "a trace of partition 3"},
      {[](DurableJob& job) {
         job.trace = {0, 1, 2, 0};
       },
       "4 partitions traced"},
      {[](DurableJob& job) { job.blocks.emplace_back(); }, "blocks; its layout has"},
      {[](DurableJob& job) { job.blocks.pop_back(); }, "; its layout has"},
      {[](DurableJob& job) { job.blocks[0]->slot.path = 16; }, "of swap path 16"},
      {[](DurableJob& job) { job.blocks[0]->slot.offset_bytes += 8; }, "a slot at offset"},
      {[](DurableJob& job) { job.blocks[0]->slot.offset_bytes = ~uint64_t{4095}; },
       "a slot at offset"},
      {[](DurableJob& job) { job.blocks[0]->slot = job.blocks[1]->slot; }, "two slots at offset"},
      {[](DurableJob& job) { job.weights[0].slot = job.blocks[1]->slot; }, "two slots at offset"},
      {[](DurableJob& job) { job.blocks[0]->written_step = job.step + 1; }, "a slot of step"},
      {[](DurableJob& job) { job.weights[0].written_step = job.step + 1; }, "a slot of step"},
      {[](DurableJob& job) { job.weights.pop_back(); }, "0 parts of weights"},
      {[](DurableJob& job) { job.blocks[0]->weights_digests = nullptr; }, "pages of weights in"},
      {[](DurableJob& job) {
         job.blocks[0]->weights_digests =
             std::make_shared<const std::vector<uint64_t>>(std::vector<uint64_t>(3));
       },
       "3 pages of weights in block 0", 0},
  };
  for (const Wrong& wrong : cases) {
    DurableNode node = MakeDurableNode(kBeginBytes);
    DurableJob job = *node.jobs[wrong.job];
    wrong.make(job);
    for (auto& block : job.blocks) {
      if (block) block->slot.size_bytes = job.slot_bytes;
    }
    for (DurableBytes& part : job.weights) part.slot.size_bytes = job.slot_bytes;
    node.jobs[wrong.job] = std::make_shared<const DurableJob>(std::move(job));
    const auto decoded = DecodeLedger(Encode(node));
    EXPECT_THAT(decoded, HasError(ErrorId::kCorrupt)) << wrong.why;
    EXPECT_THAT(std::string(decoded.status().message()), HasSubstr(wrong.why));
  }
}

TEST(LedgerCodec, EveryWrongPlaceIsNamed) {
  const auto expect = [](const VolumePlace& place, const std::string& why) {
    const auto decoded = DecodeLedger(Encode(MakeDurableNode(kBeginBytes), place));
    EXPECT_THAT(decoded, HasError(ErrorId::kCorrupt)) << why;
    EXPECT_THAT(std::string(decoded.status().message()), HasSubstr(why));
  };
  expect({.paths = std::vector<PathPlace>(17, {.name = "/a"})}, "17 swap paths");
  expect({.paths = {{.name = "/a"}, {.name = ""}}}, "the name of swap path 1 has 0 bytes");
  expect({.paths = {{.name = std::string(4096, 'a')}}}, "path 0 has 4096 bytes");
  expect({.paths = {{.name = "/a", .disk = std::string(4096, 'd')}}}, "of its disk 4096");
}

TEST(LedgerCodec, ASlotOfAnotherSizeIsNotEncoded) {
  DurableNode node = MakeDurableNode(kBeginBytes);
  DurableJob job = *node.jobs[0];
  job.weights[0].slot.size_bytes = 4096;
  node.jobs[0] = std::make_shared<const DurableJob>(std::move(job));
  EXPECT_THAT(EncodeLedger(node, kNonce), HasError(ErrorId::kInternal));
}

// Gives each job of MakeDurableNode() an older durable step as its `before`. The first block has the same slot in both steps.
DurableNode WithBefore() {
  DurableNode node = MakeDurableNode(kBeginBytes);
  DurableNode before = MakeDurableNode(kBeginBytes + (uint64_t{1} << 24));
  for (size_t i = 0; i < node.jobs.size(); ++i) {
    DurableJob older = *before.jobs[i];
    older.step -= 10;
    for (uint64_t& updates : older.param_updates) updates = std::min(updates, older.step);
    for (auto& block : older.blocks) {
      if (block) block->written_step = std::min(block->written_step, older.step);
    }
    for (DurableBytes& part : older.weights)
      part.written_step = std::min(part.written_step, older.step);
    if (older.blocks[0] && node.jobs[i]->blocks[0])
      older.blocks[0]->slot = node.jobs[i]->blocks[0]->slot;
    DurableJob job = *node.jobs[i];
    job.before = std::make_shared<const DurableJob>(std::move(older));
    node.jobs[i] = std::make_shared<const DurableJob>(std::move(job));
  }
  return node;
}

TEST(LedgerCodec, TheStepBeforeComesBackAndIsNotAmongTheSlotsThatItKeeps) {
  const DurableNode node = WithBefore();
  ASSERT_OK_AND_ASSIGN(const DecodedLedger decoded, DecodeLedger(Encode(node)));
  ExpectEqual(decoded.node, node);
  EXPECT_EQ(SlotsOf(node), SlotsOf(MakeDurableNode(kBeginBytes)));
  EXPECT_GT(decoded.node.jobs[0]->Slots().size(), decoded.node.jobs[0]->NamedSlots().size());
  EXPECT_LT(decoded.node.jobs[0]->Slots().size(), 2 * decoded.node.jobs[0]->NamedSlots().size());
}

TEST(LedgerCodec, AStepBeforeThatIsNotBeforeIsRefused) {
  DurableNode node = WithBefore();
  DurableJob job = *node.jobs[0];
  DurableJob later = *job.before;
  later.step = job.step;
  job.before = std::make_shared<const DurableJob>(std::move(later));
  node.jobs[0] = std::make_shared<const DurableJob>(std::move(job));
  const auto decoded = DecodeLedger(Encode(node));
  EXPECT_THAT(decoded, HasError(ErrorId::kCorrupt));
}

TEST(LedgerCodec, ANewerVersionIsRefusedByBothNumbers) {
  std::vector<std::byte> bytes = Encode({});
  // The encoding has one segment: the segment table, the root pointer, then the root's data, which begins with the version.
  ASSERT_EQ(bytes.at(16), std::byte{1});
  bytes[16] = std::byte{3};
  const auto decoded = DecodeLedger(bytes);
  EXPECT_THAT(decoded, HasError(ErrorId::kSwapPath));
  EXPECT_THAT(std::string(decoded.status().message()),
              HasSubstr("version 3, made by a newer forebayd; this one reads version 2"));
}

// -------------------------------------------------------------------------------------- wrong bytes

TEST(LedgerCodec, EveryTruncationIsRefused) {
  const std::vector<std::byte> bytes = Encode(MakeDurableNode(kBeginBytes));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THAT(DecodeLedger(std::span(bytes).first(size)), HasError(ErrorId::kCorrupt)) << size;
  }
}

// Expects that `bytes` are refused, or decode to a ledger that can be encoded again.
void ExpectRefusedOrWhole(const std::vector<std::byte>& bytes) {
  const auto decoded = DecodeLedger(bytes);
  if (!decoded.ok()) {
    EXPECT_THAT(protocol::IdOf(decoded.status()),
                ::testing::AnyOf(ErrorId::kCorrupt, ErrorId::kSwapPath));
    return;
  }
  ASSERT_OK_AND_ASSIGN(const auto again,
                       EncodeLedger(decoded->node, decoded->nonce, decoded->place));
  ASSERT_OK_AND_ASSIGN(const DecodedLedger second, DecodeLedger(again));
  EXPECT_EQ(second.nonce, decoded->nonce);
  EXPECT_EQ(second.place, decoded->place);
  ExpectEqual(second.node, decoded->node);
}

TEST(LedgerCodec, ChangedBytesAreRefusedOrALedgerOfTheirOwn) {
  const std::vector<std::byte> bytes = Encode(MakeDurableNode(kBeginBytes));
  SCOPED_TRACE(::testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed);
  for (int i = 0; i < kChanges; ++i) {
    std::vector<std::byte> changed = bytes;
    const size_t changes = 1 + random() % 3;
    for (size_t change = 0; change < changes; ++change) {
      std::byte& byte = changed[random() % changed.size()];
      byte = random() % 2 == 0 ? byte ^ std::byte(1 << random() % 8) : std::byte(random() % 256);
    }
    ExpectRefusedOrWhole(changed);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(LedgerCodec, ArbitraryBytesAreRefused) {
  std::mt19937 random(kSeed);
  for (int i = 0; i < 1000; ++i) {
    std::vector<std::byte> bytes(random() % 64 * 8);
    for (std::byte& byte : bytes) byte = std::byte(random() % 4 == 0 ? random() % 256 : 0);
    ExpectRefusedOrWhole(bytes);
  }
}

}  // namespace
}  // namespace forebay::daemon::ledger_codec_test
