// SPDX-License-Identifier: Apache-2.0
// Goal    One rank's gradient in a 16-bit type gives the bits of a float32 sum. Parts of any split give the bits of the whole.
//         A non-finite value is found at any position. The checksum of a block that is digested during its update is the
//         checksum of its bytes.
// Method  The workers' functions run on seeded gradients. The 16-bit path is compared with the float32 path and with one kernel
//         for each pass; the update for swap is compared with the update in parts, followed by the checksum of the result.

#include "daemon/exec/block_tasks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cpu_adam/step_scalars.h"
#include "cpu_adam/stream_kernel.h"
#include "cpu_adam/targets.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using cpu_adam::kSumChunkElems;
using protocol::DType;

template <typename T>
std::span<std::byte> BytesOf(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

// Finite bfloat16 of every magnitude that a training run sees, signed zeros and denormals included.
std::vector<uint16_t> Bf16Gradient(uint64_t elems, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint16_t> gradient;
  for (uint64_t i = 0; i < elems; ++i) {
    const uint64_t exponent = random() % 16 == 0 ? 0 : 90 + random() % 50;
    gradient.push_back(
        static_cast<uint16_t>((random() & 0x8000) | (exponent << 7) | (random() & 0x7F)));
  }
  return gradient;
}

std::vector<float> Widened(const std::vector<uint16_t>& narrow) {
  std::vector<float> wide;
  for (const uint16_t bits : narrow) wide.push_back(std::bit_cast<float>(uint32_t{bits} << 16));
  return wide;
}

AddGradients OneRank(DType dtype, uint64_t elems) {
  return {.elems = elems, .dtype = dtype, .sum_dtype = dtype, .assign = true};
}

using Sources = std::vector<std::span<const std::byte>>;

double SquaresOf(std::span<const std::byte> sum) {
  return RunSumGradient(DType::kFloat32, {0, sum.size() / sizeof(float)}, sum).ToDouble();
}

class Targets : public ::testing::TestWithParam<std::string> {
 protected:
  Targets() { EXPECT_TRUE(cpu_adam::ForceTarget(GetParam()).ok()); }
  ~Targets() override { EXPECT_TRUE(cpu_adam::ForceTarget("best").ok()); }
};

TEST_P(Targets, OneRanksGradientIsCopiedAndItsSquaresAreThoseOfTheFloat32Sum) {
  for (const uint64_t elems : {1U, 63U, 4096U, 4160U, 300'000U}) {
    std::vector<uint16_t> gradient = Bf16Gradient(elems, 7);
    std::vector<uint16_t> copy(elems);
    const AddedGradients added = RunAddGradients(OneRank(DType::kBFloat16, elems), {0, elems},
                                                 Sources{BytesOf(gradient)}, BytesOf(copy));
    std::vector<float> sum(elems);
    cpu_adam::AddGradient(elems, {gradient.data(), DType::kBFloat16}, cpu_adam::AddMode::kSet,
                          sum.data());
    EXPECT_EQ(added.culprit, 0U);
    EXPECT_EQ(copy, gradient) << elems;
    EXPECT_EQ(added.squares.ToDouble(), SquaresOf(BytesOf(sum))) << elems;
    std::vector<float> wide = Widened(gradient);
    std::vector<float> wide_copy(elems);
    const AddedGradients same = RunAddGradients(OneRank(DType::kFloat32, elems), {0, elems},
                                                Sources{BytesOf(wide)}, BytesOf(wide_copy));
    EXPECT_EQ(wide_copy, wide);
    EXPECT_TRUE(same.squares == added.squares);
  }
}

TEST_P(Targets, PartsGiveWhatTheWholeGivesAndOnePassWhatSeveralGive) {
  constexpr uint64_t kElems = 5 * kSumChunkElems + 77;
  std::vector<uint16_t> first = Bf16Gradient(kElems, 1);
  std::vector<uint16_t> second = Bf16Gradient(kElems, 2);
  std::vector<float> whole(kElems);
  std::vector<float> parts(kElems, 5.0F);
  std::vector<float> after_another(kElems, 7.0F);
  AddGradients action{.elems = kElems, .dtype = DType::kBFloat16, .assign = true};
  const Sources both{BytesOf(first), BytesOf(second)};
  const AddedGradients added = RunAddGradients(action, {0, kElems}, both, BytesOf(whole));
  cpu_adam::SquareSum squares;
  for (const ElemRange range : {ElemRange{4 * kSumChunkElems, kElems},
                                {0, kSumChunkElems},
                                {kSumChunkElems, 4 * kSumChunkElems}}) {
    squares.Merge(RunAddGradients(action, range, both, BytesOf(parts)).squares);
  }
  EXPECT_EQ(parts, whole);
  RunAddGradients(action, {0, kElems}, Sources{BytesOf(first)}, BytesOf(after_another));
  action.assign = false;
  const AddedGradients last =
      RunAddGradients(action, {0, kElems}, Sources{BytesOf(second)}, BytesOf(after_another));
  EXPECT_EQ(after_another, whole);
  for (uint64_t i = 0; i < kElems; ++i)
    ASSERT_EQ(whole[i], Widened(first)[i] + Widened({second[i]})[0]) << i;
  EXPECT_TRUE(squares == added.squares);
  EXPECT_TRUE(last.squares == added.squares);
  EXPECT_EQ(added.squares.ToDouble(), SquaresOf(BytesOf(whole)));
  cpu_adam::SquareSum sums =
      RunSumGradient(DType::kFloat32, {0, 2 * kSumChunkElems}, BytesOf(whole));
  sums.Merge(RunSumGradient(DType::kFloat32, {2 * kSumChunkElems, kElems}, BytesOf(whole)));
  EXPECT_TRUE(sums == added.squares);
}

TEST_P(Targets, AnElementThatIsNotFiniteIsFoundWhereverItStands) {
  constexpr uint64_t kElems = 2 * kSumChunkElems + 5;
  std::vector<uint16_t> good = Bf16Gradient(kElems, 3);
  for (const uint64_t at : {uint64_t{0}, kSumChunkElems - 1, kSumChunkElems, kElems - 1}) {
    for (const uint16_t bad : {uint16_t{0x7F80}, uint16_t{0xFF80}, uint16_t{0x7FC1}}) {
      std::vector<uint16_t> gradient = good;
      gradient[at] = bad;
      std::vector<uint16_t> copy(kElems);
      const AddedGradients copied = RunAddGradients(OneRank(DType::kBFloat16, kElems), {0, kElems},
                                                    Sources{BytesOf(gradient)}, BytesOf(copy));
      EXPECT_EQ(copied.culprit, 1U);
      std::vector<float> sum(kElems);
      const AddGradients action{.elems = kElems, .dtype = DType::kBFloat16, .assign = true};
      const Sources sources{BytesOf(good), BytesOf(gradient), BytesOf(good)};
      const AddedGradients added = RunAddGradients(action, {0, kElems}, sources, BytesOf(sum));
      EXPECT_EQ(added.culprit, 2U);
      EXPECT_FALSE(added.squares.finite());
    }
  }
}

TEST_P(Targets, ASumThatOverflowsIsFoundByItsSquares) {
  std::vector<float> largest(100, std::numeric_limits<float>::max());
  std::vector<float> sum = largest;
  const AddGradients action{.elems = 100, .dtype = DType::kFloat32};
  const AddedGradients added =
      RunAddGradients(action, {0, 100}, Sources{BytesOf(largest)}, BytesOf(sum));
  EXPECT_EQ(added.culprit, 0U) << "the contribution is finite";
  EXPECT_TRUE(std::isnan(added.squares.ToDouble()));
}

// A block of `exact` with two segments, and the memory it works on.
struct ExactBlock {
  static constexpr uint64_t kElems = 3000;

  explicit ExactBlock(DType type) : sum_dtype(type) {
    planes.resize(BlockBytes(protocol::StatePlanes(protocol::Optimizer::kAdamW,
                                                   protocol::Format::kExact, DType::kBFloat16),
                             kElems));
    weights.assign(kElems, 0x3F80);
    const uint64_t width = protocol::SizeBytes(sum_dtype);
    action.block_elems = kElems;
    action.bytes = planes.size();
    action.sum_dtype = sum_dtype;
    for (const ElemRange range : {ElemRange{0, 1001}, {1001, kElems}}) {
      action.segments.push_back(
          {.weights = {.offset_bytes = range.begin * 2},
           .accumulator_offset_bytes = range.begin * width,
           .block_elem = range.begin,
           .elems = range.end - range.begin,
           .scalars = cpu_adam::MakeStepScalars(protocol::Optimizer::kAdamW,
                                                {.lr = range.begin == 0 ? 0.1 : 0.01,
                                                 .beta1 = 0.9,
                                                 .beta2 = 0.999,
                                                 .eps = 1e-8,
                                                 .weight_decay = 0.1},
                                                /*t=*/1, /*grad_scale=*/0.5F)});
    }
  }

  void Update(ElemRange range, std::span<const std::byte> gradients) {
    RunUpdate(action, range,
              {.states = {.weights = BytesOf(weights),
                          .block = planes,
                          .optimizer = protocol::Optimizer::kAdamW,
                          .format = protocol::Format::kExact,
                          .dtype = DType::kBFloat16},
               .accumulators = gradients});
  }

  DType sum_dtype;
  std::vector<uint16_t> weights;
  std::vector<std::byte> planes;
  UpdateBlock action;
};

TEST_P(Targets, AnUpdateFromBf16GradientsHasTheBitsOfTheFloat32Sum) {
  std::vector<uint16_t> narrow = Bf16Gradient(ExactBlock::kElems, 4);
  std::vector<float> wide = Widened(narrow);
  ExactBlock from_narrow(DType::kBFloat16);
  ExactBlock from_wide(DType::kFloat32);
  for (int step = 0; step < 3; ++step) {
    from_narrow.Update({0, ExactBlock::kElems}, BytesOf(narrow));
    from_wide.Update({0, ExactBlock::kElems}, BytesOf(wide));
    EXPECT_EQ(from_narrow.weights, from_wide.weights);
    EXPECT_EQ(from_narrow.planes, from_wide.planes);
  }
  EXPECT_NE(from_narrow.weights, std::vector<uint16_t>(ExactBlock::kElems, 0x3F80));
}

TEST_P(Targets, PartsOfAnUpdateGiveTheBlock) {
  std::vector<uint16_t> gradient = Bf16Gradient(ExactBlock::kElems, 5);
  ExactBlock whole(DType::kBFloat16);
  whole.Update({0, ExactBlock::kElems}, BytesOf(gradient));
  ExactBlock parts(DType::kBFloat16);
  for (const ElemRange range :
       {ElemRange{1500, ExactBlock::kElems}, {0, 0}, {0, 999}, {999, 1500}}) {
    parts.Update(range, BytesOf(gradient));
  }
  EXPECT_EQ(parts.weights, whole.weights);
  EXPECT_EQ(parts.planes, whole.planes);
}

// A block on swap, of segments of many sizes: one spans several ranges, some fit into one.
struct SwappedBlock {
  SwappedBlock(protocol::Optimizer optimizer, protocol::Format format, uint64_t elems)
      : gradient(Bf16Gradient(elems, 6)), weights(elems, 0x3F80) {
    planes.resize(BlockBytes(protocol::StatePlanes(optimizer, format, DType::kBFloat16), elems));
    action.block_elems = elems;
    action.bytes = planes.size();
    action.identity_after = {.job = 7, .block = 8, .written_step = 9};
    uint64_t begin = 0;
    for (uint32_t param = 0; begin < elems; ++param) {
      const uint64_t left = elems - begin;
      const uint64_t size = std::min<uint64_t>(left, param % 3 == 0 ? 3 * kTileElems + 128 : 1024);
      action.segments.push_back(
          {.weights = {.offset_bytes = begin * 2},
           .accumulator_offset_bytes = begin * 2,
           .block_elem = begin,
           .elems = size,
           .scalars = cpu_adam::MakeStepScalars(
               optimizer,
               {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1},
               /*t=*/1, /*grad_scale=*/1),
           .param = param});
      cpu_adam::SetRoundingKey({.seed = 11, .parameter = param, .t = 1},
                               action.segments.back().scalars);
      begin += size;
    }
    action.sum_dtype = DType::kBFloat16;
    memory = {.states = {.weights = BytesOf(weights),
                         .block = planes,
                         .optimizer = optimizer,
                         .format = format,
                         .dtype = DType::kBFloat16},
              .accumulators = BytesOf(gradient)};
  }

  TaskDone UpdateInParts() {
    std::vector<UpdateFound> found;
    for (uint64_t begin = 0; begin < action.block_elems; begin += kPartElems) {
      found.push_back(
          RunUpdate(action, {begin, std::min(begin + kPartElems, action.block_elems)}, memory));
    }
    return JoinUpdate(found);
  }

  std::vector<uint16_t> gradient;
  std::vector<uint16_t> weights;
  std::vector<std::byte> planes;
  UpdateBlock action;
  UpdateMemory memory;
};

// The step arena holds pages of sums in any order. The borders of pages lie within segments, tiles and scales.
TEST(UpdateForSwap, SumsInPagesGiveTheBitsOfSumsInOnePiece) {
  using protocol::Format;
  constexpr uint64_t kElems = 9 * kTileElems + 5 * 128;
  constexpr uint64_t kFirstPage = 3;
  for (const Format format : {Format::kFp32, Format::kExact, Format::kBf16, Format::kInt8}) {
    for (const uint64_t page_elems : {uint64_t{4096}, 2 * kTileElems, 3 * kTileElems + 4096}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(format) << ", pages of " << page_elems);
      SwappedBlock whole(protocol::Optimizer::kAdamW, format, kElems);
      SwappedBlock paged(protocol::Optimizer::kAdamW, format, kElems);
      const uint64_t page_bytes = page_elems * 2;
      const uint64_t skipped = page_elems - 77;  // Elements of the first page before the block.
      const uint64_t pages = (skipped + kElems + page_elems - 1) / page_elems;
      std::vector<std::byte> arena(pages * page_bytes, std::byte{0xFF});
      paged.action.sum_page_bytes = page_bytes;
      for (uint64_t page = 0; page < pages; ++page) {
        paged.action.sum_frames.push_back(
            {.page = kFirstPage + page, .offset_bytes = (pages - 1 - page) * page_bytes});
      }
      for (uint64_t elem = 0; elem < kElems; ++elem) {
        const uint64_t at = (skipped + elem) * 2;
        const uint64_t frame = paged.action.sum_frames[at / page_bytes].offset_bytes;
        std::memcpy(arena.data() + frame + at % page_bytes, &paged.gradient[elem], 2);
      }
      for (UpdateSegment& segment : paged.action.segments) {
        segment.accumulator_offset_bytes += kFirstPage * page_bytes + skipped * 2;
      }
      paged.memory.accumulators = arena;
      for (int step = 0; step < 2; ++step) {
        const TaskDone done = RunUpdateForSwap(whole.action, whole.memory, /*nonce=*/10);
        const TaskDone same = RunUpdateForSwap(paged.action, paged.memory, /*nonce=*/10);
        EXPECT_EQ(same.checksum, done.checksum);
        EXPECT_EQ(paged.weights, whole.weights);
        EXPECT_EQ(paged.planes, whole.planes);
      }
      const TaskDone parts = paged.UpdateInParts();
      EXPECT_EQ(parts.count, whole.UpdateInParts().count);
      EXPECT_EQ(paged.planes, whole.planes);
    }
  }
}

TEST(UpdateForSwap, HasTheBitsOfPartsAndTheChecksumOfTheBytes) {
  using protocol::Format;
  for (const Format format : {Format::kFp32, Format::kExact, Format::kBf16, Format::kInt8}) {
    // Sizes of whole ranges, of ranges whose last one ends within a page, and of less than a page.
    for (const uint64_t elems : {2 * kTileElems, 9 * kTileElems + 5 * 128, uint64_t{128}}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(format) << " of " << elems);
      SwappedBlock warm(protocol::Optimizer::kAdamW, format, elems);
      SwappedBlock parts(protocol::Optimizer::kAdamW, format, elems);
      for (int step = 0; step < 2; ++step) {
        const TaskDone done = RunUpdateForSwap(warm.action, warm.memory, /*nonce=*/10);
        EXPECT_EQ(done.count, parts.UpdateInParts().count);
        EXPECT_EQ(warm.weights, parts.weights);
        ASSERT_EQ(warm.planes, parts.planes);
        EXPECT_EQ(done.checksum, nvme::Checksum(MakeIdentity(warm.action.identity_after, 10),
                                                std::span<const std::byte>(parts.planes)));
      }
    }
  }
}

TEST(UpdateForSwap, SumsWhatLambNeedsAsPartsDo) {
  const uint64_t elems = kPartElems + 3 * kTileElems + 640;
  SwappedBlock warm(protocol::Optimizer::kLamb, protocol::Format::kExact, elems);
  SwappedBlock parts(protocol::Optimizer::kLamb, protocol::Format::kExact, elems);
  const std::vector<std::byte> before = warm.planes;
  for (const UpdatePass pass : {UpdatePass::kNorms, UpdatePass::kWhole}) {
    warm.action.pass = parts.action.pass = pass;
    const TaskDone done = RunUpdateForSwap(warm.action, warm.memory, /*nonce=*/10);
    const TaskDone expected = parts.UpdateInParts();
    ASSERT_EQ(done.norms.size(), expected.norms.size());
    for (size_t i = 0; i < done.norms.size(); ++i) {
      EXPECT_EQ(done.norms[i].weight_squares, expected.norms[i].weight_squares);
      EXPECT_EQ(done.norms[i].update_squares, expected.norms[i].update_squares);
    }
    EXPECT_EQ(warm.weights, parts.weights);
    ASSERT_EQ(warm.planes, parts.planes);
    if (pass == UpdatePass::kNorms) {
      EXPECT_EQ(warm.planes, before);
      continue;
    }
    EXPECT_EQ(done.checksum, nvme::Checksum(MakeIdentity(warm.action.identity_after, 10),
                                            std::span<const std::byte>(parts.planes)));
  }
}

TEST(WeightsPass, WritesTheWeightsOfTheUpdateToTheirPlaceAndNothingElse) {
  using protocol::Format;
  for (const Format format : {Format::kFp32, Format::kExact, Format::kBf16, Format::kInt8}) {
    SCOPED_TRACE(::testing::Message() << static_cast<int>(format));
    constexpr uint64_t kElems = kPartElems + 3 * kTileElems + 640;
    SwappedBlock block(protocol::Optimizer::kAdamW, format, kElems);
    EXPECT_EQ(block.UpdateInParts().count, 0U);  // from zero, moments have few values
    block.weights.resize(2 * kElems, 0);
    block.memory.states.weights = BytesOf(block.weights);
    const std::vector<uint16_t> weights(block.weights.begin(), block.weights.begin() + kElems);
    const std::vector<std::byte> planes = block.planes;

    block.action.pass = UpdatePass::kWeights;
    for (UpdateSegment& segment : block.action.segments) {
      segment.weights.new_offset_bytes = segment.weights.offset_bytes + kElems * 2;
    }
    block.UpdateInParts();
    EXPECT_EQ(block.planes, planes);
    EXPECT_TRUE(std::equal(weights.begin(), weights.end(), block.weights.begin()));
    const std::vector<uint16_t> computed(block.weights.begin() + kElems, block.weights.end());

    block.action.pass = UpdatePass::kWhole;
    for (UpdateSegment& segment : block.action.segments) segment.weights.new_offset_bytes = {};
    block.UpdateInParts();
    EXPECT_TRUE(std::equal(computed.begin(), computed.end(), block.weights.begin()));
    EXPECT_NE(computed, weights);
  }
}

// The weights of a swapped block, moved from the arena to the plane behind its states.
void MoveWeightsIntoBlock(SwappedBlock& block) {
  const std::vector<std::byte> states = block.planes;
  const uint64_t bytes = block.weights.size() * sizeof(uint16_t);
  block.planes.resize(states.size() + protocol::RoundUp(bytes, protocol::kPageBytes));
  std::memcpy(block.planes.data() + states.size(), block.weights.data(), bytes);
  block.weights.clear();
  block.action.bytes = block.planes.size();
  block.memory.states.block = block.planes;
  block.memory.states.weights = {};
  for (UpdateSegment& segment : block.action.segments) segment.weights = {.in_block = true};
}

TEST(WeightsOnSwap, AnUpdateInTheBlockHasTheBitsOfOneInTheArena) {
  using protocol::Format;
  for (const Format format : {Format::kFp32, Format::kExact, Format::kBf16, Format::kInt8}) {
    for (const uint64_t elems : {2 * kTileElems, 9 * kTileElems + 5 * 128, uint64_t{128}}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(format) << " of " << elems);
      SwappedBlock in_arena(protocol::Optimizer::kAdamW, format, elems);
      SwappedBlock in_block(protocol::Optimizer::kAdamW, format, elems);
      MoveWeightsIntoBlock(in_block);
      const size_t states_bytes = in_arena.planes.size();
      for (int step = 0; step < 2; ++step) {
        EXPECT_EQ(RunUpdateForSwap(in_arena.action, in_arena.memory, /*nonce=*/10).weights_digests,
                  nullptr);
        const TaskDone done = RunUpdateForSwap(in_block.action, in_block.memory, /*nonce=*/10);
        const std::span<const std::byte> planes(in_block.planes);
        EXPECT_TRUE(std::ranges::equal(planes.first(states_bytes), in_arena.planes));
        EXPECT_EQ(std::memcmp(planes.data() + states_bytes, in_arena.weights.data(), elems * 2), 0);
        EXPECT_EQ(done.checksum,
                  nvme::Checksum(MakeIdentity(in_block.action.identity_after, 10), planes));
        ASSERT_NE(done.weights_digests, nullptr);
        nvme::PageDigests expected(planes.subspan(states_bytes));
        expected.Add(0, expected.pages());
        EXPECT_TRUE(std::ranges::equal(*done.weights_digests, expected.digests()));
        EXPECT_EQ(*DigestBlock(in_block.action.identity_after, 10, elems, in_block.memory.states)
                       .weights_digests,
                  *done.weights_digests);
      }
    }
  }
}

TEST(WeightsOnSwap, ALoadCopiesWhatIsVerifiedAndNothingElse) {
  constexpr uint64_t kPages = 5;
  std::vector<std::byte> plane(kPages * protocol::kPageBytes);
  for (size_t i = 0; i < plane.size(); ++i) plane[i] = static_cast<std::byte>(i * 7 + i / 4096);
  nvme::PageDigests digests(plane);
  digests.Add(0, kPages);
  LoadWeights load{.slot = {.path = 1, .offset_bytes = 8 << 20, .size_bytes = 1 << 20},
                   .slot_offset_bytes = 81920,
                   .bytes = 2 * protocol::kPageBytes,
                   .digests = std::make_shared<const std::vector<uint64_t>>(
                       digests.digests().begin(), digests.digests().end()),
                   .first_page = 2,
                   .copies = {{.from_bytes = 100, .to_bytes = 0, .size_bytes = 3000},
                              {.from_bytes = 3228, .to_bytes = 3000, .size_bytes = 4000}}};
  std::vector<std::byte> read(plane.begin() + 2 * 4096, plane.begin() + 4 * 4096);
  std::vector<std::byte> weights(8192, std::byte{0xEE});
  ASSERT_TRUE(RunLoadWeights(load, "/swap", read, weights).ok());
  EXPECT_EQ(std::memcmp(weights.data(), read.data() + 100, 3000), 0);
  EXPECT_EQ(std::memcmp(weights.data() + 3000, read.data() + 3228, 4000), 0);
  EXPECT_TRUE(std::all_of(weights.begin() + 7000, weights.end(),
                          [](std::byte byte) { return byte == std::byte{0xEE}; }));
  // One wrong bit in either page gives an error with path and offset, and leaves the arena unchanged.
  for (const size_t bit : {size_t{5}, size_t{4096 * 8 + 77}}) {
    std::vector<std::byte> wrong = read;
    wrong[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    std::vector<std::byte> untouched(8192, std::byte{0xEE});
    const absl::Status status = RunLoadWeights(load, "/swap", wrong, untouched);
    EXPECT_EQ(protocol::IdOf(status), protocol::ErrorId::kCorrupt);
    const uint64_t page = bit / 8 / 4096;
    EXPECT_NE(
        std::string(status.message())
            .find("swap path 1 (/swap): the page at offset " + std::to_string(81920 + page * 4096)),
        std::string::npos)
        << status;
    EXPECT_EQ(untouched, std::vector<std::byte>(8192, std::byte{0xEE}));
  }
  // Two pages of the same plane are exchanged.
  std::swap_ranges(read.begin(), read.begin() + 4096, read.begin() + 4096);
  EXPECT_FALSE(RunLoadWeights(load, "/swap", read, weights).ok());
}

// The planes fill the block to its last page, so that a read behind a plane is not hidden by slack.
TEST(DecodeStates, ReadsTheLastElementsOfAFullBlockFromAnyElementOn) {
  using protocol::Format;
  constexpr uint64_t kElems = 4096 / sizeof(float) * protocol::kScaleElems;
  for (const Format format : {Format::kFp32, Format::kExact, Format::kBf16, Format::kInt8}) {
    SwappedBlock block(protocol::Optimizer::kAdamW, format, kElems);
    RunUpdateForSwap(block.action, block.memory, /*nonce=*/10);
    for (uint32_t state = 0; state < 3; ++state) {
      std::vector<float> all(kElems);
      RunDecodeState({.block_elems = kElems, .state = state, .elems = kElems}, block.memory.states,
                     BytesOf(all));
      for (const uint64_t count : {uint64_t{1}, uint64_t{10}, uint64_t{130}}) {
        std::vector<float> last(count);
        const uint64_t first = kElems - count;
        RunDecodeState({.block_elems = kElems,
                        .state = state,
                        .block_elem = first,
                        .elems = count,
                        .weights = {.offset_bytes = first * 2}},
                       block.memory.states, BytesOf(last));
        EXPECT_TRUE(std::equal(last.begin(), last.end(), all.end() - static_cast<int64_t>(count)))
            << static_cast<int>(format) << " state " << state << ", the last " << count;
      }
    }
  }
}

SetState SetAll(const std::vector<float>& values, uint64_t block_elems, uint32_t state) {
  return {.in_block = SetState::InBlock{.place = {}, .identity = {}, .states_elems = block_elems},
          .state = state,
          .elems = values.size()};
}

TEST(SetStates, ReplaceOneStateAndLeaveTheOthersAsTheyAre) {
  using protocol::Format;
  constexpr uint64_t kElems = 5 * kTileElems + 77;
  for (const Format format : {Format::kFp32, Format::kExact, Format::kBf16, Format::kInt8}) {
    SwappedBlock block(protocol::Optimizer::kAdamW, format, kElems);
    RunUpdateForSwap(block.action, block.memory, /*nonce=*/10);
    const auto read = [&](uint32_t state) {
      std::vector<float> values(kElems);
      RunDecodeState({.block_elems = kElems, .state = state, .elems = kElems}, block.memory.states,
                     BytesOf(values));
      return values;
    };
    for (uint32_t state = 0; state < 3; ++state) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(format) << " state " << state);
      const std::vector<std::vector<float>> before = {read(0), read(1), read(2)};
      std::vector<float> values = before[state];
      for (float& value : values) value = 2 * value;  // exact in every format but int8
      ASSERT_TRUE(RunSetState(SetAll(values, kElems, state), block.memory.states, BytesOf(values)));
      for (uint32_t other = 0; other < 3; ++other) {
        if (other != state) {
          EXPECT_EQ(read(other), before[other]);
        } else if (state == 0 || format != Format::kInt8) {
          EXPECT_EQ(read(state), values);
        } else {
          EXPECT_NE(read(state), before[state]);
        }
      }
    }
  }
}

TEST(SetStates, OfAValueThatCannotBeChangeNothing) {
  using protocol::Format;
  constexpr uint64_t kElems = 2 * kTileElems;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  struct Case {
    Format format;
    uint32_t state;
    float value;
  };
  for (const Case& one : {Case{Format::kExact, 1, kInfinity}, Case{Format::kExact, 2, -1e-20F},
                          Case{Format::kInt8, 1, std::nanf("")}, Case{Format::kInt8, 2, -1.0F},
                          Case{Format::kBf16, 1, std::numeric_limits<float>::max()}}) {
    SwappedBlock block(protocol::Optimizer::kAdamW, one.format, kElems);
    const std::vector<std::byte> planes(block.planes.begin(), block.planes.end());
    std::vector<float> values(kElems, 0.25F);
    values.back() = one.value;
    EXPECT_FALSE(
        RunSetState(SetAll(values, kElems, one.state), block.memory.states, BytesOf(values)));
    EXPECT_TRUE(std::ranges::equal(block.planes, planes));
    values.back() = -0.0F;
    EXPECT_TRUE(
        RunSetState(SetAll(values, kElems, one.state), block.memory.states, BytesOf(values)));
    EXPECT_FALSE(std::ranges::equal(block.planes, planes));
  }
}

TEST(ExtraStates, ComeBackToOtherPlacesForAsManyRanksAsThereAre) {
  std::vector<std::byte> step(100);
  for (size_t i = 0; i < step.size(); ++i) step[i] = static_cast<std::byte>(i);
  const std::vector<StatePart> parts = {{.offset_bytes = 10, .bytes = 5},
                                        {.offset_bytes = 90, .bytes = 10},
                                        {.offset_bytes = 50, .bytes = 0},
                                        {.offset_bytes = 0, .bytes = 1}};
  const ExtraStates kept = RunKeepExtraStates(parts, step);
  ASSERT_EQ(kept->size(), parts.size());
  std::vector<std::byte> other(64, std::byte{0xEE});
  std::vector<std::byte> wanted = other;
  for (size_t i = 0; i < 5; ++i) wanted[40 + i] = static_cast<std::byte>(10 + i);
  for (size_t i = 0; i < 10; ++i) wanted[54 + i] = static_cast<std::byte>(90 + i);
  RunRestoreExtraStates({.extra_states = kept, .offsets_bytes = {40, 54, 64}}, other);
  EXPECT_EQ(other, wanted);
}

TEST(Identity, IsAnotherForEachPartOfABlockAndEveryStep) {
  std::set<nvme::Identity> seen;
  for (const JobId job : {1U, 2U}) {
    for (const BlockPart part : {BlockPart::kStates, BlockPart::kWeights}) {
      for (const uint64_t block : {0U, 1U, 255U, 256U}) {
        for (const uint64_t step : {0U, 1U}) {
          for (const uint64_t nonce : {3U, 4U}) {
            seen.insert(MakeIdentity(
                {.job = job, .part = part, .block = block, .written_step = step}, nonce));
          }
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), 2U * 2 * 4 * 2 * 2);
}

INSTANTIATE_TEST_SUITE_P(BlockTasks, Targets, ::testing::ValuesIn(cpu_adam::SupportedTargets()),
                         [](const auto& target) { return target.param; });

}  // namespace
}  // namespace forebay::daemon
