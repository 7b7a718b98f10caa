// SPDX-License-Identifier: Apache-2.0
// Goal    LAMB matches its paper in every format, for every split of a parameter and every instruction set.
// Method  Recompute a step of a whole parameter in double from its new moments and
//         compare within a bound; run it in pieces and on every target, and compare bit by bit.

#include "cpu_adam/lamb.h"

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu_adam/step_scalars.h"
#include "gtest/gtest.h"
#include "tests/cpu_adam/optimizers.h"
#include "tests/cpu_adam/planes.h"
#include "tests/cpu_adam/state_arrays.h"

namespace forebay::cpu_adam {
namespace {

using ::forebay::testing::AdamData;
using ::forebay::testing::StateArrays;
using ::forebay::testing::TargetGuard;
using protocol::HyperParams;
using protocol::kStateFormats;

constexpr size_t kElems = 3 * kSumChunkElems + 129;
constexpr HyperParams kHyper = {
    .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};

AdamData CleanData() {
  AdamData data(kElems, 5);
  for (size_t i = 0; i < kElems; ++i) {
    data.grad[i] = std::sin(static_cast<float>(i));
    data.m[i] = 1e-3f * std::cos(static_cast<float>(i));
    data.v[i] = 1e-6f * (2 + std::cos(static_cast<float>(i)));
  }
  return data;
}

enum class Saves { kNo, kYes };

// Runs a step in pieces that end at multiples of `piece` elements.
float RunStep(StateFormat format, size_t piece, StateArrays& state, Saves saves = Saves::kNo) {
  const AdamData data = CleanData();
  state.Assign(data);
  const StepScalars scalars = MakeStepScalars(Optimizer::kLamb, kHyper, 2, 1.0f);
  const StatePlanes planes = state.Planes(format);
  LambSums sums;
  for (size_t begin = 0; begin < kElems; begin += piece) {
    const size_t n = std::min(piece, kElems - begin);
    LambSums of_piece = SumLamb(format, scalars, n, {data.grad.data() + begin, DType::kFloat32},
                                Advance(planes, format, begin));
    of_piece.Merge(sums);  // reverses the order of the sum
    sums = of_piece;
  }
  const float trust = TrustRatio(sums);
  std::vector<std::byte> memory(2 * SavedSlotBytes(Optimizer::kLamb, format) + 64);
  std::atomic<uint64_t> done = 0;
  SavedElems saved{.done = &done};
  saved.slots = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) &
                                             ~uintptr_t{63});
  for (size_t begin = 0; begin < kElems; begin += piece) {
    EXPECT_EQ(UpdateLamb(format, scalars, trust, std::min(piece, kElems - begin),
                         {data.grad.data() + begin, DType::kFloat32},
                         Advance(planes, format, begin), saves == Saves::kYes ? &saved : nullptr),
              0u);
  }
  return trust;
}

TEST(Lamb, PiecesAndTargetsGiveTheBitsOfTheDefinition) {
  for (const StateFormat format : kStateFormats) {
    TargetGuard guard;
    guard.Force("scalar");
    StateArrays whole(kElems, 0);
    const float trust = RunStep(format, kElems, whole);
    for (const std::string& target : SupportedTargets()) {
      guard.Force(target);
      for (const size_t piece : {kElems, kSumChunkElems, 2 * kSumChunkElems}) {
        SCOPED_TRACE(::testing::Message()
                     << target << ", format " << ::forebay::testing::NameOf(format)
                     << ", pieces of " << piece);
        StateArrays state(kElems, 0);
        EXPECT_EQ(RunStep(format, piece, state, piece == kElems ? Saves::kYes : Saves::kNo), trust);
        state.ExpectEquals(whole);
        state.ExpectGuards();
      }
    }
  }
}

// w and u are sums of two terms of at most 0.2 and 20 here. The root, the product, the quotient and
// the sum that make u round four times, which the ratio scales to the size of w; the ratio itself
// rounds once, and the last sum once more: 8 times 2^-24 of the step's largest term, and of w. Each
// sum of squares is off by 1.001·2^-20 at most (stream_kernel.h), the ratio of their roots too.
TEST(Lamb, IsAlgorithmTwoOfThePaperInDouble) {
  StateArrays state(kElems, 0), before(kElems, 0);
  before.Assign(CleanData());
  const float trust = RunStep(StateFormat::kFp32, kElems, state);
  const double bias1 = 1 - std::pow(kHyper.beta1, 2), bias2 = 1 - std::pow(kHyper.beta2, 2);
  std::vector<double> u(kElems);
  double weight = 0, update = 0;
  for (size_t i = 0; i < kElems; ++i) {
    const double w = before.weights.data()[i];
    const double m = state.moments[0].data()[i], v = state.moments[1].data()[i];
    u[i] = m / bias1 / (std::sqrt(v / bias2) + kHyper.eps) + kHyper.weight_decay * w;
    weight += w * w;
    update += u[i] * u[i];
  }
  const double ratio = std::sqrt(weight / update);
  EXPECT_NEAR(trust, ratio, ratio * 1e-6);
  for (size_t i = 0; i < kElems; ++i) {
    const double w = before.weights.data()[i];
    const double moved = w - kHyper.lr * ratio * u[i];
    const double step = kHyper.lr * ratio * std::abs(u[i]);
    const double bound =
        8 * 0x1p-24 * (std::abs(w) + step + kHyper.lr * ratio) + 1.001 * 0x1p-20 * step;
    ASSERT_NEAR(state.weights.data()[i], moved, bound) << "element " << i;
  }
}

TEST(Lamb, ANormOfZeroMakesTheRatioOne) {
  LambSums sums;
  EXPECT_EQ(TrustRatio(sums), 1.0f);
  sums.weight.AddChunk(4.0);
  EXPECT_EQ(TrustRatio(sums), 1.0f);
  sums.update.AddChunk(16.0);
  EXPECT_EQ(TrustRatio(sums), 0.5f);
}

}  // namespace
}  // namespace forebay::cpu_adam
