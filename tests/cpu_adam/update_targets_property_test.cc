// Goal    Every instruction set gives the bits of the scalar definition for every rule and format,
//         in place and out of place, at every size, tail and misalignment, and writes nothing else.
// Method  Run two steps on each target that this processor has and on "scalar", on the same seeded
//         data with denormals and overflows; compare all planes and the count of bad masters bit by
//         bit.

#include <limits>
#include <memory>
#include <tuple>

#include "cpu_adam/stream_kernel.h"
#include "cpu_adam/update_kernel.h"
#include "gtest/gtest.h"
#include "tests/cpu_adam/planes.h"
#include "tests/cpu_adam/rules.h"

namespace forebay::cpu_adam {
namespace {

using ::forebay::testing::AdamData;
using ::forebay::testing::GuardedArray;
using ::forebay::testing::KernelSizes;
using ::forebay::testing::kGradTypes;
using ::forebay::testing::kRules;
using ::forebay::testing::NameOf;
using ::forebay::testing::SameBits;
using ::forebay::testing::TargetGuard;

constexpr uint32_t kSeed = 20251121;
constexpr StateFormat kFormats[] = {StateFormat::kFp32, StateFormat::kExact};

enum class Place { kIn, kOut };

struct Case {
  Rule rule;
  StateFormat format;
  size_t n;
  size_t offset;  // elements
  GradType grad;
  Place place;
};

std::ostream& operator<<(std::ostream& out, const Case& run) {
  return out << NameOf(run.rule) << ", format " << static_cast<int>(run.format) << ", n " << run.n
             << ", offset " << run.offset << ", gradient type " << static_cast<int>(run.grad)
             << (run.place == Place::kIn ? ", in place" : ", out of place");
}

StepScalars ScalarsOf(Rule rule, uint64_t t) {
  const Hyper hyper = {.lr = 3e-4,
                       .weight_decay = 0.1,
                       .momentum = 0.9,
                       .dampening = 0.1,
                       .lr_decay = 1e-2,
                       .initial_accumulator = 0.1};
  return MakeStepScalars(rule, hyper, t, t == 1 ? 1.0f : 0.37f);
}

// Everything a state and its gradient can have, guarded.
struct Arrays {
  Arrays(size_t n, size_t offset)
      : image(n, offset),
        image16(n, offset),
        remainder(n, offset),
        moments{GuardedArray<float>(n, offset), GuardedArray<float>(n, offset),
                GuardedArray<float>(n, offset)} {}

  void Assign(const AdamData& data) {
    image.Assign(data.w);
    SplitMaster(image.size(), data.w.data(), image16.data(), remainder.data());
    moments[0].Assign(data.m);
    moments[1].Assign(data.v);
    moments[2].Assign(data.v);
  }

  StatePlanes Planes(StateFormat format) {
    void* served = format == StateFormat::kFp32 ? static_cast<void*>(image.data()) : image16.data();
    return {served, remainder.data(), {moments[0].data(), moments[1].data(), moments[2].data()}};
  }

  void ExpectGuards() const {
    EXPECT_TRUE(image.GuardsIntact() && image16.GuardsIntact() && remainder.GuardsIntact());
    for (const auto& moment : moments) EXPECT_TRUE(moment.GuardsIntact());
  }

  GuardedArray<float> image;
  GuardedArray<uint16_t> image16;
  GuardedArray<int16_t> remainder;
  GuardedArray<float> moments[kMomentsMax];
};

struct Result {
  std::vector<float> image;
  std::vector<uint16_t> image16;
  std::vector<int16_t> remainder;
  std::vector<std::vector<float>> moments;
  uint64_t bad = 0;

  Result(Arrays& arrays, Rule rule, uint64_t bad_masters)
      : image(arrays.image.Copy()),
        image16(arrays.image16.Copy()),
        remainder(arrays.remainder.Copy()),
        bad(bad_masters) {
    for (size_t i = 0; i < MomentCount(rule); ++i) moments.push_back(arrays.moments[i].Copy());
  }

  void ExpectEquals(const Result& other) const {
    EXPECT_TRUE(SameBits(image, other.image));
    EXPECT_EQ(image16, other.image16);
    EXPECT_EQ(remainder, other.remainder);
    ASSERT_EQ(moments.size(), other.moments.size());
    for (size_t i = 0; i < moments.size(); ++i) {
      EXPECT_TRUE(SameBits(moments[i], other.moments[i])) << "moment " << i;
    }
    EXPECT_EQ(bad, other.bad);
  }
};

struct GuardedGrad {
  GuardedGrad(const AdamData& data, const Case& run)
      : wide(run.n, run.offset), narrow(run.n, run.offset), type(run.grad) {
    wide.Assign(data.grad);
    narrow.Assign(type == GradType::kFp16 ? data.fp16 : data.bf16);
  }
  Gradient get() {
    if (type == GradType::kFp32) return {wide.data(), type};
    return {narrow.data(), type};
  }
  GuardedArray<float> wide;
  GuardedArray<uint16_t> narrow;
  GradType type;
};

Result RunTwoSteps(const AdamData& data, const Case& run) {
  GuardedGrad grad(data, run);
  Arrays state(run.n, run.offset);
  Arrays other(run.n, run.offset);
  state.Assign(data);
  other.Assign(data);  // what a format or rule does not have is equal in every result
  const StatePlanes here = state.Planes(run.format), there = other.Planes(run.format);
  uint64_t bad = 0;
  for (const uint64_t t : {1u, 2u}) {
    const StepScalars scalars = ScalarsOf(run.rule, t);
    if (run.place == Place::kIn) {
      bad += Update(run.rule, run.format, scalars, run.n, grad.get(), here);
    } else if (t == 1) {
      bad += UpdateTo(run.rule, run.format, scalars, run.n, grad.get(), here, there);
      EXPECT_TRUE(run.n == 0 || SameBits(state.image.data()[0], data.w[0])) << "the source stays";
    } else {
      bad += UpdateTo(run.rule, run.format, scalars, run.n, grad.get(), there, here);
    }
  }
  state.ExpectGuards();
  other.ExpectGuards();
  return {state, run.rule, bad};
}

using TargetAndRule = std::tuple<std::string, Rule>;

class UpdateTargets : public ::testing::TestWithParam<TargetAndRule> {
 protected:
  void CompareWithScalar(Case run) {
    SCOPED_TRACE(::testing::Message() << target() << ", " << run << ", seed " << kSeed);
    const AdamData data(std::max<size_t>(run.n, 1), kSeed + static_cast<uint32_t>(run.n));
    guard_.Force(target());
    const Result result = RunTwoSteps(data, run);
    guard_.Force("scalar");
    run.place = Place::kIn;
    result.ExpectEquals(RunTwoSteps(data, run));
  }

  void CompareEach(size_t n, size_t offset) {
    for (const StateFormat format : kFormats) {
      for (const GradType grad : kGradTypes) {
        for (const Place place : {Place::kIn, Place::kOut}) {
          CompareWithScalar({rule(), format, n, offset, grad, place});
          if (HasFailure()) return;
        }
      }
    }
  }

  const std::string& target() const { return std::get<0>(GetParam()); }
  Rule rule() const { return std::get<1>(GetParam()); }

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
  for (const StateFormat format : kFormats) {
    const Result whole =
        RunTwoSteps(data, {rule(), format, kElems, 0, GradType::kFp32, Place::kIn});
    std::mt19937 random(kSeed);
    Arrays pieces(kElems, 0);
    pieces.Assign(data);
    uint64_t bad = 0;
    for (const uint64_t t : {1u, 2u}) {
      for (size_t begin = 0; begin < kElems;) {
        const size_t n = std::min<size_t>(kElems - begin, random() % 97);
        StatePlanes planes = {pieces.image.data() + begin, pieces.remainder.data() + begin, {}};
        if (format == StateFormat::kExact) planes.image = pieces.image16.data() + begin;
        for (size_t i = 0; i < kMomentsMax; ++i) {
          planes.moments[i] = pieces.moments[i].data() + begin;
        }
        bad += Update(rule(), format, ScalarsOf(rule(), t), n,
                      {data.grad.data() + begin, GradType::kFp32}, planes);
        begin += n;
      }
    }
    Result(pieces, rule(), bad).ExpectEquals(whole);
  }
}

TEST_P(UpdateTargets, CountsMastersThatAreNotFiniteOrRoundToInfinity) {
  guard_.Force(target());
  const float largest = std::numeric_limits<float>::max();
  const float last_finite16 = std::bit_cast<float>(0x7F7F7FFFu);  // rounds to the largest bfloat16
  const StepScalars still = MakeStepScalars(rule(), {.lr = 0, .weight_decay = 0}, 1, 1.0f);
  for (const size_t n : {1u, 16u, 19u, 33u}) {
    AdamData data(n, kSeed);
    std::fill(data.w.begin(), data.w.end(), 1.0f);
    data.w[n - 1] = largest;
    data.w[0] = n > 1 ? last_finite16 : largest;
    std::fill(data.grad.begin(), data.grad.end(), 1.0f);
    Arrays state(n, 0);
    state.Assign(data);
    const Gradient grad = {data.grad.data(), GradType::kFp32};
    EXPECT_EQ(Update(rule(), StateFormat::kFp32, still, n, grad, state.Planes(StateFormat::kFp32)),
              0u);
    EXPECT_EQ(
        Update(rule(), StateFormat::kExact, still, n, grad, state.Planes(StateFormat::kExact)), 1u)
        << "the largest float32 rounds to an infinite bfloat16";
    state.image.data()[n - 1] = std::numeric_limits<float>::infinity();
    state.image.data()[n / 2] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(Update(rule(), StateFormat::kFp32, still, n, grad, state.Planes(StateFormat::kFp32)),
              n == 1 ? 1u : 2u);
  }
}

INSTANTIATE_TEST_SUITE_P(Supported, UpdateTargets,
                         ::testing::Combine(::testing::ValuesIn(SupportedTargets()),
                                            ::testing::ValuesIn(kRules)),
                         [](const auto& run) {
                           return std::get<0>(run.param) + "_" + NameOf(std::get<1>(run.param));
                         });

}  // namespace
}  // namespace forebay::cpu_adam
