// Goal    Every instruction set gives the bits of the scalar definition, in place and out of place,
//         at every size, tail and misalignment, and writes nothing else.
// Method  Run two steps on each target that this processor has and on "scalar", on the same seeded
//         data with denormals and overflows; compare all planes and the count of bad masters bit by
//         bit.

#include <tuple>

#include "cpu_adam/adam_kernel.h"
#include "gtest/gtest.h"
#include "tests/cpu_adam/planes.h"

namespace forebay::cpu_adam {
namespace {

using ::forebay::testing::AdamData;
using ::forebay::testing::GuardedArray;
using ::forebay::testing::KernelSizes;
using ::forebay::testing::SameBits;
using ::forebay::testing::TargetGuard;

constexpr uint32_t kSeed = 20251121;

enum class Place { kIn, kOut };

struct Case {
  size_t n;
  size_t offset;  // elements
  GradType grad;
  Place place;
};

std::ostream& operator<<(std::ostream& out, const Case& run) {
  return out << "n " << run.n << ", offset " << run.offset << ", gradient "
             << (run.grad == GradType::kFp32 ? "fp32" : "bf16")
             << (run.place == Place::kIn ? ", in place" : ", out of place");
}

struct Result {
  std::vector<float> w, m, v;
  std::vector<uint16_t> param;
  std::vector<int16_t> remainder;
  uint64_t bad = 0;

  void ExpectEquals(const Result& other) const {
    EXPECT_TRUE(SameBits(w, other.w));
    EXPECT_TRUE(SameBits(m, other.m));
    EXPECT_TRUE(SameBits(v, other.v));
    EXPECT_EQ(param, other.param);
    EXPECT_EQ(remainder, other.remainder);
    EXPECT_EQ(bad, other.bad);
  }
};

AdamScalars ScalarsOf(uint64_t t) {
  return MakeAdamScalars({.lr = 3e-4, .weight_decay = 0.1}, t, t == 1 ? 1.0f : 0.37f);
}

struct GuardedGrad {
  GuardedGrad(const AdamData& data, const Case& run)
      : wide(run.n, run.offset), narrow(run.n, run.offset), type(run.grad) {
    wide.Assign(data.grad);
    narrow.Assign(data.grad16);
  }
  Gradient get() {
    if (type == GradType::kFp32) return {wide.data(), type};
    return {narrow.data(), type};
  }
  GuardedArray<float> wide;
  GuardedArray<uint16_t> narrow;
  GradType type;
};

struct Fp32Arrays {
  explicit Fp32Arrays(const Case& run)
      : w(run.n, run.offset), m(run.n, run.offset), v(run.n, run.offset) {}
  Fp32Planes planes() { return {w.data(), m.data(), v.data()}; }
  void ExpectGuards() const {
    EXPECT_TRUE(w.GuardsIntact() && m.GuardsIntact() && v.GuardsIntact());
  }
  GuardedArray<float> w, m, v;
};

Result RunFp32(const AdamData& data, const Case& run) {
  GuardedGrad grad(data, run);
  Fp32Arrays state(run);
  Fp32Arrays other(run);
  state.w.Assign(data.w);
  state.m.Assign(data.m);
  state.v.Assign(data.v);
  Result result;
  if (run.place == Place::kIn) {
    result.bad = AdamStepFp32(ScalarsOf(1), run.n, grad.get(), state.planes());
    result.bad += AdamStepFp32(ScalarsOf(2), run.n, grad.get(), state.planes());
  } else {
    result.bad = AdamStepFp32To(ScalarsOf(1), run.n, grad.get(), state.planes(), other.planes());
    EXPECT_TRUE(run.n == 0 || SameBits(state.w.data()[0], data.w[0])) << "the source stays";
    result.bad += AdamStepFp32To(ScalarsOf(2), run.n, grad.get(), other.planes(), state.planes());
  }
  state.ExpectGuards();
  other.ExpectGuards();
  result.w = state.w.Copy();
  result.m = state.m.Copy();
  result.v = state.v.Copy();
  return result;
}

struct ExactArrays {
  explicit ExactArrays(const Case& run)
      : param(run.n, run.offset),
        remainder(run.n, run.offset),
        m(run.n, run.offset),
        v(run.n, run.offset) {}
  ExactPlanes planes() { return {param.data(), remainder.data(), m.data(), v.data()}; }
  void ExpectGuards() const {
    EXPECT_TRUE(param.GuardsIntact() && remainder.GuardsIntact() && m.GuardsIntact() &&
                v.GuardsIntact());
  }
  GuardedArray<uint16_t> param;
  GuardedArray<int16_t> remainder;
  GuardedArray<float> m, v;
};

Result RunExact(const AdamData& data, const Case& run) {
  GuardedGrad grad(data, run);
  ExactArrays state(run);
  ExactArrays other(run);
  SplitMaster(run.n, data.w.data(), state.param.data(), state.remainder.data());
  state.m.Assign(data.m);
  state.v.Assign(data.v);
  Result result;
  if (run.place == Place::kIn) {
    result.bad = AdamStepExact(ScalarsOf(1), run.n, grad.get(), state.planes());
    result.bad += AdamStepExact(ScalarsOf(2), run.n, grad.get(), state.planes());
  } else {
    result.bad = AdamStepExactTo(ScalarsOf(1), run.n, grad.get(), state.planes(), other.planes());
    result.bad += AdamStepExactTo(ScalarsOf(2), run.n, grad.get(), other.planes(), state.planes());
  }
  state.ExpectGuards();
  other.ExpectGuards();
  result.param = state.param.Copy();
  result.remainder = state.remainder.Copy();
  result.m = state.m.Copy();
  result.v = state.v.Copy();
  return result;
}

class AdamTargets : public ::testing::TestWithParam<std::string> {
 protected:
  using RunFn = Result(const AdamData&, const Case&);

  void CompareWithScalar(RunFn run_step, const Case& run) {
    SCOPED_TRACE(::testing::Message() << GetParam() << ", " << run << ", seed " << kSeed);
    const AdamData data(std::max<size_t>(run.n, 1), kSeed + static_cast<uint32_t>(run.n));
    target_.Force("scalar");
    const Result expected = run_step(data, {run.n, run.offset, run.grad, Place::kIn});
    target_.Force(GetParam());
    run_step(data, run).ExpectEquals(expected);
  }

  TargetGuard target_;
};

TEST_P(AdamTargets, GivesTheBitsOfTheDefinitionAtEverySize) {
  for (const size_t n : KernelSizes()) {
    for (const GradType grad : {GradType::kFp32, GradType::kBf16}) {
      for (const Place place : {Place::kIn, Place::kOut}) {
        CompareWithScalar(RunFp32, {n, 0, grad, place});
        CompareWithScalar(RunExact, {n, 0, grad, place});
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(AdamTargets, GivesTheBitsOfTheDefinitionAtEveryMisalignment) {
  for (size_t offset = 1; offset <= 16; ++offset) {
    for (const size_t n : {5u, 64u, 131u}) {
      for (const GradType grad : {GradType::kFp32, GradType::kBf16}) {
        for (const Place place : {Place::kIn, Place::kOut}) {
          CompareWithScalar(RunFp32, {n, offset, grad, place});
          CompareWithScalar(RunExact, {n, offset, grad, place});
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(AdamTargets, SplittingTheRangeChangesNoBit) {
  constexpr size_t kElems = 3001;
  const AdamData data(kElems, kSeed);
  target_.Force(GetParam());
  for (const GradType grad : {GradType::kFp32, GradType::kBf16}) {
    const Result whole = RunFp32(data, {kElems, 0, grad, Place::kIn});
    std::mt19937 random(kSeed);
    std::vector<float> w = data.w, m = data.m, v = data.v;
    uint64_t bad = 0;
    for (const uint64_t t : {1u, 2u}) {
      for (size_t begin = 0; begin < kElems;) {
        const size_t n = std::min<size_t>(kElems - begin, random() % 97);
        const Gradient g = grad == GradType::kFp32 ? Gradient{data.grad.data() + begin, grad}
                                                   : Gradient{data.grad16.data() + begin, grad};
        bad += AdamStepFp32(ScalarsOf(t), n, g, {&w[begin], &m[begin], &v[begin]});
        begin += n;
      }
    }
    const Result pieces = {.w = w, .m = m, .v = v, .param = {}, .remainder = {}, .bad = bad};
    pieces.ExpectEquals(whole);
  }
}

TEST_P(AdamTargets, CountsMastersThatAreNotFiniteOrRoundToInfinity) {
  target_.Force(GetParam());
  const float largest = std::numeric_limits<float>::max();
  const float last_finite16 = std::bit_cast<float>(0x7F7F7FFFu);  // rounds to the largest bfloat16
  const AdamScalars still = MakeAdamScalars({.lr = 0, .weight_decay = 0}, 1, 1.0f);
  for (const size_t n : {1u, 16u, 19u, 33u}) {
    std::vector<float> w(n, 1.0f), m(n, 0.0f), v(n, 1.0f), g(n, 0.0f);
    w[n - 1] = largest;
    w[0] = n > 1 ? last_finite16 : largest;
    std::vector<uint16_t> param(n);
    std::vector<int16_t> remainder(n);
    SplitMaster(n, w.data(), param.data(), remainder.data());
    const Gradient grad = {g.data(), GradType::kFp32};
    EXPECT_EQ(AdamStepFp32(still, n, grad, {w.data(), m.data(), v.data()}), 0u);
    EXPECT_EQ(AdamStepExact(still, n, grad, {param.data(), remainder.data(), m.data(), v.data()}),
              1u)
        << "the largest float32 rounds to an infinite bfloat16";
    w[n - 1] = std::numeric_limits<float>::infinity();
    w[n / 2] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(AdamStepFp32(still, n, grad, {w.data(), m.data(), v.data()}), n == 1 ? 1u : 2u);
  }
}

INSTANTIATE_TEST_SUITE_P(Supported, AdamTargets, ::testing::ValuesIn(SupportedTargets()),
                         [](const auto& target) { return target.param; });

}  // namespace
}  // namespace forebay::cpu_adam
