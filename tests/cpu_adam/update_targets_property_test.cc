// SPDX-License-Identifier: Apache-2.0
// Goal    Every instruction set gives the bits of the scalar definition for every optimizer and format, at every size, tail and
//         misalignment, and writes nothing else. An update saves the elements that it is about to change. The weights pass
//         gives the weights of the update, and only reads the state.
// Method  Run two steps on each target that this processor has and on "scalar", on the same seeded data with denormals and
//         overflows; compare all planes and the count of bad masters bit by bit. At the end the slots hold the last two pieces
//         as they were before the update. The weights pass runs before each update, on copies of the planes that are mapped
//         read-only, each up to the end of a page behind which nothing is mapped.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "cpu_adam/internal/kernel_table.h"
#include "cpu_adam/update_kernel.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/cpu_adam/optimizers.h"
#include "tests/cpu_adam/planes.h"
#include "tests/cpu_adam/state_arrays.h"

namespace forebay::cpu_adam {
namespace {

using ::forebay::testing::AdamData;
using ::forebay::testing::GuardedArray;
using ::forebay::testing::kAllOptimizers;
using ::forebay::testing::KernelSizes;
using ::forebay::testing::kGradTypes;
using ::forebay::testing::NameOf;
using ::forebay::testing::StateArrays;
using ::forebay::testing::TargetGuard;
using protocol::HyperParams;
using protocol::kStateFormats;

constexpr uint32_t kSeed = 20251121;

struct Case {
  Optimizer optimizer;
  StateFormat format;
  size_t n;
  size_t offset;  // elements
  DType grad;
};

std::ostream& operator<<(std::ostream& out, const Case& run) {
  return out << NameOf(run.optimizer) << ", format " << ::forebay::testing::NameOf(run.format)
             << ", n " << run.n << ", offset " << run.offset << ", gradient type "
             << static_cast<int>(run.grad);
}

// LAMB's second pass over a parameter needs norms from the first.
bool HasWeightsPass(Optimizer optimizer) { return protocol::Info(optimizer).passes == 1; }

StepScalars ScalarsOf(Optimizer optimizer, uint64_t t) {
  const HyperParams hyper = {.lr = 3e-4,
                             .beta1 = 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = 0.1,
                             .momentum = 0.9,
                             .dampening = 0.1,
                             .lr_decay = 1e-2,
                             .initial_accumulator_value = 0.1};
  StepScalars scalars = MakeStepScalars(optimizer, hyper, t, t == 1 ? 1.0f : 0.37f);
  if (t == 2) SetGradientBounds(-0.01f, 0.02f, scalars);
  return scalars;
}

// Copies of planes that cannot be written. Each copy ends at a page that cannot be read.
class ReadOnlyPlanes {
 public:
  ReadOnlyPlanes() = default;
  ReadOnlyPlanes(const ReadOnlyPlanes&) = delete;
  ReadOnlyPlanes& operator=(const ReadOnlyPlanes&) = delete;
  ~ReadOnlyPlanes() {
    for (const std::span<std::byte> mapped : mapped_) ::munmap(mapped.data(), mapped.size());
  }

  template <typename T>
  T* Copy(const T* plane, size_t n, size_t width) {
    const size_t used = protocol::RoundUp(n * width, protocol::kPageBytes);
    auto* const begin =
        static_cast<std::byte*>(::mmap(nullptr, used + protocol::kPageBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(begin, MAP_FAILED);
    mapped_.emplace_back(begin, used + protocol::kPageBytes);
    std::byte* const copy = begin + used - n * width;
    if (n > 0) std::memcpy(copy, plane, n * width);
    EXPECT_TRUE(used == 0 || ::mprotect(begin, used, PROT_READ) == 0);
    EXPECT_EQ(::mprotect(begin + used, protocol::kPageBytes, PROT_NONE), 0);
    return reinterpret_cast<T*>(copy);
  }

 private:
  std::vector<std::span<std::byte>> mapped_;
};

struct GuardedGrad {
  GuardedGrad(const AdamData& data, const Case& run)
      : wide(run.n, run.offset), narrow(run.n, run.offset), type(run.grad) {
    wide.Assign(data.grad);
    narrow.Assign(type == DType::kFloat16 ? data.fp16 : data.bf16);
  }
  Gradient get() {
    if (type == DType::kFloat32) return {wide.data(), type};
    return {narrow.data(), type};
  }
  GuardedArray<float> wide;
  GuardedArray<uint16_t> narrow;
  DType type;
};

// Returns the weights that UpdateWeights computes from read-only copies of the planes.
std::vector<std::byte> WeightsPass(const Case& run, const StepScalars& scalars, Gradient grad,
                                   const StatePlanes& state) {
  const bool has_codes = run.format.format == Format::kInt8;
  const size_t groups = (run.n + kScaleElems - 1) / kScaleElems;
  const size_t moments = protocol::kMomentShapes[static_cast<size_t>(run.optimizer) - 1].count;
  const size_t width = protocol::SizeBytes(run.format.weights);
  ReadOnlyPlanes memory;
  StatePlanes planes{.weights = memory.Copy(static_cast<std::byte*>(state.weights), run.n, width),
                     .first_elem = state.first_elem};
  if (run.format.format != Format::kFp32) {
    planes.remainder = memory.Copy(state.remainder, run.n, sizeof(int16_t));
  } else if (run.format.weights != DType::kFloat32) {
    planes.master = memory.Copy(state.master, run.n, sizeof(float));
  }
  for (size_t m = 0; m < moments; ++m) {
    planes.moments[m] =
        memory.Copy(static_cast<std::byte*>(state.moments[m]),
                    has_codes ? groups * kScaleElems : run.n, internal::MomentWidth(run.format));
    if (has_codes) planes.scales[m] = memory.Copy(state.scales[m], groups, sizeof(float));
  }
  const auto* const gradient = static_cast<const std::byte*>(grad.data);
  grad.data = memory.Copy(gradient, run.n, protocol::SizeBytes(grad.type));
  GuardedArray<float> wide(run.n, run.offset);
  GuardedArray<uint16_t> narrow(run.n, run.offset);
  planes.new_weights = narrow.data();
  if (run.format.weights == DType::kFloat32) planes.new_weights = wide.data();
  UpdateWeights(run.optimizer, run.format, scalars, run.n, grad, planes);
  EXPECT_TRUE(wide.GuardsIntact() && narrow.GuardsIntact());
  const auto* const written = static_cast<const std::byte*>(planes.new_weights);
  return {written, written + run.n * width};
}

// State after the last step, and the number of bad masters in all steps.
struct Result {
  Result(size_t n, size_t offset) : state(n, offset) {}

  void ExpectEquals(Result& wanted) {
    state.ExpectEquals(wanted.state);
    EXPECT_EQ(bad, wanted.bad);
  }

  StateArrays state;
  uint64_t bad = 0;
};

std::unique_ptr<Result> RunSteps(const AdamData& data, const Case& run, uint64_t steps,
                                 const SavedElems* saved = nullptr) {
  GuardedGrad grad(data, run);
  auto result = std::make_unique<Result>(run.n, run.offset);
  result->state.Assign(data);
  for (uint64_t t = 1; t <= steps; ++t) {
    const StepScalars scalars = ScalarsOf(run.optimizer, t);
    const StatePlanes planes = result->state.Planes(run.format);
    std::vector<std::byte> weights;
    if (HasWeightsPass(run.optimizer)) weights = WeightsPass(run, scalars, grad.get(), planes);
    result->bad += Update(run.optimizer, run.format, scalars, run.n, grad.get(), planes, saved);
    const auto* const written = static_cast<const std::byte*>(planes.weights);
    EXPECT_TRUE(std::equal(weights.begin(), weights.end(), written))
        << "weights pass of step " << t;
  }
  result->state.ExpectGuards();
  return result;
}

// The two slots in which an update saves elements, and the options of the update.
struct Slots {
  explicit Slots(const Case& run)
      : slot_bytes(SavedSlotBytes(run.optimizer, run.format)), memory(2 * slot_bytes / 64) {}

  static constexpr uint64_t kAtFirst = 1001;
  SavedElems saved() {
    return {.slots = bytes(), .done = &done, .at_first = kAtFirst, .non_finite = 7};
  }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(memory.data()); }

  // Checks that the saved piece that begins with element i has the bytes of `before`.
  void ExpectPiece(const Case& run, size_t i, const StatePlanes& before) {
    const size_t count = std::min(kSavedElems, run.n - i);
    const std::byte* at = bytes() + i / kSavedElems % 2 * slot_bytes;
    uint64_t non_finite = 0;
    std::memcpy(&non_finite, at, sizeof(non_finite));
    EXPECT_TRUE(non_finite >= 7 && non_finite <= 7 + i);
    at += 64;
    const auto expect = [&](const void* plane, size_t first, size_t elems, size_t width) {
      const auto* const from = static_cast<const std::byte*>(plane) + first * width;
      EXPECT_EQ(std::memcmp(at, from, elems * width), 0) << "piece " << i;
      at += (kSavedElems * width + 63) / 64 * 64;
    };
    const bool has_codes = run.format.format == Format::kInt8;
    const size_t width = has_codes ? 1 : run.format.format == Format::kBf16 ? 2 : 4;
    const size_t moments = protocol::kMomentShapes[static_cast<size_t>(run.optimizer) - 1].count;
    expect(before.weights, i, count, run.format.weights == DType::kFloat32 ? 4 : 2);
    if (run.format.format != Format::kFp32) expect(before.remainder, i, count, 2);
    for (size_t m = 0; m < moments; ++m) {
      expect(before.moments[m], i, has_codes ? kSavedElems : count, width);
    }
    for (size_t m = 0; has_codes && m < moments; ++m) {
      EXPECT_EQ(std::memcmp(at, before.scales[m] + i / kScaleElems, sizeof(float)), 0);
      at += 64;
    }
    const bool has_master =
        run.format.format == Format::kFp32 && run.format.weights != DType::kFloat32;
    if (has_master) expect(before.master, i, count, 4);
    EXPECT_EQ(at, bytes() + (i / kSavedElems % 2 + 1) * slot_bytes);
  }

  size_t slot_bytes;
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> memory;
  std::atomic<uint64_t> done = 0;
};

using TargetAndRule = std::tuple<std::string, Optimizer>;

class UpdateTargets : public ::testing::TestWithParam<TargetAndRule> {
 protected:
  void CompareWithScalar(const Case& run) {
    SCOPED_TRACE(::testing::Message() << target() << ", " << run << ", seed " << kSeed);
    const AdamData data(std::max<size_t>(run.n, 1), kSeed + static_cast<uint32_t>(run.n));
    guard_.Force(target());
    Slots slots(run);
    const SavedElems saved = slots.saved();
    const std::unique_ptr<Result> result = RunSteps(data, run, 2, &saved);
    if (run.n > 0) {
      const std::unique_ptr<Result> before = RunSteps(data, run, 1);
      const size_t last = (run.n - 1) / kSavedElems * kSavedElems;
      EXPECT_EQ(slots.done, Slots::kAtFirst + 2 * last);
      slots.ExpectPiece(run, last, before->state.Planes(run.format));
      if (last > 0) slots.ExpectPiece(run, last - kSavedElems, before->state.Planes(run.format));
    }
    guard_.Force("scalar");
    result->ExpectEquals(*RunSteps(data, run, 2));
  }

  void CompareEach(size_t n, size_t offset) {
    for (const StateFormat format : kStateFormats) {
      for (const DType grad : kGradTypes) {
        CompareWithScalar({optimizer(), format, n, offset, grad});
        if (HasFailure()) return;
      }
    }
  }

  const std::string& target() const { return std::get<0>(GetParam()); }
  Optimizer optimizer() const { return std::get<1>(GetParam()); }

  TargetGuard guard_;
};

TEST_P(UpdateTargets, GivesTheBitsOfTheDefinitionAtEverySize) {
  for (const size_t n : KernelSizes()) {
    CompareEach(n, 0);
    if (HasFailure()) return;
  }
}

TEST_P(UpdateTargets, GivesTheBitsOfTheDefinitionAtEveryMisalignment) {
  for (size_t offset = 1; offset <= 16; ++offset) {
    for (const size_t n : {5u, 64u, 131u}) {
      CompareEach(n, offset);
      if (HasFailure()) return;
    }
  }
}

TEST_P(UpdateTargets, SplittingTheRangeChangesNoBit) {
  constexpr size_t kElems = 3001;
  const AdamData data(kElems, kSeed);
  guard_.Force(target());
  for (const StateFormat format : kStateFormats) {
    SCOPED_TRACE(::testing::Message() << "format " << ::forebay::testing::NameOf(format));
    const auto whole = RunSteps(data, {optimizer(), format, kElems, 0, DType::kFloat32}, 2);
    std::mt19937 random(kSeed);
    Result pieces(kElems, 0);
    std::vector<std::byte> weights(kElems * protocol::SizeBytes(format.weights));
    pieces.state.Assign(data);
    for (const uint64_t t : {1u, 2u}) {
      for (size_t begin = 0; begin < kElems;) {
        const size_t request =
            format == StateFormat::kInt8 ? random() % 4 * kScaleElems : random() % 97;
        const size_t n = std::min<size_t>(kElems - begin, request);
        const StepScalars scalars = ScalarsOf(optimizer(), t);
        const Gradient grad = {data.grad.data() + begin, DType::kFloat32};
        StatePlanes planes = pieces.state.Planes(format);
        planes.new_weights = weights.data();
        planes = Advance(planes, format, begin);
        if (HasWeightsPass(optimizer()))
          UpdateWeights(optimizer(), format, scalars, n, grad, planes);
        pieces.bad += Update(optimizer(), format, scalars, n, grad, planes);
        begin += n;
      }
    }
    pieces.ExpectEquals(*whole);
    if (HasWeightsPass(optimizer())) {
      EXPECT_EQ(std::memcmp(weights.data(), pieces.state.Planes(format).weights, weights.size()),
                0);
    }
  }
}

// The largest master that does not count as bad. The next float rounds to an infinite weight.
float LargestOf(StateFormat format) {
  if (format == StateFormat::kFp32) return std::numeric_limits<float>::max();
  return std::bit_cast<float>(format == StateFormat::kFp32Fp16 ? 0x477FEFFFu : 0x7F7F7FFFu);
}

TEST_P(UpdateTargets, CountsMastersThatAreNotFiniteOrRoundToInfinity) {
  guard_.Force(target());
  const StepScalars still = MakeStepScalars(
      optimizer(), {.lr = 0, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0}, 1,
      1.0f);
  for (const StateFormat format : kStateFormats) {
    for (const size_t n : {1u, 16u, 19u, 33u, 128u, 131u}) {
      SCOPED_TRACE(::testing::Message()
                   << "format " << ::forebay::testing::NameOf(format) << ", n " << n);
      AdamData data(n, kSeed);
      std::fill(data.w.begin(), data.w.end(), 1.0f);
      std::fill(data.m.begin(), data.m.end(), 0.0f);
      std::fill(data.grad.begin(), data.grad.end(), 1.0f);
      const auto count = [&](float first, float last) {
        data.w[0] = first;
        data.w[n - 1] = last;
        StateArrays state(n, 0);
        state.Assign(data);
        return Update(optimizer(), format, still, n, {data.grad.data(), DType::kFloat32},
                      state.Planes(format));
      };
      const float largest = LargestOf(format);
      const float above = std::nextafter(largest, std::numeric_limits<float>::infinity());
      const float inf = std::numeric_limits<float>::infinity();
      EXPECT_EQ(count(largest, largest), 0u);
      EXPECT_EQ(count(largest, above), 1u);
      EXPECT_EQ(count(-inf, inf), n == 1 ? 1u : 2u);
      EXPECT_EQ(count(std::numeric_limits<float>::quiet_NaN(), -above), n == 1 ? 1u : 2u);
    }
  }
}

TEST_P(UpdateTargets, TheWeightsPassRoundsMastersThatAreNotFiniteAsTheUpdateDoes) {
  if (!HasWeightsPass(optimizer())) {
    EXPECT_DEATH(UpdateWeights(optimizer(), StateFormat::kExact, {}, 0, {}, {}), "CHECK failed");
    return;
  }
  constexpr size_t kElems = 200;
  AdamData data(kElems, kSeed);
  const float inf = std::numeric_limits<float>::infinity();
  const float largest = std::numeric_limits<float>::max();
  const float special[] = {inf, -inf, largest, -largest, std::numeric_limits<float>::quiet_NaN()};
  for (size_t i = 0; i < kElems; ++i) data.w[i] = special[i % std::size(special)];
  guard_.Force(target());
  for (const StateFormat format : kStateFormats) {
    SCOPED_TRACE(::testing::Message() << "format " << ::forebay::testing::NameOf(format));
    (void)RunSteps(data, {optimizer(), format, kElems, 0, DType::kFloat32}, 1);
  }
}

// Shows that a store to the copies of the test above does not pass unnoticed.
TEST(ReadOnlyPlanesDeathTest, AStoreEndsTheProcess) {
  const AdamData data(1, kSeed);
  ReadOnlyPlanes memory;
  float* const copy = memory.Copy(data.w.data(), 1, sizeof(float));
  EXPECT_EQ(*copy, data.w[0]);
  EXPECT_DEATH(*static_cast<volatile float*>(copy) = 1, "");
  EXPECT_DEATH((void)*static_cast<volatile float*>(copy + 1), "");
}

INSTANTIATE_TEST_SUITE_P(Supported, UpdateTargets,
                         ::testing::Combine(::testing::ValuesIn(SupportedTargets()),
                                            ::testing::ValuesIn(kAllOptimizers)),
                         [](const auto& run) {
                           return std::get<0>(run.param) + "_" + NameOf(std::get<1>(run.param));
                         });

}  // namespace
}  // namespace forebay::cpu_adam
