// SPDX-License-Identifier: Apache-2.0
// Goal    An update that is killed at any point, several times, and continues from its undo log has the same bits as an update
//         without kills, and counts each overflow once.
// Method  A process updates a block in shared memory, in DRAM or as it is staged. It ends in the middle: by SIGKILL from one of
//         its threads, or at a store to some page. Then the log is undone and another process continues, until one completes
//         the update. The test covers formats and optimizers with every kind of plane, with weights in the arena and behind the
//         states. A further test undoes the log between two stores.

#include "daemon/exec/recovery/undo_log.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu_adam/step_scalars.h"
#include "daemon/exec/block_tasks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/units.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::undo_log_test {
namespace {

using protocol::DType;
using protocol::Format;
using protocol::Optimizer;
using testing::HasError;

constexpr uint64_t kStep = 7;
constexpr uint64_t kBlock = 1;
constexpr uint64_t kWorkers = 2;
constexpr uint64_t kElems = kPartElems + 9 * kTileElems + 640;

class SharedBytes {
 public:
  explicit SharedBytes(uint64_t bytes)
      : bytes_(static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                              MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
               bytes) {}
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;
  ~SharedBytes() { ::munmap(bytes_.data(), bytes_.size()); }
  std::span<std::byte> all() const { return bytes_; }
  std::vector<std::byte> Copy() const { return {bytes_.begin(), bytes_.end()}; }

 private:
  std::span<std::byte> bytes_;
};

struct UndoCase {
  std::string name;
  Optimizer optimizer;
  Format format;
  DType dtype = DType::kBFloat16;
  bool staged = false;
  bool weights_in_block = false;
};

// A block with sums, states and weights as they are after some steps.
class Killed : public ::testing::TestWithParam<UndoCase> {
 protected:
  Killed()
      : planes_bytes_(BlockBytes(
            protocol::StatePlanes(with().optimizer, with().format, with().dtype), kElems)),
        weights_bytes_(protocol::RoundUp(kElems * width(), protocol::kPageBytes)),
        block_bytes_(planes_bytes_ + (with().weights_in_block ? weights_bytes_ : 0)),
        // The arena has another block in front of the tested block.
        arena_(2 * block_bytes_),
        weights_(weights_bytes_),
        sums_(kElems * width()),
        undo_(UndoBytes(Spec(), kBlock + 1, kElems, kWorkers)) {
    Fill(sums_.all(), 1e-3F);
    Fill(with().weights_in_block ? block().subspan(planes_bytes_) : weights_.all(), 0.5F);
    action_.block_elems = kElems;
    action_.bytes = block_bytes_;
    action_.identity_after = {.job = 3, .block = kBlock, .written_step = kStep};
    action_.sum_dtype = with().dtype;
    action_.is_recorded = true;
    for (uint64_t begin = 0, param = 0; begin < kElems; ++param) {
      const uint64_t size = std::min<uint64_t>(kElems - begin, param % 3 == 0   ? 70'016
                                                               : param % 3 == 1 ? 128
                                                                                : 1024);
      action_.segments.push_back(
          {.weights = {.in_block = with().weights_in_block, .offset_bytes = begin * width()},
           .accumulator_offset_bytes = begin * width(),
           .block_elem = begin,
           .elems = size,
           .scalars = cpu_adam::MakeStepScalars(
               with().optimizer,
               {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1},
               /*t=*/1, /*grad_scale=*/1),
           .param = static_cast<uint32_t>(param),
           .trust = with().optimizer == Optimizer::kLamb ? 0.5F : 1.0F});
      cpu_adam::SetRoundingKey({.seed = 11, .parameter = param, .t = 1},
                               action_.segments.back().scalars);
      begin += size;
    }
    // Runs a step without kills first, so that the moments are not zero.
    Run(action_, nullptr);
    before_ = Bytes();
    Run(action_, nullptr);
    after_ = Bytes();
  }

  static const UndoCase& with() { return GetParam(); }
  static uint64_t width() { return protocol::SizeBytes(with().dtype); }
  static protocol::LayoutSpec Spec() {
    protocol::LayoutSpec spec;
    spec.optimizer = with().optimizer;
    spec.format = with().format;
    spec.dtype = with().dtype;
    return spec;
  }
  std::span<std::byte> block() const { return arena_.all().subspan(block_bytes_); }
  static void Fill(std::span<std::byte> bytes, float scale) {
    std::mt19937 random(5);
    const auto one = [&] {
      return (static_cast<float>(random()) / static_cast<float>(random.max()) - 0.5F) * scale;
    };
    if (with().dtype == DType::kFloat32) {
      for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
        const float value = one();
        std::memcpy(bytes.data() + i, &value, 4);
      }
      return;
    }
    for (size_t i = 0; i + 2 <= bytes.size(); i += 2) {
      const float value = one();
      std::memcpy(bytes.data() + i, reinterpret_cast<const std::byte*>(&value) + 2, 2);
    }
  }
  struct All {
    std::vector<std::byte> arena;
    std::vector<std::byte> weights;
    bool operator==(const All&) const = default;
  };
  All Bytes() const { return {arena_.Copy(), weights_.Copy()}; }
  void Set(const All& to) {
    std::ranges::copy(to.arena, arena_.all().begin());
    std::ranges::copy(to.weights, weights_.all().begin());
  }
  UpdateMemory Memory(UndoLog* undo) const {
    return {.states = {.weights = weights_.all(),
                       .block = block(),
                       .optimizer = with().optimizer,
                       .format = with().format,
                       .dtype = with().dtype},
            .accumulators = sums_.all(),
            .undo = undo,
            .block_arena = with().staged ? UndoneArena::kStaging : UndoneArena::kStates,
            .block_offset_bytes = block_bytes_};
  }
  UndoLog Log() const { return {undo_.all(), kBlock + 1, kElems, kWorkers, UndoAreaBytes(Spec())}; }
  absl::Status Undo() const {
    return Log().Undo(kStep, {.states = with().staged ? std::span<std::byte>() : arena_.all(),
                              .weights = weights_.all(),
                              .staging = with().staged ? arena_.all() : std::span<std::byte>()});
  }
  TaskDone Run(const UpdateBlock& action, UndoLog* undo) const {
    const UpdateMemory memory = Memory(undo);
    if (with().staged) return RunUpdateForSwap(action, memory, /*nonce=*/10);
    std::vector<UpdateFound> found(PartsOf(kElems));
    std::vector<std::thread> workers;
    for (uint64_t part = 0; part < found.size(); ++part) {
      workers.emplace_back([&, part] {
        const uint64_t begin = part * kPartElems;
        found[part] = RunUpdate(action, {begin, std::min(begin + kPartElems, kElems)}, memory);
      });
    }
    for (std::thread& worker : workers) worker.join();
    return JoinUpdate(found);
  }
  // Returns the number of completed elements of the first part. The log stores it after the saved elements.
  uint64_t Done() const {
    const uint64_t index = kBlock * PartsOf(kElems);
    const std::byte* const at =
        undo_.all().data() + kWorkers * UndoAreaBytes(Spec()) + index * kUndoPartBytes;
    return *reinterpret_cast<const volatile uint64_t*>(at) >> 1 & 0xF'FFFF;
  }
  // Runs the update in a child process. One of its threads kills the child after `done` elements; if `page` is given, the child
  // ends at its first store to that page instead. Returns true if the child completed the update.
  bool RunAndKill(uint64_t done, std::byte* page = nullptr) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (page != nullptr) {
        ::signal(SIGSEGV, SIG_DFL);
        ::mprotect(page, protocol::kPageBytes, PROT_READ);
      } else {
        std::thread([this, done] {
          while (Done() < done) continue;
          ::kill(::getpid(), SIGKILL);
        }).detach();
      }
      UndoLog log = Log();
      Run(action_, &log);
      ::_exit(0);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status);
  }
  std::byte* AnyPage(std::mt19937& random) const {
    const std::span<std::byte> memory =
        random() % 4 == 0 && !with().weights_in_block ? weights_.all() : block();
    return memory.data() + random() % (memory.size() / protocol::kPageBytes) * protocol::kPageBytes;
  }

  uint64_t planes_bytes_;
  uint64_t weights_bytes_;
  uint64_t block_bytes_;
  SharedBytes arena_;
  SharedBytes weights_;
  SharedBytes sums_;
  SharedBytes undo_;
  UpdateBlock action_;
  All before_;
  All after_;
};

TEST_P(Killed, AnUpdateGoesOnWithEveryBit) {
  std::mt19937 random(17);
  const TaskDone expected = [&] {
    Set(before_);
    return Run(action_, nullptr);
  }();
  int in_middle = 0;
  const int rounds = testing::kSanitized ? 4 : 25;
  for (int round = 0; round < rounds; ++round) {
    Set(before_);
    std::ranges::fill(undo_.all(), std::byte{0});
    bool ended = false;
    for (int kill = 0; !ended; ++kill) {
      const uint64_t done = random() % (kPartElems + kPartElems / 4);
      ended = RunAndKill(done, kill % 3 < 2 ? AnyPage(random) : nullptr);
      if (!ended) ++in_middle;
      ASSERT_OK(Undo());
    }
    UndoLog log = Log();
    // The child has completed the update, so that this run changes no bytes.
    const TaskDone done = Run(action_, &log);
    EXPECT_EQ(done.count, expected.count);
    EXPECT_EQ(done.checksum, expected.checksum);
    ASSERT_TRUE(Bytes() == after_) << "round " << round;
  }
  EXPECT_GT(in_middle, rounds / 2);
}

// Changes bytes of elements that Begin() has saved. Undo() restores the bytes, unless SetDone() was called for the elements.
TEST_P(Killed, WhatIsInHandIsUndone) {
  constexpr uint64_t kFirst = 256;
  const std::array<UndoPlane, 2> planes = {
      UndoPlane{.arena = UndoneArena::kWeights,
                .offset_bytes = 512,
                .group_bytes = 2 * cpu_adam::kSavedElems,
                .elem_bytes = 2},
      UndoPlane{.arena = with().staged ? UndoneArena::kStaging : UndoneArena::kStates,
                .offset_bytes = block_bytes_ + 64,
                .group_bytes = cpu_adam::kSavedElems}};
  for (const bool is_done : {false, true}) {
    Set(before_);
    std::ranges::fill(undo_.all(), std::byte{0});
    UndoLog log = Log();
    const auto part = std::make_unique<UndoLog::Part>(log, kBlock, 0, kStep);
    part->SetDone(kFirst, /*overflows=*/3);
    const cpu_adam::SavedElems saved = part->Begin(kFirst, 200, planes);
    ASSERT_OK(Undo());
    EXPECT_TRUE(Bytes() == before_) << "nothing was in hand";
    (void)part->Begin(kFirst, 200, planes);
    // The second group of 128 elements has only 72 elements. Its slot follows the slot of the first group.
    const uint64_t slot_bytes = 64 + 256 + 128;
    std::byte* const slot = saved.slots + slot_bytes;
    const uint64_t overflows = 5;
    std::memcpy(slot, &overflows, sizeof(overflows));
    const std::span<std::byte> of_weights = weights_.all().subspan(512 + 256, 144);
    const std::span<std::byte> of_block = block().subspan(64 + 128, 128);
    std::ranges::copy(of_weights, slot + 64);
    std::ranges::copy(of_block, slot + 64 + 256);
    saved.done->store(saved.at_first + 2 * cpu_adam::kSavedElems);
    std::ranges::fill(of_weights, std::byte{9});
    std::ranges::fill(of_block, std::byte{9});
    if (is_done) part->SetDone(kFirst + 200, /*overflows=*/6);
    ASSERT_OK(Undo());
    EXPECT_EQ(Bytes() == before_, !is_done);
    EXPECT_TRUE(Log().HasBegun(kBlock, kStep));
    EXPECT_FALSE(Log().HasBegun(kBlock, kStep + 1));
    EXPECT_EQ(part->done(), kFirst + (is_done ? 200 : cpu_adam::kSavedElems));
    EXPECT_EQ(part->overflows(), is_done ? 6U : overflows);
    // Progress of this step does not count for another step.
    UndoLog next = Log();
    const UndoLog::Part other(next, kBlock, 0, kStep + 1);
    EXPECT_EQ(other.done(), 0U);
    EXPECT_EQ(other.overflows(), 0U);
  }
}

TEST_P(Killed, AnArenaThatIsNotThereIsSaid) {
  UndoLog log = Log();
  UndoLog::Part part(log, kBlock, 0, kStep);
  const UndoPlane plane{.arena = UndoneArena::kWeights, .group_bytes = 256, .elem_bytes = 2};
  const cpu_adam::SavedElems saved = part.Begin(0, 128, {&plane, 1});
  saved.done->store(saved.at_first);
  EXPECT_OK(log.Undo(kStep + 1, {}));
  (void)part.Begin(0, 128, {&plane, 1});
  EXPECT_THAT(log.Undo(kStep, {}), HasError(protocol::ErrorId::kCorrupt));
}

INSTANTIATE_TEST_SUITE_P(
    Blocks, Killed,
    ::testing::Values(
        UndoCase{"exact", Optimizer::kAdamW, Format::kExact},
        UndoCase{"bf16", Optimizer::kAdamW, Format::kBf16},
        UndoCase{"int8", Optimizer::kAdamW, Format::kInt8},
        UndoCase{"float32_largest", Optimizer::kAdamAmsgrad, Format::kFp32, DType::kFloat32},
        UndoCase{"masters_largest", Optimizer::kAdamAmsgrad, Format::kFp32},
        UndoCase{"int8_largest", Optimizer::kAdamWAmsgrad, Format::kInt8},
        UndoCase{"lion", Optimizer::kLion, Format::kExact},
        UndoCase{"lamb", Optimizer::kLamb, Format::kExact},
        UndoCase{"lamb_masters", Optimizer::kLamb, Format::kFp32},
        UndoCase{"lamb_int8_staged", Optimizer::kLamb, Format::kInt8, DType::kBFloat16, true},
        UndoCase{"exact_staged", Optimizer::kAdamW, Format::kExact, DType::kBFloat16, true},
        UndoCase{"int8_staged", Optimizer::kAdamW, Format::kInt8, DType::kBFloat16, true},
        UndoCase{"with_weights", Optimizer::kAdamW, Format::kExact, DType::kBFloat16, true, true}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace forebay::daemon::undo_log_test
