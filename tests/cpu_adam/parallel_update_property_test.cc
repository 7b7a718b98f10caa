// Goal    One region over any partitions gives the bits of the single call, for every optimizer and
//         format, in place and out of place, whatever the number of shares; the shares are equal
//         and are cut where a cut is allowed.
// Method  Allocate partitions of seeded sizes (0, 1, primes, around and far above a cut) with gaps into
//         one state; the oracle is one call over the whole state for each of two sets of scalars,
//         from which each partition takes its own. Shares run at once on threads of their own,
//         since a pool has no more threads than the machine has cores.

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "cpu_adam/parallel_update.h"
#include "cpu_adam/stream_kernel.h"
#include "gtest/gtest.h"
#include "tests/cpu_adam/optimizers.h"
#include "tests/cpu_adam/planes.h"
#include "tests/cpu_adam/state_arrays.h"

namespace forebay::cpu_adam {
namespace {

using ::forebay::testing::GuardedArray;
using ::forebay::testing::kAllOptimizers;
using ::forebay::testing::NameOf;
using ::forebay::testing::TopHalf;
using protocol::HyperParams;

constexpr uint32_t kSeed = 20251121;
constexpr size_t kBeginElems = 128;  // partitions begin on multiples of this, behind a gap
constexpr size_t kShareCounts[] = {1, 2, 3, 4, 7};
constexpr StateFormat kFormats[] = {StateFormat::kFp32, StateFormat::kExact};
constexpr std::chrono::seconds kDeadline(20);

struct Range {
  size_t begin, n;
  size_t end() const { return begin + n; }
};

std::vector<Range> Allocate(const std::vector<size_t>& sizes) {
  std::vector<Range> ranges;
  size_t begin = 0;
  for (const size_t n : sizes) {
    ranges.push_back({begin, n});
    begin = (begin + n + kBeginElems) / kBeginElems * kBeginElems;
  }
  return ranges;
}

std::vector<Range> RandomRanges(std::mt19937& random) {
  constexpr size_t kSizes[] = {0, 1, 2, 97, 251, 1009, 4095, 4096, 4097, 8191, 8192, 12289};
  std::vector<size_t> sizes;
  for (size_t left = 1 + random() % 10; left > 0; --left) {
    const bool large = random() % 4 == 0;
    sizes.push_back(large ? random() % 30000 : kSizes[random() % std::size(kSizes)]);
  }
  return Allocate(sizes);
}

struct Data {
  explicit Data(size_t n) {
    std::mt19937 random(kSeed);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < n; ++i) {
      const bool bad = random() % 1000 == 0;
      w.push_back(bad ? std::numeric_limits<float>::infinity() : 0.02f * normal(random));
      m.push_back(1e-3f * normal(random));
      v.push_back(1e-6f * std::abs(normal(random)));
      grad.push_back(0.1f * normal(random));
      grad16.push_back(TopHalf(grad.back()));
    }
  }
  Gradient GradAt(DType type, size_t i) const {
    if (type == DType::kFloat32) return {grad.data() + i, type};
    return {grad16.data() + i, type};
  }
  size_t size() const { return w.size(); }

  std::vector<float> w, m, v, grad;
  std::vector<uint16_t> grad16;
};

// Every plane that a optimizer and format can have.
class State {
 public:
  explicit State(const Data& data)
      : weights_(data.size(), 0),
        weights16_(data.size(), 0),
        remainder_(data.size(), 0),
        moments_{{data.size(), 0}, {data.size(), 0}, {data.size(), 0}} {
    weights_.Assign(data.w);
    SplitMaster(data.size(), data.w.data(), weights16_.data(), remainder_.data());
    moments_[0].Assign(data.m);
    moments_[1].Assign(data.v);
    moments_[2].Assign(data.v);
  }

  StatePlanes Planes(StateFormat format) {
    StatePlanes planes = {};
    planes.weights = format == StateFormat::kFp32 ? static_cast<void*>(weights_.data())
                                                  : static_cast<void*>(weights16_.data());
    planes.remainder = remainder_.data();
    for (size_t m = 0; m < kMomentsMax; ++m) planes.moments[m] = moments_[m].data();
    return planes;
  }

  bool SameIn(size_t begin, size_t end, State& other) {
    bool same = Same(weights_, other.weights_, begin, end) &&
                Same(weights16_, other.weights16_, begin, end) &&
                Same(remainder_, other.remainder_, begin, end);
    for (size_t m = 0; m < kMomentsMax; ++m) {
      same = same && Same(moments_[m], other.moments_[m], begin, end);
    }
    return same;
  }

 private:
  template <class T>
  static bool Same(GuardedArray<T>& a, GuardedArray<T>& b, size_t begin, size_t end) {
    return std::memcmp(a.data() + begin, b.data() + begin, (end - begin) * sizeof(T)) == 0;
  }

  GuardedArray<float> weights_;
  GuardedArray<uint16_t> weights16_;
  GuardedArray<int16_t> remainder_;
  GuardedArray<float> moments_[kMomentsMax];
};

StepScalars ScalarsOf(Optimizer optimizer, size_t set) {
  const HyperParams hyper = {.lr = set == 0 ? 3e-4 : 1e-2,
                             .beta1 = 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = set == 0 ? 0.1 : 0.0,
                             .momentum = 0.9,
                             .initial_accumulator_value = 0.1};
  return MakeStepScalars(optimizer, hyper, /*t=*/1 + set, set == 0 ? 1.0f : 0.37f);
}

uint64_t UpdateInShares(Optimizer optimizer, StateFormat format,
                        const std::vector<PartitionUpdate>& partitions, size_t count) {
  std::atomic<uint64_t> bad = 0;
  std::vector<std::thread> threads;
  for (size_t index = 0; index < count; ++index) {
    threads.emplace_back([&, index] {
      bad += UpdateShare(optimizer, format, partitions, {index, count});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return bad;
}

enum class Place { kIn, kOut };

struct Case {
  Optimizer optimizer;
  StateFormat format;
  Place place;
  DType grad;
};

// Runs `update` over partitions that take turns with the two sets of scalars, and compares every
// plane, every gap and the count of bad masters.
template <class Run>
void CompareWithSingleCalls(const Case& run, const std::vector<Range>& ranges, const Run& update) {
  const Data data(ranges.back().end() + kBeginElems);
  State from(data), other(data), before(data), counted(data);
  State expected[2] = {State(data), State(data)};
  for (size_t set = 0; set < 2; ++set) {
    Update(run.optimizer, run.format, ScalarsOf(run.optimizer, set), data.size(),
           data.GradAt(run.grad, 0), expected[set].Planes(run.format));
  }
  State& to = run.place == Place::kIn ? from : other;
  std::vector<PartitionUpdate> partitions;
  uint64_t bad = 0;
  for (const auto& [begin, n] : ranges) {
    const auto at = [&, b = begin](State& state) {
      return Advance(state.Planes(run.format), run.format, b);
    };
    partitions.push_back({.scalars = ScalarsOf(run.optimizer, partitions.size() % 2),
                          .n = n,
                          .grad = data.GradAt(run.grad, begin),
                          .from = at(from),
                          .to = at(to)});
    const PartitionUpdate& last = partitions.back();
    bad += Update(run.optimizer, run.format, last.scalars, n, last.grad, at(counted));
  }

  EXPECT_EQ(update(partitions), bad);
  for (size_t p = 0; p < ranges.size(); ++p) {
    const size_t gap_end = p + 1 < ranges.size() ? ranges[p + 1].begin : data.size();
    EXPECT_TRUE(to.SameIn(ranges[p].begin, ranges[p].end(), expected[p % 2])) << "partition " << p;
    EXPECT_TRUE(to.SameIn(ranges[p].end(), gap_end, before)) << "gap behind " << p;
  }
  if (run.place == Place::kOut) {
    EXPECT_TRUE(from.SameIn(0, data.size(), before)) << "the source stays";
  }
}

class ParallelUpdate : public ::testing::TestWithParam<Optimizer> {
 protected:
  template <class Run>
  void CompareEach(const Run& update) {
    std::mt19937 random(kSeed + static_cast<uint32_t>(GetParam()));
    for (const StateFormat format : kFormats) {
      for (const Place place : {Place::kIn, Place::kOut}) {
        for (const DType grad : {DType::kFloat32, DType::kBFloat16}) {
          SCOPED_TRACE(::testing::Message()
                       << NameOf(GetParam()) << ", format " << ::forebay::testing::NameOf(format)
                       << ", out " << (place == Place::kOut) << ", gradient "
                       << static_cast<int>(grad) << ", seed " << kSeed);
          CompareWithSingleCalls({GetParam(), format, place, grad}, RandomRanges(random),
                                 [&](const auto& all) { return update(format, all); });
          if (HasFailure()) return;
        }
      }
    }
  }
};

TEST_P(ParallelUpdate, AnyNumberOfSharesGivesTheBitsOfTheSingleCall) {
  for (const size_t count : kShareCounts) {
    SCOPED_TRACE(::testing::Message() << count << " shares");
    CompareEach([&](StateFormat format, const auto& partitions) {
      return UpdateInShares(GetParam(), format, partitions, count);
    });
  }
}

TEST_P(ParallelUpdate, APoolOfAnySizeGivesTheBitsOfTheSingleCall) {
  for (const int threads : {1, 2, 3, 4}) {
    const auto pool = WorkerPool::Create({.threads = threads});
    ASSERT_TRUE(pool.ok()) << pool.status();
    CompareEach([&](StateFormat format, const auto& partitions) {
      return UpdateAll(**pool, GetParam(), format, partitions);
    });
  }
}

TEST_P(ParallelUpdate, SharesOfAPartitionGiveItsBitsInEveryFormat) {
  constexpr size_t kElems = 5 * kCutElems + 77;
  const ::forebay::testing::AdamData data(kElems, kSeed);
  const StepScalars scalars = ScalarsOf(GetParam(), 1);
  for (const StateFormat format : protocol::kStateFormats) {
    SCOPED_TRACE(::testing::Message() << "format " << ::forebay::testing::NameOf(format));
    ::forebay::testing::StateArrays whole(kElems, 0);
    whole.Assign(data);
    const Gradient grad = data.Grad(DType::kBFloat16);
    const uint64_t bad = Update(GetParam(), format, scalars, kElems, grad, whole.Planes(format));
    for (const size_t count : kShareCounts) {
      ::forebay::testing::StateArrays state(kElems, 0);
      state.Assign(data);
      const StatePlanes planes = state.Planes(format);
      EXPECT_EQ(
          UpdateInShares(GetParam(), format, {{scalars, kElems, grad, planes, planes}}, count),
          bad);
      state.ExpectEquals(whole);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, ParallelUpdate, ::testing::ValuesIn(kAllOptimizers),
                         [](const auto& run) { return NameOf(run.param); });

// Elements of each partition that one share changes: all lie side by side.
std::vector<Range> RunOf(const std::vector<Range>& ranges, Share share) {
  const size_t n = ranges.back().end() + kBeginElems;
  std::vector<float> w(n, 0.0f), momentum(n, 0.0f), grad(n, 1.0f);
  std::vector<PartitionUpdate> partitions;
  const StepScalars scalars = MakeStepScalars(
      Optimizer::kSgd, {.lr = 1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0}, 1,
      1.0f);
  StatePlanes state = {};
  state.weights = w.data();
  state.moments[0] = momentum.data();
  for (const auto& [begin, size] : ranges) {
    const StatePlanes planes = Advance(state, StateFormat::kFp32, begin);
    partitions.push_back({scalars, size, {grad.data() + begin, DType::kFloat32}, planes, planes});
  }
  EXPECT_EQ(UpdateShare(Optimizer::kSgd, StateFormat::kFp32, partitions, share), 0u);
  std::vector<Range> run;
  for (const auto& [begin, size] : ranges) {
    Range changed = {0, 0};
    for (size_t i = 0; i < size; ++i) {
      if (w[begin + i] == 0.0f) continue;
      if (changed.n == 0) changed.begin = i;
      EXPECT_EQ(changed.end(), i) << "a share is one run";
      ++changed.n;
    }
    run.push_back(changed);
  }
  return run;
}

TEST(UpdateShareTest, SharesAreEqualUpToACutAndLeaveNothingOut) {
  std::mt19937 random(kSeed);
  for (int round = 0; round < 20; ++round) {
    const std::vector<Range> ranges = RandomRanges(random);
    size_t total = 0;
    for (const Range& range : ranges) total += range.n;
    for (const size_t count : kShareCounts) {
      SCOPED_TRACE(::testing::Message() << "round " << round << ", " << count << " shares");
      std::vector<size_t> done(ranges.size(), 0);
      for (size_t index = 0; index < count; ++index) {
        size_t mine = 0;
        const std::vector<Range> run = RunOf(ranges, {index, count});
        for (size_t p = 0; p < ranges.size(); ++p) {
          if (run[p].n == 0) continue;
          EXPECT_EQ(run[p].begin, done[p]) << "partition " << p;
          EXPECT_TRUE(run[p].end() % kCutElems == 0 || run[p].end() == ranges[p].n);
          done[p] += run[p].n;
          mine += run[p].n;
        }
        EXPECT_LE(mine, total / count + 1 + kCutElems);
        EXPECT_GE(mine + kCutElems, total / count);
      }
      for (size_t p = 0; p < ranges.size(); ++p) EXPECT_EQ(done[p], ranges[p].n);
    }
  }
}

TEST(UpdateShareTest, NoPartitionsAndEmptyOnesAreNoWork) {
  EXPECT_EQ(UpdateShare(Optimizer::kAdamW, StateFormat::kExact, {}, {0, 3}), 0u);
  const std::vector<PartitionUpdate> empty(3);
  for (size_t index = 0; index < 4; ++index) {
    EXPECT_EQ(UpdateShare(Optimizer::kAdamW, StateFormat::kExact, empty, {index, 4}), 0u);
  }
}

TEST(RunOnAllTest, TheCallerRunsWhatTheQueueHasNoRoomFor) {
  std::promise<void> started, gate;
  const std::shared_future<void> open = gate.get_future().share();
  auto pool = WorkerPool::Create({.threads = 1, .queue_tasks = 1});
  ASSERT_TRUE(pool.ok()) << pool.status();
  ASSERT_TRUE((*pool)->TryPost([&started, open] {
    started.set_value();
    open.wait_for(kDeadline);
  }));
  ASSERT_EQ(started.get_future().wait_for(kDeadline), std::future_status::ready);
  ASSERT_TRUE((*pool)->TryPost([] {}));
  std::vector<std::thread::id> ran;
  RunOnAll(**pool, [&](int task) {
    EXPECT_EQ(task, 0);
    ran.push_back(std::this_thread::get_id());
  });
  EXPECT_EQ(ran, std::vector{std::this_thread::get_id()});
  gate.set_value();
}

TEST(RunOnAllTest, EachTaskRunsOnceAndWhatItWroteIsSeen) {
  auto pool = WorkerPool::Create({});
  ASSERT_TRUE(pool.ok()) << pool.status();
  std::vector<int> runs(static_cast<size_t>((*pool)->threads()), 0);
  for (int round = 1; round <= 200; ++round) {
    RunOnAll(**pool, [&](int task) { ++runs[static_cast<size_t>(task)]; });
    for (const int count : runs) ASSERT_EQ(count, round);
  }
}

}  // namespace
}  // namespace forebay::cpu_adam
